"""Why a row was not applied: found out when somebody asks.

Planning keeps no record of what it tried. For reasons, each row is walked again, alone, from each of its
anchors, by the same walk with an observer; what stopped the farthest attempt is the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, TextIO

from fusion_patterns.match.automaton import Acceptance, Arrival, Automaton, State
from fusion_patterns.match.graph import Graph, Value
from fusion_patterns.match.plan import Counter, Decision, Outcome
from fusion_patterns.match.predicates import Failure
from fusion_patterns.match.search import MAX_STEPS, Candidate, Escape, Walk
from fusion_patterns.match.threads import Condition, Question
from fusion_patterns.table.model import Row

if TYPE_CHECKING:
    from fusion_patterns.match.choice import Choice
    from fusion_patterns.match.engine import Engine

__all__ = ["Reasons", "trace"]

_MISSING, _FAILED, _ESCAPED = 0, 1, 2
"""Of attempts that got equally far the one that says most is told."""
_MOST_NAMED = 6


@dataclass(frozen=True)
class _Obstacle:
    """What stopped an attempt after ``progress`` operators."""

    progress: int
    kind: int
    culprit: str
    where: str
    say: Callable[[], str]


class _Recorder:
    """Observes the walk of one row and keeps the obstacle that was met farthest from the anchor."""

    def __init__(self, graph: Graph, row: Row) -> None:
        self.graph = graph
        self.row = row
        self.farthest: _Obstacle | None = None

    def arrived(
        self, arrival: Arrival, slots: Sequence[int], failed: list[tuple[Condition, Failure]]
    ) -> None:
        if failed:
            condition, failure = failed[0]
            origin = None if condition.test is None else condition.test.origin
            where = str(origin if origin is not None and origin.line else self.row.origin)
            self._note(len(slots), _FAILED, failure.culprit, where, lambda: failure.text)

    def entered(self, state: State, slots: Sequence[int], steps: int) -> None:
        if steps == 0 and state.questions and not state.acceptances:
            at = tuple(slots)
            value = self.graph.values[at[-1]]

            def say() -> str:
                return " and ".join(_missing(self.graph, at, *asked) for asked in state.questions)

            self._note(len(at), _MISSING, value.name, str(self.row.origin), say)

    def escaped(self, acceptance: Acceptance, slots: Sequence[int], escape: Escape) -> None:
        self._note(len(slots), _ESCAPED, escape.value.name, str(self.row.origin), lambda: str(escape))

    def _note(self, progress: int, kind: int, culprit: str, where: str, say: Callable[[], str]) -> None:
        known = self.farthest
        if known is None or (progress, kind) > (known.progress, known.kind):
            self.farthest = _Obstacle(progress, kind, culprit, where, say)


def _missing(graph: Graph, slots: tuple[int, ...], question: Question, ops: frozenset[str]) -> str:
    """Says which operator was looked for and what is there instead."""
    names = sorted(ops)
    more = len(names) - _MOST_NAMED
    wanted = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    if isinstance(question, int):
        value = graph.values[slots[question]]
        users = [_seen_from(value, graph.values[user]) for user in dict.fromkeys(value.users)]
        found = ", ".join([*users, *value.exits]) or "nothing"
        return f"{value} should go to {wanted} as the row says, but goes to {found}"
    taker = graph.values[slots[question[0]]]
    operand = taker.operands[question[1]]
    source = graph.value_of(operand)
    found = "is not computed here" if source is None else f"comes from {_seen_from(taker, source)}"
    name = getattr(operand, "name", "a constant")
    return f"operand `{name}` of {taker} should come from {wanted} as the row says, but {found}"


def _seen_from(value: Value, other: Value) -> str:
    return f"{other}" if other.region is value.region else f"{other} in another block"


@dataclass
class _Walkers:
    """The rows one by one."""

    engine: Engine
    _automata: dict[int, Automaton] = field(default_factory=dict)

    def anchors(self, graph: Graph) -> list[tuple[int, int]]:
        """Returns each anchor's number with the place of each row that may start there."""
        roots = self.engine.automaton.roots
        found = {
            (number, index)
            for op, numbers in graph.by_op.items()
            for index, _, _ in roots.get(op, ())
            for number in numbers
        }
        return sorted(found)

    def alone(self, index: int) -> Automaton:
        """Returns the automaton of one row."""
        automaton = self._automata.get(index)
        if automaton is None:
            automaton = self._automata[index] = Automaton((self.engine.automaton.programs[index],))
        return automaton


@dataclass
class Reasons:
    """The decisions about a planned module."""

    choice: Choice
    _counters: dict[str, Counter] | None = None
    _walkers: _Walkers = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.choice.engine
        self._walkers = _Walkers(self.engine)
        self._winners = {
            (candidate.graph.name, number): candidate
            for candidate in self.choice.candidates
            for number in candidate.slots
        }

    def decisions(self) -> tuple[Decision, ...]:
        """Returns all decisions: by function, in program order of the anchors, in the order of the table."""
        self._counters = {program.row.name: Counter() for program in self.engine.automaton.programs}
        return tuple(self._all(self._counters))

    def counters(self) -> dict[str, Counter]:
        """Returns the counter of each row, by its name."""
        if self._counters is None:
            self.decisions()
        assert self._counters is not None
        return self._counters

    def _all(self, counters: dict[str, Counter]) -> Iterator[Decision]:
        for name in self.engine.composites:
            yield _of_function(name, name, "is a composite already")
        for graph in self.engine.graphs:
            for local in graph.local_functions:
                yield _of_function(graph.name, local, "is a local function; run LambdaLift first")
            for number, index in self._walkers.anchors(graph):
                program = self.engine.automaton.programs[index]
                counter = counters[program.row.name]
                counter.tried += 1
                before = time.perf_counter()
                for decision in self.at(graph, graph.values[number], index):
                    counter.near += decision.outcome is Outcome.DECLINED
                    counter.applied += decision.outcome is Outcome.APPLIED
                    yield decision
                counter.seconds += time.perf_counter() - before

    def at(self, graph: Graph, anchor: Value, index: int) -> Iterator[Decision]:
        """Yields what became of the row with this place in the table at one anchor."""
        row = self.engine.automaton.programs[index].row
        decide = _Decider(row, graph, anchor)
        if not anchor.region.is_dataflow:
            reason = f"{anchor} is in a plain binding block; run ConvertToDataflow first"
            yield decide(Outcome.DECLINED, 0, lambda: reason)
            return
        if anchor.obstacle:
            yield decide(Outcome.DECLINED, 0, lambda: f"{anchor}: {anchor.obstacle}")
            return
        recorder = _Recorder(graph, row)
        walk = Walk(graph, self._walkers.alone(index), recorder)
        candidates = walk.run(anchor)
        winner = self._winners.get((graph.name, anchor.number))
        reached = 0
        if winner is not None and winner.anchor == anchor.number and winner.acceptance.program == index:
            reached = len(winner.slots)
            yield decide(Outcome.APPLIED, reached, lambda: _taken(winner))
        yield from self._refused(decide, candidates, recorder, reached)
        if not walk.is_complete:
            reason = f"the search was stopped after {MAX_STEPS} operators; there may be longer matches"
            yield decide(Outcome.DECLINED, reached, lambda: reason)

    def _refused(
        self, decide: _Decider, candidates: list[Candidate], recorder: _Recorder, reached: int
    ) -> Iterator[Decision]:
        """Yields the decision against the longest attempt, if it is longer than what was applied."""
        longest = max(candidates, key=lambda candidate: (len(candidate.slots), candidate.saved), default=None)
        length = 0 if longest is None else len(longest.slots)
        obstacle = recorder.farthest
        if longest is not None and length > reached:
            refusal = self.engine.refusal(longest)
            if refusal is not None:
                outcome, text = refusal
                yield decide(outcome, length, lambda: text)
                return
            if not reached or obstacle is None or obstacle.progress <= length:
                yield self._lost(decide, longest, reached)
                return
        if obstacle is not None and obstacle.progress > reached:
            is_other = obstacle.progress <= 1 and obstacle.kind == _MISSING
            skipped = not reached and (is_other or self._is_settled(decide, obstacle.progress))
            outcome = Outcome.SKIPPED if skipped else Outcome.DECLINED
            yield decide(outcome, obstacle.progress, obstacle.say, obstacle.culprit, obstacle.where)

    def _is_settled(self, decide: _Decider, progress: int) -> bool:
        """Whether another match has the anchor, and this row would not have got farther from it."""
        winner = self._winners.get((decide.graph.name, decide.anchor.number))
        if winner is None:
            return False
        return winner.anchor != decide.anchor.number or progress <= len(winner.slots)

    def _lost(self, decide: _Decider, candidate: Candidate, reached: int) -> Decision:
        """A candidate that is legal and was not taken: others took its operators."""
        progress = len(candidate.slots)
        if any(_same_operators(removed, candidate) for removed in self.choice.removed):
            return decide(Outcome.DECLINED, progress, lambda: "it was taken out of the plan afterwards")
        for number in candidate.slots:
            winner = self._winners.get((candidate.graph.name, number))
            if winner is not None and not _same_start(winner, candidate):
                value = candidate.graph.values[number]
                outcome = Outcome.SKIPPED if number == candidate.anchor else Outcome.DECLINED
                say = partial(_lost_to, winner, value, candidate)
                return decide(outcome, progress, say, value.name)
        if reached:
            text = "a shorter match leaves more for others to save"
        else:
            text = "its operators are free since other matches were taken out of the plan"
        return decide(Outcome.DECLINED, progress, lambda: text)


def _same_operators(left: Candidate, right: Candidate) -> bool:
    return left.graph is right.graph and set(left.slots) == set(right.slots)


def _same_start(left: Candidate, right: Candidate) -> bool:
    return left.anchor == right.anchor and left.acceptance.row is right.acceptance.row


def _of_function(function: str, name: str, reason: str) -> Decision:
    return Decision("", function, name, Outcome.SKIPPED, 0, name, function, lambda: reason)


def _taken(candidate: Candidate) -> str:
    values = candidate.graph.values
    names = ", ".join(f"`{values[number].name}`" for number in sorted(candidate.slots))
    return f"takes {names} and saves {candidate.saved} bytes"


def _lost_to(winner: Candidate, value: Value, loser: Candidate) -> str:
    row, other = loser.acceptance.row, winner.acceptance.row
    if _same_operators(winner, loser):
        reason = "has a higher priority" if other.priority > row.priority else "comes first in the table"
        return f"{other.name} matches the same operators and {reason}"
    anchor = winner.graph.values[winner.anchor].name
    return f"{value} went to {other.name} at `{anchor}`, which saves {winner.saved} bytes"


@dataclass(frozen=True)
class _Decider:
    """Makes decisions about one row at one anchor."""

    row: Row
    graph: Graph
    anchor: Value

    def __call__(
        self, outcome: Outcome, progress: int, say: Callable[[], str], culprit: str = "", where: str = ""
    ) -> Decision:
        name = self.anchor.name
        return Decision(
            self.row.name,
            self.graph.name,
            name,
            outcome,
            progress,
            culprit or name,
            where or str(self.row.origin),
            say,
        )


class _Tracer(_Recorder):
    """Prints the walk, one line for each operator that is taken."""

    def __init__(self, graph: Graph, row: Row, file: TextIO) -> None:
        super().__init__(graph, row)
        self.file = file

    def arrived(
        self, arrival: Arrival, slots: Sequence[int], failed: list[tuple[Condition, Failure]]
    ) -> None:
        super().arrived(arrival, slots, failed)
        self._print(len(slots), str(self.graph.values[slots[-1]]))
        for _, failure in failed:
            self._print(len(slots) + 1, f"no: {failure.text}")

    def entered(self, state: State, slots: Sequence[int], steps: int) -> None:
        super().entered(state, slots, steps)
        if state.acceptances:
            self._print(len(slots) + 1, "matches")
        elif steps == 0 and self.farthest is not None and self.farthest.kind == _MISSING:
            self._print(len(slots) + 1, f"no: {self.farthest.say()}")

    def escaped(self, acceptance: Acceptance, slots: Sequence[int], escape: Escape) -> None:
        super().escaped(acceptance, slots, escape)
        self._print(len(slots) + 1, f"no: {escape}")

    def _print(self, depth: int, text: str) -> None:
        print("  " * depth + text, file=self.file)


def trace(engine: Engine, pattern: str, file: TextIO | None = None) -> None:
    """Prints the walks of the rows whose names match ``pattern`` (with `*` and `?`), to standard error."""
    file = sys.stderr if file is None else file
    walkers = _Walkers(engine)
    for graph in engine.graphs:
        for number, index in walkers.anchors(graph):
            row = engine.automaton.programs[index].row
            anchor = graph.values[number]
            if fnmatchcase(row.name, pattern) and anchor.region.is_dataflow and not anchor.obstacle:
                print(f"{row.name} [{row.origin}] in {graph.name}", file=file)
                Walk(graph, walkers.alone(index), _Tracer(graph, row, file)).run(anchor)
