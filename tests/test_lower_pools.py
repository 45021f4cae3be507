"""Pooling kernels: windows of unequal size, whole images, float16, and how a large image is shared."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from modules import array, const, graph, nn, var
from tvm import te
from tvm.relax import op

from fusion_patterns import compile_module
from fusion_patterns.compiler import as_target
from fusion_patterns.lower.compute.packed import LANES, Packed, blocks
from fusion_patterns.lower.compute.pooling import adaptive_pool, global_pool, pool2d
from fusion_patterns.lower.kernels import lower_kernels
from fusion_patterns.lower.schedule import schedule_packed
from fusion_patterns.place.layouts import DATA, layout
from fusion_patterns.place.profiles import load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

Array = np.ndarray[Any, Any]


def placeholder(shape: tuple[int, ...], dtype: str) -> Packed:
    n, c, h, w = shape
    return Packed(te.placeholder((n, blocks(c), h, w, LANES), dtype, "data"), DATA, shape)


def on_cpu(data: Packed, result: Any, values: Array) -> Array:
    """A pool of ``values`` (N, C, H, W), computed by LLVM: (N, C, H', W')."""
    built = tvm.compile(tvm.IRModule({"main": te.create_prim_func([data.tensor, result])}), target="llvm")
    out = tvm.runtime.tensor(np.zeros([int(d) for d in result.shape], str(result.dtype)))
    built["main"](tvm.runtime.tensor(layout(DATA).pack(values)), out)
    n, _, h, w, _ = result.shape
    return (
        np.asarray(out.numpy())
        .transpose(0, 1, 4, 2, 3)
        .reshape(int(n), -1, int(h), int(w))[:, : values.shape[1]]
    )


def windows(length: int, count: int) -> list[slice]:
    return [slice(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


@pytest.mark.parametrize("size", [(3, 3), (5, 2), (7, 4), (9, 11), (1, 4), (1, 1)])
def test_adaptive_windows_begin_rounded_down_and_end_rounded_up(size: tuple[int, int]) -> None:
    values = array((2, 5, 7, 9))
    data = placeholder(values.shape, "float32")
    wanted = np.stack(
        [
            np.stack([values[:, :, y, x].mean((2, 3)) for x in windows(9, size[1])], -1)
            for y in windows(7, size[0])
        ],
        -2,
    )
    result = on_cpu(data, adaptive_pool(data, size), values)
    assert result.shape == (2, 5, *size)
    np.testing.assert_allclose(result, wanted, atol=1e-6)


def test_what_stands_outside_of_a_window_is_not_read_into_it() -> None:
    values = array((1, 4, 3, 5))
    values[:, :, :, 2] = np.inf
    data = placeholder(values.shape, "float32")
    result = on_cpu(data, adaptive_pool(data, (1, 4)), values)
    assert [bool(np.isfinite(result[..., x]).all()) for x in range(4)] == [True, False, False, True]


def attrs(size: tuple[int, int], **other: Any) -> Any:
    usual = {"strides": (1, 1), "dilation": (1, 1), "padding": (0, 0, 0, 0), "count_include_pad": False}
    return SimpleNamespace(pool_size=size, **{**usual, **other})


@pytest.mark.parametrize("kind", ["global", "adaptive", "windows"])
def test_float16_is_summed_in_float32(kind: str) -> None:
    # 4096 ones and 4096 threes: float16 alone would stop counting at 2048
    values = np.ones((1, 4, 64, 128), "float16")
    values[:, :, 32:] = 3
    data = placeholder(values.shape, "float16")
    results = {
        "global": lambda: global_pool(data),
        "adaptive": lambda: adaptive_pool(data, (1, 3)),
        "windows": lambda: pool2d(data, attrs((64, 120)), (1, 9), "avg"),
    }
    result = results[kind]()
    assert result.dtype == "float16"
    assert (on_cpu(data, result, values) == 2).all()


def blocks_of(data: Packed, result: Any) -> list[str]:
    return re.findall(r'sblock\("(\w+)"\)', te.create_prim_func([data.tensor, result]).script())


def test_a_window_over_the_whole_image_is_a_global_pool() -> None:
    data = placeholder((1, 8, 7, 7), "float32")
    assert "global_pool" in blocks_of(data, pool2d(data, attrs((7, 7)), (1, 1), "avg"))
    padded = attrs((7, 7), padding=(1, 1, 1, 1))
    assert "pool2d_avg" in blocks_of(data, pool2d(data, padded, (3, 3), "avg"))
    assert "pool2d_max" in blocks_of(data, pool2d(data, attrs((7, 7)), (1, 1), "max"))


@pytest.mark.parametrize(
    ("pool", "size", "edge"),
    [
        ({"padding": (1, 1, 1, 1)}, (7, 9), True),
        ({"padding": (0, 2, 2, 0)}, (7, 9), True),
        ({"padding": (1, 1, 1, 1), "strides": (2, 2)}, (4, 5), True),
        ({"strides": (2, 2)}, (4, 5), True),  # rounded up
        ({"padding": (1, 1, 1, 1), "dilation": (2, 2)}, (5, 7), False),  # the edge may be between two taps
        ({"padding": (3, 3, 3, 3)}, (11, 13), False),  # a window that meets no pixel
    ],
)
def test_a_maximum_repeats_the_edge_where_that_changes_nothing(
    pool: dict[str, Any], size: tuple[int, int], edge: bool
) -> None:
    values = array((1, 4, 7, 9), 3) - 10  # nothing as great as zero
    data, its = placeholder(values.shape, "float32"), attrs((3, 3), **pool)
    result = pool2d(data, its, size, "max")
    script = te.create_prim_func([data.tensor, result]).script()
    assert ("if_then_else" not in script) == edge
    least = np.finfo("float32").min
    top, left, *_ = its.padding
    wide = np.full((1, 4, 40, 40), least, "float32")
    wide[:, :, top : top + 7, left : left + 9] = values
    (sy, sx), (dy, dx) = its.strides, its.dilation
    wanted = [
        [
            wide[:, :, y * sy : y * sy + 2 * dy + 1 : dy, x * sx : x * sx + 2 * dx + 1 : dx].max((2, 3))
            for x in range(size[1])
        ]
        for y in range(size[0])
    ]
    np.testing.assert_array_equal(on_cpu(data, result, values), np.moveaxis(np.array(wanted), (0, 1), (2, 3)))


def kernel_of(shape: tuple[int, ...], profile: str) -> tuple[str, Any]:
    """The OpenCL C of a global pool of ``shape``, and its launch."""
    data = placeholder(shape, "float32")
    func = te.create_prim_func([data.tensor, global_pool(data)])
    sch = schedule_packed(func, 256, tiles=load_profile(profile).tiles)
    kernels, faults = lower_kernels({"pool": sch.mod["main"]}, as_target())
    assert not faults
    (launch,) = kernels["pool"].launches
    return launch.source[launch.source.rindex("__kernel") :], launch


def test_a_large_image_is_shared_by_a_group_and_added_up_in_two_steps() -> None:
    source, launch = kernel_of((1, 24, 80, 80), "nvidia-opencl")
    assert launch.block[0] == 800
    arrays = [int(size) for size in re.findall(r"__local float4 \w+\[(\d+)\]", source)]
    assert arrays == [800, 32, 1], "all shares, a few sums of them, the result"
    first, second = (
        len(re.findall(rf"\+ global_pool_rf_shared_ptr{which}\[", source)) for which in ("", "_1")
    )
    assert (first, second) == (25, 32), "one thread adds up all shares"
    assert "for (" not in source, "reads of local memory wait for each other"


@pytest.mark.parametrize(
    ("size", "threads", "reads"), [(160, 1024, 5), (80, 800, 8), (40, 400, 4), (20, 100, 4), (13, 13, 13)]
)
def test_a_large_group_sums_few_numbers_in_each_thread(size: int, threads: int, reads: int) -> None:
    source, launch = kernel_of((1, 24, size, size), "nvidia-opencl")
    assert launch.block[0] == threads
    assert source.count("((__global float4*)data_ptr)[") == reads


@pytest.mark.parametrize(("size", "reads"), [(160, 10), (80, 5), (40, 5), (13, 13)])
def test_reads_of_a_long_sum_do_not_wait_for_each_other(size: int, reads: int) -> None:
    source, launch = kernel_of((1, 24, size, size), "adreno")
    assert source.count("read_imagef(data") + source.count("vload4") + source.count("data_ptr)[") == reads, (
        source
    )
    assert size * size % (reads * launch.block[0]) == 0


def test_neighbouring_threads_read_neighbouring_pixels() -> None:
    source, _ = kernel_of((1, 24, 40, 40), "nvidia-opencl")
    address, *_ = re.findall(r"\(\(__global float4\*\)data_ptr\)\[(.+)\];", source)
    assert address.endswith("+ (convert_int(get_local_id(0))))")


def test_images_that_keep_the_device_busy_are_not_shared() -> None:
    _, launch = kernel_of((64, 2048, 7, 7), "adreno")
    assert launch.block[0] == 1
    source, launch = kernel_of((1, 24, 7, 7), "pocl")
    assert launch.block[0] == 1
    assert "; ax5 < 7" in source


@pytest.mark.opencl
@pytest.mark.parametrize("profile", ["nvidia-opencl", "adreno", "pocl"])
@pytest.mark.parametrize("shape", [(1, 8, 40, 40), (2, 7, 13, 13), (1, 130, 7, 7)])
def test_pools_in_every_profile(opencl_device: Device, profile: str, shape: tuple[int, ...]) -> None:
    channels = shape[1]

    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(nn.conv2d(x, const((channels, channels, 1, 1), 1, scale=channels**-0.5)))
        gate = emit(op.sigmoid(emit(op.mean(value, axis=[2, 3], keepdims=True))))
        small = emit(nn.adaptive_avg_pool2d(value, [5, 3]))
        weight = const((4, channels, 1, 1), 2, scale=channels**-0.5)
        return [emit(nn.conv2d(small, weight)), emit(nn.conv2d(emit(op.multiply(value, gate)), weight))]

    mod = graph(build, [var("x", shape)])
    compiled = compile_module(mod, profile=profile)
    assert {"global_pool.mean", "pool2d.adaptive"} <= set(compiled.report.composites)
    data = array(shape, 3)
    results = Session(compiled.manifest, opencl_device).run([data])
    for result, wanted in zip(results, Reference(mod).run({"x": data}), strict=True):
        assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()
