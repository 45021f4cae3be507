"""A convolution of which only the maxima over windows are written: ``max_pool(epilogue(conv(x)))``.

    work group = some blocks of four channels, a rectangle of windows
    every thread   sums a few of the pixels that the windows meet, in registers, and leaves the epilogue's values in
                   local memory
    every thread   takes the maximum of a window, or of several, and stores the texel

The convolution's result is never written to memory. Where windows overlap, neighbouring groups compute the pixels
between them twice; a large rectangle has few of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from tvm import s_tir

from ..place.profiles import Tiles
from .split import inside
from .tiles import TEXEL_BYTES

__all__ = ["Cut", "Windows", "choose_cut", "schedule_windows"]

MOST_BLOCKS = 4
MOST_PIXELS = 16
MOST_AGAIN = 32
"""A pixel's way to memory and back takes about as long as so many products of a sum do."""
WAVE = 64
"""So many threads of a group run in step on many devices; a part of that many idles."""


@dataclass(frozen=True)
class Windows:
    """What the maxima are taken of: the block that writes the pixels; the rows and columns that a window spans, and
    how far apart windows begin; how many ``taps`` the convolution's kernel has, and how ``long`` its sums are."""

    pixel: Any
    reach: tuple[int, int]
    strides: tuple[int, int]
    taps: int
    long: int


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    ``windows``: those of a group (blocks of four channels, rows, columns); ``pixels``: the pixels of the convolution
    that they meet, likewise; ``tile``: how many of those a thread computes, likewise.
    """

    windows: tuple[int, int, int]
    pixels: tuple[int, int, int]
    tile: tuple[int, int, int]

    @property
    def threads(self) -> int:
        """Work items of a group."""
        return prod(self.pixels) // prod(self.tile)

    @property
    def local_bytes(self) -> int:
        """Local memory of a group in bytes, pixels of float32."""
        return TEXEL_BYTES * prod(self.pixels)


def choose_cut(shape: tuple[int, ...], inner: Windows, max_threads: int, tiles: Tiles) -> Cut:
    """The cut that costs least, by what a thread loads for each sum, what is computed twice, and who idles.

    ``shape``: the packed result (N, C/4, H, W, 4). Raises ``ValueError`` if no rectangle of windows fits into local
    memory without more pixels being computed twice than is worth it.
    """
    batch, blocks, *image = shape[:4]
    spans = [
        [(count, (count - 1) * stride + length) for count in _divisors(full)]
        for full, length, stride in zip(image, inner.reach, inner.strides, strict=True)
    ]
    needed = prod(span[-1][1] for span in spans)
    best: tuple[tuple[float, ...], Cut] | None = None
    for (rows, height), (columns, width) in product(*spans):
        rectangles = (image[0] // rows) * (image[1] // columns)
        again = rectangles * height * width / needed - 1
        if height * width * TEXEL_BYTES > tiles.local_bytes or again * inner.long > MOST_AGAIN:
            continue
        for cut in _cuts(blocks, (rows, columns), (height, width), max_threads, tiles):
            groups = batch * rectangles * (blocks // cut.windows[0])
            cost = _cost(cut, groups, inner.taps, tiles)
            if best is None or cost < best[0]:
                best = cost, cut
    if best is None:
        raise ValueError(
            f"no rectangle of its windows that fits into {tiles.local_bytes} bytes of local memory shares few enough "
            "pixels with its neighbours"
        )
    return best[1]


def _cuts(
    blocks: int, windows: tuple[int, int], pixels: tuple[int, int], max_threads: int, tiles: Tiles
) -> Iterator[Cut]:
    """All cuts of a group with such a rectangle. Factors that don't divide would need guards around the sums."""
    for rows, columns in product(*map(_divisors, pixels)):
        if rows * columns > min(MOST_PIXELS, tiles.accumulators):
            continue
        for several in _divisors(blocks):
            if several > MOST_BLOCKS or several * rows * columns > tiles.accumulators:
                break
            for group in _divisors(blocks // several):
                cut = Cut((several * group, *windows), (several * group, *pixels), (several, rows, columns))
                if cut.threads > max_threads or cut.local_bytes > tiles.local_bytes:
                    break
                yield cut


def _cost(cut: Cut, groups: int, taps: int, tiles: Tiles) -> tuple[float, ...]:
    """What the sums cost with a cut; of two that cost the same the group of a usual size, then the longer row."""
    blocks, rows, columns = cut.tile
    own = rows * columns
    around = prod(cut.pixels[1:])
    # A thread loads each texel of data once for its blocks, each weight once for its pixels; threads that run in step
    # share the load of a weight. A group has both from a farther memory: data once for all its blocks and taps.
    apart = max(1.0, WAVE * own / around) if cut.pixels[0] > blocks else 1.0
    loads = 1 + 1 / blocks + apart / own + 1 / (taps * cut.pixels[0]) + 4 / around
    in_step = -(-cut.threads // WAVE) * WAVE
    busy = min(1.0, groups * cut.threads / tiles.threads)
    work = groups * in_step * prod(cut.tile) * loads / busy
    return work, abs(cut.threads - tiles.group), -columns


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def schedule_windows(
    sch: s_tir.Schedule,
    last: Any,
    stages: list[Any],
    pixel: Any,
    cut: Cut,
    *,
    whole: bool = True,
    apart: bool = False,
) -> Any:
    """Schedule the maxima; returns the loop over the threads, in which the convolution belongs.

    ``last`` writes the result, (N, C/4, H, W, 4); ``stages`` are what it keeps in registers; ``pixel`` writes what the
    windows read. ``whole``: the result is stored by texels. ``apart``: compute pixels and stages lane by lane, for ops
    that TVM can't vectorize.
    """
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
    _, results = sch.split(sch.fuse(c_in, y_in, x_in), [None, cut.threads])
    sch.bind(results, "threadIdx.x")
    return _pixels(sch, pixel, x, cut, apart)


def _pixels(sch: s_tir.Schedule, pixel: Any, group: Any, cut: Cut, apart: bool) -> Any:
    """Share the pixels among the threads; returns the loop over threads."""
    *outer, c, y, x, lane = inside(sch, pixel, group)
    tiles = [sch.split(loop, [None, count]) for loop, count in zip((c, y, x), cut.tile, strict=True)]
    shared, own = [outer for outer, _ in tiles], [inner for _, inner in tiles]
    sch.reorder(*outer, *shared, *own, lane)
    thread = sch.fuse(*outer, *shared)
    sch.bind(thread, "threadIdx.x")
    for loop in own:
        sch.unroll(loop)
    (sch.unroll if apart else sch.vectorize)(lane)
    return thread
