"""Times on an OpenCL device: ours beside stock TVM, one device, one run, event times, all variants interleaved.

    python -m bench.device prepare FOLDER [--profile nvidia-opencl] [--networks A,B] [--light]   needs TVM
    python -m bench.device prepare FOLDER --networks layers --variants ours           needs TVM
    python -m bench.device measure FOLDER [--device D] [--repeats 10] [--json FILE]   needs NumPy and pyopencl
    python -m bench.device compile-time [--profile pocl] [--networks A,B]             needs TVM

The figure of a network is the median over the repeats of the sum of all kernels' event times. Variants that stock can't
build are listed with the reason. What the device can do at best is measured in the same run. Outputs are compared with
those of the untouched module on the CPU, unless the weights were left out (``--light``).
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.device_tables import VARIANTS, class_of, row, table
from fusion_patterns.errors import BuildError, FusionPatternsError

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
COMPILED = ("ol_resnet50", "tv_resnet18", "ow_ppocrv4_det")
ENDING = ".json.gz"
EXPECTED = ".expected.npz"
SLOW_MS = 20.0
"""Whole runs that take longer are timed less often: what the clock adds is nothing to them."""


class Refusal(FusionPatternsError):
    """What was asked for is not there."""


def importers(networks: list[str]) -> dict[str, Callable[[], Any]]:
    """By name of a network of the corpus, or of a large layer, what makes a Relax module of it.

    ``layers`` stands for all large layers. Raises :class:`Refusal` for a name that neither has.
    """
    import networks as corpus  # type: ignore[import-not-found]

    from bench.layers import LAYERS

    names = [one for name in networks for one in (LAYERS if name == "layers" else (name,))]
    entries = corpus.corpus()
    if unknown := [name for name in names if name not in entries and name not in LAYERS]:
        raise Refusal(f"--networks: the corpus has no {', '.join(unknown)}; its names are in networks.toml")
    return {name: LAYERS.get(name) or partial(corpus.import_network, entries[name]) for name in names}


def prepare(
    folder: Path, networks: list[str], profile: str | None, variants: list[str], *, light: bool = False
) -> None:
    """Build every variant of every network into packs; what stock refuses is written down.

    Beside them the weights, and what the untouched module computes on the CPU; ``light``: neither.
    """
    from bench.layers import LAYERS, layer_table
    from bench.packs import write_pack, write_whole
    from bench.variants import build_variant

    if unknown := [name for name in variants if name not in VARIANTS]:
        raise Refusal(f"--variants: no {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    modules = importers(networks)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "refused.json"
    refused: dict[str, dict[str, str]] = json.loads(known.read_text()) if known.exists() else {}
    for network, module in modules.items():
        mod, manifest = module(), None
        for variant in variants:
            pack = folder / f"{network}.{variant}{ENDING}"
            reasons = refused.setdefault(network, {})
            reasons.pop(variant, None)
            try:
                table = layer_table(network) if network in LAYERS else None
                manifest = build_variant(variant, mod, profile, table)
            except BuildError as error:
                reasons[variant] = str(error)
                pack.unlink(missing_ok=True)  # one of an earlier build
                print(f"{network} {variant}: {error}", flush=True)
                continue
            meta = {
                "network": network,
                "variant": variant,
                "profile": profile,
                "work": manifest.meta.get("work", {}),
            }
            write_pack(manifest, pack, meta, weights=not light)
            print(f"{network} {variant}: {len(manifest.kernels)} kernels", flush=True)
        if manifest and not light:
            # imported anew: stock's texture pipeline leaves marks in the module it is given
            write_whole(folder / f"{network}{EXPECTED}", expected(module(), manifest))
    write_whole(known, json.dumps(refused, indent=1).encode())


def expected(mod: Any, manifest: Any) -> bytes:
    """What the untouched module computes on the CPU from the inputs that :func:`measure` draws, as an ``.npz``."""
    from fusion_patterns.reference import Reference
    from fusion_patterns.run.replay import draw_inputs

    results = Reference(mod).run(draw_inputs(manifest.functions["main"], 0, {}))
    buffer = io.BytesIO()
    np.savez(buffer, *results)
    return buffer.getvalue()


def measure(folder: Path, device: str | None, repeats: int) -> dict[str, Any]:
    """Time all packs of a folder; the variants of one network take turns.

    Raises :class:`FusionPatternsError` where there are no packs, no device, or a device refuses a kernel.
    """
    from bench.limits import measure_limits
    from fusion_patterns.run import pick_device

    packs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        network, _, variant = path.name.removesuffix(ENDING).rpartition(".")
        if variant not in VARIANTS:
            raise Refusal(
                f"{path}: packs are named NETWORK.VARIANT{ENDING}, VARIANT one of {', '.join(VARIANTS)}"
            )
        packs.setdefault(network, {})[variant] = path
    if not packs:
        raise Refusal(f"{folder}: no packs there; build them with: python -m bench.device prepare {folder}")
    chosen = pick_device(device)
    refused = folder / "refused.json"
    result: dict[str, Any] = {
        "device": chosen.info.name,
        "driver": chosen.info.driver,
        "platform": chosen.info.platform,
        "repeats": repeats,
        "limits": asdict(measure_limits(chosen)),
        "refused": json.loads(refused.read_text()) if refused.exists() else {},
        "networks": {},
    }
    for network, variants in packs.items():
        result["networks"][network] = measure_network(variants, chosen, repeats)
        print(row(network, result["networks"][network]), flush=True)
    return result


def measure_network(packs: dict[str, Path], device: Any, repeats: int) -> dict[str, Any]:
    """Time the variants of one network in turn, and compare their outputs with what is expected, if that is known.

    Returns for each ``ms`` (median of the repeats), ``low``, ``high``, ``run_ms`` (of one run of many, on the host's
    clock), ``launches``, ``classes`` (milliseconds by kernel class) and ``kernels``: each kernel with its milliseconds
    in one run and what it has to do; and ``error``: the greatest of an output, relative to that output's scale.
    """
    from bench.packs import has_weights, read_pack
    from fusion_patterns.run import Session
    from fusion_patterns.run.replay import draw_inputs

    sessions, work, errors = {}, {}, {}
    for variant in sorted(packs, key=VARIANTS.index):
        manifest, meta = read_pack(packs[variant])
        session = Session(manifest, device)
        inputs = draw_inputs(manifest.functions["main"], 0, {})
        outputs = session.run(inputs)  # and the device is warm
        known = packs[variant].with_name(packs[variant].name.removesuffix(f".{variant}{ENDING}") + EXPECTED)
        if known.exists() and has_weights(packs[variant]):
            errors[variant] = {"error": worst(outputs, known)}
        sessions[variant], work[variant] = (session, inputs), meta.get("work", {})
    profiles: dict[str, list[list[Any]]] = {variant: [] for variant in sessions}
    names = list(sessions)
    for number in range(repeats):
        first = number % len(names)  # nobody is always the one after the slowest
        for variant in names[first:] + names[:first]:
            session, inputs = sessions[variant]
            profiles[variant].append(session.profile(inputs, 1))
    result = {}
    for variant, (session, inputs) in sessions.items():
        found = figures(profiles[variant], work[variant])
        often = (4, 5) if found["ms"] < SLOW_MS else (1, 3)
        found["run_ms"] = 1e3 * session.seconds_per_run(inputs, *often)
        result[variant] = {**found, **errors.get(variant, {})}
    return result


def worst(outputs: list[Any], known: Path) -> float:
    """The greatest error of any output, relative to the scale of that output; infinite where one is not a number."""
    errors = []
    with np.load(known, allow_pickle=False) as archive:
        for output, wanted in zip(outputs, (archive[name] for name in archive.files), strict=True):
            off = np.abs(output.astype("float64") - wanted).max(initial=0.0)
            errors.append(float(off) / (float(np.abs(wanted).max(initial=0.0)) or 1.0))
    return max(error if np.isfinite(error) else float("inf") for error in errors)


def figures(profiles: list[list[Any]], work: dict[str, Any]) -> dict[str, Any]:
    """The figures of one variant: medians over its profiles, each a list of ``KernelTime`` in the same order."""
    totals = [sum(kernel.total_ns for kernel in kernels) / 1e6 for kernels in profiles]
    classes: list[dict[str, float]] = []
    for kernels in profiles:
        shares: dict[str, float] = {}
        for kernel in kernels:
            name = class_of(kernel.label)
            shares[name] = shares.get(name, 0.0) + kernel.total_ns / 1e6
        classes.append(shares)
    return {
        "ms": statistics.median(totals),
        "low": min(totals),
        "high": max(totals),
        "launches": sum(kernel.count for kernel in profiles[0]),
        "classes": {
            name: statistics.median(shares[name] for shares in classes) for name in sorted(classes[0])
        },
        "kernels": [
            {
                "name": same[0].name,
                "label": same[0].label,
                "count": same[0].count,
                "ms": statistics.median(kernel.total_ns for kernel in same) / 1e6,
                **work.get(same[0].name, {}),
            }
            for same in zip(*profiles, strict=True)
        ],
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m bench.device", description="Time networks on an OpenCL device."
    )
    commands = made.add_subparsers(dest="command", required=True)
    build = commands.add_parser("prepare", help="build all variants (needs TVM)")
    build.add_argument("folder", type=Path)
    build.add_argument("--variants", default=",".join(VARIANTS), help="which of " + ", ".join(VARIANTS))
    build.add_argument(
        "--light", action="store_true", help="without weights: small files, whose outputs can't be compared"
    )
    times = commands.add_parser("compile-time", help="CPU seconds to OpenCL C, ours and stock's (needs TVM)")
    for command, default in ((build, NETWORKS), (times, COMPILED)):
        command.add_argument(
            "--networks",
            default=",".join(default),
            help="names from the corpus, with commas between; `layers`: large memory-bound layers",
        )
        command.add_argument("--profile", help="a device profile for our kernels")
    run = commands.add_parser("measure", help="time what was prepared")
    run.add_argument("folder", type=Path)
    run.add_argument("--device", help="a part of its name, or PLATFORM:DEVICE")
    run.add_argument("--repeats", type=int, default=10)
    run.add_argument("--json", type=Path, help="write all figures to this file")
    return made


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    made = parser()
    args = made.parse_args(argv)
    try:
        if args.command == "prepare":
            names, variants = args.networks.split(","), args.variants.split(",")
            prepare(args.folder, names, args.profile, variants, light=args.light)
        elif args.command == "compile-time":
            from bench.compile_time import compile_times, render

            modules = importers(args.networks.split(","))
            print(render(compile_times(((name, module()) for name, module in modules.items()), args.profile)))
        elif args.repeats < 1:
            made.error(f"--repeats must be at least 1, not {args.repeats}")
        else:
            from bench.packs import write_whole

            if args.json and not args.json.parent.is_dir():
                raise Refusal(f"--json: there is no folder {args.json.parent}")  # said before measuring
            result = measure(args.folder, args.device, args.repeats)
            if args.json:
                write_whole(args.json, json.dumps(result, indent=1).encode())
            print(table(result))
    except (FusionPatternsError, OSError) as error:
        print(f"bench.device: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
