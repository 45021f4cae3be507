"""A fused and scheduled module -> a manifest, and what is not scheduled by our rule."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from modules import const, draw, graph, nn, relative_error, texture_target, var
from tvm import relax, tirx
from tvm.relax import op

from fusion_patterns import compile_module, verify
from fusion_patterns.errors import BuildError
from fusion_patterns.lower.kernels import lower_kernels
from fusion_patterns.lower.stages import call_site_fault, calls_of, fuse, lower
from fusion_patterns.run import Device
from fusion_patterns.run import manifest as m
from fusion_patterns.run.replay import draw_inputs

# What a manifest holds --------------------------------------------------------------------------------------


def steps(mod: tvm.IRModule, function: str = "main") -> list[m.Step]:
    return list(m.all_steps(compile_module(mod).manifest.functions[function].body))


def kinds(mod: tvm.IRModule) -> list[str]:
    return [type(step).__name__ for step in steps(mod)]


def test_a_kernel_is_an_allocation_and_a_launch() -> None:
    mod = graph(lambda emit, x: emit(op.exp(x)), [var("x", (4, 5))])
    alloc, launch = steps(mod)
    assert isinstance(alloc, m.Alloc)
    assert isinstance(launch, m.Launch)
    assert alloc.tensor == m.Tensor((4, 5), "float32", "global")
    assert set(launch.args) == {"x", alloc.value}


def test_a_reshape_is_a_view_without_a_kernel() -> None:
    mod = graph(lambda emit, x: emit(nn.softmax(emit(op.reshape(x, (2, 10))))), [var("x", (4, 5))])
    assert kinds(mod) == ["View", "Alloc", "Launch"]


@pytest.mark.opencl
@pytest.mark.parametrize(("axis", "end"), [(0, 3), (1, 4)])
def test_a_slice_of_the_front_is_no_view(opencl_device: Device, axis: int, end: int) -> None:
    """TVM's has_reshape_pattern says yes to a slice that keeps the front of a tensor."""
    shape = (6, 9) if axis == 0 else (1, 6, 9, 5)
    mod = graph(
        lambda emit, x: emit(op.strided_slice(x, axes=[axis], begin=[0], end=[end])), [var("x", shape)]
    )
    func = next(
        f for f in relax.transform.LegalizeOps()(mod).functions.values() if isinstance(f, tirx.PrimFunc)
    )
    assert relax.analysis.has_reshape_pattern(func)
    assert verify(mod, device=opencl_device.info.index).ok
    assert "View" not in kinds(mod)


def test_a_constant_is_kept_once() -> None:
    number = const((4, 4), 1)
    mod = graph(lambda emit, x: [emit(op.add(x, number)), emit(op.multiply(x, number))], [var("x", (4, 4))])
    constants = compile_module(mod).manifest.constants
    assert len(constants) == 1
    assert np.array_equal(next(iter(constants.values())), number.value.numpy())


def test_kernels_that_are_equal_are_built_once() -> None:
    def build(emit: Any, x: Any) -> Any:
        for _ in range(3):
            x = emit(nn.softmax(emit(op.sum(x, axis=[1], keepdims=True)), axis=0))
        return x

    compiled = compile_module(graph(build, [var("x", (4, 1))]))
    launches = [s for s in m.all_steps(compiled.manifest.functions["main"].body) if isinstance(s, m.Launch)]
    assert len(compiled.kernels) < len(launches)


@pytest.mark.opencl
def test_names_that_opencl_c_does_not_know(opencl_device: Device) -> None:
    mod = graph(lambda emit, x, y: emit(op.add(x, y)), [var("gpu_0/data:0", (4, 5)), var("int", (4, 5))])
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok
    assert [p.name for p in report.compiled.manifest.functions["main"].params] == ["gpu_0/data:0", "int"]


@pytest.mark.opencl
def test_parameters_of_one_name(opencl_device: Device) -> None:
    mod = graph(lambda emit, x, y: emit(op.subtract(x, y)), [var("x", (4, 5)), var("x", (4, 5))])
    compiled = compile_module(mod)
    entry = compiled.manifest.functions["main"]
    assert len({param.name for param in entry.params}) == 2
    a, b = draw_inputs(entry, 0, {}).values()
    (result,) = compiled.run([a, b], opencl_device.info.index)
    assert np.array_equal(result, a - b)


@pytest.mark.opencl
@pytest.mark.parametrize("n", [1, 3, 64])
def test_a_symbolic_extent_is_computed_at_run_time(opencl_device: Device, n: int) -> None:
    size = tirx.Var("n", "int64")

    def build(emit: Any, x: Any) -> Any:
        return emit(nn.softmax(emit(op.concat([emit(op.exp(x)), x], axis=0)), axis=1))

    mod = graph(build, [relax.Var("x", relax.TensorType((size, 5), "float32"))])
    report = verify(mod, device=opencl_device.info.index, symbols={"n": n})
    assert report.ok
    assert report.outputs[0].error < 1e-5


@pytest.mark.opencl
def test_the_result_is_a_parameter_or_a_constant(opencl_device: Device) -> None:
    number = const((2, 3), 1)
    mod = graph(lambda emit, x: [x, number, emit(op.exp(x))], [var("x", (2, 3))])
    inputs = draw(mod)
    results = compile_module(mod).run(inputs, opencl_device.info.index)
    assert np.array_equal(results[0], inputs["x"])
    assert np.array_equal(results[1], number.value.numpy())
    assert relative_error(results[2], np.exp(inputs["x"])) < 1e-6


def test_what_a_manifest_can_not_run_is_named() -> None:
    def packed(emit: Any, x: Any) -> Any:
        return emit(relax.call_pure_packed("my.function", x, ty_args=x.ty))

    with pytest.raises(BuildError) as refusal:
        compile_module(graph(packed, [var("x", (4, 5))]))
    assert re.fullmatch(
        r"`\w+` in function `main`: relax.call_pure_packed is not something that a manifest can run; "
        r"run this module through TVM's own VM with fusion_patterns.pipeline\(\)",
        str(refusal.value),
    )


# Checks before a kernel is built ----------------------------------------------------------------------------


def prim_func(bind: bool) -> Any:
    x = var("x", (64,))
    mod = relax.transform.LegalizeOps()(graph(lambda emit, x: emit(op.exp(x)), [x]))
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    sch = tvm.s_tir.Schedule(func)
    if bind:
        (loop,) = sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])
        sch.bind(loop, "threadIdx.x")
    return sch.mod["main"]


def test_a_loop_that_no_thread_takes_never_becomes_host_code() -> None:
    done, faults = lower_kernels({"good": prim_func(True), "bad": prim_func(False)}, texture_target())
    assert list(done) == ["good"]
    assert list(faults) == ["bad"]
    assert faults["bad"].endswith("a loop is bound to no thread")


def test_a_call_that_passes_another_scope_is_a_fault() -> None:
    from modules import build, conv_chain

    fused = build(conv_chain(1)).fused
    call = next(c for c in calls_of(fused) if str(c.args[0].name_hint) == "fused_0")
    func = fused["fused_0"]
    assert call_site_fault([call], func) is None
    data = func.params[0]
    plain = func.specialize({data: tirx.decl_buffer(data.ty.shape, data.ty.dtype, "data")})
    assert call_site_fault([call], plain) == "parameter `data` is in global, its call passes global.texture"


def test_a_kernel_with_faults_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from modules import conv_chain

    from fusion_patterns.lower import kernels
    from fusion_patterns.place import place

    target = texture_target()
    placed, _ = place(conv_chain(1), target)
    with target:
        fused = fuse(placed)
    stock = kernels._codegen

    def refuse(gv: Any, kernel: Any, on: Any, aligned: bool) -> str:
        if "pack" in str(gv.name_hint):
            raise kernels.KernelFault("not today")
        return stock(gv, kernel, on, aligned)

    monkeypatch.setattr(kernels, "_codegen", refuse)
    lowered = lower(fused, target)
    assert sorted(lowered.funcs) == ["fused_0"]
    assert lowered.faults == {"layout_pack_0": "not today"}
