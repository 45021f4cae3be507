"""Layer norm over packed channels: how its work is cut, and what it computes of awkward numbers."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
from modules import array, const, graph, nn, var
from tvm import relax

from fusion_patterns import compile_module
from fusion_patterns.lower.schedule.layer_norm import choose_norm
from fusion_patterns.place.profiles import Tiles, load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

SHAPES = [(1, 24, 56, 56, 4), (1, 96, 14, 14, 4), (2, 192, 7, 7, 4), (1, 512, 7, 7, 4), (3, 2, 5, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("profile", ["adreno", "nvidia-opencl", "generic", "pocl"])
@pytest.mark.parametrize("convolves", [False, True])
def test_a_tile_fits_the_device(shape: tuple[int, ...], profile: str, convolves: bool) -> None:
    tiles = load_profile(profile).tiles
    tile = choose_norm(shape, 256, tiles, convolves=convolves)
    assert shape[3] % tile.pixels == tile.pixels % tile.columns == shape[1] % tile.shares == 0
    assert tile.threads <= 256
    assert tile.pixels // tile.columns * shape[1] % tile.threads == 0
    assert 16 * tile.pixels * (shape[1] + tile.shares + 2) <= tiles.local_bytes
    assert tile.columns == 1 or (convolves and prod(shape[:4]) // tile.columns >= tiles.threads)


def test_neighbours_are_convolved_by_one_thread_where_there_are_enough_threads() -> None:
    tiles = Tiles(threads=8192, split=4)
    assert choose_norm((1, 24, 56, 56, 4), 256, tiles, convolves=True).columns > 1
    assert choose_norm((1, 24, 14, 14, 4), 256, tiles, convolves=True).columns == 1


def test_channels_that_do_not_fit_into_local_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^4096 channels of a pixel take more than 16384 bytes of local"):
        choose_norm((1, 1024, 7, 7, 4), 256, Tiles(split=4), convolves=False)


def normed(channels: int, dtype: str = "float32", axes: tuple[int, ...] = (1,)) -> tvm.IRModule:
    """A layer norm between two convolutions, so that it is worth packing."""

    def build(emit: Any, x: Any) -> Any:
        weights = const((channels, channels, 1, 1), 1, dtype, scale=channels**-0.5)
        shape = [channels if axis in (1, -3) else 6 for axis in axes]
        gamma, beta = const(shape, 2, dtype), const(shape, 3, dtype)
        value = emit(nn.conv2d(x, weights))
        return emit(nn.conv2d(emit(nn.layer_norm(value, gamma, beta, axes=list(axes))), weights))

    return graph(build, [var("x", (2, channels, 6, 6), dtype)])


@pytest.mark.opencl
@pytest.mark.parametrize("profile", ["adreno", "nvidia-opencl", "generic", "pocl"])
def test_every_profile(opencl_device: Device, profile: str) -> None:
    mod = normed(10)
    compiled = compile_module(mod, profile=profile)
    assert "layer_norm.chain" in compiled.report.composites
    inputs = {"x": array((2, 10, 6, 6))}
    ours = Session(compiled.manifest, opencl_device).run(inputs)[0]
    np.testing.assert_allclose(ours, Reference(mod).run(inputs)[0], atol=1e-5)


@pytest.mark.opencl
def test_a_large_mean_does_not_swallow_the_variance(opencl_device: Device) -> None:
    """What is squared are differences: 1e3 and numbers of 1 would leave nothing of a difference of squares."""

    def build(emit: Any, x: Any) -> Any:
        eye = np.eye(8, dtype="float32").reshape(8, 8, 1, 1)
        same = emit(nn.conv2d(x, relax.const(eye)))
        out = emit(nn.layer_norm(same, const((8,), 2), const((8,), 3), axes=[1]))
        return emit(nn.conv2d(out, relax.const(eye)))

    mod = graph(build, [var("x", (1, 8, 4, 4))])
    compiled = compile_module(mod)
    assert "layer_norm.chain" in compiled.report.composites
    inputs = {"x": array((1, 8, 4, 4)) + np.float32(1000)}
    x = inputs["x"].astype("float64")
    gamma, beta = (array((8,), seed).astype("float64").reshape(1, 8, 1, 1) for seed in (2, 3))
    exact = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * gamma + beta
    ours = Session(compiled.manifest, opencl_device).run(inputs)[0]
    np.testing.assert_allclose(ours, exact, atol=5e-4)  # float32 has 6e-5 between two numbers near 1000


def test_float16_sums_in_float32() -> None:
    compiled = compile_module(normed(8, "float16"))
    (source,) = [text for name, text in compiled.kernels.items() if "layer_norm" in name]
    assert "half" in source
    assert "float norm_sum" in source or "__local float" in source


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ((1, 2), "axes of `lv1` (nn.layer_norm) is [1, 2], not [1] or [-3]"),
        ((-1,), "axes of `lv1` (nn.layer_norm) is [-1], not [1] or [-3]"),
    ],
)
def test_a_norm_of_other_axes_is_declined(axes: tuple[int, ...], reason: str) -> None:
    report = compile_module(normed(6, axes=axes)).report
    assert "layer_norm.chain" not in report.composites
    reasons = [declined.reason for declined in report.declined if declined.row == "layer_norm.chain"]
    assert reasons == [reason]


def test_a_convolution_that_others_read_is_not_joined_with_its_norm() -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(nn.conv2d(x, const((8, 1, 3, 3), 1), padding=[1, 1], groups=8))
        out = emit(nn.layer_norm(value, const((8,), 2), const((8,), 3), axes=[1]))
        return [emit(nn.conv2d(each, const((4, 8, 1, 1), 4))) for each in (value, out)]

    report = compile_module(graph(build, [var("x", (1, 8, 6, 6))])).report
    assert "layer_norm.depthwise" not in report.composites
    assert "layer_norm.chain" in report.composites
