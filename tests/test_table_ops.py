"""The operators' facts, against TVM's own registry."""

from __future__ import annotations

import pytest

from fusion_patterns.table.ops import ELEMENTWISE, OPS, Kind


def test_every_operator_is_tvms() -> None:
    tvm = pytest.importorskip("tvm")
    from tvm import relax  # noqa: F401 - registers the operators

    registered = set(tvm.ir.Op.list_op_names())
    assert [name for name in OPS if name != ELEMENTWISE and f"relax.{name}" not in registered] == []


def test_arguments_are_as_many_as_tvm_says() -> None:
    tvm = pytest.importorskip("tvm")
    from tvm import relax  # noqa: F401 - registers the operators

    for name, op in OPS.items():
        if op.args is not None:
            found = tvm.ir.Op.get(f"relax.{name}")
            assert op.args == found.num_inputs, name
            tensors = [argument for argument in found.arguments if argument.type_info == "Tensor"]
            assert op.arity in (None, len(tensors)), name


def test_operands_that_commute_are_two() -> None:
    commuting = {name for name, op in OPS.items() if op.commutes}
    assert {"add", "multiply", "maximum", "minimum", "equal", "logical_and", "logical_or"} <= commuting
    assert not {"subtract", "divide", "power", "less", "nn.prelu"} & commuting
    assert all(OPS[name].arity == 2 for name in commuting)


def test_clip_has_one_tensor_and_three_arguments() -> None:
    assert (OPS["clip"].arity, OPS["clip"].args, OPS["clip"].kind) == (1, 3, Kind.UNARY)


def test_elementwise_is_what_its_kind_says() -> None:
    assert OPS["add"].is_elementwise
    assert OPS[ELEMENTWISE].is_elementwise
    assert not OPS["nn.softmax"].is_elementwise
    assert not OPS["concat"].is_elementwise


def test_attributes_are_those_of_a_call() -> None:
    pytest.importorskip("tvm")
    from tvm import relax

    data = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
    weight = relax.Var("w", relax.TensorType((8, 8, 3, 3), "float32"))
    vector = relax.Var("v", relax.TensorType((8,), "float32"))
    op = relax.op
    calls = {
        "nn.conv2d": op.nn.conv2d(data, weight),
        "nn.conv2d_transpose": op.nn.conv2d_transpose(data, weight),
        "nn.max_pool2d": op.nn.max_pool2d(data),
        "nn.adaptive_avg_pool2d": op.nn.adaptive_avg_pool2d(data),
        "nn.leakyrelu": op.nn.leakyrelu(data),
        "nn.softplus": op.nn.softplus(data),
        "nn.prelu": op.nn.prelu(data, vector),
        "nn.pad": op.nn.pad(data, [0] * 8),
        "nn.softmax": op.nn.softmax(data),
        "nn.dropout": op.nn.dropout(data),
        "nn.pixel_shuffle": op.nn.pixel_shuffle(data, 2),
        "nn.batch_norm": op.nn.batch_norm(data, vector, vector, vector, vector, axis=1),
        "nn.group_norm": op.nn.group_norm(data, vector, vector, 4, 1, [2, 3]),
        "nn.instance_norm": op.nn.instance_norm(data, vector, vector, channel_axis=1, axes=[2, 3]),
        "nn.layer_norm": op.nn.layer_norm(data, vector, vector, axes=[1]),
        "nn.rms_norm": op.nn.rms_norm(data, vector, axes=[1]),
        "astype": op.astype(data, "float16"),
        "mean": op.mean(data, [2, 3]),
        "argmax": op.argmax(data, 1),
        "concat": op.concat([data, data], 1),
        "stack": op.stack([data, data], 1),
        "split": op.split(data, 2, 1),
        "permute_dims": op.permute_dims(data),
        "squeeze": op.squeeze(data),
        "expand_dims": op.expand_dims(data, 0),
        "image.resize2d": op.image.resize2d(data, (16, 16)),
        "matmul": op.matmul(data, data),
        "strided_slice": op.strided_slice(data, [1], [0], [2]),
        "tile": op.tile(data, 2),
        "repeat": op.repeat(data, 2, 1),
        "flip": op.flip(data, 1),
        "layout_transform": op.layout_transform(data, lambda n, c, h, w: (n, h, w, c)),
        "take": op.take(data, relax.const([1], "int64"), 1),
    }
    for name, call in calls.items():
        known = {field.name for field in type(call.attrs).__tvm_ffi_type_info__.fields}
        assert set(OPS[name].attrs) == known, name
    covered = {OPS[name].attrs for name in calls}
    assert {op.attrs for op in OPS.values() if op.attrs} <= covered
