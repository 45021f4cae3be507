"""Ops on packed tensors as TE computes.

Every function takes :class:`Packed` operands and gives a TE tensor of the packed result, shape (N, C/4, H, W, 4).
Lane ``l`` of block ``c`` is channel ``4 c + l``. What a computation puts into lanes beyond the last channel does not
matter here: the composite's result is masked once, at its end (:func:`mask`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tvm import te, tirx, topi

from ...place.layouts import CHANNEL_VECTOR, DATA, LANES, layout

__all__ = [
    "LANES",
    "Packed",
    "blocks",
    "channel_slice",
    "concat",
    "copy",
    "elementwise",
    "gather",
    "mask",
    "move",
    "pack",
    "pixel",
    "resize2d",
    "shuffle",
    "unpack",
]


@dataclass(frozen=True)
class Packed:
    """A TE tensor, the layout that it is in, and the shape of its source."""

    tensor: te.Tensor
    layout: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The element type."""
        return str(self.tensor.dtype)

    def at(self, n: Any, c: Any, y: Any, x: Any, lane: Any, channels: int) -> Any:
        """The element that meets position (n, 4 c + lane, y, x) of a result, after broadcasting."""
        if self.layout == DATA:
            rows = self.shape
            return self.tensor[
                n if rows[0] > 1 else 0, c, y if rows[2] > 1 else 0, x if rows[3] > 1 else 0, lane
            ]
        if self.layout == CHANNEL_VECTOR:
            return self.tensor[c, lane]
        return self._plain_at((n, c * LANES + lane, y, x), channels)

    def _plain_at(self, position: tuple[Any, ...], channels: int) -> Any:
        rank = len(self.shape)
        # a lane beyond the last channel reads the last one: its result is masked, its address must exist
        within = (position[0], tirx.min(position[1], channels - 1), *position[2:])
        position = within if channels % LANES else position
        index = [i if dim > 1 else 0 for i, dim in zip(position[4 - rank :], self.shape, strict=True)]
        return self.tensor[tuple(index)] if rank else self.tensor[()]


def blocks(channels: int) -> int:
    """Number of blocks of four that hold so many channels."""
    return -(-channels // LANES)


def gather(tensor: te.Tensor, n: Any, channel: Any, y: Any, x: Any) -> Any:
    """One channel of a packed tensor (N, C/4, H, W, 4), wherever in a block it lies."""
    return tensor[n, channel // LANES, y, x, channel % LANES]


def mask(value: Packed, channels: int) -> te.Tensor:
    """The same tensor with zero in the lanes beyond the last channel.

    A selection, not a product: whatever stands there (inf, NaN) is dropped.
    """
    zero = tirx.const(0, value.dtype)
    return te.compute(
        value.tensor.shape,
        lambda n, c, y, x, lane: tirx.Select(
            c * LANES + lane < channels, value.tensor[n, c, y, x, lane], zero
        ),
        name="mask",
    )


def copy(value: Packed) -> te.Tensor:
    """The same tensor, written once more (into another scope)."""
    return te.compute(value.tensor.shape, lambda *i: value.tensor[i], name="copy")


def pack(value: Packed, name: str) -> te.Tensor:
    """A plain tensor in the packed layout ``name``; new lanes are zero."""
    kind = layout(name)
    source = value.shape
    if len(kind.axes) == 1 and len(source) != 1:
        flat = source
        axis = max(range(len(flat)), key=lambda k: flat[k])
        source = (flat[axis],)
    else:
        axis = -1
    padded = kind.padded_shape(source)
    zero = tirx.const(0, value.dtype)

    def packed(*index: Any) -> Any:
        position = kind.to_source(*index)
        inside = [p < d for p, d, full in zip(position, source, padded, strict=True) if d != full]
        # a selection with an address that exists stays one vector; a guarded load would not
        position = tuple(
            tirx.min(p, d - 1) if d != full else p
            for p, d, full in zip(position, source, padded, strict=True)
        )
        if axis >= 0:
            position = tuple(position[0] if k == axis else 0 for k in range(len(value.shape)))
        element = value.tensor[position]
        return tirx.Select(tirx.all(*inside), element, zero) if inside else element

    return te.compute(kind.packed_shape(source), packed, name="pack")


def pixel(value: Packed) -> te.Tensor:
    """A plain row (N, C) as a packed image of one pixel."""
    n, channels = value.shape

    def packed(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return value.tensor[b, _within(c * LANES + lane, channels)]

    return te.compute((n, blocks(channels), 1, 1, LANES), packed, name="pixel")


def unpack(value: Packed, axes: tuple[int, ...] = ()) -> te.Tensor:
    """A packed tensor in its source's row-major layout, shape ``value.shape``.

    ``axes``: the order in which the result has the source's axes, if it is another.
    """
    kind = layout(value.layout)
    order = axes or tuple(range(len(value.shape)))

    def source(*index: Any) -> Any:
        index = tuple(index[order.index(axis)] for axis in range(len(order)))
        if len(kind.axes) == 1 and len(value.shape) != 1:
            axis = max(range(len(value.shape)), key=lambda k: value.shape[k])
            index = (index[axis],)
        return value.tensor[kind.to_packed(*index)]

    return te.compute(tuple(value.shape[axis] for axis in order), source, name="unpack")


def elementwise(
    expression: Callable[..., Any], operands: list[Packed], shape: tuple[int, ...], name: str
) -> te.Tensor:
    """An elementwise op on operands that broadcast to the source shape (N, C, H, W).

    ``expression`` maps one scalar of each operand to the result's scalar.
    """
    n, channels, height, width = shape

    def compute(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return expression(*(operand.at(b, c, y, x, lane, channels) for operand in operands))

    return te.compute((n, blocks(channels), height, width, LANES), compute, name=name)


def concat(parts: list[Packed]) -> te.Tensor:
    """Tensors one after the other along the channels.

    Where 4 divides the channels of all but the last, a block comes from one part as it is; else every lane is gathered.
    """
    n, _, height, width = parts[0].shape
    starts = list(accumulate((part.shape[1] for part in parts), initial=0))
    aligned = not any(start % LANES for start in starts[:-1])
    channels = starts[-1]

    def block(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return _one_of(
            [
                (c < starts[k + 1] // LANES, part.tensor[b, c - starts[k] // LANES, y, x, lane])
                for k, part in enumerate(parts)
            ]
        )

    def gathered(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        channel = _within(c * LANES + lane, channels)
        own = [channel - start for start in starts]
        return _one_of(
            [(channel < starts[k + 1], gather(part.tensor, b, own[k], y, x)) for k, part in enumerate(parts)]
        )

    shape = (n, blocks(channels), height, width, LANES)
    return te.compute(shape, block if aligned else gathered, name="concat")


def _one_of(choices: list[tuple[Any, Any]]) -> Any:
    """The value of the first choice whose condition holds; the last one's needs not be asked."""
    *others, (_, value) = choices
    for condition, other in reversed(others):
        value = tirx.if_then_else(condition, other, value)
    return value


def _within(channel: Any, channels: int) -> Any:
    """A lane beyond the last channel reads the last one: its result is masked, its address must exist."""
    return tirx.min(channel, channels - 1) if channels % LANES else channel


def channel_slice(data: Packed, begin: int, channels: int) -> te.Tensor:
    """So many channels from channel ``begin`` on; where 4 does not divide it every lane is gathered."""
    n, _, height, width = data.shape

    def block(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return data.tensor[b, c + begin // LANES, y, x, lane]

    def gathered(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        source = _within(c * LANES + lane, channels) + begin
        return gather(data.tensor, b, source, y, x)

    shape = (n, blocks(channels), height, width, LANES)
    return te.compute(shape, gathered if begin % LANES else block, name="channel_slice")


def shuffle(data: Packed, groups: int) -> te.Tensor:
    """Channels shuffled between ``groups``: channel ``i groups + j`` is channel ``j (C / groups) + i`` of the data."""
    channels = data.shape[1]

    def gathered(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        out = _within(c * LANES + lane, channels)
        source = out % groups * (channels // groups) + out // groups
        return gather(data.tensor, b, source, y, x)

    return te.compute(data.tensor.shape, gathered, name="shuffle")


def move(data: Packed, steps: list[tuple[tuple[int, ...], tuple[int, ...], list[int] | None]]) -> te.Tensor:
    """A plain tensor after reshapes and transpositions, the last of which gives it the shape (N, C, H, W).

    ``steps``: of each the shape before, the shape after, and the axes of a transposition or None for a reshape.
    """
    n, channels, height, width = steps[-1][1]

    def gathered(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        index: list[Any] = [b, _within(c * LANES + lane, channels), y, x]
        for before, after, axes in reversed(steps):
            if axes is not None:
                index = [index[axes.index(axis)] for axis in range(len(axes))]
                continue
            place: Any = 0
            for number, dim in zip(index, after, strict=True):
                place = place * dim + number
            index = []
            for dim in reversed(before):
                index.insert(0, place % dim)
                place = place // dim
        return data.tensor[tuple(index)]

    return te.compute((n, blocks(channels), height, width, LANES), gathered, name="move")


def resize2d(data: Packed, attrs: Any, size: tuple[int, int]) -> te.Tensor:
    """Resize to ``size`` (H, W): nearest neighbour or linear, by TOPI's formulas, which know this layout."""
    return topi.image.resize2d(
        data.tensor,
        roi=[float(r) for r in attrs.roi],
        size=list(size),
        layout="NCHW4c",
        method=str(attrs.method),
        coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
        rounding_method=str(attrs.rounding_method),
    )
