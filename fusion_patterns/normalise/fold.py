"""Constants are folded with NumPy: a call of pure operators whose tensors are all constants becomes one.

TVM's own FoldConstant compiles and runs a kernel for each call, which takes most of a compilation. The
operators in :data:`FOLDS` are those that importers leave on weights and shapes; others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.ir import Tuple as RelaxTuple

from fusion_patterns.normalise.rewrite import Array, Rewriter, constant_of, op_name

Fold = Callable[[Any, Sequence[Any]], Any]
"""(attributes, arguments as arrays, integers, dtypes or lists of them) -> array, or list of arrays."""


def fold_constants(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``op(constants)`` -> constant, unless that makes much more data than it takes in (a broadcast)."""
    assert isinstance(expr, Call)
    fold = FOLDS.get(op_name(expr) or "")
    if fold is None:
        return None
    args = [_literal(at, arg) for arg in expr.args]
    if any(arg is None for arg in args):
        return None
    taken = sum(arg.nbytes for arg in _arrays(args))
    if _bytes(expr.ty) > 4 * taken + 2**20:
        return None
    try:
        with np.errstate(all="ignore"):
            result = fold(expr.attrs, args)
    except (TypeError, ValueError, IndexError, NotImplementedError):
        return None
    fields = result if isinstance(result, list) else [result]
    types = expr.ty.fields if isinstance(expr.ty, relax.TupleType) else [expr.ty]
    if len(fields) != len(types) or not all(map(_has_type, fields, types)):
        return None
    constants = [constant_of(field) for field in fields]
    return RelaxTuple(constants) if isinstance(result, list) else constants[0]


def _literal(at: Rewriter, arg: relax.Expr) -> Any:
    """The NumPy form of an argument, None where it isn't known now."""
    arg = at.definition(arg)
    if isinstance(arg, GenericConst):
        return at.constant(arg)
    if isinstance(arg, tirx.IntImm | tirx.FloatImm):
        return arg.value
    if isinstance(arg, relax.ShapeExpr):
        fixed = all(isinstance(dim, tirx.IntImm) for dim in arg.values)
        return [int(dim) for dim in arg.values] if fixed else None
    if isinstance(arg, RelaxTuple):
        fields = [_literal(at, field) for field in arg.fields]
        return None if any(field is None for field in fields) else fields
    return None


def _arrays(value: Any) -> list[Array]:
    if isinstance(value, np.ndarray):
        return [value]
    return [array for part in value for array in _arrays(part)] if isinstance(value, list) else []


def _bytes(ty: Any) -> int:
    """The size of a tensor (or a tuple of them); too large for any limit where the shape isn't known."""
    if isinstance(ty, relax.TupleType):
        return sum(map(_bytes, ty.fields))
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return 2**62
    if not all(isinstance(dim, tirx.IntImm) for dim in ty.shape.values) or ty.dtype is None:
        return 2**62
    bits = np.dtype(str(ty.dtype)).itemsize if str(ty.dtype) in _NUMPY_DTYPES else 8
    return int(np.prod([int(dim) for dim in ty.shape.values], dtype=np.int64)) * bits


def _has_type(array: Any, ty: Any) -> bool:
    return (
        isinstance(array, np.ndarray)
        and str(array.dtype) == str(ty.dtype)
        and isinstance(ty.shape, relax.ShapeExpr)
        and [int(d) if isinstance(d, tirx.IntImm) else -1 for d in ty.shape.values] == list(array.shape)
    )


_NUMPY_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
}


def _elementwise(function: Callable[..., Any]) -> Fold:
    return lambda attrs, args: np.asarray(function(*args))


def _on_floats(fold: Fold) -> Fold:
    """*fold* for operators that mean something else on integers."""

    def only(attrs: Any, args: Sequence[Any]) -> Any:
        if any(array.dtype.kind != "f" for array in _arrays(list(args))):
            raise NotImplementedError
        return fold(attrs, args)

    return only


def _reduction(function: Callable[..., Any]) -> Fold:
    def fold(attrs: Any, args: Sequence[Any]) -> Any:
        # Added up in float32, and the result in the dtype of what was reduced, as in Relax.
        data = args[0].astype("float32") if args[0].dtype == np.float16 else args[0]
        result = function(data, axis=_axes(attrs.axis), keepdims=bool(attrs.keepdims))
        return np.asarray(result).astype(args[0].dtype)

    return fold


def _split(attrs: Any, args: Sequence[Any]) -> list[Array]:
    where = attrs.indices_or_sections
    sections = int(where) if isinstance(where, int | tirx.IntImm) else [int(i) for i in where]
    return list(np.split(args[0], sections, axis=int(attrs.axis)))


def _strided_slice(attrs: Any, args: Sequence[Any]) -> Array:
    data, axes, begin, end = args[:4]
    strides = args[4] if len(args) > 4 else [1] * len(axes)
    if min(strides) < 1:
        raise NotImplementedError
    index = [slice(None)] * data.ndim
    for axis, *bounds in zip(axes, begin, end, strides, strict=True):
        index[axis] = slice(*bounds)
    return np.asarray(data[tuple(index)])


def _take(attrs: Any, args: Sequence[Any]) -> Array:
    data, indices = args[0], np.asarray(args[1])
    axis = None if attrs.axis is None else int(attrs.axis)
    size = data.size if axis is None else data.shape[axis]
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise NotImplementedError  # what happens out of bounds depends on the mode
    return np.asarray(np.take(data, indices, axis=axis))


def _arange(attrs: Any, args: Sequence[Any]) -> Array:
    return np.arange(*args).astype(str(attrs.dtype))


def _cumsum(attrs: Any, args: Sequence[Any]) -> Array:
    if attrs.exclusive:
        raise NotImplementedError
    dtype = str(attrs.dtype) if attrs.dtype not in (None, "", "void") else args[0].dtype
    return np.cumsum(args[0], None if attrs.axis is None else int(attrs.axis), dtype=dtype)


def _astype(attrs: Any, args: Sequence[Any]) -> Array:
    to = np.dtype(str(attrs.dtype))
    if args[0].dtype.kind == "f" and to.kind in "iu" and not np.all(np.isfinite(args[0])):
        raise NotImplementedError
    return np.asarray(args[0].astype(to))


def _filled(value: int) -> Fold:
    return lambda attrs, args: np.full(args[0], value, dtype=str(attrs.dtype))


def _matmul(attrs: Any, args: Sequence[Any]) -> Array:
    if attrs.out_dtype not in (None, "", "void") and str(attrs.out_dtype) != str(args[0].dtype):
        raise NotImplementedError
    return np.asarray(args[0] @ args[1])


def _instance_norm(attrs: Any, args: Sequence[Any]) -> Array:
    """As TVM computes it, whatever ``scale`` and ``center`` say. Weights are standardised this way."""
    data, gamma, beta = (arg.astype("float64") for arg in args)
    channels = [-1 if i == int(attrs.channel_axis) % data.ndim else 1 for i in range(data.ndim)]
    axes = _axes(attrs.axes)
    out = (data - data.mean(axes, keepdims=True)) / np.sqrt(data.var(axes, keepdims=True) + attrs.epsilon)
    return np.asarray((out * gamma.reshape(channels) + beta.reshape(channels)).astype(args[0].dtype))


def _dequantize(attrs: Any, args: Sequence[Any]) -> Array:
    data, scale, zero = args
    if data.dtype.kind not in "iu" or str(attrs.out_dtype) != "float32":
        raise NotImplementedError
    along = [-1 if i == int(attrs.axis) % data.ndim else 1 for i in range(data.ndim)]
    scale, zero = (value.reshape(along if value.size > 1 else ()) for value in (scale, zero))
    return np.asarray((data.astype("int32") - zero).astype("float32") * scale.astype("float32"))


def _axes(axes: Any) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(axis) for axis in axes)


_ALIKE = (
    *("add", "subtract", "multiply", "abs", "negative", "where"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_not", "bitwise_not"),
)
_ALIKE_ON_FLOATS = (
    *(
        "divide",
        "floor_divide",
        "power",
        "sqrt",
        "exp",
        "log",
        "tanh",
        "sin",
        "cos",
        "square",
        "floor",
        "ceil",
    ),
    *("isnan", "isinf", "isfinite"),
)

FOLDS: dict[str, Fold] = {
    **{name: _elementwise(getattr(np, name)) for name in _ALIKE},
    **{name: _on_floats(_elementwise(getattr(np, name))) for name in _ALIKE_ON_FLOATS},
    "rsqrt": _on_floats(_elementwise(lambda x: (1 / np.sqrt(x)).astype(x.dtype))),
    "sigmoid": _on_floats(_elementwise(lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype))),
    # TVM's comparisons give the second operand where the first is NaN.
    "maximum": _elementwise(lambda a, b: np.where(a > b, a, b)),
    "minimum": _elementwise(lambda a, b: np.where(a < b, a, b)),
    "nn.relu": _elementwise(lambda x: np.where(x > 0, x, x.dtype.type(0))),
    "mean": _on_floats(_reduction(np.mean)),
    "sum": _reduction(np.sum),
    "max": _reduction(np.max),
    "min": _reduction(np.min),
    "prod": _reduction(np.prod),
    "arange": _arange,
    "astype": _astype,
    "broadcast_to": lambda attrs, args: np.broadcast_to(args[0], args[1]),
    "concat": lambda attrs, args: np.concatenate(args[0], None if attrs.axis is None else int(attrs.axis)),
    "cumsum": _cumsum,
    "dequantize": _dequantize,
    "expand_dims": lambda attrs, args: np.expand_dims(args[0], _axes(attrs.axis) or ()),
    "full": lambda attrs, args: np.full(args[0], args[1], dtype=str(attrs.dtype or args[1].dtype)),
    "matmul": _matmul,
    "nn.instance_norm": _instance_norm,
    "ones": _filled(1),
    "permute_dims": lambda attrs, args: np.transpose(args[0], _axes(attrs.axes)),
    "reshape": lambda attrs, args: np.reshape(args[0], args[1]),
    "split": _split,
    "squeeze": lambda attrs, args: np.squeeze(args[0], _axes(attrs.axis)),
    "strided_slice": _strided_slice,
    "take": _take,
    "zeros": _filled(0),
}
"""Operator (without ``relax.``) -> how NumPy says it. Left out: what NumPy and TVM do differently."""
