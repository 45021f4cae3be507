"""Channels that are only moved are written as the module has them, also where the last block of four is not full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from modules import graph, nn, var, weight
from tvm.relax import op

from fusion_patterns import verify
from fusion_patterns.run import Device

TOLERANCE = 1e-5


def conv(emit: Any, x: Any, channels: int, seed: int = 0) -> Any:
    given = int(x.ty.shape.values[1])
    return emit(nn.conv2d(x, weight((channels, given, 3, 3), seed), padding=[1, 1]))


def joined(*sizes: int) -> Callable[..., Any]:
    return lambda e, x: e(op.concat([conv(e, x, size, seed) for seed, size in enumerate(sizes)], axis=1))


def part(begin: int, end: int, channels: int) -> Callable[..., Any]:
    return lambda e, x: e(op.strided_slice(conv(e, x, channels), axes=[1], begin=[begin], end=[end]))


RESULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "parts that end inside a block": ("concat.chain", joined(7, 6)),
    "whole blocks and one that is not full": ("concat.chain", joined(8, 4, 5)),
    "no more than a block": ("concat.chain", joined(2, 1)),
    "full blocks": ("concat.chain", joined(7, 5)),
    "a part": ("slice.chain", part(3, 10, 12)),
    "a part and another value": (
        "concat.chain",
        lambda e, x: e(op.concat([part(1, 7, 9)(e, x), conv(e, x, 5, 3)], axis=1)),
    ),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", RESULTS)
def test_no_conversion_follows(opencl_device: Device, name: str) -> None:
    row, build = RESULTS[name]
    report = verify(graph(build, [var("x", (2, 6, 5, 7))]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert all(output.varies for output in report.outputs)
    assert report.compiled is not None
    assert row in report.compiled.report.composites
    assert report.compiled.report.conversions == 1  # the input


@pytest.mark.opencl
def test_what_is_computed_on_the_way_is_written_plain_as_well(opencl_device: Device) -> None:
    """A value that is read twice is kept by the thread that has its four lanes."""

    def build(emit: Any, x: Any) -> Any:
        whole = joined(7, 6)(emit, x)
        return emit(op.multiply(whole, emit(op.sigmoid(whole))))

    report = verify(graph(build, [var("x", (2, 6, 5, 7))]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    assert report.compiled.report.conversions == 1  # the input
