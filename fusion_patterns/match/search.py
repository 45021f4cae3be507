"""From an anchor to all that the rows could make of it.

The walk follows the automaton through the graph, depth first. What it finds is a `Candidate`: a set of
operators that is one composite by some row, whose inner values are needed nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fusion_patterns.match.automaton import Acceptance, Arrival, Automaton, State
from fusion_patterns.match.exact import Word, word_of
from fusion_patterns.match.graph import EXTERNAL, Graph, Value
from fusion_patterns.match.layouts import Subject
from fusion_patterns.match.predicates import Failure
from fusion_patterns.match.threads import Condition, Question, Ref

__all__ = ["Candidate", "Escape", "Observer", "Walk", "escape_of", "failure_of", "way_back"]

MAX_STEPS = 5000
"""The most operators that are tried from one anchor."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One way to match a row: the operators by slot (numbers of values), the anchor first."""

    graph: Graph
    acceptance: Acceptance
    slots: tuple[int, ...]
    outputs: tuple[int, ...]
    """numbers of the values that leave: the row's output first"""
    saved: int
    """bytes of inner values that are not written any more"""

    _word: Word = ()

    @property
    def anchor(self) -> int:
        """The number of the anchor."""
        return self.slots[0]

    @property
    def word(self) -> Word:
        """The operators and how they hang together, in program order."""
        if not self._word:
            self._word = word_of(self.graph, sorted(self.slots))
        return self._word

    def operand_key(self, ref: tuple[int, int]) -> int:
        """Returns the key of the tensor at an operand ``(slot, position)``."""
        return self.graph.values[self.slots[ref[0]]].keys[ref[1]]


@dataclass(frozen=True)
class Escape:
    """An inner value that is needed outside of the match."""

    value: Value
    user: Value | None
    """the value that takes it; None if it leaves in another way"""
    exit: str
    path: tuple[Value, ...]
    """from the value over operators outside back into the match; empty if there is no way back"""

    def __str__(self) -> str:
        if self.path:
            way = " -> ".join(str(value) for value in self.path)
            return f"fusing would close a cycle: {way} leaves the match and comes back into it"
        if self.user is None:
            return f"{self.value} is also {self.exit}"
        return f"{self.value} is also used by {self.user}, outside the match"


class Observer(Protocol):
    """What may be told of a walk; used for reasons, never in the fast path."""

    def arrived(
        self, arrival: Arrival, slots: Sequence[int], failed: list[tuple[Condition, Failure]]
    ) -> None:
        """An operator was taken; these conditions on the way did not hold."""

    def entered(self, state: State, slots: Sequence[int], steps: int) -> None:
        """A state was left behind, after this many further operators were taken from it."""

    def escaped(self, acceptance: Acceptance, slots: Sequence[int], escape: Escape) -> None:
        """A row matched, but one of its inner values is needed elsewhere."""


class Walk:
    """The walk from one anchor."""

    def __init__(self, graph: Graph, automaton: Automaton, observer: Observer | None = None) -> None:
        self.graph = graph
        self.automaton = automaton
        self.observer = observer
        self.found: dict[frozenset[int], Candidate] = {}
        self.steps = 0
        self._slots: list[int] = []
        self._slot_of: dict[int, int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether the walk was not cut short."""
        return self.steps < MAX_STEPS

    def run(self, anchor: Value) -> list[Candidate]:
        """Returns the candidates from ``anchor``, for each set of operators the row that wins."""
        self._slots.append(anchor.number)
        self._slot_of[anchor.number] = 0
        self._arrive(self.automaton.start(anchor.op, len(anchor.operands)))
        return list(self.found.values())

    def _arrive(self, arrival: Arrival) -> None:
        held = 0
        if self.observer is None:
            for number, condition in enumerate(arrival.conditions):
                if self._holds(condition):
                    held |= 1 << number
        else:
            failed = []
            for number, condition in enumerate(arrival.conditions):
                failure = failure_of(self.graph, condition, self._slots)
                if failure is None:
                    held |= 1 << number
                else:
                    failed.append((condition, failure))
            self.observer.arrived(arrival, self._slots, failed)
        state = self.automaton.settle(arrival, held)
        for (output, leaves), acceptances in state.acceptances:
            self._accept(output, leaves, acceptances)
        before = self.steps
        for question, ops in state.questions:
            for number in self._answers(question):
                self._take(state, question, ops, number)
        if self.observer is not None:
            self.observer.entered(state, self._slots, self.steps - before)

    def _holds(self, condition: Condition) -> bool:
        test, graph = condition.test, self.graph
        if test is None:
            return self._may_close(condition.subjects)
        # One number for all subjects: far cheaper than what a tuple of them costs the garbage collector.
        key = 0
        for ref in condition.subjects:
            number, position = (ref, -1) if isinstance(ref, int) else ref
            if test.asks_types_only:
                # A network has few types, so most of what is asked has been answered for another tensor.
                value = graph.values[self._slots[number]]
                key = key << 32 | graph.kind_of(value.var if position < 0 else value.operands[position])
            else:
                key = key << 48 | self._slots[number] << 16 | position + 1
        answers = graph.answers.setdefault(test, {})
        answer = answers.get(key)
        if answer is None:
            subjects = subjects_of(graph, condition, self._slots)
            answer = answers[key] = test.holds(graph, subjects)
        return answer

    def _may_close(self, refs: Sequence[Ref]) -> bool:
        """Whether all that takes an inner value from outside comes after one of these slots."""
        values, slot_of = self.graph.values, self._slot_of
        ahead: int | None = None
        for number in self._slots:
            value = values[number]
            if len(value.users) < 2 and not value.exits:
                continue
            outside = [user for user in value.users if user not in slot_of]
            if len(outside) == len(value.users):
                continue
            if value.exits:
                return False
            for user in outside:
                if ahead is None:
                    ahead = 0
                    for ref in refs:
                        assert isinstance(ref, int)
                        ahead |= self.graph.descendants[self._slots[ref]]
                if not ahead >> user & 1:
                    return False
        return True

    def _answers(self, question: Question) -> Sequence[int]:
        values = self.graph.values
        if isinstance(question, int):
            users = values[self._slots[question]].users
            return users if len(users) < 2 else tuple(dict.fromkeys(users))
        slot, position = question
        source = values[self._slots[slot]].sources[position]
        return () if source == EXTERNAL else (source,)

    def _take(self, state: State, question: Question, ops: frozenset[str], number: int) -> None:
        value = self.graph.values[number]
        if value.op not in ops or number in self._slot_of or value.obstacle or not self.is_complete:
            return
        slot_of = self._slot_of
        if value.region is not self.graph.values[self._slots[0]].region:
            return
        sources = tuple([slot_of.get(source, EXTERNAL) for source in value.sources])
        arrival = self.automaton.step(state, question, value.op, sources)
        if arrival is None:
            return
        self.steps += 1
        slot_of[number] = len(self._slots)
        self._slots.append(number)
        self._arrive(arrival)
        self._slots.pop()
        del slot_of[number]

    def _accept(self, output: int, leaves: frozenset[int], acceptances: tuple[Acceptance, ...]) -> None:
        slots = tuple(self._slots)
        escape = escape_of(self.graph, slots, output, leaves, explain=self.observer is not None)
        if escape is not None:
            if self.observer is not None:
                self.observer.escaped(acceptances[0], slots, escape)
            return
        members = frozenset(slots)
        for acceptance in acceptances:
            if not self._tensors_are_outside(acceptance):
                continue
            known = self.found.get(members)
            if known is None or _wins(acceptance, known.acceptance):
                self.found[members] = self._candidate(acceptance, slots, leaves)
            return

    def _tensors_are_outside(self, acceptance: Acceptance) -> bool:
        """Whether no tensor that the row names is computed inside, by an operator that was found later."""
        values = self.graph.values
        sources = (values[self._slots[slot]].sources[place] for _, (slot, place) in acceptance.named)
        return all(source not in self._slot_of for source in sources)

    def _candidate(self, acceptance: Acceptance, slots: tuple[int, ...], leaves: frozenset[int]) -> Candidate:
        values = self.graph.values
        members = set(slots)
        outputs = [slots[acceptance.output]]
        for slot in sorted(leaves):
            value = values[slots[slot]]
            if value.exits or any(user not in members for user in value.users):
                outputs.append(value.number)
        saved = sum([self.graph.bytes_of(values[number]) for number in members.difference(outputs)])
        return Candidate(self.graph, acceptance, slots, tuple(outputs), saved)


def _wins(left: Acceptance, right: Acceptance) -> bool:
    return (-left.row.priority, left.program) < (-right.row.priority, right.program)


def failure_of(graph: Graph, condition: Condition, slots: Sequence[int]) -> Failure | None:
    """Returns why a condition does not hold for the operators at ``slots``, or None if it does.

    Whether the match can still be closed is not asked here: the reason is found by walking to the end.
    """
    if condition.test is None:
        return None
    return condition.test.failure(graph, subjects_of(graph, condition, slots))


def subjects_of(graph: Graph, condition: Condition, slots: Sequence[int]) -> list[Subject]:
    """Returns the operators and operands that a condition is about."""
    return [
        graph.values[slots[ref]] if isinstance(ref, int) else (slots[ref[0]], ref[1])
        for ref in condition.subjects
    ]


def escape_of(
    graph: Graph, slots: Sequence[int], output: int, leaves: frozenset[int], *, explain: bool
) -> Escape | None:
    """Returns the first inner value that is needed outside, or None if the match is closed.

    With one value leaving, that is all there is to convexity: every other operator's value is used, and only
    inside, so whatever leaves does so from the end. Values that may leave before the end (``leaves``) could
    come back, so for them the way back is looked for.
    """
    members = set(slots)
    for slot, number in enumerate(slots):
        if slot == output and not leaves:
            continue
        value = graph.values[number]
        outside = [user for user in value.users if user not in members]
        if slot == output or slot in leaves:
            path = way_back(graph, value, outside, members) if outside else ()
            if path:
                return Escape(value, path[1], "", path)
        elif outside or value.exits or not value.users:
            if not outside:
                return Escape(value, None, value.exits[0] if value.exits else "used by nothing", ())
            path = way_back(graph, value, outside, members) if explain else ()
            return Escape(value, graph.values[outside[0]], "", path)
    return None


def way_back(graph: Graph, value: Value, outside: Sequence[int], members: set[int]) -> tuple[Value, ...]:
    """Returns a path from ``value`` over users outside back to one of ``members``, or nothing.

    Bindings are in topological order, so nothing after the last member needs to be looked at.
    """
    last = max(members)
    came_from: dict[int, int] = {}
    stack = [(user, value.number) for user in reversed(outside)]
    while stack:
        number, before = stack.pop()
        if number in came_from or number > last:
            continue
        came_from[number] = before
        for user in graph.values[number].users:
            if user in members:
                path = [user, number]
                while path[-1] != value.number:
                    path.append(came_from[path[-1]])
                return tuple(graph.values[step] for step in reversed(path))
            stack.append((user, number))
    return ()
