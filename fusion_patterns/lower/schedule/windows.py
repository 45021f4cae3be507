"""A convolution of which only the maxima over windows are written: ``max_pool(epilogue(conv(x)))``.

    work group = some blocks of four channels, a rectangle of windows
    every thread   sums a few of the pixels that the windows meet, in registers, and leaves the epilogue's values in
                   local memory
    every thread   takes the maximum of a window, or of several, and stores the texel

The convolution's result is never written to memory. Where windows overlap, neighbouring groups compute the pixels
between them twice; a large rectangle has few of those. Long sums of few pixels are split over the group's threads, as a
convolution's are that writes its result (see :mod:`.split`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

from tvm import s_tir

from ...place.layouts import LANES
from ...place.profiles import Machine, Tiles
from .costs import cheapest_tile, cycles
from .split import cut_sums, inside, share_sums, share_tiles
from .tiles import TEXEL_BYTES, Tile, Work, choose_tile, divisors

__all__ = ["Cut", "Windows", "choose_cut", "schedule_windows"]

MOST_BLOCKS = 4
MOST_PIXELS = 16
MOST_AGAIN = 32
"""A pixel's way to memory and back takes about as long as so many products of a sum do."""
LONG = 256
"""A sum of more products is long: few pixels may be computed twice."""
FEW = 131072
"""So many long sums keep a device busy without being split."""
WAVE = 64
"""So many threads of a group run in step on many devices; a part of that many idles."""


@dataclass(frozen=True)
class Windows:
    """What the maxima are taken of: the block that writes the pixels; the rows and columns that a window spans, and
    how far apart windows begin; the (rows, columns) of the convolution's ``kernel``, how ``long`` its sums are, and
    into how many ``shares`` they can be cut."""

    pixel: Any
    reach: tuple[int, int]
    strides: tuple[int, int]
    kernel: tuple[int, int]
    long: int
    shares: int = 1

    def splits(self, shape: tuple[int, ...]) -> bool:
        """Whether sums have to be split, of pixels of the packed ``shape`` (N, C/4, H, W, 4)."""
        overlaps = any(length > step for length, step in zip(self.reach, self.strides, strict=True))
        return self.long > LONG and (overlaps or prod(shape) < FEW)


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    ``windows``: those of a group (blocks of four channels, rows, columns); ``pixels``: the pixels of the convolution
    that they meet, likewise; ``tile``: how many of those a thread computes, likewise; ``split``: over how many threads
    the sums of a tile are split.
    """

    windows: tuple[int, int, int]
    pixels: tuple[int, int, int]
    tile: tuple[int, int, int]
    split: int = 1

    @property
    def sums(self) -> Tile:
        """The cut of the convolution alone."""
        blocks, rows, columns = (whole // own for whole, own in zip(self.pixels, self.tile, strict=True))
        return Tile(*self.tile, (blocks, rows, columns), self.split)

    @property
    def threads(self) -> int:
        """Work items of a group."""
        return self.sums.threads

    @property
    def local_bytes(self) -> int:
        """Local memory of a group in bytes, pixels of float32: all shares of a sum at once, and what they add up to."""
        return TEXEL_BYTES * prod(self.pixels) * (self.split + 1 if self.split > 1 else 1)


def choose_cut(shape: tuple[int, ...], inner: Windows, max_threads: int, tiles: Tiles) -> Cut:
    """The cut that costs least, by what a thread loads for each sum, what is computed twice, and who idles.

    ``shape``: the packed result (N, C/4, H, W, 4). Where windows overlap or pixels are few, long sums are split.
    Raises ``ValueError`` if no rectangle of windows fits into local memory without more pixels being computed twice
    than is worth it; if long sums have to be split and no cut is as good as the one of a convolution that writes its
    pixels; or if the profile splits no sums, since barriers are dear: on a CPU a group that shares windows through
    local memory takes 1.7 times as long as the convolution and the pool one after the other (VGG-16, PoCL). Where the
    profile describes its machine, see :func:`_cheapest_cut` instead.
    """
    if tiles.machine is not None:
        return _cheapest_cut(shape, inner, max_threads, tiles, tiles.machine)
    if tiles.split == 1:
        raise ValueError(
            "windows are shared through local memory, which is dear where the profile splits no sums"
        )
    batch, blocks, *image = shape[:4]
    spans = _spans(image, inner)
    packed = batch, blocks, *(span[-1][1] for span in spans), LANES
    alone = _alone(packed, inner, max_threads, tiles) if inner.splits(packed) else None
    best: tuple[tuple[float, ...], Cut] | None = None
    for (rows, height), (columns, width) in product(*spans):
        rectangles = (image[0] // rows) * (image[1] // columns)
        again = rectangles * height * width / prod(packed[2:4]) - 1
        if height * width * TEXEL_BYTES > tiles.local_bytes:
            continue
        if alone is None and again * inner.long > MOST_AGAIN:
            continue
        shares = 1 if alone is None else inner.shares
        for cut in _cuts(blocks, (rows, columns), (height, width), shares, max_threads, tiles):
            groups = batch * rectangles * (blocks // cut.windows[0])
            cost = _cost(cut, groups, inner.kernel, tiles, slides=alone is not None)
            if alone is not None:
                own, limit = alone
                if cost[0] > limit or prod(cut.tile) < prod(own.tile):
                    continue
                # a guess at what costs less is no reason to leave the convolution's own tile
                cost = again > 0 or (cut.tile, cut.split) != (own.tile, own.split), *cost
            if best is None or cost < best[0]:
                best = cost, cut
    if best is None and alone is not None:
        raise ValueError("no cut of its long sums is as good as that of a convolution that writes its pixels")
    if best is None:
        raise ValueError(
            f"no rectangle of its windows that fits into {tiles.local_bytes} bytes of local memory shares few enough "
            "pixels with its neighbours"
        )
    return best[1]


def _spans(image: list[int], inner: Windows) -> list[list[tuple[int, int]]]:
    """Along each axis: how many windows a group may have, and how many pixels they meet."""
    return [
        [(count, (count - 1) * stride + length) for count in divisors(full)]
        for full, length, stride in zip(image, inner.reach, inner.strides, strict=True)
    ]


def _cheapest_cut(
    shape: tuple[int, ...], inner: Windows, max_threads: int, tiles: Tiles, machine: Machine
) -> Cut:
    """The cut that costs least on a known machine.

    Raises ``ValueError`` if the convolution and its windows cost less in kernels of their own.
    """
    batch, blocks, *image = shape[:4]
    spans = _spans(image, inner)
    taps = prod(inner.kernel)
    steps = taps * -(-inner.long // (taps * LANES))
    work = Work((batch, blocks, *(span[-1][1] for span in spans), LANES))
    alone = cheapest_tile(work, steps, inner.shares, max_threads, tiles)
    least = alone.blocks * alone.columns if inner.splits(work.shape) else 1
    best: tuple[tuple[float, ...], Cut] | None = None
    for (rows, height), (columns, width) in product(*spans):
        if height * width * TEXEL_BYTES > tiles.local_bytes:
            continue
        rectangles = (image[0] // rows) * (image[1] // columns)
        for cut in _cuts(blocks, (rows, columns), (height, width), inner.shares, max_threads, tiles):
            if prod(cut.tile) < least:
                continue  # a guess at what costs less is no reason to leave the convolution's own tile
            cost = cycles(machine, steps, cut.sums, batch * rectangles * (blocks // cut.windows[0]))
            rank = cost, abs(cut.threads - tiles.group), -columns
            if best is None or rank < best[0]:
                best = rank, cut
    limit = cycles(machine, steps, alone, work.texels // prod(alone.extents)) + machine.launch
    if best is None or best[0][0] > limit:
        raise ValueError(
            "its convolution and its windows cost less in kernels of their own, by the profile's machine"
        )
    return best[1]


def _alone(shape: tuple[int, ...], inner: Windows, max_threads: int, tiles: Tiles) -> tuple[Cut, float]:
    """The cut of a convolution that writes its pixels, of packed ``shape``, and what it costs."""
    work = Work(shape)
    tile = choose_tile(work, max_threads, tiles, shares=inner.shares)
    cut = Cut(tile.extents, tile.extents, (tile.blocks, tile.rows, tile.columns), tile.split)
    return cut, _cost(cut, work.texels // prod(tile.extents), inner.kernel, tiles, slides=True)[0]


def _cuts(
    blocks: int,
    windows: tuple[int, int],
    pixels: tuple[int, int],
    shares: int,
    max_threads: int,
    tiles: Tiles,
) -> Iterator[Cut]:
    """All cuts of a group with such a rectangle. Factors that don't divide would need guards around the sums."""
    splits = [d for d in divisors(gcd(shares, tiles.split)) if d & (d - 1) == 0]
    for rows, columns in product(*map(divisors, pixels)):
        if rows * columns > min(MOST_PIXELS, tiles.accumulators):
            continue
        for several in divisors(blocks):
            if several > MOST_BLOCKS or several * rows * columns > tiles.accumulators:
                break
            for group, split in product(divisors(blocks // several), splits if rows == 1 else [1]):
                cut = Cut(
                    (several * group, *windows), (several * group, *pixels), (several, rows, columns), split
                )
                if cut.threads <= max_threads and cut.local_bytes <= tiles.local_bytes:
                    yield cut


def _cost(cut: Cut, groups: int, kernel: tuple[int, int], tiles: Tiles, *, slides: bool) -> tuple[float, ...]:
    """What the sums cost with a cut; of two that cost the same the group of a usual size, then the longer row.

    ``slides``: count that pixels of a row share what they read, as those of a convolution with stride 1 do.
    """
    blocks, rows, columns = cut.tile
    own = rows * columns
    around = prod(cut.pixels[1:])
    # A thread loads each texel of data once for its blocks, each weight once for its pixels; threads that run in step
    # share the load of a weight. A group has both from a farther memory: data once for all its blocks and taps.
    apart = max(1.0, WAVE * own / around) if cut.pixels[0] > blocks else 1.0
    across = kernel[1] if slides else 1
    data = (columns + across - 1) / (columns * across * blocks)
    loads = 1 + data + apart / own + 1 / (prod(kernel) * cut.pixels[0]) + 4 / around
    in_step = -(-cut.threads // WAVE) * WAVE
    busy = min(1.0, groups * cut.threads / tiles.threads)
    work = groups * in_step * prod(cut.tile) / cut.split * loads / busy
    return work, abs(cut.threads - tiles.group), -columns


def schedule_windows(
    sch: s_tir.Schedule,
    last: Any,
    stages: list[Any],
    pixel: Any,
    convolution: tuple[Any, Any],
    cut: Cut,
    *,
    whole: bool = True,
    apart: bool = False,
) -> tuple[Any, Any]:
    """Schedule the maxima; returns the reduction of one thread, and the loop over threads in which it belongs.

    ``last`` writes the result, (N, C/4, H, W, 4); ``stages`` are what it keeps in registers; ``pixel`` writes what the
    windows read; ``convolution``: the reduction, with the loop of its that is cut into shares. ``whole``: the result is
    stored by texels. ``apart``: compute pixels and stages lane by lane, for ops that TVM can't vectorize.
    """
    parts = cut_sums(sch, [convolution], cut.split) if cut.split > 1 else []
    n, c, y, x, lane = sch.get_loops(last)
    cuts = [sch.split(loop, [None, count]) for loop, count in zip((c, y, x), cut.windows, strict=True)]
    (c, c_in), (y, y_in), (x, x_in) = cuts
    sch.reorder(n, c, y, x, c_in, y_in, x_in, lane)
    for loop, axis in ((sch.fuse(n, c), "z"), (y, "y"), (x, "x")):
        sch.bind(loop, f"blockIdx.{axis}")
    (sch.vectorize if whole else sch.unroll)(lane)
    # a guard would hide what the blocks behind it need: loops are shared among the threads when all are in place
    for stage in reversed(stages):
        sch.set_scope(stage, 0, "local")
        sch.compute_at(stage, x_in, preserve_unit_loops=True)
    sch.set_scope(pixel, 0, "shared")
    sch.compute_at(pixel, x, preserve_unit_loops=True)
    for stage in stages:
        (sch.unroll if apart else sch.vectorize)(inside(sch, stage, x_in)[-1])
    *image, lane = inside(sch, pixel, x)
    (sch.unroll if apart else sch.vectorize)(lane)
    if parts:
        ((total, thread),) = share_sums(sch, parts, x, image, cut.sums, lambda loop: None)
    else:
        total, thread = convolution[0], share_tiles(sch, image, lane, cut.sums)
    _, results = sch.split(sch.fuse(c_in, y_in, x_in), [None, cut.threads])
    sch.bind(results, "threadIdx.x")
    return total, thread
