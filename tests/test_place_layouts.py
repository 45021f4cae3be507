"""Packed layouts: in and out without loss, and as TVM's own layout_transform does it."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from modules import array, var
from tvm import relax

from fusion_patterns.place.layouts import CHANNEL_VECTOR, DATA, DEPTHWISE, WEIGHT, Layout, layout
from fusion_patterns.place.probe import unpack_array

NAMES = [DATA, WEIGHT, DEPTHWISE, CHANNEL_VECTOR]


@st.composite
def packed(draw: Any) -> tuple[Layout, tuple[int, ...]]:
    kind = layout(draw(st.sampled_from(NAMES)))
    return kind, tuple(draw(st.integers(1, 9)) for _ in kind.axes)


def test_packed_shapes() -> None:
    assert layout(DATA).packed_shape((2, 6, 5, 7)) == (2, 2, 5, 7, 4)
    assert layout(WEIGHT).packed_shape((10, 3, 7, 7)) == (3, 1, 7, 7, 4, 4)
    assert layout(DEPTHWISE).packed_shape((10, 1, 3, 3)) == (3, 1, 3, 3, 4)
    assert layout(CHANNEL_VECTOR).packed_shape((9,)) == (3, 4)


def test_positions() -> None:
    assert layout(DATA).to_packed(1, 6, 2, 3) == (1, 1, 2, 3, 2)
    assert layout(WEIGHT).to_packed(6, 9, 0, 2) == (1, 2, 0, 2, 1, 2)


@given(packed(), st.data())
def test_a_position_survives_the_way_there_and_back(
    drawn: tuple[Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    kind, shape = drawn
    position = tuple(data.draw(st.integers(0, dim - 1)) for dim in shape)
    there = kind.to_packed(*position)
    assert all(0 <= i < dim for i, dim in zip(there, kind.packed_shape(shape), strict=True))
    assert kind.to_source(*there) == position


@given(packed())
def test_an_array_survives_the_way_there_and_back(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    kind, shape = drawn
    source = array(shape)
    there = kind.pack(source)
    assert there.shape == kind.packed_shape(shape)
    assert np.array_equal(unpack_array(there, kind.name, shape), source)


@given(packed())
def test_new_lanes_are_zero_and_nothing_else_changes(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    kind, shape = drawn
    there = kind.pack(np.ones(shape, "float32"))
    assert there.sum() == prod(shape)


@given(packed())
def test_packing_puts_an_element_where_its_position_says(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    kind, shape = drawn
    source = array(shape)
    there = kind.pack(source)
    for position in (tuple(0 for _ in shape), tuple(dim - 1 for dim in shape)):
        assert there[kind.to_packed(*position)] == source[position]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [4, 6])
def test_tvm_transforms_layouts_the_same_way(name: str, dim: int) -> None:
    kind = layout(name)
    shape = (dim,) * len(kind.axes)
    x = var("x", shape)
    names = ", ".join(f"i{k}" for k in range(len(shape)))
    index_map = eval(f"lambda {names}: to_packed({names})", {"to_packed": kind.to_packed})
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.layout_transform(x, index_map, pad_value=0.0)))
    vm = relax.VirtualMachine(relax.build(builder.get(), "llvm"), tvm.cpu())
    source = array(shape)
    assert np.array_equal(vm["main"](tvm.runtime.tensor(source)).numpy(), kind.pack(source))


@pytest.mark.parametrize(
    ("name", "shape", "view"),
    [
        ("NCHW4c", (1, 8, 1, 1), True),
        ("NCHW4c", (3, 8, 1, 1), True),
        ("NCHW4c", (1, 6, 1, 1), False),
        ("NCHW4c", (1, 8, 1, 2), False),
        ("C4c", (8,), True),
        ("OIHW4i4o", (4, 4, 1, 1), False),
        ("OIHW4o", (8, 1, 1, 1), True),
    ],
)
def test_a_view_has_the_same_numbers_in_the_same_order(name: str, shape: tuple[int, ...], view: bool) -> None:
    assert layout(name).is_view(shape) == view
    source = np.arange(np.prod(shape)).reshape(shape)
    packed = layout(name).pack(source)
    if view:
        assert packed.ravel().tolist() == source.ravel().tolist()
