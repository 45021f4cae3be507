"""Convolutions on packed tensors as TE computes. A float16 convolution accumulates in float32."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from ...place.layouts import DEPTHWISE, WEIGHT
from .packed import LANES, Packed, blocks, gather

__all__ = ["conv2d", "conv2d_transpose", "padding_of", "zero_pad"]


def conv2d(
    data: Packed,
    weight: Packed,
    attrs: Any,
    out_dtype: str,
    margin: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> te.Tensor:
    """2-D convolution in packed layout; float16 accumulates in float32.

    ``data`` (N, I/4, H, W, 4); ``weight`` (O/4, I/groups/4, KH, KW, 4i, 4o), for depthwise (C/4, 1, KH, KW, 4), or
    plain OIHW where 4 does not divide the groups. ``attrs`` are those of ``relax.nn.conv2d``. ``margin`` (top, left,
    bottom, right): so many pixels more of the result, as if the data had zeros beyond its padding.
    """
    n, _, _, _ = data.shape
    out_channels, group_in, kh, kw = weight.shape
    stride, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
    groups = int(attrs.groups)
    top, left, bottom, right = (
        pad + more * stride[side % 2]
        for side, (pad, more) in enumerate(zip(padding_of(attrs), margin, strict=True))
    )
    height = (data.shape[2] + top + bottom - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    width = (data.shape[3] + left + right - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    padded = zero_pad(data, (top, left, bottom, right))
    ky, kx = te.reduce_axis((0, kh), "ky"), te.reduce_axis((0, kw), "kx")
    shape = (n, blocks(out_channels), height, width, LANES)

    def wide(value: Any) -> Any:
        return _wide(value, out_dtype)

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

        # a tile of a grouped convolution must not reach into the next group: see the schedule
        result = te.compute(shape, packed, name="conv2d_packed" if groups == 1 else "conv2d_packed_grouped")
    else:
        i = te.reduce_axis((0, group_in), "i")
        per_group = out_channels // groups

        def gathered(b: Any, o: Any, y: Any, x: Any, lane: Any) -> Any:
            out = tirx.min(o * LANES + lane, tirx.const(out_channels - 1, "int32"))
            source = (out // per_group) * group_in + i
            product = wide(gather(padded, b, source, row(y), column(x))) * wide(weight.tensor[out, i, ky, kx])
            return te.sum(product, axis=[i, ky, kx])

        result = te.compute(shape, gathered, name="conv2d_gathered")
    return _narrow(result, out_dtype)


def conv2d_transpose(
    data: Packed, weight: Packed, attrs: Any, size: tuple[int, int], out_dtype: str
) -> te.Tensor:
    """Transposed 2-D convolution, one group, no dilation.

    ``data`` (N, I/4, H, W, 4); ``weight`` (I/4, O/4, KH, KW, 4i, 4o); ``size`` is the result's (H, W). Every output
    pixel gathers: of a kernel's rows only each ``stride``-th meets an input row.
    """
    in_channels, out_channels, kh, kw = weight.shape
    stride = [int(s) for s in attrs.strides]
    top, left, _, _ = padding_of(attrs)
    _, _, height, width = data.shape
    taps = (-(-kh // stride[0]), -(-kw // stride[1]))
    halo = (taps[0] - 1, taps[1] - 1)
    below = max(0, (size[0] - 1 + top) // stride[0] - (height - 1))
    beside = max(0, (size[1] - 1 + left) // stride[1] - (width - 1))
    padded = zero_pad(data, (halo[0], halo[1], below, beside))
    io, ii = te.reduce_axis((0, blocks(in_channels)), "io"), te.reduce_axis((0, LANES), "ii")
    ty, tx = te.reduce_axis((0, taps[0]), "ty"), te.reduce_axis((0, taps[1]), "tx")

    def gathered(b: Any, o: Any, y: Any, x: Any, lane: Any) -> Any:
        ky, kx = (y + top) % stride[0] + ty * stride[0], (x + left) % stride[1] + tx * stride[1]
        value = padded[
            b, io, (y + top) // stride[0] - ty + halo[0], (x + left) // stride[1] - tx + halo[1], ii
        ]
        inside = [k < full for k, full, s in ((ky, kh, stride[0]), (kx, kw, stride[1])) if full % s]
        factor = _wide(weight.tensor[io, o, ky, kx, ii, lane], out_dtype)
        if inside:
            zero = _wide(tirx.const(0, out_dtype), out_dtype)
            factor = tirx.if_then_else(tirx.all(*inside), factor, zero)
        return te.sum(_wide(value, out_dtype) * factor, axis=[io, ty, tx, ii])

    shape = (data.shape[0], blocks(out_channels), size[0], size[1], LANES)
    return _narrow(te.compute(shape, gathered, name="conv2d_transpose"), out_dtype)


def _wide(value: Any, out_dtype: str) -> Any:
    return value.astype("float32") if out_dtype == "float16" else value


def _narrow(result: te.Tensor, out_dtype: str) -> te.Tensor:
    if out_dtype != "float16":
        return result
    return te.compute(result.shape, lambda *i: result[i].astype(out_dtype), name="narrow")


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
