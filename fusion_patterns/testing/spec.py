"""Modules as plain data: what strategies draw, what shrinks, and what is printed when a property fails.

A `Graph` is one function, a `Module` one or more. Their ``repr`` is Python that makes them again::

    Graph("main", (Tensor("x", (1, 8, 6, 6)),), (Op("v0", "nn.relu", ("x",)),), ("v0",))

`fusion_patterns.testing.building` makes a Relax module of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fusion_patterns.testing.shapes import Shape, Type, infer

__all__ = ["Graph", "Module", "Op", "Tensor"]


@dataclass(frozen=True)
class Tensor:
    """A parameter of the function, or a constant. A dimension that is text is symbolic."""

    name: str
    shape: Shape
    dtype: str = "float32"
    constant: bool = False


@dataclass(frozen=True)
class Op:
    """One operator: ``op`` is its name as in a table, ``args`` name tensors and operators before it."""

    name: str
    op: str
    args: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """One function: its tensors, its operators in program order, and the values that it returns."""

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    results: tuple[str, ...]

    def types(self) -> dict[str, Type]:
        """The type of every value by its name; raises `Infeasible` if the operators don't fit."""
        types = {tensor.name: Type(tensor.shape, tensor.dtype) for tensor in self.tensors}
        for op in self.ops:
            types[op.name] = infer(op.op, [types[arg] for arg in op.args], op.attrs)
        return types

    def op_of(self, name: str) -> Op | None:
        """The operator that computes a value; None for a tensor."""
        return next((op for op in self.ops if op.name == name), None)

    def users(self, name: str) -> Iterator[Op]:
        """The operators that take a value, once for each operand."""
        return (op for op in self.ops for arg in op.args if arg == name)

    def uses(self, name: str) -> int:
        """How many operands a value is; a computed one counts as well where the function returns it."""
        returned = self.results.count(name) if self.op_of(name) is not None else 0
        return sum(1 for _ in self.users(name)) + returned


@dataclass(frozen=True)
class Module:
    """Several functions of one module."""

    functions: tuple[Graph, ...]
