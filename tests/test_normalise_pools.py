"""Adaptive pools with windows of one size become plain pools, which have packed kernels."""

from __future__ import annotations

import numpy as np
import pytest
from networks import random_inputs, run_on_cpu
from test_normalise import function
from tvm import relax
from tvm.relax.op import mean, nn

from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.rewrite import op_name

PLAIN, ADAPTIVE = "nn.avg_pool2d", "nn.adaptive_avg_pool2d"


@pytest.mark.parametrize(
    ("size", "out", "layout", "left"),
    [
        ((6, 9), (3, 3), "NCHW", [PLAIN]),
        ((8, 8), (2, 4), "NCHW", [PLAIN]),
        ((6, 6), (1, 2), "NCHW", [PLAIN]),
        ((7, 7), (7, 7), "NCHW", []),
        ((7, 7), (7, 7), "NHWC", []),
        ((6, 6), (1, 1), "NCHW", [ADAPTIVE]),  # a row of its own covers it
        ((8, 8), (3, 3), "NCHW", [ADAPTIVE]),
        ((3, 3), (6, 6), "NCHW", [ADAPTIVE]),
        ((6, 6), (3, 3), "NHWC", [ADAPTIVE]),
    ],
)
def test_adaptive_pool(size: tuple[int, int], out: tuple[int, int], layout: str, left: list[str]) -> None:
    shape = (2, 3, *size) if layout == "NCHW" else (2, *size, 3)

    def build(bb, x):
        return bb.emit(relax.op.nn.adaptive_avg_pool2d(bb.emit(relax.op.negative(x)), out, layout))

    mod = function(build, shape)
    normal = normalise(mod)
    found = [op_name(b.value) for block in normal["main"].body.blocks for b in block.bindings]
    assert [name for name in found if name and name.startswith("nn.")] == left
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_symbolic_size_stays() -> None:
    from tvm import tirx

    n = tirx.Var("h", "int64")
    mod = function(lambda bb, x: bb.emit(relax.op.nn.adaptive_avg_pool2d(x, (2, 2))), (1, 3, n, 8))
    found = [op_name(b.value) for block in normalise(mod)["main"].body.blocks for b in block.bindings]
    assert ADAPTIVE in found


def left(mod) -> list[str]:
    """The operators of a module, which must compute what they did before."""
    normal = normalise(mod)
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    names = [op_name(b.value) for block in normal["main"].body.blocks for b in block.bindings]
    return [name for name in names if name]


IMAGE = (2, 6, 7, 5)


def test_an_average_pool_over_the_whole_image_is_a_mean() -> None:
    assert left(function(lambda bb, x: bb.emit(nn.avg_pool2d(x, [7, 5])), IMAGE)) == ["mean"]


@pytest.mark.parametrize(
    "attrs",
    [
        {"pool_size": [7, 4]},
        {"pool_size": [7, 5], "padding": [1, 1]},
        {"pool_size": [3, 2], "dilation": [3, 4]},
    ],
)
def test_other_average_pools_stay(attrs) -> None:
    assert left(function(lambda bb, x: bb.emit(nn.avg_pool2d(x, **attrs)), IMAGE)) == [PLAIN]


@pytest.mark.parametrize("axis", [[2, 3], [-1, -2]])
def test_a_mean_that_drops_the_image_keeps_it_and_is_reshaped(axis: list[int]) -> None:
    assert left(function(lambda bb, x: bb.emit(mean(x, axis)), IMAGE)) == ["mean", "reshape"]


def test_means_over_other_axes_stay() -> None:
    assert left(function(lambda bb, x: bb.emit(mean(x, [1, 2])), IMAGE)) == ["mean"]
