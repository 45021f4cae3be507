"""Softmax over few numbers: a thread for each row; everything else keeps the schedule that it had."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from modules import graph, nn, var
from tvm import relax, tirx
from tvm.relax import op

from fusion_patterns import compile_module, verify
from fusion_patterns.compiler import as_target
from fusion_patterns.lower.schedule.rows import ShortRows
from fusion_patterns.lower.stages import fuse
from fusion_patterns.run import Device


def softmax(shape: tuple[Any, ...], axis: int = -1, function: Any = nn.softmax) -> tvm.IRModule:
    return graph(lambda emit, x: emit(function(x, axis)), [var("x", shape)])


def source(mod: tvm.IRModule) -> str:
    (kernel,) = compile_module(mod).manifest.kernels.values()
    return str(kernel.source)


@pytest.mark.opencl
@pytest.mark.parametrize("function", [nn.softmax, nn.log_softmax])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1003, 2), -1), ((2, 7, 5, 6), 1), ((2, 3, 33, 5), 3), ((4, 32, 100), 1)],
)
def test_a_thread_computes_a_row(
    opencl_device: Device, shape: tuple[int, ...], axis: int, function: Any
) -> None:
    mod = softmax(shape, axis, function)
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok
    assert report.worst < 1e-5
    text = source(mod)
    # no share of a sum is left to another thread, and no loop is left whose row would be in memory
    assert "__local" not in text
    assert "for (" not in text


@pytest.mark.opencl
def test_large_numbers_do_not_overflow(opencl_device: Device) -> None:
    mod = graph(
        lambda emit, x: emit(nn.softmax(emit(op.multiply(x, relax.const(1e4))), -1)), [var("x", (100, 3))]
    )
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok
    assert all(output.finite for output in report.outputs)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 10), -1),  # fewer rows than numbers in one
        ((5, 6), 1),
        ((1000, 33), -1),  # too long for registers
    ],
)
def test_few_rows_and_long_rows_are_shared_by_groups(shape: tuple[int, ...], axis: int) -> None:
    assert "__local" in source(softmax(shape, axis))


@pytest.mark.parametrize(
    "mod",
    [
        lambda: softmax((tirx.Var("n", "int64"), 2)),
        lambda: graph(lambda emit, x: emit(op.sum(x, -1)), [var("x", (100, 4))]),
        lambda: graph(lambda emit, x: emit(op.add(x, x)), [var("x", (100, 4))]),
    ],
)
def test_the_rule_leaves_other_kernels_alone(mod: Any) -> None:
    target = as_target()
    for func in fuse(mod()).functions.values():
        if isinstance(func, tirx.PrimFunc):
            assert ShortRows().apply(func, target, False) is None
