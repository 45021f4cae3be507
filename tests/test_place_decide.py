"""Needs and wishes of all composites -> one form for each tensor and reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
import tvm
from modules import TEXTURE, Calls, conv_chain, nn, texture_target, var, weight
from tvm.relax import op

from fusion_patterns.place import Placement, decide
from fusion_patterns.place.decide import PLAIN_FORM, Form
from fusion_patterns.place.profiles import load_profile

X = (1, 8, 6, 6)
W = (8, 8, 3, 3)
TEXTURE_FORM = Form("NCHW4c", "global.texture")
BUFFER_FORM = Form("NCHW4c", "global")


def fan(writer: Mapping[str, str], readers: list[Mapping[str, str]]) -> tvm.IRModule:
    """One conv whose result so many convs read."""
    calls = Calls()
    first = calls.conv(X, W, writer, padding=[1, 1])
    others = [calls.conv(X, W, wish, padding=[1, 1]) for wish in readers]

    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(first(x, weight(W)))
        return [emit(other(value, weight(W, seed))) for seed, other in enumerate(others)]

    return calls.main(build, [var("x", X)])


def wants(data: str, output: str = "texture") -> dict[str, str]:
    return {"data": data, "weight": "global", "output": output}


def decided(mod: tvm.IRModule, **limits: int) -> Placement:
    placement = decide(mod, texture_target(**limits))
    assert placement.refused == {}
    return placement


def reason_of(placement: Placement, value: str) -> str:
    return next(tensor.reason for tensor in placement.tensors if tensor.value == value)


# The vote -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "scope", "reason"),
    [
        (["texture"] * 3 + ["global"], "global.texture", "3 of 4 readers ask for texture, 1 for a buffer"),
        (["global"] * 3 + ["texture"], "global", "1 of 4 readers ask for texture, 3 for a buffer"),
        (["texture", "any"], "global.texture", "1 of 2 readers ask for texture, 0 for a buffer"),
        (["any", "any"], "global.texture", "the row's wish for its output"),
        (["texture", "global"], "global.texture", "the row's wish for its output"),
    ],
)
def test_the_readers_vote(wishes: list[str], scope: str, reason: str) -> None:
    placement = decided(fan(TEXTURE, [wants(wish) for wish in wishes]))
    assert placement.outputs["fused_0"] == Form("NCHW4c", scope)
    assert reason_of(placement, "lv") == reason


def test_the_order_of_the_readers_does_not_matter() -> None:
    wishes = ["texture", "texture", "texture", "global"]
    for order in sorted(set(permutations(wishes))):
        placement = decided(fan(TEXTURE, [wants(wish) for wish in order]))
        assert placement.outputs["fused_0"] == TEXTURE_FORM
        for number, wish in enumerate(order, start=1):
            data, _ = placement.operands[f"fused_{number}"]
            assert data == (TEXTURE_FORM if wish == "texture" else BUFFER_FORM)


def test_a_tie_is_for_the_writer_to_decide() -> None:
    mod = fan(wants("texture", output="global"), [wants("texture"), wants("global")])
    assert decided(mod).outputs["fused_0"] == BUFFER_FORM


def test_any_follows_the_writer() -> None:
    for output, form in (("texture", TEXTURE_FORM), ("global", BUFFER_FORM)):
        placement = decided(fan(wants("texture", output), [wants("any")]))
        assert placement.operands["fused_1"][0] == form


@pytest.mark.parametrize(("profile", "scope"), [("adreno", "global.texture"), ("generic", "global")])
def test_any_is_what_costs_least_on_the_device(profile: str, scope: str) -> None:
    """A convolution asks for its input many times; a wish that a row does not state is `any` as well."""
    placement = decide(fan({}, [{}]), texture_target(), load_profile(profile))
    assert placement.outputs["fused_0"] == Form("NCHW4c", scope)
    assert placement.operands["fused_1"] == (Form("NCHW4c", scope), Form("OIHW4i4o", scope))
    assert "bytes moved in texture, " in reason_of(placement, "lv")


# Limits ---------------------------------------------------------------------------------------------------


def test_the_next_folding_where_the_layers_do_not_suffice() -> None:
    placement = decided(conv_chain(2), texture_depth_limit=1)
    folded = Form("NCHW4c", "global.texture-nhwc")
    assert placement.outputs == {"fused_0": folded, "fused_1": PLAIN_FORM}
    assert [forms[0] for forms in placement.operands.values()] == [folded, folded]


def test_a_buffer_where_no_folding_fits() -> None:
    placement = decided(conv_chain(2), texture_depth_limit=1, texture_spatial_limit=2)
    assert placement.outputs == {"fused_0": BUFFER_FORM, "fused_1": PLAIN_FORM}
    assert {forms[0] for forms in placement.operands.values()} == {BUFFER_FORM}
    assert reason_of(placement, "lv").split("; ") == [
        "global.texture: 2 layers, the device has 1",
        "global.texture-nhwc: 2x36 texels, the device has 2x2",
        "global.texture-weight: 1x72 texels, the device has 2x2",
    ]


def test_a_target_without_textures() -> None:
    target = tvm.target.Target({"kind": "opencl"}, host={"kind": "llvm"})
    placement = decide(conv_chain(2), target)
    assert placement.outputs == {"fused_0": BUFFER_FORM, "fused_1": PLAIN_FORM}
    assert reason_of(placement, "lv") == "the target has no `texture` key"


# Operands -------------------------------------------------------------------------------------------------


def test_an_operand_that_is_read_as_it_comes_stays_plain() -> None:
    calls = Calls()
    conv = calls.conv(
        X,
        W,
        {**TEXTURE, "column": "texture"},
        then=lambda e, c, r: e(op.add(c, r)),
        extra=[var("column", (6,))],
        padding=[1, 1],
    )
    mod = calls.main(lambda emit, x, r: emit(conv(x, weight(W), r)), [var("x", X), var("r", (6,))])
    assert decided(mod).operands["fused_0"][2] == PLAIN_FORM


@pytest.mark.parametrize(("wish", "scope"), [("texture", "global.texture"), ("global", "global")])
def test_a_weight_goes_where_its_row_says(wish: str, scope: str) -> None:
    placement = decided(_one({**TEXTURE, "weight": wish}))
    assert placement.operands["fused_0"][1] == Form("OIHW4i4o", scope)


def _one(scopes: Mapping[str, str]) -> tvm.IRModule:
    calls = Calls()
    conv = calls.conv(X, W, scopes)
    return calls.main(lambda emit, x: emit(conv(x, weight(W))), [var("x", X)])


def test_bytes_are_those_of_the_packed_tensor() -> None:
    calls = Calls()
    first, last = calls.conv(X, (6, 8, 3, 3), padding=[1, 1]), calls.conv((1, 6, 6, 6), (8, 6, 1, 1))

    def build(emit: Any, x: Any) -> Any:
        return emit(last(emit(first(x, weight((6, 8, 3, 3)))), weight((8, 6, 1, 1))))

    (tensor, _) = (tensor for tensor in decided(calls.main(build, [var("x", X)])).tensors if tensor.writer)
    assert (tensor.function, tensor.value, tensor.shape) == ("main", "lv", (1, 2, 6, 6, 4))
    assert tensor.bytes == 2 * 36 * 4 * 4


# What is worth packing ------------------------------------------------------------------------------------


def pool(calls: Calls) -> Any:
    scopes = {"data": "texture", "output": "texture"}
    return calls.composite(
        lambda emit, d: emit(nn.max_pool2d(d, [3, 3], padding=[1, 1])),
        [var("data", X)],
        scopes,
        "pool2d.chain",
    )


def test_a_pool_alone_stays_in_buffers_with_the_reason() -> None:
    calls = Calls()
    one = pool(calls)
    placement = decide(calls.main(lambda emit, x: emit(one(x)), [var("x", X)]), texture_target())
    reason, culprit = placement.refused["fused_0"]
    assert reason.startswith("packing it would cost ")
    assert reason.endswith(" bytes more than leaving it in buffers with its neighbours")
    assert culprit == ""
    assert "fused_0" not in placement.needs


def test_a_pool_between_convs_is_packed() -> None:
    calls = Calls()
    first, middle, last = calls.conv(X, W, padding=[1, 1]), pool(calls), calls.conv(X, W, padding=[1, 1])

    def build(emit: Any, x: Any) -> Any:
        return emit(last(emit(middle(emit(first(x, weight(W))))), weight(W)))

    placement = decided(calls.main(build, [var("x", X)]))
    assert placement.outputs == {"fused_0": TEXTURE_FORM, "fused_1": TEXTURE_FORM, "fused_2": PLAIN_FORM}


def test_pools_are_packed_together_or_not_at_all() -> None:
    """Two pools between plain ops: one conversion in and one out would still be two too many."""
    calls = Calls()
    one, two = pool(calls), pool(calls)

    def build(emit: Any, x: Any) -> Any:
        return emit(nn.softmax(emit(two(emit(one(x)))), axis=1))

    placement = decide(calls.main(build, [var("x", X)]), texture_target())
    assert sorted(placement.refused) == ["fused_0", "fused_1"]


@pytest.mark.parametrize(("channels", "layout", "kinds"), [(8, "NCHW4c", ["view"]), (6, "plain", [])])
def test_one_pixel_is_unpacked_for_nothing(channels: int, layout: str, kinds: list[str]) -> None:
    """Packed and plain are the same bytes where 4 divides the channels, if they are in a buffer."""
    calls = Calls()
    conv = calls.conv(X, (channels, 8, 6, 6))
    mod = calls.main(lambda emit, x: emit(conv(x, weight((channels, 8, 6, 6)))), [var("x", X)])
    (tensor,) = (tensor for tensor in decided(mod).tensors if tensor.writer)
    assert (tensor.layout, tensor.scope) == (layout, "global")
    assert [(conversion.kind, conversion.cost) for conversion in tensor.conversions] == [
        (k, 0) for k in kinds
    ]


def test_a_conv_is_packed_in_any_case() -> None:
    assert decided(_one(TEXTURE)).operands["fused_0"][0] == TEXTURE_FORM


# As the module has it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [8, 3, 6])
def test_what_nobody_reads_packed_is_written_plain(channels: int) -> None:
    calls = Calls()
    shape = (channels, 8, 3, 3)
    conv = calls.conv(X, shape, padding=[1, 1])
    placement = decided(calls.main(lambda emit, x: emit(conv(x, weight(shape))), [var("x", X)]))
    assert placement.outputs["fused_0"].layout == "plain"
    (tensor,) = (tensor for tensor in placement.tensors if tensor.writer)
    assert tensor.reason == "nobody reads it packed, so it is written as the module has it"
    assert (tensor.conversions, tensor.cost) == ((), channels * 36 * 4)


@pytest.mark.parametrize(
    ("wish", "kernel", "layout"), [("any", 3, "plain"), ("any", 9, "NCHW4c"), ("texture", 3, "NCHW4c")]
)
def test_a_plain_tensor_is_read_as_it_is_where_packing_costs_more(
    wish: str, kernel: int, layout: str
) -> None:
    calls = Calls()
    image, shape = (1, 3, 256, 256), (16, 3, kernel, kernel)
    conv = calls.conv(image, shape, wants(wish), padding=[kernel // 2] * 2)
    placement = decided(calls.main(lambda emit, x: emit(conv(x, weight(shape))), [var("x", image)]))
    assert placement.operands["fused_0"][0].layout == layout
    (tensor,) = (tensor for tensor in placement.tensors if tensor.value == "x")
    if layout == "plain":
        moved, packed = map(int, re.findall(r"(\d+) bytes moved, (\d+) if it were packed", tensor.reason)[0])
        assert moved < packed
        assert tensor.conversions == ()
    else:
        assert [conversion.kind for conversion in tensor.conversions] == ["pack"]
