"""Results whose channels four does not divide, written as the module has them: every number, and nothing beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from modules import const, graph, nn, var, weight
from tvm.relax import ShapeExpr, op

from fusion_patterns import verify
from fusion_patterns.run import Device
from fusion_patterns.run import manifest as m

TOLERANCE = 1e-5

Emit = Callable[[Any], Any]


def conv(
    emit: Emit, x: Any, channels: int, size: int = 1, given: int = 8, seed: int = 0, **attrs: Any
) -> Any:
    return emit(nn.conv2d(x, weight((channels, given, size, size), seed), padding=[size // 2] * 2, **attrs))


def silu(emit: Emit, x: Any, channels: int) -> Any:
    shifted = emit(op.add(x, const((1, channels, 1, 1), 5)))
    return emit(op.multiply(shifted, emit(op.sigmoid(shifted))))


def mean(emit: Emit, x: Any) -> Any:
    return emit(op.mean(x, [2, 3], keepdims=True))


def doubled(emit: Emit, x: Any, method: str) -> Any:
    return emit(op.image.resize2d(x, ShapeExpr([12, 10]), layout="NCHW", method=method))


# row that writes the result: its last operators, on a value of 8 channels and 6x5 pixels, for so many channels
WRITERS: dict[str, Callable[[Emit, Any, int], Any]] = {
    "conv2d.chain": lambda e, x, c: silu(e, conv(e, x, c, 3), c),
    "conv2d.chain, erf": lambda e, x, c: e(op.erf(conv(e, x, c))),
    "conv2d.chain, one pixel": lambda e, x, c: silu(e, conv(e, mean(e, x), c), c),
    "conv2d.depthwise": lambda e, x, c: e(
        nn.conv2d(conv(e, x, c), weight((c, 1, 3, 3), 1), padding=[1, 1], groups=c)
    ),
    "conv2d_transpose.chain": lambda e, x, c: e(nn.conv2d_transpose(x, const((8, c, 2, 2)), strides=[2, 2])),
    "pool2d.chain": lambda e, x, c: e(nn.avg_pool2d(conv(e, x, c), [2, 2])),
    "conv2d.pooled": lambda e, x, c: mean(e, e(nn.relu(conv(e, x, c)))),
    "resize2d.chain, linear": lambda e, x, c: doubled(e, conv(e, x, c), "linear"),
    "resize2d.chain, nearest": lambda e, x, c: doubled(e, conv(e, x, c), "nearest_neighbor"),
}


@pytest.mark.opencl
@pytest.mark.parametrize("channels", [5, 6, 19])
@pytest.mark.parametrize("writer", WRITERS)
def test_the_last_block_is_written_as_far_as_it_goes(
    opencl_device: Device, writer: str, channels: int
) -> None:
    """Two images: what one wrote beyond its end would stand in the other."""

    def build(emit: Emit, x: Any) -> Any:
        return WRITERS[writer](emit, emit(nn.relu(conv(emit, x, 8, 3, given=5, seed=7))), channels)

    report = verify(graph(build, [var("x", (2, 5, 6, 5))]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    figures = report.compiled.report
    assert writer.split(",")[0] in figures.composites, figures.declined
    body = report.compiled.manifest.functions["main"].body
    assert "layout.unpack" not in [step.label for step in m.all_steps(body) if isinstance(step, m.Launch)]


@pytest.mark.opencl
def test_a_long_sum_split_over_a_group(opencl_device: Device) -> None:
    """The split sums of a small image write the same way."""

    def build(emit: Emit, x: Any) -> Any:
        return silu(emit, conv(emit, x, 7, 3, given=256), 7)

    report = verify(graph(build, [var("x", (2, 256, 7, 7))]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    (kernel,) = (k for k in report.compiled.manifest.kernels.values() if "__local" in k.source)
    assert "write_imagef(" not in kernel.source[kernel.source.rindex("__kernel") :]
