"""Conditions: each kind holds or fails on a concrete convolution, and the sentence says why."""

from __future__ import annotations

import pytest
from match_helpers import hazard, module, row, table
from tvm import relax

from fusion_patterns.match import Outcome, plan_fusion

op, nn = relax.op, relax.op.nn

NODES = {
    "conv": {"op": "nn.conv2d", "in": ["data", "weight"]},
    "bias": {"op": "add", "in": ["conv", "bias_vector"], "optional": True},
    "act": {"op": ["clip", "nn.relu", "nn.leakyrelu"], "optional": True},
}


def conv(groups=1, bias=(1, 8, 1, 1), strides=1):
    """Returns a module with a convolution, a bias and a relu."""

    def build(emit, x, b, w):
        made = emit(nn.conv2d(x, w, groups=groups, strides=strides))
        return emit(nn.relu(emit(op.add(made, b))))

    return module(build, inputs=["x", "b"], b=bias, w=(8, 8 // groups, 1, 1))


def verdict(predicate, mod=None):
    """Returns "" if the condition holds, else the reason."""
    plan = plan_fusion(conv() if mod is None else mod, table(row("r", NODES, where=[predicate])))
    whole = [d for d in plan.decisions if d.outcome is Outcome.APPLIED and d.progress == 3]
    return "" if whole else plan.decisions[-1].reason


@pytest.mark.parametrize(
    "predicate",
    [
        {"node": "conv", "attr": "groups", "equals": 1},
        {"node": "conv", "attr": "strides", "equals": [1, 1]},
        {"node": "conv", "attr": "data_layout", "in": ["NHWC", "NCHW"]},
        {"node": "conv", "attr": "groups", "multiple_of": 1},
        {"node": "conv", "attr": "groups", "between": [1, 4]},
        {"node": "conv", "uses": 1},
        {"tensor": "data", "dtype": ["float16", "float32"]},
        {"tensor": "data", "rank": 4},
        {"tensor": "data", "static": True},
        {"tensor": "data", "constant": False},
        {"tensor": "data", "layout": "NCHW"},
        {"tensor": "weight", "layout": "OIHW"},
        {"tensor": "data", "uses": 1},
        {"tensor": "data", "dim": "C", "multiple_of": 4},
        {"tensor": "weight", "dim": "O", "equals": 8},
        {"tensor": "data", "dim": 3, "between": [1, 6]},
        {"tensor": "bias_vector", "broadcast": "channel"},
        {"tensor": "output", "dim": "H", "equals": 6},
        {"that": "conv.groups == 1 and weight.I == data.C"},
        {"that": "data.H * data.W < 100 and not conv.strides[0] == 2"},
        {"that": "output.shape == conv.shape"},
    ],
    ids=str,
)
def test_holds(predicate):
    assert verdict(predicate) == ""


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [
        ({"node": "conv", "attr": "groups", "equals": 2}, "groups of `lv` (nn.conv2d) is 1, not 2"),
        (
            {"node": "conv", "attr": "data_layout", "in": ["NHWC", "NWC"]},
            "data_layout of `lv` (nn.conv2d) is NCHW, not NHWC or NWC",
        ),
        (
            {"node": "conv", "attr": "strides", "equals": [2, 2]},
            "strides of `lv` (nn.conv2d) is [1, 1], not [2, 2]",
        ),
        ({"node": "conv", "uses": 2}, "`lv` (nn.conv2d) is used once, not twice"),
        ({"node": "act", "attr": "alpha", "equals": 0.1}, "`lv2` (nn.relu) has no attribute alpha"),
        ({"tensor": "data", "dtype": "int8"}, "dtype of `x` (data of `lv`) is float32, not int8"),
        ({"tensor": "data", "rank": 3}, "rank of `x` (data of `lv`) is 4, not 3"),
        ({"tensor": "weight", "constant": True}, "`w` (weight of `lv`) is no constant"),
        ({"tensor": "data", "static": False}, "`x` (data of `lv`) has a static shape"),
        ({"tensor": "data", "layout": "NHWC"}, "layout of `x` (data of `lv`) is NCHW, not NHWC"),
        (
            {"tensor": "data", "dim": "C", "multiple_of": 3},
            "dimension C of `x` (data of `lv`) is 8, no multiple of 3",
        ),
        (
            {"tensor": "data", "dim": "O", "equals": 8},
            "`x` (data of `lv`): the layout NCHW has no O",
        ),
        (
            {"tensor": "data", "dim": 2, "between": [8, 16]},
            "dimension 2 of `x` (data of `lv`) is 6, not between 8 and 16",
        ),
        (
            {"that": "conv.groups == data.C"},
            "`conv.groups == data.C` does not hold: conv.groups = 1, data.C = 8",
        ),
        (
            {"that": "conv.groups // 0 == 1"},
            "`conv.groups // 0 == 1` can't be decided: 1 // 0 has no value",
        ),
    ],
    ids=str,
)
def test_fails(predicate, reason):
    assert verdict(predicate) == reason


@pytest.mark.parametrize(
    ("shape", "forms"),
    [
        ((1, 8, 1, 1), {"channel"}),
        ((8, 1, 1), {"channel"}),
        ((), {"scalar"}),
        ((1, 1, 1, 1), {"scalar"}),
        ((1, 8, 6, 6), {"same"}),
        ((6,), {"other"}),
        ((8, 6, 6), {"other"}),
        ((1, 1, 6, 6), {"other"}),
    ],
)
def test_broadcast_forms(shape, forms):
    for form in ("channel", "scalar", "same", "other"):
        plan = plan_fusion(
            conv(bias=shape),
            table(row("r", NODES, where=[{"tensor": "bias_vector", "broadcast": form}])),
        )
        has_bias = any("bias" in match.nodes for match in plan.matches)
        assert has_bias == (form in forms), form


def test_channels_are_last_in_nhwc():
    def build(emit, x, b, w):
        made = emit(nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))
        return emit(op.add(emit(nn.relu(made)), b))

    mod = module(build, inputs=["x", "b"], x=(1, 6, 6, 8), b=(8,), w=(8, 1, 1, 8))
    nodes = {
        "conv": NODES["conv"],
        "act": {"op": "nn.relu"},
        "bias": {"op": "add", "in": ["act", "bias_vector"]},
    }
    where = [
        {"tensor": "bias_vector", "broadcast": "channel"},
        {"tensor": "data", "layout": "NHWC"},
        {"that": "data.C == 8 and weight.I == 8 and act.C == 8 and output.H == 6"},
    ]
    assert len(plan_fusion(mod, table(row("r", nodes, where=where))).matches) == 1


def test_a_condition_on_what_is_absent_holds():
    nodes = {**NODES, "bias": {"op": "subtract", "in": ["conv", "bias_vector"], "optional": True}}
    where = [
        {"tensor": "bias_vector", "rank": 9},
        {"node": "bias", "uses": 9},
        {"that": "bias_vector.C == 9"},
    ]
    plan = plan_fusion(conv(), table(row("r", nodes, where=where)))
    assert [sorted(match.nodes) for match in plan.matches] == [["conv"]]


def test_a_failed_condition_leaves_an_optional_node_out():
    plan = plan_fusion(conv(), table(row("r", NODES, where=[{"tensor": "bias_vector", "broadcast": "same"}])))
    assert [sorted(match.nodes) for match in plan.matches] == [["conv"]]
    (refusal,) = plan.declined()
    assert refusal.reason == "broadcast form of `b` (bias_vector of `lv1`) is channel, not same"
    assert (refusal.culprit, refusal.where, refusal.progress) == ("b", "test.yaml:10", 2)


def test_a_condition_on_a_repeated_node_holds_for_each():
    def build(emit, x, y, w):
        value = emit(nn.conv2d(x, w))
        for alpha in (0.1, 0.1, 0.2, 0.1):
            value = emit(nn.leakyrelu(value, alpha))
        return value

    nodes = {"conv": NODES["conv"], "tail": {"op": "nn.leakyrelu", "repeat": 8}}
    where = [{"node": "tail", "attr": "alpha", "equals": 0.1}]
    plan = plan_fusion(module(build), table(row("r", nodes, where=where)))
    assert [len(match.ops) for match in plan.matches] == [3]
    (refusal,) = plan.declined()
    assert refusal.reason == "alpha of `lv3` (nn.leakyrelu) is 0.2, not 0.1"


@pytest.mark.parametrize(
    ("case", "predicate", "reason"),
    [
        (
            "dynamic_batch",
            {"tensor": "data", "static": True},
            "`x` (data of `c`) has a shape that is not known at compile time",
        ),
        (
            "dynamic_channel",
            {"tensor": "data", "dim": "C", "multiple_of": 4},
            "`x` (data of `k`): the dimension C is not known at compile time",
        ),
        (
            "unknown_shape_rank_only",
            {"that": "data.shape == conv.shape"},
            "`data.shape == conv.shape` can't be decided: the shape is not known",
        ),
    ],
)
def test_what_is_not_known_never_satisfies(case, predicate, reason):
    assert verdict(predicate, hazard(case)) == reason
