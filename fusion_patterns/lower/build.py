"""A fused and scheduled module -> a manifest: the whole run as data.

R.call_tir(kernel, args)   ->  Alloc, Launch (scratch tensors: Alloc before it)
R.reshape(x)               ->  View
R.to_vdevice(x)            ->  Copy
If, calls, tuples, shapes  ->  If, Call, Bind, Shape
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import BuildError
from ..place.calls import op_name
from ..run import manifest as m
from .dims import dim, symbols
from .kernels import LoweredFunc
from .legalize import scope_of, scope_of_type

__all__ = ["build_manifest"]

VIEWS = ("relax.reshape", "relax.memory.view", "relax.flatten", "relax.expand_dims", "relax.squeeze")


def build_manifest(
    mod: tvm.IRModule,
    lowered: dict[str, LoweredFunc],
    labels: dict[str, str],
    *,
    name: str,
    target: str,
) -> m.Manifest:
    """Build the manifest of every Relax function of ``mod``.

    ``lowered``: the kernels of each PrimFunc by its name. ``labels``: what a PrimFunc's launches are called in
    reports (a row's name). Raises :class:`BuildError` with the IR value that can't be run from a manifest.
    """
    state = _Module(mod, lowered, labels)
    functions = {}
    for gv, func in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(func, relax.Function):
            functions[str(gv.name_hint)] = _Function(state, str(gv.name_hint), func).build()
    return m.Manifest(
        name, target, functions, state.kernels, state.constants, state.constant_tensors, meta={}
    )


class _Module:
    """What all functions of a module share: kernels and constants."""

    def __init__(self, mod: tvm.IRModule, lowered: dict[str, LoweredFunc], labels: dict[str, str]) -> None:
        self.mod, self.lowered, self.labels = mod, lowered, labels
        self.kernels: dict[str, m.Kernel] = {}
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.constant_tensors: dict[str, m.Tensor] = {}
        self.constant_names: dict[Any, str] = {}

    def constant(self, const: Any) -> str:
        """The name of a constant, the same for the same tensor in the same scope."""
        key = (const.value, scope_of(const))
        if key not in self.constant_names:
            name = f"const{len(self.constants)}"
            array = const.value.numpy()
            self.constant_names[key] = name
            self.constants[name] = array
            self.constant_tensors[name] = m.Tensor(tuple(array.shape), str(const.value.dtype), key[1])
        return self.constant_names[key]

    def kernel(self, name: str, source: str, signature: tuple[str, ...]) -> str:
        if name not in self.kernels:
            self.kernels[name] = m.Kernel(name, source, signature)
        return name


class _Function:
    def __init__(self, state: _Module, name: str, func: Any) -> None:
        self.state, self.name, self.func = state, name, func
        self.values: dict[Any, m.Result] = {}
        self.used: set[str] = set()

    def build(self) -> m.Function:
        params = []
        for param in self.func.params:
            value = self._fresh(str(param.name))
            self.values[param] = value
            params.append(m.Param(value, self._tree(param.ty, str(param.name))))
        steps: list[m.Step] = []
        result = self._sequence(self.func.body, steps)
        return m.Function(self.name, tuple(params), tuple(steps), result)

    # Names and types ----------------------------------------------------------------------------------------

    def _fresh(self, wanted: str) -> str:
        wanted = wanted.replace("#", "_") or "v"
        name, count = wanted, 0
        while name in self.used or re.fullmatch(r"const\d+", name):
            count += 1
            name = f"{wanted}.{count}"
        self.used.add(name)
        return name

    def _fail(self, what: str, value: str) -> BuildError:
        return BuildError(
            f"`{value}` in function `{self.name}`: {what}; run this module through TVM's own VM with "
            "fusion_patterns.pipeline()"
        )

    def _tree(self, ty: Any, value: str) -> m.TensorTree:
        if isinstance(ty, tvm.ir.TupleType if hasattr(tvm.ir, "TupleType") else relax.TupleType):
            return tuple(self._tree(part, value) for part in ty.fields)
        if isinstance(ty, relax.TensorType):
            return self._tensor(ty, value)
        raise self._fail(f"its type {ty} is not a tensor or a tuple of tensors", value)

    def _tensor(self, ty: Any, value: str) -> m.Tensor:
        if ty.shape is None or not hasattr(ty.shape, "values"):
            raise self._fail("its shape is not known before the run", value)
        scope = scope_of_type(ty)
        try:
            return m.Tensor(tuple(dim(d) for d in ty.shape.values), str(ty.dtype), scope)
        except ValueError as error:
            raise self._fail(str(error), value) from None

    # Bindings -----------------------------------------------------------------------------------------------

    def _sequence(self, seq: Any, steps: list[m.Step]) -> m.Result:
        for block in seq.blocks:
            for binding in block.bindings:
                if isinstance(binding, relax.MatchCast):
                    self.values[binding.var] = self._result(binding.value, str(binding.var.name))
                    continue
                self.values[binding.var] = self._value(binding.value, str(binding.var.name), steps)
        return self._result(seq.body, self.name)

    def _result(self, expr: Any, name: str) -> m.Result:
        if isinstance(expr, tvm.ir.GenericConst):
            return self.state.constant(expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self._result(field, name) for field in expr.fields)
        if expr in self.values:
            return self.values[expr]
        raise self._fail(f"{type(expr).__name__} is not a value that a manifest can hold", name)

    def _reference(self, expr: Any, name: str) -> str:
        value = self._result(expr, name)
        if not isinstance(value, str):
            raise self._fail("a tuple stands where a tensor is needed", name)
        return value

    def _value(self, expr: Any, name: str, steps: list[m.Step]) -> m.Result:
        if isinstance(expr, relax.Call):
            return self._call(expr, name, steps)
        if isinstance(expr, relax.TupleGetItem):
            source = self._result(expr.tuple_value, name)
            if isinstance(source, str):
                return f"{source}#{int(expr.index)}"
            assert source is not None
            return source[int(expr.index)]
        if isinstance(expr, relax.If):
            return self._if(expr, name, steps)
        if isinstance(expr, relax.ShapeExpr):
            value = self._fresh(name)
            steps.append(m.Shape(value, tuple(dim(d) for d in expr.values)))
            return value
        return self._result(expr, name)

    def _if(self, expr: Any, name: str, steps: list[m.Step]) -> str:
        condition = self._reference(expr.cond, name)
        then: list[m.Step] = []
        otherwise: list[m.Step] = []
        then_value = self._sequence(expr.true_branch, then)
        else_value = self._sequence(expr.false_branch, otherwise)
        value = self._fresh(name)
        steps.append(m.If(condition, tuple(then), tuple(otherwise), value, then_value, else_value))
        return value

    def _call(self, call: Any, name: str, steps: list[m.Step]) -> m.Result:
        op = op_name(call)
        if op == "relax.call_tir":
            return self._call_tir(call, name, steps)
        if op in VIEWS:
            value = self._fresh(name)
            source = self._reference(call.args[0], name)
            steps.append(m.View(value, source, self._tensor(call.ty, name)))
            return value
        if op == "relax.to_vdevice":
            value = self._fresh(name)
            steps.append(m.Copy(value, self._reference(call.args[0], name), self._tensor(call.ty, name)))
            return value
        if op == "relax.shape_of":
            value = self._fresh(name)
            steps.append(m.Shape(value, self._tensor(call.args[0].ty, name).shape))
            return value
        if isinstance(call.op, tvm.ir.GlobalVar):
            value = self._fresh(name)
            args = tuple(self._result(arg, name) for arg in call.args)
            steps.append(m.Call(str(call.op.name_hint), args, value))
            return value
        raise self._fail(f"{op or call.op} is not something that a manifest can run", name)

    def _call_tir(self, call: Any, name: str, steps: list[m.Step]) -> m.Result:
        callee = str(call.args[0].name_hint)
        lowered = self.state.lowered[callee]
        out_ty = call.ty_args[0]
        outs = list(out_ty.fields) if not isinstance(out_ty, relax.TensorType) else [out_ty]
        tensors = [self._tensor(ty, name) for ty in outs]
        operands = [self._operand(arg, name) for arg in call.args[1].fields]
        known = self._symbols(call, callee, tensors, name)
        results = []
        for tensor in tensors:
            value = self._fresh(name)
            steps.append(m.Alloc(value, tensor))
            results.append(value)
        scratch = []
        for shape, dtype in lowered.scratch:
            value = self._fresh(f"{name}_scratch")
            steps.append(m.Alloc(value, m.Tensor(tuple(_bound(d, known) for d in shape), dtype)))
            scratch.append(value)
        values: list[str | m.Scalar] = [*operands, *results]
        for launch in lowered.launches:
            kernel = self.state.kernel(launch.kernel, launch.source, launch.signature)
            args: list[str | m.Scalar] = []
            for argument in launch.args:
                if argument.kind == "param":
                    args.append(values[argument.index])
                elif argument.kind == "scratch":
                    args.append(scratch[argument.index])
                else:
                    args.append(m.Scalar(_bound(argument.expr, known), argument.dtype))
            grid, block = _extents(launch.grid, known), _extents(launch.block, known)
            label = self.state.labels.get(callee, callee)
            steps.append(m.Launch(kernel, tuple(args), grid, block, label))
        return results[0] if isinstance(out_ty, relax.TensorType) else tuple(results)

    def _operand(self, expr: Any, name: str) -> str | m.Scalar:
        """An argument of a kernel: a tensor's name, or a number."""
        if isinstance(getattr(expr, "ty", None), relax.TensorType):
            return self._reference(expr, name)
        try:
            return m.Scalar(dim(expr), str(expr.ty.dtype))
        except ValueError as error:
            raise self._fail(str(error), name) from None

    def _symbols(self, call: Any, callee: str, outs: list[m.Tensor], name: str) -> dict[str, int | str]:
        """What the PrimFunc's own symbols stand for in this call."""
        func = self.state.mod[callee]
        known: dict[str, int | str] = {}
        params = list(func.params)
        given = [*call.args[1].fields, *outs]
        for param, value in zip(params, given, strict=False):
            if isinstance(value, m.Tensor):
                known.update(symbols(param.ty.shape, list(value.shape)))
            elif isinstance(value.ty, relax.TensorType):
                known.update(symbols(param.ty.shape, list(self._tensor(value.ty, name).shape)))
            else:
                known[str(param.name)] = dim(value)
        if len(call.args) > 2:
            for param, value in zip(params[len(given) :], call.args[2].values, strict=False):
                known[str(param.name)] = dim(value)
        return known


def _extents(
    three: tuple[int | str, int | str, int | str], known: dict[str, int | str]
) -> tuple[m.Dim, m.Dim, m.Dim]:
    x, y, z = three
    return _bound(x, known), _bound(y, known), _bound(z, known)


def _bound(extent: int | str, known: dict[str, int | str]) -> int | str:
    """An extent over the caller's symbols."""
    if isinstance(extent, int):
        return extent
    text = re.sub(r"[A-Za-z_]\w*", lambda word: f"{known.get(word.group(), word.group())}", extent)
    names = set(re.findall(r"[A-Za-z_]\w*", text)) - {"min", "max"}
    return text if names else int(eval(text, {"min": min, "max": max, "__builtins__": {}}))
