"""Extents of TVM's IR as numbers, or as text that the runtime evaluates."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Range
from tvm.sym import Analyzer

__all__ = ["dim", "symbols"]

_INFIX = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "Div": "//", "FloorMod": "%", "Mod": "%"}
_CALLS = {"Min": "min", "Max": "max"}
_MOST = 2**31  # no extent reaches it


def dim(expr: Any, names: dict[str, int | str] | None = None) -> int | str:
    """An extent as a number, or as an expression over the names of its variables.

    ``names`` says what a variable stands for. Raises ``ValueError`` for an operator that the runtime has not.
    """
    if isinstance(expr, int):
        return expr
    value = getattr(expr, "value", None)
    if isinstance(value, int):
        return value
    kind = type(expr).__name__
    if isinstance(expr, tvm.ir.Var if hasattr(tvm.ir, "Var") else tirx.Var):
        return (names or {}).get(str(expr.name), str(expr.name))
    if kind == "Cast":
        return dim(expr.value, names)
    if kind in _INFIX:
        return _folded(f"({dim(expr.a, names)} {_INFIX[kind]} {dim(expr.b, names)})")
    if kind in _CALLS:
        return _folded(f"{_CALLS[kind]}({dim(expr.a, names)}, {dim(expr.b, names)})")
    if kind == "Select" and (chosen := _chosen(expr, names or {})) is not None:
        return dim(chosen, names)
    if kind in ("LShift", "RShift") and isinstance(amount := dim(expr.b, names), int):
        return _folded(f"({dim(expr.a, names)} {'//' if kind == 'RShift' else '*'} {2**amount})")
    raise ValueError(f"the extent {expr} ({kind}) can't be computed at run time")


def _chosen(select: Any, names: dict[str, int | str]) -> Any | None:
    """The branch that a ``Select`` takes whatever the extents are; None where that depends on them.

    TVM divides rounding down by asking for the sign first, also of what is made of extents and so has none.
    """
    analyzer, variables = Analyzer(), tirx.analysis.undefined_vars(tirx.Evaluate(select.condition), [])
    for var in variables:
        if str(var.name) not in names:
            analyzer.bind(var, Range(tirx.const(0, str(var.ty)), tirx.const(_MOST, str(var.ty))))
    decided = getattr(analyzer.simplify(select.condition), "value", None)
    if decided is None:
        return None
    return select.true_value if decided else select.false_value


def _folded(text: str) -> int | str:
    if any(ch.isalpha() for ch in text.replace("min", "").replace("max", "")):
        return text
    return int(eval(text, {"min": min, "max": max, "__builtins__": {}}))


def symbols(exprs: Any, values: list[int | str]) -> dict[str, int | str]:
    """Match a PrimFunc's parameter shape against an argument's extents: what each variable stands for."""
    found: dict[str, int | str] = {}
    for expr, value in zip(exprs, values, strict=True):
        name = getattr(expr, "name", None)
        if name is not None and not isinstance(getattr(expr, "value", None), int):
            found[str(name)] = value
    return found
