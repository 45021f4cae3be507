"""How a kernel's work is cut: what one thread computes and how many threads form a work group.

All factors divide their dimension. A factor that does not would guard the texel store, and TVM's region analysis
would no longer see how large a thread's tile is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...place.profiles import Tiles

__all__ = [
    "DEFAULT",
    "Tile",
    "Work",
    "choose_gated",
    "choose_group",
    "choose_plain",
    "choose_pooled",
    "choose_tile",
    "choose_vectors",
    "divisor",
    "divisors",
]

DEFAULT = Tiles()

TEXEL_BYTES = 16

MOST_DEEP = 64
"""NVIDIA's OpenCL takes at most 64 work items of a group along z (CL_DEVICE_MAX_WORK_ITEM_SIZES: 1024, 1024, 64)."""

FEW_GROUPS = 16
"""So many groups compute what each of them needs whole: more would read the same weights again and again."""

FEW_SHARES = 8
"""So many shares of a sum at least: neighbouring threads then read side by side."""

MANY_SHARES = 16
"""More shares than these of one sum are many for a thread that has pixels to write as well."""

LONG = 64
"""A sum of more elements than these is long for one thread."""

SHORT = 4
"""A thread of a large group sums no fewer elements: more threads only have more to add up in the end."""


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

    @property
    def threads(self) -> int:
        """Work items of a group."""
        return self.split * prod(self.group)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Blocks, rows and columns that a group computes."""
        return self.group[0] * self.blocks, self.group[1] * self.rows, self.group[2] * self.columns

    @property
    def is_even(self) -> bool:
        """Whether the group's threads, told off texel by texel, each get equally many, a round number of rows apart.

        TVM sees what a block inside such a loop needs; it does not where threads wrap round inside a row.
        """
        threads = self.threads
        for extent in reversed(self.extents):
            if threads % extent:
                return extent % threads == 0
            threads //= extent
        return threads == 1


def divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return divisors(number, max(limit, 1))[-1]


def divisors(number: int, limit: int | None = None) -> list[int]:
    """The divisors of ``number``, those that are at most ``limit`` if one is given, in order."""
    most = number if limit is None else min(number, limit)
    return [d for d in range(1, most + 1) if number % d == 0]


@dataclass(frozen=True)
class Work:
    """What a kernel has to do.

    ``shape``: its packed result (N, C/4, H, W, 4). ``sums``: how many reductions it computes for each texel. ``even``:
    every thread of a group must write equally many texels, since the epilogue keeps values in registers.
    """

    shape: tuple[int, ...]
    sums: int = 1
    even: bool = False

    @property
    def texels(self) -> int:
        """Texels of the result."""
        return prod(self.shape[:4])


def choose_plain(work: Work, max_threads: int, tiles: Tiles = DEFAULT) -> Tile:
    """One texel for each thread: for kernels that read about as much as they write."""
    batch, blocks, rows, columns = work.shape[:4]
    return Tile(1, 1, 1, choose_group((batch * blocks, rows, columns), max_threads, tiles.group))


def choose_vectors(work: Work, shares: int, max_threads: int, tiles: Tiles = DEFAULT) -> Tile:
    """Sums with few results: each is split over so many threads of a group that the device is busy, if it may be.

    ``shares``: into how many the last sum can be cut. Where it reads other sums (``work.sums``), which every group
    computes for itself, groups are few and large.
    """
    batch, blocks = work.shape[:2]
    if tiles.split == 1:
        return Tile(1, 1, 1, (divisor(blocks, min(tiles.group, max_threads, MOST_DEEP)), 1, 1))
    most = min(max_threads, tiles.local_bytes // (TEXEL_BYTES * work.sums))
    if work.sums > 1:
        group = divisor(blocks, min(max(1, -(-blocks // FEW_GROUPS)), most, MOST_DEEP))
        split = divisor(shares, most // group)
        return Tile(1, 1, 1, (divisor(blocks, max(group, min(most, tiles.group) // split, 1)), 1, 1), split)
    # beyond a usual group only where each thread would sum long, or the profile says so
    usual = most if shares > LONG * tiles.group else tiles.group
    if tiles.sum_group:
        usual = max(tiles.group, min(tiles.sum_group, shares // SHORT))
    options = divisors(shares, min(most, usual))
    split = next((d for d in options if batch * blocks * d >= tiles.threads), options[-1])
    group = divisor(blocks, min(max(1, tiles.group // split), most // split, MOST_DEEP))
    return Tile(1, 1, 1, (group, 1, 1), split)


def choose_gated(
    work: Work, inputs: int, shares: int, max_threads: int, tiles: Tiles = DEFAULT
) -> tuple[Tile, int]:
    """An image that one pixel is broadcast to, which every group computes for its own channels.

    ``inputs``: how many products an element of that pixel takes; ``shares``: into how many its sum can be cut. Returns
    how a group is cut (``split`` threads along the pixels of one block, which share the sums as well), and over how
    many groups the pixels of a block are shared: no more than keep the device busy, and not so many that the sums are
    most of what they do (a product takes one load, a pixel two and a store).
    """
    batch, blocks, rows, columns = work.shape[:4]
    pixels = rows * columns
    most = min(max_threads, tiles.local_bytes // (TEXEL_BYTES * work.sums))
    # every thread adds up the shares for itself, so where threads don't run side by side they are few
    split = divisor(pixels, min(tiles.group, most) if tiles.split > 1 else min(FEW_SHARES, most))
    if tiles.split > 1 and shares > MANY_SHARES * divisor(shares, split):
        # the sum is most of the work: threads without a pixel help with it
        split = max(split, divisor(shares, most))
        return Tile(1, 1, 1, (1, 1, 1), split), 1
    options = [
        d for d in range(1, pixels // split + 1) if pixels // split % d == 0 and 4 * pixels // d >= inputs
    ]
    areas = next((d for d in options if batch * blocks * split * d >= tiles.threads), max(options, default=1))
    # one block: TVM puts no barrier between threads along x where what they share is told apart by those along y
    return Tile(1, 1, 1, (1, 1, 1), split), areas


def choose_tile(
    work: Work,
    max_threads: int,
    tiles: Tiles = DEFAULT,
    *,
    most_blocks: int = 4,
    most_columns: int = 14,
    shares: int = 1,
) -> Tile:
    """The tile of a convolution.

    A thread keeps as many texels in registers as the device allows, squarest first, since neighbours share what they
    read. Where that leaves too few threads, the sum is split over up to ``shares`` threads (into how many the
    reduction can be cut), and where it can't be, the tile gets smaller.
    """
    splits = {}
    for b, c in _options(work, tiles, most_blocks, most_columns):
        room = tiles.local_bytes // (TEXEL_BYTES * b * c * work.sums)
        splits[b, c] = _split(work, b * c, shares, min(max_threads, room), tiles)
    chosen = _busiest(work, splits, tiles)
    return _tile(work, chosen, splits[chosen], max_threads, tiles)


def choose_pooled(work: Work, max_threads: int, tiles: Tiles = DEFAULT, *, shares: int = 1) -> Tile:
    """The tile of a convolution whose image is averaged: as :func:`choose_tile`, but a group has whole images.

    Beside its shares a group keeps the epilogue's values in local memory, and it has a thread for each block that it
    writes. Raises :class:`ValueError` for an image that no group can hold.
    """
    _, blocks, rows, columns = work.shape[:4]
    pixels = rows * columns
    splits = {}
    for b, c in _options(work, tiles, 4, 14):
        threads, room = pixels // c, tiles.local_bytes // (TEXEL_BYTES * b * pixels)
        if b <= threads <= max_threads and room:
            splits[b, c] = _split(work, b * c, shares, min(max_threads // threads, room - 1), tiles)
    if not splits:
        raise ValueError(
            f"an image of {pixels} pixels is more than a group of {max_threads} threads can hold"
        )
    b, c = _busiest(work, splits, tiles)
    split = splits[b, c]
    room = tiles.local_bytes // (TEXEL_BYTES * b * pixels * (split + 1))
    several = min(min(tiles.group, max_threads) // (pixels // c * split), room, MOST_DEEP)
    return Tile(b, 1, c, (divisor(blocks // b, several), rows, columns // c), split)


def _options(work: Work, tiles: Tiles, most_blocks: int, most_columns: int) -> list[tuple[int, int]]:
    """Blocks and columns that a thread may keep in registers, the best first.

    That is the most texels; among equals the squarest (a block counts for two columns: it reads its own weights).
    """
    _, blocks, _, columns = work.shape[:4]
    options = [
        (b, c)
        for b in range(1, most_blocks + 1)
        for c in range(1, most_columns + 1)
        if blocks % b == 0 and columns % c == 0 and b * c <= tiles.accumulators
    ]
    return sorted(
        options, key=lambda option: (-option[0] * option[1], abs(2 * option[0] - option[1]), option)
    )


def _busiest(work: Work, splits: dict[tuple[int, int], int], tiles: Tiles) -> tuple[int, int]:
    """The first option that keeps the device busy with sums split so, or else the one with the most threads."""

    def threads(option: tuple[int, int]) -> int:
        return work.texels // (option[0] * option[1]) * splits[option]

    busy = [option for option in splits if threads(option) >= tiles.threads]
    return busy[0] if busy else max(splits, key=lambda option: (threads(option), option[0] * option[1]))


def _split(work: Work, texels: int, shares: int, most: int, tiles: Tiles) -> int:
    """Over how many threads a sum is split, at ``most``: enough to keep the device busy, a power of two."""
    split = 1
    while split * 2 <= min(tiles.split, most) and work.texels // texels * split < tiles.threads:
        wanted = split * 2
        if shares % wanted or (work.even and texels % wanted):
            break
        split = wanted
    return split


def _tile(work: Work, tile: tuple[int, int], split: int, max_threads: int, tiles: Tiles) -> Tile:
    batch, blocks, rows, columns = work.shape[:4]
    b, c = tile
    if split == 1:
        extent = (batch * blocks // b, rows, columns // c)
        return Tile(b, 1, c, choose_group(extent, max_threads, tiles.group))
    room = tiles.local_bytes // (TEXEL_BYTES * b * c * work.sums)
    wanted = min(tiles.group, room) // split
    # all rows of a small image in one group: its threads read the same weights
    extent = (blocks // b, rows, columns // c)
    most = max(1, min(max_threads, room) // split)
    x = divisor(extent[2], min(16, most))
    y = divisor(extent[1], min(most, 2 * wanted) // x)
    z = divisor(extent[0], min(min(wanted, most) // (x * y), MOST_DEEP))
    cut = Tile(b, 1, c, (z, y, x), split)
    return cut if cut.is_even or not work.even else _tile(work, tile, 1, max_threads, tiles)


def choose_group(extent: tuple[int, int, int], max_threads: int, wanted: int = 64) -> tuple[int, int, int]:
    """A work group for (z, y, x) threads: wide in x, then y, then z, about ``wanted`` threads, none above the limit."""
    wanted = max(1, min(wanted, max_threads))
    x = divisor(extent[2], min(16, wanted))
    y = divisor(extent[1], wanted // x)
    z = divisor(extent[0], min(wanted // (x * y), MOST_DEEP))
    return z, y, x
