"""float64 as the judge: the same module, every float of it widened."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from networks import run_on_cpu
from test_normalise import const, function
from tvm import relax, te

from fusion_patterns import verify
from fusion_patterns.double import in_double
from fusion_patterns.errors import BuildError
from fusion_patterns.run import Device


def cancelling(bb, x):
    """Adds a large number and takes it away again: float32 loses what float64 keeps."""
    y = bb.emit(relax.op.nn.conv2d(x, const(4, 3, 3, 3), padding=1))
    return bb.emit(relax.op.subtract(bb.emit(relax.op.add(y, relax.const(1e6))), relax.const(1e6)))


def with_a_kernel(bb, x):
    return bb.emit_te(
        lambda a: te.compute(a.shape, lambda *i: te.exp(a(*i)) + tvm.tirx.const(1.0, a.dtype)), x
    )


@pytest.mark.parametrize("build", [cancelling, with_a_kernel])
def test_everything_is_computed_in_float64(build) -> None:
    mod = function(build, (1, 3, 5, 5))
    x = np.random.default_rng(0).standard_normal((1, 3, 5, 5)).astype("float32")
    (double,) = in_double(mod, {"x0": x})
    (single,) = run_on_cpu(mod, [x])
    assert double.dtype == np.float64
    assert single.dtype == np.float32
    error = np.abs(double - single).max() / np.abs(double).max()
    assert 0 < error < (0.1 if build is cancelling else 1e-6)
    if build is cancelling:
        assert error > 1e-4
        (weight,) = (
            b.value.args[1] for block in mod["main"].body.blocks for b in block.bindings
            if getattr(b.value, "op", None) == tvm.ir.Op.get("relax.nn.conv2d")
        )  # fmt: skip
        exact = function(lambda bb, x: bb.emit(relax.op.nn.conv2d(x, weight, padding=1)), (1, 3, 5, 5))
        (plain,) = in_double(exact, {"x0": x})
        np.testing.assert_allclose(double, plain, atol=1e-8)


@pytest.mark.opencl
def test_float64_judges_where_the_cpu_loses_digits(opencl_device: Device) -> None:
    """The large number is folded away here, and rounded to by the untouched module."""
    report = verify(function(cancelling, (1, 3, 5, 5)), device=opencl_device.info.index)
    assert [check.name for check in report.outputs] == ["output 0, against float64"]
    assert report.ok
    assert report.worst < 1e-6
    assert report.first_wrong is None


def test_another_function_is_widened_by_name() -> None:
    mod = function(cancelling, (1, 3, 5, 5))
    mod["other"] = mod["main"].with_attr("global_symbol", "other")
    x = np.random.default_rng(0).standard_normal((1, 3, 5, 5)).astype("float32")
    with pytest.raises(BuildError, match=r"the constants of `(main|other)` can't be widened to float64"):
        in_double(mod, {"x0": x}, "other")
    plain = function(with_a_kernel, (1, 3, 5, 5))
    plain["other"] = plain["main"].with_attr("global_symbol", "other")
    assert in_double(plain, {"x0": x}, "other")[0].dtype == np.float64
