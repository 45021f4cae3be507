"""The hazards: what is fused in each, what is declined, and the sentence that says why."""

from __future__ import annotations

import pytest
from match_helpers import chain_table, hazard, hazards, names

from fusion_patterns.match import FusionPlan, Outcome, plan_fusion

TABLE = chain_table()


def planned(case: str) -> FusionPlan:
    return plan_fusion(hazard(case), TABLE)


def fused(plan: FusionPlan) -> list[str]:
    """Returns the matches in one line each: the row's first word and the operators."""
    return [f"{match.row.name.partition('.')[0]}: {' '.join(names(match))}" for match in plan.matches]


def reasons(plan: FusionPlan, row: str = "conv2d.chain") -> dict[str, str]:
    """Returns why a row was declined, by anchor."""
    return {d.anchor: d.reason for d in plan.declined() if d.row == row}


@pytest.mark.parametrize(
    ("case", "matches"),
    [
        ("residual_add_rhs", ["conv2d: c cb s o"]),
        ("residual_add_lhs", ["conv2d: c cb s o"]),
        ("conv_input_is_residual", ["conv2d: c cb s o"]),
        ("self_add", ["conv2d: c d e"]),
        ("data_is_weight", ["conv2d: c o"]),
        ("diamond_epilogue", ["conv2d: c a b m o"]),
        ("concat_of_chains", ["conv2d: lv a", "conv2d: lv2 b", "conv2d: o"]),
        ("tuple_param", ["conv2d: c o"]),
        ("split_glu", ["conv2d: c", "elementwise: g", "elementwise: o"]),
        ("shared_constant_two_convs", ["conv2d: lv lv1 lv2", "conv2d: lv3 lv4 lv5"]),
        ("bias_ranks", ["conv2d: lv lv1 lv2 lv3 lv4"]),
        ("dynamic_channel", ["conv2d: k o"]),
        ("fp16_chain", ["conv2d: c lv1 o"]),
        ("relu6_chain", ["conv2d: c d e", "conv2d: f o"]),
        ("onnx_relu6", ["conv2d: lv lv4 lv5 lv8"]),
        ("onnx_silu", ["conv2d: lv lv2 lv3 gv"]),
        ("onnx_prelu", ["conv2d: lv lv2 gv"]),
        ("user_call_tir", ["conv2d: c s", "conv2d: d"]),
        ("if_else_branches", ["conv2d: lv a", "conv2d: lv2 b"]),
        ("two_public_functions", ["conv2d: lv o", "conv2d: lv o"]),
        ("nested_function_call", ["conv2d: lv o", "elementwise: o"]),
    ],
)
def test_fused(case: str, matches: list[str]) -> None:
    plan = planned(case)
    assert fused(plan) == matches
    assert reasons(plan) == {}


def test_a_value_with_two_users_ends_the_match() -> None:
    plan = planned("multi_consumer_intermediate")
    assert fused(plan) == ["conv2d: c0 r0", "conv2d: c2", "conv2d: c1 s o"]
    assert reasons(plan) == {
        "c0": "fusing would close a cycle: `r0` (nn.relu) -> `c1` (nn.conv2d) -> `s` (add) -> `o` (add)"
        " leaves the match and comes back into it",
        "c2": "`s` (add) went to conv2d.chain at `c1`, which saves 6400 bytes",
    }


def test_a_value_that_is_returned_ends_the_match() -> None:
    plan = planned("intermediate_is_output")
    assert fused(plan) == ["conv2d: c pre", "elementwise: act"]
    assert reasons(plan) == {"c": "`pre` (add) is also the function's result"}


def test_a_residual_of_two_convolutions_goes_to_one_of_them() -> None:
    plan = planned("residual_of_two_convs")
    assert fused(plan) == ["conv2d: b", "conv2d: a s o"]
    assert reasons(plan) == {"b": "`s` (add) went to conv2d.chain at `a`, which saves 6400 bytes"}


def test_a_cycle_through_softmax() -> None:
    plan = planned("nonconvex_through_softmax")
    assert fused(plan) == ["conv2d: c", "elementwise: o"]
    assert reasons(plan) == {
        "c": "fusing would close a cycle: `c` (nn.conv2d) -> `s` (nn.softmax) -> `o` (multiply)"
        " leaves the match and comes back into it"
    }


def test_squeeze_and_excite() -> None:
    plan = planned("squeeze_excite")
    assert fused(plan) == ["conv2d: c r", "conv2d: g sg", "elementwise: o"]
    assert reasons(plan) == {
        "c": "fusing would close a cycle: `r` (nn.relu) -> `m` (mean) -> `g` (nn.conv2d) -> `sg` (sigmoid) ->"
        " `o` (multiply) leaves the match and comes back into it",
        "g": "`output.H == conv.H` does not hold: output.H = 6, conv.H = 1",
    }


def test_three_users_inside_one_block() -> None:
    plan = planned("bool_where")
    assert reasons(plan) == {"lv": "`lv` (nn.conv2d) is also used by `lv1` (greater), outside the match"}


def test_dead_code_may_be_fused_and_breaks_nothing() -> None:
    plan = planned("dead_code")
    assert fused(plan) == ["conv2d: c", "conv2d: dead dead2", "elementwise: o"]
    assert reasons(plan) == {"c": "`c` (nn.conv2d) is also used by `dead` (nn.conv2d), outside the match"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("grouped_conv", "groups of `c` (nn.conv2d) is 2, not 1"),
        ("int8_conv", "dtype of `x` (data of `c`) is int8, not float32 or float16"),
        ("non_dataflow_block", "`c` (nn.conv2d) is in a plain binding block; run ConvertToDataflow first"),
    ],
)
def test_declined_at_the_anchor(case: str, reason: str) -> None:
    plan = planned(case)
    assert not any(match.row.name == "conv2d.chain" for match in plan.matches)
    assert reasons(plan) == {"c": reason}


def test_a_condition_points_to_its_line() -> None:
    (refusal,) = planned("grouped_conv").declined()
    assert (refusal.where, refusal.culprit, refusal.function) == ("test.yaml:10", "c", "main")
    assert str(refusal) == (
        "main: conv2d.chain at `c`: declined: groups of `c` (nn.conv2d) is 2, not 1 [test.yaml:10]"
    )


def test_composites_are_skipped() -> None:
    plan = planned("preformed_composite")
    assert fused(plan) == ["elementwise: o"]
    assert plan.decisions[0].outcome is Outcome.SKIPPED
    assert plan.decisions[0].reason == "is a composite already"


def test_symbolic_dimensions_match() -> None:
    plan = planned("dynamic_batch")
    assert fused(plan) == ["conv2d: c lv1 o"]
    # A symbol counts as one element: two tensors of (n, 8, 6, 6).
    assert plan.matches[0].saved_bytes == 2 * 8 * 6 * 6 * 4


def test_a_shape_that_is_not_known_satisfies_no_condition_on_it() -> None:
    plan = planned("unknown_shape_rank_only")
    assert fused(plan) == ["elementwise: o"]
    assert reasons(plan)["k"].startswith(
        "`output.H == conv.H` can't be decided: the dimension H is not known"
    )


@pytest.mark.parametrize("case", ["onnx_hardswish", "native_activations", "pooling_mix", "unet_upsample"])
def test_every_convolution_is_taken_with_what_follows(case: str) -> None:
    plan = planned(case)
    mod = hazard(case)
    convolutions = [
        binding.var.name
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.nn.conv2d"
    ]
    taken = [name for match in plan.matches if match.row.name == "conv2d.chain" for name in names(match)]
    assert set(convolutions) <= set(taken)
    assert all(len(match.ops) > 1 for match in plan.matches if match.row.name == "conv2d.chain")


def test_all_hazards_are_planned_without_a_fault() -> None:
    for case in hazards().CASES:
        plan = planned(case)
        assert not [d for d in plan.decisions if d.outcome is Outcome.INVALID], case
        assert all(decision.reason and decision.where for decision in plan.decisions), case
