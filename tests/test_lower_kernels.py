"""Packed kernels on an OpenCL device against stock TVM on the CPU, and what their OpenCL C looks like."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from modules import (
    TEXTURE,
    Array,
    Built,
    Calls,
    Emit,
    build,
    const,
    draw,
    errors,
    nn,
    texture_target,
    var,
    weight,
)
from tvm import relax
from tvm.relax import op

from fusion_patterns.run import Device, Session
from fusion_patterns.run import manifest as m

TOLERANCE = 1e-5  # of the result's largest magnitude; the kernels reach about 5e-7
PAD = {"padding": [1, 1]}

# name: (data, weight, attributes of conv2d)
CONVS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((1, 16, 14, 14), (32, 16, 1, 1), {}),
    "1x1 stride 2": ((1, 8, 9, 9), (16, 8, 1, 1), {"strides": [2, 2]}),
    "3x3": ((1, 8, 12, 12), (16, 8, 3, 3), PAD),
    "3x3 without padding": ((1, 8, 12, 12), (8, 8, 3, 3), {}),
    "3x3 stride 2": ((1, 8, 16, 16), (8, 8, 3, 3), {"strides": [2, 2], **PAD}),
    "7x7 stride 2": ((1, 3, 32, 32), (16, 3, 7, 7), {"strides": [2, 2], "padding": [3, 3]}),
    "dilation": ((1, 8, 14, 14), (8, 8, 3, 3), {"dilation": [2, 2], "padding": [2, 2]}),
    "dilation by axis": ((1, 8, 14, 14), (8, 8, 3, 3), {"dilation": [1, 3], "padding": [1, 3]}),
    "asymmetric padding": ((1, 8, 11, 11), (8, 8, 3, 3), {"padding": [0, 1, 2, 3]}),
    "strides by axis": ((1, 8, 12, 12), (8, 8, 3, 3), {"strides": [1, 2], **PAD}),
    "5x1": ((1, 8, 10, 10), (8, 8, 5, 1), {"padding": [2, 0]}),
    "1x7": ((1, 8, 10, 10), (8, 8, 1, 7), {"padding": [0, 3]}),
    "3 input channels": ((1, 3, 16, 16), (8, 3, 3, 3), {"strides": [2, 2], **PAD}),
    "1 input channel": ((1, 1, 10, 10), (4, 1, 3, 3), PAD),
    "odd channels": ((1, 5, 11, 17), (7, 5, 3, 3), PAD),
    "2 output channels": ((1, 8, 8, 8), (2, 8, 1, 1), {}),
    "prime sizes": ((1, 13, 17, 19), (11, 13, 3, 3), PAD),
    "batch 2": ((2, 8, 10, 10), (12, 8, 3, 3), PAD),
    "batch 3, odd channels": ((3, 6, 7, 7), (10, 6, 3, 3), PAD),
    "one pixel": ((1, 8, 1, 1), (8, 8, 1, 1), {}),
    "kernel as large as the image": ((1, 8, 5, 5), (8, 8, 5, 5), {}),
    "one row": ((1, 8, 1, 40), (8, 8, 1, 3), {"padding": [0, 1]}),
    "depthwise": ((1, 8, 12, 12), (8, 1, 3, 3), {"groups": 8, **PAD}),
    "depthwise, odd channels": ((1, 10, 10, 10), (10, 1, 3, 3), {"groups": 10, **PAD}),
    "depthwise stride 2": ((1, 12, 15, 15), (12, 1, 3, 3), {"groups": 12, "strides": [2, 2], **PAD}),
    "depthwise 5x5, odd, stride 2": (
        (1, 10, 11, 11),
        (10, 1, 5, 5),
        {"groups": 10, "padding": [2, 2], "strides": [2, 2]},
    ),
    "depthwise dilation": (
        (1, 8, 12, 12),
        (8, 1, 3, 3),
        {"groups": 8, "dilation": [2, 2], "padding": [2, 2]},
    ),
    "depthwise multiplier 2": ((1, 12, 10, 10), (24, 1, 3, 3), {"groups": 12, **PAD}),
    "groups of four": ((1, 16, 10, 10), (16, 4, 3, 3), {"groups": 4, **PAD}),
    "groups of eight, other output": ((1, 16, 8, 8), (24, 8, 3, 3), {"groups": 2, **PAD}),
    "groups of six": ((1, 12, 10, 10), (12, 6, 3, 3), {"groups": 2, **PAD}),
    "groups of three": ((1, 9, 9, 9), (6, 3, 3, 3), {"groups": 3, "strides": [2, 2], **PAD}),
    "many groups of four": ((1, 64, 7, 7), (64, 4, 3, 3), {"groups": 16, **PAD}),
}


def one_conv(
    kind: str,
    then: Callable[..., Any] | None = None,
    extra: tuple[Any, ...] = (),
    given: tuple[Any, ...] = (),
) -> tvm.IRModule:
    """One composite of a conv with a constant weight; ``given`` are the caller's arguments for ``extra``."""
    data, weights, attrs = CONVS[kind]
    calls = Calls()
    conv = calls.conv(data, weights, then=then, extra=extra, **attrs)
    params = [var("x", data), *(value for value in given if isinstance(value, relax.Var))]
    return calls.main(lambda emit, x, *_: emit(conv(x, weight(weights), *given)), params)


def result_shape(kind: str) -> tuple[int, ...]:
    data, weights, attrs = CONVS[kind]
    value = relax.BlockBuilder().normalize(nn.conv2d(var("x", data), var("w", weights), **attrs))
    return tuple(int(d) for d in value.ty.shape.values)


# Numbers ----------------------------------------------------------------------------------------------


@pytest.mark.opencl
@pytest.mark.parametrize("kind", CONVS)
def test_a_conv_with_bias(opencl_device: Device, kind: str) -> None:
    bias = (1, result_shape(kind)[1], 1, 1)
    mod = one_conv(kind, lambda emit, c, b: emit(op.add(c, b)), (var("bias", bias),), (const(bias, 1),))
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize(
    "kind", ["1x1", "odd channels", "depthwise, odd channels", "groups of six", "groups of four"]
)
def test_a_weight_that_is_a_parameter(opencl_device: Device, kind: str) -> None:
    data, weights, attrs = CONVS[kind]
    calls = Calls()
    conv = calls.conv(data, weights, **attrs)
    mod = calls.main(lambda emit, x, w: emit(conv(x, w)), [var("x", data), var("w", weights)])
    built = build(mod)
    assert max(errors(built, mod, opencl_device)) < TOLERANCE
    assert built.manifest.constants == {}


EPILOGUES: dict[str, Callable[..., Any]] = {
    "x * sigmoid(x)": lambda emit, c: emit(op.multiply(c, emit(op.sigmoid(c)))),
    "x * (1 + erf(x)), erf has no vector form": lambda emit, c: emit(
        op.multiply(c, emit(op.add(emit(op.erf(c)), relax.const(1.0))))
    ),
    "gelu": lambda emit, c: emit(nn.gelu(c)),
    "gelu_tanh": lambda emit, c: emit(nn.gelu_tanh(c)),
    "silu": lambda emit, c: emit(nn.silu(c)),
    "relu": lambda emit, c: emit(nn.relu(c)),
    "leakyrelu": lambda emit, c: emit(nn.leakyrelu(c, 0.1)),
    "softplus": lambda emit, c: emit(nn.softplus(c, 1.0, 20.0)),
    "exp": lambda emit, c: emit(op.exp(c)),
    "clip": lambda emit, c: emit(op.clip(c, -0.5, 0.75)),
    "scalar on the left": lambda emit, c: emit(op.subtract(relax.const(1.5), c)),
    "tanh + round + floor": lambda emit, c: emit(
        op.add(emit(op.tanh(c)), emit(op.add(emit(op.round(c)), emit(op.floor(c)))))
    ),
    "sign * sqrt(abs)": lambda emit, c: emit(op.multiply(emit(op.sign(c)), emit(op.sqrt(emit(op.abs(c)))))),
    "where(x > 0, x, -x)": lambda emit, c: emit(
        op.where(emit(op.greater(c, relax.const(0.0))), c, emit(op.negative(c)))
    ),
    "c + c, then squared by itself": lambda emit, c: (lambda d: emit(op.multiply(d, d)))(emit(op.add(c, c))),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_of_one_value(opencl_device: Device, name: str) -> None:
    mod = one_conv("odd channels", EPILOGUES[name])
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("kind", ["3x3", "odd channels", "depthwise", "groups of six"])
def test_x_times_sigmoid_nested_four_times(opencl_device: Device, kind: str) -> None:
    def nested(emit: Emit, c: Any) -> None:
        for _ in range(4):
            c = emit(op.multiply(c, emit(op.sigmoid(c))))

    mod = one_conv(kind, nested)
    built = build(mod)
    assert max(errors(built, mod, opencl_device)) < TOLERANCE
    # each sigmoid is computed once for a texel, not once for each of its readers; the last one where it is stored
    source = built.source("fused_0")
    stores, texels = source.count("unpack_intermediate_ptr["), source.count("write_imagef(")
    assert stores + texels
    assert source.count("exp(") == 3 * stores // 4 + stores + 4 * texels


# operand of the epilogue: what it looks like beside a conv result (1, 7, 11, 17)
OPERANDS: dict[str, tuple[int, ...]] = {
    "residual": (1, 7, 11, 17),
    "per channel, rank 4": (1, 7, 1, 1),
    "per channel, rank 3": (7, 1, 1),
    "per pixel": (1, 1, 11, 17),
    "per pixel, rank 2": (11, 17),
    "per column": (17,),
    "per row": (1, 1, 11, 1),
    "per channel and column": (1, 7, 1, 17),
    "a scalar": (),
    "one number, rank 4": (1, 1, 1, 1),
}


@pytest.mark.opencl
@pytest.mark.parametrize("given", ["constant", "parameter"])
@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_is_broadcast(opencl_device: Device, name: str, given: str) -> None:
    shape = OPERANDS[name]
    argument = const(shape, 3) if given == "constant" else var("r", shape)
    mod = one_conv(
        "odd channels", lambda emit, c, r: emit(op.multiply(c, r)), (var("operand", shape),), (argument,)
    )
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("batch", [1, 2])
def test_an_operand_of_one_pixel_for_each_image(opencl_device: Device, batch: int) -> None:
    """The gate of a squeeze-excite block: (N, C, 1, 1)."""
    calls = Calls()
    data, kernel, gate = (batch, 6, 9, 9), (6, 6, 3, 3), (batch, 6, 1, 1)
    conv = calls.conv(data, kernel, then=lambda e, c, g: e(op.multiply(c, g)), extra=[var("g", gate)], **PAD)
    mod = calls.main(lambda emit, x, g: emit(conv(x, weight(kernel), g)), [var("x", data), var("gate", gate)])
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("slopes", [7, 1])
def test_prelu(opencl_device: Device, slopes: int) -> None:
    mod = one_conv(
        "odd channels",
        lambda emit, c, s: emit(nn.prelu(c, s, axis=1)),
        (var("slope", (slopes,)),),
        (const((slopes,), 2),),
    )
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("padding", [[0, 0], [1, 1]])
def test_the_convs_input_is_its_residual(opencl_device: Device, padding: list[int]) -> None:
    """Stock's schedule redirects all readers of an unpadded input to the copy that it makes for the conv."""
    calls = Calls()
    size = 3 if padding[0] else 1
    data, kernel = (1, 6, 9, 9), (6, 6, size, size)
    one = calls.composite(
        lambda emit, d, w: emit(nn.relu(emit(op.add(emit(nn.conv2d(d, w, padding=padding)), d)))),
        [var("data", data), var("weight", kernel)],
    )
    mod = calls.main(lambda emit, x: emit(one(x, weight(kernel))), [var("x", data)])
    assert max(errors(build(mod), mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("scope", ["global", "texture"])
def test_data_and_weight_are_one_tensor(opencl_device: Device, scope: str) -> None:
    shape = (6, 6, 3, 3)
    calls = Calls()
    one = calls.composite(lambda emit, x: emit(nn.conv2d(x, x, **PAD)), [var("data", shape)], {"data": scope})
    mod = calls.main(lambda emit, x: emit(one(x)), [var("x", shape)])
    for packed, layout in ((False, "NCHW4c" if scope == "texture" else "plain"), (True, "NCHW4c")):
        built = build(mod, packed=packed)
        assert max(errors(built, mod, opencl_device)) < TOLERANCE
        assert [o.layout for o in built.placement.needs["fused_0"].operands] == [layout, "OIHW4i4o"]


@pytest.mark.opencl
@pytest.mark.parametrize("kind", ["3x3", "odd channels", "depthwise, odd channels", "groups of four"])
def test_constant_weights_may_live_in_texture(opencl_device: Device, kind: str) -> None:
    data, kernel, attrs = CONVS[kind]
    calls = Calls()
    conv = calls.conv(data, kernel, {**TEXTURE, "weight": "texture"}, **attrs)
    mod = calls.main(lambda emit, x: emit(conv(x, weight(kernel))), [var("x", data)])
    built = build(mod)
    assert "__read_only image2d_array_t weight_ptr" in built.source("fused_0")
    assert max(errors(built, mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("channels", "depth", "scope"),
    [(32, 7, "global.texture-nhwc"), (32, 1, "global.texture-nhwc"), (32, 8, "global.texture")],
)
def test_another_folding_where_the_layers_do_not_suffice(
    opencl_device: Device, channels: int, depth: int, scope: str
) -> None:
    calls = Calls()
    data, kernel = (1, channels, 6, 6), (channels, channels, 3, 3)
    convs = [calls.conv(data, kernel, **PAD) for _ in range(2)]

    def chain(emit: Emit, x: Any) -> Any:
        for conv in convs:
            x = emit(conv(x, weight(kernel)))
        return x

    mod = calls.main(chain, [var("x", data)])
    built = build(mod, texture_target(texture_depth_limit=depth), packed=True)
    assert {form.scope for form in built.placement.outputs.values()} == {scope}
    assert max(errors(built, mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("kind", ["3x3", "odd channels", "depthwise, odd channels", "groups of six"])
def test_the_same_kernels_in_buffers(opencl_device: Device, kind: str) -> None:
    mod = one_conv(kind, lambda emit, c: emit(op.multiply(c, emit(op.sigmoid(c)))))
    built = build(mod, texture_target(texture_spatial_limit=1))
    assert {form.scope for form in built.placement.outputs.values()} == {"global"}
    assert "image2d" not in built.source("fused_0")
    assert max(errors(built, mod, opencl_device)) < TOLERANCE


@pytest.mark.opencl
def test_more_threads_than_one_work_group(opencl_device: Device) -> None:
    """Large enough that a thread computes a tile and groups are full."""
    calls = Calls()
    data, kernel, bias = (1, 16, 64, 64), (32, 16, 3, 3), (1, 32, 1, 1)
    conv = calls.conv(data, kernel, then=lambda e, c, b: e(op.add(c, b)), extra=[var("bias", bias)], **PAD)
    mod = calls.main(lambda emit, x: emit(conv(x, weight(kernel), const(bias, 1))), [var("x", data)])
    built = build(mod)
    (launch,) = built.funcs["fused_0"].launches
    assert math.prod(launch.block) > 1
    assert math.prod(launch.grid) * math.prod(launch.block) < 8 * 64 * 64  # fewer threads than texels
    assert max(errors(built, mod, opencl_device)) < TOLERANCE


# Lanes beyond the last channel ------------------------------------------------------------------------

SIX = (1, 6, 5, 5)

# each makes inf or NaN of what a padded lane holds (zero), and finite numbers of real lanes
IN_A_PADDED_LANE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "1 / x": (
        lambda emit, c: emit(op.divide(relax.const(1.0), emit(op.add(emit(op.square(c)), c)))),
        (),
        (),
    ),
    "log(x * x)": (lambda emit, c: emit(op.log(emit(op.square(c)))), (), ()),
    "rsqrt(x * x)": (lambda emit, c: emit(op.rsqrt(emit(op.square(c)))), (), ()),
    "x / residual": (lambda emit, c, r: emit(op.divide(c, r)), (var("res", SIX),), (const(SIX, 5),)),
    "exp(x - bias + 100)": (
        lambda emit, c, b: emit(op.exp(emit(op.add(emit(op.subtract(c, b)), relax.const(100.0))))),
        (var("bias", (1, 6, 1, 1)),),
        (relax.const(np.full((1, 6, 1, 1), 98, "float32")),),
    ),
}


@pytest.mark.opencl
@pytest.mark.parametrize("reader", ["1x1", "depthwise", "groups of three"])
@pytest.mark.parametrize("name", IN_A_PADDED_LANE)
def test_nothing_leaks_from_a_padded_lane(opencl_device: Device, name: str, reader: str) -> None:
    then, extra, given = IN_A_PADDED_LANE[name]
    kernel, attrs = {
        "1x1": ((8, 6, 1, 1), {}),
        "depthwise": ((6, 1, 3, 3), {"groups": 6, **PAD}),
        "groups of three": ((6, 3, 1, 1), {"groups": 2}),
    }[reader]
    calls = Calls()
    first = calls.conv((1, 8, 5, 5), (6, 8, 1, 1), then=then, extra=extra)
    second = calls.conv(SIX, kernel, **attrs)

    def two(emit: Emit, x: Any) -> Any:
        inner = emit(first(x, weight((6, 8, 1, 1)), *given))
        return [emit(second(inner, weight(kernel, 1))), inner]

    mod = calls.main(two, [var("x", (1, 8, 5, 5))])
    built = build(mod)
    # dividing by a small number makes the reference itself sensitive: the bound is the project's own
    assert max(errors(built, mod, opencl_device)) < 1e-4


def last_texture(built: Built, mod: tvm.IRModule, device: Device) -> Array:
    """The texture that is written last, as it lies on the device."""
    main = built.manifest.functions["main"]
    names = [s.value for s in main.body if isinstance(s, m.Alloc) and s.tensor.is_texture]
    manifest = replace(built.manifest, functions={"main": replace(main, result=names[-1])})
    return Session(manifest, device).run(draw(mod))[0]


@pytest.mark.opencl
@pytest.mark.parametrize(
    "kind", ["odd channels", "depthwise, odd channels", "groups of three", "2 output channels"]
)
def test_padded_lanes_are_written_as_zero(opencl_device: Device, kind: str) -> None:
    mod = one_conv(kind, lambda emit, c: emit(op.add(c, relax.const(1.0))))
    channels = result_shape(kind)[1]
    lanes = last_texture(build(mod, packed=True), mod, opencl_device)
    assert lanes[:, : channels // 4].all()
    assert not lanes[:, -1, :, :, channels % 4 :].any()
    assert lanes[:, -1, :, :, : channels % 4].all()


# OpenCL C ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every_kind() -> dict[str, Built]:
    return {kind: build(one_conv(kind, lambda emit, c: emit(nn.relu(c))), packed=True) for kind in CONVS}


ONE_PIXEL = ("one pixel", "kernel as large as the image")
"""A result of one pixel lies packed as it lies plain: in a buffer, and its conversion is a view that starts nothing."""


@pytest.mark.parametrize("kind", CONVS)
def test_a_conv_is_one_launch_without_scratch(every_kind: dict[str, Built], kind: str) -> None:
    func = every_kind[kind].funcs["fused_0"]
    assert func.scratch == ()
    assert len(func.launches) == 1
    labels = [s.label for s in every_kind[kind].manifest.functions["main"].body if isinstance(s, m.Launch)]
    ends = ["layout.unpack"] if kind not in ONE_PIXEL else []
    assert labels == ["layout.pack", "conv2d.chain", *ends]


@pytest.mark.parametrize("kind", CONVS)
def test_texels_are_read_and_stored_whole(every_kind: dict[str, Built], kind: str) -> None:
    source = every_kind[kind].source("fused_0")
    body = source[source.rindex("__kernel") :]
    stores = re.findall(r"write_imagef\((.*)\);", body)
    assert bool(stores) == (kind not in ONE_PIXEL)
    assert all("as_float4(" in store for store in stores)
    reads = re.findall(r"READ_IMAGEF\(.*", body)
    assert reads
    (launch,) = every_kind[kind].funcs["fused_0"].launches
    result = "image_write" if kind not in ONE_PIXEL else "buffer"
    assert sorted(launch.signature) == sorted(
        ["buffer", "image_read", result]
    )  # the first buffer is the weight


@pytest.mark.parametrize("kind", CONVS)
def test_weights_are_read_by_four(every_kind: dict[str, Built], kind: str) -> None:
    source = every_kind[kind].source("fused_0")
    body = source[source.rindex("__kernel") :]
    layout = every_kind[kind].placement.operands["fused_0"][1].layout
    if layout == "plain":  # groups that four does not divide: every lane has channels of its own
        assert kind in ("groups of six", "groups of three", "depthwise multiplier 2")
        return
    assert "((__global float4*)weight_ptr)[" in body
    assert "weight_ptr[" not in body


@pytest.mark.parametrize("kind", CONVS)
def test_a_work_group_fits_the_target(every_kind: dict[str, Built], kind: str) -> None:
    for launch in every_kind[kind].funcs["fused_0"].launches:
        assert math.prod(int(d) for d in launch.block) <= 256


def test_a_smaller_work_group_where_the_target_wants_it() -> None:
    mod = one_conv("3x3")
    built = build(mod, texture_target(max_threads_per_block=16, max_num_threads=16))
    for func in built.funcs.values():
        for launch in func.launches:
            assert math.prod(int(d) for d in launch.block) <= 16


@pytest.mark.parametrize("name", ["3x3", "depthwise"])
def test_float16_accumulates_in_float32(name: str) -> None:
    data, kernel, attrs = CONVS[name]
    calls = Calls()
    conv = calls.composite(
        lambda emit, d, w: emit(nn.relu(emit(nn.conv2d(d, w, **attrs)))),
        [var("data", data, "float16"), var("weight", kernel, "float16")],
    )
    mod = calls.main(
        lambda emit, x: emit(conv(x, weight(kernel, dtype="float16"))), [var("x", data, "float16")]
    )
    source = build(mod, packed=True).source("fused_0")
    assert re.search(r"float4 conv2d_\w+_ptr\[", source)
    stores = re.findall(r"write_imageh\((.*)\);", source)
    assert stores
    assert all("as_half4(" in store for store in stores)
