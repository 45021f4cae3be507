"""Activations that importers write in several operators with two branches: one kernel with their convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from modules import const, graph, nn, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, verify
from fusion_patterns.run import Device

TOLERANCE = 1e-5
SHAPE = (2, 5, 9, 7)


def number(value: float) -> Any:
    return relax.const(value, "float32")


def elu(emit: Any, x: Any, alpha: float = 1.3) -> Any:
    """As importers of ONNX, PyTorch and TFLite write it."""
    below = emit(nn.relu(emit(op.subtract(number(1.0), emit(op.exp(x))))))
    return emit(op.add(emit(op.multiply(number(-alpha), below)), emit(nn.relu(x))))


def swapped(emit: Any, x: Any) -> Any:
    above = emit(nn.relu(x))
    below = emit(nn.relu(emit(op.subtract(number(1.0), emit(op.exp(x))))))
    return emit(op.add(above, emit(op.multiply(below, number(-0.7)))))


def selu(emit: Any, x: Any) -> Any:
    return emit(op.multiply(number(1.0507), elu(emit, x, 1.6733)))


def celu(emit: Any, x: Any) -> Any:
    """As the importer of PyTorch writes it."""
    scaled = emit(op.divide(emit(op.exp(x)), number(0.5)))
    below = emit(op.minimum(number(0.0), emit(op.subtract(scaled, number(1.0)))))
    return emit(op.add(emit(op.multiply(number(0.5), below)), emit(nn.relu(x))))


def conv(emit: Any, x: Any, channels: int, size: int = 3, seed: int = 0, **attrs: Any) -> Any:
    given = int(x.ty.shape.values[1]) // int(attrs.get("groups", 1))
    made = emit(nn.conv2d(x, weight((channels, given, size, size), seed), padding=[size // 2] * 2, **attrs))
    return emit(op.add(made, const((1, channels, 1, 1), seed + 1)))


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "elu": elu,
    "elu, branches swapped": swapped,
    "selu": selu,
    "celu": celu,
    "nn.selu": lambda emit, x: emit(nn.selu(x)),
    "elu of elu": lambda emit, x: elu(emit, elu(emit, x)),
}


@pytest.mark.opencl
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_computed_where_its_convolution_is(opencl_device: Device, name: str) -> None:
    def build(emit: Any, x: Any) -> Any:
        value = ACTIVATIONS[name](emit, conv(emit, x, 7))
        return ACTIVATIONS[name](emit, conv(emit, value, 7, seed=2, groups=7))

    report = verify(graph(build, [var("x", SHAPE)]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert all(output.varies for output in report.outputs)
    assert report.compiled is not None
    assert report.compiled.report.composites == {"conv2d.chain": 1, "conv2d.depthwise": 1}


@pytest.mark.opencl
def test_between_branches_that_leave_nothing_is_lost(opencl_device: Device) -> None:
    """What is below zero is read by another operator as well, so it has to be in memory."""

    def build(emit: Any, x: Any) -> Any:
        value = conv(emit, x, 7)
        below = emit(
            op.multiply(number(-1.3), emit(nn.relu(emit(op.subtract(number(1.0), emit(op.exp(value)))))))
        )
        return [emit(op.add(below, emit(nn.relu(value)))), conv(emit, below, 4, 1, seed=4)]

    report = verify(graph(build, [var("x", SHAPE)]), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE


def test_the_reason_names_the_reader_outside() -> None:
    def build(emit: Any, x: Any) -> Any:
        value = conv(emit, x, 8)
        above = emit(nn.relu(value))
        below = emit(nn.relu(emit(op.subtract(number(1.0), emit(op.exp(value))))))
        whole = emit(op.add(emit(op.multiply(number(-1.0), below)), above))
        return [whole, emit(nn.max_pool2d(above, [2, 2]))]

    report = compile_module(graph(build, [var("x", (1, 8, 8, 8))])).report
    reasons = [declined.reason for declined in report.declined if declined.row == "conv2d.chain"]
    assert reasons
    assert all("outside the match" in reason for reason in reasons), reasons
    assert report.composites["conv2d.chain"] == 1
