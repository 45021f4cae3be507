"""Group norms in one kernel: how it is cut, what it declines, and numbers far from zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from modules import array, const, graph, nn, shape_of, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, load_table, verify
from fusion_patterns.match import plan_fusion
from fusion_patterns.normalise import normalise
from fusion_patterns.run import Device, Session
from fusion_patterns.run import manifest as m
from fusion_patterns.run.replay import draw_inputs

TOLERANCE = 1e-5
Emit = Callable[[Any], Any]


def normalised(emit: Emit, x: Any, groups: int, axes: tuple[int, ...] = (2, 3)) -> Any:
    count = shape_of(x)[1]
    gamma, beta = const((count,), 1), const((count,), 2)
    return emit(nn.group_norm(x, gamma, beta, num_groups=groups, channel_axis=1, axes=list(axes)))


def between(shape: tuple[int, ...], groups: int, axes: tuple[int, ...] = (2, 3)) -> tvm.IRModule:
    """A group norm and relu between two convolutions."""

    def build(emit: Emit, x: Any) -> Any:
        value = emit(nn.conv2d(x, weight((shape[1], shape[1], 1, 1))))
        value = emit(nn.relu(normalised(emit, value, groups, axes)))
        return emit(nn.conv2d(value, weight((8, shape[1], 1, 1), 1)))

    return graph(build, [var("x", shape)])


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 16, 13, 11), 4), ((1, 24, 9, 7), 3), ((3, 8, 1, 1), 2), ((1, 8, 64, 48), 1), ((2, 4, 37, 1), 1)],
)
def test_any_image_is_normalised(opencl_device: Device, shape: tuple[int, ...], groups: int) -> None:
    report = verify(between(shape, groups), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    figures = report.compiled.report
    assert figures.composites["group_norm.chain"] == 1, figures.declined


@pytest.mark.opencl
def test_a_mean_far_from_zero_costs_no_digits_of_the_variance(opencl_device: Device) -> None:
    """Squares of numbers near 100 less the square of their mean would leave an error of 1e-3, as in stock TVM."""

    def build(emit: Emit, x: Any) -> list[Any]:
        value = emit(nn.max_pool2d(emit(op.add(x, relax.const(100.0, "float32"))), [2, 2], [2, 2]))
        out = normalised(emit, value, 2)
        return [emit(nn.conv2d(out, weight((8, 8, 1, 1)))), emit(nn.conv2d(value, weight((8, 8, 1, 1), 4)))]

    compiled = compile_module(graph(build, [var("x", (1, 8, 12, 12))]))
    assert compiled.report.composites["group_norm.chain"] == 1
    inputs = draw_inputs(compiled.manifest.functions["main"], 0, {})
    result, _ = Session(compiled.manifest, opencl_device).run(inputs)
    pixels = (inputs["x"].astype("float64") + 100).reshape(1, 8, 6, 2, 6, 2).max(axis=(3, 5))
    groups = pixels.reshape(1, 2, -1)
    off = groups - groups.mean(axis=2, keepdims=True)
    normal = (off / np.sqrt((off**2).mean(axis=2, keepdims=True) + 1e-5)).reshape(pixels.shape)
    gamma, beta = (array((8,), seed).reshape(8, 1, 1) for seed in (1, 2))
    matrix = array((8, 8), 0, scale=8**-0.5)
    expected = np.einsum("oc,nchw->nohw", matrix, normal * gamma + beta)
    assert np.abs(result - expected).max() < 1e-4


def test_a_work_group_has_a_group_of_channels() -> None:
    compiled = compile_module(between((2, 32, 16, 16), 4))
    launches = [
        step
        for step in m.all_steps(compiled.manifest.functions["main"].body)
        if isinstance(step, m.Launch) and step.label == "group_norm.chain"
    ]
    (launch,) = launches
    assert tuple(launch.grid) == (8, 1, 1)
    assert 32 <= launch.block[0] * launch.block[1] * launch.block[2] <= 256


def test_an_image_that_no_large_group_shares_evenly_is_left_to_stock() -> None:
    """257 pixels: a group of 257 threads is too large, and one thread would sum them all."""
    compiled = compile_module(between((1, 8, 257, 1), 2))
    reasons = [declined.reason for declined in compiled.report.declined if declined.row == "group_norm.chain"]
    assert set(reasons) == {"257 texels of a group of channels can't be shared evenly by many threads"}
    assert "group_norm.chain" not in compiled.report.composites


@pytest.mark.parametrize(
    ("shape", "groups", "axes", "reason"),
    [
        ((1, 12, 6, 6), 2, (2, 3), "`data.C % (4 * norm.num_groups) == 0` does not hold"),
        ((1, 7, 6, 6), 1, (2, 3), "`data.C % (4 * norm.num_groups) == 0` does not hold"),
        ((1, 8, 6, 6), 2, (3,), "axes"),
    ],
)
def test_near_misses(shape: tuple[int, ...], groups: int, axes: tuple[int, ...], reason: str) -> None:
    plan = plan_fusion(normalise(between(shape, groups, axes=axes)), load_table())
    assert "group_norm.chain" not in [match.row for match in plan.matches]
    (why,) = (decision.reason for decision in plan.decisions if decision.row == "group_norm.chain")
    assert reason in why
