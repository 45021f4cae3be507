"""Plain results whose channels four does not divide: the last block's lanes beyond them must not be stored.

TVM's schedules don't see through such a guard what a thread reads. So it is taken away while the kernel is cut into
tiles, and put back around the store at the end.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm_ffi import structural_map, structural_walk

__all__ = ["channel_axis", "guard_lanes", "without_guard"]


def without_guard(sch: s_tir.Schedule, block: Any) -> None:
    """Let a block run for all of its loops' values. What it then does beyond its result is for :func:`guard_lanes`."""
    _set_guard(sch, block, tirx.const(True, "bool"))


def channel_axis(sch: s_tir.Schedule, block: Any) -> int:
    """On which axis of its result a block that unpacks has the channels: the one that tells lanes apart."""
    axes = [axis.var for axis in sch.get(block).iter_vars]
    used: list[Any] = []
    structural_walk(sch.get(block).reads[0].region[-1].min, (tirx.Var, used.append))
    return next((k for k, axis in enumerate(axes) if any(axis.same_as(var) for var in used)), 1)


def guard_lanes(sch: s_tir.Schedule, name: str, axis: int) -> None:
    """Keep the block from writing channels beyond those that its result has on ``axis``, whatever guards it already."""
    block = sch.get_sblock(name)
    inside = sch.get(sch.get_loops(block)[-1]).body
    where = inside.block.writes[0]
    # the channel as an expression over the block's axes, and these as ones over the loops
    values = dict(zip((axis.var for axis in inside.block.iter_vars), inside.iter_values, strict=True))
    channel = structural_map(where.region[axis].min, (tirx.Var, lambda var: values.get(var, var)))
    _set_guard(sch, block, tirx.all(inside.predicate, channel < where.source.ty.shape[axis]))


def _set_guard(sch: s_tir.Schedule, block: Any, guard: Any) -> None:
    reference = sch.get_loops(block)[-1]
    loop = sch.get(reference)
    inside = s_tir.SBlockRealize(loop.body.iter_values, guard, loop.body.block)
    guarded = tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent,
        loop.kind,
        inside,
        loop.thread_binding,
        loop.annotations,
    )
    sch.state.replace(sch.get_sref(reference), guarded)
