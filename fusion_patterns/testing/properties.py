"""What must hold for every table: plain functions that raise `PropertyError` where it does not.

Of a row:
    takes              self-match: every instance becomes one composite
    declines           reason: a near miss is not taken, and what was broken is what is said
Of a module and a table:
    fits               well-formed: the result is, the given module is left alone, types are as expected
    has_no_leak        no leak, no cycle: inner values are used inside only, composites have an order
    is_idempotent      applying twice changes nothing
    ignores_order      order-free: neither the order of rows and bindings nor names change what is saved
    is_monotone        a row more never lowers the bytes saved
    finds_all          index = brute force: the automaton finds what its rows find one by one
    asks_tvm           exact check: where TVM's matcher does not agree, nothing is applied
    agrees_on_scopes   every call passes its tensors in the scopes that its kernel expects
    round_trips        plan -> JSON -> plan; module -> JSON -> module
    computes_the_same  equivalence on the CPU, composites as functions
    runs_the_same      equivalence on an OpenCL device with textures
Of a table: `table_round_trips`, table -> YAML -> table. `coverage` counts convolutions inside composites.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import networkx as nx
import numpy as np
import tvm
from tvm import relax
from tvm_ffi import structural_equal, structural_hash

from fusion_patterns.compiler import as_target
from fusion_patterns.errors import DeviceError
from fusion_patterns.lower.stages import call_site_fault, calls_of, fuse
from fusion_patterns.match import FusionPlan
from fusion_patterns.match import plan_fusion as match_plan
from fusion_patterns.match.automaton import automaton_of
from fusion_patterns.match.engine import Engine
from fusion_patterns.match.program import subjects_of
from fusion_patterns.normalise import normalise
from fusion_patterns.outline import outline
from fusion_patterns.place import decide, place
from fusion_patterns.reference import Reference
from fusion_patterns.report.summary import convolutions
from fusion_patterns.table import dump_table, load_table
from fusion_patterns.table.expand import ops_of
from fusion_patterns.table.model import Fragment, Origin, Row, Table
from fusion_patterns.testing.building import build, sizes_of
from fusion_patterns.testing.conditions import broken_conditions, readings
from fusion_patterns.testing.rows import Instance, NearMiss, table_of
from fusion_patterns.testing.spec import Graph, Module
from fusion_patterns.testing.variants import renamed, reordered
from fusion_patterns.verification import compare, verify

__all__ = ["OF_MODULES", "PropertyError", "Vacuous", "coverage"]

Spec = Graph | Module
_WHERE = "condition"


class PropertyError(AssertionError):
    """A property does not hold."""


class Vacuous(Exception):
    """The example says nothing: its results are not finite, or constant."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PropertyError(what)


def _names(variables: Any) -> set[str]:
    return {str(variable.name) for variable in variables}


# Of a row


def takes(instance: Instance, row: Row, table: Table) -> None:
    """The row alone takes all operators of its instance as one composite."""
    plan = match_plan(build(instance.graph), table_of(row, table))
    found = [sorted(_names(match.ops)) for match in plan.matches]
    if found != [sorted(instance.members)]:
        why = "; ".join(str(decision) for decision in plan.declined()) or "no reason is given"
        raise PropertyError(f"{row.name} must take {sorted(instance.members)} and took {found}: {why}")


def declines(miss: NearMiss, row: Row, table: Table) -> None:
    """The row does not take the near miss as it was filled, and says what was broken."""
    instance = miss.instance
    allowed = [set(broken_conditions(row, reading)) for reading in readings(instance.filled())]
    if not miss.escape and not all(allowed):
        return  # read otherwise, the operators are the row's
    plan = match_plan(build(instance.graph), table_of(_numbered(row), table))
    members = set(instance.members)
    may_stay_out = {
        op
        for node, ops in instance.nodes.items()
        if row.nodes[node].optional
        for op in ops
        if not miss.escape
    }
    for match in plan.matches:
        if members - may_stay_out <= _names(match.ops) < members:
            return  # the row's without the optional node that the condition is on
        if members <= _names(match.ops):
            nodes = {node: tuple(str(var.name) for var in ops) for node, ops in match.nodes.items()}
            read_otherwise = nodes != dict(instance.nodes) or not miss.broken
            # Without the optional node that the condition is on, the same operators may be the row's.
            _require(
                read_otherwise and not miss.escape,
                f"{row.name} took {sorted(members)}: {miss.what} is broken",
            )
            return
    said = plan.declined()
    if miss.escape:
        told = any(decision.culprit == miss.escape for decision in said)
        _require(told, f"`{miss.escape}` leaves the match; {row.name} says: {_said(plan)}")
        return
    numbers = set[int]().union(*allowed, _broken_further_on(row, instance))
    told = any(decision.where == f"{_WHERE}:{number + 1}" for decision in said for number in numbers)
    # Read otherwise, all operators may be the row's beginning, or some of them that of a fragment: what comes
    # next is missing then.
    may_begin = {
        op
        for node, ops in instance.nodes.items()
        if any(isinstance(option, Fragment) for option in ops_of(table, row.nodes[node]))
        for op in ops
    }
    told = told or any(
        (decision.progress >= len(members) or decision.culprit in may_begin)
        and not decision.where.startswith(f"{_WHERE}:")
        for decision in said
    )
    _require(told, f"conditions {sorted(numbers)} are broken; {row.name} says: {_said(plan)}")


def _broken_further_on(row: Row, instance: Instance) -> set[int]:
    """Conditions on a repeated node that don't hold if the operators of the nodes behind it are read as its own."""
    numbers = set[int]()
    names = list(row.nodes)
    for number, name in enumerate(names):
        if row.nodes[name].repeat is None:
            continue
        taken = [value for node in names[number:] for value in instance.values.get(node, ())]
        grown = replace(instance.filled(), nodes={**instance.values, name: tuple(taken)})
        numbers |= {n for n in broken_conditions(row, grown) if name in subjects_of(row.where[n])}
    return numbers


def _said(plan: FusionPlan) -> str:
    return "; ".join(str(decision) for decision in plan.decisions) or "nothing"


def _numbered(row: Row) -> Row:
    """The row with its conditions at lines that are their numbers, wherever they were written."""
    where = tuple(
        predicate.model_copy(update={"origin": Origin(file=_WHERE, line=number + 1)})
        for number, predicate in enumerate(row.where)
    )
    return row.model_copy(update={"where": where})


# Of a module and a table


def fits(spec: Spec, table: Table) -> None:
    """Types are as the plain data says, the module is left alone, and the result is well-formed."""
    mod = build(spec)
    for graph in spec.functions if isinstance(spec, Module) else (spec,):
        _types_agree(mod, graph)
    before = structural_hash(mod)
    normal = normalise(mod)
    plan = match_plan(normal, table)
    fused = outline(normal, plan)
    _require(structural_hash(mod) == before, "the given module was changed")
    relax.analysis.well_formed(fused)
    for match in plan.matches:
        composite = fused[match.composite]
        wishes = {str(key): str(value) for key, value in composite.attrs["fusion_patterns.scopes"].items()}
        named = {str(param.name) for param in composite.params} | {"output"}
        _require(
            set(wishes) == named,
            f"{match.composite} has scopes for {sorted(wishes)}, not for {sorted(named)}",
        )


def _types_agree(mod: tvm.IRModule, graph: Graph) -> None:
    types = graph.types()
    for block in mod[graph.name].body.blocks:
        for binding in block.bindings:
            expected = types.get(str(binding.var.name))
            if expected is None:
                continue
            shape = tuple(getattr(dim, "value", None) or str(dim) for dim in binding.var.ty.shape.values)
            found = shape, str(binding.var.ty.dtype.dtype)
            _require(found == tuple(expected), f"`{binding.var.name}` is {found}; expected {tuple(expected)}")


def has_no_leak(spec: Spec, table: Table) -> None:
    """No inner value of a match is needed outside, no operator is in two, and no match needs itself."""
    normal = normalise(build(spec))
    plan = match_plan(normal, table)
    for name in {match.function for match in plan.matches}:
        matches = [match for match in plan.matches if match.function == name]
        _is_closed(normal[name], matches)


def _is_closed(func: Any, matches: list[Any]) -> None:
    owner: dict[str, str] = {}
    for match in matches:
        for var in match.ops:
            other = owner.setdefault(str(var.name), match.composite)
            _require(other == match.composite, f"`{var.name}` is in {other} and in {match.composite}")
    inner = {str(var.name) for match in matches for var in match.ops} - {
        str(var.name) for match in matches for var in match.outputs
    }
    order = nx.DiGraph()
    for block in func.body.blocks:
        for binding in block.bindings:
            taker = str(binding.var.name)
            for var in relax.analysis.free_vars(binding.value):
                source = str(var.name)
                inside = owner.get(taker) == owner.get(source) is not None
                _require(inside or source not in inner, f"`{source}` leaves {owner.get(source)} to `{taker}`")
                if not inside:
                    order.add_edge(owner.get(source, source), owner.get(taker, taker))
    for var in relax.analysis.free_vars(func.body.body):
        _require(str(var.name) not in inner, f"`{var.name}` leaves {owner.get(str(var.name))}")
    _require(nx.is_directed_acyclic_graph(order), "composites need each other in a circle")


def is_idempotent(spec: Spec, table: Table) -> None:
    """Composites are left alone: there is nothing more to fuse."""
    once = outline(normal := normalise(build(spec)), match_plan(normal, table))
    again = normalise(once)
    twice = outline(again, match_plan(again, table))
    _require(structural_equal(once, twice, map_free_vars=True), "a second application changed the module")


def ignores_order(spec: Spec, table: Table) -> None:
    """Rows backwards, bindings in another order and other names save as many bytes."""
    plan = match_plan(build(spec), table)
    saved = plan.selection.saved_bytes
    backwards = table.model_copy(update={"patterns": table.patterns[::-1]})
    for what, other, rows in (
        ("with the rows backwards", spec, backwards),
        ("with the bindings in another order", reordered(spec), table),
        ("under other names", renamed(spec), table),
    ):
        found = match_plan(build(other), rows)
        _require(
            found.selection.saved_bytes == saved, f"{found.selection.saved_bytes} bytes {what}, not {saved}"
        )


def is_monotone(spec: Spec, table: Table) -> None:
    """Every row that the plan uses saves bytes, or saves none: without it no more are saved."""
    mod = build(spec)
    plan = match_plan(mod, table)
    for name in sorted({match.row.name for match in plan.matches}):
        rows = tuple(row for row in table.patterns if row.name != name)
        fewer = match_plan(mod, table.model_copy(update={"patterns": rows})).selection.saved_bytes
        _require(
            fewer <= plan.selection.saved_bytes,
            f"without {name} {fewer - plan.selection.saved_bytes} bytes more",
        )


def finds_all(spec: Spec, table: Table) -> None:
    """The merged automaton finds the sets of operators that the rows find one by one."""
    mod = build(spec)
    together = _candidates(mod, table)
    apart = set().union(*(_candidates(mod, table_of(row, table)) for row in table.patterns))
    _require(together == apart, f"together only {together - apart}, one by one only {apart - together}")


def _candidates(mod: tvm.IRModule, table: Table) -> set[tuple[str, tuple[int, ...]]]:
    engine = Engine(mod, table, automaton_of(table))
    return {
        (graph.name, tuple(sorted(candidate.slots)))
        for graph in engine.graphs
        for candidate in engine.candidates(graph)
    }


def asks_tvm(spec: Spec, table: Table) -> None:
    """TVM's own matcher has the last word: if it sees no match, there is none."""
    with mock.patch("fusion_patterns.match.engine.disagreement", return_value="no"):
        plan = match_plan(build(spec), table)
    _require(not plan.matches, f"{len(plan.matches)} matches that TVM's matcher does not see")


def agrees_on_scopes(spec: Spec, table: Table, target: Any = None) -> None:
    """Each call passes its tensors in the scopes that its kernel's buffers are in."""
    target = as_target(target)
    normal = normalise(build(spec))
    plan = match_plan(normal, table)
    while True:
        outlined = outline(normal, plan)
        placement = decide(outlined, target)
        if not placement.refused:
            break
        plan = plan.instead({name: culprit for name, (_, culprit) in placement.refused.items()})
    placed, _ = place(outlined, target, placement)
    with target:
        fused = fuse(placed)
    for call in calls_of(fused):
        name = str(call.args[0].name_hint)
        fault = call_site_fault([call], fused[name])
        _require(fault is None, f"{name}: {fault}")


def table_round_trips(table: Table) -> None:
    """The table is what it was after it was written as YAML and read again; places in the file apart."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.yaml"
        file.write_text(dump_table(table), encoding="utf-8")
        _require(
            load_table(file).model_dump() == table.model_dump(), "the table changed on its way through YAML"
        )


def round_trips(spec: Spec, table: Table) -> None:
    """Plan and module are what they were after they were written as JSON and read again."""
    mod = build(spec)
    plan = match_plan(mod, table)
    text = plan.to_json()
    _require(
        FusionPlan.from_json(text, mod, table).to_json() == text, "the plan changed on its way through JSON"
    )
    fused = outline(mod, plan)
    read = tvm.ir.load_json(tvm.ir.save_json(fused))
    _require(structural_equal(read, fused), "the module changed on its way through JSON")


# Numbers


def computes_the_same(spec: Spec, table: Table, seed: int = 0) -> None:
    """On the CPU the fused module gives what the untouched one gives; `Vacuous` if that says nothing."""
    mod = build(spec)
    fused = outline(normal := normalise(mod), match_plan(normal, table))
    ours, theirs = Reference(fused), Reference(mod)
    functions = spec.functions if isinstance(spec, Module) else (spec,)
    for graph in functions:
        given = draw_inputs(graph, sizes_of(spec), seed)
        expected = theirs.run(given, graph.name)
        _require_finite(expected)
        pairs = zip(ours.run(given, graph.name), expected, strict=True)
        _compared([compare(f"{graph.name}, result {n}", a, b) for n, (a, b) in enumerate(pairs)])


def runs_the_same(
    spec: Spec, table: Table, device: str | None = None, target: Any = None, seed: int = 0
) -> None:
    """On an OpenCL device the compiled module gives what the untouched one gives on the CPU."""
    functions = spec.functions if isinstance(spec, Module) else (spec,)
    mod = build(spec)
    for graph in functions:
        inputs = draw_inputs(graph, sizes_of(spec), seed)
        try:
            report = verify(mod, target, table, device, inputs=inputs, function=graph.name)
        except DeviceError as error:
            if "float16" in str(error):
                raise Vacuous(str(error)) from None
            raise
        if not all(output.finite for output in report.outputs):
            _require_finite(Reference(mod).run(inputs, graph.name))
        _compared(report.outputs, f"; first wrong: {report.first_wrong}" if report.first_wrong else "")


def draw_inputs(graph: Graph, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Standard normal inputs by name; integers from 1 to 3."""
    draw = np.random.default_rng(seed)
    inputs = {}
    for tensor in graph.tensors:
        if tensor.constant:
            continue
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
        if tensor.dtype.startswith("float"):
            inputs[tensor.name] = draw.standard_normal(shape).astype(tensor.dtype)
        else:
            inputs[tensor.name] = draw.integers(1, 4, shape).astype(tensor.dtype)
    return inputs


def _require_finite(results: list[Any]) -> None:
    if not all(np.isfinite(np.asarray(result, "float64")).all() for result in results):
        raise Vacuous("a result is not finite")


def _compared(checks: list[Any], more: str = "") -> None:
    for check in checks:
        said = f"{check.name}: relative error {check.error:.1e}, allowed {check.tolerance:.0e}"
        _require(check.ok, said + more)
    if not any(check.varies for check in checks):
        raise Vacuous("every result is constant")


def coverage(spec: Spec, table: Table) -> tuple[int, int]:
    """How many convolutions are in composites, and how many there are."""
    normal = normalise(build(spec))
    plan = match_plan(normal, table)
    taken = {(match.function, str(op.name)) for match in plan.matches for op in match.ops}
    found = [(function, str(var.name)) for function, var in convolutions(normal)]
    return sum(place in taken for place in found), len(found)


OF_MODULES: dict[str, Callable[[Spec, Table], None]] = {
    "well-formed": fits,
    "no leak, no cycle": has_no_leak,
    "idempotent": is_idempotent,
    "order-free": ignores_order,
    "monotone": is_monotone,
    "index = brute force": finds_all,
    "exact check": asks_tvm,
    "scope agreement": agrees_on_scopes,
    "round trip": round_trips,
}
"""Properties of a module and a table that need no run, by name."""
