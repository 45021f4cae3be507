"""The built-in table: what it says, row by row."""

from __future__ import annotations

import pytest

from fusion_patterns.table import Fragment, Row, Table, load_table, reading
from fusion_patterns.table.expand import ops_of, tensors_of
from fusion_patterns.table.ops import OPS
from fusion_patterns.table.source import parse_yaml


@pytest.fixture(scope="module")
def every_row() -> Table:
    """The built-in table with the rows that wait for their kernels."""
    text = (reading._FOLDER / "adreno.yaml").read_text()
    return load_table(Table.model_validate({**parse_yaml(text, "adreno.yaml").value, "disable": []}))


def row(table: Table, name: str) -> Row:
    return next(found for found in table.patterns if found.name == name)


def test_the_rows_that_have_kernels_are_on() -> None:
    assert [found.name for found in load_table().patterns] == [
        "conv2d.chain",
        "conv2d.depthwise",
        "conv2d.grouped",
    ]


def test_every_row_says_why_and_where(every_row: Table) -> None:
    assert len(every_row.patterns) == 9
    for found in every_row.patterns:
        assert found.because
        assert found.kernel
        assert found.scope_of("output") == found.scope_of("data") == "texture"
        if "weight" in tensors_of(found):
            assert found.scope_of("weight") == found.scope_of("bias_vector") == "global"
        assert found.scope_of(None) == "any"


def test_an_epilogue_is_elementwise(every_row: Table) -> None:
    alternatives = ops_of(every_row, row(every_row, "conv2d.chain").nodes["tail"])
    fragments = [found for found in alternatives if isinstance(found, Fragment)]
    ops = [found for found in alternatives if isinstance(found, str)]
    assert len(fragments) == 8
    assert "elementwise" in ops
    for fragment in fragments:
        for node in fragment.nodes.values():
            ops += [found for found in ops_of(every_row, node) if isinstance(found, str)]
    assert [name for name in ops if not OPS[name].is_elementwise] == []


def test_matches_start_at_the_main_operator(every_row: Table) -> None:
    anchors = {found.name: found.anchor_name() for found in every_row.patterns}
    assert anchors["conv2d.chain"] == "conv"
    assert anchors["conv2d.residual_pair"] == "a"
    assert anchors["elementwise.chain"] == "first"
