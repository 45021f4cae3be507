"""Concats of concats become one, as in the last blocks of an Inception; the numbers stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from networks import random_inputs, run_on_cpu
from test_normalise import function
from tvm import relax

from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.rewrite import op_name

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


PARTS = ((2, 4, 3, 3), (2, 3, 3, 3), (2, 5, 3, 3))


def cut(begin: int, end: int, readers: int = 1):
    """Some channels of a concat of 4, 3 and 5; with two readers the whole is read as well."""

    def build(bb, *parts):
        whole = bb.emit(relax.op.concat(list(parts), 1))
        part = bb.emit(relax.op.nn.relu(bb.emit(relax.op.strided_slice(whole, [1], [begin], [end]))))
        return part if readers == 1 else bb.emit(relax.Tuple([part, bb.emit(relax.op.exp(whole))]))

    return function(build, *PARTS)


@pytest.mark.parametrize(
    ("begin", "end", "readers", "operators"),
    [
        (4, 7, 1, {}),
        (4, 7, 2, {"concat": 1}),
        (5, 7, 1, {"strided_slice": 1}),
        (8, 11, 2, {"strided_slice": 1, "concat": 1}),
        (4, 12, 1, {"concat": 1}),
        (0, 7, 1, {"concat": 1}),
        # A concat of parts of parts would be no less than it is now.
        (4, 11, 1, {"strided_slice": 1, "concat": 1}),
        (2, 7, 1, {"strided_slice": 1, "concat": 1}),
        (4, 12, 2, {"strided_slice": 1, "concat": 1}),
    ],
)
def test_a_slice_of_a_concat_is_taken_from_its_parts(
    begin: int, end: int, readers: int, operators: dict[str, int]
) -> None:
    mod = cut(begin, end, readers)
    normal = normalise(mod)
    found = Counter(op_name(b.value) for block in normal["main"].body.blocks for b in block.bindings)
    assert {name: count for name, count in found.items() if name in ("concat", "strided_slice")} == operators
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_part_that_a_concat_still_reads_is_no_value_with_one_reader() -> None:
    """What scales the slice must not make a second convolution of it."""

    def build(bb, x):
        weights = relax.const(np.random.default_rng(0).standard_normal((4, 4, 1, 1)).astype("float32"))
        scale = relax.const(np.arange(1, 5, dtype="float32").reshape(1, 4, 1, 1))
        whole = bb.emit(relax.op.concat([bb.emit(relax.op.nn.conv2d(x, weights)), x], 1))
        part = bb.emit(relax.op.strided_slice(whole, [1], [0], [4]))
        return bb.emit(relax.Tuple([bb.emit(relax.op.multiply(part, scale)), bb.emit(relax.op.exp(whole))]))

    mod = function(build, SHAPE)
    normal = normalise(mod)
    found = Counter(op_name(b.value) for block in normal["main"].body.blocks for b in block.bindings)
    assert (found["nn.conv2d"], found["strided_slice"], found["multiply"]) == (1, 0, 1)
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
