"""A shortcut with fewer channels than what it is added to is read in the epilogue; the numbers agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from modules import const, graph, nn, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, verify
from fusion_patterns.lower.compute.front import fronts_of
from fusion_patterns.run import Device

TOLERANCE = 1e-5


def conv(emit: Any, x: Any, channels: int, size: int = 1, seed: int = 0, **attrs: Any) -> Any:
    given = int(x.ty.shape.values[1]) // int(attrs.get("groups", 1))
    made = emit(nn.conv2d(x, weight((channels, given, size, size), seed), padding=[size // 2] * 2, **attrs))
    return emit(op.add(made, const((1, channels, 1, 1), seed + 1)))


def channels(emit: Any, x: Any, begin: int, end: int) -> Any:
    return emit(op.strided_slice(x, axes=[1], begin=[begin], end=[end]))


def front(
    emit: Any, x: Any, shortcut: Any, *, swapped: bool = False, step: Callable[..., Any] = op.add
) -> Any:
    """``concat(x[:, :k] + shortcut, x[:, k:])``."""
    whole, part = (int(value.ty.shape.values[1]) for value in (x, shortcut))
    first = channels(emit, x, 0, part)
    total = emit(step(shortcut, first) if swapped else step(first, shortcut))
    return emit(op.concat([total, channels(emit, x, part, whole)], axis=1))


def block(channels: int, **attrs: Any) -> Callable[[], tvm.IRModule]:
    """A convolution to ``channels``, whose first 7 or 8 get the block's input."""

    def build(emit: Any, x: Any) -> Any:
        value = nn.relu(conv(emit, x, int(x.ty.shape.values[1]), seed=2))
        value = emit(value)
        made = conv(emit, value, channels, 3, seed=4, **attrs)
        return conv(emit, front(emit, made, value), 8, seed=6)

    return lambda: graph(build, [var("x", (2, 7 if channels % 2 else 8, 6, 5))])


def within(
    step: Callable[..., Any], row: str, shape: tuple[int, ...]
) -> tuple[str, Callable[[], tvm.IRModule]]:
    def build(emit: Any, x: Any) -> Any:
        value = conv(emit, x, int(x.ty.shape.values[1]), seed=2)
        return [conv(emit, step(emit, value), 8, seed=6), conv(emit, value, 4, seed=7)]

    return row, lambda: graph(build, [var("x", shape)])


CASES: dict[str, tuple[str, Callable[[], tvm.IRModule]]] = {
    "whole blocks": ("conv2d.chain", block(12)),
    "inside a block": ("conv2d.chain", block(13)),
    "all in one block": ("conv2d.chain", block(9)),
    "groups": ("conv2d.grouped", block(16, groups=2)),
    "depthwise, the shortcut first": within(
        lambda e, v: front(e, conv(e, v, 11, 3, 3, groups=11), channels(e, v, 0, 6), swapped=True),
        "conv2d.depthwise",
        (1, 11, 5, 6),
    ),
    "after a prologue, with an activation": within(
        lambda e, v: e(nn.relu(front(e, conv(e, e(nn.relu(v)), 14, 3, 3), v))),
        "conv2d.prologue",
        (2, 9, 5, 6),
    ),
    "a pool": within(
        lambda e, v: front(e, e(nn.max_pool2d(v, [3, 3], padding=[1, 1])), conv(e, v, 5, seed=3)),
        "pool2d.chain",
        (1, 10, 6, 6),
    ),
    "elementwise, read twice": within(
        lambda e, v: (lambda y: e(op.multiply(y, e(op.sigmoid(y)))))(
            front(e, e(nn.relu(v)), conv(e, v, 5, seed=3))
        ),
        "elementwise.chain",
        (1, 10, 6, 6),
    ),
    "a number for each channel": within(
        lambda e, v: front(e, conv(e, v, 11, 3, 3), const((1, 6, 1, 1), 8)), "conv2d.chain", (1, 9, 5, 6)
    ),
    "averaged at once": within(
        lambda e, v: e(
            op.mean(
                front(e, conv(e, v, 14, seed=3, strides=[2, 2]), conv(e, v, 6, seed=5, strides=[2, 2])),
                [2, 3],
                True,
            )
        ),
        "conv2d.pooled",
        (1, 9, 10, 10),
    ),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", CASES)
def test_the_shortcut_is_read_where_the_sum_is_computed(opencl_device: Device, name: str) -> None:
    row, build = CASES[name]
    report = verify(build(), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert all(output.varies for output in report.outputs)
    assert report.compiled is not None
    figures = report.compiled.report
    assert row in figures.composites, [d for d in figures.declined if d.row == row]
    left = {"concat.chain", "slice.chain", "conv2d.concat"} if "depthwise" not in name else {"concat.chain"}
    assert not left & figures.composites.keys()


APART: dict[str, Callable[..., Any]] = {
    "the other half comes first": lambda e, v, s: e(
        op.concat([channels(e, v, 6, 12), e(op.add(channels(e, v, 0, 6), s))], axis=1)
    ),
    "channels are left out": lambda e, v, s: e(
        op.concat([e(op.add(channels(e, v, 0, 6), s)), channels(e, v, 7, 12)], axis=1)
    ),
    "the sum is of the back": lambda e, v, s: e(
        op.concat([e(op.add(channels(e, v, 6, 12), s)), channels(e, v, 6, 12)], axis=1)
    ),
    "three parts": lambda e, v, s: e(
        op.concat([e(op.add(channels(e, v, 0, 6), s)), channels(e, v, 6, 12), s], axis=1)
    ),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", APART)
def test_other_concats_keep_their_numbers(opencl_device: Device, name: str) -> None:
    def build(emit: Any, x: Any) -> Any:
        shortcut = conv(emit, x, 6, seed=2)
        return conv(emit, APART[name](emit, conv(emit, x, 12, 3), shortcut), 8, seed=6)

    mod = graph(build, [var("x", (2, 8, 6, 5))])
    assert fronts_of([b for block in mod["main"].body.blocks for b in block.bindings]) == ({}, set())
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE


def test_a_part_that_others_read_has_to_be_there() -> None:
    def build(emit: Any, x: Any) -> Any:
        value = conv(emit, x, 12, 3)
        first = channels(emit, value, 0, 6)
        total = emit(op.add(first, conv(emit, x, 6, seed=2)))
        whole = emit(op.concat([total, channels(emit, value, 6, 12)], axis=1))
        return [conv(emit, whole, 8, seed=6), emit(nn.max_pool2d(total, [2, 2]))]

    mod = graph(build, [var("x", (1, 8, 6, 6))])
    report = compile_module(mod).report
    reasons = [d.reason for d in report.declined if d.row == "conv2d.chain"]
    assert any(
        "`lv5` (add) is also used by" in reason and "outside the match" in reason for reason in reasons
    ), reasons


def test_a_step_is_found_once() -> None:
    """Two of them one after the other, and the second reads what the first made."""

    def build(emit: Any, x: Any, s: Any) -> Any:
        return front(emit, front(emit, emit(nn.relu(x)), s), s, step=op.multiply)

    mod = graph(build, [var("x", (1, 9, 4, 4)), var("s", (1, 5, 4, 4))])
    found, between = fronts_of([b for block in mod["main"].body.blocks for b in block.bindings])
    assert [step.channels for step in found.values()] == [5, 5]
    assert [str(step.call.op.name) for step in found.values()] == ["relax.add", "relax.multiply"]
    assert len(between) == 6
    assert isinstance(next(iter(found)), relax.Var)
