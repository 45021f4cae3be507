"""Tables and modules made up for measuring: rows that are one word each, and long chains of operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from fusion_patterns.match.exact import patterns_of
from fusion_patterns.table.model import Node, Row, Table

__all__ = ["chain", "residual_chain", "rows_table", "stock_patterns", "words"]

ACTIVATIONS = (
    "nn.relu", "clip", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.leakyrelu", "exp", "sqrt", "abs",
    "negative", "square",
)  # fmt: skip
EXTRA_ARGUMENTS = {"clip": 2, "add": 1}
"""Operands besides the first."""


def words(count: int) -> list[tuple[str, ...]]:
    """The first *count* words of a list that may follow a convolution; those that networks have come "
    "first."""
    known: list[tuple[str, ...]] = [("add", "add", "nn.relu"), ("add", "nn.relu"), ("add", "clip"), ("add",)]
    known += [("add", "add", activation) for activation in ACTIVATIONS[1:]]
    known += [("add", activation) for activation in ACTIVATIONS[2:]]
    known += [("add", first, second) for first in ACTIVATIONS for second in ACTIVATIONS]
    return known[:count]


def rows_table(count: int) -> tuple[Table, list[tuple[str, Any]]]:
    """A table of *count* rows, and the same rows as stock's patterns."""
    rows, patterns = [], []
    for number, word in enumerate(words(count)):
        nodes = {"conv": Node.model_validate({"op": "nn.conv2d", "in": ("data", "weight")})}
        pattern = is_op("relax.nn.conv2d")(wildcard(), wildcard())
        for place, op in enumerate(word):
            nodes[f"n{place}"] = Node.model_validate({"op": op})
            others = [wildcard() for _ in range(EXTRA_ARGUMENTS.get(op, 0))]
            pattern = is_op(f"relax.{op}")(pattern, *others)
        rows.append(Row(name=f"row{number}", nodes=nodes))
        patterns.append((f"row{number}", pattern))
    return Table(name=f"rows_{count}", patterns=tuple(rows)), patterns


def stock_patterns(found: Iterable[Sequence[str]]) -> list[tuple[str, Any]]:
    """Words of the matching engine as (name, `relax.dpl` pattern)."""
    return [(f"word{number}", patterns_of(tuple(word))[-1]) for number, word in enumerate(found)]


def chain(operators: int) -> tvm.IRModule:
    """conv2d, add, relu, over and over."""
    return _build(operators // 3, lambda net, x: net.convolution(x))


def residual_chain(operators: int) -> tvm.IRModule:
    """Blocks of seven operators: conv2d, add, relu, conv2d, add, add of the block's input, relu."""

    def block(net: _Net, x: Any) -> Any:
        y = net.convolution(net.convolution(x), active=False)
        return net.emit(relax.op.nn.relu(net.emit(relax.op.add(y, x))))

    return _build(operators // 7, block, convolutions=2)


class _Net:
    def __init__(self, builder: relax.BlockBuilder, weights: list[Any]) -> None:
        self.emit = builder.emit
        self.weights = iter(weights)

    def convolution(self, x: Any, active: bool = True) -> Any:
        y = self.emit(relax.op.nn.conv2d(x, next(self.weights), padding=1))
        y = self.emit(relax.op.add(y, next(self.weights)))
        return self.emit(relax.op.nn.relu(y)) if active else y


def _build(blocks: int, block: Any, convolutions: int = 1) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((1, 8, 14, 14), "float32"))
    weights = [
        relax.Var(f"p{number}", relax.TensorType((1, 8, 1, 1) if number % 2 else (8, 8, 3, 3), "float32"))
        for number in range(2 * convolutions * blocks)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *weights]):
        with builder.dataflow():
            net, y = _Net(builder, weights), x
            for _ in range(blocks):
                y = block(net, y)
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.finalize()
