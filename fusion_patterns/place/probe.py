"""Looking inside: the results of all composites of a function, to find where numbers first go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .decide import GLOBAL, Placement, composites_of
from .layouts import PLAIN, layout

__all__ = ["CompositeValue", "composite_values", "unpack_array", "with_composite_outputs"]


@dataclass(frozen=True)
class CompositeValue:
    """One composite's result: its variable before placement, and the packed variable after it."""

    name: str
    packed: str
    layout: str
    composite: str
    row: str
    var: Any


def composite_values(fused: tvm.IRModule, placement: Placement, function: str) -> list[CompositeValue]:
    """The composites that a function calls outside of branches, in program order."""
    composites = composites_of(fused)
    found = []
    for block in fused[function].body.blocks:
        for binding in block.bindings:
            callee = getattr(getattr(getattr(binding, "value", None), "op", None), "name_hint", None)
            if callee in composites:
                form = placement.outputs[str(callee)]
                suffix = form.layout.lower() + ("" if form.scope == GLOBAL else "_texture")
                name = str(binding.var.name)
                held = name if form.is_plain else f"{name}_{suffix}"
                row = str(composites[str(callee)].attrs["Composite"])
                found.append(CompositeValue(name, held, form.layout, str(callee), row, binding.var))
    return found


def with_composite_outputs(fused: tvm.IRModule, values: list[CompositeValue], function: str) -> tvm.IRModule:
    """The module with ``function`` returning those composites' results instead of its own."""
    func = fused[function]
    wanted = {value.name: value.var for value in values}
    moved = {var: relax.Var(str(var.name), var.ty) for var in wanted.values()}
    blocks = []
    for block in func.body.blocks:
        bindings = []
        for binding in block.bindings:
            bindings.append(binding)
            if binding.var in moved:
                bindings.append(relax.VarBinding(moved[binding.var], binding.var))
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind(bindings))
    result = relax.Tuple([moved[value.var] for value in values])
    ty = relax.TupleType([value.var.ty for value in values])
    mod = fused.clone()
    out = relax.Function(func.params, relax.SeqExpr(blocks, result), ty, bool(func.is_pure), func.attrs)
    mod[mod.get_global_var(function)] = out
    return relax.transform.Normalize()(mod)


def unpack_array(array: np.ndarray[Any, Any], name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A packed array in its source's layout, padding cut off."""
    if name == PLAIN:
        return array
    kind = layout(name)
    rank = len(kind.axes)
    order: list[int] = []
    for axis in range(rank):
        order.append(axis)
        order += [rank + k for k, (block, _) in enumerate(kind.blocks) if block == axis]
    padded = kind.padded_shape(shape)
    return array.transpose(order).reshape(padded)[tuple(slice(0, d) for d in shape)]
