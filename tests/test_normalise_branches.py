"""Parallel branches that are linear in one value become one convolution, as in RepVGG; the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_normalise import batch_norm, check, const, function
from tvm import relax
from tvm.relax.op import nn

op = relax.op
ONE = {"nn.conv2d": 1, "add": 1}
SHAPE = (2, 6, 9, 7)


def conv(bb: Any, x: Any, channels: int, size: int | tuple[int, int], seed: int = 0, **attrs: Any) -> Any:
    size = (size, size) if isinstance(size, int) else size
    given = int(x.ty.shape.values[1]) // int(attrs.get("groups", 1))
    made = bb.emit(nn.conv2d(x, const(channels, given, *size, seed=seed), **attrs))
    return batch_norm(bb, made, channels)


def summed(*branches: Callable[..., Any]) -> Callable[..., Any]:
    def build(bb: Any, x: Any) -> Any:
        first, *others = (branch(bb, x) for branch in branches)
        for other in others:
            first = bb.emit(op.add(first, other))
        return nn.relu(first)

    return build


def identity(bb: Any, x: Any) -> Any:
    return batch_norm(bb, x, int(x.ty.shape.values[1]))


JOINED: dict[str, tuple[Callable[..., Any], ...]] = {
    "RepVGG": (
        lambda bb, x: conv(bb, x, 6, 1),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=1),
        identity,
    ),
    "RepGhost": (lambda bb, x: conv(bb, x, 6, 3, padding=1, groups=6), identity),
    "the scaled value first": (identity, lambda bb, x: conv(bb, x, 6, 3, padding=1)),
    "scaled without a shift": (
        lambda bb, x: conv(bb, x, 6, 3, padding=1),
        lambda bb, x: bb.emit(op.multiply(x, const(6, 1, 1))),
    ),
    "groups of two": (lambda bb, x: conv(bb, x, 6, 3, padding=1, groups=3), identity),
    "dilation": (lambda bb, x: conv(bb, x, 6, 3, padding=2, dilation=2, groups=6), identity),
    "a window that is not square": (
        lambda bb, x: conv(bb, x, 6, (3, 5), padding=[1, 2]),
        lambda bb, x: conv(bb, x, 6, (1, 3), 1, padding=[0, 1]),
    ),
    "stride": (
        lambda bb, x: conv(bb, x, 8, 3, padding=1, strides=2),
        lambda bb, x: conv(bb, x, 8, 1, 1, strides=2),
    ),
    "a border on one side": (lambda bb, x: conv(bb, x, 6, 2, padding=[1, 1, 0, 0]), identity),
    "two of one size": (
        lambda bb, x: conv(bb, x, 5, 3, padding=1),
        lambda bb, x: conv(bb, x, 5, 3, 1, padding=1),
    ),
    "a dilated window in a wider one": (
        lambda bb, x: conv(bb, x, 6, 5, padding=2, groups=6),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=2, dilation=2, groups=6),
    ),
}


@pytest.mark.parametrize("name", JOINED)
def test_branches_become_one_convolution(name: str) -> None:
    found = check(function(summed(*JOINED[name]), SHAPE))
    assert found == {**ONE, "nn.relu": 1}


APART: dict[str, tuple[Callable[..., Any], ...]] = {
    "another stride, the same size": (
        lambda bb, x: conv(bb, x, 6, (9, 7), padding=[3, 2]),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=[3, 2], strides=2),
    ),
    "no window lies in the other": (
        lambda bb, x: conv(bb, x, 6, (3, 1), padding=[1, 0]),
        lambda bb, x: conv(bb, x, 6, (1, 3), 1, padding=[0, 1]),
    ),
    "other groups": (
        lambda bb, x: conv(bb, x, 6, 3, padding=1),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=1, groups=6),
    ),
    "taps between taps": (
        lambda bb, x: conv(bb, x, 6, 3, padding=2, dilation=2),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=1),
    ),
    "the convolution does not read the pixel itself": (
        lambda bb, x: conv(bb, x, 6, 2, padding=1, dilation=2),
        identity,
    ),
    "another value is scaled": (
        lambda bb, x: conv(bb, x, 6, 3, padding=1),
        lambda bb, x: identity(bb, bb.emit(op.exp(x))),
    ),
    "the value itself": (lambda bb, x: conv(bb, x, 6, 3, padding=1), lambda bb, x: x),
    "a factor for each pixel": (
        lambda bb, x: conv(bb, x, 6, 3, padding=1),
        lambda bb, x: bb.emit(op.multiply(x, const(9, 7))),
    ),
    "a product": (lambda bb, x: conv(bb, x, 6, 3, padding=1), lambda bb, x: bb.emit(op.multiply(x, x))),
}


@pytest.mark.parametrize("name", APART)
def test_other_branches_stay(name: str) -> None:
    found = check(function(summed(*APART[name]), SHAPE))
    assert found != {**ONE, "nn.relu": 1}
    assert found["add"] >= 2


def test_a_branch_of_one_pixel_that_is_broadcast_stays() -> None:
    branches = (
        lambda bb, x: conv(bb, x, 6, 3, padding=1),
        lambda bb, x: conv(bb, x, 6, 3, 1, padding=[1, 1, 0, 0]),
    )
    assert check(function(summed(*branches), (2, 6, 2, 2))) == {"nn.conv2d": 2, "add": 3, "nn.relu": 1}


def test_a_branch_that_others_read_stays() -> None:
    def build(bb: Any, x: Any) -> Any:
        scaled = identity(bb, x)
        whole = bb.emit(op.add(conv(bb, x, 6, 3, padding=1), scaled))
        return relax.Tuple([whole, bb.emit(op.exp(scaled))])

    assert check(function(build, SHAPE)) == {"nn.conv2d": 1, "add": 3, "multiply": 1, "exp": 1}


def test_weights_that_are_parameters_stay() -> None:
    def build(bb: Any, x: Any, weight: Any) -> Any:
        return op.add(bb.emit(nn.conv2d(x, weight, padding=1)), identity(bb, x))

    assert check(function(build, SHAPE, (6, 6, 3, 3))) == {"nn.conv2d": 1, "add": 2, "multiply": 1}


def test_a_sum_that_float16_can_not_hold_stays() -> None:
    def build(bb: Any, x: Any) -> Any:
        weight = relax.const(np.full((4, 1, 3, 3), 6e4, "float16"))
        scaled = bb.emit(op.multiply(x, relax.const(np.full((4, 1, 1), 6e4, "float16"))))
        return op.add(bb.emit(nn.conv2d(x, weight, padding=1, groups=4)), scaled)

    found = check(function(build, (1, 4, 4, 4), dtype="float16"), numbers=False)
    assert found == {"nn.conv2d": 1, "add": 1, "multiply": 1}


def test_float16_branches() -> None:
    def build(bb: Any, x: Any) -> Any:
        made = bb.emit(nn.conv2d(x, const(4, 1, 3, 3, dtype="float16"), padding=1, groups=4))
        return op.add(made, bb.emit(op.multiply(x, const(4, 1, 1, seed=1, dtype="float16"))))

    assert check(function(build, (1, 4, 5, 5), dtype="float16"), tolerance=4e-3) == {"nn.conv2d": 1}


def test_integer_branches_stay() -> None:
    def build(bb: Any, x: Any) -> Any:
        weight = relax.const(np.full((4, 1, 3, 3), 3, "int32"))
        scaled = bb.emit(op.multiply(x, relax.const(np.full((4, 1, 1), 5, "int32"))))
        return op.add(bb.emit(nn.conv2d(x, weight, padding=1, groups=4)), scaled)

    found = check(function(build, (1, 4, 4, 4), dtype="int32"), numbers=False)
    assert found == {"nn.conv2d": 1, "add": 1, "multiply": 1}
