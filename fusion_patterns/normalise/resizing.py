"""Rewrites of images that are enlarged, so that fewer kernels enlarge them.

op(x, resize2d(one pixel))                          -> op(x, one pixel)              op is elementwise, x of full size
concat(x, resize2d(a), resize2d(b), y), channels    -> concat(x, concat(resize2d(a), resize2d(b)), y)
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Call

from fusion_patterns.normalise.rewrite import Rewriter, op_name, static_shape

__all__ = ["MOST_ENLARGED", "group_enlarged", "is_group", "one_pixel_operand"]

MOST_ENLARGED = 4
"""So many enlarged parts are joined by one kernel, as the table has it."""


def one_pixel_operand(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """An image of one pixel that was enlarged only to meet a larger one is broadcast instead."""
    assert isinstance(expr, Call)
    for k, arg in enumerate(expr.args):
        resize = at.definition(arg)
        if op_name(resize) != "image.resize2d" or len(expr.args) != 2:
            continue
        attrs, pixel = resize.attrs, resize.args[0]
        # beyond the image the last of these modes has a value of its own
        if str(attrs.layout) != "NCHW" or str(attrs.coordinate_transformation_mode) == "tf_crop_and_resize":
            continue
        shape, full = static_shape(pixel), static_shape(expr.args[1 - k])
        if shape is None or shape[2:] != (1, 1) or full is None or full != static_shape(expr):
            continue
        return Call(expr.op, [pixel if i == k else arg for i, arg in enumerate(expr.args)], expr.attrs)
    return None


def group_enlarged(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Neighbours in a concat of channels that were all enlarged linearly: joined first, by one kernel.

    A convolution that reads the parts of a concat where they are repeats pixels, but does not interpolate them.
    """
    assert isinstance(expr, Call)
    parts = at.parts(expr)
    if parts is None or not _joins_channels(expr):
        return None
    runs: list[list[relax.Expr]] = []
    for part in parts:
        enlarged = _is_enlarged(at, part)
        if runs and enlarged and _is_enlarged(at, runs[-1][0]) and len(runs[-1]) < MOST_ENLARGED:
            runs[-1].append(part)
        else:
            runs.append([part])
    if len(runs) == 1 or len(runs) == len(parts):
        return None
    joined = [run[0] if len(run) == 1 else at.emit(relax.op.concat(run, axis=1)) for run in runs]
    return relax.op.concat(joined, axis=1)


def is_group(at: Rewriter, concat: Call) -> bool:
    """Whether a concat joins only what was enlarged, so that it is better left alone."""
    parts = at.parts(concat)
    return parts is not None and all(_is_enlarged(at, part) for part in parts)


def _is_enlarged(at: Rewriter, part: relax.Expr) -> bool:
    resize = at.call_of(part, "image.resize2d")
    return resize is not None and str(resize.attrs.method) == "linear" and str(resize.attrs.layout) == "NCHW"


def _joins_channels(concat: Call) -> bool:
    return concat.ty.ndim == 4 and concat.attrs.axis is not None and int(concat.attrs.axis) in (1, -3)
