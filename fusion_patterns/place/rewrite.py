"""Decisions -> a module in which they are visible.

    x                      ->  x_nchw4c = pack(x), once for each form that a composite reads
    lv = fused(x, w)       ->  lv_nchw4c = fused(x_nchw4c, packed w);  lv = unpack(lv_nchw4c) if read plain
    fused(x, w) { body }   ->  fused(x_nchw4c, w_oihw4i4o) { x = unpack(x_nchw4c); w = ...; body; pack }

Conversions are private composites themselves (``layout.pack``, ``layout.unpack``) and stand where the
tensor is defined, so that every reader shares them. The unpacking inside a composite says what its operands
mean, keeps the module well-typed and runnable by stock TVM, and costs nothing: the packed kernels read
through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .calls import replace_tensor_args, static_shape, tensor_args
from .decide import (
    GLOBAL,
    PLAIN_FORM,
    SCOPES_ATTR,
    Form,
    Placement,
    bindings_of,
    composites_of,
    decide,
    mark_leaves,
    mark_plain,
    source_shape,
)
from .layouts import PLAIN, layout
from .needs import Needs

__all__ = ["LAYOUTS_ATTR", "RESULT", "VIEWS_ATTR", "place"]

LAYOUTS_ATTR = "fusion_patterns.layouts"
VIEWS_ATTR = "fusion_patterns.views"
"""How many bindings at the beginning of a composite only say what its packed parameters mean."""
PACK, UNPACK = "layout.pack", "layout.unpack"
RESULT = "output"


def place(
    mod: tvm.IRModule, target: Any, placement: Placement | None = None
) -> tuple[tvm.IRModule, Placement]:
    """Write the decisions for ``target`` into the module; the given module is not changed.

    Composites in ``placement.refused`` must have been taken out before.
    """
    placement = decide(mod, target) if placement is None else placement
    return _Rewriter(mod, target, placement).run(), placement


@dataclass
class _Packed:
    """A packed form of a value that is to be made where the value is defined."""

    form: Form
    shape: tuple[int, ...]
    var: Any


@dataclass
class _Scope:
    """What a function's values need: packed forms by value, and the values that are also read plain."""

    name: str
    forms: dict[Any, dict[Form, _Packed]] = field(default_factory=dict)
    plain: set[Any] = field(default_factory=set)
    written_plain: set[Any] = field(default_factory=set)
    """Results of composites that are written plain."""


class _Rewriter:
    def __init__(self, mod: tvm.IRModule, target: Any, placement: Placement) -> None:
        self.mod, self.target, self.placement = mod, target, placement
        self.composites = composites_of(mod)
        self.builder = relax.BlockBuilder()
        self.callees: dict[str, Any] = {}
        self.conversions: dict[Any, Any] = {}
        self.devices: dict[str, Any] = {}
        self.constants: dict[tuple[Any, Form], Any] = {}

    def run(self) -> tvm.IRModule:
        out = tvm.IRModule({}, attrs=self.mod.attrs, global_infos=dict(self.mod.global_infos.items()))
        scopes = sorted({form.scope for form in self._all_forms()} - {GLOBAL})
        self.devices = {scope: relax.VDevice(self.target, 0, scope) for scope in scopes}
        if self.devices:
            known = list(self.mod.global_infos.get("vdevice", []))
            out.update_global_info("vdevice", [*known, *self.devices.values()])
        self.builder = relax.BlockBuilder(out)
        functions = {gv.name_hint: (gv, func) for gv, func in self.mod.functions_items()}
        for name in sorted(self.composites):
            self.callees[name] = self.builder.add_func(self._composite(name), name)
        for name, (gv, func) in sorted(functions.items()):
            if name in self.composites:
                continue
            if isinstance(func, relax.Function):
                func = self._function(name, func)
            new = self.builder.get()
            new[gv] = func
        # fills in the types of sequences; those of calls are stated above and stay
        return relax.transform.Normalize()(self.builder.get())

    def _all_forms(self) -> list[Form]:
        return [*self.placement.outputs.values(), *(f for fs in self.placement.operands.values() for f in fs)]

    def _type(self, shape: tuple[int, ...], dtype: str, form: Form) -> Any:
        """The type of a tensor of source ``shape`` held in ``form``."""
        if form.layout != PLAIN:
            shape = layout(form.layout).packed_shape(source_shape(form.layout, shape))
        return relax.TensorType(shape, dtype, vdevice=self.devices.get(form.scope))

    # Composites ---------------------------------------------------------------------------------------------

    def _composite(self, name: str) -> Any:
        func, needs = self.composites[name], self.placement.needs[name]
        forms = self.placement.operands[name]
        params = [
            relax.Var(operand.name, self._type(operand.shape, operand.dtype, form))
            for operand, form in zip(needs.operands, forms, strict=True)
        ]
        inside = _Body()
        sources = {}
        for number, (operand, param) in enumerate(zip(needs.operands, params, strict=True)):
            if operand.layout == PLAIN:
                sources[number] = param
            else:
                sources[number] = inside.unpack(param, operand.layout, operand.shape)
        views = len(inside.bindings)
        self._copy_body(func, needs, inside, sources)
        result = inside.pack(inside.moved[func.body.body], self.placement.outputs[name], self)
        scopes = {p.name: form.scope for p, form in zip(params, forms, strict=True)}
        scopes[RESULT] = self.placement.outputs[name].scope
        layouts = {p.name: form.layout for p, form in zip(params, forms, strict=True)}
        layouts[RESULT] = self.placement.outputs[name].layout
        attrs = {SCOPES_ATTR: scopes, LAYOUTS_ATTR: layouts, VIEWS_ATTR: views}
        return inside.function(params, result, func.attrs).with_attrs(attrs)

    @staticmethod
    def _copy_body(func: Any, needs: Needs, inside: _Body, sources: dict[int, Any]) -> None:
        for number, binding in enumerate(b for block in func.body.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, relax.Var):
                inside.moved[binding.var] = inside.moved[value]
                continue
            tensors = [
                sources[needs.reads[number, i]] if (number, i) in needs.reads else inside.substitute(arg)
                for i, arg in enumerate(tensor_args(value))
            ]
            args = replace_tensor_args(value, tensors)
            inside.moved[binding.var] = inside.emit(
                relax.Call(value.op, args, value.attrs, value.ty_args), binding.var.ty, binding.var.name
            )

    def _conversion(self, shape: tuple[int, ...], dtype: str, source: Form, result: Form) -> Any:
        """The composite that turns a tensor of source ``shape`` from one form into another."""
        key = (shape, dtype, source, result)
        if key not in self.conversions:
            row = PACK if source.is_plain else UNPACK if result.is_plain else "layout.copy"
            param = relax.Var("x", self._type(shape, dtype, source))
            inside = _Body()
            value: Any = param
            if source.layout != PLAIN:
                value = inside.unpack(param, source.layout, shape)
            views = len(inside.bindings)
            value = inside.pack(value, result, self)
            attrs = {
                "Primitive": 1,
                "Composite": row,
                "fusion_patterns.row": row,
                "fusion_patterns.origin": "placement",
                "fusion_patterns.kernel": "layout",
                SCOPES_ATTR: {"x": source.scope, RESULT: result.scope},
                LAYOUTS_ATTR: {"x": source.layout, RESULT: result.layout},
                VIEWS_ATTR: views,
            }
            func = inside.function([param], value, None).with_attrs(attrs)
            name = f"{row.replace('.', '_')}_{len(self.conversions)}"
            self.conversions[key] = self.builder.add_func(func, name)
        return self.conversions[key]

    # Callers ------------------------------------------------------------------------------------------------

    def _function(self, name: str, func: Any) -> Any:
        scope = self._scan(name, func)
        if not scope.forms and not scope.written_plain:
            return func
        lead = [b for param in func.params for b in self._packings(scope, param)]
        body = self._seq(func.body, scope)
        if lead:
            body = relax.SeqExpr([relax.DataflowBlock(lead), *body.blocks], body.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)

    def _scan(self, name: str, func: Any) -> _Scope:
        """Which packed forms each value needs, and who reads it plain."""
        scope = _Scope(name)
        own_form: dict[Any, Form] = {}
        for binding in bindings_of(func.body):
            callee = self._callee(binding)
            if callee is None:
                mark_plain(binding, scope.plain)
                continue
            needs, forms = self.placement.needs[callee], self.placement.operands[callee]
            own = self.placement.outputs[callee]
            if own.is_plain:
                scope.written_plain.add(binding.var)
            else:
                own_form[binding.var] = own
                self._want(scope, binding.var, own, needs.output_shape, needs.output_dtype)
            for operand, form in zip(needs.operands, forms, strict=True):
                value = binding.value.args[operand.param]
                if form.is_plain:
                    scope.plain.add(value)
                elif not isinstance(value, tvm.ir.GenericConst):
                    self._want(scope, value, form, operand.shape, operand.dtype)
        mark_leaves(func.body.body, scope.plain)
        for value, form in own_form.items():
            # another layout is made from the plain tensor; another scope of the same layout is copied
            if any(wanted.layout != form.layout for wanted in scope.forms[value]):
                scope.plain.add(value)
        return scope

    def _want(self, scope: _Scope, value: Any, form: Form, shape: tuple[int, ...], dtype: str) -> None:
        forms = scope.forms.setdefault(value, {})
        if form not in forms:
            suffix = f"{form.layout.lower()}" + ("" if form.scope == GLOBAL else "_texture")
            forms[form] = _Packed(
                form, shape, type(value)(f"{value.name}_{suffix}", self._type(shape, dtype, form))
            )

    def _callee(self, binding: Any) -> str | None:
        value = getattr(binding, "value", None)
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            name = str(value.op.name_hint)
            return name if name in self.composites else None
        return None

    def _seq(self, seq: Any, scope: _Scope) -> Any:
        blocks = []
        for block in seq.blocks:
            bindings = [new for binding in block.bindings for new in self._binding(binding, scope)]
            kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
            blocks.append(kind(bindings))
        return relax.SeqExpr(blocks, seq.body)

    def _binding(self, binding: Any, scope: _Scope) -> list[Any]:
        callee = self._callee(binding)
        if callee is not None:
            return self._call(binding, callee, scope)
        value = getattr(binding, "value", None)
        if isinstance(value, relax.If):
            branch = relax.If(
                value.cond, self._seq(value.true_branch, scope), self._seq(value.false_branch, scope)
            )
            binding = relax.VarBinding(binding.var, self.builder.normalize(branch))
        return [binding, *self._packings(scope, binding.var)]

    def _call(self, binding: Any, callee: str, scope: _Scope) -> list[Any]:
        needs, own = self.placement.needs[callee], self.placement.outputs[callee]
        args = []
        for operand, form in zip(needs.operands, self.placement.operands[callee], strict=True):
            value = binding.value.args[operand.param]
            if form.is_plain:
                args.append(value)
            elif isinstance(value, tvm.ir.GenericConst):
                args.append(self._constant(value, form, operand.shape))
            else:
                args.append(scope.forms[value][form].var)
        call = self.builder.normalize(relax.Call(self.callees[callee], args))
        if own.is_plain:
            return [relax.VarBinding(binding.var, call), *self._packings(scope, binding.var)]
        packed = scope.forms[binding.var][own]
        bindings = [relax.VarBinding(packed.var, call)]
        if binding.var in scope.plain:
            convert = self._conversion(needs.output_shape, needs.output_dtype, own, PLAIN_FORM)
            bindings.append(relax.VarBinding(binding.var, self._converted(convert, packed.var)))
        bindings += self._packings(scope, binding.var, source=packed)
        return bindings

    def _packings(self, scope: _Scope, value: Any, source: _Packed | None = None) -> list[Any]:
        """Bindings that make the packed forms of a value, right after its definition."""
        bindings = []
        for form, packed in scope.forms.get(value, {}).items():
            if source is not None and form == source.form:
                continue
            dtype = str(packed.var.ty.dtype)
            given = source if source is not None and source.form.layout == form.layout else None
            convert = self._conversion(packed.shape, dtype, given.form if given else PLAIN_FORM, form)
            bindings.append(
                relax.VarBinding(packed.var, self._converted(convert, given.var if given else value))
            )
        return bindings

    def _converted(self, gv: Any, value: Any) -> Any:
        return self.builder.normalize(relax.Call(gv, [value]))

    def _constant(self, const: Any, form: Form, shape: tuple[int, ...]) -> Any:
        """A constant packed with NumPy, once for each form."""
        key = (const.value, form)
        if key not in self.constants:
            array = const.value.numpy()
            packed = layout(form.layout).pack(array.reshape(source_shape(form.layout, shape)))
            ty = relax.TensorType(packed.shape, str(packed.dtype), vdevice=self.devices.get(form.scope))
            self.constants[key] = tvm.ir.GenericConst(tvm.runtime.tensor(packed), ty)
        return self.constants[key]


class _Body:
    """The body of a composite in the making."""

    def __init__(self) -> None:
        self.bindings: list[Any] = []
        self.moved: dict[Any, Any] = {}
        self.normal = relax.BlockBuilder()

    def emit(self, call: Any, ty: Any, name: str = "lv") -> Any:
        """Bind a call whose type is stated, not inferred: inference would spread an argument's device."""
        call = self.normal.normalize(call)
        var = relax.DataflowVar(name, ty)
        typed = tvm.ir.Call(call.op, call.args, call.attrs, call.ty_args, ret_ty=ty)
        self.bindings.append(relax.VarBinding(var, typed))
        return var

    def substitute(self, expr: Any) -> Any:
        return self.moved.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def unpack(self, packed: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Source view of a packed tensor."""
        source, dtype = source_shape(name, shape), str(packed.ty.dtype)
        kind = layout(name)
        rank = len(kind.axes) + len(kind.blocks)
        padded = kind.padded_shape(source)
        view = relax.op.layout_transform(packed, _map(kind.to_source, rank))
        value = self.emit(view, relax.TensorType(padded, dtype))
        cut = [axis for axis in range(len(source)) if padded[axis] != source[axis]]
        if cut:
            ends = [source[axis] for axis in cut]
            part = relax.op.strided_slice(value, axes=cut, begin=[0] * len(cut), end=ends)
            value = self.emit(part, relax.TensorType(source, dtype))
        if source != shape:
            value = self.emit(relax.op.reshape(value, shape), relax.TensorType(shape, dtype))
        return value

    def pack(self, value: Any, form: Form, rewriter: Any) -> Any:
        """Pack a source value, as the composite's result. New lanes are zero."""
        shape, dtype = static_shape(value), str(value.ty.dtype)
        assert shape is not None
        if form.layout != PLAIN:
            source = source_shape(form.layout, shape)
            if source != shape:
                value = self.emit(relax.op.reshape(value, source), relax.TensorType(source, dtype))
            kind = layout(form.layout)
            value = self.emit(
                relax.op.layout_transform(
                    value, _map(kind.to_packed, len(kind.axes)), pad_value=np.array(0, dtype).item()
                ),
                rewriter._type(shape, dtype, form),
            )
        return value

    def function(self, params: list[Any], result: Any, attrs: Any) -> Any:
        last = self.bindings[-1]
        out = relax.Var(result.name, result.ty)
        assert result.same_as(last.var)
        self.bindings[-1] = relax.VarBinding(out, last.value)
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], out)
        return relax.Function(params, body, out.ty, True, attrs)


def _map(fn: Any, rank: int) -> Any:
    """An index map with named arguments: TVM reads their number from the signature."""
    names = ", ".join(f"i{k}" for k in range(rank))
    return eval(f"lambda {names}: fn({names})", {"fn": fn})
