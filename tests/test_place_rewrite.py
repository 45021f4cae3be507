"""Decisions that are visible in the module: conversions, types, constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from modules import (
    TEXTURE,
    Calls,
    const,
    conv_chain,
    draw,
    nn,
    relative_error,
    texture_target,
    var,
    weight,
)
from tvm import relax
from tvm.relax import op

from fusion_patterns.place import place
from fusion_patterns.place.decide import bindings_of
from fusion_patterns.reference import Reference

X = (1, 8, 6, 6)
W = (8, 8, 3, 3)
SAME = {"padding": [1, 1]}
BUFFER = {"data": "global", "weight": "global", "output": "texture"}


# Modules ----------------------------------------------------------------------------------------------------


def vote() -> tvm.IRModule:
    """Three readers want a texture, one a buffer; softmax reads the value plain."""
    calls = Calls()
    first = calls.conv(X, W, **SAME)
    others = [calls.conv(X, W, scopes, **SAME) for scopes in (BUFFER, TEXTURE, TEXTURE, TEXTURE)]

    def build(emit: Any, x: Any) -> Any:
        value = emit(first(x, weight(W)))
        total = emit(nn.softmax(value, axis=1))
        for seed, other in enumerate(others):
            total = emit(op.add(total, emit(other(value, weight(W, seed)))))
        return total

    return calls.main(build, [var("x", X)])


def odd_channels() -> tvm.IRModule:
    calls = Calls()
    one = calls.conv(
        (2, 3, 7, 5),
        (6, 3, 3, 3),
        then=lambda e, c, b, s: e(op.multiply(e(op.add(c, b)), s)),
        extra=[var("b", (6, 1, 1)), var("s", (5,))],
        **SAME,
    )
    two = calls.conv((2, 6, 7, 5), (6, 1, 3, 3), groups=6, **SAME)

    def build(emit: Any, x: Any, s: Any) -> list[Any]:
        inner = emit(one(x, weight((6, 3, 3, 3)), const((6, 1, 1), 1), s))
        return [emit(two(inner, weight((6, 1, 3, 3)))), inner]

    return calls.main(build, [var("x", (2, 3, 7, 5)), var("s", (5,))])


def shared_input() -> tvm.IRModule:
    """Three readers of one parameter, two of its forms, and one plain reader."""
    calls = Calls()
    convs = [calls.conv(X, W, scopes, **SAME) for scopes in (TEXTURE, TEXTURE, BUFFER)]

    def build(emit: Any, x: Any) -> list[Any]:
        return [*(emit(conv(x, weight(W))) for conv in convs), emit(nn.softmax(x, axis=1))]

    return calls.main(build, [var("x", X)])


def weights_as_parameters() -> tvm.IRModule:
    calls = Calls()
    conv = calls.conv(X, W, **SAME)
    other = calls.conv(X, W, **SAME)
    return calls.main(lambda emit, x, w: emit(other(emit(conv(x, w)), w)), [var("x", X), var("w", W)])


def branches() -> tvm.IRModule:
    calls = Calls()
    convs = [calls.conv(X, W, **SAME) for _ in range(2)]
    builder, x, w, flag = calls.builder, var("x", X), var("w", W), var("flag", (), "bool")
    with builder.function("main", [flag, x, w]):
        blocks = []
        for conv in convs:
            value = relax.Var("value", relax.TensorType(X, "float32"))
            binding = relax.VarBinding(value, builder.normalize(conv(x, w)))
            blocks.append(relax.SeqExpr([relax.BindingBlock([binding])], value))
        result = builder.emit(relax.If(flag, *blocks))
        builder.emit_func_output(result)
    return builder.finalize()


MODULES: dict[str, Callable[[], tvm.IRModule]] = {
    "chain": conv_chain,
    "vote": vote,
    "odd channels": odd_channels,
    "shared input": shared_input,
    "weights as parameters": weights_as_parameters,
    "branches": branches,
}


@pytest.fixture(scope="module")
def placed() -> dict[str, tvm.IRModule]:
    return {name: place(make(), texture_target())[0] for name, make in MODULES.items()}


def calls_of(mod: tvm.IRModule, function: str = "main") -> list[Any]:
    """Every call of a function of the module, in order."""
    values = [getattr(binding, "value", None) for binding in bindings_of(mod[function].body)]
    return [value for value in values if isinstance(getattr(value, "op", None), tvm.ir.GlobalVar)]


def rows(mod: tvm.IRModule) -> Counter[str]:
    """How often ``main`` calls each row."""
    return Counter(str(mod[call.op].attrs["Composite"]) for call in calls_of(mod))


# What every placed module is --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_it_is_well_formed(placed: dict[str, tvm.IRModule], name: str) -> None:
    relax.analysis.well_formed(placed[name])


@pytest.mark.parametrize("name", MODULES)
def test_every_call_agrees_with_its_callee(placed: dict[str, tvm.IRModule], name: str) -> None:
    calls = calls_of(placed[name])
    assert calls
    for call in calls:
        callee = placed[name][call.op]
        for arg, param in zip(call.args, callee.params, strict=True):
            tvm.ir.assert_structural_equal(arg.ty, param.ty)
        tvm.ir.assert_structural_equal(call.ty, callee.ret_ty)


@pytest.mark.parametrize("name", MODULES)
def test_a_value_has_the_type_of_what_it_is_bound_to(placed: dict[str, tvm.IRModule], name: str) -> None:
    for binding in bindings_of(placed[name]["main"].body):
        tvm.ir.assert_structural_equal(binding.var.ty, binding.value.ty)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "branches"])
def test_stock_tvm_runs_it_on_the_cpu_with_the_same_numbers(
    placed: dict[str, tvm.IRModule], name: str
) -> None:
    mod = MODULES[name]()
    inputs = draw(mod)
    ours, theirs = Reference(placed[name]).run(inputs), Reference(mod).run(inputs)
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


@pytest.mark.parametrize("flag", [True, False])
def test_branches_run_as_well(placed: dict[str, tvm.IRModule], flag: bool) -> None:
    mod = branches()
    inputs = {**draw_floats(mod), "flag": np.array(flag)}
    ours, theirs = Reference(placed["branches"]).run(inputs), Reference(mod).run(inputs)
    assert relative_error(ours[0], theirs[0]) < 1e-6


def draw_floats(mod: tvm.IRModule) -> dict[str, Any]:
    return {name: value for name, value in draw(mod).items() if name != "flag"}


@pytest.mark.parametrize("name", MODULES)
def test_the_callers_contract_does_not_change(placed: dict[str, tvm.IRModule], name: str) -> None:
    before, after = MODULES[name]()["main"], placed[name]["main"]
    assert [str(p.ty) for p in after.params] == [str(p.ty) for p in before.params]
    assert str(after.ret_ty) == str(before.ret_ty)
    assert all(p.ty.vdevice is None for p in after.params)


@pytest.mark.parametrize("name", MODULES)
def test_the_given_module_is_not_changed(name: str) -> None:
    mod = MODULES[name]()
    before = tvm.ir.save_json(mod)
    functions = dict(mod.functions_items())
    place(mod, texture_target())
    assert tvm.ir.save_json(mod) == before
    assert all(mod[gv].same_as(func) for gv, func in functions.items())


@pytest.mark.parametrize("name", MODULES)
def test_it_survives_tvms_json(placed: dict[str, tvm.IRModule], name: str) -> None:
    again = tvm.ir.load_json(tvm.ir.save_json(placed[name]))
    tvm.ir.assert_structural_equal(again, placed[name])


@pytest.mark.parametrize("name", ["weights as parameters", "branches"])
def test_it_survives_tvmscript(placed: dict[str, tvm.IRModule], name: str) -> None:
    again = tvm.script.from_source(placed[name].script())
    tvm.ir.assert_structural_equal(again, placed[name])


def test_tvmscript_can_not_hold_tensor_constants(placed: dict[str, tvm.IRModule]) -> None:
    """Stock's printer puts them where its parser can't reach them: use JSON for such modules."""
    with pytest.raises(Exception, match="metadata"):
        tvm.script.from_source(placed["chain"].script())


# Conversions ------------------------------------------------------------------------------------------------


def test_a_chain_is_packed_once_and_written_plain_at_its_end(placed: dict[str, tvm.IRModule]) -> None:
    assert rows(placed["chain"]) == {"layout.pack": 1, "conv2d.chain": 4}


def test_a_form_is_made_once_for_all_its_readers(placed: dict[str, tvm.IRModule]) -> None:
    found = rows(placed["shared input"])
    assert found == {"layout.pack": 2, "conv2d.chain": 3}  # a texture and a buffer
    packs = [call for call in calls_of(placed["shared input"]) if "pack" in call.op.name_hint[:11]]
    assert [str(call.args[0].name) for call in packs] == ["x", "x"]


def test_a_loser_of_the_vote_gets_one_shared_copy(placed: dict[str, tvm.IRModule]) -> None:
    # softmax reads the voted value plain; what only add reads is written so
    assert rows(placed["vote"]) == {
        "layout.pack": 1,
        "conv2d.chain": 5,
        "layout.copy": 1,
        "layout.unpack": 1,
    }


def test_two_losers_share_their_copy() -> None:
    calls = Calls()
    first = calls.conv(X, W, **SAME)
    others = [calls.conv(X, W, s, **SAME) for s in (BUFFER, BUFFER, TEXTURE, TEXTURE, TEXTURE)]

    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(first(x, weight(W)))
        return [emit(other(value, weight(W))) for other in others]

    placed, _ = place(calls.main(build, [var("x", X)]), texture_target())
    assert rows(placed)["layout.copy"] == 1


def test_a_weight_that_two_convs_read_is_packed_once(placed: dict[str, tvm.IRModule]) -> None:
    packs = [c for c in calls_of(placed["weights as parameters"]) if c.op.name_hint.startswith("layout_pack")]
    assert sorted(str(call.args[0].name) for call in packs) == ["w", "x"]


def test_constants_are_packed_without_a_kernel(placed: dict[str, tvm.IRModule]) -> None:
    constants = [
        arg
        for call in calls_of(placed["odd channels"])
        for arg in call.args
        if isinstance(arg, tvm.ir.GenericConst)
    ]
    shapes = sorted(tuple(int(d) for d in c.ty.shape.values) for c in constants)
    assert shapes == [(2, 1, 3, 3, 4), (2, 1, 3, 3, 4, 4), (2, 4)]
    for call in calls_of(placed["odd channels"]):
        if call.op.name_hint.startswith("layout_"):
            assert not isinstance(call.args[0], tvm.ir.GenericConst)


def test_lanes_that_packing_a_constant_adds_are_zero(placed: dict[str, tvm.IRModule]) -> None:
    (call,) = [c for c in calls_of(placed["odd channels"]) if len(c.args) == 4]
    packed = call.args[1].value.numpy()
    assert packed.shape == (2, 1, 3, 3, 4, 4)
    assert packed[:1, :, :, :, :3].all()
    assert not packed[:, :, :, :, 3].any()  # three input channels
    assert not packed[1, ..., 2:].any()  # six output channels


def test_a_module_without_composites_stays_as_it_is() -> None:
    builder = relax.BlockBuilder()
    x = var("x", (2, 3, 5, 7, 4))  # looks packed, and is not
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(op.tanh(x)))
        builder.emit_func_output(out)
    mod = builder.finalize()
    placed, placement = place(mod, texture_target())
    tvm.ir.assert_structural_equal(placed["main"], mod["main"])
    assert placement.tensors == []
    assert "vdevice" not in placed.global_infos


# Devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_every_device_of_a_type_is_one_of_the_modules(placed: dict[str, tvm.IRModule], name: str) -> None:
    mod = placed[name]
    known = list(mod.global_infos["vdevice"])
    used = [b.var.ty.vdevice for b in bindings_of(mod["main"].body) if isinstance(b.var.ty, relax.TensorType)]
    textures = [device for device in used if device is not None]
    assert textures
    assert {device.__chandle__() for device in textures} <= {device.__chandle__() for device in known}


def test_devices_stand_in_a_fixed_order() -> None:
    calls = Calls()
    small, large = (1, 8, 6, 6), (1, 64, 6, 6)
    convs = [calls.conv(large, (64, 64, 1, 1)), calls.conv(small, (8, 8, 1, 1))]

    def build(emit: Any, x: Any, y: Any) -> list[Any]:
        return [emit(convs[0](x, weight((64, 64, 1, 1)))), emit(convs[1](y, weight((8, 8, 1, 1))))]

    mod = calls.main(build, [var("x", large), var("y", small)])
    placed, _ = place(mod, texture_target(texture_depth_limit=4))
    scopes = [str(device.memory_scope) for device in placed.global_infos["vdevice"]]
    assert scopes == ["global.texture", "global.texture-nhwc"]


# What is said of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_conversions_are_those_that_the_decisions_say(name: str) -> None:
    placed, placement = place(MODULES[name](), texture_target())
    said = Counter(
        f"layout.{conversion.kind}"
        for tensor in placement.tensors
        for conversion in tensor.conversions
        if conversion.kind != "constant"
    )
    assert {row: count for row, count in rows(placed).items() if row.startswith("layout.")} == said
