"""Plan -> composites: each match becomes a private function, and one call in its place.

    lv = conv2d(x, w)
    lv1 = add(lv, b)      ->   gv = fused_conv2d_chain_0(x, w, b)
    gv = relu(lv1)

The call stands where the match's last operator stood: there all that it takes is known. Types come from the
variables as they are; nothing is inferred again. Tensors from outside, constants as well, are parameters,
each once; numbers and shapes stay inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from tvm import relax
from tvm.ir import DictAttrs, GlobalVar, IRModule
from tvm.relax.expr import _update_type
from tvm_ffi import structural_map

from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.match.plan import FusionPlan, Match

__all__ = ["outline"]

_VARIABLES = (relax.Var, relax.DataflowVar)


def outline(mod: IRModule, plan: FusionPlan) -> IRModule:
    """Returns a module in which every match of ``plan`` is a composite function; ``mod`` stays as it is."""
    new = mod.clone()
    by_function: dict[str, list[Match]] = {}
    for match in plan.matches:
        by_function.setdefault(match.function, []).append(match)
    for name, matches in by_function.items():
        rewriter = _Rewriter(matches)
        func = rewriter.function(mod[name])
        for variable, composite in rewriter.composites:
            new[variable] = composite
        new.update_func(new.get_global_var(name), func)
    return new


def _identifier(text: str) -> str:
    """Returns ``text`` as a C identifier: parameter names reach OpenCL C as they are."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return name if name[:1].isalpha() else f"v{name}"


@dataclass
class _Bound:
    """What variables of the caller stand for: another variable, or a tuple."""

    aliases: dict[int, int] = field(default_factory=dict)
    tuples: dict[int, relax.Tuple] = field(default_factory=dict)

    def note(self, variable: relax.Var, value: Any) -> None:
        if type(value) in _VARIABLES:
            self.aliases[variable.__chandle__()] = self.key(value)
        elif isinstance(value, relax.Tuple):
            self.tuples[variable.__chandle__()] = value

    def key(self, expr: relax.Expr) -> int:
        key: int = expr.__chandle__()
        return self.aliases.get(key, key)

    def tuple_of(self, argument: Any) -> relax.Tuple | None:
        return argument if isinstance(argument, relax.Tuple) else self.tuples.get(self.key(argument))


@dataclass
class _Composite:
    """Builds the function of one match."""

    match: Match
    bound: _Bound
    parameters: list[relax.Var] = field(default_factory=list)
    arguments: list[relax.Expr] = field(default_factory=list)
    scopes: dict[str, str] = field(default_factory=dict)

    def build(self, bindings: Sequence[relax.VarBinding]) -> relax.Function:
        """Returns the function; ``parameters`` and ``arguments`` say how to call it."""
        match = self.match
        self.inputs = {self.bound.key(tensor.expr): tensor for tensor in match.inputs}
        self.known: dict[int, relax.Expr] = {}
        labels = {var.__chandle__(): node for node, variables in match.nodes.items() for var in variables}
        leaving = {variable.__chandle__() for variable in match.outputs}
        body = []
        for binding in bindings:
            key = binding.var.__chandle__()
            self.taker = labels[key]
            kind = relax.Var if key in leaving else relax.DataflowVar
            copy = kind(_identifier(str(binding.var.name)), binding.var.ty)
            body.append(relax.VarBinding(copy, self._call(binding.value)))
            self.known[key] = copy
        outputs = [self.known[variable.__chandle__()] for variable in match.outputs]
        result = outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)
        sequence = relax.SeqExpr([relax.DataflowBlock(body)], result)
        _update_type(sequence, result.ty)
        func = relax.Function(self.parameters, sequence, result.ty, attrs=self._attributes(bindings))
        return _with_own_symbols(func)

    def _call(self, call: relax.Call) -> relax.Call:
        arguments = [self._argument(argument) for argument in call.args[:]]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span, call.ty)

    def _argument(self, argument: Any) -> Any:
        whole = self.bound.tuple_of(argument)
        if whole is not None:
            return relax.Tuple([self._argument(item) for item in whole.fields])
        key = self.bound.key(argument)
        if key in self.known:
            return self.known[key]
        if key in self.inputs:
            return self._parameter(key)
        return argument

    def _parameter(self, key: int) -> relax.Var:
        tensor = self.inputs[key]
        stem = name = _identifier(tensor.name or f"{self.taker}_arg")
        count = 1
        while name in self.scopes:
            count += 1
            name = f"{stem}_{count}"
        self.scopes[name] = str(tensor.scope)
        parameter = self.known[key] = relax.Var(name, tensor.expr.ty)
        self.parameters.append(parameter)
        self.arguments.append(tensor.expr)
        return parameter

    def _attributes(self, bindings: Sequence[relax.VarBinding]) -> DictAttrs:
        row = self.match.row
        anchor = next(b.value for b in bindings if b.var.same_as(self.match.anchor))
        op = str(anchor.op.name).removeprefix("relax.")
        return DictAttrs(
            {
                "Primitive": 1,
                "Composite": row.name,
                "fusion_patterns.row": row.name,
                "fusion_patterns.origin": str(row.origin),
                "fusion_patterns.scopes": {**self.scopes, "output": str(row.scope_of("output"))},
                "fusion_patterns.kernel": row.kernel or op,
                "fusion_patterns.anchor": op,
            }
        )


def _with_own_symbols(func: relax.Function) -> relax.Function:
    """Returns the function with symbolic dimensions of its own: a variable belongs to one function."""
    symbols = relax.analysis.defined_symbolic_vars(func)
    if not symbols:
        return func
    # TVM's `copy_with_new_vars` does it too, but takes a millisecond for each function.
    own = {symbol: relax.Var(symbol.name, symbol.ty) for symbol in symbols}
    return structural_map(func, (relax.Var, lambda variable: own.get(variable, variable)))


class _Rewriter:
    """Replaces the matches of one function by calls; counts bindings as the plan does."""

    def __init__(self, matches: Sequence[Match]) -> None:
        self.composites: list[tuple[GlobalVar, relax.Function]] = []
        self.bound = _Bound()
        self.number = 0
        self.match_of = {number: match for match in matches for number in match.numbers}
        self.taken: dict[int, relax.VarBinding] = {}
        self.gone: set[int] = set()
        for match in matches:
            leaving = {variable.__chandle__() for variable in match.outputs}
            self.gone.update(variable.__chandle__() for variable in match.ops)
            self.gone -= leaving

    def function(self, func: relax.Function) -> relax.Function:
        """Returns the function with calls in place of the matches."""
        body = self._sequence(func.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)

    def _sequence(self, sequence: relax.SeqExpr) -> relax.SeqExpr:
        blocks = [self._block(block) for block in sequence.blocks]
        new = relax.SeqExpr(blocks, sequence.body, sequence.span)
        _update_type(new, sequence.ty)
        return new

    def _block(self, block: relax.BindingBlock) -> relax.BindingBlock:
        units: list[list[relax.Binding]] = []
        has_several_outputs = False
        for binding in block.bindings[:]:
            match = self.match_of.get(self.number)
            if match is not None:
                self._check(match, binding)
                self.taken[self.number] = binding
                if self.number == match.numbers[-1]:
                    units.append(self._outlined(match))
                    has_several_outputs |= len(match.outputs) > 1
                self.number += 1
                continue
            self.number += 1
            self.bound.note(binding.var, binding.value)
            # Another name of a value that is inside now has no users left: they are inside as well.
            if self.bound.key(binding.var) not in self.gone:
                units.append([self._binding(binding)])
        if has_several_outputs:
            units = _sorted(units)
        kind = type(block)
        return kind([binding for unit in units for binding in unit], block.span)

    def _check(self, match: Match, binding: relax.Binding) -> None:
        variable = match.ops[match.numbers.index(self.number)]
        if not binding.var.same_as(variable):
            raise FusionPatternsError(
                f"the plan was made for another module: in {match.function} it expects `{variable.name}`"
                f" where `{binding.var.name}` is bound"
            )

    def _binding(self, binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if type(binding) is relax.VarBinding and isinstance(value, relax.If):
            branches = [self._sequence(branch) for branch in (value.true_branch, value.false_branch)]
            new = relax.If(value.cond, *branches, value.span)
            _update_type(new, value.ty)
            return relax.VarBinding(binding.var, new, binding.span)
        return binding

    def _outlined(self, match: Match) -> list[relax.Binding]:
        """Returns the call of a new composite, bound to the variables that the match leaves behind."""
        composite = _Composite(match, self.bound)
        func = composite.build([self.taken[number] for number in match.numbers])
        variable = GlobalVar(match.composite)
        _update_type(variable, func.ty)
        self.composites.append((variable, func))
        types = [output.ty for output in match.outputs]
        whole = types[0] if len(types) == 1 else relax.TupleType(types)
        call = relax.Call(variable, composite.arguments, ret_ty=whole)
        if len(types) == 1:
            return [relax.VarBinding(match.outputs[0], call)]
        results = relax.DataflowVar(f"{match.outputs[0].name}_results", whole)
        bindings = [relax.VarBinding(results, call)]
        for place, output in enumerate(match.outputs):
            bindings.append(relax.VarBinding(output, relax.TupleGetItem(results, place)))
        return bindings


def _sorted(units: list[list[relax.Binding]]) -> list[list[relax.Binding]]:
    """Orders bindings by what they take: a value that left its match early is bound later than it was."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(units)))
    definer = {binding.var.__chandle__(): place for place, unit in enumerate(units) for binding in unit}
    for place, unit in enumerate(units):
        for binding in unit:
            for variable in relax.analysis.free_vars(binding.value):
                source = definer.get(variable.__chandle__(), place)
                if source != place:
                    graph.add_edge(source, place)
    return [units[place] for place in nx.lexicographical_topological_sort(graph)]
