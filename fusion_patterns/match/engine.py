"""One run: candidates from every anchor, and the choice among them."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass, field

from tvm.ir import IRModule

from fusion_patterns.match.automaton import Automaton
from fusion_patterns.match.choice import Choice, Refusal, closes_cycle, composite_names, match_of
from fusion_patterns.match.exact import disagreement, missing_symbol
from fusion_patterns.match.graph import Graph, read_module
from fusion_patterns.match.plan import FusionPlan, Listener, Outcome, Selection
from fusion_patterns.match.reasons import trace
from fusion_patterns.match.search import Candidate, Walk
from fusion_patterns.match.selection import select
from fusion_patterns.table.model import Table

__all__ = ["Engine"]

TRACE = "FUSION_PATTERNS_TRACE"
"""Environment variable: walks of rows with a matching name are printed."""


@dataclass
class Engine:
    """A module and a table, and what speaks against single candidates."""

    mod: IRModule
    table: Table
    automaton: Automaton
    _refusals: dict[int, tuple[Candidate, Refusal | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graphs, self.composites = read_module(self.mod)

    def plan(self, listener: Listener | None = None) -> FusionPlan:
        """Returns the plan for the module."""
        candidates = [candidate for graph in self.graphs for candidate in self.candidates(graph)]
        if listener is not None:
            for candidate in candidates:
                if self.refusal(candidate) is None:
                    listener.on_match(match_of(candidate, ""))
        chosen, selection = select(candidates, self._is_free)
        while (loser := closes_cycle(chosen)) is not None:
            # Two matches with values that leave early may need each other's: the one that saves less goes.
            candidate, text = loser
            self._refusals[id(candidate)] = candidate, (Outcome.DECLINED, text)
            chosen, selection = select(candidates, self._is_free)
        plan = self.planned(chosen, selection)
        if listener is not None:
            for match in plan.matches:
                listener.on_apply(match)
            for decision in plan.declined():
                listener.on_decline(decision)
        if pattern := os.environ.get(TRACE):
            trace(self, pattern)
        return plan

    def planned(
        self, chosen: list[Candidate], selection: Selection, names: tuple[str, ...] | None = None
    ) -> FusionPlan:
        """Returns the plan that consists of these candidates; ``names`` are those of their composites."""
        if names is None:
            taken = {str(variable.name_hint) for variable in self.mod.functions}
            names = composite_names(chosen, taken)
        return Choice(self, tuple(chosen), names).plan(selection)

    def candidates(self, graph: Graph, among: Container[int] | None = None) -> list[Candidate]:
        """Returns all candidates in a function, or those with an anchor in ``among``, in program order."""
        roots = self.automaton.roots
        numbered = (number for op, numbers in graph.by_op.items() if op in roots for number in numbers)
        anchors = sorted(number for number in numbered if among is None or number in among)
        found: list[Candidate] = []
        for number in anchors:
            anchor = graph.values[number]
            if anchor.region.is_dataflow and not anchor.obstacle:
                found += Walk(graph, self.automaton).run(anchor)
        return found

    def refusal(self, candidate: Candidate) -> Refusal | None:
        """Returns what speaks against a candidate by itself. TVM's own matcher has the last word."""
        known = self._refusals.get(id(candidate))
        if known is not None:
            return known[1]
        graph, members = candidate.graph, sorted(candidate.slots)
        refusal: Refusal | None = None
        if text := disagreement(graph, members, candidate.word):
            refusal = Outcome.INVALID, text
        elif text := missing_symbol(graph, members):
            refusal = Outcome.DECLINED, text
        # The candidate is kept along, lest another one gets its identity.
        self._refusals[id(candidate)] = candidate, refusal
        return refusal

    def _is_free(self, candidate: Candidate) -> bool:
        return self.refusal(candidate) is None
