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


def after(build: Callable[..., Any], shape: tuple[int, ...] = X) -> Callable[[], tvm.IRModule]:
    return lambda: graph(build, [var("x", shape)])


def epilogue(emit: Any, value: Any, channels: int) -> Any:
    value = emit(op.add(value, const((1, channels, 1, 1), 5)))
    return emit(op.multiply(value, emit(op.sigmoid(value))))


def prologue(**attrs: Any) -> Callable[[], tvm.IRModule]:
    """Scale, shift and relu of a value that others read too, then a 3x3 convolution."""

    def middle(emit: Any, value: Any) -> Any:
        channels = int(value.ty.shape.values[1])
        scaled = emit(op.multiply(value, const((1, channels, 1, 1), 1)))
        shifted = emit(op.add(scaled, const((1, channels, 1, 1), 2)))
        return conv(emit, emit(nn.relu(shifted)), 12, 3, **SAME, **attrs)

    return between(middle, 12)


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


CASES: dict[str, dict[str, Callable[[], tvm.IRModule]]] = {
    "conv2d.chain": {
        "bias, silu": after(lambda e, x: epilogue(e, conv(e, x, 12, 3, **SAME), 12)),
        "residual": after(lambda e, x: e(nn.relu(e(op.add(conv(e, x, 8, 3, **SAME), x))))),
        "odd channels": after(lambda e, x: epilogue(e, conv(e, x, 7, 3, **SAME), 7), (2, 3, 9, 11)),
    },
    "conv2d.prologue": {
        "scale, shift, relu": prologue(),
        "some channels": between(lambda e, v: e(op.strided_slice(v, axes=[1], begin=[4], end=[8]))),
    },
    "conv2d.depthwise.prologue": {"scale, shift, relu": prologue(groups=12)},
    "conv2d.grouped.prologue": {
        "groups of four": prologue(groups=3),
        "groups of six": prologue(groups=2),
    },
    "conv2d.depthwise": {
        "bias, silu": after(lambda e, x: epilogue(e, conv(e, x, 8, 3, groups=8, **SAME), 8)),
        "odd channels, stride 2": after(
            lambda e, x: epilogue(e, conv(e, x, 10, 3, groups=10, strides=[2, 2], **SAME), 10), (1, 10, 9, 9)
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
            lambda e, x: e(nn.relu(e(op.add(conv(e, x, 12, 3, 1, **SAME), conv(e, x, 12, 1, 2)))))
        ),
        "biases, stride 2": after(
            lambda e, x: e(
                op.add(
                    e(op.add(conv(e, x, 6, 3, 1, strides=[2, 2], **SAME), const((1, 6, 1, 1), 1))),
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
        "4x4 stride 2, odd channels": after(
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
    "global_pool.mean": {
        "mean": between(lambda e, v: e(op.mean(v, axis=[2, 3], keepdims=True))),
        "epilogue, odd channels": between(
            lambda e, v: epilogue(e, e(op.mean(v, axis=[-2, -1], keepdims=True)), 6), 6
        ),
    },
    "global_pool.adaptive": {
        "one pixel": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [1, 1]))),
        "odd channels": between(lambda e, v: e(nn.adaptive_avg_pool2d(v, [1, 1])), 7),
    },
    "concat.chain": {
        "two parts": between(lambda e, v: e(op.concat([v, e(nn.max_pool2d(v, [3, 3], padding=[1, 1]))], 1))),
        "the last part ends inside a block": between(
            lambda e, v: e(op.concat([v, conv(e, v, 6, seed=3)], axis=1))
        ),
        "the same part twice": between(lambda e, v: e(op.concat([v, v], axis=1))),
        "epilogue": between(lambda e, v: epilogue(e, e(op.concat([v, conv(e, v, 4, seed=3)], axis=1)), 12)),
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
    "slice.chain": {
        "channels of the back half": between(
            lambda e, v: e(nn.max_pool2d(e(op.strided_slice(v, axes=[1], begin=[4], end=[8])), [2, 2]))
        ),
        "channels of the front half, epilogue": between(
            lambda e, v: epilogue(e, e(op.strided_slice(v, axes=[1], begin=[0], end=[4])), 4)
        ),
    },
    "shuffle.chain": {
        "two groups": between(shuffled(2), 8),
        "three groups, epilogue": between(lambda e, v: epilogue(e, shuffled(3)(e, v), 12), 12),
        "odd channels": between(shuffled(2), 6),
    },
    "elementwise.chain": {
        "the value has two users": between(lambda e, v: epilogue(e, e(op.tanh(v)), 8)),
        "odd channels": between(lambda e, v: epilogue(e, e(nn.relu(v)), 6), 6),
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
        if channels % 4:
            checked += value.row == row
            assert not lanes[:, -1, :, :, channels % 4 :].any(), value.name
            assert lanes[:, -1, :, :, : channels % 4].any(), value.name
    assert checked
