"""Sums over an axis along which values were only put together, as sums of those values.

sum(reshape(concat(a, b, c), axis 0), (3, ..)), axis 0   -> a + b + c
sum(stack(a, b, c), that axis)                           -> a + b + c
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Call

from fusion_patterns.normalise.rewrite import Rewriter, static_shape

__all__ = ["MOST_TERMS", "sum_of_parts"]

MOST_TERMS = 8
"""A kernel that sums more reads more tensors than some devices have images for."""


def sum_of_parts(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """A sum of what was put together for it alone."""
    assert isinstance(expr, Call)
    whole, axes = static_shape(expr.args[0]), expr.attrs.axis
    if whole is None or axes is None or len(axes) != 1 or expr.attrs.keepdims:
        return None
    parts = _stacked(at, expr.args[0], whole, int(axes[0]) % len(whole))
    if not 1 < len(parts) <= MOST_TERMS or any(static_shape(part) != static_shape(expr) for part in parts):
        return None
    total = parts[0]
    for part in parts[1:-1]:
        total = at.emit(relax.op.add(total, part))
    return relax.op.add(total, parts[-1])


def _stacked(at: Rewriter, value: relax.Expr, whole: tuple[int, ...], axis: int) -> list[relax.Expr]:
    """What *value* has side by side along a new axis, one part for each of its elements."""
    stack = at.call_of(value, "stack")
    if stack is not None:
        return at.parts(stack) or [] if int(stack.attrs.axis or 0) % len(whole) == axis else []
    reshape = at.call_of(value, "reshape")
    concat = at.call_of(reshape.args[0], "concat") if reshape is not None and axis == 0 else None
    if concat is None or concat.attrs.axis is None or int(concat.attrs.axis) % concat.ty.ndim != 0:
        return []
    parts = at.parts(concat) or []
    return parts if len(parts) == whole[0] else []
