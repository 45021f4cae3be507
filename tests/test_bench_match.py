"""The speed benchmark: both sides get the same rows, and the engine keeps its lead on something small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import match, rows
from fusion_patterns.match import plan_fusion
from fusion_patterns.table import load_table


@pytest.mark.parametrize("count", [4, 16, 64])
def test_made_up_tables_have_as_many_rows_as_asked_for(count: int) -> None:
    table, patterns = rows.rows_table(count)
    assert len(table.patterns) == len(patterns) == len(set(rows.words(count))) == count


@pytest.mark.parametrize(("build", "convolutions"), [(rows.chain, 10), (rows.residual_chain, 8)])
def test_both_sides_find_the_same_in_chains(build, convolutions: int) -> None:
    mod = build(30)
    table, patterns = rows.rows_table(4)
    assert len(plan_fusion(mod, table).matches) == convolutions
    assert match.composites(match.fuse(patterns)(mod)) == convolutions


def test_stock_is_given_the_words_that_the_table_finds() -> None:
    mod = rows.residual_chain(28)
    patterns = match.stock_rows(mod, load_table())
    assert len(patterns) == 2
    assert match.composites(match.fuse(patterns)(mod)) == len(plan_fusion(mod, load_table()).matches)


def test_growth_is_measured_from_500_on() -> None:
    assert match.exponent({100: 50.0, 500: 1.0, 5000: 10.0}) == pytest.approx(1.0)
    assert match.exponent({10: 1.0, 100: 100.0}) == pytest.approx(2.0)


def test_matching_stays_linear_and_ahead_of_stock() -> None:
    """With a wide margin: the goals themselves are for `make bench-match`, on a quiet machine."""
    table, patterns = rows.rows_table(64)
    small, large, stock = rows.chain(120), rows.chain(600), match.fuse(patterns)
    ours, more, theirs = match.least(
        [lambda: plan_fusion(small, table), lambda: plan_fusion(large, table), lambda: stock(small)], 3
    )
    assert more < 10 * ours
    assert theirs > 3 * ours
