"""Hypothesis strategies of graphs for a table: `instances`, `near_misses`, `modules`.

What is drawn is plain data (`fusion_patterns.testing.spec`), so a failing example shrinks to a few operators
and prints as Python; `fusion_patterns.testing.building` makes Relax of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import reject
from hypothesis import strategies as st

from fusion_patterns.table.model import Row, Table
from fusion_patterns.testing.draft import Pick
from fusion_patterns.testing.nets import draw_net
from fusion_patterns.testing.rows import Instance, NearMiss, draw_instance, draw_near_miss
from fusion_patterns.testing.shapes import Infeasible
from fusion_patterns.testing.spec import Module

__all__ = ["instances", "modules", "near_misses"]

T = TypeVar("T")


def instances(row: Row, table: Table | None = None) -> st.SearchStrategy[Instance]:
    """Graphs that ``row`` must take. ``table`` has the sets and fragments that the row names."""
    return _drawn(lambda pick: draw_instance(pick, row, table or _alone(row)))


def near_misses(row: Row, table: Table | None = None, kind: str | None = None) -> st.SearchStrategy[NearMiss]:
    """Graphs that ``row`` must decline: one condition is broken, or an inner value leaves.

    ``kind`` asks for one kind of miss, as `fusion_patterns.testing.rows.kinds_of_miss` lists them.
    """
    return _drawn(lambda pick: draw_near_miss(pick, row, table or _alone(row), kind))


def modules(table: Table | None = None, *, tame: bool = False) -> st.SearchStrategy[Module]:
    """Small convolutional networks, with instances of the table's rows in them.

    ``tame`` leaves out what makes two right results differ: a jump (`floor`), a pole (`log`).
    """
    return _drawn(lambda pick: draw_net(pick, table, tame=tame))


def _alone(row: Row) -> Table:
    return Table(name=row.name, patterns=(row,))


def _drawn(make: Callable[[Pick], T]) -> st.SearchStrategy[T]:
    @st.composite
    def strategy(draw: st.DrawFn) -> T:
        def pick(options: Sequence[Any]) -> Any:
            return options[draw(st.integers(0, len(options) - 1))] if len(options) > 1 else options[0]

        try:
            return make(pick)
        except Infeasible:
            reject()

    return strategy()
