"""In which order the nodes of a row are looked for, starting from its anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fusion_patterns.table.model import Node

__all__ = ["Reach", "Scope", "Step", "schedule"]


class Reach(Enum):
    """How the operator that a `Visit` takes is found."""

    ANCHOR = "anchor"
    FORWARD = "forward"
    """among the users of the latest of its operands"""
    BACKWARD = "backward"
    """as the producer of the operand in the register ``start``"""


@dataclass(frozen=True)
class Scope:
    """The nodes of a row or a fragment; ``value`` is a fragment's input."""

    prefix: str
    nodes: Mapping[str, Node]
    value: str | None = None

    def inputs(self, name: str) -> tuple[str, ...]:
        """Returns the names that a node takes: its own ``in:``, or the node before it."""
        node = self.nodes[name]
        if node.inputs is not None:
            return node.inputs
        names = list(self.nodes)
        place = names.index(name)
        if place:
            return (names[place - 1],)
        return () if self.value is None else (self.value,)

    def stand_in(self, name: str) -> str | None:
        """Returns what the name of an absent node means."""
        inputs = self.inputs(name)
        return next((operand for operand in inputs if operand in self.nodes), inputs[0] if inputs else None)


Step = tuple[str, Reach]


def schedule(scope: Scope, start: Step | None) -> list[Step]:
    """Returns the order in which to visit the nodes of a scope: each is connected to those before it.

    After a node come, backwards, those nodes it takes that are not visited yet; so a prologue follows the
    anchor and a second anchor follows the node that joins it.
    """
    steps: list[Step] = []
    visited = {scope.value}

    def visit(step: Step) -> None:
        visited.add(step[0])
        steps.append(step)
        for operand in reversed(scope.inputs(step[0])):
            if operand in scope.nodes and operand not in visited:
                visit((operand, Reach.BACKWARD))

    if start is not None:
        # A fragment that is not entered by its input reads that input last.
        visited.clear()
        visit(start)
    progress = True
    while progress:
        progress = False
        for name in scope.nodes:
            if name not in visited and any(operand in visited for operand in scope.inputs(name)):
                visit((name, Reach.FORWARD))
                progress = True
    return steps
