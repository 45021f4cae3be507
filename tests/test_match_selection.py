"""The choice among overlapping candidates: the heaviest set, by a weight that is said in words."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from match_helpers import SHAPE, chain_table, module, names, row, table
from tvm import relax

from fusion_patterns.match import plan_fusion, selection
from fusion_patterns.match.automaton import Acceptance
from fusion_patterns.match.graph import Graph
from fusion_patterns.match.search import Candidate
from fusion_patterns.match.selection import select

op, nn = relax.op, relax.op.nn
ROW = row("r", {"a": {"op": "nn.relu"}})
GRAPH = Graph("main", relax.Function.create_empty([], relax.TensorType(SHAPE, "float32")))


def candidate(saved: int, *slots: int) -> Candidate:
    acceptance = Acceptance(0, ROW, (0,) * len(slots), 0, frozenset(), ())
    return Candidate(GRAPH, acceptance, slots, (max(slots),), saved)


def disjoint(candidates: tuple[Candidate, ...]) -> bool:
    taken = [number for one in candidates for number in one.slots]
    return len(taken) == len(set(taken))


sets = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 20), sets), min_size=1, max_size=9))
def test_nothing_saves_more(drawn: list[tuple[int, list[int]]]) -> None:
    candidates = [candidate(saved, *slots) for saved, slots in drawn]
    taken, summary = select(candidates, lambda _: True)
    choices = (
        choice
        for count in range(len(candidates) + 1)
        for choice in combinations(candidates, count)
        if disjoint(choice)
    )
    best = max(sum(one.saved for one in choice) for choice in choices)
    assert disjoint(tuple(taken))
    assert sum(one.saved for one in taken) == summary.saved_bytes == best
    assert (summary.method, summary.bound_bytes) == ("exact", best)


def test_what_is_refused_is_chosen_around() -> None:
    whole, part, rest = candidate(9, 0, 1, 2), candidate(4, 0, 1), candidate(0, 2)
    taken, summary = select([whole, part, rest], lambda one: one is not whole)
    assert taken == [part, rest]
    assert summary.saved_bytes == 4


def test_too_many_open_choices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_STATES", 8)
    candidates = [candidate(1 + place % 3, place, place + 3, place + 7) for place in range(30)]
    taken, summary = select(candidates, lambda _: True)
    assert disjoint(tuple(taken))
    assert summary.method == "beam"
    assert summary.bound_bytes >= summary.saved_bytes > 0


def build(emit, x, y, w):  # type: ignore[no-untyped-def]
    return emit(nn.relu(emit(op.add(emit(nn.conv2d(x, w)), y))))


CONV = {"op": "nn.conv2d", "in": ["data", "weight"]}


def test_the_longest_match_wins() -> None:
    (match,) = plan_fusion(module(build), chain_table()).matches
    assert names(match) == ["lv", "lv1", "lv2"]


def test_of_equal_savings_the_higher_priority_wins() -> None:
    nodes = {"conv": CONV, "tail": {"op": ["add", "nn.relu"], "repeat": 4}}
    made = table(row("low", nodes), row("high", nodes, priority=1), row("middle", nodes))
    plan = plan_fusion(module(build), made)
    assert [match.row.name for match in plan.matches] == ["high"]
    why = {decision.row: decision.reason for decision in plan.decisions}
    assert why["low"] == "high matches the same operators and has a higher priority"


def test_then_the_first_row_of_the_table_wins() -> None:
    nodes = {"conv": CONV, "tail": {"op": ["add", "nn.relu"], "repeat": 4}}
    plan = plan_fusion(module(build), table(row("first", nodes), row("second", nodes)))
    assert [match.row.name for match in plan.matches] == ["first"]
    why = {decision.row: decision.reason for decision in plan.decisions}
    assert why["second"] == "first matches the same operators and comes first in the table"


def test_savings_come_before_priority() -> None:
    short, long = (
        {"conv": CONV, "sum": {"op": "add"}},
        {"conv": CONV, "tail": {"op": ["add", "nn.relu"], "repeat": 4}},
    )
    plan = plan_fusion(module(build), table(row("short", short, priority=9), row("long", long)))
    assert [match.row.name for match in plan.matches] == ["long"]


def test_a_pair_saves_more_than_two_chains() -> None:
    pair = row(
        "pair",
        {
            "a": CONV,
            "b": {"op": "nn.conv2d", "in": ["data_b", "weight_b"]},
            "sum": {"op": "add", "in": ["a", "b"]},
        },
    )
    made = table(
        *chain_table().patterns[1:], pair, row("chain", {"conv": CONV, "tail": {"op": "add", "repeat": 2}})
    )

    def two(emit, x, y, w):  # type: ignore[no-untyped-def]
        return emit(op.add(emit(nn.conv2d(x, w)), emit(nn.conv2d(y, w))))

    (match,) = plan_fusion(module(two), made).matches
    assert match.row.name == "pair"
    assert match.saved_bytes == 2 * 8 * 6 * 6 * 4
