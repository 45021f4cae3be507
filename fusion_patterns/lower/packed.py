"""Ops on packed tensors as TE computes.

Every function takes :class:`Packed` operands and gives a TE tensor of the packed result, shape (N, C/4, H, W, 4).
Lane ``l`` of block ``c`` is channel ``4 c + l``. What a computation puts into lanes beyond the last channel does not
matter here: the composite's result is masked once, at its end (:func:`mask`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from ..place.layouts import CHANNEL_VECTOR, DATA, DEPTHWISE, WEIGHT, layout

__all__ = ["Packed", "conv2d", "copy", "elementwise", "mask", "pack", "unpack"]

LANES = 4


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
        index = [
            i if dim > 1 else 0 for i, dim in zip(position[4 - rank :], self.shape, strict=True)
        ]
        return self.tensor[tuple(index)] if rank else self.tensor[()]


def blocks(channels: int) -> int:
    """Number of blocks of four that hold so many channels."""
    return -(-channels // LANES)


def conv2d(data: Packed, weight: Packed, attrs: Any, out_dtype: str) -> te.Tensor:
    """2-D convolution in packed layout; float16 accumulates in float32.

    ``data`` (N, I/4, H, W, 4); ``weight`` (O/4, I/groups/4, KH, KW, 4i, 4o), for depthwise (C/4, 1, KH, KW, 4), or plain
    OIHW where 4 does not divide the groups. ``attrs`` are those of ``relax.nn.conv2d``.
    """
    n, in_channels, _, _ = data.shape
    out_channels, group_in, kh, kw = weight.shape
    stride, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
    groups = int(attrs.groups)
    top, left, bottom, right = padding_of(attrs)
    height = (data.shape[2] + top + bottom - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    width = (data.shape[3] + left + right - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    padded = zero_pad(data, (top, left, bottom, right))
    ky, kx = te.reduce_axis((0, kh), "ky"), te.reduce_axis((0, kw), "kx")
    shape = (n, blocks(out_channels), height, width, LANES)

    def wide(value: Any) -> Any:
        return value.astype("float32") if out_dtype == "float16" else value

    def row(y: Any) -> Any:
        return y * stride[0] + ky * dilation[0]

    def column(x: Any) -> Any:
        return x * stride[1] + kx * dilation[1]

    if weight.layout == DEPTHWISE:

        def depthwise(b: Any, o: Any, y: Any, x: Any, lane: Any) -> Any:
            product = wide(padded[b, o, row(y), column(x), lane]) * wide(weight.tensor[o, 0, ky, kx, lane])
            return te.sum(product, axis=[ky, kx])

        result = te.compute(shape, depthwise, name="conv2d_depthwise")
    elif weight.layout == WEIGHT:
        io = te.reduce_axis((0, blocks(group_in)), "io")
        ii = te.reduce_axis((0, LANES), "ii")
        per_group = out_channels // groups // LANES if groups > 1 else 1

        def packed(b: Any, o: Any, y: Any, x: Any, lane: Any) -> Any:
            block = (o // per_group) * (group_in // LANES) + io if groups > 1 else io
            product = wide(padded[b, block, row(y), column(x), ii]) * wide(
                weight.tensor[o, io, ky, kx, ii, lane]
            )
            return te.sum(product, axis=[io, ky, kx, ii])

        result = te.compute(shape, packed, name="conv2d_packed")
    else:
        i = te.reduce_axis((0, group_in), "i")
        per_group = out_channels // groups

        def gathered(b: Any, o: Any, y: Any, x: Any, lane: Any) -> Any:
            out = tirx.min(o * LANES + lane, tirx.const(out_channels - 1, "int32"))
            source = (out // per_group) * group_in + i
            product = wide(padded[b, source // LANES, row(y), column(x), source % LANES]) * wide(
                weight.tensor[out, i, ky, kx]
            )
            return te.sum(product, axis=[i, ky, kx])

        result = te.compute(shape, gathered, name="conv2d_gathered")
    if out_dtype != "float16":
        return result
    return te.compute(shape, lambda *i: result[i].astype(out_dtype), name="narrow")


def padding_of(attrs: Any) -> tuple[int, int, int, int]:
    """(top, left, bottom, right) from Relax's one, two or four numbers."""
    pads = [int(p) for p in attrs.padding]
    if len(pads) == 1:
        pads *= 4
    elif len(pads) == 2:
        pads = [pads[0], pads[1], pads[0], pads[1]]
    return pads[0], pads[1], pads[2], pads[3]


def zero_pad(data: Packed, pads: tuple[int, int, int, int], value: float = 0.0) -> te.Tensor:
    """The data with a border of ``value`` (top, left, bottom, right); the tensor itself if there is none."""
    if not any(pads):
        return data.tensor
    top, left, bottom, right = pads
    n, c, h, w, _ = (int(d) for d in data.tensor.shape)
    border = tirx.const(value, data.dtype)

    def padded(b: Any, k: Any, y: Any, x: Any, lane: Any) -> Any:
        inside = [
            condition
            for wanted, condition in (
                (top, y >= top),
                (bottom, y < h + top),
                (left, x >= left),
                (right, x < w + left),
            )
            if wanted
        ]
        return tirx.if_then_else(tirx.all(*inside), data.tensor[b, k, y - top, x - left, lane], border)

    return te.compute((n, c, h + top + bottom, w + left + right, LANES), padded, name="pad")


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
            tirx.min(p, d - 1) if d != full else p for p, d, full in zip(position, source, padded, strict=True)
        )
        if axis >= 0:
            position = tuple(position[0] if k == axis else 0 for k in range(len(value.shape)))
        element = value.tensor[position]
        return tirx.Select(tirx.all(*inside), element, zero) if inside else element

    return te.compute(kind.packed_shape(source), packed, name="pack")


def unpack(value: Packed) -> te.Tensor:
    """A packed tensor in its source's row-major layout, shape ``value.shape``."""
    kind = layout(value.layout)

    def source(*index: Any) -> Any:
        if len(kind.axes) == 1 and len(value.shape) != 1:
            axis = max(range(len(value.shape)), key=lambda k: value.shape[k])
            index = (index[axis],)
        return value.tensor[kind.to_packed(*index)]

    return te.compute(value.shape, source, name="unpack")


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
