"""Rewrites of what is done to whole channels, so that a kernel can read them where they are.

split(x, channels)[i]                       -> strided_slice(x, begin, end)
concat(.., x[a:b], x[b:c], ..), channels    -> concat(.., x[a:c], ..)
concat(.., concat(a, b), ..)                -> concat(.., a, b, ..)             along one axis
concat(a, b, c)[part of b]                  -> b[the part]
concat(a, b, c)[all of b and c]             -> concat(b, c)                      if nobody else reads the whole
x[0:all]                                    -> x
x[-2:]                                      -> x[all - 2:all]
turn(x * C), channels from the last place   -> turn(x) * turn(C)                for add, subtract and divide alike
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.ir import Tuple as RelaxTuple

from fusion_patterns.normalise import resizing
from fusion_patterns.normalise.rewrite import Rewriter, op_name

__all__ = [
    "channel_slice",
    "constants_behind_turn",
    "flatten_concat",
    "item_of_split",
    "join_slices",
    "slice_from_the_end",
    "slice_of_concat",
    "whole_slice",
]


def item_of_split(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """One part of a split along the channels as a slice."""
    assert isinstance(expr, relax.TupleGetItem)
    split = at.definition(expr.tuple_value)
    if op_name(split) != "split" or int(split.attrs.axis) not in (1, -3):
        return None
    source = split.args[0]
    whole, part = _channels(source), _channels(expr)
    parts = split.ty.fields
    if whole is None or part is None:
        return None
    first = 0
    for field in parts[: int(expr.index)]:
        size = getattr(field.shape.values[1], "value", None)
        if not isinstance(size, int):
            return None
        first += size
    return channel_slice(source, first, first + part)


def channel_slice(source: relax.Expr, begin: int, end: int) -> relax.Expr:
    """``source[:, begin:end]``."""
    return relax.op.strided_slice(source, axes=[1], begin=[begin], end=[end])


def whole_slice(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """A slice that takes everything."""
    found = _slice_of(expr)
    return found[0] if found is not None and found[1:] == (0, _channels(found[0])) else None


def slice_from_the_end(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """A slice of channels whose bounds are counted from the end, or lie beyond it, with bounds from the front."""
    whole = _channels(expr.args[0])
    bounds = _bounds(expr)
    if whole is None or bounds is None:
        return None
    begin, end = (min(max(bound + whole if bound < 0 else bound, 0), whole) for bound in bounds)
    if (begin, end) == bounds or begin >= end:
        return None
    return channel_slice(expr.args[0], begin, end)


def join_slices(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Slices of one tensor that follow each other in a concat as one slice."""
    assert isinstance(expr, Call)
    parts = at.parts(expr)
    if parts is None or int(expr.attrs.axis) not in (1, -3):
        return None
    joined: list[relax.Expr] = []
    changed = False
    for field in parts:
        mine = _slice_of(at.definition(field))
        before = _slice_of(at.definition(joined[-1])) if joined else None
        if mine and before and mine[0].same_as(before[0]) and mine[1] == before[2]:
            joined[-1] = at.emit(channel_slice(mine[0], before[1], mine[2]))
            changed = True
        else:
            joined.append(field)
    if not changed:
        return None
    return joined[0] if len(joined) == 1 else relax.op.concat(joined, axis=1)


def slice_of_concat(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """A slice of a concat as what it takes of the parts: of one of them, or several that it takes whole."""
    taken = _slice_of(expr)
    if taken is None:
        return None
    source, begin, end = taken
    concat = at.definition(source)
    parts = _parts(at, concat) if op_name(concat) == "concat" and _axis(concat) == 1 else None
    sizes = [_channels(part) for part in parts or ()]
    if parts is None or None in sizes:
        return None
    starts = list(accumulate((size or 0 for size in sizes), initial=0))
    first = max(number for number, start in enumerate(starts[:-1]) if start <= begin)
    alone = at.call_of(source, "concat") is not None
    if end <= starts[first + 1]:
        if not alone:
            at.read_again(parts[first])
        if (begin, end) == (starts[first], starts[first + 1]):
            return parts[first]
        return channel_slice(parts[first], begin - starts[first], end - starts[first])
    if not alone or begin != starts[first] or end not in starts:
        return None
    return relax.op.concat(parts[first : starts.index(end)], axis=1)


def flatten_concat(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """A concat of what only it reads and what was joined along the same axis as one concat.

    Except what one kernel enlarges and joins (:mod:`.resizing`).
    """
    assert isinstance(expr, Call)
    outer = _parts(at, expr)
    if outer is None:
        return None
    flat: list[relax.Expr] = []
    for part in outer:
        inner = at.call_of(part, "concat")
        same = inner is not None and _axis(inner) == _axis(expr) and not resizing.is_group(at, inner)
        flat += _parts(at, inner) or [part] if same and inner is not None else [part]
    return relax.op.concat(flat, axis=_axis(expr)) if len(flat) > len(outer) else None


def _parts(at: Rewriter, concat: Call) -> list[relax.Expr] | None:
    """What a concat joins, if that is known."""
    return at.parts(concat) if _axis(concat) is not None else None


def _axis(concat: Call) -> int | None:
    """The axis of a concat, counted from the front."""
    axis, rank = concat.attrs.axis, concat.ty.ndim
    return None if axis is None or rank < 1 else int(axis) % rank


def constants_behind_turn(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """What an image with its channels last is multiplied with or increased by, behind the turn to channels first.

    The turn is a kernel of its own then, with that as its epilogue, and not the second of two.
    """
    assert isinstance(expr, Call)
    axes = [int(axis) for axis in expr.attrs.axes or ()]
    inner = at.call_of(expr.args[0], "multiply", "add", "subtract", "divide")
    if axes != [0, 3, 1, 2] or inner is None:
        return None
    arrays = [at.constant(arg) for arg in inner.args]
    images = [arg for arg, array in zip(inner.args, arrays, strict=True) if array is None]
    if len(images) != 1 or images[0].ty.ndim != len(axes):
        return None
    operands = []
    for arg, array in zip(inner.args, arrays, strict=True):
        if array is None:
            operands.append(at.emit(relax.op.permute_dims(arg, axes)))
        else:
            whole = array.reshape((1,) * (len(axes) - array.ndim) + array.shape)
            turned = np.ascontiguousarray(whole.transpose(axes)) if array.ndim else array
            operands.append(relax.const(turned, str(array.dtype)))
    return Call(inner.op, operands, inner.attrs)


def _slice_of(expr: relax.Expr) -> tuple[relax.Expr, int, int] | None:
    """(source, begin, end) of a slice of channels with known bounds and step 1."""
    bounds = _bounds(expr)
    if bounds is None:
        return None
    (begin, end), whole = bounds, _channels(expr.args[0])
    return (expr.args[0], begin, end) if whole is not None and 0 <= begin < end <= whole else None


def _bounds(expr: relax.Expr) -> tuple[int, int] | None:
    """(begin, end), as they are written, of a slice of channels with step 1."""
    if not isinstance(expr, Call) or op_name(expr) != "strided_slice" or _channels(expr) is None:
        return None
    numbers = [
        [getattr(n, "value", None) for n in arg.fields]
        for arg in expr.args[1:]
        if isinstance(arg, RelaxTuple)
    ]
    if len(numbers) not in (3, 4) or numbers[0] != [1] or (len(numbers) == 4 and numbers[3] != [1]):
        return None
    begin, end = numbers[1][0], numbers[2][0]
    return (begin, end) if isinstance(begin, int) and isinstance(end, int) else None


def _channels(expr: relax.Expr) -> int | None:
    """The number of channels of a tensor of four static dimensions."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or not hasattr(ty.shape, "values"):
        return None
    dims = [getattr(d, "value", None) for d in ty.shape.values]
    return dims[1] if len(dims) == 4 and all(isinstance(d, int) for d in dims) else None
