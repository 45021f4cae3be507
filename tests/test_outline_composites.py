"""What a composite looks like, and its call: parameters, attributes, types, order."""

from __future__ import annotations

import re

import numpy as np
import pytest
from match_helpers import chain_table, hazard, module, outputs, row, table
from tvm import relax
from tvm.ir.expr import Constant
from tvm_ffi import structural_equal, structural_hash

from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.match import plan_fusion
from fusion_patterns.outline import outline

op, nn = relax.op, relax.op.nn
CONV = {"op": "nn.conv2d", "in": ["data", "weight"]}


def outlined(mod, made=None):
    """Returns the outlined module, after checking that it is well-formed and the given one is unchanged."""
    before = structural_hash(mod)
    new = outline(mod, plan_fusion(mod, chain_table() if made is None else made))
    assert structural_hash(mod) == before
    relax.analysis.well_formed(new)
    return new


def composites(mod):
    """Returns the composite functions by name."""
    functions = {variable.name_hint: func for variable, func in mod.functions.items()}
    return {
        name: func
        for name, func in sorted(functions.items())
        if isinstance(func, relax.Function) and func.attrs is not None and "Composite" in func.attrs
    }


def parameters(func):
    return [parameter.name for parameter in func.params]


def test_a_composite_says_what_it_is():
    func = composites(outlined(hazard("residual_add_rhs")))["fused_conv2d_chain_0"]
    attributes = {str(key): value for key, value in func.attrs.items()}
    attributes["fusion_patterns.scopes"] = dict(attributes["fusion_patterns.scopes"])
    assert attributes == {
        "Primitive": 1,
        "Composite": "conv2d.chain",
        "fusion_patterns.row": "conv2d.chain",
        "fusion_patterns.origin": "test.yaml:1",
        "fusion_patterns.scopes": {
            "data": "texture",
            "weight": "texture",
            "bias_vector": "global",
            "tail_arg": "any",
            "output": "texture",
        },
        "fusion_patterns.kernel": "nn.conv2d",
        "fusion_patterns.anchor": "nn.conv2d",
    }
    assert parameters(func) == ["data", "weight", "bias_vector", "tail_arg"]


def test_the_row_names_the_kernel():
    made = table(row("r", {"conv": CONV}, kernel="conv2d_packed"))
    mod = module(lambda emit, x, y, w: emit(nn.conv2d(x, w)))
    (func,) = composites(outlined(mod, made)).values()
    assert func.attrs["fusion_patterns.kernel"] == "conv2d_packed"
    assert func.attrs["fusion_patterns.anchor"] == "nn.conv2d"


def test_one_tensor_is_one_parameter():
    (own,) = composites(outlined(hazard("conv_input_is_residual"))).values()
    assert parameters(own) == ["data", "weight", "bias_vector"]
    (square,) = composites(outlined(hazard("data_is_weight"))).values()
    assert parameters(square) == ["data"]


def test_two_wishes_for_one_tensor_end_in_a_buffer():
    made = table(row("r", {"conv": CONV}, scopes={"data": "texture", "weight": "global"}))
    mod = module(lambda emit, x: emit(nn.conv2d(x, x)), inputs=["x"], weights=[], x=(8, 8, 1, 1))
    (func,) = composites(outlined(mod, made)).values()
    assert dict(func.attrs["fusion_patterns.scopes"]) == {"data": "global", "output": "any"}


def test_constants_are_parameters_and_arguments():
    new = outlined(hazard("shared_constant_two_convs"))
    assert [parameters(func) for func in composites(new).values()] == [["data", "weight", "bias_vector"]] * 2
    assert all("metadata" not in func.script() for func in composites(new).values())
    first, second = [b.value for b in new["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert isinstance(first.args[1], Constant)
    assert first.args[1].same_as(second.args[1])


def test_scalar_constants_are_parameters_too():
    half = relax.const(0.5, "float32")
    mod = module(lambda emit, x, y, w: emit(op.multiply(emit(nn.conv2d(x, w)), half)))
    (func,) = composites(outlined(mod)).values()
    assert parameters(func) == ["data", "weight", "tail_arg"]
    assert list(func.params[2].ty.shape.values) == []


def test_names_are_unique_identifiers():
    def build(emit, x, y, w, **more):
        value = emit(nn.conv2d(x, w))
        for other in (y, more["gpu_0/data"], more["class"]):
            value = emit(op.add(value, other))
        return value

    mod = module(build, inputs=["x", "y", "gpu_0/data", "class"])
    (func,) = composites(outlined(mod)).values()
    assert parameters(func) == ["data", "weight", "tail_arg", "tail_arg_2", "tail_arg_3"]
    names = [*parameters(func), *(b.var.name for b in func.body.blocks[0].bindings)]
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) for name in names)


def test_global_names_avoid_those_that_are_there():
    made = table(row("conv_relu", {"conv": CONV, "act": {"op": "nn.relu", "optional": True}}))
    mod = hazard("preformed_composite")
    mod = outline(mod, plan_fusion(mod, made))
    assert "fused_conv_relu" in composites(mod)
    twice = module(lambda emit, x, y, w: emit(nn.conv2d(emit(nn.conv2d(x, w)), w)))
    assert list(composites(outlined(twice, made))) == ["fused_conv_relu_0", "fused_conv_relu_1"]
    once = outlined(twice, made)
    again = module(lambda emit, x, y, w: emit(nn.conv2d(x, w)))
    for variable, func in once.functions.items():
        if variable.name_hint == "fused_conv_relu_0":
            again[variable] = func
    assert {"fused_conv_relu_0", "fused_conv_relu_1"} == set(composites(outlined(again, made)))


def test_each_match_has_its_own_function():
    new = outlined(module(lambda emit, x, y, w: emit(nn.conv2d(emit(nn.conv2d(x, w)), w))))
    first, second = composites(new).values()
    assert structural_equal(first, second)


def test_types_stay_as_they_were():
    mod = hazard("fp16_chain")
    new = outlined(mod)
    (call,) = new["main"].body.blocks[0].bindings
    old = mod["main"].body.blocks[0].bindings[-1].var
    assert call.var.same_as(old)
    assert structural_equal(call.value.ty, old.ty)


def test_symbolic_dimensions_are_the_composites_own():
    new = outlined(hazard("dynamic_batch"))
    (func,) = composites(new).values()
    ours = func.params[0].ty.shape.values[0]
    assert ours.name == "n"
    assert not ours.same_as(new["main"].params[0].ty.shape.values[0])


def test_symbolic_dimensions_in_arguments_are_the_composites_own_as_well():
    made = table(row("r", {"conv": CONV, "flat": {"op": "reshape"}}))
    n = relax.Var("n", "int64")
    mod = module(lambda emit, x, y, w: emit(op.reshape(emit(nn.conv2d(x, w)), (n, 8, 36))), x=(n, 8, 6, 6))
    new = outlined(mod, made)
    (func,) = composites(new).values()
    (own,) = relax.analysis.defined_symbolic_vars(func)
    assert not own.same_as(n)
    shapes = [func.params[0].ty.shape, func.body.blocks[0].bindings[1].value.args[1], func.ret_ty.shape]
    assert all(shape.values[0].same_as(own) for shape in shapes)
    for old, fused in zip(outputs(mod, sizes={"n": 3}), outputs(new, sizes={"n": 3}), strict=True):
        np.testing.assert_allclose(fused, old, rtol=1e-5)


def test_both_branches_of_an_if():
    new = outlined(hazard("if_else_branches"))
    assert list(composites(new)) == ["fused_conv2d_chain_0", "fused_conv2d_chain_1"]
    assert "R.nn.conv2d" not in new["main"].script()


def test_values_that_leave_early():
    made = table(row("r", {"conv": CONV, "act": {"op": "nn.relu"}}, leaves=["conv"]))

    def build(emit, x, y, w):
        conv = emit(nn.conv2d(x, w))
        # This user stands before the match ends, and must be moved behind it.
        early = emit(op.tanh(conv))
        return emit(nn.relu(conv)), early, conv

    mod = module(build)
    new = outlined(mod, made)
    (func,) = composites(new).values()
    assert isinstance(func.ret_ty, relax.TupleType)
    for old, fused in zip(outputs(mod), outputs(new), strict=True):
        np.testing.assert_allclose(fused, old, rtol=1e-5)


def test_a_tuple_stays_a_tuple():
    made = table(row("r", {"all": {"op": "concat"}, "act": {"op": "nn.relu"}}))
    mod = module(lambda emit, x, y, w: emit(nn.relu(emit(op.concat([x, y, x], axis=1)))))
    (func,) = composites(outlined(mod, made)).values()
    assert parameters(func) == ["all_arg", "all_arg_2"]


def test_a_name_that_only_the_match_used_is_gone():
    mod = module(lambda emit, x, y, w: emit(nn.relu(emit(emit(nn.conv2d(x, w))))))
    new = outlined(mod)
    assert len(new["main"].body.blocks[0].bindings) == 2  # the call, and the name of the output


def test_nothing_to_do_is_nothing_done():
    mod = module(lambda emit, x, y, w: emit(op.exp(x)))
    assert structural_equal(outlined(mod), mod)


def test_a_plan_for_another_module_is_refused():
    def build(emit, x, y, w):
        return emit(nn.conv2d(x, w))

    plan = plan_fusion(module(build), chain_table())
    with pytest.raises(FusionPatternsError, match="made for another module"):
        outline(module(build), plan)


def test_outlining_is_deterministic():
    first, second = (outlined(hazard("multi_consumer_intermediate")) for _ in range(2))
    assert first.script() == second.script()
