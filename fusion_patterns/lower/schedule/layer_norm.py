"""The schedule of a layer norm over the channels of packed images.

    work group = some pixels of a row; its threads = their texels
    every thread   leaves its texels in local memory: read, or computed by a depthwise convolution
    some threads   sum shares of a pixel's channels, then of the squared differences, each added up by one thread
    every thread   normalises its texels and stores them, after the epilogue

So each texel is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import s_tir

from ...place.layouts import LANES
from ...place.profiles import Tiles
from .split import REDUCE, inside
from .tiles import TEXEL_BYTES, divisor

__all__ = ["NormTile", "choose_norm", "schedule_norm"]

MOST_SHARES = 16
"""One thread adds up the shares of a pixel, one after the other."""


@dataclass(frozen=True)
class NormTile:
    """``pixels`` of a row belong to a group, ``columns`` neighbours of them to one thread; a group has so many
    ``threads``, and a pixel's channels are summed in ``shares``."""

    pixels: int
    columns: int
    threads: int
    shares: int


def choose_norm(shape: tuple[int, ...], max_threads: int, tiles: Tiles, *, convolves: bool) -> NormTile:
    """The tile for an image of packed ``shape`` (N, C/4, H, W, 4).

    ``convolves``: the texels are computed, and a thread that computes neighbours reads the weights once for all of
    them. Raises ``ValueError`` if the channels of one pixel need more local memory than the profile allows.
    """
    batch, channels, height, width = shape[:4]
    shares = divisor(channels, MOST_SHARES) if tiles.split > 1 else 1
    room = tiles.local_bytes // (TEXEL_BYTES * (channels + shares + 2))
    if room == 0:
        raise ValueError(
            f"{channels * LANES} channels of a pixel take more than {tiles.local_bytes} bytes of local memory"
        )
    most = tiles.accumulators if convolves else 1
    texels = batch * channels * height * width
    columns = [
        c
        for c in range(1, most + 1)
        if width % c == 0 and c <= room and (c == 1 or texels // c >= tiles.threads)
    ][-1]
    # a texel for each thread, of as many pixels as that leaves room for: neighbours are read side by side
    threads = max_threads if tiles.split > 1 else channels
    pixels = columns * divisor(width // columns, max(1, min(room // columns, threads // channels)))
    group = pixels // columns * channels
    if tiles.split == 1:
        return NormTile(pixels, columns, pixels // columns, shares)
    return NormTile(pixels, columns, divisor(group, max_threads), shares)


def schedule_norm(
    sch: s_tir.Schedule,
    last: Any,
    stages: list[Any],
    data: Any,
    sums: list[Any],
    tile: NormTile,
    *,
    whole: bool,
    apart: bool,
) -> tuple[Any, Any]:
    """Schedule a layer norm; returns the loops of a thread over its texels, of ``data`` and of the result.

    ``last`` writes the result, ``data`` the texels that are normalised; ``sums`` are the two reductions; ``stages``,
    which the caller places in the loop of the result, lie between them. ``whole``: the result is stored by texels.
    ``apart``: what is computed of the data can't be computed in vectors.
    """
    n, c, y, x, lane = sch.get_loops(last)
    x, x_in = sch.split(x, [None, tile.pixels])
    sch.reorder(n, y, x, c, x_in, lane)
    group = sch.fuse(n, y, x)
    sch.bind(group, "blockIdx.x")
    (sch.vectorize if whole else sch.unroll)(lane)
    steps = []
    for total in sums:
        reduce = sch.get_loops(total)[-1]
        _, share = sch.split(reduce, [None, tile.shares])
        steps.append((sch.rfactor(share, 3), total))
    # consumers before what they read, and all before any is told off to threads: a guard would hide what they need
    for stage in reversed(stages):
        sch.compute_at(stage, group, preserve_unit_loops=True)
    placed = []
    for step in reversed(steps):
        for block in reversed(step):
            copy = sch.cache_write(block, 0, "local")
            for each in (copy, block):
                sch.compute_at(each, group, preserve_unit_loops=True)
            sch.set_scope(copy, 0, "shared")
            placed.append((block, copy))
    sch.set_scope(data, 0, "shared")
    sch.compute_at(data, group, preserve_unit_loops=True)
    for block, copy in placed:
        *loops, lane = inside(sch, copy, group)
        thread = _tell_off(sch, loops, tile.threads)
        sch.vectorize(lane)
        sch.compute_at(block, thread, preserve_unit_loops=True)
        _add_up(sch, block, thread)
    *loops, columns, lane = inside(sch, data, group)
    columns, several = sch.split(columns, [None, tile.columns])
    own = _tell_off(sch, [*loops, columns], tile.threads)
    sch.unroll(several)
    (sch.unroll if apart else sch.vectorize)(lane)
    return own, _tell_off(sch, [c, x_in], tile.threads)


def _tell_off(sch: s_tir.Schedule, loops: list[Any], threads: int) -> Any:
    """Tell the rounds of loops off to the threads of a group; returns the innermost loop around the rest."""
    _, thread = sch.split(sch.fuse(*loops), [None, threads])
    sch.bind(thread, "threadIdx.x")
    return thread


def _add_up(sch: s_tir.Schedule, block: Any, thread: Any) -> None:
    """Add up in registers, four lanes at once."""
    loops = inside(sch, block, thread)
    kinds = [int(axis.iter_type) for axis in sch.get(block).iter_vars]
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != REDUCE]
    reduce = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == REDUCE]
    sch.reorder(*spatial[:-1], *reduce, spatial[-1])
    sch.vectorize(spatial[-1])
    init = sch.decompose_reduction(block, reduce[0])
    sch.vectorize(inside(sch, init, thread)[-1])
