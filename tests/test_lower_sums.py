"""Sums of what was only put together: adds, with the numbers as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from modules import graph, var
from networks import random_inputs, run_on_cpu
from tvm import relax
from tvm.relax import op

from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.rewrite import op_name

X = (1, 6, 5, 4)
Emit = Callable[[Any], Any]


def terms(emit: Emit, x: Any, count: int) -> list[Any]:
    return [emit(op.multiply(x, relax.const(0.5 + k, "float32"))) for k in range(count)]


def stacked(axis: int, along: int, count: int = 3, keepdims: bool = False) -> Callable[..., Any]:
    return lambda e, x: e(op.sum(e(op.stack(terms(e, x, count), axis)), [along], keepdims=keepdims))


def joined(axis: int = 0, shape: tuple[int, ...] = (3, *X), along: int = 0) -> Callable[..., Any]:
    return lambda e, x: e(op.sum(e(op.reshape(e(op.concat(terms(e, x, 3), axis)), shape)), [along]))


def operators(mod: tvm.IRModule) -> Counter[str]:
    found: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if name := op_name(expr):
            found[name] += 1

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


@pytest.mark.parametrize(
    ("build", "adds"),
    [
        pytest.param(stacked(0, 0), 2, id="stack"),
        pytest.param(stacked(2, 2, 2), 1, id="stack in the middle"),
        pytest.param(stacked(-1, 4), 2, id="stack at the end"),
        pytest.param(joined(), 2, id="concat and reshape"),
        pytest.param(stacked(0, 1), 0, id="another axis"),
        pytest.param(stacked(0, 0, keepdims=True), 0, id="the axis is kept"),
        pytest.param(stacked(0, 0, 9), 0, id="too many"),
        pytest.param(joined(1, (3, 1, 6, 5, 4)), 0, id="concat of channels"),
        pytest.param(joined(0, (1, 18, 5, 4), 1), 0, id="a sum within the parts"),
    ],
)
def test_a_sum_of_parts(build: Callable[..., Any], adds: int) -> None:
    mod = graph(build, [var("x", X)])
    out = normalise(mod)
    found = operators(out)
    assert found["add"] == adds
    assert bool(found["sum"]) == (not adds)
    inputs = random_inputs(mod["main"])
    for given, wanted in zip(run_on_cpu(out, inputs), run_on_cpu(mod, inputs), strict=True):
        assert np.abs(given - wanted).max() < 1e-5


def test_parts_that_others_read_joined_stay() -> None:
    def build(emit: Emit, x: Any) -> list[Any]:
        whole = emit(op.stack(terms(emit, x, 3), 0))
        return [emit(op.sum(whole, [0])), whole]

    assert operators(normalise(graph(build, [var("x", X)])))["sum"] == 1
