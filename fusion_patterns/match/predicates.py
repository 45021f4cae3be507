"""The conditions of a row, asked of a concrete match.

A condition that does not hold gives a `Failure`: the IR value it is about and a sentence. What is not known
at compile time (a symbolic dimension, say) never satisfies a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_patterns.match.graph import Graph, Operand, Value
from fusion_patterns.match.layouts import Subject, attribute_of, broadcast_forms, layout_of, tensor_of
from fusion_patterns.match.tensors import Tensor
from fusion_patterns.table import expr
from fusion_patterns.table.model import PARTS, Broadcast, Origin, Predicate

__all__ = ["Failure", "SameTensor", "Test"]


@dataclass(slots=True, eq=False)
class Failure:
    """A condition that does not hold: what it is about, and why. Both are put into words when read."""

    about: _Described
    say: Callable[[], str]

    @property
    def culprit(self) -> str:
        """The IR value's name."""
        return self.about.value

    @property
    def text(self) -> str:
        """A sentence."""
        return self.say()


@dataclass(slots=True, eq=False)
class _Described:
    """A subject in words."""

    graph: Graph
    name: str
    subject: Subject

    @property
    def value(self) -> str:
        """The IR value's name."""
        if isinstance(self.subject, Value):
            return self.subject.name
        return _operand_name(self.graph, self.subject)

    def __str__(self) -> str:
        if isinstance(self.subject, Value):
            return str(self.subject)
        taker = self.graph.values[self.subject[0]]
        return f"`{self.value}` ({self.name} of `{taker.name}`)"


class SameTensor:
    """The condition that two operands with one name in the row are one tensor."""

    origin = Origin()
    asks_types_only = False

    def holds(self, graph: Graph, subjects: Sequence[Subject]) -> bool:
        """Returns whether the condition holds."""
        first, second = subjects
        return _key_of(graph, first) == _key_of(graph, second)

    def failure(self, graph: Graph, subjects: Sequence[Subject]) -> Failure | None:
        """Returns why the condition does not hold, or None if it does."""
        first, second = (_key_of(graph, subject) for subject in subjects)
        if first == second:
            return None
        about, other = (_Described(graph, "operand", subject) for subject in subjects)
        return Failure(about, lambda: f"{about} and {other} have one name in the row but are two tensors")


def _key_of(graph: Graph, subject: Subject) -> int:
    if isinstance(subject, Value):
        return int(subject.var.__chandle__())
    return graph.values[subject[0]].keys[subject[1]]


class _UnknownError(Exception):
    """A value is not known at compile time."""


class Test:
    """A predicate made ready to be asked often; ``names`` are its subjects' names in the row, in order."""

    def __init__(self, predicate: Predicate, names: tuple[str, ...]) -> None:
        self.predicate = predicate
        self.names = names
        self.origin = predicate.origin
        self._expression = None if predicate.that is None else expr.parse(predicate.that)
        self._checks = tuple(
            check for field, check in _CHECKS.items() if getattr(predicate, field) is not None
        )
        # What all tensors of one dtype and shape answer alike; other fields may be attributes.
        if self._expression is not None:
            self.asks_types_only = all(field == "shape" for _, field in self._expression.names())
        else:
            self.asks_types_only = {_check_dtype, _check_rank, _check_static}.issuperset(self._checks)

    def holds(self, graph: Graph, subjects: Sequence[Subject]) -> bool:
        """Returns whether the condition holds."""
        if self._expression is None:
            return self.failure(graph, subjects) is None
        named = dict(zip(self.names, subjects, strict=True))
        try:
            return self._expression.evaluate(lambda name, field: _known_field(graph, named[name], field))
        except (expr.UndecidableError, _UnknownError):
            return False

    def failure(self, graph: Graph, subjects: Sequence[Subject]) -> Failure | None:
        """Returns why the condition does not hold, or None if it does."""
        if self._expression is not None:
            return self._arithmetic(self._expression, graph, subjects)
        about = _Described(graph, self.names[0], subjects[0])
        for check in self._checks:
            failure = check(self.predicate, about)
            if failure is not None:
                return failure
        return None

    def _arithmetic(
        self, expression: expr.Expression, graph: Graph, subjects: Sequence[Subject]
    ) -> Failure | None:
        named = dict(zip(self.names, subjects, strict=True))
        found: dict[tuple[str, str], Any] = {}

        def lookup(name: str, field: str) -> Any:
            value = found[(name, field)] = _field(graph, named[name], field)
            return value

        about = _Described(graph, self.names[0], subjects[0])
        try:
            if expression.evaluate(lookup):
                return None
        except (expr.UndecidableError, _UnknownError) as error:
            reason = str(error)
            return Failure(about, lambda: f"`{expression.text}` can't be decided: {reason}")

        def say() -> str:
            values = ", ".join(f"{name}.{field} = {_say(value)}" for (name, field), value in found.items())
            return f"`{expression.text}` does not hold: {values}"

        return Failure(about, say)


def _operand_name(graph: Graph, operand: Operand) -> str:
    number, position = operand
    expression = graph.values[number].operands[position]
    name = getattr(expression, "name", None)
    return f"constant operand {position} of {graph.values[number].name}" if name is None else str(name)


def _known_field(graph: Graph, subject: Subject, field: str) -> Any:
    """Returns ``subject.field``, which is read once; what can't be known is tried again and raises again."""
    found = graph.fields.get((subject, field))
    if found is None:
        found = graph.fields[(subject, field)] = _field(graph, subject, field)
    return found


def _field(graph: Graph, subject: Subject, field: str) -> Any:
    """Returns ``subject.field``: an attribute, a dimension by letter, ``shape``, ``uses``, or a node's ``parts``."""
    if field == "uses":
        return _uses(graph, subject)
    if field == PARTS and isinstance(subject, Value):
        return len(subject.operands)
    if isinstance(subject, Value) and not field.isupper() and field != "shape":
        found = attribute_of(subject, field)
        if found is None:
            raise _UnknownError(f"{subject} has no attribute {field}")
        return found
    tensor = tensor_of(graph, subject)
    if tensor.shape is None:
        raise _UnknownError("the shape is not known")
    if field == "shape":
        if None in tensor.shape:
            raise _UnknownError("the shape is not known")
        return tensor.shape
    return _dimension(graph, subject, tensor, field)


def _uses(graph: Graph, subject: Subject) -> int:
    """How often a value is read, results of the function counted."""
    if isinstance(subject, Value):
        return len(subject.users) + len(subject.exits)
    return graph.uses(graph.values[subject[0]].keys[subject[1]])


def _dimension(graph: Graph, subject: Subject, tensor: Tensor, dim: str | int) -> int:
    shape = tensor.shape
    if shape is None:
        raise _UnknownError("the shape is not known")
    if isinstance(dim, str):
        layout = layout_of(graph, subject)
        if dim not in layout or len(layout) != len(shape):
            raise _UnknownError(f"the layout {layout or 'is not known and'} has no {dim}")
        place = layout.index(dim)
    else:
        place = dim
        if not 0 <= place < len(shape):
            raise _UnknownError(f"there is no dimension {dim}")
    extent = shape[place]
    if extent is None:
        raise _UnknownError(f"the dimension {dim} is not known at compile time")
    return extent


# What a predicate can ask


def _check_attribute(predicate: Predicate, about: _Described) -> Failure | None:
    assert isinstance(about.subject, Value)
    name = predicate.attr
    assert name is not None
    found = attribute_of(about.subject, name)
    if found is None:
        return Failure(about, lambda: f"{about} has no attribute {name}")
    return _compare(predicate, found, about, name)


def _check_dimension(predicate: Predicate, about: _Described) -> Failure | None:
    dim = predicate.dim
    assert dim is not None
    try:
        found = _dimension(about.graph, about.subject, tensor_of(about.graph, about.subject), dim)
    except _UnknownError as error:
        reason = str(error)
        return Failure(about, lambda: f"{about}: {reason}")
    return _compare(predicate, found, about, f"dimension {dim}")


def _compare(predicate: Predicate, found: Any, about: _Described, what: str) -> Failure | None:
    """Compares an attribute or a dimension; 1 and true are one value, as they are in many attributes."""
    wanted = ""
    if predicate.equals is not None and found != predicate.equals:
        wanted = f"not {_say(predicate.equals)}"
    elif predicate.among is not None and found not in predicate.among:
        wanted = f"not {_either(map(_say, predicate.among))}"
    elif predicate.multiple_of is not None and (not _is_number(found) or found % predicate.multiple_of):
        wanted = f"no multiple of {predicate.multiple_of}"
    elif predicate.between is not None:
        least, most = predicate.between
        if not _is_number(found) or not least <= found <= most:
            wanted = f"not between {least:g} and {most:g}"
    return Failure(about, lambda: f"{what} of {about} is {_say(found)}, {wanted}") if wanted else None


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float)


def _check_dtype(predicate: Predicate, about: _Described) -> Failure | None:
    return _one_of(predicate.dtype, tensor_of(about.graph, about.subject).dtype, "dtype", about)


def _check_layout(predicate: Predicate, about: _Described) -> Failure | None:
    return _one_of(predicate.layout, layout_of(about.graph, about.subject), "layout", about)


def _one_of(allowed: tuple[str, ...] | None, found: str, what: str, about: _Described) -> Failure | None:
    if allowed is None or found in allowed:
        return None
    return Failure(about, lambda: f"{what} of {about} is {found or 'not known'}, not {_either(allowed)}")


def _check_rank(predicate: Predicate, about: _Described) -> Failure | None:
    found = tensor_of(about.graph, about.subject).rank
    if found == predicate.rank:
        return None
    said = "not known" if found is None else str(found)
    return Failure(about, lambda: f"rank of {about} is {said}, not {predicate.rank}")


def _check_constant(predicate: Predicate, about: _Described) -> Failure | None:
    graph, subject = about.graph, about.subject
    expression = subject.var if isinstance(subject, Value) else graph.values[subject[0]].operands[subject[1]]
    if graph.is_constant(expression) == predicate.constant:
        return None
    return Failure(about, lambda: f"{about} is {'no' if predicate.constant else 'a'} constant")


def _check_static(predicate: Predicate, about: _Described) -> Failure | None:
    tensor = tensor_of(about.graph, about.subject)
    if tensor.is_static == predicate.static:
        return None
    reason = "has a static shape" if tensor.is_static else "has a shape that is not known at compile time"
    return Failure(about, lambda: f"{about} {reason}")


def _check_uses(predicate: Predicate, about: _Described) -> Failure | None:
    uses = _uses(about.graph, about.subject)
    if uses == predicate.uses:
        return None
    return Failure(about, lambda: f"{about} is used {_times(uses)}, not {_times(predicate.uses)}")


def _times(count: int | None) -> str:
    return {1: "once", 2: "twice"}.get(count or 0, f"{count} times")


def _check_broadcast(predicate: Predicate, about: _Described) -> Failure | None:
    allowed, subject = predicate.broadcast, about.subject
    assert allowed is not None
    forms = {Broadcast.SAME} if isinstance(subject, Value) else broadcast_forms(about.graph, subject)
    if not forms.isdisjoint(allowed):
        return None
    found = _either(sorted(forms)) if forms else "not known"
    return Failure(about, lambda: f"broadcast form of {about} is {found}, not {_either(allowed)}")


def _say(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _either(words: Any) -> str:
    *first, last = (str(word) for word in words)
    return f"{', '.join(first)} or {last}" if first else last


_Check = Callable[[Predicate, _Described], Failure | None]
_CHECKS: dict[str, _Check] = {
    "attr": _check_attribute,
    "dim": _check_dimension,
    "dtype": _check_dtype,
    "rank": _check_rank,
    "constant": _check_constant,
    "static": _check_static,
    "layout": _check_layout,
    "broadcast": _check_broadcast,
    "uses": _check_uses,
}
"""In the order in which they are asked; all that a predicate asks for must hold."""
