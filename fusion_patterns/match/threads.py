"""One row's way through its program: threads, as in a simulation of a nondeterministic automaton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

from fusion_patterns.match.order import Reach
from fusion_patterns.match.predicates import SameTensor, Test
from fusion_patterns.match.program import Accept, Assign, Check, Clear, Instruction, Loop, Split, Unify, Visit
from fusion_patterns.table.ops import ELEMENTWISE, OPS

__all__ = [
    "Condition",
    "Env",
    "Producer",
    "Question",
    "Ref",
    "Sources",
    "Thread",
    "Threads",
    "User",
    "bound",
    "question_of",
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
    """A test of what its subjects refer to.

    Without a test: whatever takes an inner value and is not matched yet comes after one of the subjects, the
    slots from which the row still goes on. Else the match could never be closed, and the walk ends here.
    """

    test: Test | SameTensor | None
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


def question_of(visit: Visit, env: Env) -> Question | None:
    """Returns where to look for the operator that ``visit`` wants, or None if it can't be found any more."""
    if visit.reach is Reach.BACKWARD:
        operand = env[visit.start]
        return operand if isinstance(operand, tuple) else None
    slots = [ref for ref in (env[register] for register in visit.operands) if isinstance(ref, int)]
    return max(slots, default=None)


def bound(
    visit: Visit, env: Env, op: str, sources: Sources, slot: int
) -> Iterator[tuple[Env, tuple[Condition, ...]]]:
    """Yields what the registers hold once ``op`` stands at ``slot``, for each order its operands may have."""
    base = list(env)
    if visit.reach is Reach.BACKWARD and visit.start in visit.operands:
        base[visit.start] = None
    seen: list[tuple[Env, tuple[Condition, ...]]] = []
    for positions in _positions(visit, op, len(sources)):
        fitted = _bind_operands(base, visit.operands, positions, sources, slot)
        if fitted is None:
            continue
        registers, conditions = fitted
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


class Threads:
    """The threads after one more operator: follows the instructions that take none.

    ``found`` are those that wait for the next operator or accept, ``conditions`` what they depend on.
    """

    def __init__(
        self,
        test_of: Callable[[Check], Test],
        goes_on_from: Callable[[int, Visit, Env], tuple[int, ...] | None],
    ) -> None:
        self.test_of = test_of
        self.goes_on_from = goes_on_from
        self.conditions: list[Condition] = []
        self.found: list[Thread] = []
        self.seen: set[object] = set()

    def advance(
        self, program: int, visit: Visit, env: Env, labels: tuple[int, ...], op: str, sources: Sources
    ) -> None:
        """Lets ``visit`` take ``op``, as the next slot, and goes on from there."""
        for registers, conditions in bound(visit, env, op, sources, len(labels)):
            self.run(program, visit.then, registers, (*labels, visit.label), self.bits(conditions))

    def bits(self, conditions: tuple[Condition, ...]) -> int:
        """Returns the bits that stand for these conditions, which are added to those met so far."""
        bits = 0
        for condition in conditions:
            if condition not in self.conditions:
                self.conditions.append(condition)
            bits |= 1 << self.conditions.index(condition)
        return bits

    def run(self, program: int, at: Instruction, env: Env, labels: tuple[int, ...], met: int) -> None:
        """Adds to ``found`` every `Visit` and `Accept` that can be reached from ``at``."""
        while not isinstance(at, Visit | Accept):
            if isinstance(at, Split):
                for way in at.ways:
                    self.run(program, way, env, labels, met)
                return
            if isinstance(at, Loop):
                done = env[at.counter] or 0
                assert isinstance(done, int)
                if done < at.most:
                    assert at.body is not None
                    self.run(program, at.body, _with(env, at.counter, done + 1), labels, met)
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
        if isinstance(at, Visit) and labels:
            slots = self.goes_on_from(program, at, env)
            if slots is not None:
                met |= self.bits((Condition(None, slots),))
        key = (program, id(at), env, labels, met)
        if key not in self.seen:
            self.seen.add(key)
            self.found.append(Thread(program, at, env, labels, met))

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
        test = self.test_of(at)
        return env, self.bits((Condition(test, tuple(subjects)),))


_Effect = Callable[[Threads, "Instruction", Env], tuple[Env, int] | None]
_EFFECTS: dict[type, _Effect] = {
    Assign: Threads.assign,  # type: ignore[dict-item]
    Clear: Threads.clear,  # type: ignore[dict-item]
    Unify: Threads.unify,  # type: ignore[dict-item]
    Check: Threads.check,  # type: ignore[dict-item]
}


def _with(env: Env, register: int, ref: Ref | None) -> Env:
    return (*env[:register], ref, *env[register + 1 :])
