"""Placed composites -> composites of ``call_tir`` on packed PrimFuncs, buffers in their scopes.

    R.nn.conv2d(x, w)   ->  R.call_tir(conv2d, (x_nchw4c, w_oihw4i4o))
    R.add(lv, b)        ->  R.call_tir(add, (lv_packed, b))

The source views at a composite's edge (``layout_transform`` and what crops it) disappear: a packed kernel reads the
packed operand itself. Where the result's layout is not the computed one (conversions) a pack or unpack is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from ..place.anchors import ROW_RANK, NotPacked
from ..place.calls import op_name, static_shape, tensor_args
from ..place.layouts import DATA, PLAIN
from ..place.needs import ELEMENTWISE, FLATTENS, MOVES, leading_moves
from ..place.rewrite import LAYOUTS_ATTR, RESULT, VIEWS_ATTR
from .compute import packed
from .compute.convolution import conv2d, conv2d_transpose
from .compute.dense import dense, elementwise_rows
from .compute.front import Front, fronts_of, on_front
from .compute.group_norm import group_norm
from .compute.layer_norm import layer_norm
from .compute.packed import Packed
from .compute.pooling import adaptive_pool, channel_pool, global_pool, pads_of, pool2d, window_max
from .compute.scalars import scalar_expression

__all__ = ["legalize_composites"]

DATA_RANK = 4

CONVOLUTION, MAXIMUM = "relax.nn.conv2d", "relax.nn.max_pool2d"

_Margin = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Value:
    """A tensor inside the composite: the variable that holds it, its layout and its source shape."""

    var: Any
    layout: str
    shape: tuple[int, ...]
    masked: bool


def legalize_composites(mod: tvm.IRModule) -> tvm.IRModule:
    """Legalize every placed composite of the module; everything else stays as it is.

    Raises :class:`NotPacked` for an op without a packed form (placement refuses such composites before).
    """
    builder = relax.BlockBuilder(mod)
    for gv, func in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(func, relax.Function) and func.attrs and LAYOUTS_ATTR in func.attrs:
            builder.update_func(gv, _Legalizer(builder, func).run())
    return relax.transform.Normalize()(builder.get())


class _Legalizer:
    def __init__(self, builder: Any, func: Any) -> None:
        self.builder, self.func = builder, func
        self.layouts = {str(k): str(v) for k, v in func.attrs[LAYOUTS_ATTR].items()}
        self.bindings: list[Any] = []
        self.values: dict[Any, _Value] = {}
        self.margins: dict[Any, _Margin] = {}
        """See :func:`_margins`."""
        self.params = [relax.Var(p.name, p.ty) for p in func.params]
        self.fronts: dict[Any, Front] = {}

    def run(self) -> Any:
        for old, new in zip(self.func.params, self.params, strict=True):
            name = self.layouts[new.name]
            shape = static_shape(new)
            if shape is None:
                raise NotPacked(f"parameter `{new.name}` has no static shape", new.name)
            self.values[old] = _Value(new, name, shape, masked=True)
        bindings = [binding for block in self.func.body.blocks for binding in block.bindings]
        views = int(self.func.attrs[VIEWS_ATTR])
        self.margins = _margins(bindings[views:])
        self.fronts, between = fronts_of(bindings[views:])
        moves = leading_moves(bindings[views:])
        for number, binding in enumerate(bindings):
            if binding.var in between or views <= number < views + moves - 1:
                continue
            if number < views:
                value = self._view(binding)
            elif number < views + moves:
                value = self._move(bindings[views : number + 1])
            else:
                value = self._binding(binding.var, binding.value)
            self.values[binding.var] = value
        result = self._result(self.values[self.func.body.body])
        if not result.var.same_as(self.bindings[-1].var):
            raise NotPacked("the composite's result is not its last value", result.var.name)
        out = relax.Var("out", self.func.body.body.ty)
        self.bindings[-1] = relax.VarBinding(out, self._into_scope(self.bindings[-1].value, out))
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], out)
        return relax.Function(self.params, body, out.ty, True, self.func.attrs)

    def _view(self, binding: Any) -> _Value:
        """A source view of a packed parameter: the parameter itself, with the source's shape."""
        shape = static_shape(binding.var)
        assert shape is not None
        return replace(self.values[binding.value.args[0]], shape=shape)

    def _binding(self, var: Any, call: Any) -> _Value:
        if isinstance(call, relax.Var):
            return self.values[call]
        op = op_name(call)
        if op == "relax.layout_transform":
            return self.values[call.args[0]]  # the packing at the end: see _result
        if op == "relax.permute_dims" and len(var.ty.shape.values) == DATA_RANK:
            return self._turn(call, var)
        if var in self.fronts:
            return self._front(self.fronts[var], var)
        if op == "relax.reshape" and len(self.values[call.args[0]].shape) == ROW_RANK:
            return self._pixel(call, var)
        if op in MOVES:
            return self._shuffle(call, var)
        if op in (*FLATTENS, "relax.expand_dims"):
            # one pixel as a row (see dense), or the channels as the depth of a volume and back
            return self.values[call.args[0]]
        if op == "relax.nn.avg_pool3d":
            value = self._masked(self._packed(op, 0, self.values[call.args[0]]))
            dtype = str(var.ty.dtype)
            return self._emit(
                lambda x: channel_pool(x, call.attrs), [value], DATA, value.shape, dtype, masked=False
            )
        shape = static_shape(var)
        assert shape is not None
        return self._compute(op, call, [self.values[arg] for arg in tensor_args(call)], shape, var)

    def _turn(self, call: Any, var: Any) -> _Value:
        """The result, written plain in another order of axes."""
        value, axes = self.values[call.args[0]], tuple(int(axis) for axis in call.attrs.axes)
        shape, dtype = static_shape(var), str(var.ty.dtype)
        assert shape is not None
        return self._emit(lambda x: packed.unpack(x, axes), [value], PLAIN, shape, dtype, masked=True)

    def _pixel(self, call: Any, var: Any) -> _Value:
        """A row (N, C) as an image of one pixel."""
        row = self.values[call.args[0]]
        dtype = str(var.ty.dtype)
        return self._emit(packed.pixel, [row], DATA, (*row.shape, 1, 1), dtype, masked=False)

    def _shuffle(self, call: Any, var: Any) -> _Value:
        """The three steps of a channel shuffle: the last computes, those before it only say between how many groups."""
        value = self.values[call.args[0]]
        before = static_shape(call.args[0])
        if before is None or len(before) == len(value.shape) or op_name(call) != "relax.reshape":
            return value
        groups, dtype = before[2], str(var.ty.dtype)
        return self._emit(
            lambda x: packed.shuffle(x, groups), [self._masked(value)], DATA, value.shape, dtype, masked=False
        )

    def _front(self, front: Front, var: Any) -> _Value:
        """What meets the first channels of a value only."""
        args = tensor_args(front.call)
        place = next(number for number, arg in enumerate(args) if arg.same_as(front.front))
        expression = scalar_expression(front.call)
        if expression is None:
            raise NotPacked(f"no packed kernel for {op_name(front.call)}", str(var.name))
        values = [self.values[front.value if number == place else arg] for number, arg in enumerate(args)]
        shape, dtype = values[place].shape, str(var.ty.dtype)

        def tensor(*operands: Packed) -> te.Tensor:
            return on_front(expression, list(operands), place, front.channels)

        return self._emit(tensor, values, DATA, shape, dtype, masked=False)

    def _move(self, bindings: list[Any]) -> _Value:
        """Reshapes and transpositions of a plain tensor as one look-up."""
        source, last = bindings[0].value.args[0], bindings[-1].var
        steps = [
            (
                static_shape(binding.value.args[0]) or (),
                static_shape(binding.var) or (),
                [int(axis) for axis in binding.value.attrs.axes or range(binding.var.ty.ndim)[::-1]]
                if op_name(binding.value) == "relax.permute_dims"
                else None,
            )
            for binding in bindings
        ]
        shape = steps[-1][1]
        return self._emit(
            lambda x: packed.move(x, steps),
            [self.values[source]],
            DATA,
            shape,
            str(last.ty.dtype),
            masked=False,
        )

    def _compute(self, op: str, call: Any, values: list[_Value], shape: tuple[int, ...], var: Any) -> _Value:
        """One op on packed operands."""
        dtype, margin = str(var.ty.dtype), self.margins.get(var)
        if margin is not None:
            top, left, bottom, right = margin
            shape = (*shape[:2], shape[2] + top + bottom, shape[3] + left + right)
        emit = _emitter(op, margin, self.margins.get(call.args[0]))
        if emit is not None:
            # zero weights do not hide what stands in lanes beyond the last channel: 0 * inf is not 0
            values = [self._masked(self._packed(op, number, value)) for number, value in enumerate(values)]

        def tensor(*operands: Packed) -> te.Tensor:
            if emit is not None:
                return emit(list(operands), call, shape, dtype)
            expression = scalar_expression(call)
            if expression is None:
                raise NotPacked(f"no packed kernel for {op}", str(var.name))
            if len(shape) == ROW_RANK:
                return elementwise_rows(expression, list(operands), shape, op.rsplit(".", 1)[-1])
            return packed.elementwise(expression, list(operands), shape, op.rsplit(".", 1)[-1])

        if len(shape) == ROW_RANK and op != "relax.mean":
            return self._emit(tensor, values, PLAIN, shape, dtype, masked=True)
        # a mean that drops the image's dimensions is packed like any other
        shape = (*shape, 1, 1)[:DATA_RANK]
        return self._emit(tensor, values, DATA, shape, dtype, masked=False)

    def _packed(self, op: str, number: int, value: _Value) -> _Value:
        """An anchor's data in packed layout: what placement left plain is gathered as it is read."""
        is_weight = op.startswith("relax.nn.conv2d") and number == 1
        if value.layout != PLAIN or is_weight or op == "relax.matmul":
            return value
        dtype = str(value.var.ty.dtype)
        return self._emit(lambda v: packed.pack(v, DATA), [value], DATA, value.shape, dtype, masked=True)

    def _result(self, value: _Value) -> _Value:
        """The composite's result in the layout that the caller gets, its unused lanes zero."""
        wanted = self.layouts[RESULT]
        dtype = str(value.var.ty.dtype)
        if value.layout != wanted:
            if value.layout != PLAIN:
                return self._emit(packed.unpack, [value], PLAIN, value.shape, dtype, masked=True)
            return self._emit(
                lambda v: packed.pack(v, wanted), [value], wanted, value.shape, dtype, masked=True
            )
        value = self._masked(value)
        if value.var in self.params:
            return self._emit(packed.copy, [value], value.layout, value.shape, dtype, masked=True)
        return value

    def _masked(self, value: _Value) -> _Value:
        """The value with zero in the lanes beyond its last channel."""
        channels = value.shape[1] if value.layout == DATA else 0
        if value.masked or not channels % packed.LANES:
            return value
        dtype = str(value.var.ty.dtype)
        return self._emit(lambda v: packed.mask(v, channels), [value], DATA, value.shape, dtype, masked=True)

    def _into_scope(self, call: Any, out: Any) -> Any:
        """The last ``call_tir``, writing into the scope of the composite's result."""
        scope = scope_of(out)
        if scope == "global":
            return call
        func = self.builder.get()[call.args[0]]
        result = func.params[-1]
        buffer = tirx.decl_buffer(result.ty.shape, result.ty.dtype, result.name, scope=scope)
        gv = self.builder.add_func(func.specialize({result: buffer}), str(call.args[0].name_hint))
        return _call_tir(gv, list(call.args[1].fields), out.ty)

    def _emit(
        self,
        compute: Any,
        values: list[_Value],
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        masked: bool,
    ) -> _Value:
        """One PrimFunc for one op, and its ``call_tir``."""
        distinct = list({(value.var, value.layout, value.shape): value for value in values}.values())
        inputs = {
            id(value): te.placeholder(
                tuple(int(d) for d in value.var.ty.shape.values), str(value.var.ty.dtype), value.var.name
            )
            for value in distinct
        }
        by_key = {(v.var, v.layout, v.shape): inputs[id(v)] for v in distinct}
        operands = [Packed(by_key[v.var, v.layout, v.shape], v.layout, v.shape) for v in values]
        result = compute(*operands)
        func = te.create_prim_func([*(inputs[id(v)] for v in distinct), result])
        func = _scoped(func, [scope_of(value.var) for value in distinct])
        gv = self.builder.add_func(func.without_attr("global_symbol"), result.op.name)
        ty = relax.TensorType(tuple(int(d) for d in result.shape), str(result.dtype))
        call = _call_tir(gv, [value.var for value in distinct], ty)
        var = relax.DataflowVar(f"lv{len(self.bindings)}", ty)
        self.bindings.append(relax.VarBinding(var, call))
        return _Value(var, name, shape, masked)


_Emitter = Callable[[list[Packed], Any, tuple[int, ...], str], te.Tensor]

_EMITTERS: dict[str, _Emitter] = {
    "relax.nn.conv2d": lambda x, call, shape, dtype: conv2d(x[0], x[1], call.attrs, dtype),
    "relax.nn.conv2d_transpose": lambda x, call, shape, dtype: conv2d_transpose(
        x[0], x[1], call.attrs, (shape[2], shape[3]), dtype
    ),
    "relax.nn.max_pool2d": lambda x, call, shape, dtype: pool2d(
        x[0], call.attrs, (shape[2], shape[3]), "max"
    ),
    "relax.nn.avg_pool2d": lambda x, call, shape, dtype: pool2d(
        x[0], call.attrs, (shape[2], shape[3]), "avg"
    ),
    "relax.nn.adaptive_avg_pool2d": lambda x, call, shape, dtype: adaptive_pool(x[0], (shape[2], shape[3])),
    "relax.mean": lambda x, call, shape, dtype: global_pool(x[0]),
    "relax.nn.group_norm": lambda x, call, shape, dtype: group_norm(
        x[0], x[1], x[2], int(call.attrs.num_groups), float(call.attrs.epsilon)
    ),
    "relax.matmul": lambda x, call, shape, dtype: dense(x[0], x[1], dtype),
    "relax.nn.layer_norm": lambda x, call, shape, dtype: layer_norm(x[0], x[1], x[2], call.attrs, dtype),
    "relax.concat": lambda x, call, shape, dtype: packed.concat(x),
    "relax.strided_slice": lambda x, call, shape, dtype: packed.channel_slice(
        x[0], int(call.args[2].fields[0].value), shape[1]
    ),
    "relax.image.resize2d": lambda x, call, shape, dtype: packed.resize2d(
        x[0], call.attrs, (shape[2], shape[3])
    ),
}
"""How an anchor's packed form is computed: (operands, call, the result's source shape, its dtype) -> TE tensor."""


def _emitter(op: str, own: _Margin | None, given: _Margin | None) -> _Emitter | None:
    """The emitter of an anchor whose result, or whose data, may have a margin."""
    if op == CONVOLUTION and own is not None:
        return lambda x, call, shape, dtype: conv2d(x[0], x[1], call.attrs, dtype, own)
    if op == MAXIMUM and given is not None:
        return lambda x, call, shape, dtype: window_max(x[0], call.attrs, (shape[2], shape[3]), given)
    return _EMITTERS.get(op)


def _margins(bindings: list[Any]) -> dict[Any, _Margin]:
    """The values from a convolution to a maximum over windows, with the pixels that they get around the image.

    So many (top, left, bottom, right) as the windows reach beyond it: a pixel there is computed like any other and
    left out of the maximum, so that the loops over pixels need no guards. An operand with an image of its own has
    nothing there; then the pool is left to see to its border.
    """
    made = {binding.var: binding.value for binding in bindings}
    margins: dict[Any, _Margin] = {}
    for var, call in made.items():
        image, size = static_shape(call.args[0]) if op_name(call) == MAXIMUM else None, static_shape(var)
        if image is None or size is None:
            continue
        margin = pads_of(call.attrs, (image[2], image[3]), (size[2], size[3]))
        between = _between(call.args[0], made, image, beyond=any(margin))
        if between and not _others_read(between, {var, *between}, made):
            margins |= dict.fromkeys(between, margin)
    return margins


def _between(value: Any, made: dict[Any, Any], image: tuple[int, ...], *, beyond: bool) -> set[Any] | None:
    """The values from a convolution to ``value``, all of the shape ``image``; ``None`` if there is no such way.

    ``beyond``: whether everything in between must say what stands beyond the image.
    """
    found: set[Any] = set()
    convolutions, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        call, shape = made.get(value), static_shape(value) or ()
        if call is None:
            if beyond and any(dim > 1 for dim in shape[-2:]) and len(shape) > 1:
                return None
        elif value not in found:
            op = op_name(call)
            if shape != image or (op != CONVOLUTION and op not in ELEMENTWISE):
                return None
            found.add(value)
            convolutions += op == CONVOLUTION
            waiting += tensor_args(call) if op != CONVOLUTION else []
    return found if convolutions else None


def _others_read(values: set[Any], known: set[Any], made: dict[Any, Any]) -> bool:
    """Whether anything but ``known`` is computed from ``values``."""
    return any(
        not values.isdisjoint(tensor_args(call))
        for var, call in made.items()
        if var not in known and isinstance(call, relax.Call)
    )


def scope_of(expr: Any) -> str:
    """The memory scope that an expression's type states."""
    return scope_of_type(expr.ty)


def scope_of_type(ty: Any) -> str:
    """The memory scope that a tensor type states."""
    device = getattr(ty, "vdevice", None)
    return str(device.memory_scope) if device is not None else "global"


def _call_tir(gv: Any, args: list[Any], ty: Any) -> Any:
    """A ``call_tir`` with its type stated; nothing is inferred from the arguments' devices."""
    call = relax.BlockBuilder().normalize(relax.call_tir(gv, args, ty))
    return tvm.ir.Call(call.op, call.args, call.attrs, call.ty_args, ret_ty=ty)


def _scoped(func: Any, scopes: list[str]) -> Any:
    """The PrimFunc with its first parameters in the given scopes."""
    changed = {
        param: tirx.decl_buffer(param.ty.shape, param.ty.dtype, param.name, scope=scope)
        for param, scope in zip(func.params, scopes, strict=False)
        if scope != "global"
    }
    return func.specialize(changed) if changed else func
