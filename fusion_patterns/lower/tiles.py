"""How a kernel's work is cut: what one thread computes and how many threads form a work group.

All factors divide their dimension. A factor that does not would guard the texel store, and TVM's region analysis
would no longer see how large a thread's tile is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["Tile", "choose_tile", "divisor"]


@dataclass(frozen=True)
class Tile:
    """What one thread computes (blocks of four channels, rows, columns) and the work group (z, y, x)."""

    blocks: int
    rows: int
    columns: int
    group: tuple[int, int, int]


def divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return max(d for d in range(1, min(number, max(limit, 1)) + 1) if number % d == 0)


def choose_tile(
    shape: tuple[int, ...],
    *,
    reduces: bool,
    max_threads: int,
    most_blocks: int = 2,
    most_columns: int = 8,
    wanted_threads: int = 8192,
) -> Tile:
    """The tile for a packed result of ``shape`` (N, C/4, H, W, 4).

    A thread of a convolution computes up to two blocks and eight columns, fewer where that would leave less than
    ``wanted_threads`` threads; a thread of anything else computes one texel.
    """
    batch, blocks, rows, columns = shape[:4]
    across, along = (1, 1)
    if reduces:
        options = [(b, divisor(columns, c)) for b in (2, 1) for c in (8, 4, 2, 1) if b <= most_blocks and c <= most_columns]
        options = [o for o in options if blocks % o[0] == 0]
        options = sorted(set(options), key=lambda o: (-min(o[0] * o[1], 8), o[1]))
        total = batch * blocks * rows * columns
        fitting = [o for o in options if total // (o[0] * o[1]) >= wanted_threads]
        across, along = fitting[0] if fitting else min(options, key=lambda o: (o[0] * o[1] > 4, o[0] * o[1]))
    group = choose_group((batch * blocks // across, rows, columns // along), max_threads)
    return Tile(across, 1, along, group)


def choose_group(extent: tuple[int, int, int], max_threads: int) -> tuple[int, int, int]:
    """A work group for (z, y, x) threads: wide in x, then y, then z, about 64 threads, never above the limit."""
    wanted = min(64, max_threads)
    x = divisor(extent[2], min(16, wanted))
    y = divisor(extent[1], wanted // x)
    z = divisor(extent[0], wanted // (x * y))
    assert prod((x, y, z)) <= max_threads
    return z, y, x
