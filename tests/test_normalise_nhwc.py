"""What an image with its channels last is scaled by goes behind the turn to channels first; the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from networks import random_inputs, run_on_cpu
from test_normalise import const, function
from tvm import relax
from tvm.relax import op

from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.rewrite import op_name

SHAPE = (2, 3, 4, 5)
TO_NCHW = [0, 3, 1, 2]


def operators(mod: Any) -> list[str]:
    """The operators of a module in inference form, which computes what it did before."""
    normal = normalise(mod)
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(normal, inputs), run_on_cpu(mod, inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return [op_name(b.value) for block in normal["main"].body.blocks for b in block.bindings]


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (lambda x: op.multiply(x, const(5)), ["permute_dims", "multiply"]),
        (lambda x: op.add(const(5), x), ["permute_dims", "add"]),
        (lambda x: op.subtract(const(1, 1, 5), x), ["permute_dims", "subtract"]),
        (lambda x: op.divide(x, const(3, 4, 1, low=1.0)), ["permute_dims", "divide"]),
        (lambda x: op.multiply(x, relax.const(2.0)), ["permute_dims", "multiply"]),
        (lambda x: op.multiply(x, const(2, 3, 4, 5)), ["permute_dims", "multiply"]),
        (lambda x: op.power(op.abs(x), const(5, low=1.0)), ["abs", "power", "permute_dims"]),
    ],
)
def test_constants_go_behind_the_turn(scale: Callable[[Any], Any], wanted: list[str]) -> None:
    def build(bb: Any, x: Any) -> Any:
        return bb.emit(op.permute_dims(bb.emit(scale(x)), TO_NCHW))

    assert operators(function(build, SHAPE)) == wanted


def test_two_constants_both_go() -> None:
    def build(bb: Any, x: Any) -> Any:
        scaled = bb.emit(op.add(bb.emit(op.multiply(x, const(5))), const(5, seed=1)))
        return bb.emit(op.permute_dims(scaled, TO_NCHW))

    assert operators(function(build, SHAPE)) == ["permute_dims", "multiply", "add"]


def test_another_reader_wants_the_scaled_image_as_it_is() -> None:
    def build(bb: Any, x: Any) -> Any:
        scaled = bb.emit(op.multiply(x, const(5)))
        return bb.emit(relax.Tuple([bb.emit(op.permute_dims(scaled, TO_NCHW)), scaled]))

    assert operators(function(build, SHAPE))[:2] == ["multiply", "permute_dims"]


def test_other_orders_stay() -> None:
    def build(bb: Any, x: Any) -> Any:
        return bb.emit(op.permute_dims(bb.emit(op.multiply(x, const(5))), [0, 2, 1, 3]))

    assert operators(function(build, SHAPE)) == ["multiply", "permute_dims"]


def test_a_vector_that_becomes_an_image_only_with_the_constant_stays() -> None:
    def build(bb: Any, x: Any) -> Any:
        return bb.emit(op.permute_dims(bb.emit(op.multiply(x, const(2, 3, 4, 5))), TO_NCHW))

    assert operators(function(build, (5,))) == ["multiply", "permute_dims"]


def test_two_images_stay() -> None:
    def build(bb: Any, x: Any, y: Any) -> Any:
        return bb.emit(op.permute_dims(bb.emit(op.multiply(x, y)), TO_NCHW))

    assert operators(function(build, SHAPE, SHAPE)) == ["multiply", "permute_dims"]
