"""The tiles that are tried for a kernel, in an order that is always the same; the profile's own choice comes first.

First comes how much a thread computes and over how many threads a sum is split, each with the group that fits best;
then other groups for the best of those. Of too many, one half are the nearest and the others are spread over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import TypeVar

from ..lower.schedule.tiles import Tile, divisors
from ..lower.schedule.tuned import Space
from ..place.profiles import Tiles

__all__ = ["Limits", "cuts", "groups"]

MOST_TEXELS = 16
"""Texels of four float32 that a thread may keep in registers, if the profile does not say more."""

WIDE = 16
"""Neighbours along x read neighbouring texels: so many threads of a group along x are as good as more."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a device takes: work items of a group in all, and along (x, y, z)."""

    max_threads: int
    max_items: tuple[int, int, int]

    def takes(self, tile: Tile) -> bool:
        """Whether the device starts groups of this tile."""
        z, y, x = tile.group
        items = (x, y, z) if tile.split == 1 else (tile.threads, 1, 1)
        return tile.threads <= self.max_threads and all(
            size <= most for size, most in zip(items, self.max_items, strict=True)
        )


def cuts(space: Space, limits: Limits, tiles: Tiles, count: int) -> list[Tile]:
    """At most ``count`` tiles, ``space.chosen`` first, that differ in what a thread computes and in the split."""
    chosen = space.chosen
    others = []
    for blocks, rows, columns, split in _all_cuts(space, tiles):
        if (blocks, rows, columns, split) != (chosen.blocks, chosen.rows, chosen.columns, chosen.split):
            cut = Tile(blocks, rows, columns, (1, 1, 1), split)
            best = next(iter(_groups(space, limits, tiles, cut)), None)
            if best is not None:
                others.append(best)
    others.sort(key=lambda tile: (_distance(tile, chosen), _order(tile)))
    return [chosen, *_spread(others, count - 1)]


def groups(space: Space, limits: Limits, tiles: Tiles, tile: Tile, count: int) -> list[Tile]:
    """At most ``count`` tiles that differ from ``tile`` in the work group alone."""
    found = [other for other in _groups(space, limits, tiles, tile) if other != tile]
    return _spread(found, count)


def _all_cuts(space: Space, tiles: Tiles) -> Iterator[tuple[int, int, int, int]]:
    most_texels = max(MOST_TEXELS, tiles.accumulators)
    _, blocks, rows, columns = space.work.shape[:4]
    most_blocks, most_rows, most_columns = space.most
    for b in divisors(blocks, most_blocks):
        for r in divisors(rows, most_rows):
            for c in divisors(columns, most_columns):
                if b * r * c <= most_texels:
                    for split in divisors(space.shares, space.max_threads):
                        yield b, r, c, split


def _groups(space: Space, limits: Limits, tiles: Tiles, cut: Tile) -> list[Tile]:
    """The cut with every legal group, best first: about as many threads as the profile wants, wide along x."""
    extents = space.threads(cut)
    most = min(space.max_threads, limits.max_threads) // cut.split
    found = []
    for z in divisors(extents[0], most):
        for y in divisors(extents[1], most // z):
            for x in divisors(extents[2], most // (z * y)):
                tile = Tile(cut.blocks, cut.rows, cut.columns, (z, y, x), cut.split)
                if limits.takes(tile) and space.why_not(tile) is None:
                    found.append(tile)
    wide = min(WIDE, extents[2])

    def preference(tile: Tile) -> tuple[float, float, tuple[int, ...]]:
        return abs(log2(tile.threads / tiles.group)), abs(log2(tile.group[2] / wide)), tile.group

    return sorted(found, key=preference)


def _order(tile: Tile) -> tuple[int, ...]:
    return (tile.blocks, tile.rows, tile.columns, tile.split, *tile.group)


def _distance(tile: Tile, other: Tile) -> float:
    """By how many doublings two tiles differ, in all."""
    return sum(
        abs(log2(a / b))
        for a, b in zip(
            (tile.blocks, tile.rows, tile.columns, tile.split),
            (other.blocks, other.rows, other.columns, other.split),
            strict=True,
        )
    )


def _spread(ordered: list[T], count: int) -> list[T]:
    """The first half of ``count`` from the front, the others evenly over the rest."""
    if len(ordered) <= count:
        return ordered
    near = max(0, (count + 1) // 2)
    rest, far = ordered[near:], max(0, count) - near
    return ordered[:near] + [rest[(2 * i + 1) * len(rest) // (2 * far)] for i in range(far)]
