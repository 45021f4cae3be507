"""The JSON form of a manifest's parts, and its strict reader.

A reader takes a piece of JSON and the place where it was found, and gives the part that it stands for. Every
field is checked: a missing, unknown or ill-typed one is a ManifestError that starts with the place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from ..errors import ManifestError
from .check import MAX_NESTING
from .manifest import (
    Alloc,
    Bind,
    Call,
    Copy,
    Function,
    If,
    Launch,
    Param,
    Scalar,
    Shape,
    Tensor,
    View,
)

Reader: TypeAlias = Callable[[Any, str], Any]

_STEPS = {cls.__name__.lower(): cls for cls in (Alloc, Launch, View, Copy, If, Call, Bind, Shape)}


def encode(value: Any) -> Any:
    """Plain JSON of a part. Floats that JSON lacks become ``{"float": "nan"}``."""
    if is_dataclass(value):
        encoded = {f.name: encode(getattr(value, f.name)) for f in fields(value)}
        kind = type(value).__name__.lower()
        return {"step": kind, **encoded} if kind in _STEPS else encoded
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _expect(ok: bool, where: str, what: str, got: Any) -> None:
    if not ok:
        raise ManifestError(f"{where}: expected {what}, got {json.dumps(got)[:60]}")


def keys(got: Any, expected: set[str], where: str) -> None:
    """Raises ManifestError unless `got` is an object with exactly these keys."""
    mapping(got, where)
    if odd := sorted(got.keys() ^ expected):
        raise ManifestError(f"{where}: {'unknown' if odd[0] in got else 'missing'} field {odd[0]!r}")


def mapping(got: Any, where: str) -> dict[str, Any]:
    """A reader of any JSON object."""
    _expect(isinstance(got, dict), where, "an object", got)
    return dict(got)


def text(got: Any, where: str) -> str:
    """A reader of text."""
    _expect(isinstance(got, str), where, "text", got)
    return str(got)


def _dim(got: Any, where: str) -> int | str:
    _expect(type(got) in (int, str), where, "an integer or an expression", got)
    return got  # type: ignore[no-any-return]


def _number(got: Any, where: str) -> int | str | float:
    if isinstance(got, dict) and got.get("float") in ("nan", "inf", "-inf") and len(got) == 1:
        return float(got["float"])
    _expect(type(got) in (int, str, float), where, "a number or an expression", got)
    return got  # type: ignore[no-any-return]


def list_of(item: Reader, length: int | None = None) -> Reader:
    """A reader of a list, whose items another reader takes; of exactly `length` items, if given."""

    def read(got: Any, where: str) -> tuple[Any, ...]:
        ok = isinstance(got, list) and length in (None, len(got))
        _expect(ok, where, "a list" if length is None else f"a list of {length}", got)
        return tuple(item(part, f"{where}[{i}]") for i, part in enumerate(got))

    return read


def dict_of(item: Reader) -> Reader:
    """A reader of an object with free keys, whose values another reader takes."""

    def read(got: Any, where: str) -> dict[str, Any]:
        return {name: item(part, f"{where}.{name}") for name, part in mapping(got, where).items()}

    return read


def record(cls: type[Any]) -> Reader:
    """A reader of one of the manifest's dataclasses: all of its fields and no other."""

    def read(got: Any, where: str) -> Any:
        readers = _FIELDS[cls]
        keys(got, set(readers), where)
        return cls(**{name: reader(got[name], f"{where}.{name}") for name, reader in readers.items()})

    return read


def _shallow(where: str) -> None:
    """Stop before the reader's own recursion gets deep; `check` has the exact limits, each `MAX_NESTING`."""
    if where.count("[") > 3 * MAX_NESTING:  # every level of lists adds one "[" to the place
        raise ManifestError(f"{where[:60]}…: nested too deep")


def _nested(leaf: Reader, is_leaf: Callable[[Any], bool]) -> Reader:
    def read(got: Any, where: str) -> Any:
        _shallow(where)
        return leaf(got, where) if is_leaf(got) else list_of(read)(got, where)

    return read


def _result_leaf(got: Any, where: str) -> str | None:
    return None if got is None else text(got, where)


def _argument(got: Any, where: str) -> str | Scalar:
    return text(got, where) if isinstance(got, str) else record(Scalar)(got, where)


def _step(got: Any, where: str) -> Any:
    _shallow(where)
    kind = mapping(got, where).get("step")
    if not isinstance(kind, str) or kind not in _STEPS:
        raise ManifestError(f"{where}: unknown step {kind!r}")
    return record(_STEPS[kind])({k: v for k, v in got.items() if k != "step"}, where)


_tensor = record(Tensor)
_result = _nested(_result_leaf, lambda got: not isinstance(got, list))
_triple = list_of(_dim, 3)
_FIELDS: dict[type[Any], dict[str, Reader]] = {
    Tensor: {"shape": list_of(_dim), "dtype": text, "scope": text},
    Scalar: {"expr": _number, "dtype": text},
    Param: {"name": text, "tensor": _nested(_tensor, lambda got: not isinstance(got, list))},
    Function: {
        "name": text,
        "params": list_of(record(Param)),
        "body": list_of(_step),
        "result": _result,
    },
    Alloc: {"value": text, "tensor": _tensor},
    Launch: {
        "kernel": text,
        "args": list_of(_argument),
        "grid": _triple,
        "block": _triple,
        "label": text,
    },
    View: {"value": text, "of": text, "tensor": _tensor},
    Copy: {"value": text, "of": text, "tensor": _tensor},
    If: {
        "condition": text,
        "then": list_of(_step),
        "otherwise": list_of(_step),
        "value": text,
        "then_value": _result,
        "else_value": _result,
    },
    Call: {"function": text, "args": list_of(_result), "value": text},
    Bind: {"value": text, "of": _result},
    Shape: {"value": text, "dims": list_of(_dim)},
}
