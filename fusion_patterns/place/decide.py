"""Needs and wishes of all composites -> one form (layout and scope) for each tensor and reader.

First a minimum cut says which composites are worth packing (``balance``), then each tensor's scope is
chosen by itself (``choice``). What no composite writes is plain in a buffer; its packed forms are made
where it is defined, once each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax

from .anchors import NotPacked
from .balance import Balance, Flow
from .calls import op_name
from .choice import Choice, Tensor, choose
from .decision import (
    ANY,
    BY_CUT,
    GLOBAL,
    INDEPENDENT,
    PLAIN_FORM,
    SCOPES_ATTR,
    TEXTURE,
    Alternative,
    Conversion,
    Form,
    Placement,
    TensorDecision,
    Wish,
    bindings_of,
    byte_count,
    composites_of,
    source_shape,
)
from .layouts import DATA, PLAIN, layout
from .limits import FOLDINGS, TextureLimits
from .needs import needs_of
from .profiles import Profile, profile_for
from .traffic import times_read

__all__ = [
    "GLOBAL",
    "PLAIN_FORM",
    "SCOPES_ATTR",
    "Form",
    "Placement",
    "TensorDecision",
    "bindings_of",
    "composites_of",
    "decide",
    "mark_leaves",
    "mark_plain",
    "source_shape",
]


def decide(
    mod: tvm.IRModule,
    target: Any,
    profile: Profile | None = None,
    *,
    packed_only: Collection[str] | None = (),
) -> Placement:
    """Decide the form of every tensor at a composite's edge.

    ``target`` gives the device limits and, unless ``profile`` is given, the costs. Composites that can't be
    packed, and those that cost less in buffers, are listed in ``refused`` and left out. ``packed_only``: names of the
    kernels that can't read or write data as the module has it; ``None``: all.
    """
    work = _Decision(mod, target, profile or profile_for(target), packed_only)
    for gv, func in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(func, relax.Function) and gv.name_hint not in work.composites:
            work.function(str(gv.name_hint), func)
    return work.placement


@dataclass
class _Use:
    """One argument of a composite's call: the number of the callee's operand."""

    callee: str
    operand: int


@dataclass
class _Caller:
    """One function: which composite writes a value, who reads it, and which values are read as they are."""

    name: str
    made: dict[Any, str] = field(default_factory=dict)
    uses: dict[Any, list[_Use]] = field(default_factory=dict)
    plain: set[Any] = field(default_factory=set)
    values: dict[Any, None] = field(default_factory=dict)
    """Every tensor at a composite's edge, in program order."""
    direct: dict[Any, tuple[str, tuple[Alternative, ...]]] = field(default_factory=dict)
    """Plain tensors that packed kernels read as they are, why, and what packing them would have cost."""


class _Decision:
    def __init__(
        self, mod: tvm.IRModule, target: Any, profile: Profile, packed_only: Collection[str] | None
    ) -> None:
        self.composites = composites_of(mod)
        self.packed_only = packed_only
        self.limits = TextureLimits.of(target)
        if not profile.textures:
            lacking = f"profile `{profile.name}` says that textures bring nothing on its device"
            self.limits = replace(self.limits, textures=False, lacking=lacking)
        self.placement = Placement(profile)
        self.times: dict[str, tuple[float, ...]] = {}
        for name, func in self.composites.items():
            try:
                needs = self.placement.needs[name] = needs_of(func)
                self.times[name] = times_read(func, needs)
            except NotPacked as refusal:
                self.placement.refused[name] = (refusal.reason, refusal.culprit)

    def function(self, name: str, func: Any) -> None:
        """Decide all that one function calls."""
        self._leave_in_buffers(name, func)
        caller = self._scan(name, func)
        self._read_as_they_are(caller)
        self._write_as_they_are_read(caller)
        chosen: dict[tuple[str, int], Form] = {}
        for value in caller.values:
            self._tensor(caller, value, chosen)
        for callee in caller.made.values():
            if self._writes_plain(callee):
                self.placement.outputs[callee] = PLAIN_FORM
            count = len(self.placement.needs[callee].operands)
            self.placement.operands[callee] = tuple(chosen[callee, number] for number in range(count))

    def _scan(self, name: str, func: Any) -> _Caller:
        caller = _Caller(name)
        for binding in bindings_of(func.body):
            callee = self._callee(binding)
            if callee is None:
                mark_plain(binding, caller.plain)
                continue
            for number, operand in enumerate(self.placement.needs[callee].operands):
                value = binding.value.args[operand.param]
                caller.uses.setdefault(value, []).append(_Use(callee, number))
                caller.values[value] = None
                if operand.layout == PLAIN:
                    caller.plain.add(value)
            caller.made[binding.var] = callee
            caller.values[binding.var] = None
        mark_leaves(func.body.body, caller.plain)
        return caller

    def _writes_plain(self, callee: str | None) -> bool:
        """Whether a composite's kernel writes its result as the module has it."""
        return callee is not None and self.placement.needs[callee].output_layout == PLAIN

    def _writer(self, caller: _Caller, value: Any) -> str | None:
        """The composite that writes a value in packed layout."""
        made = caller.made.get(value)
        return None if self._writes_plain(made) else made

    def _callee(self, binding: Any) -> str | None:
        """The packed composite that a binding calls."""
        value = getattr(binding, "value", None)
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            name = str(value.op.name_hint)
            return name if name in self.placement.needs else None
        return None

    # Packed or plain ----------------------------------------------------------------------------------------

    def _leave_in_buffers(self, name: str, func: Any) -> None:
        """Refuse the composites whose conversions would cost more than packing them saves."""
        caller = self._scan(name, func)
        fixed = {
            callee
            for callee in caller.made.values()
            if has_convolution(self.composites[callee]) or self._writes_plain(callee)
        }
        free = set(caller.made.values()) - fixed
        scope = FOLDINGS[0] if self.limits.textures else GLOBAL
        flows = {value: self._flow(caller, value) for value in caller.values if not _is_constant(value)}
        gains = {callee: self._gain(callee, scope) for callee in sorted(free)}
        plain = {
            callee
            for value, callee in caller.made.items()
            if callee in free and self._is_plain_only(caller, value)
        }
        gains |= dict.fromkeys(plain, -1)
        balance = Balance(flows, fixed, free, gains, self.placement.profile, scope)
        self.placement.balances[name] = balance
        written = {callee: var for var, callee in caller.made.items()}
        for callee, excess in balance.left.items():
            needs = self.placement.needs.pop(callee)
            reason = (
                "all that it reads and writes is plain: a kernel of ours would be no better than stock's"
                if callee in plain
                else f"packing it would cost {excess} bytes more than leaving it in buffers with its neighbours"
            )
            self.placement.refused[callee] = (reason, "")
            self.placement.tensors.append(
                TensorDecision(
                    name,
                    str(written[callee].name),
                    PLAIN,
                    GLOBAL,
                    needs.output_shape,
                    needs.output_dtype,
                    reason,
                    writer=callee,
                    by=BY_CUT,
                )
            )

    def _flow(self, caller: _Caller, value: Any) -> Flow:
        writer = self._writer(caller, value)
        uses = caller.uses.get(value, [])
        data = [use for use in uses if self._operand(use).layout == DATA]
        made = caller.made.get(value)
        if made is not None:
            needs = self.placement.needs[made]
            shape, dtype = needs.output_shape, needs.output_dtype
        else:
            shape, dtype = self._operand(uses[0]).shape, self._operand(uses[0]).dtype
        size = byte_count(layout(DATA).packed_shape(shape), dtype) if writer or data else 0
        plain = value in caller.plain or len(data) < len(uses)
        own = self._wishes(writer).get("output", ANY) if writer is not None else ANY
        wishes = {self._wish(use).scope for use in data}
        in_buffer = TEXTURE not in wishes and (not wishes or own != TEXTURE)
        is_view = in_buffer and len(shape) == 4 and layout(DATA).is_view(shape)
        if writer is not None:
            is_view = is_view or not self._is_read_packed(caller, value)
        return Flow(size, writer, {use.callee for use in data}, plain, is_view)

    def _gain(self, callee: str, scope: str) -> int:
        """What the composite's own kernel saves by reading and writing packed tensors."""
        needs, profile = self.placement.needs[callee], self.placement.profile
        packed = layout(DATA).packed_shape
        gain = profile.write(GLOBAL, byte_count(needs.output_shape, needs.output_dtype))
        gain -= profile.write(scope, byte_count(packed(needs.output_shape), needs.output_dtype))
        for operand, times in zip(needs.operands, self.times[callee], strict=True):
            if operand.layout == DATA:
                gain += profile.read(GLOBAL, byte_count(operand.shape, operand.dtype), times)
                gain -= profile.read(scope, byte_count(packed(operand.shape), operand.dtype), times)
        return gain

    def _read_as_they_are(self, caller: _Caller) -> None:
        """Let kernels read plain tensors that no reader wants in texture, where that costs less than packing them."""
        for value, uses in caller.uses.items():
            data = [use for use in uses if self._operand(use).layout == DATA]
            if value in caller.made or _is_constant(value) or not data:
                continue
            if any(self._is_packed_only(use.callee) for use in data):
                continue
            if any(self._wish(use).scope == TEXTURE for use in data):
                continue
            packed = self._choose(caller, value, DATA, data, True, tiled=True)
            size = byte_count(self._operand(data[0]).shape, self._operand(data[0]).dtype)
            read = self.placement.profile.read
            cost = sum(read(GLOBAL, size, self._wish(use, tiled=True).times) for use in data)
            if cost >= packed.cost:
                continue
            for use in data:
                self._read_plain(use)
            reason = f"read as it is: {cost} bytes moved, {packed.cost} if it were packed"
            caller.plain.add(value)
            caller.direct[value] = reason, (*packed.alternatives, Alternative(PLAIN, GLOBAL, cost))

    def _write_as_they_are_read(self, caller: _Caller) -> None:
        """Let kernels write plain what nobody reads packed."""
        for value, writer in caller.made.items():
            needs = self.placement.needs[writer]
            if needs.output_layout == DATA and not self._is_read_packed(caller, value):
                self.placement.needs[writer] = replace(needs, output_layout=PLAIN)

    def _is_read_packed(self, caller: _Caller, value: Any) -> bool:
        """Whether a value has to be packed, or may as well be because that is the same bytes."""
        shape = self.placement.needs[caller.made[value]].output_shape
        if self._is_packed_only(caller.made[value]):
            return True
        uses = caller.uses.get(value, [])
        return layout(DATA).is_view(shape) or any(self._operand(use).layout == DATA for use in uses)

    def _is_plain_only(self, caller: _Caller, value: Any) -> bool:
        """Whether all that a composite reads and writes is plain: its kernel would be no better than stock's."""
        operands = self.placement.needs[caller.made[value]].operands
        return not any(o.layout == DATA for o in operands) and not self._is_read_packed(caller, value)

    def _is_packed_only(self, callee: str) -> bool:
        kernel = str(self.composites[callee].attrs.get("fusion_patterns.kernel", ""))
        return self.packed_only is None or kernel in self.packed_only

    def _read_plain(self, use: _Use) -> None:
        needs = self.placement.needs[use.callee]
        operands = list(needs.operands)
        operands[use.operand] = replace(operands[use.operand], layout=PLAIN)
        self.placement.needs[use.callee] = replace(needs, operands=tuple(operands))

    # Texture or buffer --------------------------------------------------------------------------------------

    def _tensor(self, caller: _Caller, value: Any, chosen: dict[tuple[str, int], Form]) -> None:
        """Choose the forms of one value: one choice for each layout in which it is read or written."""
        writer = self._writer(caller, value)
        uses = caller.uses.get(value, [])
        layouts = dict.fromkeys(self._operand(use).layout for use in uses)
        if writer is not None:
            layouts = dict.fromkeys([DATA, *layouts])
        choices: dict[str, Choice] = {}
        for name in sorted(layouts, key=lambda each: (each != DATA, each)):
            group = [use for use in uses if self._operand(use).layout == name]
            if name == PLAIN:
                chosen.update({(use.callee, use.operand): PLAIN_FORM for use in group})
                continue
            choice = choices[name] = self._choose(caller, value, name, group, set(layouts) != {name})
            for use, scope in zip(group, choice.readers, strict=True):
                chosen[use.callee, use.operand] = Form(name, scope)
        if writer is not None:
            self.placement.outputs[writer] = Form(DATA, choices[DATA].scope)
        self.placement.tensors.append(self._decision(caller, value, choices))

    def _choose(
        self,
        caller: _Caller,
        value: Any,
        name: str,
        group: list[_Use],
        elsewhere: bool,
        *,
        tiled: bool = False,
    ) -> Choice:
        writer = self._writer(caller, value) if name == DATA else None
        if writer is not None:
            needs = self.placement.needs[writer]
            source, dtype = needs.output_shape, needs.output_dtype
        else:
            source, dtype = self._operand(group[0]).shape, self._operand(group[0]).dtype
        shape = layout(name).packed_shape(source_shape(name, source))
        own = self._wishes(writer).get("output", ANY) if writer is not None else None
        tensor = Tensor(
            name,
            shape,
            dtype,
            byte_count(shape, dtype),
            tuple(self._wish(use, tiled=tiled) for use in group),
            own,
            constant=_is_constant(value),
            read_plain=value in caller.plain or elsewhere,
            is_view=layout(name).is_view(source_shape(name, source)),
        )
        return choose(tensor, self.limits, self.placement.profile)

    def _decision(self, caller: _Caller, value: Any, choices: dict[str, Choice]) -> TensorDecision:
        writer = caller.made.get(value)
        uses = caller.uses.get(value, [])
        written = 0
        alternatives: list[Alternative] = [a for choice in choices.values() for a in choice.alternatives]
        conversions: list[Conversion] = [c for choice in choices.values() for c in choice.conversions]
        wishes = tuple(
            sorted((self._wish(use) for use in uses), key=lambda wish: (wish.reader, wish.operand))
        )
        if writer is not None and self._writes_plain(writer):
            needs = self.placement.needs[writer]
            written = self.placement.profile.write(GLOBAL, byte_count(needs.output_shape, needs.output_dtype))
            form, reason, by = (
                PLAIN_FORM,
                "nobody reads it packed, so it is written as the module has it",
                INDEPENDENT,
            )
            shape, dtype = needs.output_shape, needs.output_dtype
        elif writer is not None:
            needs = self.placement.needs[writer]
            form, reason = self.placement.outputs[writer], choices[DATA].reason
            shape, dtype = layout(DATA).packed_shape(needs.output_shape), needs.output_dtype
            by = BY_CUT if writer in self.placement.balances[caller.name].free else INDEPENDENT
        else:
            shape, dtype = self._operand(uses[0]).shape, self._operand(uses[0]).dtype
            if _is_constant(value) and len(choices) == 1:
                (name, choice), *_ = choices.items()
                form, reason = Form(name, choice.scope), choice.reason
                shape = layout(name).packed_shape(source_shape(name, shape))
            else:
                form, reason = PLAIN_FORM, "no composite writes it, so it stays as the module has it"
            by = INDEPENDENT
            if value in caller.direct:
                reason, weighed = caller.direct[value]
                alternatives += weighed
        return TensorDecision(
            caller.name,
            self._name(value, uses),
            form.layout,
            form.scope,
            shape,
            dtype,
            reason,
            writer,
            wishes,
            tuple(alternatives),
            tuple(conversions),
            by,
            sum(choice.cost for choice in choices.values()) + written,
        )

    def _name(self, value: Any, uses: list[_Use]) -> str:
        """The IR value's name; a constant is called after the first operand that it is."""
        if not _is_constant(value):
            return str(value.name)
        return f"{uses[0].callee}.{self._operand(uses[0]).name}"

    def _operand(self, use: _Use) -> Any:
        return self.placement.needs[use.callee].operands[use.operand]

    def _wishes(self, composite: str) -> dict[str, str]:
        attrs = self.composites[composite].attrs[SCOPES_ATTR]
        return {str(key): str(value) for key, value in attrs.items()}

    def _wish(self, use: _Use, *, tiled: bool = False) -> Wish:
        """What a reader asks for.

        ``tiled``: what a work item loads serves all the texels that it sums. Between scopes that is the same on both
        sides; against a conversion, whose cost does not depend on it, it counts.
        """
        operand = self._operand(use)
        param = self.composites[use.callee].params[operand.param].name
        scope = self._wishes(use.callee).get(param, ANY)
        times = self.times[use.callee][use.operand]
        if tiled:
            times = max(1.0, times / self.placement.profile.tiles.accumulators)
        return Wish(use.callee, operand.name, operand.layout, scope, times)


def _is_constant(value: Any) -> bool:
    return isinstance(value, tvm.ir.GenericConst)


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
