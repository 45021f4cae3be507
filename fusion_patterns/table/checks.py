"""What must hold in a table beyond the form of its data: names that exist, rows that can match.

Each check that fails gives a `Fault`; all of them are found in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fusion_patterns.table import conditions
from fusion_patterns.table.expand import flatten, tensors_of
from fusion_patterns.table.faults import Fault, did_you_mean
from fusion_patterns.table.model import Fragment, Node, Row, Table
from fusion_patterns.table.ops import OPS
from fusion_patterns.table.source import Path

__all__ = ["check"]

MAX_OPERATORS = 1000
"""The most operators that one match of a row may cover, all repetitions counted."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("output", "others")


def check(table: Table) -> list[Fault]:
    """Returns all that is wrong with ``table``, in no particular order; `extends` is taken as resolved."""
    faults = [*_references(table), *_cycles(table)]
    for name, fragment in table.fragments.items():
        faults += _fragment(table, ("fragments", name), fragment, f"fragment '{name}'")
    for index, row in enumerate(table.patterns):
        faults += _row(table, ("patterns", index), row)
    # Sizes of fragments are known only where no fragment contains itself.
    return faults or list(_sizes(table))


# Names of operators, sets and fragments


def _references(table: Table) -> Iterator[Fault]:
    for kind, names in (("sets", table.sets), ("fragments", table.fragments)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield Fault(
                    (kind, name), f"{kind[:-1]} '{name}': a name has letters, digits and `_`", key=True
                )
    for name in table.sets.keys() & table.fragments.keys():
        yield Fault(("fragments", name), f"fragment '{name}': a set has the same name; rename one", key=True)
    for name, ops in table.sets.items():
        if not ops:
            message = f"set '{name}' is empty, so what uses it could never match; add operators or remove it"
            yield Fault(("sets", name), message)
        yield from _ops(table, ("sets", name), ops, f"set '{name}': ")
    for path, owner, nodes in _all_nodes(table):
        for node, data in nodes.items():
            yield from _ops(table, (*path, "nodes", node, "op"), data.op, f"{owner}, node '{node}': ")


def _all_nodes(table: Table) -> Iterator[tuple[Path, str, Mapping[str, Node]]]:
    for name, fragment in table.fragments.items():
        yield ("fragments", name), f"fragment '{name}'", fragment.nodes
    for index, row in enumerate(table.patterns):
        yield ("patterns", index), f"row '{row.name}'", row.nodes


def _ops(table: Table, path: Path, ops: Iterable[str], owner: str) -> Iterator[Fault]:
    groups = [f"${name}" for name in (*table.sets, *table.fragments)]
    for index, name in enumerate(ops):
        if name in OPS or name in groups:
            continue
        if f"${name}" in groups:
            message = f"'{name}' is no operator; write '${name}' for the set or fragment"
        elif name.startswith("$"):
            message = f"unknown set or fragment '{name}'{did_you_mean(name, groups)}"
        elif name.startswith("relax."):
            message = f"unknown operator '{name}'; write it without 'relax.'"
        else:
            message = f"unknown operator '{name}'{did_you_mean(name, [*OPS, *groups])}"
        yield Fault((*path, index), owner + message)


def _cycles(table: Table) -> Iterator[Fault]:
    """Finds sets and fragments that contain themselves, each once."""
    parts: dict[str, tuple[Path, tuple[str, ...]]]
    parts = {f"${name}": (("sets", name), ops) for name, ops in table.sets.items()}
    for name, fragment in table.fragments.items():
        parts[f"${name}"] = (
            ("fragments", name),
            tuple(op for node in fragment.nodes.values() for op in node.op),
        )
    done: set[str] = set()
    for start in parts:
        trail: list[tuple[str, Iterator[str]]] = []
        if start not in done:
            trail.append((start, iter(parts[start][1])))
        while trail:
            name, rest = trail[-1]
            child = next(rest, None)
            names = [entered for entered, _ in trail]
            if child is None:
                done.add(name)
                trail.pop()
            elif child in names:
                circle = " -> ".join([*names[names.index(child) :], child])
                path = parts[child][0]
                yield Fault(path, f"{str(path[0])[:-1]} '{child[1:]}' contains itself: {circle}", key=True)
            elif child in parts and child not in done:
                trail.append((child, iter(parts[child][1])))


def _sizes(table: Table) -> Iterator[Fault]:
    sizes: dict[str, int] = {}

    def size(nodes: Mapping[str, Node]) -> int:
        total = 0
        for node in nodes.values():
            largest = 1
            for op in node.op:
                largest = max(largest, size_of(op))
            total += largest * (node.repeat.max if node.repeat is not None else 1)
        return total

    def size_of(name: str) -> int:
        if not name.startswith("$"):
            return 1
        if name not in sizes:
            if name[1:] in table.sets:
                sizes[name] = max(map(size_of, table.sets[name[1:]]))
            else:
                sizes[name] = size(table.fragments[name[1:]].nodes)
        return sizes[name]

    for path, owner, nodes in _all_nodes(table):
        if (operators := size(nodes)) > MAX_OPERATORS:
            message = (
                f"one match may cover {operators} operators, and {MAX_OPERATORS} is the most; repeat less"
            )
            yield Fault((*path, "nodes"), f"{owner}: {message}", key=True)


# The shape of fragments and rows


def _fragment(table: Table, path: Path, fragment: Fragment, owner: str) -> Iterator[Fault]:
    nodes, value = fragment.nodes, fragment.value
    if value in nodes or not _NAME.fullmatch(value):
        reason = "is also a node; rename one" if value in nodes else "is no name: letters, digits and `_`"
        yield Fault((*path, "in"), f"{owner}: the input '{value}' {reason}")
    yield from _nodes(table, path, nodes, owner)
    for name, node in nodes.items():
        for index, operand in enumerate(node.inputs or ()):
            if operand not in nodes and operand != value:
                hint = did_you_mean(operand, [value, *nodes]) or "; leave out operands from elsewhere"
                message = f"'{operand}' is neither the fragment's input '{value}' nor an earlier node{hint}"
                yield Fault((*path, "nodes", name, "in", index), f"{owner}, node '{name}': {message}")
    first = next(iter(nodes.values()))
    if first.inputs is not None and not any(value in (node.inputs or ()) for node in nodes.values()):
        yield Fault((*path, "nodes"), f"{owner}: no node takes the input '{value}'", key=True)
    if all(node.optional or (node.repeat is not None and node.repeat.min == 0) for node in nodes.values()):
        yield Fault(
            (*path, "nodes"), f"{owner}: every node may be absent, so it could stand for nothing", key=True
        )
    yield from _unused(path, nodes, list(nodes)[-1], (), owner)


def _row(table: Table, path: Path, row: Row) -> Iterator[Fault]:
    owner = f"row '{row.name}'"
    tensors = tensors_of(row)
    yield from _nodes(table, path, row.nodes, owner)
    for name in dict.fromkeys(tensors):
        if name in _RESERVED or not _NAME.fullmatch(name):
            reason = (
                "stands for something else" if name in _RESERVED else "is no name: letters, digits and `_`"
            )
            yield Fault((*path, "nodes"), f"{owner}: the tensor name '{name}' {reason}; rename it", key=True)
    ends_known = True
    for field, names in (("anchor", row.anchor), ("output", row.output), ("leaves", row.leaves)):
        for index, name in enumerate((names,) if isinstance(names, str) else names or ()):
            if name not in row.nodes:
                message = f"{owner}: `{field}` names '{name}', which is no node of the row"
                yield Fault((*path, field, index), message + did_you_mean(name, row.nodes))
                ends_known = False
    if not ends_known:
        return
    yield from _ends(path, row, owner)
    yield from _scopes(path, row, tensors, owner)
    alternatives = {name: tuple(flatten(table, node.op, [])) for name, node in row.nodes.items()}
    for index, predicate in enumerate(row.where):
        label = f"{owner}, condition {index + 1}: "
        yield from conditions.check((*path, "where", index), predicate, alternatives, tensors, label)


def _nodes(table: Table, path: Path, nodes: Mapping[str, Node], owner: str) -> Iterator[Fault]:
    earlier: set[str] = set()
    for name, node in nodes.items():
        at: Path = (*path, "nodes", name)
        label = f"{owner}, node '{name}': "
        if name in _RESERVED or not _NAME.fullmatch(name):
            reason = (
                "stands for something else" if name in _RESERVED else "is no name: letters, digits and `_`"
            )
            yield Fault(at, f"{label}'{name}' {reason}; rename the node", key=True)
        yield from (
            Fault((*at, *where), label + message) for where, message in _operands(table, nodes, name, earlier)
        )
        if node.optional and node.repeat is not None:
            yield Fault(
                (*at, "optional"),
                f"{label}a node is optional or repeated, not both; write `repeat` with min: 0",
            )
        earlier.add(name)


def _operands(
    table: Table, nodes: Mapping[str, Node], name: str, earlier: set[str]
) -> Iterator[tuple[Path, str]]:
    node = nodes[name]
    if node.inputs is None:
        return
    if not node.inputs:
        yield ("in",), "`in` is empty; name the operands, or leave `in` out to follow the node before"
    for index, operand in enumerate(node.inputs):
        if operand == name:
            yield ("in", index), f"`in` names '{operand}', the node itself"
        elif operand in nodes and operand not in earlier:
            yield ("in", index), f"`in` names '{operand}', a later node; put that node before this one"
    if node.repeat is not None and len(node.inputs) > 1:
        message = "a repeated node names one value in `in`: the one its first occurrence takes"
        yield ("in",), f"{message}; each occurrence has further operands of its own, so leave them out"
        return
    for op in flatten(table, node.op, []):
        arity = 1 if isinstance(op, Fragment) else OPS[op].arity if op in OPS else None
        if arity is not None and len(node.inputs) > arity:
            what = "a fragment" if isinstance(op, Fragment) else f"'{op}'"
            count = f"{arity} operand" + "s" * (arity != 1)
            yield ("in",), f"{what} has {count}, but `in` names {len(node.inputs)}"


def _operands_among(nodes: Mapping[str, Node], name: str) -> list[str]:
    """Returns the nodes whose values ``name`` takes."""
    inputs = nodes[name].inputs
    if inputs is not None:
        return [operand for operand in inputs if operand in nodes]
    names = list(nodes)
    index = names.index(name)
    return names[index - 1 : index] if index else []


def _unused(
    path: Path, nodes: Mapping[str, Node], output: str, leaves: Iterable[str], owner: str
) -> Iterator[Fault]:
    """Finds nodes whose values go nowhere, and rows that fall into parts: neither could be one composite."""
    used = {operand for name in nodes for operand in _operands_among(nodes, name)}
    idle = [name for name in nodes if name not in used and name != output and name not in leaves]
    for name in idle:
        message = f"no later node takes the value of '{name}'; use it, remove it, or list it in `leaves`"
        yield Fault((*path, "nodes", name), f"{owner}, node '{name}': {message}", key=True)
    group = {name: {name} for name in nodes}
    for name in nodes:
        for operand in _operands_among(nodes, name):
            if group[name] is not group[operand]:
                group[name] |= group[operand]
                group.update(dict.fromkeys(group[operand], group[name]))
    apart = [name for name in nodes if group[name] is not group[output]]
    if apart and not idle:
        message = (
            f"no value connects {', '.join(map(repr, apart))} with '{output}', so this can't be one composite"
        )
        yield Fault((*path, "nodes", apart[0]), f"{owner}: {message}", key=True)


def _ends(path: Path, row: Row, owner: str) -> Iterator[Fault]:
    output = row.output_name()
    anchor = row.nodes[row.anchor_name()]
    if anchor.optional or anchor.repeat is not None:
        what = "optional" if anchor.optional else "repeated"
        message = f"a match starts at a node that is there exactly once, and '{row.anchor_name()}' is {what}"
        yield Fault((*path, "anchor"), f"{owner}: {message}; name another one in `anchor`")
    if output in row.leaves:
        yield Fault(
            (*path, "leaves"), f"{owner}: '{output}' is the output and leaves anyway; drop it from `leaves`"
        )
    yield from _unused(path, row.nodes, output, row.leaves, owner)


def _scopes(path: Path, row: Row, tensors: tuple[str, ...], owner: str) -> Iterator[Fault]:
    for name in row.scopes:
        if name in tensors or name in _RESERVED:
            continue
        if name in row.nodes:
            message = f"'{name}' is a node, and inner values live in no scope; write 'output' for the result"
        else:
            message = f"the row has no tensor '{name}'{did_you_mean(name, [*tensors, *_RESERVED])}"
        yield Fault((*path, "scopes", name), f"{owner}, scopes: {message}", key=True)
