"""Local response normalisation: one kernel that reads each block of channels once, and what is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from modules import Calls, array, const, graph, nn, var, weight
from tvm import relax, te
from tvm.relax import op

from fusion_patterns import compile_module
from fusion_patterns.lower.compute.packed import LANES, Packed, blocks
from fusion_patterns.lower.compute.pooling import channel_pool
from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.layouts import DATA, layout
from fusion_patterns.place.needs import needs_of

X = (1, 16, 8, 8)


def number(value: float) -> Any:
    return relax.const(value, "float32")


def network(
    size: tuple[int, ...] = (5, 1, 1),
    padding: tuple[int, ...] = (2, 0, 0, 2, 0, 0),
    *,
    alpha: Any = None,
    strides: tuple[int, ...] = (1, 1, 1),
    squared: Callable[..., Any] | None = None,
    counts: bool = True,
) -> tvm.IRModule:
    """A normalisation between two convolutions."""

    def build(emit: Any, x: Any) -> Any:
        first = emit(nn.max_pool2d(emit(nn.conv2d(x, weight((16, 16, 1, 1)))), [2, 2], [2, 2]))
        square = squared(emit, first) if squared else emit(op.multiply(first, first))
        volume = emit(op.expand_dims(square, axis=[1]))
        mean = emit(nn.avg_pool3d(volume, size, strides, padding, count_include_pad=counts))
        scaled = emit(op.multiply(emit(op.squeeze(mean, [1])), number(0.1) if alpha is None else alpha))
        root = emit(op.power(emit(op.add(scaled, number(1.0))), number(0.75)))
        return emit(nn.conv2d(emit(op.divide(first, root)), weight((8, 16, 1, 1), 1)))

    return graph(build, [var("x", X)])


def test_it_is_one_kernel_that_reads_three_blocks_and_writes_texels() -> None:
    compiled = compile_module(network())
    assert compiled.report.composites["lrn.chain"] == 1
    assert compiled.report.launches == 4  # with the packing of what the caller gives
    source = next(k.source for k in compiled.manifest.kernels.values() if "lrn" in k.name)
    body = source[source.rindex("__kernel") :]
    assert body.count("write_imagef") == 1
    assert len(set(re.findall(r"image_sampler, (.*?), 0\)\)\)", body))) == 3
    assert "for (" not in body


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (lambda: network((4, 1, 1), (1, 0, 0, 2, 0, 0)), "pool_size of `lv4` (nn.avg_pool3d) is [4, 1, 1]"),
        (
            lambda: network((3, 3, 1), (1, 1, 0, 1, 1, 0)),
            "pool_size of `lv4` (nn.avg_pool3d) is [3, 3, 1]",
        ),
        (lambda: network(counts=False), "count_include_pad of `lv4` (nn.avg_pool3d) is False, not True"),
        (lambda: network(alpha=const((16, 1, 1), 4)), "(alpha of `lv6`) is channel, not scalar"),
        (
            lambda: network(squared=lambda e, v: e(op.multiply(v, e(nn.relu(v))))),
            "have one name in the row but are two tensors",
        ),
    ],
)
def test_near_misses_are_declined_with_the_reason(module: Callable[[], Any], wanted: str) -> None:
    figures = compile_module(module()).report
    assert "lrn.chain" not in figures.composites
    reasons = [declined.reason for declined in figures.declined if declined.row == "lrn.chain"]
    assert any(wanted in reason for reason in reasons), reasons


def volume(
    axis: int = 1, size: tuple[int, ...] = (3, 1, 1), pads: tuple[int, ...] = (1, 0, 0, 1, 0, 0), **attrs: Any
) -> Any:
    """A composite that averages over neighbouring channels, or over something else."""
    pool = {"count_include_pad": True, **attrs}
    back = [axis]

    def build(emit: Any, d: Any) -> Any:
        wide = emit(op.expand_dims(d, axis=[axis]))
        return emit(op.squeeze(emit(nn.avg_pool3d(wide, size, padding=pads, **pool)), back))

    return Calls().composite(build, [var("data", X)]).func


def test_averages_over_channels_need_packed_data() -> None:
    (operand,) = needs_of(volume()).operands
    assert (operand.layout, operand.shape) == (DATA, X)


@pytest.mark.parametrize(
    "func",
    [
        lambda: volume(axis=2, size=(1, 1, 1), pads=(0, 0, 0, 0, 0, 0)),
        lambda: volume(size=(3, 3, 1), pads=(1, 1, 0, 1, 1, 0)),
        lambda: volume(count_include_pad=False),
        lambda: volume(dilation=[2, 1, 1], pads=(2, 0, 0, 2, 0, 0)),
    ],
)
def test_other_averages_in_a_volume_are_refused(func: Callable[[], Any]) -> None:
    with pytest.raises(NotPacked, match="only averages over neighbouring channels"):
        needs_of(func())


def pooled(values: np.ndarray[Any, Any], size: int, before: int) -> np.ndarray[Any, Any]:
    """The averages over channels as the kernel computes them, on the CPU: (N, C, H, W)."""
    n, c, h, w = values.shape
    dtype = str(values.dtype)
    data = Packed(te.placeholder((n, blocks(c), h, w, LANES), dtype, "data"), DATA, values.shape)
    attrs = SimpleNamespace(pool_size=(size, 1, 1), padding=(before, 0, 0, size - 1 - before, 0, 0))
    result = channel_pool(data, attrs)
    built = tvm.compile(tvm.IRModule({"main": te.create_prim_func([data.tensor, result])}), target="llvm")
    out = tvm.runtime.tensor(np.zeros([int(d) for d in result.shape], dtype))
    built["main"](tvm.runtime.tensor(layout(DATA).pack(values)), out)
    return np.asarray(out.numpy()).transpose(0, 1, 4, 2, 3).reshape(n, -1, h, w)[:, :c]


@pytest.mark.parametrize(("size", "before"), [(3, 1), (5, 2), (5, 0), (4, 3), (9, 4), (9, 8)])
@pytest.mark.parametrize("channels", [1, 6, 8, 13])
def test_the_window_of_a_channel(channels: int, size: int, before: int) -> None:
    values = array((2, channels, 2, 3))
    padded = np.pad(values, [(0, 0), (before, size - 1 - before), (0, 0), (0, 0)])
    wanted = np.stack([padded[:, c : c + size].mean(1) for c in range(channels)], 1)
    np.testing.assert_allclose(pooled(values, size, before), wanted, atol=1e-6)


def test_what_stands_outside_of_a_window_is_not_read_into_it() -> None:
    values = array((1, 12, 1, 1))
    values[:, 6] = np.inf
    finite = np.isfinite(pooled(values, 5, 2)).ravel()
    assert [int(c) for c in np.flatnonzero(~finite)] == [4, 5, 6, 7, 8]


def test_float16_is_summed_in_float32() -> None:
    values = np.full((1, 8, 1, 1), 20000, "float16")  # three of them are beyond float16
    assert (pooled(values, 3, 1)[:, 1:7] == 20000).all()
