"""A table's rows on a terminal: each drawn in one line.

    nn.conv2d(data, weight) > add(_, bias_vector)? > $epilogue{0,16}

``_`` is the value before, ``?`` a node that may be absent, ``{0,16}`` how often it may follow itself, ``|``
alternatives, ``$epilogue`` a set or a fragment. A value that is used later on has a name:
``gate=sigmoid(x)``.
"""

from __future__ import annotations

from typing import Any

from fusion_patterns.table import Node, Predicate, Row, Table

__all__ = ["describe", "draw", "render"]


def draw(row: Row) -> str:
    """The row in one line."""
    names = list(row.nodes)
    used = {
        name
        for index, node in enumerate(row.nodes.values())
        for name in node.inputs or ()
        if name in row.nodes and name != names[index - 1]
    }
    return " > ".join(
        (f"{name}=" if name in used else "") + _node(node, names[index - 1] if index else "")
        for index, (name, node) in enumerate(row.nodes.items())
    )


def _node(node: Node, before: str) -> str:
    operands = ("_" if name == before else name for name in node.inputs or ())
    text = "|".join(node.op) + (f"({', '.join(operands)})" if node.inputs is not None else "")
    if node.repeat is not None:
        return f"{text}{{{node.repeat.min},{node.repeat.max}}}"
    return f"{text}?" if node.optional else text


def describe(table: Table) -> dict[str, Any]:
    """The table as plain data, ready for JSON."""
    return {
        "name": table.name,
        "where": table.origin.file,
        "target": table.target.model_dump(mode="json"),
        "rows": [
            {
                "name": row.name,
                "because": row.because,
                "where": str(row.origin),
                "drawn": draw(row),
                "conditions": [condition(predicate) for predicate in row.where],
                "scopes": {name: str(scope) for name, scope in row.scopes.items()},
                "kernel": row.kernel,
                "priority": row.priority,
            }
            for row in table.patterns
        ],
    }


def condition(predicate: Predicate) -> str:
    """A condition as a phrase: ``conv: attr groups, equals 1``."""
    said = predicate.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if "that" in said:
        return str(said["that"])
    subject = said.pop("node", None) or said.pop("tensor", None)
    return f"{subject}: " + ", ".join(f"{key} {_value(value)}" for key, value in said.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " or ".join(_value(item) if item != "" else "none" for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(table: dict[str, Any], *, whole: bool) -> str:
    """What :func:`describe` gave, for people; *whole*: with conditions, scopes and kernels."""
    keys = f" with {', '.join(table['target']['keys'])}" if table["target"]["keys"] else ""
    lines = [f"{table['name']}: {len(table['rows'])} rows for {table['target']['kind']}{keys}"]
    for row in table["rows"]:
        lines += ["", f"{row['name']}  [{row['where']}]", f"  {row['drawn']}"]
        lines += [f"  {row['because']}"] if row["because"] else []
        if whole:
            lines += [f"  where   {said}" for said in row["conditions"]]
            lines += [f"  scopes  {', '.join(f'{name} {scope}' for name, scope in row['scopes'].items())}"]
            lines += [f"  kernel  {row['kernel'] or 'chosen by the lowering'}, priority {row['priority']}"]
    return "\n".join(lines)
