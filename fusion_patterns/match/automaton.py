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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations

from fusion_patterns.match.predicates import SameTensor, Test
from fusion_patterns.match.program import (
    Accept,
    Assign,
    Check,
    Clear,
    Instruction,
    Loop,
    Program,
    Reach,
    Split,
    Unify,
    Visit,
    compile_row,
    subjects_of,
)
from fusion_patterns.table.model import Row, Table
from fusion_patterns.table.ops import ELEMENTWISE, OPS

__all__ = [
    "Acceptance",
    "Arrival",
    "Automaton",
    "Condition",
    "Producer",
    "Ref",
    "State",
    "User",
    "automaton_of",
]

Ref = int | tuple[int, int]
"""A slot, or an operand ``(slot, position)``."""

Env = tuple[Ref | None, ...]
"""What each register holds."""

User = int
"""The question "which operator uses slot n?"."""
Producer = tuple[int, int]
"""The question "which operator computes this operand?"."""
Question = User | Producer
Sources = tuple[int, ...]

_MOST_PERMUTED = 3
"""Elementwise kernels with at most so many operands may have their named ones anywhere."""
_SAME = SameTensor()


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of what its subjects refer to."""

    test: Test | SameTensor
    subjects: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Thread:
    """One place in one row's program."""

    program: int
    at: Visit | Accept
    env: Env
    labels: tuple[int, ...]
    """for each slot, the node of the row"""
    conditions: int
    """the conditions that must hold for this thread to go on, a bit for each"""


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

    def __post_init__(self) -> None:
        for number, program in enumerate(self.programs):
            empty: Env = (None,) * program.registers
            found: list[Thread] = []
            _Closure(self, number, [], found).run(program.start, empty, (), 0)
            for thread in found:
                assert isinstance(thread.at, Visit)
                for op in thread.at.ops:
                    self.roots.setdefault(op, []).append((number, thread.at, thread.env))

    def start(self, op: str, operands: int) -> Arrival:
        """Returns where the walk from an anchor begins."""
        arrival = self.starts.get((op, operands))
        if arrival is None:
            sources = (-1,) * operands
            conditions: list[Condition] = []
            found: list[Thread] = []
            for number, visit, env in self.roots.get(op, ()):
                closure = _Closure(self, number, conditions, found)
                for bound, met in _bind(visit, env, op, sources, 0):
                    closure.run(visit.then, bound, (visit.label,), closure.bits(met))
            arrival = self.starts[(op, operands)] = Arrival(1, tuple(conditions), tuple(found))
        return arrival

    def step(self, state: State, question: Question, op: str, sources: Sources) -> Arrival | None:
        """Returns where one more operator leads, or None if no row takes it."""
        key = (question, op, sources)
        if key in state.steps:
            return state.steps[key]
        conditions: list[Condition] = []
        found: list[Thread] = []
        for thread in state.threads.get((question, op), ()):
            visit = thread.at
            assert isinstance(visit, Visit)
            closure = _Closure(self, thread.program, conditions, found)
            for bound, met in _bind(visit, thread.env, op, sources, state.size):
                closure.run(visit.then, bound, (*thread.labels, visit.label), closure.bits(met))
        arrival = Arrival(state.size + 1, tuple(conditions), tuple(found)) if found else None
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

    def test(self, check: Check) -> Test:
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
                question = _question(thread.at, thread.env)
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


def _question(visit: Visit, env: Env) -> Question | None:
    """Returns where to look for the operator that ``visit`` wants, or None if it can't be found any more."""
    if visit.reach is Reach.BACKWARD:
        operand = env[visit.start]
        return operand if isinstance(operand, tuple) else None
    slots = [ref for ref in (env[register] for register in visit.operands) if isinstance(ref, int)]
    return max(slots, default=None)


def _bind(
    visit: Visit, env: Env, op: str, sources: Sources, slot: int
) -> Iterator[tuple[Env, tuple[Condition, ...]]]:
    """Yields what the registers hold once ``op`` stands at ``slot``, for each order its operands may have."""
    base = list(env)
    if visit.reach is Reach.BACKWARD and visit.start in visit.operands:
        base[visit.start] = None
    seen: list[tuple[Env, tuple[Condition, ...]]] = []
    for positions in _positions(visit, op, len(sources)):
        bound = _bind_operands(base, visit.operands, positions, sources, slot)
        if bound is None:
            continue
        registers, conditions = bound
        registers[visit.own] = slot
        if visit.reach is not Reach.BACKWARD or not isinstance(registers[visit.result], int):
            registers[visit.result] = slot
        result = tuple(registers), conditions
        if result not in seen:
            seen.append(result)
            yield result


def _positions(visit: Visit, op: str, count: int) -> Iterator[tuple[int, ...]]:
    """Yields at which positions the named operands may stand."""
    named = len(visit.operands)
    if visit.follows and named:
        yield from ((position,) for position in range(count))
    elif named <= count:
        free_order = OPS[op].commutes or (op == ELEMENTWISE and count <= _MOST_PERMUTED)
        yield from permutations(range(count), named) if free_order else (tuple(range(named)),)


def _bind_operands(
    base: list[Ref | None],
    names: tuple[int, ...],
    positions: tuple[int, ...],
    sources: Sources,
    slot: int,
) -> tuple[list[Ref | None], tuple[Condition, ...]] | None:
    registers = list(base)
    conditions = []
    for register, position in zip(names, positions, strict=True):
        ref = registers[register]
        if isinstance(ref, int):
            if sources[position] != ref:
                return None
        elif sources[position] >= 0:
            return None
        elif ref is None:
            registers[register] = (slot, position)
        else:
            conditions.append(Condition(_SAME, (ref, (slot, position))))
    return registers, tuple(conditions)


class _Closure:
    """Follows the instructions that take no operator."""

    def __init__(
        self, automaton: Automaton, program: int, conditions: list[Condition], found: list[Thread]
    ) -> None:
        self.automaton = automaton
        self.program = program
        self.conditions = conditions
        self.found = found
        self.seen: set[object] = set()

    def bits(self, conditions: tuple[Condition, ...]) -> int:
        """Returns the bits that stand for these conditions, which are added to those met so far."""
        bits = 0
        for condition in conditions:
            if condition not in self.conditions:
                self.conditions.append(condition)
            bits |= 1 << self.conditions.index(condition)
        return bits

    def run(self, at: Instruction, env: Env, labels: tuple[int, ...], met: int) -> None:
        """Adds to ``found`` every `Visit` and `Accept` that can be reached from ``at``."""
        while not isinstance(at, Visit | Accept):
            if isinstance(at, Split):
                for way in at.ways:
                    self.run(way, env, labels, met)
                return
            if isinstance(at, Loop):
                done = env[at.counter] or 0
                assert isinstance(done, int)
                if done < at.most:
                    assert at.body is not None
                    self.run(at.body, _with(env, at.counter, done + 1), labels, met)
                if done < at.least:
                    return
                at = at.then
                continue
            changed = _EFFECTS[type(at)](self, at, env)
            if changed is None:
                return
            env, bits = changed
            met |= bits
            at = at.then
        key = (id(at), env, labels, met)
        if key not in self.seen:
            self.seen.add(key)
            self.found.append(Thread(self.program, at, env, labels, met))

    def assign(self, at: Assign, env: Env) -> tuple[Env, int]:
        if at.keep and isinstance(env[at.target], int):
            return env, 0
        return _with(env, at.target, env[at.source]), 0

    def clear(self, at: Clear, env: Env) -> tuple[Env, int]:
        for register in at.registers:
            env = _with(env, register, None)
        return env, 0

    def unify(self, at: Unify, env: Env) -> tuple[Env, int] | None:
        left, right = env[at.left], env[at.right]
        if left is None or right is None:
            merged = right if left is None else left
            return _with(_with(env, at.left, merged), at.right, merged), 0
        if left == right:
            return env, 0
        if isinstance(left, int) or isinstance(right, int):
            return None
        return env, self.bits((Condition(_SAME, (left, right)),))

    def check(self, at: Check, env: Env) -> tuple[Env, int]:
        subjects = []
        for register in at.subjects:
            ref = env[register]
            if ref is None:
                return env, 0
            subjects.append(ref)
        test = self.automaton.test(at)
        return env, self.bits((Condition(test, tuple(subjects)),))


_Effect = Callable[[_Closure, "Instruction", Env], tuple[Env, int] | None]
_EFFECTS: dict[type, _Effect] = {
    Assign: _Closure.assign,  # type: ignore[dict-item]
    Clear: _Closure.clear,  # type: ignore[dict-item]
    Unify: _Closure.unify,  # type: ignore[dict-item]
    Check: _Closure.check,  # type: ignore[dict-item]
}


def _with(env: Env, register: int, ref: Ref | None) -> Env:
    return (*env[:register], ref, *env[register + 1 :])
