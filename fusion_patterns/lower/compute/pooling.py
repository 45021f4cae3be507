"""Pooling on packed tensors as TE computes."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

from tvm import te, tirx

from .convolution import padding_of, zero_pad
from .packed import LANES, Packed, blocks

__all__ = [
    "REACH",
    "STRIDES",
    "adaptive_pool",
    "channel_pool",
    "global_pool",
    "pads_of",
    "pool2d",
    "wide_of",
    "window_max",
]

REACH, STRIDES = "fusion_patterns.reach", "fusion_patterns.strides"
"""Of :func:`window_max`: how many rows and columns a window spans, and how far apart windows begin."""


def pool2d(data: Packed, attrs: Any, size: tuple[int, int], kind: str) -> te.Tensor:
    """Maximum (``kind`` = "max") or average ("avg") over windows.

    ``attrs`` are those of ``relax.nn.max_pool2d``; ``size`` is the result's (H, W), which ``ceil_mode`` may have
    rounded up. Where the average does not count the padding it divides by the pixels that the window really meets.
    Averages of float16 are summed in float32.
    """
    kernel, stride = [int(k) for k in attrs.pool_size], [int(s) for s in attrs.strides]
    dilation = [int(d) for d in attrs.dilation]
    n, _, height, width = data.shape
    if kind == "avg" and size == (1, 1) and kernel == [height, width] and not any(padding_of(attrs)):
        return global_pool(data)
    border = float(tirx.min_value(data.dtype).value) if kind == "max" else 0.0
    pads = pads_of(attrs, (height, width), size)
    if kind == "max" and edge_will_do(attrs, (height, width), size):
        padded = edge_pad(data, pads)
    else:
        padded = zero_pad(data, pads, border)
    ky, kx = te.reduce_axis((0, kernel[0]), "ky"), te.reduce_axis((0, kernel[1]), "kx")
    shape = (n, int(data.tensor.shape[1]), size[0], size[1], LANES)
    combine = te.max if kind == "max" else te.sum
    wide = data.dtype if kind == "max" else wide_of(data.dtype)

    def window(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        row, column = y * stride[0] + ky * dilation[0], x * stride[1] + kx * dilation[1]
        return combine(padded[b, c, row, column, lane].astype(wide), axis=[ky, kx])

    pooled = te.compute(shape, window, name=f"pool2d_{kind}")
    if kind == "max":
        return pooled

    def met(position: Any, axis: int, extent: int) -> Any:
        # padding counts where the caller says so; what rounding the size up adds never does
        before, after = padding_of(attrs)[axis], padding_of(attrs)[axis + 2]
        counts = bool(attrs.count_include_pad)
        start = position * stride[axis] - before
        end = tirx.min(start + kernel[axis], extent + (after if counts else 0))
        return end - (start if counts else tirx.max(start, 0))

    def average(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        pixels = tirx.max(met(y, 0, height) * met(x, 1, width), 1)
        return (pooled[b, c, y, x, lane] / pixels.astype(wide)).astype(data.dtype)

    return te.compute(shape, average, name="average")


def edge_will_do(attrs: Any, image: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether every window that reaches beyond an image (H, W) has the image's edge in it as well."""
    top, left, _, _ = padding_of(attrs)
    return all(
        int(dilation) == 1 and before < int(kernel) and (count - 1) * int(stride) - before < length
        for count, stride, kernel, dilation, length, before in zip(
            size, attrs.strides, attrs.pool_size, attrs.dilation, image, (top, left), strict=True
        )
    )


def edge_pad(data: Packed, pads: tuple[int, int, int, int]) -> te.Tensor:
    """The data with its edge repeated (top, left, bottom, right): no load depends on a condition."""
    if not any(pads):
        return data.tensor
    top, left, bottom, right = pads
    n, c, h, w, _ = (int(d) for d in data.tensor.shape)

    def padded(b: Any, k: Any, y: Any, x: Any, lane: Any) -> Any:
        row, column = (
            tirx.max(tirx.min(at - before, length - 1), 0)
            for at, before, length in ((y, top, h), (x, left, w))
        )
        return data.tensor[b, k, row, column, lane]

    return te.compute((n, c, h + top + bottom, w + left + right, LANES), padded, name="pad")


def pads_of(attrs: Any, image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """How far (top, left, bottom, right) the windows of a pool reach beyond an image of (H, W).

    ``attrs`` are those of ``relax.nn.max_pool2d``; ``size`` is the result's (H, W).
    """
    top, left, _, _ = padding_of(attrs)
    bottom, right = (
        max(0, (count - 1) * int(stride) + (int(kernel) - 1) * int(dilation) + 1 - length - before)
        for count, stride, kernel, dilation, length, before in zip(
            size, attrs.strides, attrs.pool_size, attrs.dilation, image, (top, left), strict=True
        )
    )
    return top, left, bottom, right


def window_max(
    data: Packed, attrs: Any, size: tuple[int, int], margin: tuple[int, int, int, int]
) -> te.Tensor:
    """The maximum over windows, written out: no reduction, so that it may stand behind a guard.

    ``attrs`` are those of ``relax.nn.max_pool2d``; ``size`` is the result's (H, W). ``margin`` (top, left, bottom,
    right): so many pixels of the data lie beyond the image. Windows read them, and they don't count.
    """
    kernel, stride, dilation = (
        [int(k) for k in each] for each in (attrs.pool_size, attrs.strides, attrs.dilation)
    )
    image = _without(data, margin) if any(margin) else data.tensor
    taps = list(product(*(range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True))))

    def window(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        values = (image[b, c, y * stride[0] + row, x * stride[1] + column, lane] for row, column in taps)
        return reduce(tirx.max, values)

    shape = (data.shape[0], int(data.tensor.shape[1]), *size, LANES)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return te.compute(shape, window, name="window_max", attrs={REACH: reach, STRIDES: stride})


def _without(data: Packed, margin: tuple[int, int, int, int]) -> te.Tensor:
    """The data with the least number in place of what stands in its margin."""
    top, left, bottom, right = margin
    _, _, height, width = data.shape
    least = tirx.min_value(data.dtype)

    def image(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        inside = [
            condition
            for wanted, condition in (
                (top, y >= top),
                (bottom, y < height - bottom),
                (left, x >= left),
                (right, x < width - right),
            )
            if wanted
        ]
        return tirx.Select(tirx.all(*inside), data.tensor[b, c, y, x, lane], least)

    return te.compute(data.tensor.shape, image, name="image")


def global_pool(data: Packed) -> te.Tensor:
    """The average of the whole image: (N, C/4, 1, 1, 4). float16 is summed in float32."""
    n, _, height, width = data.shape
    y, x = te.reduce_axis((0, height), "ky"), te.reduce_axis((0, width), "kx")
    shape = (n, int(data.tensor.shape[1]), 1, 1, LANES)
    wide = wide_of(data.dtype)
    total = te.compute(
        shape,
        lambda b, c, i, j, lane: te.sum(data.tensor[b, c, y, x, lane].astype(wide), axis=[y, x]),
        name="global_pool",
    )
    scale = tirx.const(1.0 / (height * width), wide)
    return te.compute(shape, lambda *i: (total[i] * scale).astype(data.dtype), name="average")


def adaptive_pool(data: Packed, size: tuple[int, int]) -> te.Tensor:
    """Averages over ``size`` (H, W) windows that cover the image.

    Window ``i`` of ``n`` on a length of ``L`` begins at ``i L / n``, rounded down, and ends before ``(i + 1) L / n``,
    rounded up: windows may overlap, and differ in length. float16 is summed in float32.
    """
    if size == (1, 1):
        return global_pool(data)
    n, _, *lengths = data.shape
    axes = list(zip(size, lengths, strict=True))
    longest = [max(_length(i, *axis) for i in range(axis[0])) for axis in axes]
    ky, kx = te.reduce_axis((0, longest[0]), "ky"), te.reduce_axis((0, longest[1]), "kx")
    shape = (n, int(data.tensor.shape[1]), *size, LANES)
    wide = wide_of(data.dtype)

    def window(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        places, inside = [], []
        for i, k, (out, full), most in zip((y, x), (ky, kx), axes, longest, strict=True):
            place = i * full // out + k
            if any(_length(j, out, full) < most for j in range(out)):
                # a selection with an address that exists stays one vector; a guarded load would not
                inside.append(k < _length(i, out, full))
                place = tirx.min(place, full - 1)
            places.append(place)
        value = data.tensor[b, c, places[0], places[1], lane].astype(wide)
        if inside:
            value = tirx.Select(tirx.all(*inside), value, tirx.const(0, wide))
        return te.sum(value, axis=[ky, kx])

    total = te.compute(shape, window, name="pool2d_adaptive")

    def average(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        pixels = _length(y, *axes[0]) * _length(x, *axes[1])
        return (total[b, c, y, x, lane] / pixels.astype(wide)).astype(data.dtype)

    return te.compute(shape, average, name="average")


def channel_pool(data: Packed, attrs: Any) -> te.Tensor:
    """Averages over neighbouring channels: (N, C/4, H, W, 4). What lies beyond the channels counts as zeros.

    ``attrs`` are those of ``relax.nn.avg_pool3d`` on the channels as the depth of a volume; ``data`` has zeros in the
    lanes beyond its last channel. float16 is summed in float32.
    """
    size, before = int(attrs.pool_size[0]), int(attrs.padding[0])
    n, count, height, width, _ = (int(d) for d in data.tensor.shape)
    # a window is read by whole blocks, the same ones for all lanes
    front, back = blocks(before), blocks(size - 1 - before)
    wide = wide_of(data.dtype)

    def padded(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        inside = tirx.all(c >= front, c < count + front)
        zero = tirx.const(0, data.dtype)
        return tirx.if_then_else(inside, data.tensor[b, c - front, y, x, lane], zero)

    around = te.compute((n, front + count + back, height, width, LANES), padded, name="pad")
    channel = te.reduce_axis((0, size), "kc")

    def window(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        first = lane + channel + (front * LANES - before)
        return te.sum(around[b, c + first // LANES, y, x, first % LANES].astype(wide), axis=channel)

    shape = data.tensor.shape
    total = te.compute(shape, window, name="channel_pool")
    pixels = tirx.const(size, wide)
    return te.compute(shape, lambda *i: (total[i] / pixels).astype(data.dtype), name="average")


def _length(i: Any, out: int, full: int) -> Any:
    """How many pixels window ``i`` of ``out`` has along an axis of ``full``."""
    return ((i + 1) * full + out - 1) // out - i * full // out


def wide_of(dtype: str) -> str:
    """The element type in which numbers of ``dtype`` are summed."""
    return "float32" if dtype == "float16" else dtype
