"""Short rows of numbers that are summed and scaled, as in a softmax over two classes: a thread for each row."""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule

from .split import REDUCE, inside

__all__ = ["ShortRows"]

LONGEST_ROW = 32
"""A thread keeps a row of so many numbers in registers."""
GROUP = 64


class ShortRows(ScheduleRule):  # type: ignore[misc]
    """Sums over few numbers that go back to these numbers, where there are at least as many rows as numbers in one.

    dlight gives every row a work group, in which all but a few threads wait.
    """

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule that keeps a row in registers, or ``None`` if the rows are few, or long, or none."""
        if not isinstance(func, tirx.PrimFunc):
            return None
        sch = s_tir.Schedule(func)
        *stages, last = sch.get_child_blocks(sch.get_sblock("root"))
        sums = [block for block in stages if _extents(sch, block, REDUCE)]
        rows = _axes_of_rows(sch, sums, last)
        if not rows or _extents(sch, last, REDUCE):
            return None
        extents = _extents(sch, last)
        count = prod(extents[axis] for axis in rows)
        length = prod(extents) // max(count, 1)
        if not 0 < length <= min(count, LONGEST_ROW):
            return None
        if any(prod(_extents(sch, block, REDUCE)) != length for block in sums):
            return None
        try:
            _row_by_row(sch, stages, last, rows)
        except s_tir.ScheduleError:
            return None
        return sch


def _row_by_row(sch: s_tir.Schedule, stages: list[Any], last: Any, rows: list[int]) -> None:
    """Give a thread the axes of the last block that are not ``rows``, and of all stages what these need."""
    loops = list(sch.get_loops(last))
    inner = [loop for axis, loop in enumerate(loops) if axis not in rows]
    sch.reorder(*(loops[axis] for axis in rows), *inner)
    outer, thread = sch.split(sch.fuse(*(loops[axis] for axis in rows)), [None, GROUP])
    sch.bind(outer, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    for block in reversed(stages):
        sch.set_scope(block, 0, "local")
        sch.compute_at(block, thread)
    for block in (*stages, last):
        for loop in inside(sch, block, thread):
            sch.unroll(loop)


def _extents(sch: s_tir.Schedule, block: Any, kind: int | None = None) -> list[int]:
    """The extents of a block's axes of a kind, or of all; 0 for one that is not known."""
    axes = [axis for axis in sch.get(block).iter_vars if kind is None or int(axis.iter_type) == kind]
    return [int(getattr(axis.dom.extent, "value", 0)) for axis in axes]


def _axes_of_rows(sch: s_tir.Schedule, sums: list[Any], last: Any) -> list[int] | None:
    """Which axes of the last block tell rows apart: those by which it finds what was summed; ``None`` if unclear."""
    results = [sch.get(block).writes[0].source for block in sums]
    axes = [axis.var for axis in sch.get(last).iter_vars]
    for region in sch.get(last).reads:
        if any(region.source.same_as(result) for result in results):
            places = [each.min for each in region.region]
            rows = [k for k, var in enumerate(axes) if any(var.same_as(place) for place in places)]
            return rows if len(rows) == len(places) else None
    return None
