"""Replays a saved module from the command line.

    python -m fusion_patterns.run FOLDER [--inputs x.npz] [--profile] [--device 0:0] [--json]

The exit code is 0 only if all went well. An error is one line on the standard error stream.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FusionPatternsError, ManifestError
from .interpret import InputError, Symbols, leaf_params, resolve, symbols_of
from .manifest import STORAGE, Array, Function
from .opencl import Session
from .store import load


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 1 after an error; argparse exits with 2 itself."""
    args = _parser().parse_args(argv)
    try:
        report = replay(args)
    except (FusionPatternsError, OSError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1, allow_nan=False) if args.json else render(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusion_patterns.run", description="Run a saved module on an OpenCL device."
    )
    parser.add_argument("folder", help="what CompiledModule.save wrote")
    parser.add_argument("--inputs", metavar="X.npz", help="input arrays by parameter name; else random ones")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument(
        "--dim", action="append", default=[], metavar="NAME=N", help="a symbol's value for random inputs"
    )
    parser.add_argument("--function", default="main", help="which function to run (default: main)")
    parser.add_argument("--device", help="platform:device, or a part of the device's name")
    parser.add_argument("--profile", action="store_true", help="time every kernel on the device")
    parser.add_argument("--repeats", type=int, default=10, help="of the profile (default: 10)")
    parser.add_argument("--save", metavar="OUT.npz", help="write the outputs as output_0, output_1, ...")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """Load, run, and say what came out: plain JSON with ``device``, ``outputs`` and, if asked, ``kernels``.

    Raises:
        FusionPatternsError: the folder, the inputs or the device are not usable.
    """
    if args.repeats < 1 or args.seed < 0:
        raise InputError("--repeats must be at least 1, --seed at least 0")
    manifest = load(args.folder)
    if args.function not in manifest.functions:
        raise ManifestError(
            f"{args.folder}: no function {args.function!r}; use {', '.join(manifest.functions)}"
        )
    function = manifest.functions[args.function]
    inputs = _read_inputs(args.inputs) if args.inputs else draw_inputs(function, args.seed, _dims(args.dim))
    session = Session(manifest, args.device)
    outputs = session.run(inputs, args.function)
    if args.save:
        _write_outputs(Path(args.save), outputs)
    report: dict[str, Any] = {
        "name": manifest.name,
        "device": asdict(session.device.info),
        "outputs": [summary(output) for output in outputs],
    }
    if args.profile:
        times = session.profile(inputs, args.repeats, args.function)
        report["kernels"] = [asdict(time) for time in times]
    return report


def _write_outputs(path: Path, outputs: Sequence[Array]) -> None:
    """Written beside and moved there, so that an older file is whole until the new one is."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    named: dict[str, Any] = {f"output_{i}": output for i, output in enumerate(outputs)}
    try:
        with beside.open("wb") as file:  # an open file: numpy would add a suffix to a name
            np.savez(file, **named)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _read_inputs(path: str) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not an .npz file of arrays ({error})") from None


def _dims(given: Sequence[str]) -> Symbols:
    symbols = {}
    for text in given:
        name, _, extent = text.rpartition("=")
        if not name or not extent.isdecimal():
            raise InputError(f"--dim {text}: expected NAME=N")
        symbols[name] = int(extent)
    return symbols


def draw_inputs(function: Function, seed: int, symbols: Symbols) -> dict[str, Array]:
    """Random inputs for a function, by leaf name; the same seed gives the same arrays on every machine.

    Floats are standard normal, integers 0 or 1 (a valid index nearly everywhere), bools fair coins.

    Raises:
        InputError: a symbol of a parameter's shape has no value in `symbols`.
    """
    drawn: dict[str, Array] = {}
    generator = np.random.Generator(np.random.PCG64(seed))
    for name, tensor in leaf_params(function).items():
        open_symbols = {s for dim in tensor.shape for s in symbols_of(dim)} - symbols.keys()
        if open_symbols:
            symbol = min(open_symbols)
            raise InputError(f"parameter {name} {tensor.shape}: {symbol} is open; pass --dim {symbol}=N")
        shape, dtype = resolve(tensor, symbols), STORAGE[tensor.dtype]
        if tensor.dtype == "bfloat16":  # the upper half of a float32
            bits = generator.standard_normal(shape, np.float32).view(np.uint32)
            drawn[name] = np.asarray(bits >> 16).astype(np.uint16)
        elif dtype.kind == "f":
            drawn[name] = np.asarray(generator.standard_normal(shape)).astype(dtype)
        else:
            drawn[name] = np.asarray(generator.integers(0, 2, shape)).astype(dtype)
    return drawn


def summary(output: Array) -> dict[str, Any]:
    """Shape, dtype, and the finite elements' least, greatest and mean (None if there are none)."""
    values = output.astype(np.float64)
    finite = values[np.isfinite(values)]
    known = finite.size > 0
    return {
        "shape": list(output.shape),
        "dtype": output.dtype.name,
        "min": float(finite.min()) if known else None,
        "max": float(finite.max()) if known else None,
        "mean": float(finite.mean()) if known else None,
        "not_finite": int(values.size - finite.size),
    }


def render(report: dict[str, Any]) -> str:
    """What `replay` gave, for people."""
    device = report["device"]
    lines = [f"{report['name']} on {device['name']} ({device['platform']} {device['driver']})"]
    for i, out in enumerate(report["outputs"]):
        numbers = "  ".join(f"{k} {out[k]:.6g}" for k in ("min", "max", "mean") if out[k] is not None)
        odd = f"  NOT FINITE: {out['not_finite']}" if out["not_finite"] else ""
        lines.append(f"output {i}: {out['dtype']} {tuple(out['shape'])}  {numbers}{odd}")
    if kernels := report.get("kernels"):
        width = max(len(kernel["name"]) for kernel in kernels)
        lines.append(f"{'kernel':{width}}  count   median us    total us  label")
        for k in sorted(kernels, key=lambda k: -k["total_ns"]):
            lines.append(
                f"{k['name']:{width}}  {k['count']:5}  {k['median_ns'] / 1e3:10.1f}"
                f"  {k['total_ns'] / 1e3:10.1f}  {k['label']}"
            )
        total = sum(k["total_ns"] for k in kernels)
        lines.append(f"{sum(k['count'] for k in kernels)} launches, {total / 1e6:.3f} ms on the device")
    return "\n".join(lines)
