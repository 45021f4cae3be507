"""The exact check: TVM's own matcher has the last word.

A candidate's *word* says its operators in program order and what each takes: `#0` is the first operator of
the word, `a` the first tensor from outside, `_` a number or a shape::

    nn.conv2d(a, b)   add(#0, c)   clip(#1, _, _)

A word is turned into a `relax.dpl` pattern once. One wildcard stands for one letter, one pattern for one
operator, so equal letters must be one tensor; and operands stand in the order in which the candidate has
them, so it does not matter which operators TVM takes to commute. What TVM matches must be, operator by
operator, what was found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tvm_ffi
from tvm import relax
from tvm.relax.dpl import is_op, wildcard
from tvm.relax.dpl.pattern import CallPattern, DFPattern, GlobalVarPattern, TuplePattern

from fusion_patterns.match.graph import Graph
from fusion_patterns.table.ops import ELEMENTWISE

__all__ = ["Word", "disagreement", "missing_symbol", "patterns_of", "word_of"]

Word = tuple[str, ...]


def word_of(graph: Graph, members: Sequence[int]) -> Word:
    """Returns the word of the operators with these numbers, which must be in program order."""
    places = {number: place for place, number in enumerate(members)}
    letters: dict[int, str] = {}
    word = []
    for number in members:
        value = graph.values[number]
        assert value.call is not None
        names = []
        for key, source in zip(value.keys, value.sources, strict=True):
            place = places.get(source)
            names.append(f"#{place}" if place is not None else letters.setdefault(key, _letter(len(letters))))
        if value.op == ELEMENTWISE:
            word.append(f"call_tir:{value.call.args[0].name_hint}(({', '.join(names)}))")
        else:
            if not value.is_plain:
                left = iter(names)
                names = [_argument(graph, argument, left) for argument in value.call.args]
            word.append(f"{value.op}({', '.join(names)})")
    return tuple(word)


def _argument(graph: Graph, argument: Any, names: Any) -> str:
    whole = graph.tuple_of(argument)
    if whole is not None:
        return f"({', '.join(_argument(graph, item, names) for item in whole.fields)})"
    return next(names) if graph.is_operand(argument) else "_"


def _letter(count: int) -> str:
    letters = ""
    count += 1
    while count:
        count, place = divmod(count - 1, 26)
        letters = chr(ord("a") + place) + letters
    return letters


def disagreement(graph: Graph, members: Sequence[int], word: Word) -> str:
    """Returns what TVM's matcher sees otherwise, or "" if it agrees that the members are this word."""
    patterns = patterns_of(word)
    bindings = _bindings(graph, members)
    used = {source for number in members for source in graph.values[number].sources}
    for place, number in enumerate(members):
        if number in used:
            continue
        value = graph.values[number]
        matched = patterns[place].extract_matched_expr(value.call, bindings)
        if matched is None:
            return f"TVM's matcher does not see {' '.join(word)} in {value}"
        for pattern, member in zip(patterns[: place + 1], members, strict=False):
            found = matched.get(pattern)
            if found is not None and not found.same_as(graph.values[member].call):
                return f"TVM's matcher takes another operator for {graph.values[member]}"
    return ""


def _bindings(graph: Graph, members: Sequence[int]) -> Any:
    """Returns what the variables in question are bound to: TVM takes longer the more bindings it is given."""
    values = [graph.values[number] for number in members]
    if graph.tuples and not all(value.is_plain for value in values):
        return graph.bindings
    if graph.aliases and any(x.__chandle__() in graph.aliases for value in values for x in value.operands):
        return graph.bindings
    return {value.var: value.call for value in values}


def missing_symbol(graph: Graph, members: Sequence[int]) -> str:
    """Returns which symbolic dimension a composite could not know, or "" if its inputs tell it all."""
    if not graph.has_symbols:
        return ""
    inside = set(members)
    needed: dict[int, str] = {}
    defined: set[int] = set()
    for number in members:
        value = graph.values[number]
        assert value.call is not None
        if not graph.tensor(value.var).is_static:
            _collect(value.var.ty, needed)
        for argument in value.call.args:
            if not graph.is_operand(argument) and not isinstance(argument, relax.Tuple):
                _collect(argument, needed)
        for operand, source in zip(value.operands, value.sources, strict=True):
            if source not in inside and not graph.tensor(operand).is_static:
                extents = getattr(operand.ty.shape, "values", None) or ()
                defined.update(extent.__chandle__() for extent in extents if isinstance(extent, relax.Var))
    for key, name in needed.items():
        if key not in defined:
            return f"the symbolic dimension `{name}` is not a dimension of any of its inputs"
    return ""


def _collect(tree: Any, found: dict[int, str]) -> None:
    tvm_ffi.structural_walk(
        tree, (relax.Var, lambda var: found.setdefault(var.__chandle__(), str(var.name)) and None)
    )


@lru_cache(maxsize=4096)
def patterns_of(word: Word) -> tuple[DFPattern, ...]:
    """Returns a pattern for each operator of a word, the operands' patterns inside."""
    patterns: list[DFPattern] = []
    wildcards: dict[str, DFPattern] = {}
    for text in word:
        name, _, rest = text.partition("(")
        fields = _parse(rest[:-1], patterns, wildcards)
        if name.startswith("call_tir:"):
            callee: DFPattern = GlobalVarPattern(name.removeprefix("call_tir:"))
            patterns.append(_call("call_tir", [callee, *fields]))
        else:
            patterns.append(_call(name, fields))
    return tuple(patterns)


def _call(name: str, arguments: list[DFPattern]) -> DFPattern:
    # "Used by" constraints only matter for matching whole blocks, and cost much to set up.
    return CallPattern(is_op(f"relax.{name}"), arguments, add_constraint=False)


def _parse(text: str, patterns: list[DFPattern], wildcards: dict[str, DFPattern]) -> list[DFPattern]:
    """Returns the patterns of arguments such as ``#0, (a, b), _``."""
    stack: list[list[DFPattern]] = [[]]
    for token in text.replace("(", "( ").replace(")", " )").replace(",", " ").split():
        if token == "(":
            stack.append([])
        elif token == ")":
            fields = stack.pop()
            stack[-1].append(TuplePattern(fields))
        elif token == "_":
            stack[-1].append(wildcard())
        elif token.startswith("#"):
            stack[-1].append(patterns[int(token[1:])])
        else:
            stack[-1].append(wildcards.setdefault(token, wildcard()))
    return stack[0]
