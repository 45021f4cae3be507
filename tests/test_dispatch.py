"""Kernels of one's own: bound by a row or by a pass, marked, checked, and right on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm
from modules import array, graph, nn, relative_error, texture_target, var, weight
from tvm import relax, s_tir, te, tirx
from tvm.relax import op

from fusion_patterns import dispatch
from fusion_patterns.compiler import compile_module
from fusion_patterns.dispatch import KernelCall, register_kernel, unregister_kernel
from fusion_patterns.errors import BuildError, FusionPatternsError, TableError
from fusion_patterns.passes import DispatchConv2d
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device

X, W, OUT = (1, 8, 9, 7), (12, 8, 3, 3), (1, 12, 7, 5)
TABLE = """
schema_version: 1
name: mine
patterns:
  - name: conv2d.mine
    nodes:
      conv: {op: nn.conv2d, in: [data, weight]}
      bias: {op: add, in: [conv, bias_vector], optional: true}
      tail: {op: nn.relu, optional: true}
    where:
      - {tensor: bias_vector, broadcast: channel}
    scopes: {data: texture, weight: global, bias_vector: global, output: texture}
    kernel: KERNEL
"""


def direct_conv2d(call: KernelCall) -> Any:
    """One texel of the result for each work item, computed in registers; strides and padding are not for
    it."""
    conv = call.conv2d
    if (
        conv is None
        or any(int(p) for p in conv.attrs.padding)
        or any(int(s) != 1 for s in conv.attrs.strides)
    ):
        return None
    buffers = [
        tirx.decl_buffer(t.shape, t.dtype, t.name, scope=t.scope) for t in (*call.operands, call.output)
    ]
    tensors = [te.placeholder(t.shape, t.dtype, t.name) for t in call.operands]
    data, weights, *bias = tensors
    blocks, rows, columns = call.operands[0].shape[1], *call.operands[1].shape[2:4]
    i = te.reduce_axis((0, blocks), "i")
    lane = te.reduce_axis((0, 4), "lane")
    y, x = te.reduce_axis((0, rows), "y"), te.reduce_axis((0, columns), "x")
    product = te.compute(
        call.output.shape,
        lambda n, o, h, w, v: te.sum(
            data[n, i, h + y, w + x, lane] * weights[o, i, y, x, lane, v], [i, y, x, lane]
        ),
        "product",
    )

    def finish(n: Any, o: Any, h: Any, w: Any, v: Any) -> Any:
        value = product[n, o, h, w, v] + (bias[0][0, o, 0, 0, v] if bias else 0)
        return tirx.max(value, 0.0) if any(c.op.name == "relax.nn.relu" for c in call.ops) else value

    result = te.compute(call.output.shape, finish, "result")
    func = te.create_prim_func([*tensors, result])
    func = func.specialize(dict(zip(func.params, buffers, strict=True)))
    sch = s_tir.Schedule(func)
    last = sch.get_sblock("result")
    *outer, lanes = sch.get_loops(last)
    sch.vectorize(lanes)
    group, item = sch.split(sch.fuse(*outer), [None, 32])
    sch.bind(group, "blockIdx.x")
    sch.bind(item, "threadIdx.x")
    sum_block = sch.get_sblock("product")
    sch.set_scope(sum_block, 0, "local")
    sch.compute_at(sum_block, item)
    return sch.mod["main"]


@pytest.fixture
def mine() -> Iterator[str]:
    register_kernel("mine", direct_conv2d)
    yield "mine"
    unregister_kernel("mine")


@pytest.fixture
def table(tmp_path: Path) -> Any:
    def write(kernel: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(TABLE.replace("KERNEL", kernel))
        return str(path)

    return write


def network() -> tvm.IRModule:
    """A convolution that the kernel takes, one that it does not (padding), and what follows no
    convolution."""

    def build(emit: Any, x: Any) -> Any:
        bias = relax.const(array((1, 12, 1, 1), 3))
        value = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, weight(W))), bias))))
        other = emit(nn.conv2d(value, weight((12, 12, 3, 3), 1), padding=[1, 1]))
        return emit(op.add(emit(nn.softmax(other, axis=1)), value))

    return graph(build, [var("x", X)])


def kernels_of(mod: tvm.IRModule) -> dict[str, Any]:
    return {
        str(gv.name_hint): func
        for gv, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and func.attrs and func.attrs.get("tirx.is_scheduled", False)
    }


def check(mod: tvm.IRModule, compiled: Any, device: Device) -> None:
    inputs = {"x": array(X, 7)}
    (expected,) = Reference(mod).run(inputs)
    (found,) = compiled.run(inputs, device.info.index)
    assert relative_error(found, expected) < 1e-4


# By a row -------------------------------------------------------------------------------------------------


@pytest.mark.opencl
def test_a_row_names_the_kernel(mine: str, table: Any, opencl_device: Device) -> None:
    made: list[bool] = []

    def counted(call: KernelCall) -> Any:
        kernel = direct_conv2d(call)
        made.append(kernel is not None)
        return kernel

    register_kernel(mine, counted, replace=True)
    mod = network()
    compiled = compile_module(mod, texture_target(), table(mine))
    assert sorted(made) == [False, True]  # the padded one has the built-in kernel
    assert compiled.report.composites == {"conv2d.mine": 2}
    assert compiled.report.declined == []
    check(mod, compiled, opencl_device)


def test_an_unknown_kernel_is_refused_with_what_was_meant(table: Any) -> None:
    with pytest.raises(TableError) as error:
        compile_module(network(), texture_target(), table("conv2d_pakced"))
    said = str(error.value)
    assert said.endswith(
        "row 'conv2d.mine': no kernel is called 'conv2d_pakced'; did you mean 'conv2d_packed'?"
    )
    assert "mine.yaml:5" in said


def test_a_built_in_kernel_of_another_table(table: Any) -> None:
    assert compile_module(network(), texture_target(), table("conv2d_packed")).report.composites


# By a pass ------------------------------------------------------------------------------------------------


def test_the_kernel_is_bound_before_legalization_and_marked() -> None:
    mod = network()
    before = mod.script()
    bound = DispatchConv2d(direct_conv2d, target=texture_target())(mod)
    assert mod.script() == before
    ((name, kernel),) = kernels_of(bound).items()
    assert name.startswith("fused_conv2d_chain")
    assert int(kernel.attrs["op_pattern"]) == dispatch.OPAQUE
    ops = called(bound)
    assert ops.count("relax.nn.conv2d") == 1  # the padded one is left as it came
    assert "relax.nn.relu" not in ops  # the epilogue went with its convolution
    assert ops.count("relax.call_tir") == 3  # pack, the kernel, unpack
    relax.analysis.well_formed(bound)


def called(mod: tvm.IRModule) -> list[str]:
    names = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            names.append(str(expr.op.name))

    relax.analysis.post_order_visit(mod["main"], visit)
    return names


def test_equal_convolutions_share_a_kernel() -> None:
    """Composites that are equal have become one function, whichever calls it."""

    def build(emit: Any, x: Any, w: Any) -> Any:
        return emit(nn.conv2d(emit(nn.conv2d(emit(nn.conv2d(x, w)), w)), w))

    mod = graph(build, [var("x", (1, 8, 9, 9)), var("w", (8, 8, 1, 1))])
    bound = DispatchConv2d(direct_conv2d, target=texture_target())(mod)
    assert len(kernels_of(bound)) == 1
    assert called(bound).count("relax.call_tir") == 6  # two packs and an unpack


def test_stock_fusion_leaves_it_alone() -> None:
    bound = DispatchConv2d(direct_conv2d, target=texture_target())(network())
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    fused = tvm.transform.Sequential(passes)(bound)
    ((name, kernel),) = kernels_of(fused).items()
    tvm.ir.assert_structural_equal(kernel, kernels_of(bound)[name])


@pytest.mark.opencl
def test_the_rest_is_fused_by_the_table(mine: str, opencl_device: Device) -> None:
    mod = network()
    bound = DispatchConv2d(mine, target=texture_target())(mod)
    check(mod, compile_module(bound, texture_target()), opencl_device)


def test_a_module_without_convolutions_is_given_back() -> None:
    mod = graph(lambda emit, x: emit(nn.softmax(x, axis=1)), [var("x", X)])
    tvm.ir.assert_structural_equal(DispatchConv2d(direct_conv2d, target=texture_target())(mod), mod)


# What does not fit ----------------------------------------------------------------------------------------


def test_a_kernel_must_fit_its_call() -> None:
    def swapped(call: KernelCall) -> Any:
        data, weights, *rest = call.operands
        buffers = [tirx.decl_buffer(t.shape, t.dtype, t.name) for t in (weights, data, *rest, call.output)]
        return tirx.PrimFunc(buffers, tirx.Evaluate(0))

    with pytest.raises(BuildError, match=r"takes `data` as 3x2x3x3x4x4 float32 in global; its call passes "):
        DispatchConv2d(swapped, target=texture_target())(network())


def test_a_kernel_must_be_a_prim_func() -> None:
    with pytest.raises(BuildError, match="is a str, expected a PrimFunc"):
        DispatchConv2d(lambda call: "kernel", target=texture_target())(network())


def test_names_are_unique(mine: str) -> None:
    with pytest.raises(FusionPatternsError, match="'mine' is registered already; say replace=True"):
        register_kernel(mine, direct_conv2d)
    register_kernel(mine, direct_conv2d, replace=True)
    with pytest.raises(FusionPatternsError, match="'conv2d_packed' is built in"):
        register_kernel("conv2d_packed", direct_conv2d)


def test_an_unknown_name_is_refused(mine: str) -> None:
    with pytest.raises(FusionPatternsError, match=r"no kernel 'mime' is registered; did you mean 'mine'?"):
        DispatchConv2d("mime")
    with pytest.raises(FusionPatternsError, match="no kernel 'theirs' is registered"):
        unregister_kernel("theirs")


def test_what_a_kernel_is_told() -> None:
    told: list[KernelCall] = []
    DispatchConv2d(lambda call: told.append(call), target=texture_target())(network())
    first = told[0]
    assert [call.op.name for call in first.ops] == ["relax.nn.conv2d", "relax.add", "relax.nn.relu"]
    assert [(t.layout, t.shape, t.scope) for t in first.operands] == [
        ("NCHW4c", (1, 2, 9, 7, 4), "global.texture"),
        ("OIHW4i4o", (3, 2, 3, 3, 4, 4), "global"),
        ("NCHW4c", (1, 3, 1, 1, 4), "global"),
    ]
    assert (first.output.layout, first.output.shape) == ("NCHW4c", (1, 3, 7, 5, 4))
    assert all(any(arg.same_as(first.params[0]) for arg in call.args) for call in first.ops[:1])
