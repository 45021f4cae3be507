"""Inference form: what every importer writes differently, written one way.

Each function of the module goes into dataflow blocks, and then through these rewrites, until none applies:

    batch_norm(x, constants)[0]          -> add(multiply(x, S), T)
    batch_norm(x, ...)[1], [2]           -> the running statistics
    multiply(conv(x, W) + B, S)          -> conv(x, S * W) + S * B
    add(conv(x, W) + B, C)               -> conv(x, W) + (B + C), of shape (1, O, 1, 1)
    conv(pad(x, zeros), W)               -> conv(x, W, padding)
    add(add(x, A), B), multiply alike    -> add(x, A + B)                            (:mod:`.affine`)
    conv(x, W) + conv(x, V)              -> conv(x, W + V)           also with x * S instead of the second
    call_tir(elementwise kernel, args)   -> the Relax operators that it computes     (:mod:`.recognise`)
    maximum(x, 0)                        -> relu(x)
    minimum(maximum(x, low), high)       -> clip(x, low, high)        also in the other order, and from relu
    clip(clip(x, a, b), c, d)            -> clip(x, max(a, c), min(b, d))
    dropout(x)[0]                        -> x
    avg_pool2d, one window, the image    -> mean over the image
    mean over the image                  -> mean that keeps its axes, reshape
    adaptive_avg_pool2d, equal windows   -> avg_pool2d; x if each is one element
    op(constants)                        -> constant                                 (:mod:`.fold`)
    dequantize(quantize(x))              -> the same in floats                       (:mod:`.integers`)
    (a, b)[0]                            -> a
    split(x, channels)[i]                -> strided_slice(x, ...)                    (:mod:`.channels`)
    concat(x[a:b], x[b:c]), channels     -> x[a:c]
    concat(a, concat(b, c)), one axis    -> concat(a, b, c)
    concat(a, b, c)[channels of a part]  -> the part, or a slice of it; whole parts -> concat of them
    concat(x, enlarged a, enlarged b)    -> concat(x, concat(enlarged a, enlarged b))  (:mod:`.resizing`)
    x + enlarged pixel                   -> x + pixel
    turn(x * C), to channels first       -> turn(x) * turn(C)
    sum(stack(a, b, c)), that axis       -> a + b + c                                (:mod:`.sums`)
    reshape, astype, broadcast_to, permute_dims that change nothing -> their input
    expand_dims, squeeze                 -> reshape
    reshape(reshape(x))                  -> reshape(x)

    channels put last for a while        -> where they were                          (:mod:`.channels_last`)

Then dead values go. What is not touched: functions that are already somebody's composite, batch norm in
training form, parameters and results, and the meaning: numbers stay within the rounding of float32.

NaN: TVM's maximum and minimum give their second operand when the first is NaN, whatever the order in which
``clip`` applies them. So clipping a NaN gives one of the two bounds, before these rewrites and after, but not
always the same one.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.ir import Tuple as RelaxTuple
from tvm_ffi import structural_equal

from fusion_patterns.normalise import affine, channels, integers, resizing, sums
from fusion_patterns.normalise.channels_last import channels_first
from fusion_patterns.normalise.fold import fold_constants
from fusion_patterns.normalise.recognise import recognise_call_tir
from fusion_patterns.normalise.rewrite import Rewriter, Rule, is_composite, op_name, static_shape


def normalise(mod: tvm.IRModule) -> tvm.IRModule:
    """*mod* in inference form: the same functions, parameters and results. *mod* itself is not changed."""
    out = relax.transform.ConvertToDataflow(min_size=1)(mod.clone())
    for gv, func in list(out.functions.items()):
        if isinstance(func, relax.Function) and not is_composite(func):
            func = Rewriter(out, _RULES).function(func)
            moved = channels_first(func)
            if moved is not func:
                # what is dead would count as a reader of what it reads
                func = Rewriter(out, _RULES).function(relax.analysis.remove_all_unused(moved))
            out.update_func(gv, func)
    passes = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination(_roots(mod))]
    out = tvm.transform.Sequential(passes)(out)
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function) and is_composite(func):
            out.update_func(gv, func)  # the passes of TVM went through these as well
    return out


def _roots(mod: tvm.IRModule) -> list[str]:
    """Functions that nobody needs to call to be needed: public ones and finished composites."""
    return [
        gv.name_hint
        for gv, func in mod.functions.items()
        if "global_symbol" in (func.attrs or {}) or (isinstance(func, relax.Function) and is_composite(func))
    ]


def _dropout_item(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    assert isinstance(expr, relax.TupleGetItem)
    dropout = at.definition(expr.tuple_value)
    return dropout.args[0] if op_name(dropout) == "nn.dropout" and expr.index == 0 else None


def _item_of_tuple(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    assert isinstance(expr, relax.TupleGetItem)
    whole = at.definition(expr.tuple_value)
    return whole.fields[expr.index] if isinstance(whole, RelaxTuple) else None


def _unchanged(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Operators whose result differs from their input at most in its type: the type says if it does."""
    assert isinstance(expr, Call)
    return expr.args[0] if structural_equal(expr.args[0].ty, expr.ty) else None


def _equal_windows(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """An adaptive pool whose windows are all of one size, and more than one of them, as a plain pool."""
    assert isinstance(expr, Call)
    source, result = static_shape(expr.args[0]), static_shape(expr)
    if source is None or result is None or str(expr.attrs.layout) != "NCHW":
        return None
    window = [own // out for own, out in zip(source[2:], result[2:], strict=True) if out and own % out == 0]
    if len(window) != 2 or result[2:] == (1, 1):
        return None
    return relax.op.nn.avg_pool2d(expr.args[0], pool_size=window, strides=window)


def _whole_window(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """An average pool with one window, the image, as a mean."""
    assert isinstance(expr, Call)
    source, attrs = static_shape(expr.args[0]), expr.attrs
    if source is None or len(source) != 4 or str(attrs.layout) != "NCHW" or any(map(int, attrs.padding)):
        return None
    if tuple(map(int, attrs.pool_size)) != source[2:] or str(attrs.out_layout) not in ("NCHW", ""):
        return None
    if source[2:] == (1, 1) or any(int(d) != 1 for d in attrs.dilation):
        return None
    return relax.op.mean(expr.args[0], [2, 3], keepdims=True)


def _unmoved(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``permute_dims`` to the order that is there."""
    assert isinstance(expr, Call)
    axes = expr.attrs.axes
    return expr.args[0] if axes is not None and list(map(int, axes)) == list(range(len(axes))) else None


def _as_reshape(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """An operator that adds axes of one element to what has the rank of an image at most, or drops some."""
    assert isinstance(expr, Call)
    shape, source = static_shape(expr), static_shape(expr.args[0])
    # a volume is an image's channels as its depth: `lrn.chain` names how it gets there and back
    if shape is None or source is None or max(len(shape), len(source)) > len("NCHW"):
        return None
    return relax.op.reshape(expr.args[0], expr.ty.shape)


def _join_reshapes(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """The second of two reshapes, of what the first one reshapes."""
    inner = at.call_of(expr.args[0], "reshape")
    if inner is None or static_shape(inner.args[0]) is None or static_shape(expr) is None:
        return None
    return relax.op.reshape(inner.args[0], expr.ty.shape)


def _scalar(at: Rewriter, expr: relax.Expr) -> float | None:
    value = at.constant(expr)
    return float(value) if value is not None and value.ndim == 0 and value.dtype.kind == "f" else None


def _range_of(at: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, float, float] | None:
    """``(x, low, high)`` of a call that keeps x between two bounds, either of which may be infinite."""
    name = op_name(expr)
    if name == "nn.relu":
        return expr.args[0], 0.0, math.inf
    if name == "clip":
        bounds = expr.args[1:]
        if not all(isinstance(bound, tirx.IntImm | tirx.FloatImm) for bound in bounds):
            return None
        return expr.args[0], float(bounds[0].value), float(bounds[1].value)
    if name in ("maximum", "minimum"):
        for x, bound in ((expr.args[0], expr.args[1]), (expr.args[1], expr.args[0])):
            value = _scalar(at, bound)
            if value is not None and not math.isnan(value):
                return (x, value, math.inf) if name == "maximum" else (x, -math.inf, value)
    return None


_RANGES = ("nn.relu", "clip", "maximum", "minimum")


def _join_ranges(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """One ``relu`` or ``clip`` for bounds that follow each other; no bound at all for infinite ones."""
    outer = _range_of(at, expr)
    if outer is None or str(expr.ty.dtype) not in ("float16", "float32", "float64"):
        return None
    x, low, high = outer
    if (low, high) == (-math.inf, math.inf):
        return x
    inner = _range_of(at, at.call_of(x, *_RANGES)) if at.call_of(x, *_RANGES) is not None else None
    if inner is not None:
        x = inner[0]
        # Bounds that don't meet leave one value, which of them depends on the order.
        if max(inner[1], low) > min(inner[2], high):
            return None
        low, high = max(inner[1], low), min(inner[2], high)
    if (low, high) == (0.0, math.inf):
        return None if op_name(expr) == "nn.relu" and inner is None else relax.op.nn.relu(x)
    if inner is not None and math.isfinite(low) and math.isfinite(high):
        return relax.op.clip(x, low, high)
    return None


def _one_pixel(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """The mean of an image's pixels as an image of one pixel, seen without its last axes: a kernel knows that form."""
    assert isinstance(expr, Call)
    attrs, source = expr.attrs, expr.args[0].ty
    axes = sorted(int(axis) % 4 for axis in attrs.axis or ()) if source.ndim == 4 else []
    if axes != [2, 3] or attrs.keepdims or expr.ty.shape is None:
        return None
    return relax.op.reshape(at.emit(relax.op.mean(expr.args[0], [2, 3], keepdims=True)), expr.ty.shape)


_RULES: dict[str, list[Rule]] = {
    "tuple_get_item": [affine.batch_norm_item, _dropout_item, _item_of_tuple, channels.item_of_split],
    "multiply": [affine.scale_into_weights, affine.join_constants, resizing.one_pixel_operand],
    "divide": [affine.scale_into_weights],
    "add": [affine.merge_biases, affine.join_constants, affine.join_branches, resizing.one_pixel_operand],
    "subtract": [affine.merge_biases],
    "nn.conv2d": [affine.pad_into_convolution],
    "call_tir": [recognise_call_tir],
    "permute_dims": [_unmoved, channels.constants_behind_turn],
    "mean": [_one_pixel],
    "sum": [sums.sum_of_parts],
    "nn.avg_pool2d": [_whole_window],
    "dequantize": [integers.round_trip],
    "nn.adaptive_avg_pool2d": [_unchanged, _equal_windows],
    "concat": [channels.flatten_concat, channels.join_slices, resizing.group_enlarged],
    "strided_slice": [channels.slice_from_the_end, channels.whole_slice, channels.slice_of_concat],
    **{name: [_join_ranges] for name in _RANGES},
    "reshape": [_unchanged, _join_reshapes],
    **{name: [_as_reshape] for name in ("expand_dims", "squeeze")},
    **{name: [_unchanged] for name in ("astype", "broadcast_to")},
    "*": [fold_constants],
}
"""Operator -> what to try, in this order; ``*`` comes last."""
