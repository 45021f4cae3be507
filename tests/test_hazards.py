"""Modules that break careless fusion, layout or placement: each is verified on a device, or declined aloud.

They live in ``../shared/hazards``; the tests are skipped where that folder is not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from modules import draw, relative_error

from fusion_patterns import compile_module, verify
from fusion_patterns.compiler import as_target
from fusion_patterns.errors import BuildError
from fusion_patterns.place import place
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device


@dataclass(frozen=True)
class Expected:
    """Convolutions in the module and those inside a composite; why not all, in a part of a reason."""

    total: int
    covered: int
    reason: str = ""


def all_of(total: int) -> Expected:
    return Expected(total, total)


UNKNOWN = "has a shape that is not known at compile time"

EXPECTED: dict[str, Expected] = {
    "multi_consumer_intermediate": all_of(3),
    "intermediate_is_output": all_of(1),
    "residual_add_rhs": all_of(1),
    "residual_add_lhs": all_of(1),
    "residual_of_two_convs": all_of(2),
    "conv_input_is_residual": all_of(1),
    "self_add": all_of(1),
    "data_is_weight": all_of(1),
    "nonconvex_through_softmax": all_of(1),
    "squeeze_excite": all_of(2),
    "diamond_epilogue": all_of(1),
    "dead_code": all_of(1),
    "split_glu": all_of(1),
    "batch_norm_tuple": all_of(1),
    "concat_of_chains": all_of(3),
    "tuple_param": all_of(1),
    "shared_constant_two_convs": all_of(2),
    "same_weight_twice": all_of(2),
    "same_kernel_two_scopes": all_of(3),
    "scope_vote_minority_first": all_of(3),
    "bias_ranks": all_of(1),
    "dynamic_batch": Expected(1, 0, f"`x` (data of `c`) {UNKNOWN}"),
    "dynamic_channel": Expected(1, 0, f"`x` (data of `k`) {UNKNOWN}"),
    "int8_conv": Expected(1, 0, "dtype of `x` (data of `c`) is int8, not float32 or float16"),
    "grouped_conv": all_of(1),
    "grouped_conv_unaligned_group": all_of(1),
    "depthwise_separable": all_of(2),
    "channels_in_3": all_of(1),
    "channels_out_unaligned": all_of(2),
    "conv2d_transpose_chain": all_of(2),
    "conv1d_mixed": all_of(1),
    "two_public_functions": all_of(2),
    "nested_function_call": all_of(1),
    "preformed_composite": Expected(1, 0),  # somebody else's composite is left alone
    "non_dataflow_block": all_of(1),
    "if_else_branches": all_of(2),
    "user_call_tir": all_of(2),
    "shape_expr_binding": Expected(1, 0, f"`x` (data of `lv`) {UNKNOWN}"),
    "bool_where": all_of(1),
    "channel_shuffle": all_of(2),
    "fake_nchw4c": all_of(0),
    "pooling_mix": all_of(2),
    "norm_after_conv": all_of(2),
    "layer_norm_chw": all_of(1),
    "unet_upsample": all_of(2),
    "explicit_pad": all_of(1),
    "native_activations": all_of(7),
    "relu6_chain": all_of(2),
    "onnx_relu6": all_of(1),
    "onnx_hardswish": all_of(1),
    "onnx_silu": all_of(1),
    "onnx_prelu": all_of(1),
    "onnx_resnet_block": all_of(2),
}
HALF = ("fp16_chain", "fp16_conv_only")
UNBUILDABLE = "unknown_shape_rank_only"
TOLERANCE = 1e-5  # a tenth of what the project promises


@pytest.fixture(scope="module")
def hazards(shared: object) -> ModuleType:
    return pytest.importorskip("hazards", reason="the hazards are not beside the checkout")


PLAIN = ("channels_in_3", "data_is_weight")
"""One convolution, from the caller's image of few channels to the caller's result: nothing is in texture."""


def test_every_hazard_has_an_expectation(hazards: ModuleType) -> None:
    assert sorted([*EXPECTED, *HALF, UNBUILDABLE]) == sorted(hazards.CASES)


@pytest.mark.opencl
@pytest.mark.parametrize("name", EXPECTED)
def test_a_hazard(hazards: ModuleType, opencl_device: Device, name: str) -> None:
    if name.startswith("onnx_"):
        pytest.importorskip("onnx")
    expected = EXPECTED[name]
    mod = hazards.CASES[name]()
    report = verify(mod, device=opencl_device.info.index, symbols=hazards.SYM[name])
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    figures = report.compiled.report
    assert figures.convs == {"total": expected.total, "covered": expected.covered}
    reasons = [declined.reason for declined in figures.declined if declined.row.startswith("conv2d")]
    if expected.reason:
        assert any(expected.reason in reason for reason in reasons), reasons
    images = any("image2d_array_t" in source for source in report.compiled.kernels.values())
    assert images == (expected.covered > 0 and name not in PLAIN)


@pytest.mark.opencl
@pytest.mark.parametrize("flag", [True, False])
def test_both_branches(hazards: ModuleType, opencl_device: Device, flag: bool) -> None:
    mod = hazards.CASES["if_else_branches"]()
    inputs = {**{name: value for name, value in draw(mod).items() if name != "p"}, "p": np.array(flag)}
    report = verify(mod, device=opencl_device.info.index, inputs=inputs)
    assert report.ok
    assert report.worst < TOLERANCE


@pytest.mark.opencl
def test_the_other_public_function(hazards: ModuleType, opencl_device: Device) -> None:
    mod = hazards.CASES["two_public_functions"]()
    report = verify(mod, device=opencl_device.info.index, function="encode")
    assert report.ok
    assert report.worst < TOLERANCE


@pytest.mark.opencl
@pytest.mark.parametrize("name", HALF)
def test_float16_on_a_device_that_has_it(hazards: ModuleType, opencl_device: Device, name: str) -> None:
    if not opencl_device.info.float16:
        pytest.skip(f"{opencl_device.info} has no float16")
    report = verify(hazards.CASES[name](), device=opencl_device.info.index)
    assert report.ok
    assert report.worst < 1e-2


@pytest.mark.parametrize("name", HALF)
def test_float16_compiles_to_whole_texels(hazards: ModuleType, name: str) -> None:
    mod = hazards.CASES[name]()
    compiled = compile_module(mod)
    assert compiled.report.convs == {"total": 1, "covered": 1}
    stores = [s for source in compiled.kernels.values() for s in re.findall(r"write_imageh\((.*)\);", source)]
    assert stores  # the packed input
    assert all("as_half4(" in store for store in stores)
    placed, _ = place(compiled.fused, as_target(), compiled.placement)
    inputs = draw(mod)
    ours, theirs = Reference(placed).run(inputs), Reference(mod).run(inputs)
    assert relative_error(ours[0], theirs[0]) < 1e-2


def test_a_module_whose_shapes_nobody_knows_is_refused_with_the_value(hazards: ModuleType) -> None:
    with pytest.raises(BuildError) as refusal:
        compile_module(hazards.CASES[UNBUILDABLE]())
    assert str(refusal.value) == (
        "`x` in function `main`: its shape is not known before the run; run this module through TVM's own VM "
        "with fusion_patterns.pipeline()"
    )


def test_stock_tvm_can_not_build_it_either(hazards: ModuleType) -> None:
    with pytest.raises(BuildError, match=r"^stock TVM can't build this module for the CPU: "):
        Reference(hazards.CASES[UNBUILDABLE]())
