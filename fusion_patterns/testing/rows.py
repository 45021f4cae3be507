"""Graphs that a row must take, and graphs that it must decline because of one condition.

A row is walked as it is written: optional nodes come or stay away, repeated ones come a few times,
alternatives are chosen, and every operator gets operands and attributes that the row's conditions ask for.
Whether all of them really hold is then asked of `broken_conditions`, which knows nothing of the matcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations, product

from fusion_patterns.table import expr
from fusion_patterns.table.expand import ops_of
from fusion_patterns.table.model import PARTS, Fragment, Node, Row, Table
from fusion_patterns.table.ops import ELEMENTWISE, OPS
from fusion_patterns.testing.conditions import Filled, broken_conditions
from fusion_patterns.testing.draft import Draft, Pick, seeded
from fusion_patterns.testing.operands import Operands, Profile, Slot
from fusion_patterns.testing.shapes import Infeasible, Shape
from fusion_patterns.testing.spec import Graph, Op

__all__ = ["Instance", "NearMiss", "draw_instance", "draw_near_miss", "graft", "kinds_of_miss", "table_of"]

ATTEMPTS = 30
MOST_REPEATS = 3
TRIES = 32
"""So often a row is walked to find out whether a profile has instances."""
MANY_PARTS = 8
"""So many tensors more than a row names are too many for a `concat` whose parts it counts."""
OUTSIDERS = {"nn.softmax": {"axis": -1}, "nn.log_softmax": {"axis": -1}, "flip": {"axis": 0}, "cos": {}}
"""Operators that stand outside of a match; the first that the row does not know is taken."""


@dataclass(frozen=True)
class Instance:
    """A graph that the row must take: all of ``nodes`` become one composite."""

    row: str
    graph: Graph
    nodes: Mapping[str, tuple[str, ...]]
    """by node of the row: the operators that stand there"""
    values: Mapping[str, tuple[str, ...]]
    """by node of the row: the value of each occurrence, for a fragment that of its last operator"""
    tensors: Mapping[str, tuple[str, int]]
    """by tensor of the row: the operator that takes it, and the position"""
    output: str

    @property
    def members(self) -> tuple[str, ...]:
        """The operators that the row takes, in program order."""
        inside = {name for names in self.nodes.values() for name in names}
        return tuple(op.name for op in self.graph.ops if op.name in inside)

    def filled(self) -> Filled:
        """The same, as conditions are asked of it."""
        return Filled(self.graph, self.values, self.tensors, self.output)


@dataclass(frozen=True)
class NearMiss:
    """An instance with one thing broken: ``what`` is a condition's number in the row's `where`, or an escape.

    ``broken``: the numbers of all conditions that don't hold; some can't fail alone. ``escape``: the inner
    value that leaves the match.
    """

    instance: Instance
    what: str
    broken: tuple[int, ...] = ()
    escape: str = ""


def table_of(row: Row, table: Table) -> Table:
    """The table with this row alone."""
    return table.model_copy(update={"patterns": (row,), "extends": None, "disable": ()})


def draw_instance(pick: Pick, row: Row, table: Table) -> Instance:
    """A graph that fills the row; raises `Infeasible` if none was found."""
    profiles = _profiles(_Key(row, table), None)
    for _ in range(ATTEMPTS):
        try:
            instance = _Walk(row, table, pick, pick(profiles), None).instance()
        except Infeasible:
            continue
        if not broken_conditions(row, instance.filled()):
            return instance
    raise Infeasible(f"no instance of {row.name} was found in {ATTEMPTS} attempts")


def graft(draft: Draft, pick: Pick, row: Row, table: Table, live: Iterable[str]) -> str:
    """Grow a draft by an instance of the row on values that are there; returns its output."""
    profile = pick(_profiles(_Key(row, table), None))
    walk = _Walk(row, table, pick, replace(profile, symbolic=False), None, draft)
    walk.operands.live = list(live)
    return walk.instance().output


def kinds_of_miss(row: Row, table: Table) -> list[str]:
    """What can be broken about a row: its conditions by number, and inner values that escape."""
    key = _Key(row, table)
    conditions = [str(number) for number in range(len(row.where)) if _can_fail(key, number)]
    return [*conditions, "returned", "used", "cycle"]


def draw_near_miss(pick: Pick, row: Row, table: Table, kind: str | None = None) -> NearMiss:
    """A graph that the row must decline, and why; raises `Infeasible` if none was found."""
    kind = pick(kinds_of_miss(row, table)) if kind is None else kind
    if not kind.isdecimal():
        for _ in range(ATTEMPTS):
            miss = _escape(pick, draw_instance(pick, row, table), row, table, kind)
            if miss is not None:
                return miss
        raise Infeasible(f"no value of {row.name} can leave it")
    number = int(kind)
    profile = pick(_profiles(_Key(row, table), number))
    found: NearMiss | None = None
    for _ in range(ATTEMPTS):
        try:
            instance = _Walk(row, table, pick, profile, number).instance()
        except Infeasible:
            continue
        broken = tuple(broken_conditions(row, instance.filled()))
        if number in broken and (found is None or len(broken) < len(found.broken)):
            found = NearMiss(instance, f"condition {number}", broken)
        if found is not None and len(found.broken) == 1:
            return found
    if found is None:
        raise Infeasible(f"condition {number} of {row.name} was not broken in {ATTEMPTS} attempts")
    return found


@dataclass(frozen=True)
class _Key:
    """A row of a table, hashed by what it is and not by its contents."""

    row: Row = field(compare=False)
    table: Table = field(compare=False)
    identity: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", (id(self.row), id(self.table)))


@lru_cache(maxsize=4096)
def _profiles(key: _Key, broken: int | None) -> tuple[Profile, ...]:
    """The profiles in which a row has instances (or near misses): found once, by trying."""
    found = []
    for profile in _all_profiles(key.row, key.table):
        for seed in range(TRIES if broken is None else TRIES // 4):
            try:
                instance = _Walk(key.row, key.table, seeded(seed), profile, broken).instance()
            except Infeasible:
                continue
            failed = broken_conditions(key.row, instance.filled())
            if (not failed) if broken is None else (broken in failed):
                found.append((len(failed), profile))
                break
    if not found:
        what = "no graph fills it" if broken is None else f"condition {broken} holds wherever it can be asked"
        raise Infeasible(f"row {key.row.name}: {what}")
    fewest = min(failed for failed, _ in found)
    return tuple(profile for failed, profile in found if failed == fewest)


def _can_fail(key: _Key, number: int) -> bool:
    try:
        return bool(_profiles(key, number))
    except Infeasible:
        return False


def _all_profiles(row: Row, table: Table) -> list[Profile]:
    ops = {op for node in row.nodes.values() for op in ops_of(table, node) if isinstance(op, str)}
    convolves = any(op.startswith("nn.conv") for op in ops)
    modes = ("plain", "depthwise", "grouped", "multiplier") if convolves else ("plain",)
    shared = (False, True) if _with_uses(row) else (False,)
    return [Profile(*choice) for choice in product(modes, shared, (False, True), (False, True))]


def _with_uses(row: Row) -> set[str]:
    """The names whose number of uses the row asks for."""
    found = set()
    for predicate in row.where:
        if predicate.that is not None:
            found |= {name for name, asked in expr.parse(predicate.that).names() if asked == "uses"}
        elif predicate.uses is not None:
            found.add(str(predicate.node or predicate.tensor))
    return found


class _Walk:
    """One walk through a row, as it is written."""

    def __init__(
        self,
        row: Row,
        table: Table,
        pick: Pick,
        profile: Profile,
        broken: int | None,
        draft: Draft | None = None,
    ) -> None:
        self.row, self.table, self.pick, self.profile = row, table, pick, profile
        self.operands = Operands(row, pick, profile, broken, draft)
        self.draft = self.operands.draft
        self.nodes: dict[str, list[str]] = {}
        self.values: dict[str, list[str]] = {}
        self.tensors: dict[str, tuple[str, int]] = {}

    def instance(self) -> Instance:
        slots = self._nodes(self.row.nodes, {}, None, None)
        output = slots[self.row.output_name()].value
        if output is None or not self.nodes:
            raise Infeasible("every node is absent")
        if output not in {name for names in self.nodes.values() for name in names}:
            raise Infeasible("the output is no operator")
        if self.profile.shared:
            for name in sorted(_with_uses(self.row)):
                value = slots[name].value if name in self.tensors and name in slots else None
                if value is not None:
                    if not self.draft.shape(value):
                        raise Infeasible("a number has no axes")
                    op, attrs = _outsider(self.row, self.table)
                    self.draft.emit(op, value, **attrs)
        self.draft.results.append(output)
        nodes = {name: tuple(ops) for name, ops in self.nodes.items()}
        values = {name: tuple(each) for name, each in self.values.items()}
        return Instance(self.row.name, self.draft.graph(), nodes, values, self.tensors, output)

    def _nodes(
        self, nodes: Mapping[str, Node], slots: dict[str, Slot], before: str | None, label: str | None
    ) -> dict[str, Slot]:
        """Walks the nodes of the row or of a fragment; ``slots`` holds what names mean."""
        for name, node in nodes.items():
            inputs = node.inputs if node.inputs is not None else (() if before is None else (before,))
            taken = [slots.setdefault(operand, Slot(operand)) for operand in inputs]
            self.operands.beside = self._beside(name, nodes, slots)
            slots[name] = self._node(node, taken, inputs, nodes, label or name)
            before = name
        return slots

    def _beside(self, name: str, nodes: Mapping[str, Node], slots: Mapping[str, Slot]) -> Shape | None:
        """The shape of a value that another node takes together with this node's."""
        for node in nodes.values():
            if name in (node.inputs or ()):
                for operand in node.inputs or ():
                    value = slots[operand].value if operand != name and operand in slots else None
                    if value is not None:
                        return self.draft.shape(value)
        return None

    def _node(
        self, node: Node, taken: list[Slot], inputs: tuple[str, ...], nodes: Mapping[str, Node], label: str
    ) -> Slot:
        follows = node.inputs is None
        if node.repeat is not None:
            current = taken[0]
            most = min(node.repeat.max, node.repeat.min + MOST_REPEATS)
            for _ in range(self.pick(range(node.repeat.min, most + 1))):
                current = self._alternative(node, [current], True, label)
            return current
        if node.optional and self.pick((False, True)):
            stand_in = next((slot for slot, name in zip(taken, inputs, strict=True) if name in nodes), None)
            return stand_in or taken[0]
        return self._alternative(node, taken, follows, label)

    def _alternative(self, node: Node, taken: list[Slot], follows: bool, label: str) -> Slot:
        chosen = self.pick(ops_of(self.table, node))
        if isinstance(chosen, Fragment):
            entry = taken[0] if taken else Slot(None)
            values = self.values.setdefault(label, [])
            before = len(values)
            result = self._nodes(chosen.nodes, {chosen.value: entry}, chosen.value, label)[
                list(chosen.nodes)[-1]
            ]
            values[before:] = [str(result.value)]
            return result
        arity = OPS[chosen].arity
        if arity is None:
            arity = self._arity(chosen, len(taken), follows)
        if arity < len(taken):
            raise Infeasible(f"{chosen} does not take {len(taken)} operands")
        order = tuple(range(len(taken)))
        if (follows and OPS[chosen].is_elementwise and chosen != "nn.prelu") or OPS[chosen].commutes:
            order = self.pick(list(permutations(range(arity), len(taken))))
        slots = [Slot(None) for _ in range(arity)]
        for place, slot in zip(order, taken, strict=True):
            slots[place] = slot
        attrs = self.operands.fill(chosen, slots, label)
        value = self.draft.emit(chosen, *(str(slot.value) for slot in slots), **attrs)
        self.nodes.setdefault(label, []).append(value)
        self.values.setdefault(label, []).append(value)
        for position, slot in enumerate(slots):
            if slot.name is not None and slot.name not in self.tensors and self._is_tensor(slot):
                self.tensors[slot.name] = value, position
        return Slot(None, value)

    def _arity(self, op: str, taken: int, follows: bool) -> int:
        """How many operands an operator gets that takes any number of them."""
        if op == ELEMENTWISE:
            return max(taken, int(self.pick((1, 2))) if follows else 1)
        if follows:
            return max(taken, int(self.pick((2, 3))))
        # The row names the first parts of a `concat`; there may be more.
        more: int = self.pick((1, MANY_PARTS) if self._counts_parts() else (0, 0, 1, 2))
        return taken + more

    def _counts_parts(self) -> bool:
        """Whether the condition that is to fail is on the number of a `concat`'s parts."""
        broken = None if self.operands.broken is None else self.row.where[self.operands.broken].that
        return broken is not None and any(field == PARTS for _, field in expr.parse(broken).names())

    def _is_tensor(self, slot: Slot) -> bool:
        return slot.name not in self.row.nodes and slot.name in {
            name for node in self.row.nodes.values() for name in node.inputs or ()
        }


def _outsider(row: Row, table: Table) -> tuple[str, dict[str, int]]:
    """An operator, with its attributes, that the row does not know."""
    known = {op for node in row.nodes.values() for op in ops_of(table, node) if isinstance(op, str)}
    return next((op, attrs) for op, attrs in OUTSIDERS.items() if op not in known)


def _escape(pick: Pick, instance: Instance, row: Row, table: Table, kind: str) -> NearMiss | None:
    """The instance with an inner value that leaves the match; None if it has none that could."""
    label = {op: node for node, ops in instance.nodes.items() for op in ops}
    inner = [op for op in instance.members if op != instance.output and label[op] not in row.leaves]
    if not inner:
        return None
    graph, value = instance.graph, pick(inner)
    if kind == "returned":
        grown = replace(graph, results=(*graph.results, value))
        return _missed(instance, grown, row, kind, value)
    op, attrs = _outsider(row, table)
    other = Op(f"out_{value}", op, (value,), attrs)
    if kind == "used":
        grown = replace(graph, ops=(*graph.ops, other), results=(*graph.results, other.name))
        return _missed(instance, grown, row, kind, value)
    return _cycle(pick, instance, row, other, value)


def _cycle(pick: Pick, instance: Instance, row: Row, other: Op, value: str) -> NearMiss | None:
    """The value goes over an operator outside into a tensor that a later member takes."""
    graph, types = instance.graph, instance.graph.types()
    begin = [op.name for op in graph.ops].index(value) + 1
    tensors = {tensor.name for tensor in graph.tensors}
    places = [
        (number, position)
        for number, op in enumerate(graph.ops)
        for position, arg in enumerate(op.args)
        if number >= begin
        and op.name in instance.members
        and arg in tensors
        and types[arg] == types[value]
        # What a row names twice has to stay one tensor.
        and sum(user.name in instance.members for user in graph.users(arg)) == 1
    ]
    if not places:
        return None
    number, position = pick(places)
    ops = list(graph.ops)
    args = list(ops[number].args)
    args[position] = other.name
    ops[number] = replace(ops[number], args=tuple(args))
    ops.insert(begin, other)
    return _missed(instance, replace(graph, ops=tuple(ops)), row, "cycle", value)


def _missed(instance: Instance, graph: Graph, row: Row, kind: str, value: str) -> NearMiss | None:
    missed = replace(instance, graph=graph)
    return None if broken_conditions(row, missed.filled()) else NearMiss(missed, kind, escape=value)
