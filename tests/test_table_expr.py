"""The small language of `that`: what it says, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion_patterns.table.expr import ExpressionError, UndecidableError, parse

VALUES = {"groups": 8, "C": 8, "I": 1, "strides": (2, 1), "shape": (1, 8, 4, 4), "layout": "NCHW"}


def lookup(subject: str, field: str) -> Any:
    assert subject in ("conv", "data")
    return VALUES[field]


@pytest.mark.parametrize(
    "text",
    [
        "conv.groups == data.C and data.I == 1",
        "conv.groups != 1",
        "data.C % 4 == 0",
        "data.C // 3 == 2 and -data.C < 0",
        "(data.C + 1) * 2 - 3 == 15",
        "1 < conv.strides[0] <= 2",
        "not conv.strides[1] > 1",
        "conv.groups == 1 or data.C >= 8.0",
        "conv.shape == data.shape",
        "  conv.groups == 8\n  and data.C == 8",
    ],
)
def test_true(text: str) -> None:
    assert parse(text).evaluate(lookup) is True


@pytest.mark.parametrize(
    "text", ["conv.groups == 1", "1 < data.C < 8", "not data.C == 8", "data.C == 8 and 1 > 2"]
)
def test_false(text: str) -> None:
    assert parse(text).evaluate(lookup) is False


def test_names() -> None:
    text = "conv.groups == data.C and conv.strides[0] == 1 and conv.groups > 1"
    assert parse(text).names() == {("conv", "groups"), ("data", "C"), ("conv", "strides")}


def test_a_part_that_is_not_needed_is_not_looked_up() -> None:
    assert parse("conv.groups == 8 or conv.missing == 1").evaluate(lookup)


@pytest.mark.parametrize(
    ("text", "column", "start"),
    [
        ("", 1, "the condition is empty"),
        ("a.b", 1, "a comparison is needed here"),
        ("1 + 2", 1, "a comparison is needed here"),
        ("a.b == c", 8, "'c' is only a name; ask for one of its fields: `c.C`"),
        ("a.b == 1 and f(1) == 2", 14, "only numbers, `name.field`"),
        ("a.b == 'NCHW'", 8, "only numbers can stand here; compare text with `attr:`"),
        ("a.b == True", 8, "write 1 for true and 0 for false"),
        ("a.b == (", 8, "can't read the condition from here"),
        ("a.b == 1) or (a.b == 2", 9, "can't read the condition from here"),
        ("a.b / 2 == 1", 1, "`/` is not known here; write `//`"),
        ("a.b in c.d", 1, "only == != < <= > >= compare"),
        ("a.b[c.d] == 1", 5, "an index is a whole number"),
        ("a.b[-1] == 1", 5, "an index is a whole number"),
        ("a[0] == 1", 1, "an index follows a field"),
        ("  a.b.c == 1", 3, "a field is one name, a dot and one name"),
        ("a.b == 2 ** 9", 8, "only numbers, `name.field`"),
        ("a.b == 1 # one", 10, "the character '#' can't stand in a condition"),
        ("a.b == é", 8, "the character 'é' can't stand in a condition"),
        ("(x := a.b) == 1", 2, "only numbers"),
        ("a.b == 1 if a.b else 2", 1, "a comparison is needed here"),
        ("not " * 60 + "a.b == 1", 165, "the condition is nested more than 40 deep"),
        ("a.b == " + "1+" * 300 + "1", 501, "the condition is longer than 500 characters"),
    ],
)
def test_refused(text: str, column: int, start: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert str(caught.value).startswith(start)
    assert caught.value.column == column


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.C % 0 == 1", "8 % 0 has no value"),
        ("conv.strides[5] == 1", "there is no conv.strides[5]"),
        ("data.C[0] == 1", "there is no data.C[0]"),
        ("conv.layout + 1 == 2", "`+` needs a number, not 'NCHW'"),
        ("conv.shape < 2", "`<` needs a number, not (1, 8, 4, 4)"),
    ],
)
def test_undecidable(text: str, message: str) -> None:
    with pytest.raises(UndecidableError) as caught:
        parse(text).evaluate(lookup)
    assert str(caught.value) == message


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from("ab.=<>()[]+-*/%019 notrd'\"\\,:#\n_"), max_size=40))
@example("0x_ == 1")
@example("(" * 300)
@example("\\")
def test_every_other_text_is_refused_with_a_column(text: str) -> None:
    column = 1
    try:
        parse(text)
    except ExpressionError as error:
        column = error.column
    assert 1 <= column <= len(text) + 1


SIMPLE = st.integers(-9, 9).map(str) | st.sampled_from(["conv.groups", "data.C", "conv.strides[0]"])
NUMBERS = st.recursive(
    SIMPLE,
    lambda n: st.tuples(n, st.sampled_from(["+", "-", "*", "//", "%"]), n).map(lambda t: f"({' '.join(t)})"),
)
TRUTHS = st.recursive(
    st.tuples(NUMBERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS).map(" ".join),
    lambda t: st.tuples(t, st.sampled_from(["and", "or", "and not"]), t).map(lambda t: f"({' '.join(t)})"),
)


class _Fields:
    groups, C, strides = 8, 8, (2, 1)


@settings(max_examples=200, deadline=None)
@given(TRUTHS)
def test_it_means_what_python_means(text: str) -> None:
    if len(text) > 500:
        return
    try:
        expected = eval(text, {"conv": _Fields, "data": _Fields})  # the peer
    except ZeroDivisionError:
        with pytest.raises(UndecidableError):
            parse(text).evaluate(lookup)
    else:
        assert parse(text).evaluate(lookup) is expected
