"""Where tensors live in real networks: bytes in texture, conversions and copies, and stock's beside them.

    python -m bench.placement [--only NAME ...] [--document docs/placement.md]

Nothing is compiled: layouts and scopes are decided before any kernel is made. Beside the conversions that
are made stand those that there would be if every composite made its own, as a kernel library does: its
inputs packed, its result unpacked. Stock's figures are those of the corpus list, where stock compiles the
network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networks
import tvm

from bench import ROOT
from fusion_patterns import explain
from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.explanation import Explanation
from fusion_patterns.place.layouts import DATA
from fusion_patterns.report.summary import convolutions
from fusion_patterns.report.text import human_bytes

DOCUMENT = ROOT / "docs" / "placement.md"
BEGIN, END = "<!-- made by python -m bench.placement -->", "<!-- end -->"
CONVOLUTIONS = "conv2d"


@dataclass(frozen=True)
class Subject:
    """A network: what it is called here, its entry in the corpus list, and where stock's figures stand."""

    title: str
    entry: str


SUBJECTS = (
    Subject("ResNet-50", "tv_resnet50"),
    Subject("MobileNetV2", "tv_mobilenet_v2"),
    Subject("YOLOv8n", "os_nudenet_yolov8n"),
    Subject("PP-OCR detector", "os_ppocrv4_det"),
    Subject("DenseNet-121", "tv_densenet121"),
    Subject("U-Net, ResNet-18", "sm_unet_r18"),
)


@dataclass(frozen=True)
class Figures:
    """What is counted in one network; ``apart``: conversions if every composite made its own."""

    title: str
    convs: tuple[int, int]
    texture_inputs: tuple[int, int]
    texture: tuple[int, int]
    buffers: tuple[int, int]
    conversions: int
    apart: int
    copies: int
    seconds: float
    stock: dict[str, Any] | None

    def cells(self) -> list[str]:
        """The table's row."""
        share = f"{100 * self.texture_inputs[0] / max(self.texture_inputs[1], 1):.0f}%"
        stock = self.stock
        return [
            self.title,
            f"{self.convs[0]} of {self.convs[1]}",
            f"{share} of {self.texture_inputs[1]}",
            f"{self.texture[0]}, {human_bytes(self.texture[1])}",
            f"{self.buffers[0]}, {human_bytes(self.buffers[1])}",
            str(self.conversions),
            str(self.apart),
            str(self.copies),
            f"{self.seconds:.1f} s",
            f"{stock['layout_transforms']}, {stock['to_vdevice']}" if stock else "does not compile",
            f"{stock['texture_values']}, {stock['global_values']}" if stock else "",
        ]


HEAD = (
    "network",
    "convolutions packed",
    "conv inputs in texture",
    "written to texture",
    "written to buffers",
    "conversions",
    "if every composite made its own",
    "copies",
    "time to decide",
    "stock: conversions, copies",
    "stock: texture, buffers",
)


def measure(subject: Subject, entry: dict[str, Any]) -> Figures:
    """Place one network and count."""
    mod = networks.import_network(entry)
    begin = time.perf_counter()
    story = explain(mod)
    seconds = time.perf_counter() - begin
    return count(subject.title, mod, story, seconds, entry["stock"] if entry["stock"]["builds"] else None)


def count(
    title: str, mod: tvm.IRModule, story: Explanation, seconds: float, stock: dict[str, Any] | None
) -> Figures:
    """The figures of a placement."""
    placement = story.placement
    written = [tensor for tensor in placement.tensors if tensor.writer]
    texture = [tensor for tensor in written if "texture" in tensor.scope]
    buffers = [tensor for tensor in written if "texture" not in tensor.scope]
    packed = [operand.layout == DATA for needs in placement.needs.values() for operand in needs.operands]
    inputs = [
        form.scope
        for name, needs in placement.needs.items()
        if name.removeprefix("fused_").startswith(CONVOLUTIONS)
        for operand, form in zip(needs.operands, placement.operands[name], strict=True)
        if operand.layout == DATA and operand.name.startswith("data")
    ]
    constants = sum(
        wish.layout == DATA
        for tensor in placement.tensors
        if any(conversion.kind == "constant" for conversion in tensor.conversions)
        for wish in tensor.wishes
    )
    taken = sum(name.removeprefix("fused_").startswith(CONVOLUTIONS) for name in placement.needs)
    two = ("fused_conv2d_residual_pair", "fused_conv2d_excite")
    pairs = sum(name.startswith(two) for name in placement.needs)
    return Figures(
        title,
        (taken + pairs, sum(1 for _ in convolutions(mod))),
        (sum("texture" in scope for scope in inputs), len(inputs)),
        (len(texture), sum(tensor.bytes for tensor in texture)),
        (len(buffers), sum(tensor.bytes for tensor in buffers)),
        story.count("pack", "unpack"),
        sum(packed) + len(written) - constants,
        story.count("copy"),
        seconds,
        stock,
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(document: Path, text: str) -> None:
    """Put the table between its two comments, and leave everything else."""
    page = document.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Count what is asked for; returns 1 if a network could not be imported."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.placement", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries of the corpus list")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the table into this page")
    options = parser.parse_args(arguments)
    entries, rows, failed = networks.corpus(), [], 0
    if not entries:
        print("the list of networks is not there: ../shared/corpus/networks.toml", file=sys.stderr)
        return 2
    for subject in SUBJECTS:
        if options.only and subject.entry not in options.only:
            continue
        try:
            rows.append(measure(subject, entries[subject.entry]).cells())
        except FusionPatternsError as error:
            failed += 1
            print(f"{subject.title}: {error}", file=sys.stderr)
            continue
        print(", ".join(f"{name} {cell}" for name, cell in zip(HEAD, rows[-1], strict=True)), flush=True)
    if options.document:
        write(options.document, table(rows))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
