"""The whole table as one automaton, built as far as graphs need it.

The programs of all rows run side by side, in the way of a lazily built deterministic automaton for regular
expressions: a *state* is the set of all places that any row can be at after a word of operators. So what
rows have in common is walked once, and time hardly grows with rows. Its letters are of two kinds:

- an operator with how it hangs on the match so far: ``(question, op, sources)``, where the question is
  "a user of slot 2" or "the producer of operand 0 of slot 0", and ``sources`` gives for each operand the
  slot that computes it, or -1;
- the answers to the conditions met on the way. A condition is asked once for all rows that share it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from fusion_patterns.match.liveness import LOOKS_BACK, live_registers
from fusion_patterns.match.predicates import Test
from fusion_patterns.match.program import Check, Program, Visit, compile_row, subjects_of
from fusion_patterns.match.threads import Condition, Env, Question, Sources, Thread, Threads, question_of
from fusion_patterns.table.model import Row, Table

__all__ = ["Acceptance", "Arrival", "Automaton", "State", "automaton_of"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A row that matches here."""

    program: int
    row: Row
    labels: tuple[int, ...]
    output: int
    leaves: frozenset[int]
    """slots whose values may leave as well"""
    named: tuple[tuple[str, tuple[int, int]], ...]
    """the tensors that have a name in the row, and an operand where each stands"""


@dataclass(slots=True, eq=False)
class State:
    """All places that the rows can be at; ``questions`` say which operators would be a step."""

    size: int
    acceptances: tuple[tuple[tuple[int, frozenset[int]], tuple[Acceptance, ...]], ...]
    """grouped by what may leave, in each group the row that wins first"""
    questions: tuple[tuple[Question, frozenset[str]], ...]
    threads: dict[tuple[Question, str], list[Thread]]
    steps: dict[tuple[Question, str, Sources], Arrival | None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Arrival:
    """Where a letter leads before the conditions on the way are answered."""

    size: int
    conditions: tuple[Condition, ...]
    threads: tuple[Thread, ...]
    states: dict[int, State] = field(default_factory=dict)


@dataclass
class Automaton:
    """The rows of a table, merged."""

    programs: tuple[Program, ...]
    roots: dict[str, list[tuple[int, Visit, Env]]] = field(default_factory=dict)
    """by operator: the rows that may start there"""
    starts: dict[tuple[str, int], Arrival] = field(default_factory=dict)
    interned: dict[object, State] = field(default_factory=dict)
    tests: dict[int | str, Test] = field(default_factory=dict)
    """by the instruction, and by what it asks: one test for all that ask the same"""

    live: list[dict[int, int]] = field(default_factory=list)
    """for each program: what is live at each `Visit`; nothing is known where inner values may leave"""

    def __post_init__(self) -> None:
        self.live = [{} if p.row.leaves else live_registers(p.start) for p in self.programs]
        for number, program in enumerate(self.programs):
            threads = Threads(self._test, self._goes_on_from)
            threads.run(number, program.start, (None,) * program.registers, (), 0)
            for thread in threads.found:
                assert isinstance(thread.at, Visit)
                for op in thread.at.ops:
                    self.roots.setdefault(op, []).append((number, thread.at, thread.env))

    def start(self, op: str, operands: int) -> Arrival:
        """Returns where the walk from an anchor begins."""
        arrival = self.starts.get((op, operands))
        if arrival is None:
            threads = Threads(self._test, self._goes_on_from)
            for number, visit, env in self.roots.get(op, ()):
                threads.advance(number, visit, env, (), op, (-1,) * operands)
            arrival = Arrival(1, tuple(threads.conditions), tuple(threads.found))
            self.starts[(op, operands)] = arrival
        return arrival

    def step(self, state: State, question: Question, op: str, sources: Sources) -> Arrival | None:
        """Returns where one more operator leads, or None if no row takes it."""
        key = (question, op, sources)
        if key in state.steps:
            return state.steps[key]
        threads = Threads(self._test, self._goes_on_from)
        for thread in state.threads.get((question, op), ()):
            assert isinstance(thread.at, Visit)
            threads.advance(thread.program, thread.at, thread.env, thread.labels, op, sources)
        arrival = None
        if threads.found:
            arrival = Arrival(state.size + 1, tuple(threads.conditions), tuple(threads.found))
        state.steps[key] = arrival
        return arrival

    def settle(self, arrival: Arrival, held: int) -> State:
        """Returns the state behind an arrival, given which of its conditions hold (a bit for each)."""
        state = arrival.states.get(held)
        if state is None:
            alive: dict[object, Thread] = {}
            for thread in arrival.threads:
                if thread.conditions & ~held == 0:
                    alive.setdefault((thread.program, id(thread.at), thread.env, thread.labels), thread)
            key = (arrival.size, tuple(alive))
            state = self.interned.get(key)
            if state is None:
                state = self.interned[key] = self._state(arrival.size, list(alive.values()))
            arrival.states[held] = state
        return state

    def _goes_on_from(self, program: int, visit: Visit, env: Env) -> tuple[int, ...] | None:
        """Returns the slots whose users a row may still ask for; None if it looks elsewhere as well."""
        live = self.live[program].get(id(visit), LOOKS_BACK)
        if live & LOOKS_BACK:
            return None
        refs = {ref for register, ref in enumerate(env, 1) if live >> register & 1 and isinstance(ref, int)}
        return tuple(sorted(refs))

    def _test(self, check: Check) -> Test:
        """Returns the test that a `Check` stands for."""
        test = self.tests.get(id(check))
        if test is None:
            asked = check.predicate.model_dump_json()
            test = self.tests.setdefault(asked, Test(check.predicate, subjects_of(check.predicate)))
            self.tests[id(check)] = test
        return test

    def _state(self, size: int, alive: list[Thread]) -> State:
        groups: dict[tuple[int, frozenset[int]], list[Acceptance]] = {}
        threads: dict[tuple[Question, str], list[Thread]] = {}
        ops: dict[Question, set[str]] = {}
        accepted: set[int] = set()
        for thread in alive:
            if isinstance(thread.at, Visit):
                question = question_of(thread.at, thread.env)
                if question is None:
                    continue
                ops.setdefault(question, set()).update(thread.at.ops)
                for op in thread.at.ops:
                    threads.setdefault((question, op), []).append(thread)
                continue
            output = thread.env[thread.at.output]
            # One row may accept one word in two ways; the first, which fills optional nodes, is meant.
            if isinstance(output, int) and thread.program not in accepted:
                accepted.add(thread.program)
                acceptance = self._acceptance(thread, output)
                groups.setdefault((output, acceptance.leaves), []).append(acceptance)
        for group in groups.values():
            group.sort(key=lambda acceptance: (-acceptance.row.priority, acceptance.program))
        questions = tuple((question, frozenset(names)) for question, names in ops.items())
        acceptances = tuple((key, tuple(group)) for key, group in groups.items())
        return State(size, acceptances, questions, threads)

    def _acceptance(self, thread: Thread, output: int) -> Acceptance:
        program = self.programs[thread.program]
        may_leave = {number for number, name in enumerate(program.labels) if name in program.row.leaves}
        leaves = frozenset(slot for slot, label in enumerate(thread.labels) if label in may_leave)
        refs = ((name, thread.env[register]) for name, register in program.tensors)
        named = tuple((name, ref) for name, ref in refs if isinstance(ref, tuple))
        return Acceptance(thread.program, program.row, thread.labels, output, leaves - {output}, named)


_automata: dict[int, Automaton] = {}


def automaton_of(table: Table) -> Automaton:
    """Returns the automaton of a table; it is kept, and grows, as long as the table lives."""
    automaton = _automata.get(id(table))
    if automaton is None:
        automaton = Automaton(tuple(compile_row(row, table) for row in table.patterns))
        _automata[id(table)] = automaton
        weakref.finalize(table, _automata.pop, id(table), None)
    return automaton
