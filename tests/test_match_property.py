"""The engine against brute force: on random graphs both find the same sets of operators.

Brute force knows nothing of programs and automata. It writes out every shape that a row can take, every
order of operands included, asks TVM's own matcher about each at each operator, and then removes what is
illegal by contracting the match and looking for a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from match_helpers import SHAPE, found, row, table
from tvm import relax
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.dpl.pattern import CallPattern

from fusion_patterns.table.expand import ops_of
from fusion_patterns.table.model import Node, Row, Table
from fusion_patterns.table.ops import OPS

UNARY = ("nn.relu", "sigmoid", "clip")
BINARY = ("add", "multiply", "maximum", "subtract")

# Graphs: plain data first, the module from it afterwards, so that a failing example shrinks well.


@dataclass(frozen=True)
class Spec:
    """Operators with the places of their operands (parameters first), and which values are returned."""

    ops: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...]


PARAMETERS = 2
"""besides the weight, which is the last parameter"""


@st.composite
def specs(draw: st.DrawFn, name: str) -> Spec:
    """A graph with some shape of the row in it, operators around it, and now and then an operand changed."""
    ops: list[tuple[str, int, int]] = []

    def anywhere() -> int:
        return draw(st.integers(0, PARAMETERS + len(ops) - 1))

    def some_ops() -> None:
        for op in draw(st.lists(st.sampled_from(("nn.conv2d", *UNARY, *BINARY)), max_size=2)):
            ops.append((op, anywhere(), anywhere()))

    some_ops()
    shapes = _written_out(TABLES[name])
    _, shape, _, _ = shapes[draw(st.integers(0, len(shapes) - 1))]
    tensors: dict[str, int] = {}
    first = PARAMETERS + len(ops)
    for op, operands, _ in shape.ops:
        places = []
        for kind, what in operands:
            if kind == "op":
                places.append(first + what)
            elif kind == "tensor":
                if what not in tensors:
                    tensors[what] = anywhere()
                places.append(tensors[what])
            else:
                places.append(anywhere())
        if draw(st.integers(0, 15)) == 15:
            places[0] = anywhere()
        ops.append((op, places[0], places[-1]))
    some_ops()
    returned = draw(st.sets(st.integers(0, len(ops) - 1), max_size=1))
    return Spec(tuple(ops), tuple(sorted(returned)))


def build(spec: Spec) -> Any:
    parameters = [relax.Var(f"p{place}", relax.TensorType(SHAPE, "float32")) for place in range(PARAMETERS)]
    weight = relax.Var("w", relax.TensorType((8, 8, 1, 1), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [*parameters, weight]):
        with builder.dataflow():
            values: list[Any] = list(parameters)
            for op, first, second in spec.ops:
                values.append(builder.emit(_call(op, values[first], values[second], weight)))
            used = {
                at for op, *places in spec.ops for at in places[: 1 if op in (*UNARY, "nn.conv2d") else 2]
            }
            sinks = [place for place in range(len(spec.ops)) if place + PARAMETERS not in used]
            leaving = sorted({*spec.returned, *sinks})
            results = [builder.emit_output(values[PARAMETERS + place]) for place in leaving]
        builder.emit_func_output(relax.Tuple(results))
    return builder.finalize()


def _call(op: str, first: Any, second: Any, weight: Any) -> Any:
    if op == "nn.conv2d":
        return relax.op.nn.conv2d(first, weight)
    if op == "clip":
        return relax.op.clip(first, 0, 6)
    made: Any = relax.op
    for part in op.split("."):
        made = getattr(made, part)
    return made(first) if op in UNARY else made(first, second)


# Brute force

Place = tuple[str, Any]
"""("op", number) | ("tensor", name) | ("any", None)"""


@dataclass
class Shape:
    """One way to write a row out: operators with their operands."""

    ops: list[tuple[str, tuple[Place, ...], str]] = field(default_factory=list)
    names: dict[str, Place] = field(default_factory=dict)

    def grown(self, op: str, operands: tuple[Place, ...], label: str) -> tuple[Shape, Place]:
        return Shape([*self.ops, (op, operands, label)], dict(self.names)), ("op", len(self.ops))

    def named(self, name: str, place: Place) -> Shape:
        return Shape(list(self.ops), {**self.names, name: place})


def _shapes(
    made: Table, nodes: Mapping[str, Node], start: Shape, value: str | None, label: str
) -> Iterator[Shape]:
    """Yields every shape of these nodes after ``start``."""
    shapes = [start]
    order = list(nodes)
    for place, name in enumerate(order):
        before = order[place - 1] if place else value
        shapes = [
            grown for shape in shapes for grown in _with_node(made, nodes, name, before, shape, label or name)
        ]
    yield from shapes


def _with_node(
    made: Table, nodes: Mapping[str, Node], name: str, before: str | None, shape: Shape, label: str
) -> Iterator[Shape]:
    node = nodes[name]
    inputs = node.inputs or ((before,) if before is not None else ())
    places = tuple(shape.names.get(operand, ("tensor", operand)) for operand in inputs)
    absent = next(
        (p for p, operand in zip(places, inputs, strict=True) if operand in nodes),
        places[0] if places else None,
    )
    if node.repeat is not None:
        grown = [(shape, places[0])]
        for count in range(node.repeat.max + 1):
            if count >= node.repeat.min:
                yield from (one.named(name, at) for one, at in grown)
            grown = [two for one, at in grown for two in _alternatives(made, node, (at,), True, one, label)]
        return
    if node.optional:
        assert absent is not None
        yield shape.named(name, absent)
    for one, at in _alternatives(made, node, places, node.inputs is None, shape, label):
        yield one.named(name, at)


def _alternatives(
    made: Table, node: Node, places: tuple[Place, ...], follows: bool, shape: Shape, label: str
) -> Iterator[tuple[Shape, Place]]:
    for alternative in ops_of(made, node):
        if not isinstance(alternative, str):
            entry = places[0] if places else ("tensor", "the fragment's input")
            inner = Shape(list(shape.ops), {alternative.value: entry})
            for one in _shapes(made, alternative.nodes, inner, alternative.value, label):
                yield Shape(one.ops, dict(shape.names)), one.names[list(alternative.nodes)[-1]]
            continue
        arity = OPS[alternative].arity
        assert arity is not None
        free = follows or OPS[alternative].commutes
        for positions in permutations(range(arity), len(places)) if free else [tuple(range(len(places)))]:
            operands: list[Place] = [("any", None)] * arity
            for position, at in zip(positions, places, strict=True):
                operands[position] = at
            yield shape.grown(alternative, tuple(operands), label)


def brute_force(mod: Any, made: Table) -> set[tuple[str, ...]]:
    (only,) = made.patterns
    func = mod["main"]
    bindings = relax.analysis.get_var2val(func)
    block = func.body.blocks[0]
    calls = {b.value.__chandle__(): b for b in block.bindings if isinstance(b.value, relax.Call)}
    graph, returned = _dependencies(func)
    result = set()
    there = Counter(str(binding.value.op.name).removeprefix("relax.") for binding in calls.values())
    for needed, shape, patterns, tensors in _written_out(made):
        output = shape.names[only.output_name()]
        if output[0] != "op" or needed - there:
            continue
        for binding in calls.values():
            matched = patterns[output[1]].extract_matched_expr(binding.value, bindings)
            if matched is None:
                continue
            members = [calls[matched[pattern].__chandle__()].var.name for pattern in patterns]
            named = [matched[tensor] for tensor in tensors]
            labels = [label for _, _, label in shape.ops]
            if _is_legal(only, members, labels, members[output[1]], named, calls, graph, returned):
                result.add(tuple(sorted(members, key=lambda name: int(name.removeprefix("lv") or 0))))
    return result


_known: dict[int, list[tuple[Counter[str], Shape, list[Any], list[Any]]]] = {}


def _written_out(made: Table) -> list[tuple[Counter[str], Shape, list[Any], list[Any]]]:
    """Returns every shape of the table's row with the operators it needs and its patterns; made once."""
    if id(made) not in _known:
        shapes = list(_shapes(made, made.patterns[0].nodes, Shape(), None, ""))
        _known[id(made)] = [
            (Counter(op for op, _, _ in shape.ops), shape, *_patterns(shape)) for shape in shapes
        ]
    return _known[id(made)]


def _patterns(shape: Shape) -> tuple[list[Any], list[Any]]:
    patterns: list[Any] = []
    tensors: dict[str, Any] = {}
    for op, operands, _ in shape.ops:
        arguments = []
        for kind, what in operands:
            if kind == "op":
                arguments.append(patterns[what])
            elif kind == "tensor":
                arguments.append(tensors.setdefault(what, wildcard()))
            else:
                arguments.append(wildcard())
        arguments += [wildcard() for _ in range((OPS[op].args or 0) - len(arguments))]
        patterns.append(CallPattern(is_op(f"relax.{op}"), arguments, add_constraint=False))
    return patterns, list(tensors.values())


def _dependencies(func: Any) -> tuple[nx.DiGraph, set[str]]:
    graph = nx.DiGraph()
    aliases: dict[str, str] = {}
    for binding in func.body.blocks[0].bindings:
        if isinstance(binding.value, relax.Var):
            aliases[binding.var.name] = binding.value.name
            continue
        graph.add_node(binding.var.name)
        for argument in binding.value.args:
            if isinstance(argument, relax.Var):
                graph.add_edge(argument.name, binding.var.name)
    body = func.body.body
    leaving = body.fields if isinstance(body, relax.Tuple) else [body]
    return graph, {aliases.get(variable.name, variable.name) for variable in leaving}


def _is_legal(
    only: Row,
    members: list[str],
    labels: list[str],
    output: str,
    named: list[Any],
    calls: Mapping[int, Any],
    graph: nx.DiGraph,
    returned: set[str],
) -> bool:
    inside = set(members)
    if len(inside) != len(members):
        return False
    if any(calls[t.__chandle__()].var.name in inside for t in named if t.__chandle__() in calls):
        return False
    for member, label in zip(members, labels, strict=True):
        leaves = member in returned or any(user not in inside for user in graph.successors(member))
        if leaves and member != output and label not in only.leaves:
            return False
    contracted = nx.DiGraph(
        (("M" if a in inside else a), ("M" if b in inside else b)) for a, b in graph.edges
    )
    contracted.remove_edges_from(list(nx.selfloop_edges(contracted)))
    return nx.is_directed_acyclic_graph(contracted)


CONV = {"op": "nn.conv2d", "in": ["data", "weight"]}
ANY = [*UNARY, *BINARY]
TABLES = {
    "chain": table(
        row(
            "r",
            {
                "conv": CONV,
                "bias": {"op": "add", "in": ["conv", "b"], "optional": True},
                "tail": {"op": ANY, "repeat": 2},
            },
        )
    ),
    "fragment": table(
        row("r", {"conv": CONV, "tail": {"op": ["nn.relu", "$gated", "$both"], "repeat": 2}}),
        gated={
            "g": {"op": ["sigmoid", "clip"], "in": "x"},
            "y": {"op": ["multiply", "subtract"], "in": ["x", "g"]},
        },
        both={
            "a": {"op": list(UNARY), "in": "x"},
            "b": {"op": list(UNARY), "in": "x"},
            "y": {"op": ["add", "subtract"], "in": ["a", "b"]},
        },
    ),
    "two anchors": table(
        row(
            "r",
            {
                "a": CONV,
                "ra": {"op": "nn.relu", "optional": True},
                "b": {"op": "nn.conv2d", "in": ["data_b", "weight_b"]},
                "rb": {"op": ["nn.relu", "clip"], "in": "b", "optional": True},
                "sum": {"op": ["add", "subtract", "maximum"], "in": ["ra", "rb"]},
                "tail": {"op": "nn.relu", "repeat": 1},
            },
        )
    ),
    "prologue": table(
        row(
            "r",
            {
                "scale": {"op": "multiply", "in": ["data", "s"], "optional": True},
                "act": {"op": list(UNARY), "in": "scale", "optional": True},
                "conv": {"op": "nn.conv2d", "in": ["act", "weight"]},
                "tail": {"op": "add", "repeat": 1},
            },
        )
    ),
    "repeated prologue": table(
        row(
            "r",
            {
                "pre": {"op": ["nn.relu", "add", "$gated"], "in": "data", "repeat": 2},
                "conv": {"op": "nn.conv2d", "in": ["pre", "weight"]},
            },
        ),
        gated={"g": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "g"]}},
    ),
    "own residual": table(
        row("r", {"conv": CONV, "sum": {"op": ["add", "subtract"], "in": ["conv", "data"]}})
    ),
    "diamond": table(
        row(
            "r",
            {
                "conv": CONV,
                "a": {"op": list(UNARY), "in": "conv"},
                "b": {"op": list(UNARY), "in": "conv"},
                "m": {"op": list(BINARY), "in": ["a", "b"]},
                "o": {"op": list(BINARY), "in": ["m", "conv"], "optional": True},
            },
        )
    ),
    "order": table(
        row(
            "r",
            {
                "c": {"op": "nn.relu", "in": "x"},
                "s": {"op": "subtract", "in": ["y", "c"]},
                "m": {"op": "maximum", "in": ["s", "z"]},
            },
        )
    ),
    "least": table(row("r", {"first": {"op": ANY}, "tail": {"op": ANY, "repeat": {"min": 2, "max": 2}}})),
    "leaves": table(row("r", {"conv": CONV, "act": {"op": ANY}, "end": {"op": ANY}}, leaves=["conv", "act"])),
    "late anchor": table(
        row(
            "r",
            {
                "a": {"op": "nn.relu", "in": "x"},
                "b": {"op": "sigmoid", "in": "x"},
                "m": {"op": ["multiply", "maximum"], "in": ["a", "b"]},
            },
            anchor="m",
        )
    ),
    "fragment anchor": table(
        row("r", {"first": {"op": ["$gated", "add"]}, "tail": {"op": "nn.relu", "repeat": 2}}),
        gated={"g": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "g"]}},
    ),
}


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_candidates_equal_brute_force(name: str, data: st.DataObject) -> None:
    mod = build(data.draw(specs(name)))
    assert found(mod, TABLES[name]) == brute_force(mod, TABLES[name])
