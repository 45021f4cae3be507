"""Kernels of one's own: a registry by name, and the pass that binds convolutions to one of them.

    @register_kernel("my_conv2d")
    def my_conv2d(call):                  # what is to be computed, on which tensors
        ...
        return schedule.mod["main"]       # a scheduled PrimFunc, or None: not this one

A row's ``kernel: my_conv2d`` binds every composite of that row; :func:`DispatchConv2d` binds the
convolutions of a plain module. Either way the composite is replaced by a call of the PrimFunc before
anything is legalized, and the PrimFunc is marked as scheduled and opaque: no later pass fuses, schedules or
looks into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from .errors import BuildError, FusionPatternsError, TableError
from .lower.legalize import legalize_composites
from .lower.schedule import KERNEL_ATTR
from .lower.stages import ROW_ATTR
from .place.calls import op_name, static_shape
from .place.decision import SCOPES_ATTR, composites_of
from .place.rewrite import LAYOUTS_ATTR, RESULT, VIEWS_ATTR
from .table import Table, builtin_names, load_table
from .table.faults import did_you_mean

__all__ = [
    "KernelBuilder",
    "KernelCall",
    "KernelTensor",
    "bind_kernels",
    "build_kernel",
    "check_kernels",
    "kernel_builder",
    "lowered_conversions",
    "register_kernel",
    "registered_kernels",
    "replace_composites",
    "unregister_kernel",
]

OPAQUE = 8
"""TVM's ``OpPatternKind`` of what nothing is fused with."""


@dataclass(frozen=True)
class KernelTensor:
    """A buffer that a kernel gets: name, layout, packed shape, dtype and memory scope."""

    name: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    scope: str


@dataclass(frozen=True)
class KernelCall:
    """What a kernel is asked to compute.

    ``ops``: calls of Relax operators in order, on tensors in the layout in which the module came; the last
    one's result, packed, is the ``output``. ``operands``: the PrimFunc's parameters, in order; ``output``
    is the one after them. ``params``: the variables that stand for the operands in ``ops``. Lanes beyond a
    tensor's last channel are zero in what a kernel reads, and must be zero in what it writes.
    """

    name: str
    ops: tuple[Any, ...]
    params: tuple[Any, ...]
    operands: tuple[KernelTensor, ...]
    output: KernelTensor
    target: Any

    @property
    def conv2d(self) -> Any:
        """The call of ``relax.nn.conv2d``; ``None`` if there is none or more than one."""
        found = [call for call in self.ops if op_name(call) == "relax.nn.conv2d"]
        return found[0] if len(found) == 1 else None


KernelBuilder = Callable[[KernelCall], "tirx.PrimFunc | None"]
_REGISTERED: dict[str, KernelBuilder] = {}


def register_kernel(name: str, build: KernelBuilder | None = None, *, replace: bool = False) -> Any:
    """Register a kernel under the name by which rows know it; usable as a decorator.

    ``build`` is given a :class:`KernelCall` and returns a scheduled PrimFunc, or ``None`` if it has no
    kernel for it: then the built-in one is used. Raises :class:`FusionPatternsError` if the name is taken
    and ``replace`` is not set.
    """
    if build is None:
        return lambda function: register_kernel(name, function, replace=replace)
    if name in _built_in_names():
        raise FusionPatternsError(f"kernel {name!r} is built in; choose another name")
    if name in _REGISTERED and not replace:
        raise FusionPatternsError(f"kernel {name!r} is registered already; say replace=True to replace it")
    _REGISTERED[name] = build
    return build


def unregister_kernel(name: str) -> None:
    """Forget a registered kernel. Raises :class:`FusionPatternsError` for an unknown name."""
    if _REGISTERED.pop(name, None) is None:
        raise FusionPatternsError(f"no kernel {name!r} is registered{did_you_mean(name, _REGISTERED)}")


def _built_in_names() -> set[str]:
    """The kernel names of the built-in tables: they all mean the kernels that this package makes."""
    return {row.kernel for name in builtin_names() for row in load_table(name).patterns if row.kernel}


def registered_kernels() -> frozenset[str]:
    """The names of the registered kernels, which read and write packed tensors."""
    return frozenset(_REGISTERED)


def check_kernels(table: Table) -> None:
    """Refuse a table that names a kernel which is not there. Raises :class:`TableError`."""
    known = _built_in_names() | set(_REGISTERED)
    faults = [
        f"{row.origin}: row {row.name!r}: no kernel is called {row.kernel!r}{did_you_mean(row.kernel, known)}"
        for row in table.patterns
        if row.kernel and row.kernel not in known
    ]
    if faults:
        raise TableError("\n".join(faults))


def kernel_builder(kernel: str | KernelBuilder) -> KernelBuilder:
    """The builder of that name, or the given one. Raises :class:`FusionPatternsError` for an unknown name."""
    if not isinstance(kernel, str):
        return kernel
    if kernel not in _REGISTERED:
        raise FusionPatternsError(f"no kernel {kernel!r} is registered{did_you_mean(kernel, _REGISTERED)}")
    return _REGISTERED[kernel]


def bind_kernels(placed: tvm.IRModule, target: Any) -> tvm.IRModule:
    """Replace the composites whose row names a registered kernel by calls of it.

    A composite for which the kernel says ``None`` stays. Raises :class:`BuildError` if a PrimFunc does not
    fit its call.
    """
    bound: dict[str, Any] = {}
    for name, func in sorted(composites_of(placed).items()):
        build = _REGISTERED.get(str(func.attrs.get(KERNEL_ATTR, "")))
        if build is not None:
            kernel = build_kernel(build, name, func, target)
            if kernel is not None:
                bound[name] = kernel
    return replace_composites(placed, bound) if bound else placed


def build_kernel(build: KernelBuilder, name: str, func: Any, target: Any) -> Any:
    """The scheduled PrimFunc for one placed composite, checked against its call and marked; ``None`` if
    refused."""
    call = _describe(name, func, target)
    kernel = build(call)
    if kernel is None:
        return None
    if not isinstance(kernel, tirx.PrimFunc):
        raise BuildError(f"the kernel for `{name}` is a {type(kernel).__name__}, expected a PrimFunc")
    _check_signature(name, kernel, (*call.operands, call.output))
    kernel = (
        kernel.without_attr("global_symbol") if kernel.attrs and "global_symbol" in kernel.attrs else kernel
    )
    return kernel.with_attrs(
        {
            "tirx.is_scheduled": True,
            "op_pattern": OPAQUE,
            ROW_ATTR: str(func.attrs[ROW_ATTR]),
            KERNEL_ATTR: str(func.attrs.get(KERNEL_ATTR, "")),
        }
    )


def _describe(name: str, func: Any, target: Any) -> KernelCall:
    scopes, layouts = func.attrs[SCOPES_ATTR], func.attrs[LAYOUTS_ATTR]

    def tensor(label: str, value: Any) -> KernelTensor:
        shape = static_shape(value)
        assert shape is not None
        return KernelTensor(label, str(layouts[label]), shape, str(value.ty.dtype), str(scopes[label]))

    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    source: dict[Any, Any] = {}
    for binding in bindings[: int(func.attrs[VIEWS_ATTR])]:
        first = binding.value.args[0]
        source[binding.var] = source.get(first, first)
    last = {packed: var for var, packed in source.items()}
    # what follows the views and is no packing of the result
    ops = [
        b.value
        for b in bindings[int(func.attrs[VIEWS_ATTR]) :]
        if op_name(b.value) != "relax.layout_transform"
    ]
    return KernelCall(
        name,
        tuple(ops),
        tuple(last.get(param, param) for param in func.params),
        tuple(tensor(str(param.name), param) for param in func.params),
        tensor(RESULT, func.body.body),
        target,
    )


def _check_signature(name: str, kernel: Any, wanted: Iterable[KernelTensor]) -> None:
    wanted = list(wanted)
    if len(kernel.params) != len(wanted):
        raise BuildError(
            f"the kernel for `{name}` has {len(kernel.params)} parameters, expected {len(wanted)}: "
            f"{', '.join(tensor.name for tensor in wanted)}"
        )
    for param, tensor in zip(kernel.params, wanted, strict=True):
        if not hasattr(param.ty, "storage_scope"):
            raise BuildError(f"the kernel for `{name}` takes no buffer as `{tensor.name}`")
        given = (
            tuple(int(dim) for dim in param.ty.shape),
            str(param.ty.dtype),
            str(param.ty.storage_scope) or "global",
        )
        if given != (tensor.shape, tensor.dtype, tensor.scope):
            raise BuildError(
                f"the kernel for `{name}` takes `{tensor.name}` as {_said(*given)}; "
                f"its call passes {_said(tensor.shape, tensor.dtype, tensor.scope)}"
            )


def _said(shape: tuple[int, ...], dtype: str, scope: str) -> str:
    return f"{'x'.join(map(str, shape))} {dtype} in {scope}"


def replace_composites(placed: tvm.IRModule, bound: dict[str, Any]) -> tvm.IRModule:
    """The module with calls of PrimFuncs in place of calls of those composites; names stay."""
    mod = tvm.IRModule({}, attrs=placed.attrs, global_infos=dict(placed.global_infos.items()))
    for gv, func in placed.functions_items():
        if str(gv.name_hint) not in bound:
            mod[gv] = func
    rewriter = _Binder(mod, bound)
    for gv, func in placed.functions_items():
        if isinstance(func, relax.Function) and str(gv.name_hint) not in bound:
            rewriter.builder_.update_func(gv, rewriter.visit_expr(func))
    return rewriter.builder_.get()


@relax.expr_functor.mutator
class _Binder(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, bound: dict[str, Any]) -> None:
        super().__init__(mod)
        self.variables = {name: self.builder_.add_func(func, name) for name, func in sorted(bound.items())}

    def visit_call_(self, call: Any) -> Any:
        out = call.ty
        call = self.visit_expr_post_order(call)
        name = str(call.op.name_hint) if isinstance(call.op, tvm.ir.GlobalVar) else ""
        if name not in self.variables:
            return call
        return relax.call_tir(self.variables[name], list(call.args), out)


def lowered_conversions(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with every composite that is left (layout conversions) as one PrimFunc of ours."""
    attrs = {
        name: {ROW_ATTR: str(func.attrs[ROW_ATTR]), KERNEL_ATTR: str(func.attrs[KERNEL_ATTR])}
        for name, func in composites_of(mod).items()
    }
    mod = relax.transform.FuseTIR()(legalize_composites(mod))
    for gv, func in list(mod.functions_items()):
        if str(gv.name_hint) in attrs and isinstance(func, tirx.PrimFunc):
            mod[gv] = func.with_attrs({**attrs[str(gv.name_hint)], "op_pattern": OPAQUE})
    return relax.transform.DeadCodeElimination()(mod)
