"""How a tensor is described: the names of its dimensions, and how it meets what it is combined with."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from fusion_patterns.match.graph import Graph, Operand, Value
from fusion_patterns.match.tensors import Tensor
from fusion_patterns.table.model import Broadcast
from fusion_patterns.table.ops import OPS

__all__ = ["Subject", "attribute_of", "broadcast_forms", "layout_of", "tensor_of"]

Subject = Value | Operand
"""An operator, or an operand of one (the number of the value that takes it, and the position)."""

_BY_RANK = {3: "NCW", 4: "NCHW", 5: "NCDHW"}
_FARTHEST = 64
"""How many elementwise operators a layout is followed through."""


def tensor_of(graph: Graph, subject: Subject) -> Tensor:
    """Returns what is known of the tensor that a subject computes or takes."""
    if isinstance(subject, Value):
        return graph.tensor(subject.var)
    return graph.tensor(graph.values[subject[0]].operands[subject[1]])


def attribute_of(value: Value, name: str) -> Any:
    """Returns an attribute as plain data, or None if there is none."""
    attrs = None if value.call is None else value.call.attrs
    found = None if attrs is None else getattr(attrs, name, None)
    return _plain(found)


def _plain(found: Any) -> Any:
    if found is None or isinstance(found, bool | int | float | str):
        return found
    if isinstance(found, tirx.IntImm):
        return int(found.value)
    if isinstance(found, tirx.FloatImm):
        return float(found.value)
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return tuple(_plain(item) for item in found[:])
    return str(found)


def layout_of(graph: Graph, subject: Subject) -> str:
    """Returns the layout that names a tensor's dimensions, or "" if there is none.

    A convolution says what the layouts of its operands are; through elementwise operators the layout of what
    they work on is followed backwards; where nothing says more, the rank decides (NCHW for four).
    """
    if isinstance(subject, Value):
        return _layout_of_value(graph, subject) or _BY_RANK.get(tensor_of(graph, subject).rank or 0, "")
    taker, position = graph.values[subject[0]], subject[1]
    rank = tensor_of(graph, subject).rank or 0
    if taker.op.startswith("nn.conv"):
        said = attribute_of(taker, "data_layout" if position == 0 else "kernel_layout")
    elif position == 0 and "layout" in (OPS[taker.op].attrs if taker.op in OPS else ()):
        said = attribute_of(taker, "layout")
    else:
        said = _layout_of_value(graph, taker)
    return str(said) if said and len(said) == rank else _BY_RANK.get(rank, "")


def _layout_of_value(graph: Graph, value: Value) -> str:
    for _ in range(_FARTHEST):
        for attribute in ("out_layout", "data_layout", "layout"):
            said = attribute_of(value, attribute) if value.op else None
            if said:
                return str(said)
        source = max(value.sources, default=-1)
        if source < 0 or value.op not in OPS or not OPS[value.op].is_elementwise:
            return ""
        value = graph.values[source]
    return ""


def broadcast_forms(graph: Graph, operand: Operand) -> set[Broadcast]:
    """Returns all forms in which an operand meets the value it is combined with; empty if not known."""
    taker = graph.values[operand[0]]
    own = tensor_of(graph, operand).shape
    whole = graph.tensor(taker.var).shape
    if own is None or whole is None:
        return set()
    forms = set()
    if own == whole and (None not in own or _same_symbols(graph, operand)):
        forms.add(Broadcast.SAME)
    if all(extent == 1 for extent in own):
        forms.add(Broadcast.SCALAR)
    layout = layout_of(graph, taker)
    if "C" in layout and len(layout) == len(whole) and own:
        channel = layout.index("C") - len(whole)
        if taker.op == "nn.prelu" and len(own) == 1:
            # A slope runs along the operator's own axis, whatever the rank says.
            axis = int(attribute_of(taker, "axis"))
            along = axis if axis < 0 else axis - len(whole)
            aligned = {along: own[0]}
        else:
            aligned = {place - len(own): extent for place, extent in enumerate(own)}
        others = (extent for place, extent in aligned.items() if place != channel)
        if all(extent == 1 for extent in others) and aligned.get(channel) == whole[channel] is not None:
            forms.add(Broadcast.CHANNEL)
    return forms or {Broadcast.OTHER}


def _same_symbols(graph: Graph, operand: Operand) -> bool:
    """Whether two shapes with symbolic dimensions are one and the same."""
    taker = graph.values[operand[0]]
    own, whole = taker.operands[operand[1]].ty.shape, taker.var.ty.shape
    if own is None or whole is None:
        return False
    return bool(tvm_ffi.structural_equal(own, whole))
