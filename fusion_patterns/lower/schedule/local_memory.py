"""How much local memory the sums of a kernel take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...place.anchors import ROW_RANK
from ...place.layouts import LANES
from .tiles import TEXEL_BYTES, Tile
from .vectors import Sum

__all__ = ["check_local_memory"]


def check_local_memory(
    parts: list[Any], tile: Tile, shape_of: Callable[[Any], tuple[int, ...]], allowed: int
) -> None:
    """Refuse a kernel that stages more than the profile allows, even if TVM lets stages share memory.

    ``parts``: the kernel's sums and staged blocks in program order; ``shape_of``: the shape of what a block writes;
    ``allowed``: bytes. Raises :class:`ValueError`.
    """
    final = max(number for number, part in enumerate(parts) if isinstance(part, Sum))
    blocks = 0
    for number, part in enumerate(parts):
        shape = shape_of(part.block if isinstance(part, Sum) else part)
        whole = shape[1] if len(shape) > ROW_RANK else -(-shape[1] // LANES)
        # of the last sum, and of what follows it, a group has its own part only
        size = whole if number < final else tile.group[0]
        blocks += size * (1 + part.split if isinstance(part, Sum) else 1)
    needed = TEXEL_BYTES * blocks
    if needed > allowed:
        raise ValueError(f"its vectors take {needed} bytes of local memory, the profile allows {allowed}")
