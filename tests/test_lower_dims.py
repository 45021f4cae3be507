"""Extents as text for the runtime: what TVM computes and what the runtime evaluates are one number."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_map

from fusion_patterns.lower.dims import dim, symbols
from fusion_patterns.run.interpret import evaluate

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def const(value: int) -> Any:
    return tirx.const(value, "int64")


BY_ANY = [tirx.Add, tirx.Sub, tirx.Min, tirx.Max]
BY_NUMBER = [tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.shift_left, tirx.shift_right]


@st.composite
def expressions(draw: Any, depth: int = 4) -> Any:
    """An extent over `n` and `m`, of every operator that host code holds."""
    kind = draw(st.sampled_from(["leaf", "any", "number"])) if depth else "leaf"
    if kind == "leaf":
        return draw(st.one_of(st.sampled_from([N, M]), st.integers(0, 50).map(const)))
    left = draw(expressions(depth - 1))
    if kind == "any":
        return draw(st.sampled_from(BY_ANY))(left, draw(expressions(depth - 1)))
    return draw(st.sampled_from(BY_NUMBER))(left, const(draw(st.integers(1, 5))))


@given(expressions(), st.integers(1, 100), st.integers(1, 100))
def test_the_runtime_computes_what_tvm_computes(expr: Any, n: int, m: int) -> None:
    values = {"n": const(n), "m": const(m)}
    numbers = structural_map(expr, (type(N), lambda var: values[str(var.name)]))
    assert evaluate(dim(expr), {"n": n, "m": m}) == int(Analyzer().simplify(numbers))


def test_numbers_are_folded() -> None:
    assert dim(7) == 7
    assert dim(const(7)) == 7
    assert dim(tirx.Add(const(3), tirx.Mul(const(2), const(5)))) == 13
    assert dim(tirx.Max(const(3), const(2))) == 3


def test_a_variable_stands_for_what_the_caller_says() -> None:
    assert dim(N) == "n"
    assert dim(N, {"n": 5}) == 5
    assert dim(N + const(1), {"n": "batch"}) == "(batch + 1)"
    assert dim(N + const(1), {"n": 4}) == 5


def test_what_the_runtime_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the extent .* can't be computed at run time$"):
        dim(tirx.Select(const(1) < N, N, const(1)))


def test_a_choice_that_no_extent_changes_is_made_now() -> None:
    """TVM asks whether -1 <= n before it divides; what a name stands for may be negative, so it isn't known."""
    choice = tirx.Select(const(-1) <= N, N + const(1), N - const(1))
    assert dim(choice) == "(n + 1)"
    assert dim(tirx.Select(tirx.Not(const(-1) <= N), N + const(1), N - const(1))) == "(n - 1)"
    with pytest.raises(ValueError, match="can't be computed at run time"):
        dim(choice, {"n": "other"})


def test_symbols_are_read_off_an_arguments_extents() -> None:
    assert symbols([N, const(4), M], ["batch", 4, 7]) == {"n": "batch", "m": 7}


def test_symbols_need_the_same_rank() -> None:
    with pytest.raises(ValueError, match="zip"):
        symbols([N], [1, 2])
