"""Needs and wishes of all composites -> one form (layout and scope) for each tensor and reader.

A tensor that a composite writes is packed, in the scope that most of its readers ask for; a reader that asks for
another gets one shared copy. ``any`` follows the writer. Everything that no composite writes is plain in a buffer;
its packed forms are made where it is defined, once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .balance import Flow, cheaper_in_buffers
from .layouts import DATA, PLAIN, layout
from .limits import TextureLimits
from .needs import Needs, NotPacked, Operand, needs_of, op_name

__all__ = ["Form", "Placement", "TensorDecision", "composites_of", "decide"]

SCOPES_ATTR = "fusion_patterns.scopes"
GLOBAL = "global"


@dataclass(frozen=True)
class Form:
    """How a tensor is held: layout name and memory scope."""

    layout: str
    scope: str

    @property
    def is_plain(self) -> bool:
        """Whether this is the form in which the module came."""
        return self.layout == PLAIN and self.scope == GLOBAL


PLAIN_FORM = Form(PLAIN, GLOBAL)


@dataclass(frozen=True)
class TensorDecision:
    """What was decided for one tensor: its form, how many bytes it takes there, and why."""

    function: str
    value: str
    layout: str
    scope: str
    shape: tuple[int, ...]
    dtype: str
    reason: str

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in this form."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass
class Placement:
    """All decisions for a module.

    ``outputs``: form of each composite's result, by the composite's name. ``operands``: form of each operand.
    ``refused``: composites that have no packed kernel, with the reason and the culprit.
    """

    needs: dict[str, Needs] = field(default_factory=dict)
    outputs: dict[str, Form] = field(default_factory=dict)
    operands: dict[str, tuple[Form, ...]] = field(default_factory=dict)
    tensors: list[TensorDecision] = field(default_factory=list)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)


def composites_of(mod: tvm.IRModule) -> dict[str, Any]:
    """The composites that ``outline`` made, by name, in the order of their names in the module."""
    return {
        gv.name_hint: func
        for gv, func in mod.functions_items()
        if isinstance(func, relax.Function) and func.attrs and SCOPES_ATTR in func.attrs
    }


def bindings_of(body: Any) -> Iterator[Any]:
    """All bindings of a function's body in program order, those in branches included."""
    for block in body.blocks:
        for binding in block.bindings:
            yield binding
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.If):
                yield from bindings_of(binding.value.true_branch)
                yield from bindings_of(binding.value.false_branch)


@dataclass
class _Use:
    """One argument of a composite's call."""

    callee: str
    operand: int
    wish: str


def decide(mod: tvm.IRModule, target: Any) -> Placement:
    """Decide the form of every tensor at a composite's edge.

    ``target`` gives the device limits. Composites that can't be packed are listed in ``refused`` and left out.
    """
    limits = TextureLimits.of(target)
    placement = Placement()
    composites = composites_of(mod)
    for name, func in composites.items():
        try:
            placement.needs[name] = needs_of(func)
        except NotPacked as refusal:
            placement.refused[name] = (refusal.reason, refusal.culprit)
    for gv, func in mod.functions_items():
        if isinstance(func, relax.Function) and gv.name_hint not in composites:
            _decide_function(gv.name_hint, func, composites, limits, placement)
    return placement


def _wishes(func: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in func.attrs[SCOPES_ATTR].items()}


def _decide_function(
    function: str, func: Any, composites: dict[str, Any], limits: TextureLimits, placement: Placement
) -> None:
    _leave_in_buffers(func, composites, placement)
    made: dict[Any, str] = {}
    readers: dict[Any, list[_Use]] = {}
    for binding in bindings_of(func.body):
        callee = _callee(binding)
        if callee is None or callee not in placement.needs:
            continue
        made[binding.var] = callee
        wishes = _wishes(composites[callee])
        params = composites[callee].params
        for number, operand in enumerate(placement.needs[callee].operands):
            wish = wishes.get(params[operand.param].name, "any")
            readers.setdefault(binding.value.args[operand.param], []).append(_Use(callee, number, wish))
    chosen: dict[tuple[str, int], Form] = {}
    for var, callee in made.items():
        needs = placement.needs[callee]
        own = _wishes(composites[callee]).get("output", "any")
        uses = [use for use in readers.get(var, []) if needs_operand(placement, use).layout == DATA]
        scope, reason = _writer_scope(own, uses, needs.output_shape, needs.output_dtype, limits)
        placement.outputs[callee] = Form(DATA, scope)
        placement.tensors.append(
            TensorDecision(
                function,
                var.name,
                DATA,
                scope,
                layout(DATA).packed_shape(needs.output_shape),
                needs.output_dtype,
                reason,
            )
        )
    for value, uses in readers.items():
        writer = placement.outputs[made[value]] if value in made else None
        for use in uses:
            chosen[use.callee, use.operand] = _reader_form(needs_operand(placement, use), use, writer, limits)
    for callee in made.values():
        count = len(placement.needs[callee].operands)
        placement.operands[callee] = tuple(chosen[callee, number] for number in range(count))


def _leave_in_buffers(func: Any, composites: dict[str, Any], placement: Placement) -> None:
    """Refuse the composites whose conversions would cost more than packing them saves."""
    flows: dict[Any, Flow] = {}
    fixed: set[str] = set()
    free: set[str] = set()
    plain: set[Any] = set()

    def flow(value: Any, shape: tuple[int, ...], dtype: str) -> Flow:
        size = prod(layout(DATA).packed_shape(shape)) * np.dtype(dtype).itemsize
        return flows.setdefault(value, Flow(size))

    for binding in bindings_of(func.body):
        callee = _callee(binding)
        if callee is None or callee not in placement.needs:
            mark_plain(binding, plain)
            continue
        needs = placement.needs[callee]
        (fixed if has_convolution(composites[callee]) else free).add(callee)
        flow(binding.var, needs.output_shape, needs.output_dtype).writer = callee
        for operand in needs.operands:
            value = binding.value.args[operand.param]
            if operand.layout == DATA and not isinstance(value, tvm.ir.GenericConst):
                flow(value, operand.shape, operand.dtype).packed_readers.add(callee)
            else:
                mark_leaves(value, plain)
    mark_leaves(func.body.body, plain)
    for value, its in flows.items():
        its.plain_reader = value in plain
    for name, excess in cheaper_in_buffers(flows, fixed, free).items():
        del placement.needs[name]
        placement.refused[name] = (
            f"packing it would cost {excess} bytes more than leaving it in buffers with its neighbours",
            "",
        )


def has_convolution(func: Any) -> bool:
    """Whether a composite computes a convolution."""
    return any(
        op_name(binding.value).startswith("relax.nn.conv2d")
        for block in func.body.blocks
        for binding in block.bindings
    )


def mark_plain(binding: Any, plain: set[Any]) -> None:
    """Note every variable that a binding reads as it is."""
    value = getattr(binding, "value", None)
    if value is None:
        return
    if isinstance(value, relax.If):
        plain.add(value.cond)
        mark_leaves(value.true_branch.body, plain)
        mark_leaves(value.false_branch.body, plain)
        return
    mark_leaves(value, plain)


def mark_leaves(expr: Any, plain: set[Any]) -> None:
    """Note every variable in an expression."""
    if isinstance(expr, relax.Var):
        plain.add(expr)
    else:
        plain.update(relax.analysis.free_vars(expr))


def _callee(binding: Any) -> str | None:
    value = getattr(binding, "value", None)
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
        return str(value.op.name_hint)
    return None


def needs_operand(placement: Placement, use: _Use) -> Operand:
    """The operand that a use stands for."""
    return placement.needs[use.callee].operands[use.operand]


def _writer_scope(
    own: str, uses: list[_Use], shape: tuple[int, ...], dtype: str, limits: TextureLimits
) -> tuple[str, str]:
    """The scope of a composite's result: the vote of its readers, its own wish where they have none."""
    texture = sum(use.wish == "texture" for use in uses)
    buffer = sum(use.wish == GLOBAL for use in uses)
    if texture == buffer:
        wanted, reason = own, "the row's wish for its output"
    else:
        wanted = "texture" if texture > buffer else GLOBAL
        reason = f"{texture} of {len(uses)} readers ask for texture, {buffer} for a buffer"
    if wanted != "texture":
        return GLOBAL, reason
    scope, why_not = limits.folding(layout(DATA).packed_shape(shape), dtype)
    return (scope, reason) if scope else (GLOBAL, why_not)


def _reader_form(operand: Operand, use: _Use, writer: Form | None, limits: TextureLimits) -> Form:
    """The form in which one reader gets its operand."""
    if operand.layout == PLAIN:
        return PLAIN_FORM
    if use.wish == "any":
        return writer if writer is not None and operand.layout == DATA else Form(operand.layout, GLOBAL)
    if use.wish == GLOBAL:
        return Form(operand.layout, GLOBAL)
    if writer is not None and operand.layout == DATA and "texture" in writer.scope:
        return writer
    scope, _ = limits.folding(layout(operand.layout).packed_shape(_source(operand)), operand.dtype)
    return Form(operand.layout, scope or GLOBAL)


def _source(operand: Operand) -> tuple[int, ...]:
    return source_shape(operand.layout, operand.shape)


def source_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a layout packs: a channel vector is seen as (C,), whatever its ones."""
    return (prod(shape),) if len(layout(name).axes) == 1 else shape
