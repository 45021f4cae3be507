"""Compile time beside stock's, in one process: CPU seconds from the imported module to OpenCL C.

Ours is `compile_module`, the manifest included. Stock's is its texture pipeline on the module as it was imported; where
that fails, on the module in inference form (whose making isn't counted); where that fails too, its pipeline for
buffers. All include its FoldConstant, and the same stages from scheduled PrimFuncs to OpenCL C. A small module has
gone through both before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from bench.device_tables import head, line
from bench.variants import stock_kernels
from fusion_patterns import tvm_compat
from fusion_patterns.compiler import compile_module
from fusion_patterns.errors import BuildError
from fusion_patterns.normalise import normalise

__all__ = ["CompileTime", "compile_time", "compile_times", "render"]

BUFFERS = "qcom/adreno-opencl"


@dataclass(frozen=True)
class CompileTime:
    """CPU seconds of all threads. ``path``: which of stock's ways it was, "" if none went through."""

    network: str
    ours: float
    stock: float
    path: str


def compile_time(network: str, mod: tvm.IRModule, profile: str | None = None) -> CompileTime:
    """Compile a module both ways, each once. Raises :class:`BuildError` where ours can't."""
    tvm_compat.prepare()
    begin = time.process_time()
    compile_module(mod, profile=profile)
    ours = time.process_time() - begin
    ways: tuple[tuple[str, Callable[[], tvm.IRModule], str | None], ...] = (
        ("texture", lambda: mod, None),
        ("texture, inference form", lambda: normalise(mod), None),
        ("buffers", lambda: mod, BUFFERS),
        ("buffers, inference form", lambda: normalise(mod), BUFFERS),
    )
    for path, prepared, target in ways:
        given = prepared()
        begin = time.process_time()
        try:
            stock_kernels(given, target)
        except BuildError:
            continue
        return CompileTime(network, ours, time.process_time() - begin, path)
    return CompileTime(network, ours, 0.0, "")


def compile_times(
    networks: Iterable[tuple[str, tvm.IRModule]], profile: str | None = None
) -> list[CompileTime]:
    """Compile several modules, after a small one."""
    compile_time("warm-up", small_module(), profile)
    times = []
    for network, mod in networks:
        times.append(compile_time(network, mod, profile))
        print(cells(times[-1]), flush=True)
    return times


def small_module() -> tvm.IRModule:
    """A convolution with its activation."""
    data = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
    weight = relax.Var("w", relax.TensorType((8, 8, 3, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data, weight]):
        with builder.dataflow():
            conv: Any = builder.emit(relax.op.nn.conv2d(data, weight, padding=1))
            out = builder.emit_output(relax.op.nn.relu(conv))
        builder.emit_func_output(out)
    return builder.finalize()


def render(times: list[CompileTime]) -> str:
    """The times as Markdown."""
    return "\n".join(
        [*head("network", "ours, s", "stock, s", "ours / stock", "stock's way"), *map(cells, times)]
    )


def cells(one: CompileTime) -> str:
    """One line of the table."""
    if not one.path:
        return line(one.network, f"{one.ours:.1f}", "-", "-", "none goes through")
    return line(one.network, f"{one.ours:.1f}", f"{one.stock:.1f}", f"{one.ours / one.stock:.2f}", one.path)
