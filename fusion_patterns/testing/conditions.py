"""The conditions of a row, asked of plain data: the yardstick for the matcher's own reading of them.

It is written from the table's documentation and shares no code with `fusion_patterns.match`, except the
parser of ``that:``. A condition on something absent holds; what is not known at compile time satisfies
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fusion_patterns.table import expr
from fusion_patterns.table.model import PARTS, Broadcast, Predicate, Row
from fusion_patterns.table.ops import OPS
from fusion_patterns.testing.shapes import Shape, Type
from fusion_patterns.testing.spec import Graph

__all__ = ["Filled", "broken_conditions", "readings"]

_BY_RANK = {3: "NCW", 4: "NCHW", 5: "NCDHW"}
_SPATIAL = {"1": "W", "2": "HW", "3": "DHW"}


class _Unknown(Exception):
    """Not known at compile time."""


@dataclass(frozen=True)
class Filled:
    """How a graph fills a row: the value of each occurrence of a node, and the operand that each tensor is."""

    graph: Graph
    nodes: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, tuple[str, int]]
    output: str


_Operand = tuple[str, int]
_Subject = str | _Operand
"""The name of an operator, or an operand: the operator that takes it, and the position."""


def broken_conditions(row: Row, filled: Filled) -> list[int]:
    """The numbers of the conditions in ``row.where`` that don't hold."""
    asked = _Asked(filled)
    return [number for number, predicate in enumerate(row.where) if not asked.holds(predicate)]


def readings(filled: Filled) -> Iterator[Filled]:
    """All ways to name the tensors that these operators take: an operand may stand at another position."""
    members = {name for names in filled.nodes.values() for name in names}
    places = []
    for op_name, position in filled.tensors.values():
        op = filled.graph.op_of(op_name)
        assert op is not None
        free = [place for place, arg in enumerate(op.args) if arg not in members]
        may_move = op.op not in OPS or OPS[op.op].is_elementwise
        places.append([(op_name, place) for place in free] if may_move else [(op_name, position)])
    for chosen in product(*places):
        yield replace(filled, tensors=dict(zip(filled.tensors, chosen, strict=True)))


class _Asked:
    def __init__(self, filled: Filled) -> None:
        self.filled, self.graph = filled, filled.graph
        self.types: Mapping[str, Type] = filled.graph.types()

    def holds(self, predicate: Predicate) -> bool:
        if predicate.that is not None:
            return self._that(predicate.that)
        name = predicate.node if predicate.node is not None else predicate.tensor
        assert name is not None
        try:
            return all(self._one(predicate, subject) for subject in self._subjects(name))
        except _Unknown:
            return False

    def _subjects(self, name: str) -> tuple[_Subject, ...]:
        if name == "output":
            return (self.filled.output,)
        if name in self.filled.tensors:
            return (self.filled.tensors[name],)
        return self.filled.nodes.get(name, ())

    def _that(self, text: str) -> bool:
        expression = expr.parse(text)
        names = sorted({subject for subject, _ in expression.names()})
        for subjects in product(*(self._subjects(name) for name in names)):
            known = dict(zip(names, subjects, strict=True))

            def lookup(name: str, field: str, known: Mapping[str, _Subject] = known) -> Any:
                return self._field(known[name], field)

            try:
                if not expression.evaluate(lookup):
                    return False
            except (expr.UndecidableError, _Unknown):
                return False
        return True

    def _field(self, subject: _Subject, field: str) -> Any:
        if field == "uses":
            return self.graph.uses(self._value(subject))
        if field == PARTS and isinstance(subject, str):
            op = self.graph.op_of(subject)
            assert op is not None
            return len(op.args)
        if field == "shape":
            return self._static(subject)
        if field.isupper():
            return self._dim(subject, field)
        return self._attr(subject, field)

    def _one(self, predicate: Predicate, subject: _Subject) -> bool:
        shape, dtype = self.types[self._value(subject)]
        asked: Iterator[bool] = iter(
            (
                predicate.attr is None or _compare(predicate, self._attr(subject, predicate.attr)),
                predicate.dim is None or _compare(predicate, self._dim(subject, predicate.dim)),
                predicate.dtype is None or dtype in predicate.dtype,
                predicate.rank is None or len(shape) == predicate.rank,
                predicate.static is None or _is_static(shape) == predicate.static,
                predicate.constant is None or self._is_constant(subject) == predicate.constant,
                predicate.layout is None or self._layout(subject) in predicate.layout,
                predicate.uses is None or self.graph.uses(self._value(subject)) == predicate.uses,
                predicate.broadcast is None or bool(self._forms(subject) & set(predicate.broadcast)),
            )
        )
        return all(asked)

    def _value(self, subject: _Subject) -> str:
        if isinstance(subject, str):
            return subject
        op = self.graph.op_of(subject[0])
        assert op is not None
        return op.args[subject[1]]

    def _static(self, subject: _Subject) -> Shape:
        shape = self.types[self._value(subject)].shape
        if not _is_static(shape):
            raise _Unknown
        return shape

    def _attr(self, subject: _Subject, name: str) -> Any:
        op = self.graph.op_of(self._value(subject))
        assert op is not None
        value = op.attrs.get(name)
        if value is None or value == "":
            value = _default(op.op, name, op.attrs)
        elif name == "padding" and len(value) < 6:
            # A network says how much each axis gets; TVM keeps that for both ends.
            value = (*value, *value)
        return tuple(value) if isinstance(value, list) else value

    def _dim(self, subject: _Subject, dim: str | int) -> Any:
        shape = self.types[self._value(subject)].shape
        layout = self._layout(subject)
        place = layout.find(dim) if isinstance(dim, str) else dim
        if not 0 <= place < len(shape) or isinstance(shape[place], str):
            raise _Unknown
        return shape[place]

    def _is_constant(self, subject: _Subject) -> bool:
        value = self._value(subject)
        return any(tensor.name == value and tensor.constant for tensor in self.graph.tensors)

    def _layout(self, subject: _Subject) -> str:
        rank = len(self.types[self._value(subject)].shape)
        if isinstance(subject, str):
            said = self._layout_of(subject)
        else:
            op = self.graph.op_of(subject[0])
            assert op is not None
            said = ""
            if op.op.startswith("nn.conv"):
                said = str(self._attr(op.name, ("data_layout", "kernel_layout")[subject[1]]))
            elif subject[1] == 0 and "layout" in OPS[op.op].attrs:
                said = str(self._attr(op.name, "layout"))
            else:
                said = self._layout_of(op.name)
        return said if len(said) == rank else _BY_RANK.get(rank, "")

    def _layout_of(self, name: str) -> str:
        """The layout of a value: that of the last operator that has one, through elementwise operators."""
        op = self.graph.op_of(name)
        while op is not None:
            for attr in ("out_layout", "data_layout", "layout"):
                if attr in OPS[op.op].attrs:
                    return str(self._attr(op.name, attr))
            sources = [arg for arg in op.args if self.graph.op_of(arg) is not None]
            if not sources or not OPS[op.op].is_elementwise:
                return ""
            order = [each.name for each in self.graph.ops]
            op = self.graph.op_of(max(sources, key=order.index))
        return ""

    def _forms(self, subject: _Subject) -> set[Broadcast]:
        if isinstance(subject, str):
            return {Broadcast.SAME}
        op = self.graph.op_of(subject[0])
        assert op is not None
        own, whole = self.types[self._value(subject)].shape, self.types[op.name].shape
        forms = {Broadcast.SAME} if own == whole else set()
        if all(dim == 1 for dim in own):
            forms.add(Broadcast.SCALAR)
        layout = self._layout(op.name)
        if len(layout) == len(whole) and own:
            channel = layout.index("C") - len(whole)
            along = {place - len(own): dim for place, dim in enumerate(own)}
            if op.op == "nn.prelu" and len(own) == 1:
                along = {int(op.attrs.get("axis", 1)) - len(whole): own[0]}
            rest = [dim for place, dim in along.items() if place != channel]
            if along.get(channel) == whole[channel] and all(dim == 1 for dim in rest):
                forms.add(Broadcast.CHANNEL)
        return forms or {Broadcast.OTHER}


def _is_static(shape: Shape) -> bool:
    return not any(isinstance(dim, str) for dim in shape)


def _compare(predicate: Predicate, found: Any) -> bool:
    if predicate.equals is not None:
        return bool(found == predicate.equals)
    if predicate.among is not None:
        return found in predicate.among
    if not isinstance(found, int | float):
        return False
    if predicate.multiple_of is not None:
        return found % predicate.multiple_of == 0
    assert predicate.between is not None
    return predicate.between[0] <= found <= predicate.between[1]


def _default(op: str, name: str, attrs: Mapping[str, Any]) -> Any:
    """What an attribute is if it is not given."""
    if op.startswith(("nn.conv", "nn.max_pool", "nn.avg_pool", "nn.adaptive_avg_pool")):
        spatial = _SPATIAL[next(letter for letter in op if letter.isdigit())]
        layouts = {
            "data_layout": f"NC{spatial}",
            "layout": f"NC{spatial}",
            "kernel_layout": f"{'IO' if op.endswith('transpose') else 'OI'}{spatial}",
        }
        if name == "out_layout":
            return attrs.get("data_layout") or attrs.get("layout") or f"NC{spatial}"
        numbers = {"strides": 1, "dilation": 1, "padding": 0, "output_padding": 0}
        if name in numbers:
            return (numbers[name],) * (len(spatial) * (2 if name == "padding" else 1))
        if name in layouts:
            return layouts[name]
    return {"groups": 1, "keepdims": False, "layout": "NCHW", "alpha": 0.01, "axis": 1}.get(name)
