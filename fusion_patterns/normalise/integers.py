"""Rounding to integers and back, said in floats, so that rows can take it along with what is around it.

    dequantize(quantize(x, s, z), t, u)  ->  multiply(subtract(clip(add(round(divide(x, s)), z), low, high), u), t)

Exact: integers of 16 bits and their differences are floats of 32 bits, and TVM rounds and cuts off in floats too. The
integers must have no other reader.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import Call

from fusion_patterns.normalise.rewrite import Array, Rewriter, constant_of

__all__ = ["along", "round_trip"]

_SMALL = ("int8", "uint8", "int16", "uint16")


def round_trip(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``dequantize(quantize(x))`` of constant scales and zero points in float32."""
    assert isinstance(expr, Call)
    quantize = at.call_of(expr.args[0], "quantize")
    if quantize is None or str(quantize.attrs.out_dtype) not in _SMALL:
        return None
    data = quantize.args[0]
    if str(data.ty.dtype) != "float32" or str(expr.ty.dtype) != "float32" or data.ty.ndim < 1:
        return None
    numbers = [at.constant(arg) for arg in (*quantize.args[1:3], *expr.args[1:3])]
    if any(value is None for value in numbers):
        return None
    axes = [int(call.attrs.axis) for call in (quantize, quantize, expr, expr)]
    scale, zero, back, origin = (
        along(np.asarray(value, "float32"), axis, data.ty.ndim)
        for value, axis in zip(numbers, axes, strict=True)
    )
    if not all(np.all(np.isfinite(each)) and np.all(np.sign(each) == 1) for each in (scale, back)):
        return None
    held = np.iinfo(str(quantize.attrs.out_dtype))
    value = at.emit(relax.op.round(at.emit(relax.op.divide(data, constant_of(scale)))))
    if zero.any():
        value = at.emit(relax.op.add(value, constant_of(zero)))
    value = at.emit(relax.op.clip(value, float(held.min), float(held.max)))
    if origin.any():
        value = at.emit(relax.op.subtract(value, constant_of(origin)))
    return relax.op.multiply(value, constant_of(back))


def along(number: Array, axis: int, rank: int) -> Array:
    """A scalar, or a vector along *axis* of a tensor of *rank*, in a shape that broadcasts."""
    shape = [-1 if i == axis % rank else 1 for i in range(rank)] if number.size > 1 else []
    return number.reshape(shape)
