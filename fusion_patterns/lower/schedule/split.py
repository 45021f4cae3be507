"""Splitting sums over the threads of a work group.

Where pixels and channels alone leave a device idle, each thread of a group sums a share of the input channels (or, for
global pooling, of the pixels) in registers and leaves it in local memory. After a barrier the group's threads add up
the shares, and compute the epilogue for one texel each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir

from .tiles import Tile

__all__ = ["REDUCE", "Shares", "cut_sums", "inside", "share_sums", "share_tiles", "split_sums"]

REDUCE = 2  # tirx.IterVar.CommReduce


@dataclass(frozen=True)
class Shares:
    """A reduction in three blocks: shares in registers, shares in local memory, their sum."""

    total: Any
    partial: Any
    shared: Any


def split_sums(
    sch: s_tir.Schedule,
    last: Any,
    sums: list[tuple[Any, Any]],
    tile: Tile,
    finish: Callable[[Any], None],
    *,
    whole: bool = True,
) -> list[tuple[Any, Any]]:
    """Split every sum of a kernel over ``tile.split`` threads.

    ``last`` writes the result; ``sums`` are the reductions, each with the loop of its that is cut into shares;
    ``finish`` places what the epilogue keeps in registers; ``whole``: the result is stored by texels. Returns for each
    sum its partial reduction and the thread loop.
    """
    parts = cut_sums(sch, sums, tile.split)
    group, texels = _groups(sch, last, tile, whole)
    return share_sums(sch, parts, group, texels, tile, finish)


def cut_sums(sch: s_tir.Schedule, sums: list[tuple[Any, Any]], split: int) -> list[Shares]:
    """Cut every reduction, at the loop of its that is given with it, into ``split`` shares."""
    parts = []
    for total, axis in sums:
        shares, _ = sch.split(axis, [split, None])
        partial = sch.rfactor(shares, 0)
        shared = sch.cache_write(partial, 0, "local")
        sch.set_scope(shared, 0, "shared")
        parts.append(Shares(total, partial, shared))
    return parts


def share_sums(
    sch: s_tir.Schedule,
    parts: list[Shares],
    group: Any,
    texels: list[Any],
    tile: Tile,
    finish: Callable[[Any], None],
) -> list[tuple[Any, Any]]:
    """Give the shares, their sums and the texels of a group to its threads.

    ``group``: the loop inside of which a group works; ``texels``: inside it, the loops over blocks, rows and columns of
    the block that reads the sums, none of them told off yet. Returns as :func:`split_sums` does.
    """
    threads = tile.threads
    if not tile.is_even:
        # a guard would hide from TVM what a block inside it needs: the sums get a stage of their own, and all stages
        # are placed before the result's loops are cut
        for part in parts:
            sch.set_scope(part.total, 0, "shared")
            sch.compute_at(part.total, group, preserve_unit_loops=True)
        loops = [_shares(sch, part.shared, group, tile) for part in parts]
        for part in parts:
            _add_up_apart(sch, part.total, group, threads)
        finish(_texels(sch, texels, threads))
    else:
        several = _texels(sch, texels, threads)
        finish(several)
        for part in parts:
            sch.set_scope(part.total, 0, "local")
            sch.compute_at(part.total, several, preserve_unit_loops=True)
            _add_up(sch, part.total, several)
        loops = [_shares(sch, part.shared, group, tile) for part in parts]
    return [(part.partial, loop) for part, loop in zip(parts, loops, strict=True)]


def _groups(sch: s_tir.Schedule, last: Any, tile: Tile, whole: bool) -> tuple[Any, list[Any]]:
    """Cut the result into groups; returns the innermost loop over groups, and the loops over a group's texels."""
    extents = tile.extents
    n, c, y, x, lane = sch.get_loops(last)
    c, c_in = sch.split(c, [None, extents[0]])
    y, y_in = sch.split(y, [None, extents[1]])
    x, x_in = sch.split(x, [None, extents[2]])
    sch.reorder(n, c, y, x, c_in, y_in, x_in, lane)
    z = sch.fuse(n, c)
    for loop, axis in ((z, "z"), (y, "y"), (x, "x")):
        sch.bind(loop, f"blockIdx.{axis}")
    (sch.vectorize if whole else sch.unroll)(lane)
    return x, [c_in, y_in, x_in]


def _texels(sch: s_tir.Schedule, loops: list[Any], threads: int) -> Any:
    """Share a group's texels among its threads; returns the loop over those of one thread."""
    several, thread = sch.split(sch.fuse(*loops), [None, threads])
    sch.reorder(thread, several)
    sch.bind(thread, "threadIdx.x")
    return several


def _shares(sch: s_tir.Schedule, shared: Any, group: Any, tile: Tile) -> Any:
    """Bind the shares to threads; returns the thread loop."""
    sch.compute_at(shared, group, preserve_unit_loops=True)
    *loops, lane = inside(sch, shared, group)
    thread = share_tiles(sch, loops, lane, tile)
    sch.vectorize(lane)
    return thread


def share_tiles(sch: s_tir.Schedule, loops: list[Any], lane: Any, tile: Tile) -> Any:
    """A thread of a group for each tile of texels; returns the loop over threads.

    ``loops``: those over blocks, rows and columns come last, whatever is in front of them is shared as well.
    """
    *units, c, y, x = loops
    cuts = [
        sch.split(loop, [None, own])
        for loop, own in zip((c, y, x), (tile.blocks, tile.rows, tile.columns), strict=True)
    ]
    shared, texels = [outer for outer, _ in cuts], [inner for _, inner in cuts]
    sch.reorder(*units, *shared, *texels, lane)
    thread = sch.fuse(*units, *shared)
    sch.bind(thread, "threadIdx.x")
    for loop in texels:
        sch.unroll(loop)
    return thread


def _loops_of_sum(sch: s_tir.Schedule, total: Any, loop: Any) -> tuple[list[Any], Any, Any]:
    """The spatial loops, the lanes and the shares of a sum inside ``loop``."""
    kinds = [int(v.iter_type) for v in sch.get(total).iter_vars]
    loops = inside(sch, total, loop)
    shares = loops.pop(kinds.index(REDUCE))
    return loops[:-1], loops[-1], shares


def _add_up(sch: s_tir.Schedule, total: Any, loop: Any) -> None:
    """Add up the shares in registers of the thread that writes the result."""
    spatial, lane, shares = _loops_of_sum(sch, total, loop)
    sch.reorder(*spatial, shares, lane)
    sch.vectorize(lane)
    init = sch.decompose_reduction(total, shares)
    sch.vectorize(inside(sch, init, loop)[-1])


def _add_up_apart(sch: s_tir.Schedule, total: Any, group: Any, threads: int) -> None:
    """Add up the shares into local memory, one texel for each of the first threads."""
    spatial, lane, shares = _loops_of_sum(sch, total, group)
    sch.reorder(*spatial, shares, lane)
    several, thread = sch.split(sch.fuse(*spatial), [None, threads])
    sch.reorder(several, thread, shares, lane)
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(lane)
    init = sch.decompose_reduction(total, shares)
    sch.vectorize(inside(sch, init, group)[-1])


def inside(sch: s_tir.Schedule, block: Any, loop: Any) -> list[Any]:
    """The loops of a block inside ``loop``."""
    loops = list(sch.get_loops(block))
    anchor = sch.get(loop)
    for position, candidate in enumerate(loops):
        if sch.get(candidate).same_as(anchor):
            return loops[position + 1 :]
    return loops
