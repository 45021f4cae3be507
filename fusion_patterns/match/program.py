"""Rows as programs: what to look for, in which order, starting from the anchor.

A row is compiled to a small nondeterministic program, as a regular expression is. Its instructions::

    Visit     take one operator: the anchor, a user of a value that is already matched, or the producer of an
              operand of one; bind what its operands are called
    Split     go on in several ways (an optional node, alternatives, one more repetition)
    Loop      repeat a bounded number of times
    Unify     two names mean one value;  Assign, Clear  housekeeping of names
    Check     a condition on names that are bound now
    Accept    the row matches

Names live in registers. A register holds nothing, the number of a matched operator (its *slot*: 0 is the
anchor), or an operand ``(slot, position)`` whose producer is not part of the match, or not yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusion_patterns.errors import TableError
from fusion_patterns.match.order import Reach, Scope, Step, schedule
from fusion_patterns.table import expr
from fusion_patterns.table.expand import ops_of, tensors_of
from fusion_patterns.table.model import Fragment, Predicate, Row, Table

__all__ = [
    "Accept",
    "Assign",
    "Check",
    "Clear",
    "Instruction",
    "Loop",
    "Program",
    "Split",
    "Unify",
    "Visit",
    "compile_row",
    "subjects_of",
]


@dataclass(slots=True, eq=False)
class Visit:
    """Take one operator. ``follows``: its one named operand may stand at any position."""

    ops: frozenset[str]
    reach: Reach
    start: int
    operands: tuple[int, ...]
    follows: bool
    own: int
    """the register for the operator's own slot: what conditions on this node are about"""
    result: int
    """the register for the node's value: what later nodes take"""
    label: int
    """which node of the row this operator belongs to"""
    then: Instruction


@dataclass(slots=True, eq=False)
class Split:
    """Go on in each of these ways."""

    ways: tuple[Instruction, ...]


@dataclass(slots=True, eq=False)
class Loop:
    """Run ``body``, which comes back here, ``least`` to ``most`` times; ``counter`` is a register."""

    counter: int
    least: int
    most: int
    then: Instruction
    body: Instruction | None = None


@dataclass(slots=True, eq=False)
class Unify:
    """Both registers mean the same value."""

    left: int
    right: int
    then: Instruction


@dataclass(slots=True, eq=False)
class Assign:
    """``target`` becomes what ``source`` is; with ``keep`` only if it is no slot yet."""

    target: int
    source: int
    then: Instruction
    keep: bool = False


@dataclass(slots=True, eq=False)
class Clear:
    """Forget these registers."""

    registers: tuple[int, ...]
    then: Instruction


@dataclass(slots=True, eq=False)
class Check:
    """A condition; it holds if one of its subjects is absent."""

    predicate: Predicate
    subjects: tuple[int, ...]
    then: Instruction


@dataclass(slots=True, eq=False)
class Accept:
    """The row matches; the value of this register leaves."""

    output: int


Instruction = Visit | Split | Loop | Unify | Assign | Clear | Check | Accept


@dataclass(frozen=True)
class Program:
    """A compiled row."""

    row: Row
    start: Instruction
    registers: int
    labels: tuple[str, ...]
    """the names of the row's nodes"""
    tensors: tuple[tuple[str, int], ...]
    """the names of the row's tensors, and their registers"""


def subjects_of(predicate: Predicate) -> tuple[str, ...]:
    """Returns the names that a condition is about, each once."""
    if predicate.that is not None:
        return tuple(dict.fromkeys(subject for subject, _ in sorted(expr.parse(predicate.that).names())))
    name = predicate.node if predicate.node is not None else predicate.tensor
    return () if name is None else (name,)


@dataclass(frozen=True)
class _Spec:
    """How the operators of one node are found and where its value goes."""

    reach: Reach
    start: int
    operands: tuple[int, ...]
    follows: bool
    result: int
    label: int


def compile_row(row: Row, table: Table) -> Program:
    """Returns the program of a row."""
    return _Compiler(row, table).program()


@dataclass
class _Compiler:
    row: Row
    table: Table
    registers: dict[str, int] = field(default_factory=dict)

    def program(self) -> Program:
        row = self.row
        scope = Scope("", row.nodes)
        tensors = tensors_of(row)
        steps = schedule(scope, (row.anchor_name(), Reach.ANCHOR))
        reached = {name for name, _ in steps}
        missing = [name for name in row.nodes if name not in reached]
        if missing:
            raise TableError(
                f"{row.origin}: row '{row.name}': no value connects '{missing[0]}' with the anchor"
            )
        checks = self._placed(steps, scope)
        accept = Accept(self._register(row.output_name()))
        then: Instruction = self._checked(checks[len(steps)], accept)
        for place in reversed(range(len(steps))):
            name, reach = steps[place]
            after = self._repeated(name, checks[place], then)
            then = self._node(scope, name, reach, after, list(row.nodes).index(name), checks[place])
        tensor_registers = tuple((name, self._register(name)) for name in tensors)
        return Program(row, then, len(self.registers), tuple(row.nodes), tensor_registers)

    def _register(self, name: str) -> int:
        return self.registers.setdefault(name, len(self.registers))

    # Conditions: each is placed where the last of its subjects is settled.

    def _placed(self, steps: list[Step], scope: Scope) -> list[list[Predicate]]:
        settled = {name: place for place, (name, _) in enumerate(steps)}
        for place, (name, _) in enumerate(steps):
            for operand in scope.inputs(name):
                if operand not in scope.nodes:
                    settled[operand] = max(place, settled.get(operand, 0))
        settled["output"] = len(steps)
        placed: list[list[Predicate]] = [[] for _ in range(len(steps) + 1)]
        for predicate in self.row.where:
            places = [settled.get(subject, len(steps)) for subject in subjects_of(predicate)]
            placed[max(places, default=0)].append(predicate)
        return placed

    def _checked(self, predicates: Iterable[Predicate], then: Instruction) -> Instruction:
        for predicate in reversed(list(predicates)):
            then = Check(predicate, self._subjects(predicate), then)
        return then

    def _subjects(self, predicate: Predicate) -> tuple[int, ...]:
        return tuple(
            self._register(
                self.row.output_name() if name == "output" else f"{name}@" if name in self.row.nodes else name
            )
            for name in subjects_of(predicate)
        )

    def _repeated(self, name: str, predicates: list[Predicate], then: Instruction) -> Instruction:
        """Conditions on a repeated node are checked at each occurrence, all others once, after the node."""
        if self.row.nodes[name].repeat is not None:
            predicates = [predicate for predicate in predicates if name not in subjects_of(predicate)]
        return self._checked(predicates, then)

    # Nodes

    def _node(
        self,
        scope: Scope,
        name: str,
        reach: Reach,
        then: Instruction,
        label: int,
        predicates: Iterable[Predicate] = (),
    ) -> Instruction:
        node = scope.nodes[name]
        inputs = tuple(self._register(scope.prefix + operand) for operand in scope.inputs(name))
        value = self._register(scope.prefix + name)
        if node.repeat is not None:
            own = [predicate for predicate in predicates if name in subjects_of(predicate)]
            return self._repeat(scope, name, reach, then, label, own)
        spec = _Spec(reach, value, inputs, node.inputs is None, value, label)
        taken = self._alternatives(scope, name, spec, then)
        if not node.optional:
            return taken
        stand_in = scope.stand_in(name)
        if stand_in is None:
            return Split((taken, then))
        return Split((taken, Unify(value, self._register(scope.prefix + stand_in), then)))

    def _repeat(
        self,
        scope: Scope,
        name: str,
        reach: Reach,
        then: Instruction,
        label: int,
        predicates: list[Predicate],
    ) -> Instruction:
        repeat = scope.nodes[name].repeat
        assert repeat is not None
        value = self._register(scope.prefix + name)
        counter = self._register(f"{scope.prefix}{name}#")
        before = scope.stand_in(name)
        chain = None if before is None else self._register(scope.prefix + before)
        if reach is Reach.BACKWARD:
            # The cursor is the operand whose producer comes next; the value stays with the first one found.
            cursor = self._register(f"{scope.prefix}{name}~")
            after: Instruction = Clear((counter, cursor), then)
            if chain is not None:
                after = Unify(chain, cursor, after)
            loop = Loop(counter, repeat.min, repeat.max, after)
            spec = _Spec(reach, cursor, (cursor,), True, value, label)
            loop.body = self._alternatives(scope, name, spec, self._checked(predicates, loop))
            return Assign(cursor, value, loop)
        assert chain is not None
        loop = Loop(counter, repeat.min, repeat.max, Clear((counter,), then))
        spec = _Spec(reach, value, (value,), True, value, label)
        loop.body = self._alternatives(scope, name, spec, self._checked(predicates, loop))
        return Assign(value, chain, loop)

    def _alternatives(self, scope: Scope, name: str, spec: _Spec, then: Instruction) -> Instruction:
        alternatives = ops_of(self.table, scope.nodes[name])
        own = self._register(f"{scope.prefix}{name}@")
        ways: list[Instruction] = []
        plain = frozenset(alternative for alternative in alternatives if isinstance(alternative, str))
        if plain:
            ways.append(
                Visit(
                    *(plain, spec.reach, spec.start, spec.operands, spec.follows),
                    *(own, spec.result, spec.label, then),
                )
            )
        for number, alternative in enumerate(alternatives):
            if isinstance(alternative, Fragment):
                inner = Scope(f"{scope.prefix}{name}/{number}/", alternative.nodes, alternative.value)
                ways.append(self._fragment(inner, spec, own, then))
        return ways[0] if len(ways) == 1 else Split(tuple(ways))

    def _fragment(self, scope: Scope, spec: _Spec, own: int, then: Instruction) -> Instruction:
        """A fragment in the place of one operator: its own nodes, then its result under the node's name."""
        names = list(scope.nodes)
        entry = self._register(scope.prefix + str(scope.value))
        last = self._register(scope.prefix + names[-1])
        last_own = self._register(f"{scope.prefix}{names[-1]}@")
        incoming = spec.operands[0] if spec.operands else None
        clear = Clear((), then)
        backward = spec.reach is Reach.BACKWARD
        after: Instruction = Assign(own, last_own, clear)
        after = Assign(spec.result, last, after, keep=backward)
        if spec.reach is not Reach.FORWARD and incoming is not None:
            after = Unify(incoming, entry, after)
            if incoming == spec.start:
                after = Clear((incoming,), after)
        if spec.reach is Reach.FORWARD:
            steps = schedule(scope, None)
        elif backward:
            steps = schedule(scope, (names[-1], Reach.BACKWARD))
        else:
            first = next(
                name for name, node in scope.nodes.items() if not node.optional and node.repeat is None
            )
            steps = schedule(scope, (first, Reach.ANCHOR))
        for name, reach in reversed(steps):
            after = self._node(scope, name, reach, after, spec.label)
        clear.registers = tuple(
            register for name, register in self.registers.items() if name.startswith(scope.prefix)
        )
        if spec.reach is Reach.FORWARD:
            assert incoming is not None
            return Assign(entry, incoming, after)
        return Assign(last, spec.start, after) if backward else after
