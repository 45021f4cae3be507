"""A ``call_tir`` whose PrimFunc computes what Relax operators say becomes those operators.

Importers write some activations as TIR (ONNX ``Clip`` is a maximum and a minimum kernel), where no table over
Relax operators can see them. The PrimFunc's body is read, never its name:

- one loop nest over the whole output, each element computed from the elements of the arguments at the same
  place (or broadcast, as NumPy would): the expression tree becomes a tree of Relax operators, if each of its
  nodes is exactly what TVM makes of some Relax operator;
- a padding with one value: compared, as a whole, with what TVM makes of ``nn.pad``.

Anything else, and anything on integers where the two may differ, stays a ``call_tir``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, s_tir, te, tirx, topi
from tvm.ir import Call, TensorLoad
from tvm.ir import Tuple as RelaxTuple
from tvm_ffi import structural_equal

from fusion_patterns.normalise.rewrite import Rewriter

_MOST_OPS = 12  # a body of more operators is somebody's own kernel, better left whole
_FLOATS = ("float16", "float32", "float64")

_BINARY: dict[str, Callable[[relax.Expr, relax.Expr], relax.Expr]] = {
    "Add": relax.op.add,
    "Sub": relax.op.subtract,
    "Mul": relax.op.multiply,
    "Div": relax.op.divide,
    "Max": relax.op.maximum,
    "Min": relax.op.minimum,
    "pow": relax.op.power,
}
_UNARY: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "exp": relax.op.exp,
    "log": relax.op.log,
    "sqrt": relax.op.sqrt,
    "rsqrt": relax.op.rsqrt,
    "sigmoid": relax.op.sigmoid,
    "tanh": relax.op.tanh,
    "sin": relax.op.sin,
    "cos": relax.op.cos,
    "erf": relax.op.erf,
    "fabs": relax.op.abs,
    "floor": relax.op.floor,
    "ceil": relax.op.ceil,
    "nearbyint": relax.op.round,
}


class _Unknown(Exception):
    """The PrimFunc is not one that Relax operators can say."""


def recognise_call_tir(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``call_tir(kernel, args)`` -> the same in Relax operators, or None."""
    assert isinstance(expr, Call)
    args = expr.args[1]
    kernel = at.mod.functions.get(expr.args[0])
    fits = isinstance(kernel, tirx.PrimFunc) and isinstance(args, RelaxTuple) and len(expr.args) == 2
    if not fits or len(kernel.params) != len(args.fields) + 1 or not isinstance(expr.ty, relax.TensorType):
        return None
    try:
        return _Elementwise(at, kernel, list(args.fields), str(expr.ty.dtype)).rewritten()
    except _Unknown:
        return _padding(kernel, args.fields)


class _Elementwise:
    """Reads one PrimFunc and says its body in Relax, or raises :class:`_Unknown`."""

    def __init__(self, at: Rewriter, kernel: tirx.PrimFunc, args: list[relax.Expr], dtype: str) -> None:
        self._at, self._dtype = at, dtype
        *inputs, self._output = kernel.params
        self._args = dict(zip(inputs, args, strict=True))
        self._body, self._axes = self._single_block(kernel.body)
        self._ops = 0

    def rewritten(self) -> relax.Expr:
        if self._dtype not in _FLOATS:
            raise _Unknown
        store = self._body
        if not store.buffer.same_as(self._output):
            raise _Unknown
        if len(store.indices) != len(self._axes) or not _all_same(store.indices, self._axes):
            raise _Unknown
        said = self._count(store.value)
        if said > _MOST_OPS or not self._reads_full_shape(store.value):
            raise _Unknown
        return self._say(store.value)

    def _single_block(self, body: Any) -> tuple[Any, list[Any]]:
        """The one store of a perfect nest over the whole output, and the variables of its axes."""
        if not isinstance(body, s_tir.SBlockRealize) or body.iter_values or body.block.alloc_buffers:
            raise _Unknown
        inner, loops = body.block.body, []
        while isinstance(inner, tirx.For):
            if int(inner.kind) != tirx.ForKind.SERIAL or not _is_int(inner.min, 0):
                raise _Unknown
            loops.append(inner)
            inner = inner.body
        if not isinstance(inner, s_tir.SBlockRealize) or not _is_int(inner.predicate, 1):
            raise _Unknown
        block = inner.block
        plain = block.init is None and not block.alloc_buffers and not block.match_buffers
        whole = _all_equal([loop.extent for loop in loops], list(self._output.ty.shape))
        mapped = _all_same(inner.iter_values, [loop.loop_var for loop in loops])
        spatial = all(int(axis.iter_type) == tirx.IterVar.DataPar for axis in block.iter_vars)
        if not (plain and whole and mapped and spatial and isinstance(block.body, tirx.BufferStore)):
            raise _Unknown
        return block.body, [axis.var for axis in block.iter_vars]

    def _count(self, value: Any) -> int:
        """How many operators *value* has."""
        if isinstance(value, TensorLoad | tirx.FloatImm | tirx.IntImm):
            return 0
        return 1 + sum(map(self._count, _children(value)))

    def _reads_full_shape(self, value: Any) -> bool:
        """Whether some argument has the output's shape, so that the operators' result has it too."""
        if isinstance(value, TensorLoad):
            return len(value.indices) == len(self._axes) and _all_same(value.indices, self._axes)
        return any(map(self._reads_full_shape, _children(value)))

    def _say(self, value: Any) -> relax.Expr:
        """The Relax call for *value*; what it reads is bound in front of it."""
        if isinstance(value, tirx.FloatImm) and str(value.ty) == self._dtype:
            return relax.const(value.value, self._dtype)
        if isinstance(value, TensorLoad):
            return self._load(value)
        for say in (self._say_activation, self._say_operator):
            call = say(value)
            if call is not None:
                return call
        raise _Unknown

    def _said(self, value: Any) -> relax.Expr:
        said = self._say(value)
        return self._at.emit(said) if isinstance(said, Call) else said

    def _load(self, load: Any) -> relax.Expr:
        """An argument read at the place that NumPy's broadcasting reads it."""
        arg = self._args.get(load.source)
        if arg is None or str(load.source.ty.dtype) != self._dtype:
            raise _Unknown
        shape = list(load.source.ty.shape)
        axes = self._axes[len(self._axes) - len(shape) :]
        if len(shape) > len(self._axes):
            raise _Unknown
        for index, axis, extent in zip(load.indices, axes, shape, strict=True):
            if not (index.same_as(axis) or (_is_int(index, 0) and _is_int(extent, 1))):
                raise _Unknown
        return arg

    def _say_activation(self, value: Any) -> relax.Expr | None:
        """Shapes of more than one node for which Relax has one operator."""
        kind = _operator(value)
        if kind == "Max" and _is_float(value.b, 0.0):
            return relax.op.nn.relu(self._said(value.a))
        if kind == "Max" and _operator(value.a) == "Min":
            low, high = value.b, value.a.b
            if isinstance(low, tirx.FloatImm) and isinstance(high, tirx.FloatImm):
                return relax.op.clip(self._said(value.a.a), low.value, high.value)
        if kind == "Select":
            test, then, other = value.condition, value.true_value, value.false_value
            tested = _operator(test) == "LT" and _is_float(test.a, 0.0)
            scaled = _operator(other) == "Mul" and isinstance(other.b, tirx.FloatImm)
            if tested and scaled and structural_equal(test.b, then) and structural_equal(other.a, then):
                return relax.op.nn.leakyrelu(self._said(then), other.b.value)
        return None

    def _say_operator(self, value: Any) -> relax.Expr | None:
        if str(value.ty) != self._dtype:
            return None
        name, parts = _operator(value), _children(value)
        if name in _UNARY and len(parts) == 1:
            return _UNARY[name](self._said(parts[0]))
        if name in _BINARY and len(parts) == 2:
            return _BINARY[name](*map(self._said, parts))
        return None


def _operator(value: Any) -> str:
    """``Max``, ``Select`` and the like for nodes of their own, ``exp`` for a call of ``tirx.exp``."""
    if isinstance(value, Call):
        return str(getattr(value.op, "name", "")).rpartition(".")[2]
    return type(value).__name__


def _children(value: Any) -> list[Any]:
    if isinstance(value, Call):
        return list(value.args)
    if _operator(value) == "Select":
        return [value.condition, value.true_value, value.false_value]
    return [value.a, value.b] if hasattr(value, "a") and hasattr(value, "b") else []


def _padding(kernel: tirx.PrimFunc, args: Any) -> relax.Expr | None:
    """``nn.pad`` of the first argument, if *kernel* is what TVM makes of that."""
    if len(args) != 1:
        return None
    source, target = kernel.params
    body: Any = kernel.body
    while not isinstance(body, tirx.BufferStore):
        body = getattr(body, "block", body)
        body = getattr(body, "body", None)
        if body is None:
            return None
    value = body.value
    if _operator(value) != "if_then_else" or not isinstance(value.args[1], TensorLoad):
        return None
    filler, shape, padded = value.args[2], list(source.ty.shape), list(target.ty.shape)
    fixed = all(isinstance(dim, tirx.IntImm) for dim in shape + padded) and len(shape) == len(padded)
    if not fixed or not isinstance(filler, tirx.FloatImm | tirx.IntImm):
        return None
    before = [_offset(index) for index in value.args[1].indices]
    after = [int(p) - int(s) - b for s, p, b in zip(shape, padded, before, strict=True)]
    if min(before + after) < 0:
        return None
    data = te.placeholder(shape, str(source.ty.dtype))
    made = te.create_prim_func([data, topi.nn.pad(data, before, after, filler)], index_dtype_override="int64")
    if not structural_equal(made.body, kernel.body, map_free_vars=True):
        return None
    widths = [width for pair in zip(before, after, strict=True) for width in pair]
    return relax.op.nn.pad(args[0], widths, "constant", float(filler.value))


def _offset(index: Any) -> int:
    """*n* of an index ``v - n``."""
    return int(index.b) if _operator(index) == "Sub" and isinstance(index.b, tirx.IntImm) else 0


def _is_int(value: Any, wanted: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == wanted


def _is_float(value: Any, wanted: float) -> bool:
    return isinstance(value, tirx.FloatImm) and float(value.value) == wanted


def _all_same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(a.same_as(b) for a, b in zip(left, right, strict=True))


def _all_equal(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(structural_equal(a, b) for a, b in zip(left, right, strict=True))
