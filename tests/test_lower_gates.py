"""Images that one pixel is broadcast to, which the same kernel computes: the gates of squeeze-and-excitation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from modules import Calls, array, const, graph, nn, var
from tvm.relax import op

from fusion_patterns import compile_module, load_table
from fusion_patterns.lower.schedule.tiles import Work, choose_gated
from fusion_patterns.match import plan_fusion
from fusion_patterns.normalise import normalise
from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.needs import needs_of
from fusion_patterns.place.profiles import Tiles, shipped_profiles
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

PROFILES = [profile.name for profile in shipped_profiles()]


def pixel(emit: Any, x: Any, outputs: int, seed: int = 0, size: int = 1, **attrs: Any) -> Any:
    """A convolution with bias."""
    inputs = int(x.ty.shape.values[1]) // int(attrs.get("groups", 1))
    value = emit(nn.conv2d(x, const((outputs, inputs, size, size), seed, scale=inputs**-0.5), **attrs))
    return emit(op.add(value, const((1, outputs, 1, 1), seed + 1)))


def layer(emit: Any, x: Any, outputs: int, seed: int = 0) -> Any:
    inputs = int(x.ty.shape.values[1])
    value = emit(op.matmul(x, const((inputs, outputs), seed, scale=inputs**-0.5)))
    return emit(op.add(value, const((outputs,), seed + 1)))


def block(
    hidden: int,
    channels: int,
    image: tuple[int, ...],
    *,
    rows: bool = False,
    end: Any = None,
    dtype: str = "float32",
) -> tvm.IRModule:
    """``relu(x * gate + x)``, the gate by two layers from the mean; the result is read twice."""

    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.relu(pixel(emit, x, channels, 6)))
        mean = emit(op.mean(value, [2, 3], keepdims=not rows))
        one = layer if rows else pixel
        gate = emit(op.sigmoid(one(emit, emit(nn.relu(one(emit, mean, hidden))), channels, 2)))
        if rows:
            gate = emit(op.reshape(gate, (image[0], channels, 1, 1)))
        result = emit(op.multiply(value, gate))
        if end is not None:
            return end(emit, result)
        result = emit(nn.relu(emit(op.add(result, value))))
        return [pixel(emit, result, 4, 8), pixel(emit, result, 4, 10)]

    return graph(build, [var("x", image)])


MODULES: dict[str, tuple[str, Callable[[], tvm.IRModule]]] = {
    "pixels for several groups": ("conv2d.gate", lambda: block(40, 128, (1, 8, 24, 28))),
    "many hidden, few pixels": ("conv2d.gate", lambda: block(520, 524, (1, 5, 3, 2))),
    "a prime number of pixels, odd channels": ("conv2d.gate", lambda: block(66, 70, (2, 5, 1, 13))),
    "two layers, pixels for several groups": ("conv2d.excite.gate", lambda: block(8, 64, (1, 8, 24, 28))),
    "two layers, odd channels": ("conv2d.excite.gate", lambda: block(7, 22, (2, 6, 5, 9))),
    "rows": ("dense.gate", lambda: block(20, 64, (2, 8, 12, 14), rows=True)),
    "rows, many hidden": ("dense.gate", lambda: block(1030, 20, (1, 8, 3, 3), rows=True)),
}


@pytest.mark.opencl
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MODULES)
def test_a_gate_in_the_kernel_that_applies_it(opencl_device: Device, name: str, profile: str) -> None:
    row, build = MODULES[name]
    mod = build()
    compiled = compile_module(mod, profile=profile)
    assert compiled.report.composites.get(row) == 1, compiled.report.declined
    data = array([int(d) for d in mod["main"].params[0].ty.shape], 9)
    results = Session(compiled.manifest, opencl_device).run([data])
    for result, wanted in zip(results, Reference(mod).run({"x": data}), strict=True):
        assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()
        assert wanted.std() > 0


def kernel_of(mod: tvm.IRModule, row: str, profile: str) -> str:
    """The OpenCL C of the one kernel of a row."""
    manifest = compile_module(mod, profile=profile).manifest
    (launch,) = [step for step in manifest.functions["main"].body if getattr(step, "label", "") == row]
    source = manifest.kernels[launch.kernel].source
    return source[source.rindex("__kernel") :]


@pytest.mark.parametrize("name", MODULES)
def test_the_gate_is_computed_once_in_a_group(name: str) -> None:
    row, build = MODULES[name]
    source = kernel_of(build(), row, "nvidia-opencl")
    assert source.count("exp(") == 1
    before, after = source.split("exp(")
    assert "__local" in before
    # no pixel is read before the gate is there, and no weight after it
    assert "image" not in before[before.index("{") :]
    assert "weight" not in after
    assert "barrier(CLK_LOCAL_MEM_FENCE)" in after
    sizes = [int(n) for n in re.findall(r"__local float4? \w+\[(\d+)\]", source)]
    assert sum(sizes) * 16 <= 32768


def test_a_float16_gate_is_summed_in_float32() -> None:
    def build(emit: Any, x: Any, p: Any) -> Any:
        value = emit(nn.conv2d(x, const((8, 8, 1, 1), 1, dtype="float16")))
        gate = emit(op.sigmoid(emit(nn.conv2d(p, const((8, 12, 1, 1), 2, dtype="float16")))))
        result = emit(op.multiply(value, gate))
        return [emit(nn.relu(result)), emit(nn.max_pool2d(result, [2, 2])), emit(op.add(value, value))]

    mod = graph(build, [var("x", (1, 8, 6, 6), "float16"), var("p", (1, 12, 1, 1), "float16")])
    source = kernel_of(mod, "conv2d.gate", "adreno")
    assert re.search(r"float4 conv2d_packed\w+\[", source)
    assert "half4" in source


# Near misses ----------------------------------------------------------------------------------------------------


def declined(mod: tvm.IRModule, row: str) -> str:
    """Why a row was not applied, all reasons as one text."""
    plan = plan_fusion(normalise(mod), load_table())
    assert row not in {match.row.name for match in plan.matches}
    return "\n".join(str(found.reason) for found in plan.decisions if found.row == row)


def test_a_convolution_that_reads_the_gated_image_alone_gates_it() -> None:
    """As in MobileNetV3: the gated image is never written."""
    mod = block(8, 64, (1, 8, 6, 6), end=lambda e, y: pixel(e, y, 4, 8))
    composites = compile_module(mod).report.composites
    assert composites == {"conv2d.chain": 1, "global_pool.mean": 1, "conv2d.excite": 1, "conv2d.prologue": 1}


def test_two_layers_with_many_weights_are_two_launches() -> None:
    mod = block(17, 256, (1, 8, 6, 6))
    assert "weight.O * weight.I <= 4096" in declined(mod, "conv2d.excite.gate")
    assert compile_module(mod).report.composites["conv2d.gate"] == 1


def test_an_image_of_one_pixel_is_not_gated_in_groups() -> None:
    assert "image.H * image.W > 1" in declined(block(70, 64, (1, 8, 1, 1)), "conv2d.gate")


def test_a_gate_by_groups_of_channels_has_a_kernel_of_its_own() -> None:
    def build(emit: Any, x: Any, p: Any) -> Any:
        value = pixel(emit, x, 8)
        result = emit(op.multiply(value, emit(op.sigmoid(pixel(emit, p, 8, 3, groups=2)))))
        return [pixel(emit, result, 4, 5), pixel(emit, result, 4, 7), pixel(emit, value, 4, 9)]

    mod = graph(build, [var("x", (1, 8, 6, 6)), var("p", (1, 8, 1, 1))])
    assert "groups of `lv" in declined(mod, "conv2d.gate")


def test_rows_with_parts_of_texels_are_gated_elsewhere() -> None:
    assert "dense.shape[1] % 4 == 0" in declined(block(20, 66, (1, 8, 6, 6), rows=True), "dense.gate")


def test_a_gate_of_another_batch() -> None:
    def build(emit: Any, x: Any, p: Any) -> Any:
        value = pixel(emit, x, 8)
        result = emit(op.multiply(value, emit(op.sigmoid(pixel(emit, p, 8, 3)))))
        return [pixel(emit, result, 4, 5), pixel(emit, result, 4, 7), pixel(emit, value, 4, 9)]

    mod = graph(build, [var("x", (2, 8, 6, 6)), var("p", (1, 8, 1, 1))])
    # Read as a further operator of the gate, the multiplication makes that larger than the convolution.
    assert "gate.shape == excite.shape" in declined(mod, "conv2d.gate")


def test_no_kernel_computes_a_gate_and_another_image() -> None:
    def build(emit: Any, p: Any, w: Any, image: Any, v: Any) -> Any:
        result = emit(op.multiply(image, emit(nn.conv2d(p, w))))
        return emit(nn.conv2d(result, v))

    params = [
        var("p", (1, 8, 1, 1)),
        var("w", (8, 8, 1, 1)),
        var("image", (1, 8, 6, 6)),
        var("v", (4, 8, 1, 1)),
    ]
    with pytest.raises(
        NotPacked, match="broadcasts a pixel, and no kernel computes `out` as well"
    ) as refusal:
        needs_of(Calls().composite(build, params).func)
    assert refusal.value.culprit == "out"


def test_no_kernel_computes_two_gates() -> None:
    def build(emit: Any, p: Any, w: Any, image: Any, q: Any, v: Any) -> Any:
        once = emit(op.multiply(image, emit(nn.conv2d(p, w))))
        return emit(op.multiply(once, emit(nn.conv2d(q, v))))

    one, layers = (1, 8, 1, 1), (8, 8, 1, 1)
    params = [var("p", one), var("w", layers), var("image", (1, 8, 6, 6)), var("q", one), var("v", layers)]
    with pytest.raises(NotPacked, match="broadcasts a pixel, and no kernel computes"):
        needs_of(Calls().composite(build, params).func)


def test_a_mean_is_broadcast_by_no_kernel() -> None:
    def build(emit: Any, image: Any) -> Any:
        return emit(op.multiply(image, emit(op.mean(image, [2, 3], keepdims=True))))

    with pytest.raises(NotPacked, match="broadcasts the value that the composite computes to"):
        needs_of(Calls().composite(build, [var("image", (1, 8, 6, 6))]).func)


# How the work is cut --------------------------------------------------------------------------------------------


def test_pixels_are_shared_by_as_many_groups_as_keep_the_device_busy() -> None:
    tiles = Tiles(threads=8192, group=64, split=4)
    small, areas = choose_gated(Work((1, 64, 56, 56, 4)), 16, 4, 256, tiles)
    assert (small.split, small.group, areas) == (64, (1, 1, 1), 7)
    # but not where the sums would then be most of the work
    _, areas = choose_gated(Work((1, 64, 56, 56, 4)), 4096, 1024, 256, tiles)
    assert areas == 1


def test_a_long_sum_is_shared_by_threads_without_pixels() -> None:
    tiles = Tiles(threads=8192, group=64, split=4)
    tile, areas = choose_gated(Work((1, 512, 7, 7, 4)), 2048, 2048, 256, tiles)
    assert (tile.split, areas) == (256, 1)
    alone = Tiles(threads=64, group=64, split=1)
    assert choose_gated(Work((1, 512, 7, 7, 4)), 2048, 2048, 256, alone)[0].split == 7
