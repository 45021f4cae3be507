"""Convolutions of which only the maxima over windows are written: borders, cuts, and what is declined."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np
import pytest
from modules import array, const, graph, nn, texture_target, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, load_table, plan_fusion, verify
from fusion_patterns.lower.schedule import max_threads
from fusion_patterns.lower.schedule.tiles import DEFAULT, TEXEL_BYTES, Work, choose_tile
from fusion_patterns.lower.schedule.windows import MOST_AGAIN, Cut, Windows, choose_cut
from fusion_patterns.place.profiles import Profile, load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

ROWS = ("conv2d.max_pool", "conv2d.first.max_pool")
TWO = {"pool_size": [2, 2], "strides": [2, 2]}
THREE = {"pool_size": [3, 3], "strides": [2, 2]}


def pooled(shape: tuple[int, ...], channels: int, kernel: int, pool: dict[str, Any], **attrs: Any) -> Any:
    """A convolution whose results are all negative, and a pool: a border of zeros would win everywhere."""

    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.conv2d(x, weight((channels, shape[1], kernel, kernel)), **attrs))
        moved = emit(op.add(value, const((1, channels, 1, 1), 5)))
        return emit(nn.max_pool2d(emit(op.subtract(moved, relax.const(9.0, "float32"))), **pool))

    return graph(build, [var("x", shape)])


def reasons(compiled: Any) -> list[str]:
    return [str(one.reason) for one in compiled.report.declined if one.row in ROWS]


SHAPES: dict[str, Any] = {
    "padding on all sides": lambda: pooled((1, 8, 9, 12), 8, 3, {**THREE, "padding": [1, 1]}),
    "padding by side": lambda: pooled(
        (2, 5, 10, 8), 6, 3, {**THREE, "padding": [0, 1, 1, 0]}, padding=[1, 1]
    ),
    "rounded up": lambda: pooled((1, 8, 10, 13), 8, 3, {**THREE, "ceil_mode": True}, padding=[1, 1]),
    "rounded up, 2x2": lambda: pooled((2, 6, 9, 9), 9, 1, {**TWO, "ceil_mode": True}),
    "some pixels in no window": lambda: pooled((1, 8, 11, 13), 8, 3, TWO, padding=[1, 1]),
    "gaps between windows": lambda: pooled((1, 8, 13, 13), 8, 3, {"pool_size": [2, 2], "strides": [3, 3]}),
    "dilation": lambda: pooled((2, 8, 12, 11), 6, 3, {**TWO, "dilation": [2, 2], "padding": [1, 1]}),
    "unequal sides": lambda: pooled(
        (1, 8, 12, 14), 8, 3, {"pool_size": [3, 2], "strides": [1, 2], "padding": [1, 0]}
    ),
    "stride 1": lambda: pooled((3, 5, 7, 6), 7, 3, {"pool_size": [3, 3], "padding": [1, 1]}, padding=[1, 1]),
    "strided convolution": lambda: pooled(
        (2, 3, 23, 21), 10, 5, {**THREE, "padding": [1, 1]}, strides=[2, 3], padding=[2, 2]
    ),
    "dilated convolution": lambda: pooled(
        (1, 8, 14, 14), 8, 3, {**THREE, "padding": [1, 1]}, dilation=[2, 2], padding=[2, 2]
    ),
    "one window": lambda: pooled((1, 8, 3, 3), 8, 1, {"pool_size": [3, 3], "strides": [3, 3]}),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", SHAPES)
def test_windows_and_borders(opencl_device: Device, name: str) -> None:
    report = verify(SHAPES[name](), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < 1e-5
    assert all(output.varies for output in report.outputs)
    assert report.compiled is not None
    assert sum(report.compiled.report.composites.get(row, 0) for row in ROWS) == 1, reasons(report.compiled)


@pytest.mark.opencl
def test_a_value_that_the_pool_and_its_epilogue_read(opencl_device: Device) -> None:
    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 3, 3)), padding=[1, 1]))))
        most = emit(nn.max_pool2d(value, [3, 3], [1, 1], padding=[1, 1]))
        return emit(op.subtract(most, value))

    report = verify(graph(build, [var("x", (1, 8, 9, 9))]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < 1e-5


def test_the_convolution_needs_no_launch_and_no_memory_of_its_own() -> None:
    compiled = compile_module(SHAPES["padding on all sides"]())
    (kernel,) = [k for k in compiled.manifest.kernels.values() if "max_pool" in k.source]
    assert "__local" in kernel.source
    assert kernel.source.count("barrier(") == 1
    assert compiled.report.launches == 1 + compiled.report.conversions


# What is left to two kernels --------------------------------------------------------------------------------


def test_a_result_that_others_read_is_written() -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 3, 3))))))
        return [emit(nn.max_pool2d(value, **TWO)), emit(nn.conv2d(value, weight((8, 8, 1, 1))))]

    compiled = compile_module(graph(build, [var("x", (1, 8, 10, 10))]))
    assert compiled.report.composites == {"conv2d.chain": 2, "pool2d.chain": 1}


@pytest.mark.parametrize(
    ("shape", "kernel", "pool", "why"),
    [
        ((1, 64, 140, 140), 3, THREE, "pool.strides[0] >= pool.pool_size[0]"),
        ((1, 64, 20, 20), 3, TWO, "conv.N * conv.C * conv.H * conv.W >= 131072"),
        (
            (1, 8, 14, 14),
            3,
            {"pool_size": [5, 5], "strides": [5, 5]},
            "pool.pool_size[0] * pool.pool_size[1] <= 16",
        ),
    ],
)
def test_conditions(shape: tuple[int, ...], kernel: int, pool: dict[str, Any], why: str) -> None:
    mod = pooled(shape, 8, kernel, pool)
    assert compile_module(mod).report.composites == {"conv2d.chain": 1, "pool2d.chain": 1}
    table = load_table()
    alone = table.model_copy(update={"patterns": tuple(row for row in table.patterns if row.name == ROWS[0])})
    (miss,) = plan_fusion(mod, alone).near_misses()
    assert why in miss.reason


def test_a_long_sum_is_pooled_where_pixels_are_many() -> None:
    compiled = compile_module(pooled((1, 32, 130, 130), 16, 3, TWO, padding=[1, 1]))
    assert compiled.report.composites == {"conv2d.max_pool": 1}


def test_a_residual_has_nothing_beyond_the_image() -> None:
    def build(emit: Any, x: Any) -> Any:
        value = emit(op.add(emit(nn.conv2d(x, weight((8, 8, 3, 3)), padding=[1, 1])), x))
        return emit(nn.max_pool2d(value, **THREE, padding=[1, 1]))

    compiled = compile_module(graph(build, [var("x", (1, 8, 12, 12))]))
    assert compiled.report.composites == {"conv2d.chain": 1, "pool2d.chain": 1}
    assert any("beyond the image" in reason for reason in reasons(compiled)), reasons(compiled)


def test_windows_that_would_compute_many_pixels_twice() -> None:
    """A prime number of windows can't be cut into rectangles: each row of them is a group, or all are."""
    compiled = compile_module(pooled((1, 20, 120, 120), 8, 3, {**THREE, "padding": [1, 1]}))
    assert compiled.report.composites == {"conv2d.chain": 1, "pool2d.chain": 1}
    assert any("pixels with its neighbours" in reason for reason in reasons(compiled)), reasons(compiled)


# Cuts -------------------------------------------------------------------------------------------------------


SHARING = DEFAULT.model_copy(update={"split": 4})


@pytest.mark.parametrize(
    "tiles", [SHARING, load_profile("nvidia-opencl").tiles, load_profile("adreno").tiles]
)
@pytest.mark.parametrize(
    "shape", [(1, 16, 56, 56, 4), (1, 128, 14, 14, 4), (2, 3, 27, 31, 4), (8, 1, 5, 7, 4)]
)
@pytest.mark.parametrize(("reach", "strides"), [((2, 2), (2, 2)), ((3, 3), (2, 2)), ((3, 1), (1, 2))])
def test_a_cut_divides_and_fits(
    tiles: Any, shape: tuple[int, ...], reach: tuple[int, int], strides: tuple[int, int]
) -> None:
    threads = max_threads(texture_target())
    inner = Windows(None, reach, strides, kernel=(3, 3), long=36)
    cut = choose_cut(shape, inner, threads, tiles)
    for full, count in zip(shape[1:4], cut.windows, strict=True):
        assert full % count == 0
    for pixels, own in zip(cut.pixels, cut.tile, strict=True):
        assert pixels % own == 0
    for axis in (0, 1):
        assert cut.pixels[1 + axis] == (cut.windows[1 + axis] - 1) * strides[axis] + reach[axis]
    assert cut.threads <= threads
    assert cut.local_bytes <= tiles.local_bytes
    assert prod(cut.tile) <= tiles.accumulators
    needed = prod(
        (full - 1) * step + span for full, step, span in zip(shape[2:4], strides, reach, strict=True)
    )
    groups = prod(full // count for full, count in zip(shape[2:4], cut.windows[1:], strict=True))
    assert (groups * prod(cut.pixels[1:]) / needed - 1) * inner.long <= MOST_AGAIN


def test_a_cut_keeps_the_device_busy_and_its_threads_large() -> None:
    inner = Windows(None, (2, 2), (2, 2), kernel=(3, 3), long=252)
    large = choose_cut((1, 16, 112, 112, 4), inner, 256, SHARING)
    assert prod(large.tile) == SHARING.accumulators
    small = choose_cut((1, 16, 14, 14, 4), inner, 256, SHARING)
    assert prod(small.tile) < SHARING.accumulators


def test_no_rectangle_fits() -> None:
    with pytest.raises(ValueError, match="no rectangle of its windows that fits into 16384 bytes"):
        choose_cut((1, 8, 53, 53, 4), Windows(None, (3, 3), (2, 2), kernel=(3, 3), long=252), 256, SHARING)


# Long sums of small images ----------------------------------------------------------------------------------

SAME = {"padding": [1, 1]}


def residual(emit: Any, x: Any) -> Any:
    value = emit(op.add(emit(nn.conv2d(x, weight((260, 260, 1, 1)))), x))
    return emit(nn.max_pool2d(emit(nn.gelu(value)), **THREE))


def profile_of(name: str) -> Profile:
    """The profile of that name; ``large``: a GPU of which nothing but its size is known."""
    if name != "large":
        return load_profile(name)
    known = load_profile("nvidia-opencl")
    return known.model_copy(update={"tiles": known.tiles.model_copy(update={"machine": None, "split": 32})})


BOTH, ADRENO = ("adreno", "large"), ("adreno",)
NVIDIA = "nvidia-opencl"
LONG_SUMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "windows overlap": (lambda: pooled((1, 64, 13, 13), 256, 3, THREE, **SAME), ADRENO),
    "odd channels, batch": (lambda: pooled((2, 61, 13, 13), 30, 3, THREE, **SAME), ("large", NVIDIA)),
    "padding of the pool": (
        lambda: pooled((1, 40, 11, 15), 22, 3, {**THREE, "padding": [1, 1]}, **SAME),
        BOTH,
    ),
    "rounded up": (lambda: pooled((2, 64, 12, 12), 126, 3, {**THREE, "ceil_mode": True}, **SAME), ADRENO),
    "windows apart": (lambda: pooled((1, 64, 14, 14), 64, 3, TWO, **SAME), (*ADRENO, NVIDIA)),
    "1x1": (lambda: pooled((1, 260, 13, 13), 32, 1, THREE), BOTH),
    "stride": (lambda: pooled((1, 64, 27, 27), 32, 3, THREE, strides=[2, 2], **SAME), (*BOTH, NVIDIA)),
    "residual, and lanes that no vector has": (lambda: graph(residual, [var("x", (1, 260, 13, 13))]), BOTH),
}
"""Modules, and the profiles by which they become one kernel: the others leave them two."""


@pytest.mark.opencl
@pytest.mark.parametrize("profile", [*BOTH, NVIDIA, "pocl"])
@pytest.mark.parametrize("name", LONG_SUMS)
def test_long_sums_of_a_small_image(opencl_device: Device, name: str, profile: str) -> None:
    build, fused = LONG_SUMS[name]
    mod = build()
    compiled = compile_module(mod, profile=profile_of(profile))
    data = array([int(d) for d in mod["main"].params[0].ty.shape.values], 9)
    (result,) = Session(compiled.manifest, opencl_device).run([data])
    (wanted,) = Reference(mod).run({"x": data})
    assert result.shape == wanted.shape
    assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert wanted.std() > 0
    if profile in fused:
        assert compiled.report.composites == {ROWS[0]: 1}, reasons(compiled)
    else:
        (reason,) = reasons(compiled)
        reasons_of = {"pocl": "splits no sums", NVIDIA: "cost less in kernels of their own"}
        assert reasons_of.get(profile, "no cut of its long sums") in reason


def split_cut(shape: tuple[int, ...], profile: str, reach: int, inputs: int) -> Cut:
    """The cut of 3x3 sums whose windows begin two pixels apart; ``shape``: the packed result."""
    inner = Windows(None, (reach, reach), (2, 2), kernel=(3, 3), long=9 * inputs, shares=inputs // 4)
    return choose_cut(shape, inner, 256, profile_of(profile).tiles)


@pytest.mark.parametrize("profile", BOTH)
@pytest.mark.parametrize("shape", [(1, 64, 6, 6, 4), (4, 64, 6, 6, 4), (1, 64, 4, 6, 4)])
def test_a_split_cut_divides_and_fits(profile: str, shape: tuple[int, ...]) -> None:
    tiles = profile_of(profile).tiles
    cut = split_cut(shape, profile, 3, 256)
    assert 1 <= cut.split <= tiles.split
    assert all(full % count == 0 for full, count in zip(shape[1:4], cut.windows, strict=True))
    assert cut.threads == cut.split * prod(cut.pixels) // prod(cut.tile) <= 256
    copies = cut.split + 1 if cut.split > 1 else 1
    assert copies * prod(cut.pixels) * TEXEL_BYTES <= tiles.local_bytes
    assert prod(cut.tile) <= tiles.accumulators


def test_on_a_known_machine_a_short_sum_shares_its_windows_and_a_long_one_keeps_its_tile() -> None:
    tiles = load_profile("nvidia-opencl").tiles
    stem = Windows(None, (3, 3), (2, 2), kernel=(7, 7), long=196)
    cut = choose_cut((1, 16, 56, 56, 4), stem, 256, tiles)
    assert all(full % count == 0 for full, count in zip((16, 56, 56), cut.windows, strict=True))
    assert cut.threads <= 256
    assert cut.local_bytes <= tiles.local_bytes
    vgg = Windows(None, (2, 2), (2, 2), kernel=(3, 3), long=2304, shares=64)
    with pytest.raises(ValueError, match="cost less in kernels of their own, by the profile's machine"):
        choose_cut((1, 64, 28, 28, 4), vgg, 256, tiles)


def test_where_windows_are_apart_a_thread_has_the_tile_of_the_convolution_alone() -> None:
    tiles = load_profile("adreno").tiles
    alone = choose_tile(Work((1, 128, 14, 14, 4)), 256, tiles, shares=128)
    cut = split_cut((1, 128, 7, 7, 4), "adreno", 2, 512)
    assert cut.tile == (alone.blocks, alone.rows, alone.columns)
    assert cut.split == alone.split > 1


@pytest.mark.parametrize("profile", BOTH)
def test_what_a_group_shares_fits_into_local_memory(profile: str) -> None:
    manifest = compile_module(LONG_SUMS["padding of the pool"][0](), profile=profile_of(profile)).manifest
    (kernel,) = [k for k in manifest.kernels.values() if "max_pool" in k.source]
    shared = re.findall(r"__local float(4?) \w+\[(\d+)\]", kernel.source)
    taken = sum(4 * int(count) * (4 if vector else 1) for vector, count in shared)
    assert 0 < taken <= profile_of(profile).tiles.local_bytes
