"""Sets and fragments looked up, and the names that are tensors."""

from __future__ import annotations

import gc

import pytest

from fusion_patterns.errors import TableError
from fusion_patterns.table import Fragment, Node, Row, Table, expand
from fusion_patterns.table.expand import ops_of, tensors_of

SILU = {"nodes": {"gate": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "gate"]}}}


def table() -> Table:
    return Table.model_validate(
        {
            "name": "t",
            "sets": {"a": ["add", "$b", "$silu"], "b": ["nn.relu", "add"], "circle": ["abs", "$circle"]},
            "fragments": {"silu": SILU},
        }
    )


def test_sets_are_flattened_in_order_and_once() -> None:
    silu = Fragment.model_validate(SILU)
    assert ops_of(table(), Node(op=("$a", "clip", "nn.relu"))) == ("add", "nn.relu", silu, "clip")


def test_a_plain_operator_stands_for_itself() -> None:
    assert ops_of(table(), Node(op=("clip",))) == ("clip",)


def test_a_set_that_contains_itself_ends() -> None:
    assert ops_of(table(), Node(op=("$circle",))) == ("abs",)


def test_an_unknown_set_is_an_error() -> None:
    with pytest.raises(TableError, match="the table 't' has no set or fragment '\\$z'"):
        ops_of(table(), Node(op=("$z",)))


def test_the_cache_lives_as_long_as_the_table() -> None:
    made = table()
    key = id(made)
    assert ops_of(made, Node(op=("$a",))) is ops_of(made, Node(op=("$a",)))
    assert key in expand._expanded
    del made
    gc.collect()
    assert key not in expand._expanded


def test_tensors_are_names_that_are_no_nodes() -> None:
    row = Row.model_validate(
        {
            "name": "r",
            "nodes": {
                "a": {"op": "nn.conv2d", "in": ["data", "weight"]},
                "b": {"op": "add", "in": ["a", "data"]},
                "c": {"op": "nn.relu"},
            },
        }
    )
    assert tensors_of(row) == ("data", "weight")
