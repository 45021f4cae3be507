"""The matching engine: a module and a table in, a `FusionPlan` out.

graph       a function's dataflow graph, read once
program     a row, compiled to a small program
automaton   all programs of a table, merged and indexed by operator
predicates  conditions on concrete values
search      the walk from an anchor to its candidates
exact       TVM's own matcher, which has the last word
select      the best set of candidates that share no operator
reasons     why a row was not applied, found out when asked
plan        what was decided
saved       plans as JSON text
"""

from __future__ import annotations

from tvm.ir import IRModule

from fusion_patterns.match.automaton import automaton_of
from fusion_patterns.match.engine import Engine
from fusion_patterns.match.plan import (
    Counter,
    Decision,
    FusionPlan,
    Input,
    Listener,
    Match,
    Outcome,
    Selection,
)
from fusion_patterns.match.saved import load
from fusion_patterns.table.model import Table

__all__ = [
    "Counter",
    "Decision",
    "FusionPlan",
    "Input",
    "Listener",
    "Match",
    "Outcome",
    "Selection",
    "load_plan",
    "plan_fusion",
]


def plan_fusion(mod: IRModule, table: Table, *, listener: Listener | None = None) -> FusionPlan:
    """Returns which operators of ``mod`` the rows of ``table`` fuse. The module is not changed."""
    return Engine(mod, table, automaton_of(table)).plan(listener)


def load_plan(text: str, mod: IRModule, table: Table) -> FusionPlan:
    """Returns the plan that `FusionPlan.to_json` made; raises if it was made for another module or table."""
    return load(Engine(mod, table, automaton_of(table)), text)
