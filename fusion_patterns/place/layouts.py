"""Packed layouts: what they are called, what shape they give, and how a tensor gets in and out of them.

A layout is written as TVM writes it (``NCHW4c``): capitals are the source's axes in order, a digit and a
small letter is the inner block of the axis of that name. An axis that the block does not divide is padded
with zeros. Where the outer axes are turned the source's are said after an underscore.

    NCHW4c     data             (N, C/4, H, W, 4)
    OIHW4i4o   conv weight      (O/4, I/4, H, W, 4, 4): the 16 numbers of a block lie side by side
    OIHW4o     depthwise weight (O/4, I, H, W, 4)
    IOHW4i4o   weight of a transposed conv (I/4, O/4, H, W, 4, 4)
    OI4o_IO    weight of a dense layer (O/4, I, 4)
    C4c        one number for each channel (C/4, 4)
    plain      row-major, as the module came
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

__all__ = [
    "CHANNEL_VECTOR",
    "DATA",
    "DENSE",
    "DEPTHWISE",
    "LANES",
    "PLAIN",
    "TRANSPOSED",
    "WEIGHT",
    "Layout",
    "layout",
]

LANES = 4
"""Channels of one block: the numbers of a texel."""

PLAIN = "plain"
DATA = "NCHW4c"
WEIGHT = "OIHW4i4o"
DEPTHWISE = "OIHW4o"
TRANSPOSED = "IOHW4i4o"
DENSE = "OI4o_IO"
CHANNEL_VECTOR = "C4c"


@dataclass(frozen=True)
class Layout:
    """A packed layout such as ``NCHW4c``."""

    name: str

    @cached_property
    def axes(self) -> str:
        """The source's axes in order, as capitals: ``NCHW``."""
        return self.name.rpartition("_")[2] if "_" in self.name else self._outer

    @cached_property
    def _outer(self) -> str:
        return re.sub(r"\d+[a-z]", "", self.name.partition("_")[0])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each outer axis of the packed tensor the source axis that it is."""
        return tuple(self.axes.index(letter) for letter in self._outer)

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """For each inner block: the source axis that it splits, and its size."""
        return tuple(
            (self.axes.index(letter.upper()), int(size))
            for size, letter in re.findall(r"(\d+)([a-z])", self.name)
        )

    def packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The packed shape of a source of ``shape``; split axes are rounded up."""
        factor = dict(self.blocks)
        outer = tuple(-(-shape[axis] // factor.get(axis, 1)) for axis in self.order)
        return outer + tuple(size for _, size in self.blocks)

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The source shape rounded up so that every block is full."""
        factor = dict(self.blocks)
        return tuple(-(-dim // factor.get(axis, 1)) * factor.get(axis, 1) for axis, dim in enumerate(shape))

    def is_view(self, shape: tuple[int, ...]) -> bool:
        """Whether packing moves nothing: the packed tensor has the source's numbers in the same order."""
        if (
            len(self.blocks) != 1
            or self.padded_shape(shape) != shape
            or self.order != tuple(range(len(shape)))
        ):
            return False
        return all(dim == 1 for dim in shape[self.blocks[0][0] + 1 :])

    def to_packed(self, *index: Any) -> tuple[Any, ...]:
        """The packed position of a source position (an index map for ``relax.op.layout_transform``)."""
        factor = dict(self.blocks)
        outer = tuple(index[axis] // factor[axis] if axis in factor else index[axis] for axis in self.order)
        return outer + tuple(index[axis] % size for axis, size in self.blocks)

    def to_source(self, *index: Any) -> tuple[Any, ...]:
        """The source position of a packed position."""
        rank = len(self.axes)
        inner = {axis: (index[rank + k], size) for k, (axis, size) in enumerate(self.blocks)}
        return tuple(
            index[place] * inner[axis][1] + inner[axis][0] if axis in inner else index[place]
            for axis, place in enumerate(map(self.order.index, range(rank)))
        )

    def pack(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Pack an array of the source layout; new lanes are zero."""
        padded = self.padded_shape(array.shape)
        array = np.pad(array, [(0, new - old) for old, new in zip(array.shape, padded, strict=True)])
        factor = dict(self.blocks)
        split: list[int] = []
        outer, inner = [], {}
        for axis, dim in enumerate(padded):
            outer.append(len(split))
            if axis in factor:
                inner[axis] = len(split) + 1
                split += [dim // factor[axis], factor[axis]]
            else:
                split.append(dim)
        order = [outer[axis] for axis in self.order] + [inner[axis] for axis, _ in self.blocks]
        return np.ascontiguousarray(array.reshape(split).transpose(order))


@cache
def layout(name: str) -> Layout:
    """The layout of that name (not ``plain``, which is the absence of one)."""
    return Layout(name)
