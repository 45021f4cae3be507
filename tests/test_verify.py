"""`verify` says no where the numbers are wrong, and where agreement would say nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from modules import array, graph, nn, var, weight
from tvm import relax, tirx
from tvm.relax import op

from fusion_patterns import verify
from fusion_patterns.lower.compute import scalars
from fusion_patterns.run import Device
from fusion_patterns.verification import VerifyReport, compare

X = (1, 8, 6, 6)


def chain(*activations: Callable[[Any], Any]) -> tvm.IRModule:
    """A 1x1 convolution for each activation, one after the other."""

    def build(emit: Any, x: Any) -> Any:
        for seed, activation in enumerate(activations):
            x = emit(activation(emit(nn.conv2d(x, weight((8, 8, 1, 1), seed)))))
        return x

    return graph(build, [var("x", X)])


def check(mod: tvm.IRModule, device: Device, **more: Any) -> VerifyReport:
    return verify(mod, device=device.info.index, **more)


# On a device ------------------------------------------------------------------------------------------------


@pytest.mark.opencl
def test_right_numbers(opencl_device: Device) -> None:
    report = check(chain(nn.relu, op.tanh), opencl_device)
    assert report.ok
    assert report.first_wrong is None
    assert 0 < report.worst < 1e-5
    assert report.device == opencl_device.info.name
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is True
    assert [output["name"] for output in data["outputs"]] == ["output 0"]
    assert data["report"]["convs"] == {"total": 2, "covered": 2}


@pytest.mark.opencl
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_kernel_is_found_and_its_composite_named(
    monkeypatch: pytest.MonkeyPatch, opencl_device: Device, place: int
) -> None:
    monkeypatch.setitem(scalars._PLAIN, "tanh", lambda a: tirx.tanh(a) + tirx.const(0.01, "float32"))
    activations: list[Callable[[Any], Any]] = [nn.relu, nn.silu, op.exp]
    activations[place] = op.tanh
    report = check(chain(*activations), opencl_device)
    assert not report.ok
    assert report.worst > 1e-4
    assert report.first_wrong is not None
    assert report.first_wrong.startswith("conv2d.chain `")
    assert report.compiled is not None
    matches = [name for name in report.compiled.placement.outputs if f"({name})" in report.first_wrong]
    (composite,) = matches
    assert "tanh" in report.compiled.fused[composite].script()


@pytest.mark.opencl
def test_a_small_error_is_found_too(monkeypatch: pytest.MonkeyPatch, opencl_device: Device) -> None:
    monkeypatch.setitem(scalars._PLAIN, "tanh", lambda a: tirx.tanh(a) * tirx.const(1.0005, "float32"))
    report = check(chain(op.tanh), opencl_device)
    assert not report.ok
    assert report.worst == pytest.approx(5e-4, rel=0.01)


@pytest.mark.opencl
def test_a_constant_output_says_nothing(opencl_device: Device) -> None:
    report = check(chain(lambda c: op.multiply(c, relax.const(0.0))), opencl_device)
    (output,) = report.outputs
    assert output.ok
    assert not output.varies
    assert not report.ok


@pytest.mark.opencl
def test_one_output_that_varies_is_enough(opencl_device: Device) -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        value = emit(nn.conv2d(x, weight((8, 8, 1, 1))))
        return [value, emit(op.multiply(value, relax.const(0.0)))]

    report = check(graph(build, [var("x", X)]), opencl_device)
    assert [output.varies for output in report.outputs] == [True, False]
    assert report.ok


@pytest.mark.opencl
@pytest.mark.parametrize("make", [op.log, op.sqrt, lambda c: op.exp(op.multiply(c, relax.const(1000.0)))])
def test_an_output_that_is_not_finite(opencl_device: Device, make: Callable[[Any], Any]) -> None:
    report = check(chain(make), opencl_device)
    (output,) = report.outputs
    assert not output.finite
    assert not report.ok


@pytest.mark.opencl
def test_given_inputs_and_the_seed(opencl_device: Device) -> None:
    mod = chain(nn.relu)
    zeros = check(mod, opencl_device, inputs={"x": np.zeros(X, "float32")})
    assert not zeros.outputs[0].varies
    first, same, other = (check(mod, opencl_device, seed=seed).worst for seed in (0, 0, 1))
    assert first == same != other


# Comparing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "error", "ok"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.2e-4, False),
        ("float16", 0.9e-2, True),
        ("float16", 1.2e-2, False),
    ],
)
def test_tolerances_are_relative_to_the_outputs_scale(dtype: str, error: float, ok: bool) -> None:
    reference = np.array([100, 1, -50], dtype)
    result = (reference.astype("float64") + np.array([0, error * 100, 0])).astype(dtype)
    found = compare("x", result, reference)
    assert found.error == pytest.approx(error, rel=0.1)
    assert found.ok is ok


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_integers_must_be_equal(dtype: str) -> None:
    reference = np.array([0, 1, 1], dtype)
    assert compare("x", reference.copy(), reference).ok
    assert not compare("x", np.array([1, 1, 1], dtype), reference).ok


def test_another_shape_or_dtype_is_wrong() -> None:
    reference = array((2, 3))
    assert not compare("x", reference.reshape(3, 2), reference).ok
    assert not compare("x", reference.astype("float64"), reference).ok
    assert compare("x", reference.copy(), reference).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_same_inf_on_both_sides_is_no_agreement(bad: float) -> None:
    value = np.array([1, bad], "float32")
    found = compare("x", value, value)
    assert not found.finite
    assert found.error == float("inf")
    assert not found.ok


def test_what_counts_as_varying() -> None:
    assert not compare("x", np.ones(4, "float32"), np.ones(4, "float32")).varies
    assert compare("x", np.ones(1, "float32"), np.ones(1, "float32")).varies  # nothing to vary
    empty = np.ones((0, 3), "float32")
    assert compare("x", empty, empty).ok
    assert not compare("x", empty, empty).varies


def test_a_report_without_outputs_is_not_ok() -> None:
    assert not VerifyReport("a device").ok
    assert np.isnan(VerifyReport("a device").worst)
