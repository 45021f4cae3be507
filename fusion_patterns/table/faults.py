"""Faults of a table: what is wrong, where in the data, and the sentence that says it.

A fault knows the path of the value it is about; `Document` turns the path into a line and a column.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from fusion_patterns.table.model import Fragment, Node, Predicate, Repeat, Row, Table, TargetSpec
from fusion_patterns.table.source import Path

__all__ = ["Fault", "did_you_mean", "field_names", "label", "model_faults", "unknown_field"]


class Fault(NamedTuple):
    """One thing that is wrong."""

    path: Path
    """The value it is about."""
    message: str
    """What is wrong and what to do, in one sentence."""
    key: bool = False
    """True: it is about the key of that value."""
    column: int = 0
    """For a fault inside a text: its column in the text, from 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` for the name nearest to ``name``, or nothing if none is near."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def label(path: Path, value: Any) -> str:
    """Returns whose value stands at ``path``, as a message starts: ``row 'conv2d.chain', node 'tail': ``."""
    match path:
        case ("patterns", int(index), *rest):
            row = value["patterns"][index]
            name = row.get("name") if isinstance(row, dict) else None
            parts = [f"row '{name}'" if isinstance(name, str) else f"row {index + 1}"]
        case ("fragments", str(name), *rest):
            parts = [f"fragment '{name}'"]
        case ("sets", str(name), *_):
            return f"set '{name}': "
        case _:
            return ""
    match rest:
        case ["nodes", str(node), *_]:
            parts.append(f"node '{node}'")
        case ["where", int(number), *_]:
            parts.append(f"condition {number + 1}")
    return ", ".join(parts) + ": "


def model_faults(error: ValidationError, value: Any) -> list[Fault]:
    """Returns the faults that pydantic found in ``value``, one for each place."""
    faults: dict[tuple[Path, str], Fault] = {}
    for detail in error.errors(include_url=False):
        kind, loc = detail["type"], detail["loc"]
        path = _existing(loc, value)
        # The members of a union each complain about the same value: the first complaint stands for all.
        apart = ""
        if kind == "missing" and isinstance(loc[-1], str):
            path = _existing(loc[:-1], value)
            message = apart = f"`{loc[-1]}` is missing; add it"
        elif kind == "extra_forbidden":
            message = unknown_field(path)
        else:
            message = _sentence(path, kind, detail)
        fault = Fault(path, label(path, value) + message, key=kind == "extra_forbidden")
        faults.setdefault((path, apart), fault)
    return list(faults.values())


def unknown_field(path: Path) -> str:
    """Returns the sentence for a field that its model does not have."""
    name, known = str(path[-1]), field_names(_model_at(path[:-1]))
    return f"unknown field '{name}'" + (did_you_mean(name, known) or f"; known here: {', '.join(known)}")


_WANTED = {
    "equals": "a number, a text, true, false or a list of these",
    "in": "a list of values",
    "between": "two numbers, [least, largest]",
    "scopes": "a mapping of a tensor's name to texture, global or any",
    "repeat": "a number from 1 to 64, or {min: 0, max: 16}",
    "nodes": "a mapping with at least one node",
    "where": "a list of conditions",
    "patterns": "a list of rows",
    "sets": "a mapping of names to lists of operators",
    "fragments": "a mapping of names to fragments",
    "op": "an operator or a list of operators",
    "broadcast": "scalar, channel, same, other or a list of these",
    "dim": "a letter of the layout, or a number from 0",
}


_NO_MAPPING = ("model_type", "dict_type", "model_attributes_type")
# Where an item of a list is at fault, what the whole list should be would not help.
_OF_ITEMS = ("enum", "string_type", *_NO_MAPPING)


def _sentence(path: Path, kind: str, detail: Any) -> str:
    field = next((part for part in reversed(path) if isinstance(part, str)), None)
    found = detail["input"]
    shown = repr(found) if isinstance(found, str | int | float | bool) else _kind_of(found)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    if field == "schema_version":
        return f"schema_version {shown} is not known; this release reads version 1"
    if field == "name" and kind == "string_pattern_mismatch":
        return (
            f"`name` is {shown}; a row's name has letters, digits, `_`, `.` and `-`, and starts with a letter"
        )
    where = f"`{field}`: " if field is not None else ""
    wanted = _WANTED.get(field or "") if path[-1:] == (field,) or kind not in _OF_ITEMS else None
    if kind == "value_error":
        return where + str(detail["ctx"]["error"])
    if wanted is not None:
        return f"{where}expected {wanted}; found {shown}"
    if kind in _NO_MAPPING:
        return f"{where}expected a mapping; found {shown}"
    message = (
        detail["msg"]
        .replace("Input should be ", "expected ")
        .replace("Keys should be", "expected keys that are")
    )
    return f"{where}{message[0].lower()}{message[1:]}; found {shown}"


def _kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    return "a list" if value else "an empty list"


def _existing(loc: tuple[int | str, ...], value: Any) -> Path:
    """Returns the longest start of ``loc`` that leads to a value; the rest names members of unions."""
    path: list[int | str] = []
    for part in loc:
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if not in_list and not (isinstance(value, dict) and part in value):
            break
        value = value[part]
        path.append(part)
    return tuple(path)


def _model_at(path: Path) -> type[BaseModel]:
    match path:
        case ("target", *_):
            return TargetSpec
        case (*_, "nodes", _):
            return Node
        case (*_, "repeat"):
            return Repeat
        case (*_, "where", _):
            return Predicate
        case ("fragments", _):
            return Fragment
        case ("patterns", _):
            return Row
    return Table


def field_names(model: type[BaseModel]) -> list[str]:
    """Returns the fields of ``model`` as a file may name them."""
    return [field.alias or name for name, field in model.model_fields.items() if name != "origin"]
