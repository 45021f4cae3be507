"""The conditions that `that:` takes: arithmetic and comparisons over named nodes and tensors.

    truth  = truth "and" truth | truth "or" truth | "not" truth | value (("==" | "!=" | "<" | ...) value)+
    value  = number | name.field | name.field[index] | -value | value ("+" | "-" | "*" | "//" | "%") value

The text is parsed by Python's own parser and then every node is checked against this grammar: what is not
listed can't be said. There are no calls, no strings, no division that could give a fraction.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Expression", "ExpressionError", "Lookup", "UndecidableError", "parse"]

MAX_LENGTH = 500
MAX_DEPTH = 40

Lookup = Callable[[str, str], Any]
"""Gives the value of a subject's field: ``lookup("conv", "strides")`` is ``(1, 1)``."""

_Evaluator = Callable[[Lookup], Any]

_ARITHMETIC: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_EQUALITY: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
_ORDER: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}


class ExpressionError(ValueError):
    """The text is not an expression of this language; ``column`` (from 1) says where."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


class UndecidableError(ValueError):
    """The values at hand don't decide the condition: a division by zero, an index that is not there."""


@dataclass(frozen=True)
class Reference:
    """One ``subject.field`` of an expression, and the column (from 1) where it stands."""

    subject: str
    field: str
    indexed: bool
    column: int


@dataclass(frozen=True)
class Expression:
    """A parsed condition."""

    text: str
    references: tuple[Reference, ...]
    _evaluator: _Evaluator

    def names(self) -> frozenset[tuple[str, str]]:
        """Returns every (subject, field) that the expression asks for."""
        return frozenset((reference.subject, reference.field) for reference in self.references)

    def evaluate(self, lookup: Lookup) -> bool:
        """Returns whether the condition holds, given the value of each field.

        Raises `UndecidableError` where the values don't fit the arithmetic, and whatever ``lookup`` raises.
        """
        return bool(self._evaluator(lookup))


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """Returns the expression that ``text`` says; raises `ExpressionError` with a column if it says none."""
    if not text.strip():
        raise ExpressionError("the condition is empty", 1)
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the condition is longer than {MAX_LENGTH} characters; split it", MAX_LENGTH + 1
        )
    for column, character in enumerate(text, start=1):
        if character in "#\\" or (not " " <= character <= "~" and character != "\n"):
            raise ExpressionError(f"the character {character!r} can't stand in a condition", column)
    # A line break is a space, as in YAML's folded text. Python would take a space at the start for an indent.
    line = text.replace("\n", " ").lstrip()
    skipped = len(text) - len(line)
    try:
        tree = ast.parse(line, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        # Python's own words change from one of its versions to the next; its position is good enough.
        offset = getattr(error, "offset", None) or len(line) + 1
        message = (
            "can't read the condition from here; write it like `conv.groups == data.C and weight.I == 1`"
        )
        raise ExpressionError(message, min(offset + skipped, len(text) + 1)) from None
    compiler = _Compiler(first_column=skipped + 1)
    evaluator = compiler.truth(tree.body, 0)
    return Expression(text, tuple(compiler.references), evaluator)


class _Compiler:
    """Turns a syntax tree into closures, refusing all that the grammar does not list."""

    def __init__(self, first_column: int) -> None:
        self.first_column = first_column
        self.references: list[Reference] = []

    def truth(self, node: ast.expr, depth: int) -> _Evaluator:
        self._check_depth(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(value, depth + 1) for value in node.values]
            if isinstance(node.op, ast.And):
                return lambda lookup: all(part(lookup) for part in parts)
            return lambda lookup: any(part(lookup) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, depth + 1)
            return lambda lookup: not inner(lookup)
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        raise self._refuse(node, "a comparison is needed here, such as `conv.groups == 1`")

    def value(self, node: ast.expr, depth: int) -> _Evaluator:
        self._check_depth(node, depth)
        if isinstance(node, ast.Constant):
            return self._number(node)
        if isinstance(node, ast.Attribute):
            return self._field(node, indexed=False)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self.value(node.operand, depth + 1)
            return lambda lookup: -_number(operand(lookup), "-")
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._arithmetic(node, depth)
        if isinstance(node, ast.Name):
            raise self._refuse(node, f"'{node.id}' is only a name; ask for one of its fields: `{node.id}.C`")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            raise self._refuse(node, "`/` is not known here; write `//`, or multiply the other side")
        raise self._refuse(node, "only numbers, `name.field`, `name.field[0]` and + - * // % can stand here")

    def _comparison(self, node: ast.Compare, depth: int) -> _Evaluator:
        operands = [self.value(operand, depth + 1) for operand in (node.left, *node.comparators)]
        tests: list[Callable[[Any, Any], bool]] = []
        for cmpop in node.ops:
            if type(cmpop) in _EQUALITY:
                tests.append(_EQUALITY[type(cmpop)])
            elif type(cmpop) in _ORDER:
                tests.append(_ordered(*_ORDER[type(cmpop)]))
            else:
                raise self._refuse(
                    node, "only == != < <= > >= compare; write `a == 1 or a == 2` for a choice"
                )

        def evaluate(lookup: Lookup) -> bool:
            left = operands[0](lookup)
            for test, operand in zip(tests, operands[1:], strict=True):
                right = operand(lookup)
                if not test(left, right):
                    return False
                left = right
            return True

        return evaluate

    def _arithmetic(self, node: ast.BinOp, depth: int) -> _Evaluator:
        symbol, apply = _ARITHMETIC[type(node.op)]
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)

        def evaluate(lookup: Lookup) -> Any:
            a, b = _number(left(lookup), symbol), _number(right(lookup), symbol)
            try:
                return apply(a, b)
            except (ZeroDivisionError, OverflowError):
                raise UndecidableError(f"{a} {symbol} {b} has no value") from None

        return evaluate

    def _number(self, node: ast.Constant) -> _Evaluator:
        value = node.value
        if isinstance(value, bool):
            raise self._refuse(node, "write 1 for true and 0 for false")
        if not isinstance(value, int | float):
            raise self._refuse(node, "only numbers can stand here; compare text with `attr:` and `equals:`")
        return lambda _: value

    def _field(self, node: ast.Attribute, *, indexed: bool) -> _Evaluator:
        if not isinstance(node.value, ast.Name):
            raise self._refuse(node, "a field is one name, a dot and one name: `conv.groups`")
        subject, field = node.value.id, node.attr
        self.references.append(Reference(subject, field, indexed, node.col_offset + self.first_column))
        return lambda lookup: lookup(subject, field)

    def _item(self, node: ast.Subscript) -> _Evaluator:
        index = ast.literal_eval(node.slice) if isinstance(node.slice, ast.Constant) else None
        if not isinstance(index, int) or isinstance(index, bool):
            raise self._refuse(node.slice, "an index is a whole number from 0")
        if not isinstance(node.value, ast.Attribute):
            raise self._refuse(node, "an index follows a field: `conv.strides[0]`")
        field = self._field(node.value, indexed=True)
        name = f"{ast.unparse(node.value)}[{index}]"

        def evaluate(lookup: Lookup) -> Any:
            value = field(lookup)
            try:
                return value[index]
            except (TypeError, IndexError, KeyError):
                raise UndecidableError(f"there is no {name}") from None

        return evaluate

    def _check_depth(self, node: ast.expr, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._refuse(node, f"the condition is nested more than {MAX_DEPTH} deep; split it")

    def _refuse(self, node: ast.expr, message: str) -> ExpressionError:
        return ExpressionError(message, node.col_offset + self.first_column)


def _number(value: Any, symbol: str) -> Any:
    if isinstance(value, int | float):
        return value
    raise UndecidableError(f"`{symbol}` needs a number, not {value!r}")


def _ordered(symbol: str, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda a, b: test(_number(a, symbol), _number(b, symbol))
