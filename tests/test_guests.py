"""What others put into a module survives: their composites, packed calls, and functions beside ``main``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from modules import const, draw, graph, nn, var, weight
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

from fusion_patterns import apply_patterns, compile_module, pipeline, verify
from fusion_patterns.compiler import as_target
from fusion_patterns.errors import BuildError
from fusion_patterns.passes import PlaceScopes
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device
from fusion_patterns.run.manifest import Launch, all_steps

X = (1, 8, 8, 8)


def conv_relu(emit: Any, x: Any, seed: int = 0) -> Any:
    return emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 3, 3), seed), padding=1))))


def functions(mod: tvm.IRModule) -> dict[str, Any]:
    return {str(variable.name_hint): func for variable, func in mod.functions.items()}


# Composites of others ---------------------------------------------------------------------------------------


def partitioned(annotate_codegen: bool) -> tvm.IRModule:
    """The first conv + relu taken by somebody else through FuseOpsByPattern, the second left over."""

    def build(emit: Any, x: Any) -> Any:
        theirs = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, weight((8, 8, 3, 3)), padding=1)), const(X)))))
        return conv_relu(emit, theirs, 1)

    made = is_op("relax.add")(is_op("relax.nn.conv2d")(wildcard(), wildcard()), wildcard())
    run = relax.transform.FuseOpsByPattern(
        [("guest.conv2d", is_op("relax.nn.relu")(made))],
        bind_constants=False,
        annotate_codegen=annotate_codegen,
    )
    return run(graph(build, [var("x", X)]))


@pytest.mark.parametrize("annotate_codegen", [False, True])
def test_a_composite_of_another_backend_is_not_opened(annotate_codegen: bool) -> None:
    mod = partitioned(annotate_codegen)
    theirs = {name: func for name, func in functions(mod).items() if name != "main"}
    assert len(theirs) == 1
    fused = functions(apply_patterns(mod))
    for name, func in theirs.items():
        assert tvm_ffi.structural_equal(fused[name], func, map_free_vars=True)
    assert fused.keys() - theirs.keys() == {"fused_conv2d_chain_0", "main"}


@pytest.mark.opencl
def test_a_composite_without_a_backend_is_one_kernel(opencl_device: Device) -> None:
    mod = partitioned(False)
    (theirs,) = functions(mod).keys() - {"main"}
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok
    assert report.compiled.report.convs == {"total": 2, "covered": 1}
    launches = [
        s for s in all_steps(report.compiled.manifest.functions["main"].body) if isinstance(s, Launch)
    ]
    assert [s.label for s in launches if "conv2d" in s.label] == [theirs, "conv2d.chain"]


def test_a_composite_for_another_backend_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"in function `fused_\w+_guest`: Function is not a value that"):
        compile_module(partitioned(True))


# Packed calls -----------------------------------------------------------------------------------------------


@pytest.fixture
def packed() -> Iterator[None]:
    """Functions of the host: one that returns its result, one that writes it, one with an effect."""
    names = ("tests.guests.twice", "tests.guests.twice_into", "tests.guests.note")
    tvm.register_global_func(names[0], lambda x: tvm.runtime.tensor(2 * x.numpy()), override=True)
    tvm.register_global_func(names[1], lambda x, out: out.copyfrom(2 * x.numpy()), override=True)
    tvm.register_global_func(names[2], lambda x: NOTED.append(x.numpy()), override=True)
    NOTED.clear()
    yield
    for name in names:
        tvm_ffi.remove_global_func(name)


NOTED: list[Any] = []
KINDS = ["call_pure_packed", "call_dps_packed", "call_packed"]


def with_packed_call(kind: str) -> tvm.IRModule:
    """conv + relu, a call of the host, conv + relu."""
    builder = relax.BlockBuilder()
    x, ty = var("x", X), relax.TensorType(X, "float32")
    with builder.function("main", [x], pure=kind != "call_packed"):
        with builder.dataflow():
            before = builder.emit_output(conv_relu(builder.emit, x))
        if kind == "call_pure_packed":
            between = builder.emit(op.call_pure_packed("tests.guests.twice", before, ty_args=ty))
        elif kind == "call_dps_packed":
            between = builder.emit(op.call_dps_packed("tests.guests.twice_into", [before], out_ty=ty))
        else:
            effect = relax.Call(
                relax.ExternFunc("tests.guests.note"), [before], ty_args=[relax.TupleType([])]
            )
            builder.emit(effect)
            between = before
        with builder.dataflow():
            out = builder.emit_output(conv_relu(builder.emit, between, 1))
        builder.emit_func_output(out)
    return builder.finalize()


def calls_of_the_host(mod: tvm.IRModule) -> list[Any]:
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and (
            isinstance(expr.op, relax.ExternFunc) or "packed" in str(getattr(expr.op, "name", ""))
        ):
            found.append(expr)

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_call_stays_where_it_is(packed: None, kind: str) -> None:
    mod = with_packed_call(kind)
    inputs = draw(mod)
    (expected,) = Reference(mod).run(inputs)
    noted = len(NOTED)
    for made in (apply_patterns(mod), PlaceScopes()(apply_patterns(mod))):
        assert len(calls_of_the_host(made)) == 1
        # The host is given a plain tensor, wherever the composite before it keeps its own.
        (argument,) = [a for a in relax.analysis.free_vars(calls_of_the_host(made)[0]) if a.name != "x"]
        assert tuple(argument.ty.shape.values) == X
        assert argument.ty.vdevice is None or argument.ty.vdevice.memory_scope == "global"
        (result,) = Reference(made).run(inputs)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert len(NOTED) == 3 * noted
    assert noted == (kind == "call_packed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_has_no_host_that_could_be_called(packed: None, kind: str) -> None:
    with pytest.raises(
        BuildError, match=r"in function `main`: .* is not something that a manifest can run"
    ) as e:
        compile_module(with_packed_call(kind))
    assert "run this module through TVM's own VM with fusion_patterns.pipeline()" in str(e.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tvms_own_vm_still_calls_the_host(packed: None, kind: str) -> None:
    built = relax.build(with_packed_call(kind), as_target(), relax_pipeline=pipeline())
    assert "tests.guests." in built.as_text()


# Functions beside main --------------------------------------------------------------------------------------


def two_entries() -> tvm.IRModule:
    """Two public functions that share a private one; both name their values alike."""
    builder = relax.BlockBuilder()
    y = var("y", X)
    with builder.function("shared", [y], private=True):
        with builder.dataflow():
            out = builder.emit_output(conv_relu(builder.emit, y))
        builder.emit_func_output(out)
    shared = builder.get().get_global_var("shared")
    for name, seed in (("main", 1), ("encode", 2)):
        x = var("x", X)
        with builder.function(name, [x]):
            with builder.dataflow():
                inner = builder.emit(relax.Call(shared, [conv_relu(builder.emit, x, seed)]))
                out = builder.emit_output(op.add(inner, x) if name == "main" else op.tanh(inner))
            builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.opencl
@pytest.mark.parametrize("function", ["main", "encode"])
def test_every_public_function_runs(opencl_device: Device, function: str) -> None:
    mod = two_entries()
    report = verify(mod, device=opencl_device.info.index, function=function)
    assert report.ok, report.outputs
    assert report.compiled.report.convs == {"total": 3, "covered": 3}
    assert sorted(report.compiled.manifest.functions) == ["encode", "main", "shared"]


def test_functions_keep_their_names_types_and_visibility() -> None:
    mod = two_entries()
    fused = functions(apply_patterns(mod))
    for name, func in functions(mod).items():
        assert tvm_ffi.structural_equal(fused[name].ty, func.ty)
        assert tvm_ffi.structural_equal(fused[name].attrs, func.attrs)
