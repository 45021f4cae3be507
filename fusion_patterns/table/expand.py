"""What a row of a table means once its `$names` are looked up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from fusion_patterns.errors import TableError
from fusion_patterns.table.model import Fragment, Node, Row, Table

__all__ = ["Alternative", "flatten", "ops_of", "tensors_of"]

Alternative = str | Fragment
"""What may stand at a node: an operator by name, or a fragment."""

# A table holds dictionaries and so has no hash: its identity is the key, and its end removes the entry.
_expanded: dict[int, dict[tuple[str, ...], tuple[Alternative, ...]]] = {}


def ops_of(table: Table, node: Node) -> tuple[Alternative, ...]:
    """Returns what may stand at ``node``: sets flattened, in the order written, each alternative once.

    Raises `TableError` for a `$name` that the table does not have, which `load_table` would have refused.
    """
    of_table = _expanded.get(id(table))
    if of_table is None:
        of_table = _expanded[id(table)] = {}
        weakref.finalize(table, _expanded.pop, id(table), None)
    alternatives = of_table.get(node.op)
    if alternatives is None:
        unknown: list[str] = []
        alternatives = of_table[node.op] = tuple(flatten(table, node.op, unknown))
        if unknown:
            raise TableError(
                f"{table.origin}: the table '{table.name}' has no set or fragment '{unknown[0]}'"
            )
    return alternatives


def flatten(table: Table, ops: Iterable[str], unknown: list[str]) -> Iterator[Alternative]:
    """Yields the alternatives that ``ops`` stand for, each once; adds unknown `$names` to ``unknown``.

    A set that contains itself is looked into once, so this ends for every table, valid or not.
    """
    seen: set[str] = set()
    stack = list(ops)[::-1]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("$"):
            yield name
        elif name[1:] in table.sets:
            stack.extend(reversed(table.sets[name[1:]]))
        elif name[1:] in table.fragments:
            yield table.fragments[name[1:]]
        else:
            unknown.append(name)


def tensors_of(row: Row) -> tuple[str, ...]:
    """Returns the names in ``row`` that stand for tensors, its named inputs, in the order they appear."""
    named = (name for node in row.nodes.values() for name in node.inputs or ())
    return tuple(dict.fromkeys(name for name in named if name not in row.nodes))
