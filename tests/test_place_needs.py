"""The layout that each operand of a composite must have, and why a composite can't be packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from modules import Calls, nn, var
from tvm import relax, tirx
from tvm.relax import op

from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.needs import Needs, needs_of

X = (1, 8, 6, 6)
W = (8, 8, 3, 3)


def composite(build: Callable[..., Any], *params: Any) -> Any:
    return Calls().composite(build, list(params)).func


def needs(build: Callable[..., Any], *params: Any) -> Needs:
    return needs_of(composite(build, *params))


def layouts(found: Needs) -> dict[str, str]:
    return {operand.name: operand.layout for operand in found.operands}


def conv(emit: Any, d: Any, w: Any, **attrs: Any) -> Any:
    return emit(nn.conv2d(d, w, **attrs))


# What is needed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kernel", "groups", "wanted"),
    [
        (X, W, 1, "OIHW4i4o"),
        ((1, 3, 6, 6), (7, 3, 3, 3), 1, "OIHW4i4o"),
        (X, (8, 4, 3, 3), 2, "OIHW4i4o"),
        (X, (8, 1, 3, 3), 8, "OIHW4o"),
        ((1, 6, 6, 6), (6, 1, 3, 3), 6, "OIHW4o"),
        (X, (16, 1, 3, 3), 8, "plain"),  # a multiplier of two
        ((1, 12, 6, 6), (12, 6, 3, 3), 2, "plain"),
        (X, (4, 4, 3, 3), 2, "plain"),  # two output channels in a group
    ],
)
def test_a_conv_needs_packed_data_and_a_weight_for_its_groups(
    data: tuple[int, ...], kernel: tuple[int, ...], groups: int, wanted: str
) -> None:
    found = needs(lambda e, d, w: conv(e, d, w, groups=groups), var("data", data), var("weight", kernel))
    assert layouts(found) == {"data": "NCHW4c", "weight": wanted}
    assert found.output_layout == "NCHW4c"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((1, 8, 4, 4), "NCHW4c"),
        ((1, 8, 1, 1), "NCHW4c"),  # a gate that another composite made needs no conversion
        ((1, 8, 1, 4), "NCHW4c"),
        ((8, 1, 1), "C4c"),
        ((8, 4, 4), "plain"),
        ((8, 1, 4), "plain"),
        ((1, 1, 4, 4), "plain"),
        ((4,), "plain"),
        ((1,), "plain"),
        ((), "plain"),
        ((1, 1, 1, 1), "plain"),
    ],
)
def test_an_operand_is_read_as_it_broadcasts(shape: tuple[int, ...], wanted: str) -> None:
    found = needs(
        lambda e, d, w, b: e(op.add(conv(e, d, w), b)), var("data", X), var("weight", W), var("b", shape)
    )
    assert layouts(found)["b"] == wanted


def test_one_channel_reads_nothing_by_channel() -> None:
    found = needs(
        lambda e, d, w, b: e(op.add(conv(e, d, w), b)),
        var("data", X),
        var("weight", (1, 8, 3, 3)),
        var("b", (1, 1, 1)),
    )
    assert layouts(found)["b"] == "plain"


@pytest.mark.parametrize(("slopes", "wanted"), [(8, "C4c"), (1, "plain")])
def test_prelu_reads_its_slopes_by_channel(slopes: int, wanted: str) -> None:
    found = needs(
        lambda e, d, w, s: e(nn.prelu(conv(e, d, w), s, 1)),
        var("data", X),
        var("weight", W),
        var("s", (slopes,)),
    )
    assert layouts(found)["s"] == wanted


def test_a_parameter_that_is_read_in_two_layouts_is_passed_twice() -> None:
    found = needs(lambda e, x: conv(e, x, x), var("x", (8, 8, 3, 3)))
    assert layouts(found) == {"x": "NCHW4c", "x_oihw4i4o": "OIHW4i4o"}
    assert [operand.param for operand in found.operands] == [0, 0]


def test_a_parameter_that_is_read_twice_in_one_layout_is_passed_once() -> None:
    found = needs(
        lambda e, d, w: e(op.add(conv(e, d, w, padding=[1, 1]), d)), var("data", X), var("weight", W)
    )
    assert layouts(found) == {"data": "NCHW4c", "weight": "OIHW4i4o"}
    assert found.reads == {(0, 0): 0, (0, 1): 1, (1, 1): 0}


# Why not --------------------------------------------------------------------------------------------------

N = tirx.Var("n", "int64")

REFUSALS: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "conv2d in NHWC": (
        lambda e, d, w: conv(e, d, w, data_layout="NHWC", kernel_layout="HWIO"),
        [var("data", (1, 6, 6, 8)), var("weight", (3, 3, 8, 8))],
        "conv2d in layout NHWC/HWIO has no packed kernel",
    ),
    "conv2d on integers": (
        lambda e, d, w: conv(e, d, w, out_dtype="int32"),
        [var("data", X, "int8"), var("weight", W, "int8")],
        "relax.nn.conv2d on int8 has no packed kernel",
    ),
    "conv2d of a symbolic batch": (
        conv,
        [var("data", (N, 8, 6, 6)), var("weight", W)],
        "`out` is not a tensor of four static dimensions",
    ),
    "conv2d whose weight is made inside": (
        lambda e, d, w: conv(e, d, e(nn.relu(w))),
        [var("data", X), var("weight", W)],
        "a value made inside the composite is wanted as OIHW4i4o",
    ),
    "another rank": (
        lambda e, d: e(nn.relu(d)),
        [var("data", (8, 6, 6))],
        "`out` is not a tensor of four static dimensions",
    ),
    "an operand of symbolic shape": (
        lambda e, d, w, b: e(op.add(conv(e, d, w), b)),
        [var("data", X), var("weight", W), var("b", (N,))],
        "`out` is not a tensor of four static dimensions",
    ),
    "an op without a packed kernel": (
        lambda e, d, w: e(nn.softmax(conv(e, d, w), axis=1)),
        [var("data", X), var("weight", W)],
        "no packed kernel for relax.nn.softmax",
    ),
    "an epilogue that makes the value larger": (
        lambda e, d, w, r: e(op.add(conv(e, d, w), r)),
        [var("data", X), var("weight", W), var("r", (3, 8, 4, 4))],
        "`out` broadcasts the value that the composite computes to (3, 8, 4, 4)",
    ),
    "prelu along the width": (
        lambda e, d, w, s: e(nn.prelu(conv(e, d, w), s, 3)),
        [var("data", X), var("weight", W), var("s", (4,))],
        "prelu along another axis than the channels",
    ),
    "conv2d_transpose in another layout": (
        lambda e, d, w: e(nn.conv2d_transpose(d, w, kernel_layout="OIHW")),
        [var("data", X), var("weight", W)],
        "conv2d_transpose in layout NCHW/OIHW",
    ),
    "conv2d_transpose with groups": (
        lambda e, d, w: e(nn.conv2d_transpose(d, w, groups=2)),
        [var("data", X), var("weight", (8, 4, 3, 3))],
        "conv2d_transpose with groups has no packed kernel",
    ),
    "conv2d_transpose with dilation": (
        lambda e, d, w: e(nn.conv2d_transpose(d, w, dilation=[2, 2])),
        [var("data", X), var("weight", W)],
        "conv2d_transpose with dilation has no packed kernel",
    ),
    "pooling in NHWC": (
        lambda e, d: e(nn.max_pool2d(d, [2, 2], layout="NHWC")),
        [var("data", X)],
        "pooling in layout NHWC has no packed kernel",
    ),
    "average pooling with dilation": (
        lambda e, d: e(nn.avg_pool2d(d, [2, 2], dilation=[2, 2])),
        [var("data", X)],
        "average pooling with dilation has no packed kernel",
    ),
    "a mean of the channels": (
        lambda e, d: e(op.mean(d, axis=[1], keepdims=True)),
        [var("data", X)],
        "only pooling of the whole image has a packed kernel",
    ),
    "an adaptive pool in NHWC": (
        lambda e, d: e(nn.adaptive_avg_pool2d(d, [2, 2], layout="NHWC")),
        [var("data", X)],
        "pooling in layout NHWC has no packed kernel",
    ),
    "a mean over some of the image": (
        lambda e, d: e(op.mean(d, axis=[3], keepdims=True)),
        [var("data", X)],
        "only pooling of the whole image has a packed kernel",
    ),
    "a concat of rows": (
        lambda e, a, b: e(op.concat([a, b], axis=2)),
        [var("a", X), var("b", X)],
        "concat along axis 2, not the channels",
    ),
    "a resize in NHWC": (
        lambda e, d: e(op.image.resize2d(d, relax.ShapeExpr([12, 12]), layout="NHWC")),
        [var("data", (1, 6, 6, 8))],
        "resize in layout NHWC has no packed kernel",
    ),
    "a cubic resize": (
        lambda e, d: e(op.image.resize2d(d, relax.ShapeExpr([12, 12]), layout="NCHW", method="cubic")),
        [var("data", X)],
        "resize by cubic has no packed kernel",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_composite_that_can_not_be_packed(name: str) -> None:
    build, params, reason = REFUSALS[name]
    with pytest.raises(NotPacked) as refusal:
        needs(build, *params)
    assert refusal.value.reason == reason
    assert refusal.value.culprit == "out"


def test_a_concat_whose_last_part_ends_inside_a_block_is_packed() -> None:
    found = needs(lambda e, a, b: e(op.concat([a, b], axis=1)), var("a", X), var("b", (1, 6, 6, 6)))
    assert layouts(found) == {"a": "NCHW4c", "b": "NCHW4c"}


def test_a_composite_with_two_results() -> None:
    func = composite(lambda e, d, w: e(nn.relu(conv(e, d, w))), var("data", X), var("weight", W))
    (block,) = func.body.blocks
    both = relax.Tuple([binding.var for binding in block.bindings])
    two = relax.Function(func.params, relax.SeqExpr([block], both), both.ty, True)
    with pytest.raises(NotPacked, match=r"^the composite returns more than one value$"):
        needs_of(two)


def test_an_empty_composite() -> None:
    x = var("x", X)
    with pytest.raises(NotPacked, match=r"^the composite is empty$"):
        needs_of(relax.Function([x], relax.SeqExpr([], x), x.ty, True))
