"""The same module written otherwise: other names, the bindings in another order, fewer operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fusion_patterns.testing.shapes import Infeasible
from fusion_patterns.testing.spec import Graph, Module, Tensor

__all__ = ["reduce", "renamed", "reordered"]

Spec = Graph | Module


def renamed(spec: Spec) -> Spec:
    """Every value under another name; names don't even sort as they did."""
    if isinstance(spec, Module):
        return Module(tuple(_renamed(graph) for graph in spec.functions))
    return _renamed(spec)


def _renamed(graph: Graph) -> Graph:
    names = [*(tensor.name for tensor in graph.tensors), *(op.name for op in graph.ops)]
    new = {name: f"{chr(ord('z') - number % 26)}{number}_{name}" for number, name in enumerate(names)}
    return replace(
        graph,
        tensors=tuple(replace(tensor, name=new[tensor.name]) for tensor in graph.tensors),
        ops=tuple(replace(op, name=new[op.name], args=tuple(new[a] for a in op.args)) for op in graph.ops),
        results=tuple(new[name] for name in graph.results),
    )


def reordered(spec: Spec) -> Spec:
    """Bindings in another order that is possible: each time the last of those that are ready."""
    if isinstance(spec, Module):
        return Module(tuple(_reordered(graph) for graph in spec.functions))
    return _reordered(spec)


def _reordered(graph: Graph) -> Graph:
    known = {tensor.name for tensor in graph.tensors}
    left, ops = list(graph.ops), []
    while left:
        chosen = next(op for op in reversed(left) if known.issuperset(op.args))
        left.remove(chosen)
        ops.append(chosen)
        known.add(chosen.name)
    return replace(graph, ops=tuple(ops))


def reduce(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """A smaller spec for which ``fails`` still holds; greedy, and done when no single step helps."""
    if isinstance(spec, Graph):
        spec = Module((spec,))
    smaller = next(_smaller(spec), None)
    while smaller is not None:
        for smaller in _smaller(spec):
            if fails(smaller):
                spec = smaller
                break
        else:
            return spec
    return spec


def _smaller(spec: Module) -> Iterator[Module]:
    if len(spec.functions) > 1:
        yield from (Module((graph,)) for graph in spec.functions)
    for place, graph in enumerate(spec.functions):
        for fewer in _fewer(graph):
            yield Module((*spec.functions[:place], fewer, *spec.functions[place + 1 :]))


def _fewer(graph: Graph) -> Iterator[Graph]:
    """The function with one result, with one result less, given a value it computes, or without an operator."""
    if len(graph.results) > 1:
        yield from (_pruned(replace(graph, results=(name,))) for name in graph.results)
        for name in graph.results:
            yield _pruned(replace(graph, results=tuple(other for other in graph.results if other != name)))
    types = graph.types()
    for op in reversed(graph.ops):
        if op.name not in graph.results:
            given = Tensor(op.name, *types[op.name])
            ops = tuple(other for other in graph.ops if other is not op)
            yield _pruned(replace(graph, tensors=(*graph.tensors, given), ops=ops))
    for op in reversed(graph.ops):
        for arg in op.args:
            if types[arg] == types[op.name] and (
                graph.op_of(arg) is not None or op.name not in graph.results
            ):
                without = _pruned(_replaced(graph, op.name, arg))
                try:
                    without.types()
                except Infeasible:
                    continue
                if without.ops:
                    yield without


def _replaced(graph: Graph, name: str, other: str) -> Graph:
    ops = tuple(
        replace(op, args=tuple(other if arg == name else arg for arg in op.args))
        for op in graph.ops
        if op.name != name
    )
    results = tuple(dict.fromkeys(other if result == name else result for result in graph.results))
    return replace(graph, ops=ops, results=results)


def _pruned(graph: Graph) -> Graph:
    """The function without what no result needs."""
    needed = set(graph.results)
    for op in reversed(graph.ops):
        if op.name in needed:
            needed.update(op.args)
    return replace(
        graph,
        tensors=tuple(tensor for tensor in graph.tensors if tensor.name in needed),
        ops=tuple(op for op in graph.ops if op.name in needed),
    )
