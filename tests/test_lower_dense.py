"""Dense layers and other sums with few results: their layout, their kernels on several profiles, float16."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from modules import Calls, array, const, graph, nn, var
from tvm import relax, te
from tvm.relax import op

from fusion_patterns import compile_module
from fusion_patterns.lower.compute.dense import dense
from fusion_patterns.lower.compute.packed import Packed, blocks
from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.layouts import DATA, DENSE, PLAIN, layout
from fusion_patterns.place.needs import needs_of
from fusion_patterns.place.profiles import Tiles, load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session

PROFILES = ("nvidia-opencl", "adreno", "pocl")


def composite(build: Callable[..., Any], *params: Any) -> Any:
    return Calls().composite(build, list(params)).func


def layer(emit: Any, x: Any, outputs: int, seed: int = 0) -> Any:
    inputs = int(x.ty.shape.values[1])
    value = emit(op.matmul(x, const((inputs, outputs), seed, scale=inputs**-0.5)))
    return emit(op.add(value, const((outputs,), seed + 1)))


def hardswish(emit: Any, value: Any) -> Any:
    cut = emit(op.clip(emit(op.add(value, relax.const(3.0, "float32"))), 0, 6))
    return emit(op.divide(emit(op.multiply(value, cut)), relax.const(6.0, "float32")))


def pixel(emit: Any, x: Any, outputs: int, seed: int = 0) -> Any:
    inputs = int(x.ty.shape.values[1])
    value = emit(nn.conv2d(x, const((outputs, inputs, 1, 1), seed, scale=inputs**-0.5)))
    return emit(op.add(value, const((1, outputs, 1, 1), seed + 1)))


def excited(emit: Any, x: Any, hidden: int) -> Any:
    inner = emit(nn.relu(pixel(emit, x, hidden)))
    return emit(op.sigmoid(pixel(emit, inner, int(x.ty.shape.values[1]), 2)))


def tail(emit: Any, x: Any, outputs: int) -> list[Any]:
    """A dense layer on the mean of a convolution's result, which another convolution reads too."""
    channels = int(x.ty.shape.values[1])
    value = emit(nn.relu(pixel(emit, x, channels, 4)))
    return [layer(emit, emit(op.mean(value, axis=[2, 3])), outputs), pixel(emit, value, 4, 6)]


MODULES: dict[str, tuple[str, Callable[..., Any], tuple[int, ...]]] = {
    "a layer": ("dense.chain", lambda e, x: e(nn.relu(layer(e, x, 24))), (1, 512)),
    "three rows, odd sizes": ("dense.chain", lambda e, x: e(nn.silu(layer(e, x, 37))), (3, 77)),
    "sixteen rows, two results": ("dense.chain", lambda e, x: layer(e, x, 2), (16, 64)),
    "hardswish, which reads its value twice": (
        "dense.chain",
        lambda e, x: hardswish(e, layer(e, x, 1280)),
        (1, 60),
    ),
    "squeeze and excitation": ("conv2d.excite", lambda e, x: excited(e, x, 24), (1, 96, 1, 1)),
    "two of them, odd sizes": ("conv2d.excite", lambda e, x: excited(e, x, 5), (2, 13, 1, 1)),
    "a mean and a layer": ("dense.pooled", lambda e, x: tail(e, x, 10), (1, 64, 7, 7)),
    "two of them, nine channels": ("dense.pooled", lambda e, x: tail(e, x, 101), (2, 9, 5, 3)),
}


@pytest.mark.opencl
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MODULES)
def test_a_kernel_with_few_results(opencl_device: Device, name: str, profile: str) -> None:
    row, build, shape = MODULES[name]
    mod = graph(build, [var("x", shape)])
    compiled = compile_module(mod, profile=profile)
    assert compiled.report.composites.get(row) == 1, compiled.report.declined
    data = array(shape, 9)
    results = Session(compiled.manifest, opencl_device).run([data])
    for result, wanted in zip(results, Reference(mod).run({"x": data}), strict=True):
        assert result.shape == wanted.shape
        assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()
        assert wanted.std() > 0


def kernel_of(build: Callable[..., Any], shape: tuple[int, ...], row: str, profile: Any) -> str:
    """The OpenCL C of the one kernel of a row."""
    manifest = compile_module(graph(build, [var("x", shape)]), profile=profile).manifest
    (launch,) = [step for step in manifest.functions["main"].body if getattr(step, "label", "") == row]
    source = manifest.kernels[launch.kernel].source
    return source[source.rindex("__kernel") :]


def test_no_thread_computes_what_another_one_does() -> None:
    """Threads that a stage does not need are idle: they must not make TVM think that it reads more."""
    source = kernel_of(lambda e, x: excited(e, x, 32), (1, 128, 1, 1), "conv2d.excite", "nvidia-opencl")
    arrays = [int(n) for n in re.findall(r"__local float4? \w+\[(\d+)\]", source)]
    assert arrays
    assert max(arrays) <= 1024
    assert all(int(n) == 1 for n in re.findall(r"  float4 conv2d\w+\[(\d+)\]", source))


def test_where_sums_may_be_split_they_are_added_up_in_local_memory_in_two_steps() -> None:
    source = kernel_of(lambda e, x: layer(e, x, 8), (1, 1024), "dense.chain", "nvidia-opencl")
    assert "__local" in source
    assert "barrier(" in source
    arrays = [int(n) for n in re.findall(r"__local float4? \w+\[(\d+)\]", source)]
    assert max(arrays) > 16 >= min(n for n in arrays if n > 2), arrays
    assert "for (" not in source[source.index("barrier(") :], (
        "no thread adds up many shares one after the other"
    )
    alone = kernel_of(lambda e, x: layer(e, x, 8), (1, 1024), "dense.chain", "pocl")
    assert "< 1024" in alone


def test_every_access_to_weights_is_a_vector() -> None:
    source = kernel_of(lambda e, x: layer(e, x, 8), (1, 64), "dense.chain", "adreno")
    assert "((__global float4*)weight_ptr)[" in source
    assert "weight_ptr[" not in source


def test_vectors_that_do_not_fit_into_local_memory_are_left_to_other_kernels() -> None:
    small = load_profile("nvidia-opencl").model_copy(
        update={"tiles": Tiles(threads=4096, group=64, split=8, local_bytes=2048)}
    )
    mod = graph(lambda e, x: tail(e, x, 10), [var("x", (1, 512, 4, 4))])
    report = compile_module(mod, profile=small).report
    assert "dense.pooled" not in report.composites
    reasons = [one.reason for one in report.declined if one.row == "dense.pooled"]
    assert any(
        re.fullmatch(r"its vectors take \d+ bytes of local memory, the profile allows 2048", r)
        for r in reasons
    )


# The packed weight ----------------------------------------------------------------------------------------


def test_a_packed_weight_has_its_outputs_in_front() -> None:
    kind = layout(DENSE)
    assert kind.axes == "IO"
    assert kind.packed_shape((6, 9)) == (3, 6, 4)
    assert kind.padded_shape((6, 9)) == (6, 12)
    assert kind.to_packed(5, 6) == (1, 5, 2)
    assert not kind.is_view((1, 4))


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_weight_is_packed_without_loss(inputs: int, outputs: int) -> None:
    kind, weight = layout(DENSE), array((inputs, outputs))
    packed = kind.pack(weight)
    assert packed.shape == kind.packed_shape(weight.shape)
    for i in range(inputs):
        for o in range(outputs):
            assert packed[kind.to_packed(i, o)] == weight[i, o]
            assert kind.to_source(*kind.to_packed(i, o)) == (i, o)
    assert np.count_nonzero(packed) == np.count_nonzero(weight)


# Needs ----------------------------------------------------------------------------------------------------


def test_a_layer_needs_its_weight_packed_and_writes_rows_as_they_are() -> None:
    found = needs_of(
        composite(
            lambda e, x, w, b: e(op.add(e(op.matmul(x, w)), b)),
            var("x", (2, 8)),
            var("w", (8, 5)),
            var("b", (5,)),
        )
    )
    assert {operand.name: operand.layout for operand in found.operands} == {
        "x": PLAIN,
        "w": DENSE,
        "b": PLAIN,
    }
    assert (found.output_layout, found.output_shape) == (PLAIN, (2, 5))


def test_a_mean_in_front_of_a_layer_is_packed() -> None:
    found = needs_of(
        composite(
            lambda e, x, w: e(op.matmul(e(op.mean(x, axis=[2, 3])), w)),
            var("x", (1, 8, 3, 3)),
            var("w", (8, 5)),
        )
    )
    assert {operand.name: operand.layout for operand in found.operands} == {"x": DATA, "w": DENSE}


REFUSALS: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "integers": (
        lambda e, x, w: e(op.matmul(x, w)),
        [var("x", (2, 8), "int32"), var("w", (8, 5), "int32")],
        "matmul on int32 has no packed kernel",
    ),
    "a batch of matrices": (
        lambda e, x, w: e(op.reshape(e(op.matmul(x, w)), (2, 5))),
        [var("x", (2, 1, 8)), var("w", (8, 5))],
        "`lv0` is not a tensor of four static dimensions",
    ),
    "a layer on a layer": (
        lambda e, x, w, v: e(op.matmul(e(op.matmul(x, w)), v)),
        [var("x", (2, 8)), var("w", (8, 5)), var("v", (5, 5))],
        "`out` multiplies what the composite's own dense layer computes",
    ),
    "rows without a layer": (
        lambda e, x: e(op.mean(x, axis=[2, 3])),
        [var("x", (2, 8, 3, 3))],
        "rows that no dense layer computed have no packed kernel",
    ),
    "a mean over channels": (
        lambda e, x, w: e(op.matmul(e(op.mean(x, axis=[1, 2])), w)),
        [var("x", (2, 8, 3, 3)), var("w", (3, 5))],
        "only pooling of the whole image has a packed kernel",
    ),
    "softmax": (
        lambda e, x, w: e(nn.softmax(e(op.matmul(x, w)))),
        [var("x", (2, 8)), var("w", (8, 5))],
        "no packed kernel for relax.nn.softmax on rows",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_rows_that_have_no_kernel(name: str) -> None:
    build, params, reason = REFUSALS[name]
    with pytest.raises(NotPacked, match=f"^{re.escape(reason)}$"):
        needs_of(composite(build, *params))


# float16 --------------------------------------------------------------------------------------------------


def on_cpu(result: Any, *inputs: tuple[Any, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """A TE tensor of float16 computed on the CPU."""
    func = te.create_prim_func([*(tensor for tensor, _ in inputs), result])
    built = tvm.compile(tvm.IRModule({"main": func}), target="llvm")
    out = tvm.runtime.tensor(np.zeros([int(d) for d in result.shape], "float16"))
    built["main"](*(tvm.runtime.tensor(values) for _, values in inputs), out)
    return np.asarray(out.numpy())


def test_float16_is_summed_in_float32() -> None:
    # 4096 ones: float16 alone would stay at 2048
    x, weight = np.ones((1, 4096), "float16"), np.full((4096, 4), 0.25, "float16")
    data = te.placeholder(x.shape, "float16", "x")
    packed = te.placeholder((blocks(4), 4096, 4), "float16", "w")
    product = dense(Packed(data, PLAIN, (1, 4096)), Packed(packed, DENSE, (4096, 4)), "float16")
    assert product.dtype == "float16"
    assert (on_cpu(product, (data, x), (packed, layout(DENSE).pack(weight))) == 1024).all()


def test_a_float16_layer_reads_float16_and_sums_float32() -> None:
    mod = graph(
        lambda e, x: e(op.matmul(x, relax.const(array((64, 8), 1, "float16"), "float16"))),
        [var("x", (1, 64), "float16")],
    )
    manifest = compile_module(mod, profile="nvidia-opencl").manifest
    (kernel,) = manifest.kernels.values()
    assert re.search(r"float4 dense_\w*local_ptr", kernel.source)
    assert re.search(r"half\* restrict weight_ptr", kernel.source)
