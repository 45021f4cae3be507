"""What was chosen, as matches with their names; and what a plan may still be asked about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import networkx as nx

from fusion_patterns.match.plan import FusionPlan, Input, Match, Outcome, Selection
from fusion_patterns.match.reasons import Reasons
from fusion_patterns.match.saved import dump
from fusion_patterns.match.search import Candidate
from fusion_patterns.match.selection import select
from fusion_patterns.table.model import Row, Scope

if TYPE_CHECKING:
    from fusion_patterns.match.engine import Engine

__all__ = ["Choice", "Refusal", "closes_cycle", "composite_names", "match_of"]

Refusal = tuple[Outcome, str]

MOST_TRIES = 4
"""So often the operators around one anchor are taken in another way when they can't be built."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The candidates of a plan; ``removed`` are those that were taken out of it afterwards."""

    engine: Engine
    candidates: tuple[Candidate, ...]
    names: tuple[str, ...]
    removed: tuple[Candidate, ...] = ()
    at_fault: frozenset[tuple[str, int]] = frozenset()
    """Function and number of the operators for whose sake they were taken out."""

    def plan(self, selection: Selection) -> FusionPlan:
        """Returns the plan that consists of these candidates."""
        named = zip(self.candidates, self.names, strict=True)
        return FusionPlan(tuple(match_of(candidate, name) for candidate, name in named), selection, self)

    def reasons(self) -> Reasons:
        """Returns what tells why rows were not applied."""
        return Reasons(self)

    def dump(self, selection: Selection) -> str:
        """Returns the plan as JSON text."""
        return dump(self, selection)

    def without(self, names: Iterable[str], selection: Selection) -> FusionPlan:
        """Returns the plan without the composites of these names; the others keep theirs."""
        unwanted = set(names)
        named = list(zip(self.candidates, self.names, strict=True))
        kept = [(candidate, name) for candidate, name in named if name not in unwanted]
        choice = replace(
            self,
            candidates=tuple(candidate for candidate, _ in kept),
            names=tuple(name for _, name in kept),
            removed=(*self.removed, *(candidate for candidate, name in named if name in unwanted)),
        )
        return choice.plan(replace(selection, saved_bytes=sum(c.saved for c in choice.candidates)))

    def instead(self, faults: Mapping[str, str], selection: Selection) -> FusionPlan:
        """Returns the plan without these composites, with the best that their other operators allow instead.

        ``faults``: name of a composite -> name of the value in it that nothing may take, or its own name: then its
        operators may be taken in another way, a few times. Where it has no value of that name, nothing takes its
        place.
        """
        free: set[tuple[str, int]] = set()
        at_fault = set(self.at_fault)
        for candidate, name in zip(self.candidates, self.names, strict=True):
            graph = candidate.graph
            ops = {(graph.name, number) for number in candidate.slots}
            found = {op for op in ops if graph.values[op[1]].name == faults.get(name)}
            at_fault |= found
            tries = sum(one.graph is graph and one.anchor == candidate.anchor for one in self.removed)
            free |= ops if found or (faults.get(name) == name and tries < MOST_TRIES) else set()
        less = self.without(faults, selection).planner
        assert isinstance(less, Choice)
        free -= at_fault
        refused = {(candidate.graph.name, frozenset(candidate.slots)) for candidate in less.removed}
        possible: list[Candidate] = []
        for graph in self.engine.graphs:
            here = {number for function, number in free if function == graph.name}
            possible += [
                candidate
                for candidate in self.engine.candidates(graph, here)
                if here.issuperset(candidate.slots)
                and (graph.name, frozenset(candidate.slots)) not in refused
            ]
        chosen, _ = select(possible, lambda candidate: self.engine.refusal(candidate) is None)
        if closes_cycle([*less.candidates, *chosen]) is not None:
            chosen = []
        taken = {str(variable.name_hint) for variable in self.engine.mod.functions} | set(self.names)
        named = [
            *zip(less.candidates, less.names, strict=True),
            *zip(chosen, composite_names(chosen, taken), strict=True),
        ]
        named.sort(key=lambda pair: (pair[0].graph.name, pair[0].outputs[0]))
        choice = replace(
            less,
            candidates=tuple(candidate for candidate, _ in named),
            names=tuple(name for _, name in named),
            at_fault=frozenset(at_fault),
        )
        return choice.plan(replace(selection, saved_bytes=sum(c.saved for c in choice.candidates)))


def composite_names(candidates: Iterable[Candidate], taken: set[str]) -> tuple[str, ...]:
    """Returns for each candidate's composite its row's name with a number; no name that is in ``taken``."""
    numbers: dict[str, int] = {}
    names = []
    for candidate in candidates:
        stem = "fused_" + re.sub(r"[^A-Za-z0-9_]", "_", candidate.acceptance.row.name)
        number = numbers.get(stem, 0)
        while f"{stem}_{number}" in taken:
            number += 1
        names.append(f"{stem}_{number}")
        numbers[stem] = number + 1
    return tuple(names)


def match_of(candidate: Candidate, name: str) -> Match:
    """Returns the match that a candidate stands for; ``name`` is that of its composite."""
    graph, acceptance = candidate.graph, candidate.acceptance
    members = sorted(candidate.slots)
    names = list(acceptance.row.nodes)
    nodes: dict[str, list[int]] = {node: [] for node in names}
    for number, label in zip(candidate.slots, acceptance.labels, strict=True):
        nodes[names[label]].append(number)
    values = graph.values
    return Match(
        row=acceptance.row,
        function=graph.name,
        composite=name,
        ops=tuple([values[number].var for number in members]),
        nodes={
            node: tuple([values[number].var for number in sorted(numbers)])
            for node, numbers in nodes.items()
            if numbers
        },
        inputs=_inputs(candidate, members),
        outputs=tuple([values[number].var for number in candidate.outputs]),
        saved_bytes=candidate.saved,
        word=candidate.word,
        anchor=values[candidate.anchor].var,
        numbers=tuple(members),
    )


def _inputs(candidate: Candidate, members: list[int]) -> tuple[Input, ...]:
    """Returns the tensors from outside, each once, under the first name that the row has for it."""
    row = candidate.acceptance.row
    names: dict[int, list[str]] = {}
    for name, ref in candidate.acceptance.named:
        names.setdefault(candidate.operand_key(ref), []).append(name)
    inside = set(members)
    found: dict[int, Input] = {}
    for number in members:
        value = candidate.graph.values[number]
        for expr, key, source in zip(value.operands, value.keys, value.sources, strict=True):
            if source not in inside and key not in found:
                called = names.get(key, ())
                found[key] = Input(called[0] if called else None, expr, _scope(row, called))
    return tuple(found.values())


def _scope(row: Row, names: Sequence[str]) -> Scope:
    """Returns the wish for a tensor with these names; where they differ, a buffer serves them all."""
    wishes = {row.scope_of(name) for name in names or (None,)} - {Scope.ANY}
    if not wishes:
        return Scope.ANY
    return wishes.pop() if len(wishes) == 1 else Scope.GLOBAL


def closes_cycle(chosen: Sequence[Candidate]) -> tuple[Candidate, str] | None:
    """Returns a candidate to give up, and why, if the chosen ones could not be put in any order.

    That needs a value which leaves its match before the end, so most plans are not looked at.
    """
    early = [candidate for candidate in chosen if len(candidate.outputs) > 1]
    for graph in {id(candidate.graph): candidate.graph for candidate in early}.values():
        here = [candidate for candidate in chosen if candidate.graph is graph]
        unit = {number: candidate.anchor for candidate in here for number in candidate.slots}
        order = nx.DiGraph()
        for value in graph.values:
            source = unit.get(value.number, value.number)
            order.add_edges_from((source, unit.get(user, user)) for user in value.users)
        order.remove_edges_from(list(nx.selfloop_edges(order)))
        try:
            cycle = [edge[0] for edge in nx.find_cycle(order)]
        except nx.NetworkXNoCycle:
            continue
        involved = [candidate for candidate in early if candidate.anchor in cycle]
        loser = min(involved, key=lambda candidate: (candidate.saved, -candidate.anchor))
        way = " -> ".join(str(graph.values[number]) for number in [*cycle, cycle[0]])
        return loser, f"together with other matches it would close a cycle: {way}"
    return None
