"""``make kernel-counts``: how many kernels one run starts, ours beside stock's.

    python -m bench.kernel_counts [--document docs/performance.md] [--networks tv_resnet50 ...]

Stock is counted three times: its LegalizeOps, FuseOps and FuseTIR on the module as imported; the same on the
module in this package's inference form, which spares stock what importers write clumsily; and there once more after
`FuseOpsByPattern` took the words that our table finds, with its own check for values that leave. The peer is stock by
itself, the fewer of the first two; the third stands beside it, since it is our table that finds its words.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from bench import ROOT
from bench.match import fuse, stock_rows
from bench.table import table, write_block
from bench.variants import build_variant
from fusion_patterns.compiler import compile_module
from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.normalise import normalise
from fusion_patterns.reference import stock_launches
from fusion_patterns.run import manifest as m
from fusion_patterns.table import load_table

__all__ = ["Count", "count", "labels_of", "main"]

DOCUMENT = ROOT / "docs" / "performance.md"
NETWORKS = (
    "tv_resnet50", "tv_mobilenet_v2", "tv_mobilenet_v3_large", "tv_efficientnet_b0", "tv_densenet121",
    "tv_inception_v3",
    "tv_squeezenet1_1", "ol_shufflenet", "tv_shufflenet_v2_x1_0", "os_nudenet_yolov8n", "ow_ppocrv4_det",
)  # fmt: skip


@dataclass
class Count:
    """Launches of one network.

    ``raw``, ``normal``, ``by_pattern``: stock's. ``device``: what those of ``normal`` become on a GPU.
    ``labels``: ours by what they are for.
    """

    name: str
    ours: int
    conversions: int
    raw: int | None
    normal: int | None
    by_pattern: int | None
    device: int | None = None
    labels: Counter[str] = field(default_factory=Counter)

    @property
    def peer(self) -> int | None:
        """The fewest launches that stock needs by itself."""
        return min((n for n in (self.raw, self.normal) if n is not None), default=None)


def count(name: str, mod: tvm.IRModule) -> Count:
    """Count the launches of one module."""
    compiled = compile_module(mod)
    normal = normalise(mod)
    report = compiled.report
    return Count(
        name,
        report.launches,
        report.conversions + report.copies,
        _launches(mod),
        _launches(normal),
        _launches(_by_pattern(normal)),
        _device_kernels(normal),
        labels_of(compiled.manifest),
    )


def _launches(mod: tvm.IRModule) -> int | None:
    try:
        return stock_launches(mod)
    except Exception as error:  # TVM raises many kinds
        print(f"stock can't count this: {str(error).strip().splitlines()[-1][:200]}", file=sys.stderr)
        return None


def _device_kernels(mod: tvm.IRModule) -> int | None:
    """Kernels that stock's launches are once they are scheduled for a GPU: one may be several."""
    try:
        return sum(labels_of(build_variant("stock-buffers", mod)).values())
    except FusionPatternsError as error:
        print(f"stock doesn't build this for the device: {error}", file=sys.stderr)
        return None


def _by_pattern(mod: tvm.IRModule) -> tvm.IRModule:
    """*mod* with the words of our table taken by stock's pass, as functions that FuseTIR makes kernels of."""
    fused = fuse(stock_rows(mod, load_table()))(mod)
    for variable, func in list(fused.functions_items()):
        if isinstance(func, relax.Function) and "Composite" in (func.attrs or {}):
            fused[variable] = func.with_attr("Primitive", 1)
    return fused


def labels_of(manifest: m.Manifest) -> Counter[str]:
    """Launches of a run by their label: the row, the conversion, or the kernel that stock TVM made."""
    labels: Counter[str] = Counter()
    for function in manifest.functions.values():
        for step in m.all_steps(function.body):
            if isinstance(step, m.Launch):
                labels[step.label] += 1
    return labels


def render(counts: list[Count]) -> str:
    """The text of the block."""
    rows = [
        (
            f"`{c.name}`",
            c.ours,
            c.conversions,
            c.raw,
            c.normal,
            c.by_pattern,
            c.device,
            f"{c.ours / c.peer:.2f}" if c.peer else "",
            f"{c.ours / c.by_pattern:.2f}" if c.by_pattern else "",
            f"{c.ours / c.device:.2f}" if c.device else "",
        )
        for c in counts
    ]
    header = (
        "network", "ours", "of them conversions", "stock", "stock, inference form", "by pattern, then stock",
        "on the device", "ours/stock", "ours/by pattern", "ours/on the device",
    )  # fmt: skip
    fewer = sum(1 for c in counts if c.peer is not None and c.ours < c.peer)
    below = sum(1 for c in counts if c.device is not None and c.ours < c.device)
    text = [
        "Written by `make kernel-counts`: kernels that one run starts, reshapes as views not counted. *ours*: "
        "kernels on the device, layout conversions included. *stock*: launches after its LegalizeOps, FuseOps and "
        "FuseTIR on the module as imported; *inference form*: the same after our normalisation; *by pattern*: "
        "there, after `FuseOpsByPattern` took the words that our table finds, with its check for values that "
        "leave. A launch of stock's may become several kernels on a GPU; *on the device* are the kernels that "
        "those of *inference form* are once they are scheduled. They read and write buffers, so stock needs no "
        "conversions.\n",
        table(header, rows),
        f"Fewer than stock's launches, the fewer of both its columns, on {fewer} of {len(counts)}; fewer than its "
        f"kernels on the device on {below}.\n",
    ]
    more = [c for c in counts if c.peer is None or c.ours >= c.peer]
    if more:
        lines = [(f"`{c.name}`", _listed(c.labels)) for c in more]
        text += [
            "What is launched where they are not fewer than stock's launches:\n",
            table(("network", "launches"), lines),
        ]
    return "\n".join(text)


def _listed(labels: Counter[str]) -> str:
    return ", ".join(f"{number} {label}" for label, number in labels.most_common())


def main(arguments: list[str] | None = None) -> int:
    """Count, and write the block *Kernel counts* of the document."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_counts")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args(arguments)
    import networks

    entries: dict[str, Any] = networks.corpus()
    counts = []
    for name in options.networks:
        if name not in entries:
            print(f"{name}: is not in the list of networks", file=sys.stderr)
            continue
        found = count(name, networks.import_network(entries[name]))
        counts.append(found)
        print(
            f"{name}: ours {found.ours} ({found.conversions} conversions), stock {found.raw}, in inference "
            f"form "
            f"{found.normal}, by pattern {found.by_pattern}, on the device {found.device}",
            flush=True,
        )
    if counts:
        write_block(options.document, "kernel-counts", "Kernel counts", render(counts))
    return int(not counts)


if __name__ == "__main__":
    sys.exit(main())
