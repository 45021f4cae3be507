"""Times on an OpenCL device: ours beside stock TVM, one device, one run, event times, both sides interleaved.

    python -m bench.device prepare FOLDER [--profile nvidia-opencl] [--networks A,B]   needs TVM
    python -m bench.device measure FOLDER [--device D] [--repeats 10] [--json FILE]   needs NumPy and pyopencl

The figure of a network is the median over the repeats of the sum of all kernels' event times. Variants that stock can't
build are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from math import exp, log
from pathlib import Path
from typing import Any

NETWORKS = (
    "tv_resnet18",
    "tv_resnet50",
    "tv_mobilenet_v2",
    "ol_squeezenet",
    "ol_densenet121",
    "os_nudenet_yolov8n",
    "ow_ppocrv4_det",
    "ow_open_nsfw_resnet",
)
VARIANTS = ("ours", "ours-buffers", "stock-buffers", "stock-texture")
CLASSES = {
    "conv": "convolution",
    "pool": "pooling",
    "mean": "pooling",
    "concat": "concat",
    "layout": "conversion",
}


def class_of(label: str) -> str:
    """The kernel class of a launch, by its label: a row of ours, or the ops in the name of a stock kernel."""
    return next((name for word, name in CLASSES.items() if word in label), "other")


def prepare(folder: Path, networks: list[str], profile: str | None, variants: list[str]) -> None:
    """Build every variant of every network into packs; what stock refuses is written down."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import networks as corpus  # type: ignore[import-not-found]

    from bench.packs import write_pack
    from bench.variants import build_variant
    from fusion_patterns.errors import BuildError

    folder.mkdir(parents=True, exist_ok=True)
    entries = corpus.corpus()
    known = folder / "refused.json"
    refused: dict[str, dict[str, str]] = json.loads(known.read_text()) if known.exists() else {}
    for network in networks:
        mod = corpus.import_network(entries[network])
        for variant in variants:
            try:
                manifest = build_variant(variant, mod, profile)
            except BuildError as error:
                refused.setdefault(network, {})[variant] = str(error)
                print(f"{network} {variant}: {error}", flush=True)
                continue
            meta = {"network": network, "variant": variant, "profile": profile}
            write_pack(manifest, folder / f"{network}.{variant}.json.gz", meta)
            print(f"{network} {variant}: {len(manifest.kernels)} kernels", flush=True)
    known.write_text(json.dumps(refused, indent=1))


def measure(folder: Path, device: str | None, repeats: int) -> dict[str, Any]:
    """Time all packs of a folder; the variants of one network take turns."""
    from bench.packs import read_pack
    from fusion_patterns.run import Session, pick_device
    from fusion_patterns.run.replay import draw_inputs

    chosen = pick_device(device)
    refused = folder / "refused.json"
    result: dict[str, Any] = {
        "device": chosen.info.name,
        "driver": chosen.info.driver,
        "platform": chosen.info.platform,
        "repeats": repeats,
        "refused": json.loads(refused.read_text()) if refused.exists() else {},
        "networks": {},
    }
    packs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.json.gz")):
        network, variant = path.name.removesuffix(".json.gz").rsplit(".", 1)
        packs.setdefault(network, {})[variant] = path
    for network, variants in packs.items():
        sessions = {}
        for variant in sorted(variants, key=VARIANTS.index):
            manifest, _ = read_pack(variants[variant])
            session = Session(manifest, chosen)
            inputs = draw_inputs(manifest.functions["main"], 0, {})
            session.run(inputs)  # builds the kernels and warms up
            sessions[variant] = session, inputs
        times: dict[str, list[float]] = {variant: [] for variant in sessions}
        classes: dict[str, dict[str, list[float]]] = {variant: {} for variant in sessions}
        launches = {}
        for _ in range(repeats):
            for variant, (session, inputs) in sessions.items():
                kernels = session.profile(inputs, 1)
                times[variant].append(sum(k.total_ns for k in kernels) / 1e6)
                launches[variant] = sum(k.count for k in kernels)
                shares: dict[str, float] = {}
                for kernel in kernels:
                    name = class_of(kernel.label)
                    shares[name] = shares.get(name, 0.0) + kernel.total_ns / 1e6
                for name, share in shares.items():
                    classes[variant].setdefault(name, []).append(share)
        result["networks"][network] = {
            variant: {
                "ms": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "launches": launches[variant],
                "classes": {name: statistics.median(v) for name, v in sorted(classes[variant].items())},
            }
            for variant, values in times.items()
        }
        print(row(network, result["networks"][network]), flush=True)
    return result


def row(network: str, variants: dict[str, Any]) -> str:
    """A line of the table: our milliseconds, and how many times longer each peer takes."""
    ours = variants["ours"]["ms"]
    cells = [f"{ours:.3f}"]
    for peer in VARIANTS[1:]:
        cells.append(f"{variants[peer]['ms'] / ours:.1f}" if peer in variants else "-")
    return f"| {network} | " + " | ".join(cells) + " |"


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"{result['device']}, {result['platform']}, driver {result['driver']}; medians of {result['repeats']} runs.",
        "",
        "| network | ours, ms | ours in buffers / ours | stock buffers / ours | stock texture / ours |",
        "| --- | --- | --- | --- | --- |",
        *(row(network, variants) for network, variants in result["networks"].items()),
        "| geometric mean | | " + " | ".join(mean_ratio(result, peer) for peer in VARIANTS[1:]) + " |",
        "",
        "| kernel class | peer | slowest for us, peer / ours |",
        "| --- | --- | --- |",
    ]
    for peer in VARIANTS[2:]:
        for name in ("convolution", "pooling", "concat"):
            ratios = {
                network: variants[peer]["classes"][name] / variants["ours"]["classes"][name]
                for network, variants in result["networks"].items()
                if peer in variants
                and name in variants[peer]["classes"]
                and name in variants["ours"]["classes"]
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                lines.append(f"| {name} | {peer} | {ratios[worst]:.1f} ({worst}) |")
    for network, reasons in result["refused"].items():
        lines += [f"- {network}, {variant}: {reason}" for variant, reason in reasons.items()]
    return "\n".join(lines)


def mean_ratio(result: dict[str, Any], peer: str) -> str:
    """The geometric mean over the networks that a peer can run."""
    ratios = [v[peer]["ms"] / v["ours"]["ms"] for v in result["networks"].values() if peer in v]
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.1f} ({len(ratios)})" if ratios else "-"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.device", description="Time networks on an OpenCL device."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("prepare", help="build all variants (needs TVM)")
    build.add_argument("folder", type=Path)
    build.add_argument(
        "--networks", default=",".join(NETWORKS), help="names from the corpus, with commas between"
    )
    build.add_argument("--profile", help="a device profile for our kernels")
    build.add_argument("--variants", default=",".join(VARIANTS), help="which of " + ", ".join(VARIANTS))
    run = commands.add_parser("measure", help="time what was prepared")
    run.add_argument("folder", type=Path)
    run.add_argument("--device")
    run.add_argument("--repeats", type=int, default=10)
    run.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.command == "prepare":
        prepare(args.folder, args.networks.split(","), args.profile, args.variants.split(","))
        return 0
    result = measure(args.folder, args.device, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
