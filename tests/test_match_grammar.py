"""What a row can say, one behaviour each: which operators match, and which do not."""

from __future__ import annotations

import pytest
from match_helpers import chain_table, found, module, names, row, table
from tvm import relax

from fusion_patterns.errors import TableError
from fusion_patterns.match import plan_fusion

op, nn = relax.op, relax.op.nn
CONV = {"op": "nn.conv2d", "in": ["data", "weight"]}


def longest(mod, made):
    """Returns the operators of the longest candidate."""
    return max(found(mod, made), key=len, default=())


def conv_then(*calls):
    """Returns a module with a convolution and then these calls, each on the result of the one before."""

    def build(emit, x, y, w):
        value = emit(nn.conv2d(x, w))
        for call in calls:
            value = emit(call(value, y))
        return value

    return module(build)


def test_an_optional_node_may_be_absent():
    made = table(row("r", {"conv": CONV, "bias": {"op": "add", "optional": True}, "act": {"op": "nn.relu"}}))
    assert longest(conv_then(lambda v, y: op.add(v, y), lambda v, y: nn.relu(v)), made) == (
        "lv",
        "lv1",
        "lv2",
    )
    assert longest(conv_then(lambda v, y: nn.relu(v)), made) == ("lv", "lv1")
    assert longest(conv_then(lambda v, y: op.tanh(v), lambda v, y: nn.relu(v)), made) == ()


@pytest.mark.parametrize(("count", "length"), [(0, 0), (1, 0), (2, 3), (3, 4), (4, 4)])
def test_repetition_is_bounded_on_both_sides(count, length):
    made = table(row("r", {"conv": CONV, "tail": {"op": "$unary", "repeat": {"min": 2, "max": 3}}}))
    assert len(longest(conv_then(*[lambda v, y: nn.relu(v)] * count), made)) == length


def test_every_length_of_a_repetition_is_a_candidate():
    made = table(row("r", {"conv": CONV, "tail": {"op": "nn.relu", "repeat": 16}}))
    mod = conv_then(*[lambda v, y: nn.relu(v)] * 3)
    assert found(mod, made) == {("lv",), ("lv", "lv1"), ("lv", "lv1", "lv2"), ("lv", "lv1", "lv2", "lv3")}


@pytest.mark.parametrize("call", [op.add, op.multiply, op.maximum, op.minimum])
def test_operators_that_commute_match_in_both_orders(call):
    made = table(
        row(
            "r",
            {"conv": CONV, "sum": {"op": ["add", "multiply", "maximum", "minimum"], "in": ["conv", "skip"]}},
        )
    )
    assert longest(conv_then(lambda v, y: call(v, y)), made) == ("lv", "lv1")
    assert longest(conv_then(lambda v, y: call(y, v)), made) == ("lv", "lv1")


def test_operators_that_do_not_commute_match_as_written():
    made = table(row("r", {"conv": CONV, "rest": {"op": "subtract", "in": ["skip", "conv"]}}))
    assert longest(conv_then(lambda v, y: op.subtract(y, v)), made) == ("lv", "lv1")
    assert longest(conv_then(lambda v, y: op.subtract(v, y)), made) == ()


def test_a_node_without_operands_takes_the_one_before_anywhere():
    made = table(row("r", {"conv": CONV, "rest": {"op": "subtract"}}))
    assert longest(conv_then(lambda v, y: op.subtract(y, v)), made) == ("lv", "lv1")
    assert longest(conv_then(lambda v, y: op.subtract(v, y)), made) == ("lv", "lv1")


def test_a_fragment_stands_where_an_operator_may():
    made = table(
        row("r", {"conv": CONV, "tail": {"op": ["nn.relu", "$silu"], "repeat": 4}}),
        silu={"gate": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "gate"]}},
    )

    def build(emit, x, y, w):
        conv = emit(nn.conv2d(x, w))
        first = emit(op.multiply(emit(op.sigmoid(conv)), conv))
        act = emit(nn.relu(first))
        return emit(op.multiply(act, emit(op.sigmoid(act))))

    assert longest(module(build), made) == ("lv", "lv1", "lv2", "lv3", "lv4", "lv5")


def test_a_fragment_must_be_complete():
    made = table(
        row("r", {"conv": CONV, "tail": {"op": "$silu", "repeat": 4}}),
        silu={"gate": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "gate"]}},
    )
    mod = conv_then(lambda v, y: op.sigmoid(v), lambda v, y: op.multiply(y, v))
    assert longest(mod, made) == ("lv",)


def test_the_sum_of_two_convolutions():
    made = table(
        row(
            "pair",
            {
                "a": CONV,
                "b": {"op": "nn.conv2d", "in": ["data_b", "weight_b"]},
                "sum": {"op": "add", "in": ["a", "b"]},
            },
        )
    )

    def build(emit, x, y, w):
        return emit(op.add(emit(nn.conv2d(x, w)), emit(nn.conv2d(y, w))))

    assert found(module(build), made) == {("lv", "lv1", "lv2")}
    plan = plan_fusion(module(build), made)
    assert len(plan.matches) == 1
    assert {tensor.name for tensor in plan.matches[0].inputs} == {"data", "weight", "data_b"}


def test_one_convolution_is_not_two():
    made = table(
        row(
            "pair",
            {
                "a": CONV,
                "b": {"op": "nn.conv2d", "in": ["data_b", "weight_b"]},
                "sum": {"op": "add", "in": ["a", "b"]},
            },
        )
    )
    assert found(conv_then(lambda v, y: op.add(v, v)), made) == set()


def test_a_prologue_is_found_backwards():
    made = table(
        row(
            "r",
            {
                "scale": {"op": "multiply", "in": ["data", "gamma"], "optional": True},
                "shift": {"op": "add", "in": ["scale", "beta"], "optional": True},
                "act": {"op": "nn.relu", "in": "shift", "optional": True},
                "conv": {"op": "nn.conv2d", "in": ["act", "weight"]},
            },
            anchor="conv",
        )
    )

    def build(emit, x, y, w):
        return emit(nn.conv2d(emit(nn.relu(emit(op.add(y, emit(op.multiply(x, y)))))), w))

    mod = module(build)
    assert found(mod, made) == {("lv3",), ("lv2", "lv3"), ("lv1", "lv2", "lv3"), ("lv", "lv1", "lv2", "lv3")}
    (match,) = plan_fusion(mod, made).matches
    assert [(tensor.name, tensor.expr.name) for tensor in match.inputs] == [
        ("data", "x"),
        ("gamma", "y"),
        ("weight", "w"),
    ]


def test_one_name_is_one_tensor():
    made = table(row("r", {"conv": CONV, "sum": {"op": "add", "in": ["conv", "data"]}}))
    assert longest(module(lambda emit, x, y, w: emit(op.add(emit(nn.conv2d(x, w)), x))), made) == (
        "lv",
        "lv1",
    )
    assert longest(module(lambda emit, x, y, w: emit(op.add(y, emit(nn.conv2d(x, w))))), made) == ()


def test_two_names_may_be_one_tensor():
    made = table(row("r", {"conv": CONV}))
    mod = module(lambda emit, x: emit(nn.conv2d(x, x)), inputs=["x"], weights=[], x=(8, 8, 1, 1))
    (match,) = plan_fusion(mod, made).matches
    assert [tensor.name for tensor in match.inputs] == ["data"]


def test_a_named_tensor_comes_from_outside():
    made = table(row("r", {"conv": CONV, "sum": {"op": "add", "in": ["conv", "skip"]}}))
    assert found(conv_then(lambda v, y: op.add(v, v)), made) == set()


def test_a_nameless_operand_may_come_from_inside():
    made = table(row("r", {"conv": CONV, "sum": {"op": "add"}}))
    assert found(conv_then(lambda v, y: op.add(v, v)), made) == {("lv", "lv1")}


def test_inner_values_leave_only_if_the_row_says_so():
    nodes = {"conv": CONV, "act": {"op": "nn.relu"}}

    def build(emit, x, y, w):
        conv = emit(nn.conv2d(x, w))
        return emit(nn.relu(conv)), conv

    assert found(module(build), table(row("r", nodes))) == set()
    (match,) = plan_fusion(module(build), table(row("r", nodes, leaves=["conv"]))).matches
    assert names(match) == ["lv", "lv1"]
    assert [variable.name for variable in match.outputs] == ["lv1", "lv"]
    assert match.saved_bytes == 0


def test_a_value_that_may_leave_must_not_come_back():
    nodes = {"conv": CONV, "sum": {"op": "add", "in": ["conv", "other"]}}

    def build(emit, x, y, w):
        conv = emit(nn.conv2d(x, w))
        return emit(op.add(conv, emit(op.tanh(conv))))

    plan = plan_fusion(module(build), table(row("r", nodes, leaves=["conv"])))
    assert plan.matches == ()
    (refusal,) = plan.declined()
    assert "close a cycle: `lv` (nn.conv2d) -> `lv1` (tanh) -> `lv2` (add)" in refusal.reason


def test_an_output_in_the_middle():
    made = table(
        row(
            "r", {"conv": CONV, "act": {"op": "nn.relu"}, "end": {"op": "tanh"}}, output="act", leaves=["end"]
        )
    )
    mod = conv_then(lambda v, y: nn.relu(v), lambda v, y: op.tanh(v))
    (match,) = plan_fusion(mod, made).matches
    assert [variable.name for variable in match.outputs] == ["lv1", "lv2"]


def test_any_operator_can_be_the_anchor():
    made = table(
        row("pool", {"pool": {"op": "nn.max_pool2d", "in": "data"}, "tail": {"op": "nn.relu", "repeat": 2}})
    )
    mod = module(lambda emit, x, y, w: emit(nn.relu(emit(nn.max_pool2d(x, (2, 2))))))
    assert longest(mod, made) == ("lv", "lv1")


def test_concat_takes_a_tuple():
    made = table(row("r", {"all": {"op": "concat", "in": ["first"]}, "act": {"op": "nn.relu"}}))
    mod = module(lambda emit, x, y, w: emit(nn.relu(emit(op.concat([x, y, x], axis=1)))))
    (match,) = plan_fusion(mod, made).matches
    assert match.word == ("concat((a, b, a))", "nn.relu(#0)")
    assert [tensor.name for tensor in match.inputs] == ["first", None]


def test_numbers_are_part_of_the_operator():
    (match,) = plan_fusion(conv_then(lambda v, y: op.clip(v, 0, 6)), chain_table()).matches
    assert match.word == ("nn.conv2d(a, b)", "clip(#0, _, _)")
    assert len(match.inputs) == 2


def test_match_cast_is_not_crossed():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((8, 8, 1, 1), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            conv = builder.emit(nn.conv2d(x, w))
            cast = builder.match_cast(conv, relax.TensorType((1, 8, 6, 6), "float32"))
            out = builder.emit_output(nn.relu(cast))
        builder.emit_func_output(out)
    plan = plan_fusion(builder.finalize(), chain_table())
    assert [names(match) for match in plan.matches] == [["lv"], ["gv"]]


def test_a_name_of_a_name_is_the_same_value():
    mod = module(lambda emit, x, y, w: emit(nn.relu(emit(emit(nn.conv2d(x, w))))))
    assert 'lv1: R.Tensor((1, 8, 6, 6), dtype="float32") = lv\n' in mod.script()
    (match,) = plan_fusion(mod, chain_table()).matches
    assert names(match) == ["lv", "lv2"]


def test_a_row_in_two_parts_is_refused():
    made = table(row("r", {"a": CONV, "b": {"op": "nn.relu", "in": "other"}}))
    with pytest.raises(TableError, match=r"test.yaml:1: row 'r': no value connects 'b' with the anchor"):
        plan_fusion(conv_then(), made)
