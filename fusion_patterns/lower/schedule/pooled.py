"""A convolution whose image is averaged at once: ``mean(epilogue(conv(x)))`` for an image of few pixels.

    work group = blocks of four channels, all pixels of them; its threads = tiles of pixels x shares of a long sum
    every thread   sums a share of its tile in registers
    all threads    add up the shares, and leave the epilogue's value in local memory
    a few threads  add up the pixels, one channel each, or one block where threads are fewer
    one thread     of each block stores the texel

The convolution's result, which only the average reads, is never written to memory.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..compute.packed import LANES
from .split import cut_sums, inside, share_sums, share_tiles
from .tiles import Tile

__all__ = ["schedule_pooled"]


def schedule_pooled(
    sch: s_tir.Schedule,
    last: Any,
    pool: Any,
    pixel: Any,
    convolution: tuple[Any, Any],
    tile: Tile,
    *,
    apart: bool = False,
) -> tuple[Any, Any]:
    """Schedule the average.

    ``last`` writes the result, (N, C/4, 1, 1, 4); ``pool`` adds up the pixels; ``pixel`` writes what it reads;
    ``convolution``: the reduction, with the loop of its that is cut into shares; ``tile``: a group of it has whole
    images. ``apart``: compute a pixel's lanes one by one, for ops that TVM can't vectorize. Returns the reduction of
    one thread, and the loop over threads in which it belongs.
    """
    parts = cut_sums(sch, [convolution], tile.split) if tile.split > 1 else []
    batch, channel, y, x, lane = sch.get_loops(last)
    channel, own = sch.split(channel, [None, tile.extents[0]])
    group = sch.fuse(batch, channel)
    sch.bind(group, "blockIdx.x")
    sch.vectorize(lane)
    # consumers before what they read, and all before any is told off to threads: a guard would hide what they need
    for block in (pool, pixel):
        sch.set_scope(block, 0, "shared")
        sch.compute_at(block, group, preserve_unit_loops=True)
    *image, lane = inside(sch, pixel, group)
    (sch.unroll if apart else sch.vectorize)(lane)
    if parts:
        ((total, thread),) = share_sums(sch, parts, group, image, tile, _nothing)
    else:
        total, thread = convolution[0], share_tiles(sch, image, lane, tile)
    *blocks, lane, rows, columns = inside(sch, pool, group)
    if LANES * tile.extents[0] <= tile.threads:
        blocks.append(lane)
    else:
        sch.reorder(*blocks, rows, columns, lane)
        sch.vectorize(lane)
    _one_each(sch, sch.fuse(*blocks), tile.threads)
    _one_each(sch, sch.fuse(own, y, x), tile.threads)
    return total, thread


def _nothing(loop: Any) -> None:
    """The epilogue keeps nothing in registers: all of it is in the block that writes a pixel."""


def _one_each(sch: s_tir.Schedule, loop: Any, threads: int) -> None:
    """Give each of the first threads one round of a loop."""
    _, thread = sch.split(loop, [None, threads])
    sch.bind(thread, "threadIdx.x")
