"""How a kernel's work is cut: what one thread computes and how many threads form a work group.

All factors divide their dimension. A factor that does not would guard the texel store, and TVM's region analysis
would no longer see how large a thread's tile is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..place.profiles import Tiles

__all__ = ["DEFAULT", "Tile", "choose_tile", "divisor"]

DEFAULT = Tiles()

MOST_DEEP = 64
"""NVIDIA's OpenCL takes at most 64 work items of a group along z (CL_DEVICE_MAX_WORK_ITEM_SIZES: 1024, 1024, 64)."""


@dataclass(frozen=True)
class Tile:
    """What one thread computes (blocks of four channels, rows, columns) and the work group (z, y, x).

    ``split``: over how many threads the reduction of one tile is split; the work group has so many times more.
    """

    blocks: int
    rows: int
    columns: int
    group: tuple[int, int, int]
    split: int = 1


def divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return max(d for d in range(1, min(number, max(limit, 1)) + 1) if number % d == 0)


def choose_tile(
    shape: tuple[int, ...],
    *,
    reduces: bool,
    max_threads: int,
    tiles: Tiles = DEFAULT,
    most_blocks: int = 4,
    most_columns: int = 14,
    shares: int = 1,
) -> Tile:
    """The tile for a packed result of ``shape`` (N, C/4, H, W, 4).

    A thread of a convolution keeps as many texels in registers as the device allows, wider than deep, since
    neighbours in a row share what they read. Where that leaves too few threads, the sum is split over up to
    ``shares`` threads (how many the reduction can be cut into), and where it can't be, the tile gets smaller.
    A thread of anything else computes one texel.
    """
    batch, blocks, rows, columns = shape[:4]
    if not reduces:
        return Tile(1, 1, 1, choose_group((batch * blocks, rows, columns), max_threads, tiles.group))
    texels = batch * blocks * rows * columns
    options = [
        (b, c)
        for b in range(1, most_blocks + 1)
        for c in range(1, most_columns + 1)
        if blocks % b == 0 and columns % c == 0 and b * c <= tiles.accumulators
    ]
    # the most texels; among equals, the squarest (a block counts for two columns: it reads its own weights)
    options.sort(key=lambda option: (-option[0] * option[1], abs(2 * option[0] - option[1]), option))
    for b, c in options:
        split = _split(texels // (b * c), b * c, shares, tiles)
        if texels // (b * c) * split >= tiles.threads:
            return _tile(b, c, split, shape, max_threads, tiles)
    b, c = min(options, key=lambda option: _idle(option, texels, shares, tiles))
    return _tile(b, c, _split(texels // (b * c), b * c, shares, tiles), shape, max_threads, tiles)


def _split(threads: int, texels: int, shares: int, tiles: Tiles) -> int:
    """Over how many threads a sum is split: enough to keep the device busy.

    A divisor of the texels of a tile, so that the group's threads share the rest of the work evenly.
    """
    split = 1
    for candidate in (2, 4, 8, 16):
        if threads * split >= tiles.threads or candidate > tiles.split:
            break
        if shares % candidate == 0 and texels % candidate == 0:
            split = candidate
    return split


def _idle(option: tuple[int, int], texels: int, shares: int, tiles: Tiles) -> tuple[int, int, tuple[int, int]]:
    """Order of options where none keeps the device busy: most threads first, then the larger tile."""
    size = option[0] * option[1]
    threads = texels // size * _split(texels // size, size, shares, tiles)
    return -threads, -size, option


def _tile(
    blocks: int, columns: int, split: int, shape: tuple[int, ...], max_threads: int, tiles: Tiles
) -> Tile:
    extent = (shape[0] * shape[1] // blocks, shape[2], shape[3] // columns)
    if split > 1:
        extent = (shape[1] // blocks, *extent[1:])
    group = choose_group(extent, max_threads // split, max(1, tiles.group // split))
    return Tile(blocks, 1, columns, group, split)


def choose_group(extent: tuple[int, int, int], max_threads: int, wanted: int = 64) -> tuple[int, int, int]:
    """A work group for (z, y, x) threads: wide in x, then y, then z, about ``wanted`` threads, never above the limit."""
    wanted = min(wanted, max_threads)
    x = divisor(extent[2], min(16, wanted))
    y = divisor(extent[1], wanted // x)
    z = divisor(extent[0], min(wanted // (x * y), MOST_DEEP))
    assert prod((x, y, z)) <= max(1, max_threads)
    return z, y, x
