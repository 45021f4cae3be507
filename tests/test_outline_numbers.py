"""Outlining changes no numbers: the hazards on the CPU, fused and untouched."""

from __future__ import annotations

import numpy as np
import pytest
from match_helpers import chain_table, hazard, hazards, outputs
from tvm import relax

from fusion_patterns.match import plan_fusion
from fusion_patterns.outline import outline


@pytest.mark.parametrize(
    "case",
    [
        "multi_consumer_intermediate",
        "intermediate_is_output",
        "conv_input_is_residual",
        "self_add",
        "squeeze_excite",
        "diamond_epilogue",
        "tuple_param",
        "bias_ranks",
        "dynamic_batch",
        "if_else_branches",
        "user_call_tir",
        "onnx_relu6",
    ],
)
def test_same_numbers(case: str) -> None:
    mod = hazard(case)
    plan = plan_fusion(mod, chain_table())
    assert plan.matches
    fused = outline(mod, plan)
    sizes = hazards().SYM[case]
    for old, new in zip(outputs(mod, sizes=sizes), outputs(fused, sizes=sizes), strict=True):
        assert np.isfinite(old).all()
        assert old.std() > 0
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def test_all_hazards_stay_well_formed() -> None:
    for case in hazards().CASES:
        mod = hazard(case)
        try:
            relax.analysis.well_formed(outline(mod, plan_fusion(mod, chain_table())))
        except Exception as error:
            pytest.fail(f"{case}: {error}")
