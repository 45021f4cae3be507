"""What was decided: the matches, and for every row at every anchor the outcome with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from tvm import relax
from tvm.ir import IRModule

from fusion_patterns.table.model import Row, Scope, Table

__all__ = ["Counter", "Decision", "FusionPlan", "Input", "Listener", "Match", "Outcome", "Selection"]


class Outcome(StrEnum):
    """What became of a row at an anchor."""

    SKIPPED = "skipped"
    """the row is not for this anchor"""
    DECLINED = "declined"
    """the row nearly matched, or matched and something speaks against it"""
    APPLIED = "applied"
    """the row's match is part of the plan"""
    INVALID = "invalid"
    """a fault of the table or of this package; the build goes on without the match"""


@dataclass(frozen=True)
class Input:
    """A tensor that a composite takes: its name in the row (None: it has none there) and its scope wish."""

    name: str | None
    expr: relax.Expr
    scope: Scope


@dataclass(frozen=True)
class Match:
    """Operators that become one composite."""

    row: Row
    function: str
    composite: str
    """name of the function that it becomes"""
    ops: tuple[relax.Var, ...]
    """the variables bound to the operators, in program order"""
    nodes: Mapping[str, tuple[relax.Var, ...]]
    """by node of the row: the operators that stand there"""
    inputs: tuple[Input, ...]
    """each tensor once, in the order in which the operators take them"""
    outputs: tuple[relax.Var, ...]
    """the row's output first, then those inner values that may leave and are used outside"""
    saved_bytes: int
    """size of the inner values that are not written any more; a symbolic dimension counts as one"""
    word: tuple[str, ...]
    """the operators and how they hang together, as TVM's matcher confirmed them"""
    anchor: relax.Var
    """the variable of the operator the match started from"""
    numbers: tuple[int, ...]
    """places of the operators among the function's bindings"""


@dataclass(frozen=True, eq=False)
class Decision:
    """What became of one row at one anchor. The sentence is made when it is read."""

    row: str
    """the row's name; empty if the decision is about a whole function"""
    function: str
    anchor: str
    """the IR value the row's match would start from"""
    outcome: Outcome
    progress: int
    """how many operators matched"""
    culprit: str
    """the IR value that decided"""
    where: str
    """file and line in the table: of the condition that failed, or of the row"""
    say: Callable[[], str] = field(repr=False)

    @cached_property
    def reason(self) -> str:
        """Why, in a sentence."""
        return self.say()

    def __str__(self) -> str:
        subject = f"{self.row} at `{self.anchor}`" if self.row else f"`{self.anchor}`"
        return f"{self.function}: {subject}: {self.outcome}: {self.reason} [{self.where}]"


@dataclass
class Counter:
    """How often a row was looked at, and what came of it."""

    tried: int = 0
    """anchors the row could start from"""
    near: int = 0
    """anchors where it was declined"""
    applied: int = 0
    seconds: float = 0.0
    """time that the row takes when it is walked alone, as for its reasons"""


@dataclass(frozen=True)
class Selection:
    """How overlapping candidates were chosen from."""

    method: str
    """``exact``, or ``beam`` if a group of overlapping candidates had too many open choices to keep all"""
    saved_bytes: int
    bound_bytes: int
    """no choice could save more than this"""
    groups: int
    """groups of overlapping candidates"""
    largest: int
    """candidates in the largest group"""


class Listener(Protocol):
    """Is told what happens, as it happens."""

    def on_match(self, match: Match) -> None:
        """A candidate was found and confirmed."""

    def on_decline(self, decision: Decision) -> None:
        """A row was declined at an anchor."""

    def on_apply(self, match: Match) -> None:
        """A match became part of the plan."""


class Account(Protocol):
    """Finds out, when asked, what became of every row at every anchor."""

    def decisions(self) -> tuple[Decision, ...]:
        """Returns all decisions, in a fixed order."""

    def counters(self) -> dict[str, Counter]:
        """Returns the counter of each row, by its name."""


class Planner(Protocol):
    """What made a plan, and knows more about it."""

    def reasons(self) -> Account:
        """Returns what tells why rows were not applied."""

    def dump(self, selection: Selection) -> str:
        """Returns the plan as JSON text."""

    def without(self, names: Iterable[str], selection: Selection) -> FusionPlan:
        """Returns the plan without the composites of these names."""

    def instead(self, faults: Mapping[str, str], selection: Selection) -> FusionPlan:
        """Returns the plan without these composites, with the best of what remains of each instead."""


@dataclass(frozen=True, eq=False)
class FusionPlan:
    """The matches chosen for a module, and why no others."""

    matches: tuple[Match, ...]
    selection: Selection
    planner: Planner = field(repr=False)

    @cached_property
    def _account(self) -> Account:
        return self.planner.reasons()

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """For each row at each anchor what became of it.

        Where a row was applied and a longer match of it was refused, that refusal is a decision of its own.
        """
        return self._account.decisions()

    @cached_property
    def counters(self) -> dict[str, Counter]:
        """For each row how often it was tried, nearly matched and applied, and its time."""
        return self._account.counters()

    def declined(self) -> tuple[Decision, ...]:
        """Returns the decisions against a row that nearly matched, faults included."""
        return tuple(d for d in self.decisions if d.outcome in (Outcome.DECLINED, Outcome.INVALID))

    def near_misses(self, limit: int | None = None) -> tuple[Decision, ...]:
        """Returns the declined decisions, those first that got farthest by matched operators."""
        ranked = sorted(self.declined(), key=lambda decision: -decision.progress)
        return tuple(ranked[:limit])

    def match_of(self, composite: str) -> Match:
        """Returns the match that becomes the function of this name; raises `KeyError` if there is none."""
        return self._by_composite[composite]

    @cached_property
    def _by_composite(self) -> dict[str, Match]:
        return {match.composite: match for match in self.matches}

    def without(self, composites: Iterable[str]) -> FusionPlan:
        """Returns the plan without the matches that become these functions; the others keep their names."""
        return self.planner.without(composites, self.selection)

    def instead(self, faults: Mapping[str, str]) -> FusionPlan:
        """Returns the plan without these composites, with the best that their other operators allow instead.

        ``faults``: name of a composite -> name of the value in it that made it impossible, or its own name where the
        whole did: then its operators may be taken in another way. A composite that has no value of that name goes
        without a substitute. No operator at fault, and no match that was refused, is ever taken again, and other
        ways are tried a few times only, so asking again comes to an end.
        """
        return self.planner.instead(faults, self.selection)

    def to_json(self) -> str:
        """Returns the plan as text, which `from_json` reads."""
        return self.planner.dump(self.selection)

    @staticmethod
    def from_json(text: str, mod: IRModule, table: Table) -> FusionPlan:
        """Returns the plan in ``text``; raises `FusionPatternsError` if it was made for others."""
        # A saved plan is read by the engine, which needs this module.
        from fusion_patterns.match import load_plan

        return load_plan(text, mod, table)
