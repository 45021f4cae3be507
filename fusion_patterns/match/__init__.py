"""The matching engine: a module and a table in, a `FusionPlan` out.

primfunc    which kernels are elementwise, by what they do
tensors     what is known of a tensor at compile time
graph       a function's dataflow graph, read once
layouts     the names of a tensor's dimensions
predicates  conditions on concrete values
order       in which order the nodes of a row are looked for
program     a row, compiled to a small program
liveness    what a row may still ask for, from each place on
threads     one row's way through its program
automaton   all programs of a table, merged and indexed by operator
search      the walk from an anchor to its candidates
exact       TVM's own matcher, which has the last word
selection   the best set of candidates that share no operator
engine      one run of all this
choice      what was chosen, as matches
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
