"""Every row of the built-in table on an OpenCL device: the row is applied and the numbers agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm
from modules import const, graph, nn, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, load_table, verify
from fusion_patterns.place.layouts import DATA
from fusion_patterns.place.probe import composite_values
from fusion_patterns.run import Device, Session
from fusion_patterns.run.replay import draw_inputs

X = (1, 8, 10, 10)
SAME = {"padding": [1, 1]}
TOLERANCE = 1e-5  # a tenth of what the project promises


def conv(emit: Any, x: Any, channels: int = 8, size: int = 1, seed: int = 0, **attrs: Any) -> Any:
    given = int(x.ty.shape.values[1]) // int(attrs.get("groups", 1))
    return emit(nn.conv2d(x, weight((channels, given, size, size), seed), **attrs))


def between(middle: Callable[..., Any], channels: int = 8) -> Callable[[], tvm.IRModule]:
    """``middle(emit, value)`` between two 1x1 convolutions, where it is worth packing.

    The first convolution's result is read twice, so that it does not take the middle into its epilogue.
    """

    def build(emit: Any, x: Any) -> list[Any]:
        value = conv(emit, x, channels)
        return [conv(emit, middle(emit, value), seed=1), conv(emit, value, seed=2)]

    return lambda: graph(build, [var("x", X)])


def joined(join: Callable[..., Any], channels: int = 8) -> Callable[[], tvm.IRModule]:
    """As ``between``, but a pool reads what ``join`` gives as well, so that it has to be there."""

    def build(emit: Any, x: Any) -> list[Any]:
        value = conv(emit, x, channels)
        whole = join(emit, value)
        pooled = emit(nn.max_pool2d(whole, [2, 2], [2, 2]))
        return [conv(emit, whole, seed=1), conv(emit, pooled, seed=2), conv(emit, value, seed=3)]

    return lambda: graph(build, [var("x", X)])


def after(build: Callable[..., Any], shape: tuple[int, ...] = X) -> Callable[[], tvm.IRModule]:
    return lambda: graph(build, [var("x", shape)])


def read_on(middle: Callable[..., Any], shape: tuple[int, ...]) -> Callable[[], tvm.IRModule]:
    """``middle(emit, x)`` in front of a convolution, so that it is packed though the module begins with it."""
    return after(lambda emit, x: conv(emit, middle(emit, x), seed=9), shape)


def epilogue(emit: Any, value: Any, channels: int) -> Any:
    value = emit(op.add(value, const((1, channels, 1, 1), 5)))
    return emit(op.multiply(value, emit(op.sigmoid(value))))


def parts(emit: Any, value: Any, *channels: int) -> Any:
    """Convolutions with so many channels, one after the other."""
    return emit(op.concat([conv(emit, value, c, seed=10 + k) for k, c in enumerate(channels)], axis=1))


def pyramid(emit: Any, value: Any, *channels: int) -> Any:
    """Averages of a few windows, each convolved to so many channels and enlarged to 10x10 pixels, joined."""
    enlarge = resized("linear", "half_pixel", "", (10, 10))
    large = []
    for k, count in enumerate(channels):
        small = emit(nn.adaptive_avg_pool2d(value, [k + 2, k + 3]))
        large.append(enlarge(emit, conv(emit, small, count, seed=20 + k)))
    return emit(op.concat(large, axis=1)) if len(large) > 1 else large[0]


def levels(emit: Any, value: Any, channels: int, method: str, mode: str, rounding: str) -> Any:
    """A step down a feature pyramid: the level above, enlarged, and this level's convolution."""
    above = conv(emit, emit(nn.max_pool2d(value, [2, 2], [2, 2])), channels, 3, seed=16, **SAME)
    own = emit(op.add(conv(emit, value, channels, seed=17), const((1, channels, 1, 1), 18)))
    return emit(op.add(own, resized(method, mode, rounding, (10, 10))(emit, above)))


def group_norm(emit: Any, value: Any, groups: int, axes: tuple[int, int] = (2, 3)) -> Any:
    vectors = [const((int(value.ty.shape.values[1]),), seed) for seed in (31, 32)]
    return emit(nn.group_norm(value, *vectors, num_groups=groups, channel_axis=1, axes=list(axes)))


def scaled(emit: Any, value: Any) -> Any:
    channels = int(value.ty.shape.values[1])
    return emit(nn.relu(emit(op.multiply(value, const((1, channels, 1, 1), 6)))))


def mean(emit: Any, value: Any) -> Any:
    """The average of 5x5 pixels."""
    return emit(op.mean(value, [2, 3], keepdims=True))


def windows(emit: Any, value: Any, size: int = 2, **attrs: Any) -> Any:
    return emit(nn.max_pool2d(value, [size, size], [2, 2], **attrs))


def shortcut(emit: Any, value: Any, size: int = 1) -> Any:
    """5x5 pixels, with a bias and a residual."""
    channels = int(value.ty.shape.values[1])
    small = emit(nn.max_pool2d(value, [2, 2], [2, 2]))
    made = conv(emit, small, channels, size, seed=14, padding=[size // 2, size // 2])
    made = emit(op.add(made, const((1, channels, 1, 1), 9)))
    return emit(op.add(made, small))


def decoded(emit: Any, value: Any, swapped: bool) -> Any:
    """A step of a decoder: the smaller image enlarged to the larger one's size, and both joined."""
    small = conv(emit, value, 12, 3, seed=11, strides=[2, 2], padding=[1, 1])
    large = resized("nearest_neighbor", "asymmetric", "floor", (10, 10))(emit, small)
    return emit(op.concat([value, large] if swapped else [large, value], axis=1))


def twice(emit: Any, value: Any) -> Any:
    """``conv(y) * y`` of a value that was scaled."""
    into = scaled(emit, value)
    return emit(op.multiply(conv(emit, into, 8, 3, groups=2, **SAME), into))


def depthwise(emit: Any, value: Any, **attrs: Any) -> Any:
    channels = int(value.ty.shape.values[1])
    return conv(emit, value, channels, 3, groups=channels, **{**SAME, **attrs})


def halves(emit: Any, value: Any) -> Any:
    """A part that begins inside a block of four, joined with another value."""
    part = emit(op.strided_slice(value, axes=[1], begin=[3], end=[8]))
    return emit(op.concat([part, conv(emit, value, 5, seed=15)], axis=1))


def gated(emit: Any, value: Any) -> Any:
    """``x + x * gate``: a channel's gate is computed from the value."""
    channels = int(value.ty.shape.values[1])
    gate = emit(op.sigmoid(conv(emit, emit(op.mean(value, [2, 3], keepdims=True)), channels, seed=12)))
    return emit(op.add(value, emit(op.multiply(value, gate))))


def enlarged(emit: Any, value: Any) -> Any:
    """Twice as large by repeating pixels, and read twice."""
    large = resized("nearest_neighbor", "asymmetric", "floor", (20, 20))(emit, value)
    return emit(nn.max_pool2d(large, [2, 2], [2, 2]))


def summed(
    emit: Any,
    value: Any,
    other: Any,
    method: str = "nearest_neighbor",
    mode: str = "asymmetric",
    rounding: str = "floor",
) -> Any:
    """A smaller image enlarged and added."""
    small = emit(nn.max_pool2d(conv(emit, value, int(value.ty.shape.values[1]), seed=13), [2, 2], [2, 2]))
    return emit(nn.relu(emit(op.add(resized(method, mode, rounding, (10, 10))(emit, small), other))))


def prologue(**attrs: Any) -> Callable[[], tvm.IRModule]:
    """Scale, shift and relu of a value that others read too, then a 3x3 convolution."""

    def middle(emit: Any, value: Any) -> Any:
        channels = int(value.ty.shape.values[1])
        scaled = emit(op.multiply(value, const((1, channels, 1, 1), 1)))
        shifted = emit(op.add(scaled, const((1, channels, 1, 1), 2)))
        return conv(emit, emit(nn.relu(shifted)), 12, 3, **SAME, **attrs)

    return between(middle, 12)


def response_normalised(
    emit: Any, value: Any, size: int = 5, *, before: int | None = None, **attrs: Any
) -> Any:
    """``x / (bias + alpha mean(x^2))^beta`` over ``size`` neighbouring channels, as ONNX's importer writes it."""
    before = (size - 1) // 2 if before is None else before
    volume = emit(op.expand_dims(emit(op.multiply(value, value)), axis=[1]))
    pads = [before, 0, 0, size - 1 - before, 0, 0]
    mean = emit(nn.avg_pool3d(volume, [size, 1, 1], padding=pads, **{"count_include_pad": True, **attrs}))
    alpha, bias, beta = (relax.const(number, "float32") for number in (0.5, 1.5, 0.75))
    scaled = emit(op.add(emit(op.multiply(emit(op.squeeze(mean, [1])), alpha)), bias))
    return emit(op.divide(value, emit(op.power(scaled, beta))))


def transposed(emit: Any, value: Any, kernel: tuple[int, int], channels: int = 8, **attrs: Any) -> Any:
    given = int(value.ty.shape.values[1])
    weights = const((given, channels, *kernel), 3, scale=(given * kernel[0] * kernel[1]) ** -0.5)
    return emit(nn.conv2d_transpose(value, weights, **attrs))


def resized(method: str, mode: str, rounding: str, size: tuple[int, int]) -> Callable[..., Any]:
    return lambda emit, v: emit(
        op.image.resize2d(
            v,
            relax.ShapeExpr(list(size)),
            layout="NCHW",
            method=method,
            coordinate_transformation_mode=mode,
            rounding_method=rounding,
        )
    )


def shuffled(groups: int) -> Any:
    """A shuffle of channels between groups, as importers write it."""

    def build(emit: Any, v: Any) -> Any:
        n, c, h, w = (int(dim) for dim in v.ty.shape)
        split = emit(op.reshape(v, (n, groups, c // groups, h, w)))
        return emit(op.reshape(emit(op.permute_dims(split, [0, 2, 1, 3, 4])), (n, c, h, w)))

    return build


def first_of_nhwc(emit: Any, x: Any) -> Any:
    """The caller's image, its channels last, with its channels in front."""
    return emit(op.permute_dims(x, [0, 3, 1, 2]))


def to_nhwc(emit: Any, value: Any) -> Any:
    return emit(op.permute_dims(value, [0, 2, 3, 1]))


def dense(emit: Any, x: Any, outputs: int, seed: int = 0) -> Any:
    inputs = int(x.ty.shape.values[1])
    return emit(op.matmul(x, const((inputs, outputs), seed, scale=inputs**-0.5)))


def biased(emit: Any, value: Any) -> Any:
    return emit(op.add(value, const((int(value.ty.shape.values[1]),), 5)))


def hardswish(emit: Any, value: Any) -> Any:
    cut = emit(op.clip(emit(op.add(value, relax.const(3.0, "float32"))), 0, 6))
    return emit(op.divide(emit(op.multiply(value, cut)), relax.const(6.0, "float32")))


def pooled(emit: Any, value: Any) -> Any:
    return emit(op.mean(value, axis=[2, 3], keepdims=True))


def squeezed(hidden: int, activation: Any, channels: int = 8) -> Callable[[], tvm.IRModule]:
    """Squeeze-and-excitation: a value times a gate that two layers make of its mean."""

    def build(emit: Any, x: Any) -> Any:
        value = conv(emit, x, channels, seed=4)
        inner = emit(
            activation(emit(op.add(conv(emit, pooled(emit, value), hidden), const((1, hidden, 1, 1), 1))))
        )
        gate = emit(
            op.sigmoid(emit(op.add(conv(emit, inner, channels, seed=2), const((1, channels, 1, 1), 3))))
        )
        return conv(emit, emit(op.multiply(value, gate)), seed=5)

    return after(build)


def gated_by(
    activation: Any, end: Any, *, hidden: int = 0, channels: int = 8, shape: tuple[int, ...] = X
) -> Callable[[], tvm.IRModule]:
    """A value and a gate that a layer makes of another input's pixel; ``hidden``: two layers. ``end``: what follows."""

    def build(emit: Any, x: Any, pixel: Any) -> Any:
        value = conv(emit, x, channels, seed=4)
        if hidden:
            pixel = emit(nn.relu(emit(op.add(conv(emit, pixel, hidden), const((1, hidden, 1, 1), 1)))))
        layer = emit(op.add(conv(emit, pixel, channels, seed=2), const((1, channels, 1, 1), 3)))
        result = end(emit, value, emit(activation(layer)))
        return [conv(emit, result, seed=5), conv(emit, result, seed=6), conv(emit, value, seed=7)]

    return lambda: graph(build, [var("x", shape), var("pixel", (shape[0], 12, 1, 1))])


def gated_by_rows(activation: Any, end: Any, channels: int = 8, batch: int = 1) -> Callable[[], tvm.IRModule]:
    """A value and a gate that a dense layer makes of another input."""

    def build(emit: Any, x: Any, row: Any) -> Any:
        value = conv(emit, x, channels, seed=4)
        gate = emit(activation(biased(emit, dense(emit, row, channels))))
        gate = emit(op.expand_dims(emit(op.expand_dims(gate, [2])), [3]))
        result = end(emit, value, gate)
        return [conv(emit, result, seed=5), conv(emit, result, seed=6), conv(emit, value, seed=7)]

    return lambda: graph(build, [var("x", (batch, 8, 10, 7)), var("row", (batch, 37))])


def times(emit: Any, value: Any, gate: Any) -> Any:
    return emit(op.multiply(value, gate))


def residual(emit: Any, value: Any, gate: Any) -> Any:
    """``relu(value * gate + value)``."""
    return emit(nn.relu(emit(op.add(emit(op.multiply(gate, value)), value))))


def shifted(emit: Any, value: Any, gate: Any) -> Any:
    """``y * sigmoid(y)`` of a value to which a pixel is added: the sum is read twice."""
    both = emit(op.add(value, gate))
    return emit(op.multiply(both, emit(op.sigmoid(both))))


def between_rows(rows: Callable[..., Any], channels: int = 8) -> Callable[[], tvm.IRModule]:
    """A convolution's result that others read too, ``rows`` (N, C) of it, a dense layer with bias."""

    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.relu(conv(emit, x, channels)))
        return [biased(emit, dense(emit, rows(emit, value), 10)), conv(emit, value, seed=1)]

    return after(build, (2, 8, 6, 5))


def folded(emit: Any, value: Any) -> Any:
    """Patches of 2x2 pixels as tokens, something between tokens, and the image again."""
    n, c, h, w = (int(dim) for dim in value.ty.shape)
    cut = emit(op.reshape(value, (n * c * h // 2, 2, w // 2, 2)))
    patches = emit(op.reshape(emit(op.permute_dims(cut, [0, 2, 1, 3])), (n, c, h * w // 4, 4)))
    tokens = emit(nn.softmax(emit(op.permute_dims(patches, [0, 3, 2, 1])), axis=2))
    back = emit(op.reshape(emit(op.permute_dims(tokens, [0, 3, 2, 1])), (n * c * h // 2, w // 2, 2, 2)))
    return emit(op.reshape(emit(op.permute_dims(back, [0, 2, 1, 3])), (n, c, h, w)))


def normed(emit: Any, value: Any) -> Any:
    """The layer norm of a pixel's channels."""
    channels = int(value.ty.shape.values[1])
    return emit(nn.layer_norm(value, const((channels,), 16), const((channels,), 17), axes=[1]))


CASES: dict[str, dict[str, Callable[[], tvm.IRModule]]] = {
    "conv2d.chain": {
        "bias, silu": after(lambda e, x: epilogue(e, conv(e, x, 12, 3, **SAME), 12)),
        "residual": after(lambda e, x: e(nn.relu(e(op.add(conv(e, x, 8, 3, **SAME), x))))),
        "odd channels": read_on(lambda e, x: epilogue(e, conv(e, x, 7, 3, **SAME), 7), (2, 5, 9, 11)),
    },
    "conv2d.prologue": {
        "scale, shift, relu": prologue(),
        "some channels": between(lambda e, v: e(op.strided_slice(v, axes=[1], begin=[4], end=[8]))),
    },
    "conv2d.depthwise.prologue": {"scale, shift, relu": prologue(groups=12)},
    "conv2d.depthwise.shuffled": {
        "two groups": between(lambda e, v: epilogue(e, depthwise(e, shuffled(2)(e, v)), 8)),
        "three groups, odd channels, stride": between(
            lambda e, v: depthwise(e, shuffled(3)(e, v), strides=[2, 2]), 9
        ),
    },
    "conv2d.grouped.prologue": {
        "groups of four": prologue(groups=3),
        "the epilogue reads what goes in": between(twice),
        "groups of six": prologue(groups=2),
    },
    "conv2d.depthwise": {
        "bias, silu": after(lambda e, x: epilogue(e, conv(e, x, 8, 3, groups=8, **SAME), 8)),
        "odd channels, stride 2": read_on(
            lambda e, x: epilogue(e, conv(e, x, 10, 3, groups=10, strides=[2, 2], **SAME), 10), (1, 10, 9, 9)
        ),
    },
    "conv2d.depthwise.to_nhwc": {
        "seven channels, tall": after(lambda e, x: to_nhwc(e, depthwise(e, x)), (2, 7, 9, 6)),
        "bias, silu": after(lambda e, x: to_nhwc(e, epilogue(e, depthwise(e, x), 8))),
        "two images, two channels, stride": after(
            lambda e, x: to_nhwc(e, depthwise(e, x, strides=[2, 2])), (2, 2, 9, 8)
        ),
    },
    "conv2d.grouped": {
        "groups of four": after(lambda e, x: epilogue(e, conv(e, x, 8, 3, groups=2, **SAME), 8)),
        "groups of three": after(
            lambda e, x: epilogue(e, conv(e, x, 6, 3, groups=3, **SAME), 6), (1, 9, 8, 8)
        ),
        "depthwise with a multiplier": after(
            lambda e, x: epilogue(e, conv(e, x, 16, 3, groups=8, **SAME), 16)
        ),
    },
    "conv2d.residual_pair": {
        "a block with a projection": after(
            lambda e, x: e(
                nn.relu(e(op.add(conv(e, conv(e, x, 8, seed=3), 12, 3, 1, **SAME), conv(e, x, 12, 1, 2))))
            )
        ),
        "biases, stride 2": after(
            lambda e, x: e(
                op.add(
                    e(
                        op.add(
                            conv(e, conv(e, x, 5, seed=3), 6, 3, 1, strides=[2, 2], **SAME),
                            const((1, 6, 1, 1), 1),
                        )
                    ),
                    e(op.add(conv(e, x, 6, 1, 2, strides=[2, 2]), const((1, 6, 1, 1), 2))),
                )
            )
        ),
    },
    "conv2d_transpose.chain": {
        "2x2 stride 2": after(lambda e, x: epilogue(e, transposed(e, x, (2, 2), strides=[2, 2]), 8)),
        "3x3 stride 2, output padding": after(
            lambda e, x: epilogue(
                e, transposed(e, x, (3, 3), strides=[2, 2], padding=[1, 1], output_padding=[1, 1]), 8
            )
        ),
        "4x4 stride 2, odd channels": read_on(
            lambda e, x: epilogue(e, transposed(e, x, (4, 4), 5, strides=[2, 2], padding=[1, 1]), 5),
            (1, 6, 5, 7),
        ),
        "3x2, strides by axis": after(
            lambda e, x: epilogue(e, transposed(e, x, (3, 2), strides=[1, 3]), 8), (2, 8, 5, 4)
        ),
    },
    "pool2d.chain": {
        "max 3x3 stride 2": between(lambda e, v: e(nn.max_pool2d(v, [3, 3], strides=[2, 2], padding=[1, 1]))),
        "max, rounded up": between(lambda e, v: e(nn.max_pool2d(v, [3, 3], strides=[2, 2], ceil_mode=True))),
        "max, dilation": between(lambda e, v: e(nn.max_pool2d(v, [2, 2], dilation=[2, 2]))),
        "average without the padding": between(
            lambda e, v: e(nn.avg_pool2d(v, [3, 3], padding=[1, 1], count_include_pad=False))
        ),
        "average with the padding": between(
            lambda e, v: e(nn.avg_pool2d(v, [3, 3], padding=[1, 1], count_include_pad=True))
        ),
        "average, rounded up": between(
            lambda e, v: e(nn.avg_pool2d(v, [3, 3], strides=[2, 2], ceil_mode=True, count_include_pad=True))
        ),
        "epilogue": between(lambda e, v: epilogue(e, e(nn.max_pool2d(v, [2, 2], strides=[2, 2])), 8)),
        "odd channels": between(lambda e, v: e(nn.avg_pool2d(v, [2, 2])), 6),
    },
    "lrn.chain": {
        "five channels": between(response_normalised, 16),
        "three channels, odd channels, epilogue": between(
            lambda e, v: epilogue(e, response_normalised(e, v, 3), 10), 10
        ),
        "a window that begins at the channel itself, inside a block": between(
            lambda e, v: response_normalised(e, v, 7, before=0), 9
        ),
        "a window wider than the channels, odd channels": between(
            lambda e, v: response_normalised(e, v, 9), 3
        ),
        "two images, odd channels": after(
            lambda e, x: conv(
                e, response_normalised(e, e(nn.max_pool2d(conv(e, x, 14), [2, 2], [2, 2]))), 6, seed=2
            ),
            (2, 8, 12, 10),
        ),
    },
    "global_pool.mean": {
        "parts, pre-activation": between(lambda e, v: mean(e, scaled(e, parts(e, v, 8, 5)))),
        "mean": between(lambda e, v: e(op.mean(v, axis=[2, 3], keepdims=True))),
        "epilogue, odd channels": between(
            lambda e, v: epilogue(e, e(op.mean(v, axis=[-2, -1], keepdims=True)), 6), 6
        ),
    },
    "global_pool.adaptive": {
        "one pixel": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [1, 1]))),
        "odd channels": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [1, 1])), 7),
    },
    "conv2d.first": {
        "three channels, stride": after(
            lambda e, x: conv(e, x, 8, 3, strides=[2, 2], padding=[1, 1]), (1, 3, 10, 10)
        ),
        "one channel, 1x1": after(lambda e, x: epilogue(e, conv(e, x, 8), 8), (1, 1, 9, 7)),
        "two images, three channels": after(lambda e, x: conv(e, x, 6, 3, **SAME), (2, 3, 8, 8)),
        "packed, where it is read too often to be read as it is": after(
            lambda e, x: conv(e, x, 64, 7, padding=[3, 3]), (1, 3, 96, 96)
        ),
    },
    "conv2d.first.nhwc": {
        "three channels, stride": after(
            lambda e, x: epilogue(e, conv(e, first_of_nhwc(e, x), 8, 3, strides=[2, 2], padding=[1, 1]), 8),
            (1, 10, 12, 3),
        ),
        "two images, one channel, odd channels": after(
            lambda e, x: conv(e, conv(e, first_of_nhwc(e, x), 6, 3, **SAME), 4, seed=1), (2, 7, 9, 1)
        ),
        "1x1, two channels": after(lambda e, x: conv(e, first_of_nhwc(e, x), 12), (2, 8, 6, 2)),
    },
    "conv2d.to_nhwc": {
        "bias, silu": after(lambda e, x: to_nhwc(e, epilogue(e, conv(e, x, 12, 3, **SAME), 12))),
        "six channels, tall": after(
            lambda e, x: to_nhwc(e, epilogue(e, conv(e, x, 6, 3, **SAME), 6)), (2, 8, 9, 6)
        ),
        "two images, two channels, as rows": after(
            lambda e, x: e(op.reshape(to_nhwc(e, conv(e, x, 2, 1)), (2 * 9 * 11, 2))), (2, 5, 9, 11)
        ),
        "columns first": after(
            lambda e, x: e(op.permute_dims(conv(e, x, 16, 3, **SAME), [3, 0, 1, 2])), (2, 8, 6, 10)
        ),
        "few pixels, a long sum": after(
            lambda e, x: to_nhwc(e, e(nn.relu(conv(e, x, 8, 1)))), (1, 256, 4, 4)
        ),
        "one pixel": after(lambda e, x: to_nhwc(e, conv(e, x, 8, 1)), (2, 64, 1, 1)),
    },
    "conv2d.pooled": {
        "relu": between(lambda e, v: mean(e, e(nn.relu(conv(e, v, 16, strides=[2, 2]))))),
        "odd channels, bias and residual": between(lambda e, v: mean(e, shortcut(e, v)), 6),
        "x * sigmoid(x)": between(lambda e, v: mean(e, epilogue(e, conv(e, v, 12, strides=[2, 2]), 12))),
        "nothing between": between(lambda e, v: mean(e, conv(e, v, 8, strides=[2, 2]))),
        "3x3, a long sum": between(
            lambda e, v: mean(e, e(nn.relu(conv(e, v, 12, 3, strides=[2, 2], padding=[1, 1])))), 64
        ),
        "3x3, odd channels, residual": between(lambda e, v: mean(e, shortcut(e, v, 3)), 6),
    },
    "conv2d.max_pool": {
        "2x2, bias, relu": after(
            lambda e, x: windows(e, e(nn.relu(e(op.add(conv(e, x, 12, 3, **SAME), const((1, 12, 1, 1), 9))))))
        ),
        "3x3, the border is no zero": after(
            lambda e, x: windows(
                e, e(op.add(conv(e, x, 8, 3, **SAME), const((1, 8, 1, 1), 9))), 3, padding=[1, 1]
            )
        ),
        "odd channels, rounded up, epilogue of the maxima": read_on(
            lambda e, x: epilogue(e, windows(e, conv(e, x, 7, 3, **SAME), 3, ceil_mode=True), 7),
            (2, 5, 9, 12),
        ),
        "odd channels, residual": read_on(
            lambda e, x: windows(e, e(nn.relu(e(op.add(conv(e, x, 6, 3, **SAME), x))))), (2, 6, 9, 11)
        ),
        "gelu": after(lambda e, x: windows(e, e(nn.gelu(conv(e, x, 8, 3, **SAME))), 3, padding=[1, 1])),
        "a long sum": after(
            lambda e, x: windows(e, e(nn.relu(conv(e, x, 22, 3, **SAME))), 3, padding=[1, 1]), (1, 40, 11, 15)
        ),
    },
    "conv2d.first.max_pool": {
        "the stem of a residual network": after(
            lambda e, x: windows(
                e, e(nn.relu(conv(e, x, 16, 7, strides=[2, 2], padding=[3, 3]))), 3, padding=[1, 1]
            ),
            (1, 3, 32, 28),
        ),
        "odd channels": read_on(lambda e, x: epilogue(e, windows(e, conv(e, x, 10, 3)), 10), (2, 3, 14, 12)),
    },
    "conv2d.concat": {
        "two parts": between(lambda e, v: conv(e, parts(e, v, 8, 4), 8, 3, **SAME)),
        "parts that end inside a block": between(lambda e, v: conv(e, parts(e, v, 6, 5, 3), 7, 3, **SAME)),
        "1x1, pre-activation": between(lambda e, v: conv(e, scaled(e, parts(e, v, 8, 4)), 12)),
        "inside a block, stride": between(lambda e, v: conv(e, parts(e, v, 3, 8), 6, 3, strides=[2, 2])),
        "the first part enlarged": between(lambda e, v: conv(e, decoded(e, v, False), 8, 3, **SAME)),
        "the second part enlarged": between(lambda e, v: conv(e, decoded(e, v, True), 8, 1)),
    },
    "layer_norm.chain": {
        "no epilogue": between(normed),
        "epilogue": between(lambda e, v: epilogue(e, normed(e, v), 8)),
        "odd channels, gelu": between(lambda e, v: e(nn.gelu(normed(e, v))), 6),
        "odd channels, its own input as residual": between(lambda e, v: e(op.add(normed(e, v), v)), 7),
        "two images, axis from the end": after(
            lambda e, x: conv(
                e, e(nn.layer_norm(conv(e, x, 12), const((12,), 1), const((12,), 2), axes=[-3])), 8
            ),
            (2, 8, 7, 5),
        ),
    },
    "layer_norm.depthwise": {
        "bias": between(lambda e, v: normed(e, e(op.add(depthwise(e, v), const((1, 8, 1, 1), 9))))),
        "no bias": between(lambda e, v: normed(e, depthwise(e, v))),
        "odd channels, stride, gelu": between(
            lambda e, v: normed(e, e(nn.gelu(depthwise(e, v, strides=[2, 2])))), 6
        ),
        "two images, odd channels, epilogue": after(
            lambda e, x: conv(e, epilogue(e, normed(e, depthwise(e, conv(e, x, 10))), 10), 8), (2, 8, 7, 9)
        ),
        "7x7": between(lambda e, v: normed(e, conv(e, v, 8, 7, groups=8, padding=[3, 3]))),
    },
    "group_norm.chain": {
        "four groups, relu": between(lambda e, v: e(nn.relu(group_norm(e, v, 4))), 16),
        "one group": between(lambda e, v: group_norm(e, v, 1), 12),
        "x * sigmoid(x)": between(lambda e, v: epilogue(e, group_norm(e, v, 2), 16), 16),
        "two images of few pixels, erf, written plain": after(
            lambda e, x: e(op.erf(group_norm(e, conv(e, x, 8, 3, **SAME), 2))), (2, 3, 5, 7)
        ),
        "many pixels, residual": read_on(
            lambda e, x: e(op.add(group_norm(e, conv(e, x, 8), 1), x)), (1, 8, 36, 40)
        ),
    },
    "conv2d.enlarged": {
        "nearest, bias": between(lambda e, v: levels(e, v, 8, "nearest_neighbor", "asymmetric", "floor")),
        "linear, odd channels, relu": between(
            lambda e, v: e(nn.relu(levels(e, v, 7, "linear", "half_pixel", "")))
        ),
        "linear, corners, x * sigmoid(x)": between(
            lambda e, v: epilogue(e, levels(e, v, 12, "linear", "align_corners", ""), 12)
        ),
    },
    "concat.chain": {
        "two parts": joined(lambda e, v: parts(e, v, 8, 8)),
        "the last part ends inside a block": joined(lambda e, v: parts(e, v, 8, 6)),
        "parts that end inside a block": joined(lambda e, v: parts(e, v, 6, 3, 5)),
        "the same part twice": joined(lambda e, v: e(op.concat([v, v], axis=1))),
        "epilogue": joined(lambda e, v: epilogue(e, e(op.concat([v, conv(e, v, 4, seed=3)], axis=1)), 12)),
    },
    "concat.resized": {
        "both linear": joined(lambda e, v: pyramid(e, v, 8, 4)),
        "odd channels": joined(lambda e, v: pyramid(e, v, 8, 3), 7),
        "two images, epilogue": joined(lambda e, v: epilogue(e, pyramid(e, v, 4, 8), 12)),
    },
    "concat.resized.three": {
        "all linear, odd channels": joined(lambda e, v: pyramid(e, v, 8, 4, 6)),
        "others beside them": joined(lambda e, v: e(op.concat([v, pyramid(e, v, 4, 8, 4), v], axis=1))),
    },
    "concat.resized.four": {
        "all linear, odd channels": joined(lambda e, v: pyramid(e, v, 4, 4, 8, 3)),
        "read by a convolution": between(lambda e, v: conv(e, pyramid(e, v, 4, 4, 8, 4), 7, 3, **SAME)),
    },
    "resize2d.chain": {
        "nearest, twice": between(resized("nearest_neighbor", "asymmetric", "floor", (20, 20))),
        "nearest, half pixel": between(
            resized("nearest_neighbor", "half_pixel", "round_prefer_floor", (15, 7))
        ),
        "linear, half pixel": between(resized("linear", "half_pixel", "", (20, 20))),
        "linear, corners": between(resized("linear", "align_corners", "", (17, 13))),
        "linear, odd channels": between(resized("linear", "asymmetric", "", (20, 20)), 6),
    },
    "resize2d.prologue": {
        "nearest, gated": between(lambda e, v: enlarged(e, gated(e, v))),
        "nearest, odd channels": between(lambda e, v: enlarged(e, scaled(e, v)), 6),
    },
    "resize2d.sum": {
        "the other one gated": between(lambda e, v: summed(e, v, gated(e, v))),
        "linear, odd channels": between(
            lambda e, v: summed(e, v, scaled(e, v), "linear", "half_pixel", ""), 7
        ),
    },
    "slice.chain": {
        "begins inside a block": between(
            lambda e, v: e(nn.max_pool2d(e(op.strided_slice(v, axes=[1], begin=[3], end=[8])), [2, 2]))
        ),
        "channels of the back half": between(
            lambda e, v: e(nn.max_pool2d(e(op.strided_slice(v, axes=[1], begin=[4], end=[8])), [2, 2]))
        ),
        "channels of the front half, epilogue": between(
            lambda e, v: epilogue(e, e(op.strided_slice(v, axes=[1], begin=[0], end=[4])), 4)
        ),
    },
    "shuffle.chain": {
        "of a part and another value": between(lambda e, v: shuffled(2)(e, halves(e, v))),
        "two groups": between(shuffled(2), 8),
        "three groups, epilogue": between(lambda e, v: epilogue(e, shuffled(3)(e, v), 12), 12),
        "odd channels": between(shuffled(2), 6),
    },
    "move.chain": {
        "scaled": after(lambda e, x: conv(e, scaled(e, first_of_nhwc(e, x)), 12, 3, **SAME), (1, 7, 9, 8)),
        "two images, odd channels": after(
            lambda e, x: depthwise(e, e(nn.relu(first_of_nhwc(e, x)))), (2, 8, 7, 5)
        ),
        "tokens to an image": between(folded),
        "odd channels, epilogue": between(lambda e, v: epilogue(e, folded(e, v), 6), 6),
        "columns and rows turned": between(
            lambda e, v: e(op.permute_dims(e(nn.softmax(v, axis=3)), [0, 1, 3, 2]))
        ),
    },
    "elementwise.chain": {
        "the value has two users": between(lambda e, v: epilogue(e, e(op.tanh(v)), 8)),
        "odd channels": between(lambda e, v: epilogue(e, e(nn.relu(v)), 6), 6),
    },
    "dense.chain": {
        "no epilogue": after(lambda e, x: dense(e, x, 24), (1, 40)),
        "bias, relu": after(lambda e, x: e(nn.relu(biased(e, dense(e, x, 10)))), (3, 37)),
        "bias, prelu": after(
            lambda e, x: e(nn.prelu(biased(e, dense(e, x, 11)), const((11,), 7), axis=1)), (3, 37)
        ),
        "bias, hardswish": after(lambda e, x: hardswish(e, biased(e, dense(e, x, 50))), (1, 64)),
        "gelu": after(lambda e, x: e(nn.gelu(biased(e, dense(e, x, 12)))), (2, 20)),
        "two layers": after(lambda e, x: dense(e, e(nn.relu(biased(e, dense(e, x, 30)))), 7, 1), (1, 128)),
    },
    "conv2d.excite": {
        "relu, sigmoid": squeezed(8, nn.relu),
        "odd channels, silu": squeezed(5, nn.silu, 10),
        "gelu": squeezed(4, nn.gelu),
    },
    "conv2d.gate": {
        "sigmoid": gated_by(op.sigmoid, times),
        "two images, odd channels, residual": gated_by(op.sigmoid, residual, channels=7, shape=(2, 6, 9, 5)),
        "silu, added, odd channels": gated_by(nn.silu, shifted, channels=10),
        "gelu": gated_by(nn.gelu, residual, shape=(1, 8, 2, 2)),
    },
    "conv2d.excite.gate": {
        "sigmoid": gated_by(op.sigmoid, residual, hidden=8),
        "two images, odd channels": gated_by(op.sigmoid, shifted, hidden=5, channels=6, shape=(2, 6, 9, 5)),
        "gelu": gated_by(nn.gelu, times, hidden=3),
    },
    "dense.gate": {
        "sigmoid": gated_by_rows(op.sigmoid, times),
        "two images, silu, added": gated_by_rows(nn.silu, shifted, 12, 2),
        "gelu, residual": gated_by_rows(nn.gelu, residual, 16),
    },
    "dense.pooled": {
        "reshape": between_rows(lambda e, v: e(op.reshape(pooled(e, v), (2, 8)))),
        "squeeze": between_rows(lambda e, v: e(op.squeeze(pooled(e, v), [2, 3]))),
        "flatten, seven channels": between_rows(lambda e, v: e(nn.batch_flatten(pooled(e, v))), 7),
        "a mean of two dimensions": between_rows(lambda e, v: e(op.mean(v, axis=[-1, -2])), 10),
    },
    "pool2d.adaptive": {
        "windows that overlap": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [3, 7]))),
        "columns": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [4, 1]))),
        "more windows than pixels": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [13, 12]))),
        "epilogue, odd channels": between(
            lambda e, v: epilogue(e, e(nn.adaptive_avg_pool2d(v, [6, 3])), 6), 6
        ),
    },
}


def test_every_row_has_a_case() -> None:
    assert sorted(CASES) == sorted(row.name for row in load_table().patterns)


@pytest.mark.opencl
@pytest.mark.parametrize(("row", "name"), [(row, name) for row, cases in CASES.items() for name in cases])
def test_a_row(opencl_device: Device, row: str, name: str) -> None:
    report = verify(CASES[row][name](), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert all(output.varies for output in report.outputs)
    assert report.compiled is not None
    figures = report.compiled.report
    assert row in figures.composites, [d for d in figures.declined if d.row == row]
    assert figures.convs["covered"] == figures.convs["total"]


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("row", "name"),
    [(r, name) for r, cases in CASES.items() for name in cases if "odd" in name or "inside" in name],
)
def test_lanes_beyond_the_last_channel_hold_zero(opencl_device: Device, row: str, name: str) -> None:
    compiled = compile_module(CASES[row][name]())
    values = composite_values(compiled.fused, compiled.placement, "main")
    main = replace(compiled.manifest.functions["main"], result=tuple(value.packed for value in values))
    manifest = replace(compiled.manifest, functions={"main": main})
    results = Session(manifest, opencl_device).run(draw_inputs(main, 0, {}))
    checked = 0
    for value, lanes in zip(values, results, strict=True):
        channels = compiled.placement.needs[value.composite].output_shape[1]
        if channels % 4 and value.layout == DATA:
            checked += value.row == row
            assert not lanes[:, -1, :, :, channels % 4 :].any(), value.name
            assert lanes[:, -1, :, :, : channels % 4].any(), value.name
    assert checked
