"""A convolution whose image is averaged at once: ``mean(epilogue(conv(x)))`` for an image of few pixels.

    work group = four channels; its threads = the pixels
    every thread   sums its pixel in registers, and leaves the epilogue's value in local memory
    four threads   add up the pixels, one channel each
    one thread     stores the texel

The convolution's result, which only the average reads, is never written to memory.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from .split import inside

__all__ = ["schedule_pooled"]


def schedule_pooled(sch: s_tir.Schedule, last: Any, pool: Any, pixel: Any, pixels: int) -> Any:
    """Schedule the average; returns the loop over the threads, in which the convolution belongs.

    ``last`` writes the result, (N, C/4, 1, 1, 4); ``pool`` adds up the pixels; ``pixel`` writes what it reads; an image
    has so many ``pixels``.
    """
    batch, channel, y, x, lane = sch.get_loops(last)
    group = sch.fuse(batch, channel)
    sch.bind(group, "blockIdx.x")
    sch.vectorize(lane)
    # consumers before what they read, and all before any is told off to threads: a guard would hide what they need
    for block in (pool, pixel):
        sch.set_scope(block, 0, "shared")
        sch.compute_at(block, group, preserve_unit_loops=True)
    *image, lane = inside(sch, pixel, group)
    thread = sch.fuse(*image)
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(lane)
    *channels, _, _ = inside(sch, pool, group)  # the last two are the pixels
    _one_each(sch, sch.fuse(*channels), pixels)
    _one_each(sch, sch.fuse(y, x), pixels)
    return thread


def _one_each(sch: s_tir.Schedule, loop: Any, threads: int) -> None:
    """Give each of the first threads one round of a loop."""
    _, thread = sch.split(loop, [None, threads])
    sch.bind(thread, "threadIdx.x")
