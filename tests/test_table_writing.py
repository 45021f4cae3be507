"""A table written and read again is the same table; the JSON Schema is up to date."""

from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_patterns.table import Table, dump_table, json_schema, load_table, reading
from fusion_patterns.table.ops import OPS
from fusion_patterns.table.source import parse_yaml
from fusion_patterns.table.writing import schema_text


def again(table: Table) -> Table:
    """The table after it was written and read, without the checks."""
    return Table.model_validate(parse_yaml(dump_table(table), "t.yaml").value)


def test_the_builtin_table_comes_back(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(dump_table(load_table()))
    assert load_table(file).model_dump() == load_table().model_dump()


def test_how_it_looks() -> None:
    text = """\
schema_version: 1
name: t
sets:
  act: [nn.relu, "null"]
patterns:
  - name: r
    nodes:
      a: {op: nn.conv2d, in: [data, weight]}
      b: {op: [$act, add], optional: true}
    where:
      - {node: a, attr: groups, in: [1]}
      - {tensor: data, dtype: float32}
      - {that: "a.groups == 1"}
    scopes: {data: texture}
"""
    assert dump_table(Table.model_validate(parse_yaml(text, "t.yaml").value)) == text.replace(
        'sets:\n  act: [nn.relu, "null"]', 'sets: {act: [nn.relu, "null"]}'
    )


TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["1", "yes", "null", "a: b", "~", "1e3"]
)
NUMBER = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.booleans()
SCALAR = TEXT | NUMBER
OPS_OF_NODE = st.lists(st.sampled_from([*OPS, "$a"]), min_size=1, max_size=3)
NODE = st.fixed_dictionaries(
    {"op": OPS_OF_NODE},
    optional={
        "in": st.lists(TEXT, max_size=2),
        "optional": st.booleans(),
        "repeat": st.integers(1, 64) | st.just({"min": 2, "max": 3}),
    },
)
NODES = st.dictionaries(TEXT, NODE, min_size=1, max_size=3)
PREDICATE = st.fixed_dictionaries(
    {},
    optional={
        "node": TEXT,
        "that": TEXT,
        "dim": TEXT | st.integers(0, 9),
        "equals": SCALAR | st.lists(SCALAR, max_size=2),
        "in": st.lists(SCALAR | st.lists(SCALAR, max_size=2), max_size=3),
        "between": st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
        "broadcast": st.lists(st.sampled_from(["scalar", "other"]), max_size=2),
        "constant": st.booleans(),
        "dtype": st.lists(TEXT, max_size=2),
    },
)
ROW = st.fixed_dictionaries(
    {"name": st.just("r"), "nodes": NODES},
    optional={
        "because": TEXT,
        "where": st.lists(PREDICATE, max_size=3),
        "leaves": st.lists(TEXT, max_size=2),
        "scopes": st.dictionaries(TEXT, st.sampled_from(["texture", "any"]), max_size=2),
        "priority": st.integers(-9, 9),
    },
)
TABLE = st.fixed_dictionaries(
    {"name": TEXT.filter(bool), "patterns": st.lists(ROW, max_size=3)},
    optional={
        "sets": st.dictionaries(TEXT, st.lists(TEXT, max_size=3), max_size=2),
        "fragments": st.dictionaries(TEXT, st.fixed_dictionaries({"nodes": NODES}), max_size=2),
        "disable": st.lists(TEXT, max_size=2),
        "extends": TEXT,
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TABLE)
def test_every_table_comes_back(data: object) -> None:
    table = Table.model_validate(data)
    assert again(table).model_dump() == table.model_dump()


def test_the_schema_is_up_to_date() -> None:
    file = reading._FOLDER / "table.schema.json"
    assert file.read_text() == schema_text(), "write it again with `schema_text`"


def test_the_schema_knows_the_operators_and_no_origins() -> None:
    schema = json_schema()
    assert "elementwise" in schema["$defs"]["Op"]["anyOf"][0]["enum"]
    assert "origin" not in json.dumps(schema)
    assert set(schema["$defs"]["Node"]["properties"]) == {"op", "in", "optional", "repeat"}


def test_the_builtin_table_fits_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = (reading._FOLDER / "adreno.yaml").read_text()
    jsonschema.validate(parse_yaml(text, "adreno.yaml").value, json_schema())
