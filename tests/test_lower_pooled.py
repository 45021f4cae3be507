"""Convolutions whose image is averaged in the same kernel: long sums, every tile, near misses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from modules import array, const, graph, var
from tvm.relax import op
from tvm.relax.op import nn

from fusion_patterns import compile_module, load_table
from fusion_patterns.lower.schedule.tiles import TEXEL_BYTES, Work, choose_pooled
from fusion_patterns.match import plan_fusion
from fusion_patterns.place.profiles import Tiles, load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

PROFILES = ("adreno", "nvidia-opencl", "pocl")
ROW = "conv2d.pooled"


def conv(emit: Any, x: Any, channels: int, size: int = 3, **attrs: Any) -> Any:
    """A convolution that keeps the image's size, and a bias."""
    inputs = int(x.ty.shape.values[1])
    pad = [size // 2, size // 2]
    attrs = {"padding": pad, **attrs}
    value = emit(nn.conv2d(x, const((channels, inputs, size, size), 1), **attrs))
    return emit(op.add(value, const((1, channels, 1, 1), 2)))


def mean(emit: Any, value: Any) -> Any:
    return emit(op.mean(value, [2, 3], keepdims=True))


def mish(emit: Any, value: Any) -> Any:
    return emit(op.multiply(value, emit(op.tanh(emit(nn.softplus(value))))))


Build = Callable[..., Any]
MODULES: dict[str, tuple[Build, tuple[int, ...]]] = {
    "3x3, relu": (lambda e, x: mean(e, e(nn.relu(conv(e, x, 16)))), (1, 16, 7, 7)),
    "3x3, leaky relu and residual": (
        lambda e, x: mean(e, e(op.add(e(nn.leakyrelu(conv(e, x, 24), 0.1)), x))),
        (2, 24, 7, 7),
    ),
    "residual and relu, odd channels": (
        lambda e, x: mean(e, e(nn.relu(e(op.add(conv(e, x, 14), x))))),
        (1, 14, 5, 3),
    ),
    "5x5, stride": (
        lambda e, x: mean(e, e(nn.relu(conv(e, x, 20, 5, strides=[2, 2])))),
        (3, 6, 15, 16),
    ),
    "1x1, a long sum": (lambda e, x: mean(e, e(nn.silu(conv(e, x, 8, 1)))), (1, 512, 4, 4)),
    "dilated, even tiles, mish": (
        lambda e, x: mean(e, mish(e, conv(e, x, 32, padding=[2, 2], dilation=[2, 2]))),
        (1, 64, 8, 8),
    ),
    "lanes that no vector has": (lambda e, x: mean(e, e(nn.gelu(conv(e, x, 16)))), (1, 16, 7, 7)),
    "one column": (lambda e, x: mean(e, e(nn.relu(conv(e, x, 16)))), (1, 32, 9, 1)),
    "four pixels": (lambda e, x: mean(e, e(nn.relu(conv(e, x, 64)))), (1, 32, 2, 2)),
}


@pytest.mark.opencl
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MODULES)
def test_an_image_is_averaged_where_it_is_convolved(opencl_device: Device, name: str, profile: str) -> None:
    build, shape = MODULES[name]
    mod = graph(build, [var("x", shape)])
    compiled = compile_module(mod, profile=profile)
    assert compiled.report.composites == {ROW: 1}, compiled.report.declined
    data = array(shape, 9)
    (result,) = Session(compiled.manifest, opencl_device).run([data])
    (wanted,) = Reference(mod).run({"x": data})
    assert result.shape == wanted.shape
    assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert wanted.std() > 0


def kernel_of(build: Build, shape: tuple[int, ...], profile: Any) -> str:
    """The OpenCL C of the one kernel of the row."""
    manifest = compile_module(graph(build, [var("x", shape)]), profile=profile).manifest
    (launch,) = [step for step in manifest.functions["main"].body if getattr(step, "label", "") == ROW]
    source = manifest.kernels[launch.kernel].source
    return source[source.rindex("__kernel") :]


def local_bytes(source: str) -> int:
    """Bytes of local memory that a kernel declares."""
    arrays = re.findall(r"__local float(4?) \w+\[(\d+)\]", source)
    return sum(4 * int(count) * (4 if vector else 1) for vector, count in arrays)


@pytest.mark.parametrize("profile", ["adreno", "nvidia-opencl"])
@pytest.mark.parametrize("name", MODULES)
def test_what_a_group_shares_fits_into_local_memory(name: str, profile: str) -> None:
    build, shape = MODULES[name]
    assert 0 < local_bytes(kernel_of(build, shape, profile)) <= load_profile(profile).tiles.local_bytes


def test_a_long_sum_is_split_over_the_threads_of_a_group() -> None:
    def build(emit: Any, x: Any) -> Any:
        return mean(emit, emit(nn.relu(conv(emit, x, 64))))

    whole = kernel_of(build, (1, 256, 7, 7), "generic")
    split = kernel_of(build, (1, 256, 7, 7), "adreno")
    assert "< 64;" in whole
    assert "< 16;" in split
    assert "< 64;" not in split


# How the work is cut ----------------------------------------------------------------------------------------

SPLITTING = Tiles(threads=65536, group=128, split=32)
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 600), st.integers(1, 8), st.integers(1, 8), st.just(4))


@given(SHAPES, st.sampled_from([1, 2, 12, 64]), st.sampled_from([64, 256, 1024]))
def test_a_group_holds_whole_images_and_all_shares(
    shape: tuple[int, ...], shares: int, max_threads: int
) -> None:
    tile = choose_pooled(Work(shape), max_threads, SPLITTING, shares=shares)
    _, blocks, rows, columns, _ = shape
    assert tile.extents[1:] == (rows, columns)
    assert blocks % tile.extents[0] == 0
    assert shares % tile.split == 0
    assert tile.extents[0] <= tile.threads <= max_threads
    if tile.split > 1:
        assert (tile.split + 1) * tile.extents[0] * rows * columns * TEXEL_BYTES <= SPLITTING.local_bytes


def test_a_thread_has_a_row_of_pixels_where_shares_keep_the_device_busy() -> None:
    work = Work((1, 512, 7, 7, 4))
    assert choose_pooled(work, 256, load_profile("nvidia-opencl").tiles, shares=128).columns == 7
    assert choose_pooled(work, 256, Tiles(threads=8192), shares=128).columns == 1


def test_an_image_that_no_group_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="an image of 49 pixels is more than a group of 4 threads can hold"):
        choose_pooled(Work((1, 8, 7, 7, 4)), 4)


# Near misses ------------------------------------------------------------------------------------------------


def reason(build: Build, shape: tuple[int, ...]) -> str:
    """Why the row, alone in its table, did not take the convolution."""
    table = load_table()
    rows = tuple(row for row in table.patterns if row.name == ROW)
    plan = plan_fusion(graph(build, [var("x", shape)]), table.model_copy(update={"patterns": rows}))
    assert not plan.matches
    return " / ".join(declined.reason for declined in plan.declined())


def test_a_large_image_is_averaged_by_a_kernel_of_its_own() -> None:
    assert "conv.H * conv.W <= 64" in reason(lambda e, x: mean(e, e(nn.relu(conv(e, x, 8)))), (1, 8, 9, 8))


def test_pixels_that_others_read_are_written() -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(nn.relu(conv(emit, x, 8)))
        return [mean(emit, value), conv(emit, value, 8)]

    assert "is also used by" in reason(build, (1, 8, 7, 7))


def test_a_grouped_convolution_is_averaged_by_a_kernel_of_its_own() -> None:
    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.conv2d(x, const((8, 2, 3, 3), 1), padding=[1, 1], groups=4))
        return mean(emit, emit(nn.relu(value)))

    assert "groups" in reason(build, (1, 8, 7, 7))
