"""Concats of concats become one, as in the last blocks of an Inception; the numbers stay."""

from __future__ import annotations

import numpy as np
import pytest
from networks import random_inputs, run_on_cpu
from test_normalise import function
from tvm import relax

from fusion_patterns.lower.normalise import normalise
from fusion_patterns.lower.rewrite import op_name

SHAPE = (1, 4, 3, 3)


def concats(mod) -> list[int]:
    """How many tensors each concat of ``main`` joins."""
    found = []
    for block in mod["main"].body.blocks:
        tuples = {b.var: b.value for b in block.bindings if isinstance(b.value, relax.Tuple)}
        for binding in block.bindings:
            if op_name(binding.value) == "concat":
                parts = binding.value.args[0]
                found.append(len(tuples.get(parts, parts).fields))
    return found


def nested(inner_axis: int, outer_axis: int, uses: int = 1):
    def build(bb, a, b, c):
        inner = bb.emit(relax.op.concat([a, b], inner_axis))
        c = bb.emit(relax.op.concat([c, c], inner_axis)) if inner_axis % 4 != outer_axis % 4 else c
        outer = bb.emit(relax.op.concat([inner, c], outer_axis))
        return outer if uses == 1 else bb.emit(relax.Tuple([outer, inner]))

    return function(build, SHAPE, SHAPE, SHAPE)


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (-3, 1), (2, -2)])
def test_concats_along_one_axis_become_one(inner: int, outer: int) -> None:
    mod = nested(inner, outer)
    normal = normalise(mod)
    assert concats(normal) == [3]
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_concats_along_two_axes_stay() -> None:
    assert concats(normalise(nested(1, 2))) == [2, 2, 2]


def test_an_inner_concat_that_others_read_stays() -> None:
    assert concats(normalise(nested(1, 1, uses=2))) == [2, 2]


@pytest.mark.parametrize(
    ("begin", "end", "bounds"), [(-3, 2**31 - 1, (5, 8)), (-6, -2, (2, 6)), (1, 99, (1, 8))]
)
def test_bounds_from_the_end_are_counted_from_the_front(
    begin: int, end: int, bounds: tuple[int, int]
) -> None:
    def build(bb, x):
        return bb.emit(relax.op.strided_slice(x, axes=[1], begin=[begin], end=[end]))

    mod = function(build, (1, 8, 4, 4))
    normal = normalise(mod)
    (call,) = [b.value for block in normal["main"].body.blocks for b in block.bindings if op_name(b.value)]
    assert tuple(int(arg.fields[0].value) for arg in call.args[2:4]) == bounds
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
