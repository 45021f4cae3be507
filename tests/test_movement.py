"""Chains of reshapes and transpositions as permutations of factors, beside NumPy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from fusion_patterns.normalise.movement import Movement


def test_channels_go_last_and_come_back() -> None:
    last = Movement.of((2, 6, 4, 5)).permuted((0, 2, 3, 1))
    assert last.channels_last() == (2, 6, 20)
    assert not last.is_reshape
    rows = last.reshaped((40, 6))
    assert rows is not None
    assert rows.channels_last() == (2, 6, 20)
    back = rows.reshaped((2, 4, 5, 6))
    assert back is not None
    assert back.permuted((0, 3, 1, 2)).is_reshape


@pytest.mark.parametrize(
    ("axes", "image"),
    [
        ((0, 2, 3, 1), (2, 6, 20)),
        ((0, 1, 3, 2), (12, 4, 5)),  # rows are channels of images of one column
        ((0, 3, 2, 1), None),  # pixels in another order
        ((2, 3, 0, 1), None),  # the batch among the pixels
        ((1, 2, 3, 0), (1, 2, 120)),  # what was the batch is last
    ],
)
def test_which_orders_put_channels_last(axes: tuple[int, ...], image: tuple[int, ...] | None) -> None:
    assert Movement.of((2, 6, 4, 5)).permuted(axes).channels_last() == image


def test_a_dimension_that_a_reshape_does_not_divide_is_not_followed() -> None:
    assert Movement.of((4, 6)).reshaped((8, 3)) is not None
    assert Movement.of((4, 6)).permuted((1, 0)).reshaped((4, 6)) is None
    assert Movement.of((3, 5)).reshaped((5, 3)) is None


def test_chains_do_what_numpy_does() -> None:
    draw = random.Random(0)
    followed = last = 0
    for _ in range(2000):
        shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(4))
        array, movement = np.arange(math.prod(shape)).reshape(shape), Movement.of(shape)
        for _ in range(4):
            if draw.random() < 0.5:
                axes = tuple(draw.sample(range(array.ndim), array.ndim))
                movement, array = movement.permuted(axes), array.transpose(axes)
                continue
            size, new = array.size, []
            for _ in range(draw.randint(0, 3)):
                new.append(draw.choice([d for d in range(1, size + 1) if size % d == 0]))
                size //= new[-1]
            reshaped = movement.reshaped((*new, size))
            if reshaped is not None:
                movement, array = reshaped, array.reshape((*new, size))
                followed += 1
        source = np.arange(array.size).reshape(movement.factors).transpose(movement.order)
        assert movement.shape == array.shape
        np.testing.assert_array_equal(source.reshape(-1), array.reshape(-1))
        assert movement.is_reshape == bool((np.diff(array.reshape(-1)) == 1).all())
        image = movement.channels_last()
        if image is not None:
            last += 1
            pixels = np.arange(array.size).reshape(image).transpose(0, 2, 1)
            np.testing.assert_array_equal(pixels.reshape(-1), array.reshape(-1))
    assert followed > 1000
    assert last > 100
