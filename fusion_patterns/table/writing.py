"""Writing a table: as YAML that reads back to an equal table, and the JSON Schema of its form for editors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from fusion_patterns.table.conditions import DTYPES
from fusion_patterns.table.model import Table
from fusion_patterns.table.ops import OPS
from fusion_patterns.table.source import plain_value

__all__ = ["dump_table", "json_schema", "schema_text"]

_WIDTH = 110
# Text that needs no quotation marks, in a flow mapping as well. Whatever looks like a number still gets them.
_PLAIN = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$\-]*( [A-Za-z0-9_.$\-]+)*")


def dump_table(table: Table) -> str:
    """Returns YAML text that `load_table` reads as a table equal to ``table``."""
    data = table.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    # A number stays what it is: JSON mode would turn an infinite bound into nothing.
    for row, dumped in zip(table.patterns, data.get("patterns", ()), strict=False):
        for predicate, condition in zip(row.where, dumped.get("where", ()), strict=False):
            given = predicate.model_dump(by_alias=True, exclude_defaults=True)
            condition.update({key: given[key] for key in ("equals", "in", "between") if key in given})
            _unwrap(condition, "dtype", "layout", "broadcast")
    for holder in (*data.get("patterns", ()), *data.get("fragments", {}).values()):
        for node in holder["nodes"].values():
            _unwrap(node, "op", "in")
    data = {"schema_version": table.schema_version, **data}
    return "\n".join(_lines(data, 0)) + "\n"


def _unwrap(data: dict[str, Any], *keys: str) -> None:
    """Writes a list of one as its one item, where that means the same."""
    for key in keys:
        if isinstance(data.get(key), list) and len(data[key]) == 1:
            data[key] = data[key][0]


def _lines(value: dict[str, Any], indent: int) -> Iterator[str]:
    space = " " * indent
    for key, item in value.items():
        flow = f"{space}{_scalar(key)}: {_flow(item)}"
        # Rows are blocks, and so is whatever does not fit in a line.
        if (len(flow) <= _WIDTH and key not in ("patterns", "nodes", "where")) or not item:
            yield flow
        elif isinstance(item, dict):
            yield f"{space}{_scalar(key)}:"
            yield from _lines(item, indent + 2)
        elif isinstance(item, list | tuple):
            yield f"{space}{_scalar(key)}:"
            yield from _items(item, indent + 2, blocks=key == "patterns")
        else:
            yield flow


def _items(items: list[Any] | tuple[Any, ...], indent: int, *, blocks: bool) -> Iterator[str]:
    space = " " * indent
    for item in items:
        flow = f"{space}- {_flow(item)}"
        if isinstance(item, dict) and item and (blocks or len(flow) > _WIDTH):
            first, *rest = _lines(item, indent + 2)
            yield f"{space}- {first.lstrip()}"
            yield from rest
        else:
            yield flow


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and plain_value(value) == value:
            return value
        return _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


def _quoted(text: str) -> str:
    escaped = (
        f"\\{character}"
        if character in '"\\'
        else character
        if character.isprintable()
        else f"\\U{ord(character):08x}"
        for character in text
    )
    return '"' + "".join(escaped) + '"'


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a table's file, with the names of operators for completion in editors."""
    schema = Table.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for model in (schema, *definitions.values()):
        # Where something was written is no one's to write.
        model.get("properties", {}).pop("origin", None)
    del definitions["Origin"]
    definitions["Op"] = {
        "description": "An operator's name without `relax.`, or `$name` of a set or a fragment.",
        "anyOf": [{"enum": list(OPS)}, {"type": "string", "pattern": r"^\$[A-Za-z_][A-Za-z0-9_]*$"}],
    }
    ops = {"anyOf": [op := {"$ref": "#/$defs/Op"}, {"type": "array", "items": op, "minItems": 1}]}
    definitions["Node"]["properties"]["op"].update(ops)
    for key in ("type", "items", "minItems"):
        definitions["Node"]["properties"]["op"].pop(key, None)
    schema["properties"]["sets"]["additionalProperties"] = ops
    repeat = definitions["Node"]["properties"]["repeat"]["anyOf"]
    repeat[0] = {**definitions["Repeat"]["properties"]["max"], **repeat[0]}
    _dtypes(definitions["Predicate"]["properties"]["dtype"])
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Fusion pattern table"}
    return {**head, **{key: value for key, value in schema.items() if key != "title"}}


def _dtypes(schema: dict[str, Any]) -> None:
    dtype = {"enum": list(DTYPES)}
    schema["anyOf"] = [dtype, {"type": "array", "items": dtype}, {"type": "null"}]


def schema_text() -> str:
    """Returns what `patterns/table.schema.json` must hold."""
    return json.dumps(json_schema(), indent=2) + "\n"
