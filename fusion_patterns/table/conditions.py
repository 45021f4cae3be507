"""Checks of the conditions in a row's `where`: one subject each, something asked, and an answer possible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fusion_patterns.table import expr
from fusion_patterns.table.expand import Alternative
from fusion_patterns.table.faults import Fault, did_you_mean
from fusion_patterns.table.model import PARTS, Predicate
from fusion_patterns.table.ops import OPS
from fusion_patterns.table.source import Path

__all__ = ["DTYPES", "check"]

DTYPES = (
    *("float16", "float32", "float64", "bfloat16", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_DIM = re.compile(r"[A-Z]")
_COMPARISONS = {"equals": "equals", "among": "in", "multiple_of": "multiple_of", "between": "between"}
_OF_NODE = ("attr", "uses")
_OF_TENSOR = ("dtype", "rank", "constant", "static", "broadcast", "layout", "uses", "dim")

_Nodes = Mapping[str, tuple[Alternative, ...]]


def check(
    path: Path, predicate: Predicate, nodes: _Nodes, tensors: tuple[str, ...], label: str
) -> Iterator[Fault]:
    """Yields what is wrong with a predicate of a row; ``nodes`` gives what may stand at each of its nodes."""
    asked = (name for name in Predicate.model_fields if name != "origin")
    given = {name for name in asked if getattr(predicate, name) is not None}
    subjects = [name for name in ("node", "tensor", "that") if name in given]
    if len(subjects) != 1:
        found = " and ".join(f"`{name}`" for name in subjects) or "none"
        yield Fault(
            path, f"{label}exactly one of `node`, `tensor` and `that` says what it is on; found {found}"
        )
        return
    if predicate.that is not None:
        if extra := sorted(_COMPARISONS.get(name, name) for name in given - {"that"}):
            yield Fault(
                (*path, extra[0]), f"{label}`that` stands alone; move `{extra[0]}` to another condition", True
            )
        yield from _that((*path, "that"), predicate.that, nodes, tensors, label)
        return
    of_node = predicate.node is not None
    yield from _subject(path, predicate, nodes, tensors, label)
    allowed = _OF_NODE if of_node else _OF_TENSOR
    compared = [name for name in ("attr", "dim") if name in given]
    comparisons = [_COMPARISONS[name] for name in _COMPARISONS if name in given]
    for name in sorted(given - set(allowed) - set(_COMPARISONS) - {"node", "tensor"}):
        other = "tensor" if of_node else "node"
        message = (
            f"`{name}` is asked of a {other}, not of a {subjects[0]}; here can stand {', '.join(allowed)}"
        )
        yield Fault((*path, name), label + message, key=True)
    if not given & {*_OF_NODE, *_OF_TENSOR} and not comparisons:
        yield Fault(path, f"{label}it asks for nothing; add one of {', '.join(allowed)}")
    elif comparisons and not compared:
        message = f"`{comparisons[0]}` compares nothing; add `{'attr' if of_node else 'dim'}`"
        yield Fault((*path, comparisons[0]), label + message, key=True)
    elif compared and len(comparisons) != 1:
        found = " and ".join(f"`{name}`" for name in comparisons) or "none"
        message = (
            f"`{compared[0]}` needs exactly one of `equals`, `in`, `multiple_of`, `between`; found {found}"
        )
        yield Fault((*path, compared[0]), label + message, key=True)
    yield from _values(path, predicate, label)
    if predicate.node is not None and predicate.node in nodes and predicate.attr is not None:
        yield from _attribute((*path, "attr"), predicate.attr, nodes[predicate.node], label)


def _subject(
    path: Path, predicate: Predicate, nodes: _Nodes, tensors: tuple[str, ...], label: str
) -> Iterator[Fault]:
    if predicate.node is not None and predicate.node not in nodes:
        name = predicate.node
        if name in tensors or name == "output":
            message = f"'{name}' is a tensor; write `tensor: {name}`"
        else:
            message = f"the row has no node '{name}'{did_you_mean(name, nodes)}"
        yield Fault((*path, "node"), label + message)
    if predicate.tensor is not None and predicate.tensor not in (*tensors, "output"):
        name = predicate.tensor
        if name in nodes:
            message = (
                f"'{name}' is a node; write `node: {name}`, or `tensor: output` for the value that leaves"
            )
        else:
            message = f"the row has no tensor '{name}'{did_you_mean(name, (*tensors, 'output'))}"
        yield Fault((*path, "tensor"), label + message)


def _values(path: Path, predicate: Predicate, label: str) -> Iterator[Fault]:
    if predicate.between is not None and predicate.between[0] > predicate.between[1]:
        least, largest = predicate.between
        yield Fault(
            (*path, "between"), f"{label}nothing lies between {least:g} and {largest:g}; exchange them"
        )
    if isinstance(predicate.dim, str) and not _DIM.fullmatch(predicate.dim):
        message = (
            f"the dimension '{predicate.dim}' is neither one capital letter of a layout nor a number from 0"
        )
        yield Fault((*path, "dim"), label + message)
    for field in ("dtype", "layout", "broadcast", "among"):
        if getattr(predicate, field) == ():
            name = _COMPARISONS.get(field, field)
            yield Fault((*path, name), f"{label}`{name}` lists nothing, so it could never hold", key=True)
    for index, dtype in enumerate(predicate.dtype or ()):
        if dtype not in DTYPES:
            message = f"unknown element type '{dtype}'{did_you_mean(dtype, DTYPES)}"
            yield Fault((*path, "dtype", index), label + message)


def _attribute(path: Path, attr: str, alternatives: tuple[Alternative, ...], label: str) -> Iterator[Fault]:
    known = {name for op in alternatives if isinstance(op, str) and op in OPS for name in OPS[op].attrs}
    if attr not in known:
        hint = did_you_mean(attr, known) or (f"; they have {', '.join(sorted(known))}" if known else "")
        yield Fault(path, f"{label}no operator of this node has an attribute '{attr}'{hint}")


def _that(path: Path, text: str, nodes: _Nodes, tensors: tuple[str, ...], label: str) -> Iterator[Fault]:
    try:
        expression = expr.parse(text)
    except expr.ExpressionError as error:
        yield Fault(path, f"{label}{error}", column=error.column)
        return
    subjects = (*nodes, *tensors, "output")
    for reference in expression.references:
        subject, field, column = reference.subject, reference.field, reference.column
        if subject not in subjects:
            message = f"the row has no node or tensor '{subject}'{did_you_mean(subject, subjects)}"
            yield Fault(path, label + message, column=column)
        elif _DIM.fullmatch(field) and reference.indexed:
            yield Fault(path, f"{label}'{subject}.{field}' is one number and has no index", column=column)
        elif _DIM.fullmatch(field) or field in ("shape", "uses"):
            continue
        elif subject not in nodes:
            known = f"a tensor has `shape`, `uses` and dimensions such as `{subject}.C`"
            message = f"'{subject}.{field}' is not known: {known}"
            yield Fault(path, label + message, column=column)
        elif field != PARTS:
            for fault in _attribute(path, field, nodes[subject], label):
                yield fault._replace(column=column)
