"""A graph in the making, and where its choices come from.

Every choice is one call of a `Pick`: Hypothesis draws them for strategies, a seeded generator for fuzzing.
The first option of each choice is the simplest, so that examples shrink towards it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fusion_patterns.testing.shapes import Dim, Shape, Type, infer
from fusion_patterns.testing.spec import Graph, Op, Tensor

__all__ = ["Draft", "Pick", "seeded"]

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several options."""


def seeded(seed: int | str) -> Pick:
    """Choices that follow from a seed alone."""
    return random.Random(seed).choice


class Draft:
    """A function in the making."""

    def __init__(self, dtype: str = "float32", name: str = "main", letters: str = "xcv") -> None:
        self.name, self.dtype = name, dtype
        self.letters = letters
        """What the names of parameters, constants and operators begin with."""
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.results: list[str] = []
        self.types: dict[str, Type] = {}

    def tensor(self, shape: Sequence[Dim], *, constant: bool = False, dtype: str | None = None) -> str:
        """A new parameter or constant."""
        is_known = not any(isinstance(dim, str) for dim in shape)
        made = Tensor(
            f"{self.letters[constant and is_known]}{len(self.tensors)}",
            tuple(shape),
            dtype or self.dtype,
            constant and is_known,
        )
        self.tensors.append(made)
        self.types[made.name] = Type(made.shape, made.dtype)
        return made.name

    def emit(self, op: str, *args: str, **attrs: Any) -> str:
        """A new operator; raises `Infeasible` if it does not take these operands."""
        name = f"{self.letters[2]}{len(self.ops)}"
        self.types[name] = infer(op, [self.types[arg] for arg in args], attrs)
        self.ops.append(Op(name, op, args, attrs))
        return name

    def shape(self, name: str) -> Shape:
        """The shape of a value."""
        return self.types[name].shape

    def graph(self) -> Graph:
        """What was made; values that nothing takes are returned as well."""
        taken = {arg for op in self.ops for arg in op.args}
        loose = [op.name for op in self.ops if op.name not in taken and op.name not in self.results]
        return Graph(self.name, tuple(self.tensors), tuple(self.ops), (*self.results, *loose))
