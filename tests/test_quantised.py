"""Networks quantised to int8: the QDQ form that onnxruntime makes, on a device, against the CPU and onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from modules import graph, nn, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import compile_module, verification, verify
from fusion_patterns.errors import ModelError
from fusion_patterns.frontends import load_model
from fusion_patterns.normalise import normalise
from fusion_patterns.quantised import Quantisation, from_rounded, quantisations, with_rounded
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device

SHAPE = (1, 3, 16, 16)


def float_network() -> Any:
    """conv, relu, depthwise conv, a residual, pooling, and a fully connected layer, as ONNX."""
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return (rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5).astype("float32")

    weights = {
        **{"w0": drawn(8, 3, 3, 3), "b0": 0.1 * drawn(8), "w1": drawn(8, 1, 3, 3), "b1": 0.1 * drawn(8)},
        **{"w2": drawn(8, 8, 1, 1), "w3": drawn(10, 8)},
    }

    def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
        return onnx.helper.make_node(kind, inputs.split(), [output], **attributes)

    nodes = [
        node("Conv", "x w0 b0", "c0", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "c0", "r0"),
        node("Conv", "r0 w1 b1", "c1", pads=[1, 1, 1, 1], group=8),
        node("Conv", "c1 w2", "c2"),
        node("Add", "c2 r0", "s"),
        node("MaxPool", "s", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "p", "g"),
        node("Flatten", "g", "f"),
        node("Gemm", "f w3", "y", transB=1),
    ]
    floats = onnx.TensorProto.FLOAT
    made = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", floats, SHAPE)],
        [onnx.helper.make_tensor_value_info("y", floats, (1, 10))],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def quantise(folder: Path, **options: Any) -> Path:
    """The network, quantised by onnxruntime with statistics of four random images."""
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Images(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            rng = np.random.default_rng(1)
            self.images = iter([rng.standard_normal(SHAPE).astype("float32") for _ in range(4)])

        def get_next(self) -> Any:
            image = next(self.images, None)
            return None if image is None else {"x": image}

    onnx.save(float_network(), folder / "float.onnx")
    quantization.quantize_static(folder / "float.onnx", folder / "int8.onnx", Images(), **options)
    return folder / "int8.onnx"


def types(activation: str, weights: str) -> dict[str, Any]:
    kind = pytest.importorskip("onnxruntime.quantization").QuantType
    return {"activation_type": getattr(kind, activation), "weight_type": getattr(kind, weights)}


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("activation", "weights", "per_channel"),
    [("QUInt8", "QInt8", True), ("QInt8", "QInt8", False), ("QUInt8", "QUInt8", False)],
)
def test_a_quantised_network(
    tmp_path: Path, opencl_device: Device, activation: str, weights: str, per_channel: bool
) -> None:
    path = quantise(tmp_path, per_channel=per_channel, **types(activation, weights))
    mod = load_model(path)
    steps = quantisations(mod)
    assert len(steps) > 5
    report = verify(mod, device=opencl_device.info.index, seed=2)
    assert report.ok, report.outputs
    made = report.compiled
    assert made.report.convs == {"total": 3, "covered": 3}
    # onnxruntime rounds in the same places; a value in the middle may fall to the other side.
    image = np.random.default_rng(3).standard_normal(SHAPE).astype("float32")
    ort = pytest.importorskip("onnxruntime")
    (want,) = ort.InferenceSession(str(path)).run(None, {"x": image})
    (got,) = made.run({"x": image}, opencl_device.info.index)
    assert np.abs(got - want).max() <= float(steps[-1].numbers[0]) * (1 + 1e-4)
    assert np.abs(want).max() > 20 * float(steps[-1].numbers[0])


def test_an_operator_on_integers_that_the_importer_lacks_is_named(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    path = quantise(tmp_path, quant_format=quantization.QuantFormat.QOperator)
    with pytest.raises(ModelError, match=r"TVM's ONNX importer has no .*QLinearConv"):
        load_model(path)


# Values near the middle between two integers ----------------------------------------------------------------


def near_ties(scale: float = 0.02) -> tvm.IRModule:
    """A convolution whose sums differ in the last digits here and there, quantised, and a second one.

    The large number is folded into one bias here, and added and taken away by the untouched module.
    """

    def build(emit: Any, x: Any) -> Any:
        conv = emit(nn.conv2d(x, weight((8, 8, 3, 3)), padding=[1, 1]))
        large = emit(op.subtract(emit(op.add(conv, relax.const(1024.0))), relax.const(1024.0)))
        numbers = relax.const(scale), relax.const(3, "int8")
        held = emit(op.quantize(large, *numbers, axis=1, out_dtype="int8"))
        floats = emit(op.dequantize(held, *numbers, axis=1, out_dtype="float32"))
        return emit(nn.conv2d(floats, weight((4, 8, 1, 1), 1)))

    return graph(build, [var("x", (1, 8, 32, 32))])


@pytest.mark.opencl
def test_values_near_the_middle_may_be_rounded_to_either_side(opencl_device: Device) -> None:
    report = verify(near_ties(), device=opencl_device.info.index)
    assert [check.name for check in report.outputs] == [
        "output 0, from the device's integers",
        "1 quantisations",
    ]
    assert report.ok
    assert report.first_wrong is None
    assert 0.0 < report.outputs[1].error < 1e-4


@pytest.mark.opencl
def test_integers_that_rounding_does_not_explain_are_wrong(
    monkeypatch: pytest.MonkeyPatch, opencl_device: Device
) -> None:
    stock = verification.Session.run

    def run(self: Any, given: Any, function: str = "main") -> Any:
        results = stock(self, given, function)
        return [result + np.int8(1) if result.dtype == np.int8 else result + 0.1 for result in results]

    monkeypatch.setattr(verification.Session, "run", run)
    report = verify(near_ties(), device=opencl_device.info.index)
    assert not report.ok
    assert report.first_wrong == "`lv3` (quantize)"


def step(scale: Any, zero: Any, dtype: str = "int8") -> Quantisation:
    x = var("x", (1, 2, 1, 2))
    return Quantisation("q", x, x, (np.asarray(scale, "float64"), np.asarray(zero, "float64")), dtype)


@pytest.mark.parametrize(
    ("floats", "integers", "error"),
    [
        ([0.1, 0.2, -0.2, 0.0], [4, 5, 1, 3], 0.0),  # exact
        ([0.05, 0.15, -0.05, 0.0], [4, 4, 2, 3], 0.0),  # the middle, to either side
        ([0.05, 0.15, -0.05, 0.0], [3, 5, 3, 3], 0.0),
        ([0.1, 0.2, -0.2, 0.0], [5, 5, 1, 3], 0.25),  # half a step, 0.05 of 0.2, more than rounding does
        ([99.0, -99.0, 0.0, 0.0], [127, -128, 3, 3], 0.0),  # what doesn't fit is cut off
        ([99.0, 0.0, 0.0, 0.0], [126, 3, 3, 3], 0.05 / 99),
    ],
)
def test_how_far_integers_are_from_what_rounding_gives(
    floats: list[float], integers: list[int], error: float
) -> None:
    taken, held = np.array(floats, "float32"), np.array(integers, "int8")
    assert step(0.1, 3).error(taken, held) == pytest.approx(error, abs=1e-6)


def test_a_scale_for_each_channel() -> None:
    along = step(np.reshape([0.1, 0.5], (1, 2, 1, 1)), np.reshape([0, 1], (1, 2, 1, 1)), "uint8")
    floats = np.array([0.1, 0.2, 0.5, 1.0], "float32").reshape(1, 2, 1, 2)
    assert along.error(floats, np.array([1, 2, 2, 3], "uint8").reshape(1, 2, 1, 2)) < 1e-6
    assert along.error(floats, np.array([1, 2, 1, 3], "uint8").reshape(1, 2, 1, 2)) == pytest.approx(0.25)


def test_what_is_not_finite_is_wrong() -> None:
    assert step(0.1, 3).error(np.array([np.nan, 1.0]), np.array([3, 13], "int8")) == float("inf")


def test_floats_between_two_steps_are_wrong() -> None:
    x = var("x", (1, 1, 1, 2))
    numbers = np.asarray(0.1), np.asarray(3.0)
    back = Quantisation("q", x, x, numbers, "int8", numbers)
    floats = np.array([0.51, -1.0], "float32").reshape(1, 1, 1, 2)
    held = np.array([0.5, -1.0], "float32").reshape(1, 1, 1, 2)
    assert back.error(floats, held) < 1e-6
    assert back.error(floats, held + np.float32(0.1)) == pytest.approx(0.05, abs=0.011)
    assert back.error(floats, held + np.float32(0.02)) == pytest.approx(0.02, abs=0.001)


def test_the_pieces_are_the_module() -> None:
    mod = near_ties()
    before = mod.script(show_meta=True)
    steps = quantisations(mod)
    assert [(s.name, s.var.name, s.dtype) for s in steps] == [("lv3", "lv4", "int8")]
    assert [float(number) for number in steps[0].numbers] == pytest.approx([0.02, 3.0])
    x = {"x": np.random.default_rng(0).standard_normal((1, 8, 32, 32)).astype("float32")}
    result, rounded = Reference(with_rounded(mod, steps)).run(x)
    again, floats = Reference(from_rounded(mod, steps)).run(x | {"rounded_0": rounded})
    np.testing.assert_array_equal(again, result)
    np.testing.assert_array_equal(result, Reference(mod).run(x)[0])
    assert steps[0].error(floats, rounded) < 1e-6
    other = Reference(from_rounded(mod, steps)).run(x | {"rounded_0": rounded + np.float32(0.02)})
    assert np.abs(other[0] - result).max() > 1e-3
    assert mod.script(show_meta=True) == before


def test_integers_that_others_read_are_the_value() -> None:
    def build(emit: Any, x: Any) -> Any:
        held = emit(op.quantize(x, *NUMBERS, axis=1, out_dtype="int8"))
        return [emit(op.dequantize(held, *NUMBERS, axis=1, out_dtype="float32")), held]

    (step,) = quantisations(graph(build, [var("x", (1, 2, 4, 4))]))
    assert step.back is None
    assert str(step.var.ty.dtype) == "int8"


def test_a_scale_that_is_a_parameter_is_left_out() -> None:
    def build(emit: Any, x: Any, s: Any) -> Any:
        return emit(op.quantize(x, s, relax.const(0, "int8"), axis=1, out_dtype="int8"))

    assert quantisations(graph(build, [var("x", (1, 2, 4, 4)), var("s", ())])) == []


# Rounding to integers and back, in floats -------------------------------------------------------------------

NUMBERS = relax.const(0.1), relax.const(3, "int8")


def there_and_back(dtype: str, numbers: Any, others: Any = None) -> tvm.IRModule:
    def build(emit: Any, x: Any) -> Any:
        held = emit(op.quantize(x, *numbers, axis=1, out_dtype=dtype))
        return emit(op.dequantize(held, *(others or numbers), axis=1, out_dtype="float32"))

    return graph(build, [var("x", (2, 3, 16, 16))])


def numbers(scale: Any, zero: Any, dtype: str) -> tuple[Any, Any]:
    return relax.const(np.asarray(scale, "float32")), relax.const(np.asarray(zero, dtype), dtype)


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        ("int8", ([0.05], [3]), None),
        ("uint8", (0.02, 128), None),
        ("uint8", (0.02, 0), None),
        ("int16", (0.001, -5), (0.002, 7)),
        ("uint16", (0.0001, 30000), None),
        ("int8", ([0.05, 0.5, 0.0123], [0, -3, 100]), (0.1, 2)),
    ],
)
def test_integers_and_back_is_exactly_what_floats_say(dtype: str, first: Any, second: Any) -> None:
    mod = there_and_back(dtype, numbers(*first, dtype), numbers(*second, dtype) if second else None)
    normal = normalise(mod)
    assert "quantize" not in normal.script()
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype("float32") * 3
    x[0, :, 0, :8] = [0.025, -0.025, 0.075, 1e6, -1e6, 1e30, 0.0, 0.05]
    (want,), (got,) = Reference(mod).run({"x": x}), Reference(normal).run({"x": x})
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(want)) > 50


def test_integers_with_another_reader_stay() -> None:
    def build(emit: Any, x: Any) -> Any:
        held = emit(op.quantize(x, *NUMBERS, axis=1, out_dtype="int8"))
        return [emit(op.dequantize(held, *NUMBERS, axis=1, out_dtype="float32")), held]

    assert "R.dequantize" in normalise(graph(build, [var("x", (1, 2, 4, 4))])).script()


def test_rounding_joins_the_convolution_before_it() -> None:
    compiled = compile_module(near_ties())
    assert compiled.report.convs == {"total": 2, "covered": 2}
    assert sum(compiled.report.composites.values()) == 2
    assert "dequantize" not in "".join(compiled.kernels)
