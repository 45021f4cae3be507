"""The built-in table: what it says, row by row."""

from __future__ import annotations

import pytest

from fusion_patterns.table import Fragment, Row, Table, load_table
from fusion_patterns.table.expand import ops_of, tensors_of
from fusion_patterns.table.ops import OPS


@pytest.fixture(scope="module")
def every_row() -> Table:
    return load_table()


def row(table: Table, name: str) -> Row:
    return next(found for found in table.patterns if found.name == name)


ROWS = [
    "conv2d.chain",
    "conv2d.first",
    "conv2d.first.nhwc",
    "conv2d.to_nhwc",
    "conv2d.pooled",
    "conv2d.max_pool",
    "conv2d.first.max_pool",
    "conv2d.prologue",
    "conv2d.concat",
    "conv2d.enlarged",
    "conv2d.depthwise",
    "conv2d.depthwise.to_nhwc",
    "conv2d.depthwise.prologue",
    "conv2d.depthwise.shuffled",
    "conv2d.grouped",
    "conv2d.grouped.prologue",
    "conv2d.residual_pair",
    "conv2d_transpose.chain",
    "pool2d.chain",
    "lrn.chain",
    "global_pool.mean",
    "global_pool.adaptive",
    "layer_norm.chain",
    "layer_norm.depthwise",
    "group_norm.chain",
    "concat.chain",
    "concat.resized",
    "concat.resized.three",
    "concat.resized.four",
    "resize2d.chain",
    "resize2d.prologue",
    "resize2d.sum",
    "slice.chain",
    "shuffle.chain",
    "move.chain",
    "elementwise.chain",
    "dense.chain",
    "conv2d.excite",
    "conv2d.gate",
    "conv2d.excite.gate",
    "dense.gate",
    "dense.pooled",
    "pool2d.adaptive",
]
VECTORS = ("dense.chain", "dense.pooled", "conv2d.excite")
"""Rows whose results are too few for an image."""


def test_the_rows_and_their_order(every_row: Table) -> None:
    assert [found.name for found in every_row.patterns] == ROWS


def test_every_row_says_why_and_where(every_row: Table) -> None:
    for found in every_row.patterns:
        assert found.because
        assert found.kernel
        plain = found.name in VECTORS or found.name.endswith("to_nhwc")
        assert found.scope_of("output") == ("global" if plain else "texture")
        if "data" in tensors_of(found):
            other = dict.fromkeys(("conv2d.first", "conv2d.first.max_pool", "concat.chain"), "any")
            other |= dict.fromkeys(
                ("dense.chain", "conv2d.excite", "conv2d.first.nhwc", "move.chain"), "global"
            )
            other |= dict.fromkeys(("conv2d.gate", "conv2d.excite.gate", "dense.gate"), "global")
            assert found.scope_of("data") == other.get(found.name, "texture")
        if "weight" in tensors_of(found):
            assert found.scope_of("weight") == "global"
        if "bias_vector" in tensors_of(found):
            assert found.scope_of("bias_vector") == "global"
        assert found.scope_of(None) == "any"


def test_an_epilogue_is_elementwise(every_row: Table) -> None:
    alternatives = ops_of(every_row, row(every_row, "conv2d.chain").nodes["tail"])
    fragments = [found for found in alternatives if isinstance(found, Fragment)]
    ops = [found for found in alternatives if isinstance(found, str)]
    assert len(fragments) == 10
    assert "elementwise" in ops
    for fragment in fragments:
        for node in fragment.nodes.values():
            ops += [found for found in ops_of(every_row, node) if isinstance(found, str)]
    # A shortcut with fewer channels meets the front of the value, which then is as large as before.
    assert {name for name in ops if not OPS[name].is_elementwise} == {"strided_slice", "concat"}


def test_matches_start_at_the_main_operator(every_row: Table) -> None:
    anchors = {found.name: found.anchor_name() for found in every_row.patterns}
    assert anchors["conv2d.chain"] == "conv"
    assert anchors["conv2d.residual_pair"] == "a"
    assert anchors["elementwise.chain"] == "first"
