"""Which tiles a kernel allows, and by which key a measured tile finds its kernel again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...place.profiles import TunedTile
from .tiles import MOST_DEEP, TEXEL_BYTES, Tile, Work

__all__ = ["Space", "TileFault", "kernel_key", "tiles_by_key"]

MOST_BLOCKS = 8
MOST_ROWS = 4
MOST_COLUMNS = 16


class TileFault(ValueError):
    """A tile that a kernel does not allow. The message is the reason."""


@dataclass(frozen=True)
class Space:
    """Which tiles a kernel allows.

    ``chosen``: the tile by the device's profile. ``max_threads``: work items of the target's largest work group.
    ``local_bytes``: local memory that a split sum may take. ``shares``: into how many the reduction can be cut.
    ``joins_blocks``, ``joins_pixels``: whether one thread may compute several of them.
    """

    work: Work
    chosen: Tile
    max_threads: int
    local_bytes: int
    shares: int = 1
    joins_blocks: bool = True
    joins_pixels: bool = True

    @property
    def most(self) -> tuple[int, int, int]:
        """The most blocks, rows and columns of one thread."""
        pixels = (MOST_ROWS, MOST_COLUMNS) if self.joins_pixels else (1, 1)
        return (MOST_BLOCKS if self.joins_blocks else 1, *pixels)

    def threads(self, tile: Tile) -> tuple[int, int, int]:
        """How many threads (z, y, x) the whole result takes; those that share a sum count as one."""
        batch, blocks, rows, columns = self.work.shape[:4]
        z = blocks // tile.blocks * (batch if tile.split == 1 else 1)
        return z, rows // tile.rows, columns // tile.columns

    def why_not(self, tile: Tile) -> str | None:
        """Why the kernel does not allow a tile; ``None`` if it does."""
        parts = zip(
            ("blocks", "rows", "columns"),
            (tile.blocks, tile.rows, tile.columns),
            self.work.shape[1:4],
            self.most,
            strict=True,
        )
        for name, factor, extent, most in parts:
            if extent % factor:
                return f"{factor} {name} of a thread don't divide {extent}"
            if factor > most:
                return f"{factor} {name} of a thread are more than {most}"
        for axis, size, extent in zip("zyx", tile.group, self.threads(tile), strict=True):
            if extent % size:
                return f"{size} threads of a group along {axis} don't divide {extent}"
        if tile.threads > self.max_threads:
            return f"a group of {tile.threads} threads, the target takes {self.max_threads}"
        if tile.split == 1:
            deep = tile.group[0] > MOST_DEEP
            return f"{tile.group[0]} threads of a group along z, devices take {MOST_DEEP}" if deep else None
        return self._why_not_split(tile)

    def _why_not_split(self, tile: Tile) -> str | None:
        if self.shares % tile.split:
            return f"a sum of {self.shares} shares can't be split over {tile.split} threads"
        if tile.rows > 1:
            return "a thread that shares a sum computes one row"
        if self.work.even and not tile.is_even:
            return "its threads would not write equally many texels"
        needed = tile.threads * tile.blocks * tile.columns * self.work.sums * TEXEL_BYTES
        if needed > self.local_bytes:
            return f"its shares take {needed} bytes of local memory, the profile allows {self.local_bytes}"
        return None


_WORDS = re.compile(r'"[^"]*"|\.\w+|(?<![\w.])[A-Za-z_]\w*=?')


def kernel_key(func: Any) -> str:
    """The key of a PrimFunc that is not scheduled yet: 16 hex digits, the same for the same computation.

    Names of variables and attributes of the function don't count; shapes, scopes, dtypes and block names do.
    """
    bare = tirx.PrimFunc(func.params, func.body, func.ret_type)
    names: dict[str, str] = {}

    def plain(match: re.Match[str]) -> str:
        word = match[0]
        if word.startswith(('"', ".")) or word.endswith("="):
            return word
        return names.setdefault(word, f"v{len(names)}")

    text = _WORDS.sub(plain, str(bare.script(show_meta=False)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tiles_by_key(tuned: Iterable[TunedTile]) -> dict[str, Tile]:
    """The tiles of a profile by kernel key."""
    return {one.key: Tile(one.blocks, one.rows, one.columns, one.group, one.split) for one in tuned}
