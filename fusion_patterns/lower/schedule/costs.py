"""The tile of a convolution by what it costs on a machine that the profile describes.

A work group sums in steps: a block of four input channels at one pixel of the kernel. In each, a thread reads a vector
for every column of its tile and four for every block of output channels, and multiplies all with all. A step takes the
longest of three: the way to memory and back, the lines of the first-level cache that the groups of a compute unit ask
for, and their instructions. Groups that a unit can't hold at a time take turns.

The cycles in ``place/profiles/nvidia-opencl.yaml`` were fitted to 8,668 times of 244 convolutions of nine networks on
an H200. What it chooses there took 1.09 times as long as the fastest tile that was found, in the geometric mean; what
:func:`.tiles.choose_tile` chooses, which knows no machine, 1.24 times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ...place.layouts import LANES
from ...place.profiles import Machine, Tiles
from .tiles import MOST_DEEP, TEXEL_BYTES, Tile, Work, divisors
from .tuned import MOST_BLOCKS, MOST_COLUMNS

__all__ = ["cheapest_tile", "cycles"]

FEWEST_THREADS = 64
"""Smaller groups only where there are no others."""

Array = np.ndarray[Any, Any]


@lru_cache(maxsize=4096)
def cheapest_tile(work: Work, steps: int, shares: int, max_threads: int, tiles: Tiles) -> Tile:
    """The legal tile that costs least; of several the one with the fewest texels in a thread.

    ``steps``: how many blocks of four products all sums of one element have together. ``shares``: into how many each
    can be cut. ``tiles.machine`` must be there.
    """
    machine = tiles.machine
    assert machine is not None
    _, blocks, _, columns = work.shape[:4]
    best: tuple[float, Tile] | None = None
    for small in (False, True):
        for b in divisors(blocks, min(machine.texels, MOST_BLOCKS)):
            for c in divisors(columns, min(machine.texels // b, MOST_COLUMNS)):
                for split in divisors(shares, min(tiles.split, max_threads)):
                    found = _cheapest_group(work, steps, b, c, split, max_threads, tiles, machine, small)
                    if found and (best is None or found[0] < best[0]):
                        best = found
        if best:
            return best[1]
    raise AssertionError("a tile of one texel and one thread is always legal")


def cycles(machine: Machine, steps: float, tile: Tile, groups: int) -> float:
    """What a kernel of one convolution costs in so many ``groups`` of threads with such a tile.

    ``steps``: how many blocks of four products a result sums.
    """
    group = tuple(np.array([size]) for size in tile.group)
    own = tile.blocks, tile.rows * tile.columns, tile.split
    return float(_cycles(machine, steps / tile.split, 1, *own, group, np.array([groups]))[0])


def _cheapest_group(
    work: Work,
    steps: int,
    b: int,
    c: int,
    split: int,
    max_threads: int,
    tiles: Tiles,
    machine: Machine,
    small: bool,
) -> tuple[float, Tile] | None:
    """The group that costs least for threads of ``b`` blocks and ``c`` columns; ``small``: of less than usual."""
    batch, blocks, rows, columns = work.shape[:4]
    room = max_threads
    if split > 1:
        room = min(room, tiles.local_bytes // (TEXEL_BYTES * b * c * work.sums))
    room //= split
    if not room:
        return None
    deep = blocks // b * (batch if split == 1 else 1)
    z, y, x = _groups(deep, rows, columns // c, room)
    threads = z * y * x * split
    legal = (threads < FEWEST_THREADS) == small
    if work.even and split > 1:
        legal &= [
            Tile(b, 1, c, (int(zz), int(yy), int(xx)), split).is_even
            for zz, yy, xx in zip(z, y, x, strict=True)
        ]
    z, y, x = z[legal], y[legal], x[legal]
    if not len(z):
        return None
    groups = work.texels // (b * c) // (z * y * x)
    cost = _cycles(machine, steps / split, work.sums, b, c, split, (z, y, x), groups)
    at = int(np.argmin(cost))
    return float(cost[at]), Tile(b, 1, c, (int(z[at]), int(y[at]), int(x[at])), split)


@lru_cache(maxsize=4096)
def _groups(deep: int, rows: int, columns: int, room: int) -> tuple[Array, Array, Array]:
    """All groups (z, y, x) of at most ``room`` threads that divide a result, wide ones first."""
    found = [
        (z, y, x)
        for x in reversed(divisors(columns, room))
        for y in reversed(divisors(rows, room // x))
        for z in reversed(divisors(deep, min(room // (x * y), MOST_DEEP)))
    ]
    z, y, x = np.array(found).T
    return z, y, x


def _cycles(
    machine: Machine,
    steps: float,
    sums: int,
    b: int,
    c: int,
    split: int,
    group: tuple[Array, ...],
    groups: Array,
) -> Array:
    """Cycles of a kernel, for every ``group`` (z, y, x); all ``groups`` of them are alike."""
    z, y, x = group
    threads = z * y * x * split
    subgroups = np.ceil(threads / machine.subgroup)
    # how many groups a unit holds at a time
    most = np.minimum(
        machine.registers // (threads * (LANES * b * c * sums + machine.own_registers)),
        machine.items // threads,
    )
    held = np.minimum(np.ceil(groups / machine.units), np.maximum(most, 1))
    turns = np.ceil(groups / (machine.units * held))
    # what the threads of a subgroup ask for: neighbours along x read side by side, along z the same pixels
    across = np.minimum(x, machine.subgroup)
    down = np.minimum(y, machine.subgroup // across)
    blocks = np.minimum(z, machine.subgroup // (across * down))
    parts = np.minimum(split, np.maximum(machine.subgroup // (across * down * blocks), 1))
    of_line = min(c * TEXEL_BYTES, machine.line) / machine.line
    lines = c * down * np.maximum(across * of_line, 1) * parts + LANES * b * blocks * parts
    reads = c + LANES * b
    busy = np.ceil(held * subgroups / machine.schedulers)
    step = np.maximum(machine.latency + machine.read * reads, held * subgroups * lines)
    step = np.maximum(step, busy * (LANES * LANES * b * c + machine.access * reads))
    total: Array = turns * (steps * step + machine.finish * b * c * busy)
    return total
