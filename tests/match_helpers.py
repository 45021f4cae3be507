"""What the tests of matching and outlining share: small tables and modules, and runs on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from fusion_patterns.match.automaton import automaton_of
from fusion_patterns.match.engine import Engine
from fusion_patterns.table.model import Fragment, Node, Origin, Predicate, Row, Table

HAZARDS = Path(__file__).resolve().parents[2] / "shared" / "hazards" / "hazards.py"

UNARY = (
    *("nn.relu", "clip", "sigmoid", "tanh", "negative", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu"),
    *("nn.prelu", "elementwise"),
)
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
SHAPE = (1, 8, 6, 6)


def hazards() -> ModuleType:
    """Returns the module of hazards, or skips the test where the shared folder is absent."""
    if not HAZARDS.exists():
        pytest.skip("the hazards need ../shared/hazards, which is not here")
    known = sys.modules.get("hazards")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location("hazards", HAZARDS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hazards"] = module
    spec.loader.exec_module(module)
    return module


@cache
def hazard(case: str) -> Any:
    """Returns one of the hazards; each is built once."""
    return hazards().CASES[case]()


def row(name: str, nodes: dict[str, dict[str, Any]], **fields: Any) -> Row:
    """Returns a row; nodes and conditions are given as they are in YAML."""
    where = tuple(
        Predicate(**{"origin": Origin(file="test.yaml", line=10 + place), **predicate})
        for place, predicate in enumerate(fields.pop("where", ()))
    )
    made = {key: Node(**value) for key, value in nodes.items()}
    return Row(name=name, nodes=made, where=where, origin=Origin(file="test.yaml", line=1), **fields)


def table(*rows: Row, **fragments: dict[str, dict[str, Any]]) -> Table:
    """Returns a table of these rows, with the sets `unary` and `binary`."""
    made = {
        name: Fragment(nodes={key: Node(**value) for key, value in nodes.items()})
        for name, nodes in fragments.items()
    }
    return Table(name="test", sets={"unary": UNARY, "binary": BINARY}, fragments=made, patterns=rows)


def chain_table() -> Table:
    """A table like the one that is shipped: a convolution with a long tail, and elementwise operators."""
    conv = row(
        "conv2d.chain",
        {
            "conv": {"op": "nn.conv2d", "in": ["data", "weight"]},
            "bias": {"op": "add", "in": ["conv", "bias_vector"], "optional": True},
            "tail": {"op": ["$unary", "$binary", "$gated", "$both"], "repeat": 16},
        },
        where=[
            {"node": "conv", "attr": "groups", "equals": 1},
            {"tensor": "data", "dtype": ["float32", "float16"]},
            {"tensor": "bias_vector", "broadcast": "channel"},
            {"that": "output.H == conv.H"},
        ],
        scopes={"data": "texture", "weight": "texture", "bias_vector": "global", "output": "texture"},
    )
    elementwise = row(
        "elementwise", {"first": {"op": ["$unary", "$binary"]}, "tail": {"op": "$unary", "repeat": 8}}
    )
    gated = {"gate": {"op": "$unary", "in": "x"}, "y": {"op": "multiply", "in": ["x", "gate"]}}
    both = {
        "a": {"op": "$unary", "in": "x"},
        "b": {"op": "$unary", "in": "x"},
        "y": {"op": "$binary", "in": ["a", "b"]},
    }
    return table(conv, elementwise, gated=gated, both=both)


Build = Callable[..., Any]


def module(
    build: Build, inputs: Sequence[str] = ("x", "y"), weights: Sequence[str] = ("w",), **shapes: Any
) -> Any:
    """Returns a module of one function; ``build`` is given the builder and the parameters by name."""
    names = [*inputs, *weights]
    given = {name: shapes.get(name, (8, 8, 1, 1) if name in weights else SHAPE) for name in names}
    parameters = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in given.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(parameters.values())):
        with builder.dataflow():
            results = build(builder.emit, **parameters)
            results = results if isinstance(results, tuple) else (results,)
            results = [builder.emit_output(result) for result in results]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.finalize()


def found(mod: Any, made: Table) -> set[tuple[str, ...]]:
    """Returns the operators of every candidate, by name and in program order, before any choice."""
    engine = Engine(mod, made, automaton_of(made))
    return {
        tuple(graph.values[number].name for number in sorted(candidate.slots))
        for graph in engine.graphs
        for candidate in engine.candidates(graph)
    }


def names(match: Any) -> list[str]:
    """Returns the names of a match's operators."""
    return [variable.name for variable in match.ops]


def outputs(
    mod: Any, function: str = "main", sizes: dict[str, int] | None = None, seed: int = 0
) -> list[Any]:
    """Runs a function on the CPU, with inputs drawn from ``seed``; composites run as ordinary functions."""
    plain = mod.clone()
    for variable, func in mod.functions.items():
        if isinstance(func, relax.Function) and func.attrs is not None and "Composite" in func.attrs:
            plain[variable] = func.without_attr("Primitive").without_attr("Composite")
    machine = relax.VirtualMachine(relax.build(plain, "llvm"), tvm.cpu())
    draw = np.random.RandomState(seed)
    arguments = [_drawn(parameter.ty, sizes or {}, draw) for parameter in mod[function].params]
    return _flat(machine[function](*arguments))


def _drawn(ty: Any, sizes: dict[str, int], draw: np.random.RandomState) -> Any:
    if isinstance(ty, relax.TupleType):
        return tuple(_drawn(field, sizes, draw) for field in ty.fields)
    shape = [int(e.value) if isinstance(e, tvm.tirx.IntImm) else sizes[e.name] for e in ty.shape.values]
    dtype = str(ty.dtype)
    if dtype == "bool":
        return tvm.runtime.tensor(np.array(True).reshape(shape))
    if dtype.startswith("int"):
        return tvm.runtime.tensor(draw.randint(-5, 5, size=shape).astype(dtype))
    return tvm.runtime.tensor(draw.randn(*shape).astype(dtype))


def _flat(result: Any) -> list[Any]:
    return [result.numpy()] if hasattr(result, "numpy") else [item for part in result for item in _flat(part)]
