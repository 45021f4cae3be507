"""A small rewriter for Relax functions: one walk, rules by operator, every value keeps its type.

A rule looks at one expression whose arguments are already rewritten and returns something that means the
same, or None. It sees its arguments' definitions and whether anyone else reads them, and it may
:meth:`~Rewriter.emit` helper values in front of its own. Its answer counts only if it has exactly the type of
what it replaces, so no rule can change what a caller sees, and nothing downstream needs new types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir import Call, GenericConst, Op
from tvm.ir import Tuple as RelaxTuple
from tvm_ffi import structural_equal

Array = NDArray[np.generic]
Rule = Callable[["Rewriter", relax.Expr], relax.Expr | None]

_MOST_STEPS = 32  # a value is rewritten at most this often, so that no pair of rules can go round for ever


class Rewriter:
    """Rewrites the functions of *mod* with *rules*, which are keyed by operator name.

    The key of a tuple projection is ``"tuple_get_item"``; ``"*"`` stands for every call of an operator.
    """

    def __init__(self, mod: tvm.IRModule, rules: Mapping[str, Sequence[Rule]]) -> None:
        self.mod = mod
        self._rules = rules
        self._builder = relax.BlockBuilder()
        self._value: dict[relax.Var, relax.Expr] = {}
        self._instead: dict[relax.Var, relax.Expr] = {}
        self._reads: Counter[relax.Var] = Counter()
        self._bindings: list[relax.Binding] = []
        self._dataflow = False
        self._arrays: dict[GenericConst, Array] = {}

    def function(self, func: relax.Function) -> relax.Function:
        """*func* with its body rewritten: the same parameters, result type and attributes."""
        self._reads.update(_reads(func.body))
        body = self._sequence(func.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)

    # What rules may ask.

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """What the variable *expr* is bound to; *expr* itself for parameters and for everything else."""
        return self._value.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def call_of(self, expr: relax.Expr, *ops: str) -> Call | None:
        """The call of one of *ops* that *expr* is bound to, if nobody but the asking expression reads it."""
        value = self.definition(expr)
        alone = value is expr or self._reads[expr] <= 1
        return value if alone and op_name(value) in ops else None

    def parts(self, call: Call) -> list[relax.Expr] | None:
        """The tensors that a call such as ``concat`` puts together, if they are known."""
        parts = self.definition(call.args[0])
        return list(parts.fields) if isinstance(parts, RelaxTuple) else None

    def constant(self, expr: relax.Expr) -> Array | None:
        """The value of a constant tensor, which can't be written to, or None."""
        if not isinstance(expr, GenericConst) or not isinstance(expr.ty, relax.TensorType):
            return None
        if expr not in self._arrays:
            try:
                array = np.from_dlpack(expr.value)  # the constant's own memory: weights are large
            except (BufferError, RuntimeError, TypeError):
                array = expr.value.numpy()  # a dtype that DLPack or NumPy doesn't know
            array.flags.writeable = False
            self._arrays[expr] = array
        return self._arrays[expr]

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Bind *expr* in front of what is being rewritten; rules apply to it too."""
        expr = self._settle(self.typed(expr))
        if not isinstance(expr, Call | relax.TupleGetItem):
            return expr
        kind = relax.DataflowVar if self._dataflow else relax.Var
        var = kind("lv", expr.ty)
        self._bind(relax.VarBinding(var, expr))
        self._reads[var] = 1
        return var

    def read_again(self, expr: relax.Expr) -> None:
        """Say that what a rule returns reads *expr* while what read it before stays."""
        if isinstance(expr, relax.Var):
            self._reads[expr] += 1

    def typed(self, expr: relax.Expr) -> relax.Expr:
        """*expr* with its type inferred where it has none."""
        return self._builder.normalize(expr) if _untyped(expr) else expr

    # The walk.

    def _sequence(self, seq: relax.SeqExpr) -> relax.SeqExpr:
        outer = self._bindings, self._dataflow
        blocks = []
        for block in seq.blocks:
            self._bindings, self._dataflow = [], isinstance(block, relax.DataflowBlock)
            for binding in block.bindings:
                self._binding(binding)
            blocks.append(type(block)(self._bindings))
            if self._dataflow:
                # Another block may read its outputs, but not what they were computed from.
                for binding in self._bindings:
                    self._value.pop(binding.var, None)
        self._bindings, self._dataflow = outer
        out = relax.SeqExpr(blocks, self._leaf(seq.body))
        return self.typed(out)

    def _binding(self, binding: relax.Binding) -> None:
        var = binding.var
        if isinstance(binding, relax.MatchCast):
            self._bind(relax.MatchCast(var, self._leaf(binding.value), binding.ty))
            return
        value = self._settle(self._inside(binding.value))
        if isinstance(var, relax.DataflowVar) and isinstance(value, relax.Var | GenericConst):
            self._instead[var] = value
            if isinstance(value, relax.Var):
                self._reads[value] += self._reads[var] - 1
        else:
            self._bind(relax.VarBinding(var, value))

    def _bind(self, binding: relax.Binding) -> None:
        self._bindings.append(binding)
        if isinstance(binding, relax.VarBinding):
            self._value[binding.var] = binding.value

    def _settle(self, expr: relax.Expr) -> relax.Expr:
        """Apply rules to *expr* until none has anything to say."""
        for _ in range(_MOST_STEPS):
            better = self._step(expr)
            if better is None:
                break
            expr = better
        return expr

    def _step(self, expr: relax.Expr) -> relax.Expr | None:
        for rule in self._applicable(expr):
            found = rule(self, expr)
            if found is not None:
                found = self.typed(found)
                if structural_equal(found.ty, expr.ty):
                    return found
        return None

    def _applicable(self, expr: relax.Expr) -> Iterator[Rule]:
        if isinstance(expr, relax.TupleGetItem):
            yield from self._rules.get("tuple_get_item", ())
        elif name := op_name(expr):
            yield from self._rules.get(name, ())
            yield from self._rules.get("*", ())

    def _leaf(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self._instead.get(expr, expr)
        if isinstance(expr, RelaxTuple):
            fields = [self._leaf(field) for field in expr.fields]
            return expr if _same(fields, expr.fields) else self._builder.normalize(RelaxTuple(fields))
        return expr

    def _inside(self, expr: relax.Expr) -> relax.Expr:
        """*expr* with everything that it reads replaced; its type stays."""
        if isinstance(expr, Call):
            args = [self._leaf(arg) for arg in expr.args]
            if _same(args, expr.args):
                return expr
            return Call(self._leaf(expr.op), args, expr.attrs, expr.ty_args, expr.span, expr.ty)
        if isinstance(expr, relax.TupleGetItem):
            whole = self._leaf(expr.tuple_value)
            return expr if whole is expr.tuple_value else self.typed(relax.TupleGetItem(whole, expr.index))
        if isinstance(expr, relax.If):
            return self._builder.normalize(
                relax.If(
                    self._leaf(expr.cond), self._sequence(expr.true_branch), self._sequence(expr.false_branch)
                )
            )
        if isinstance(expr, relax.Function) and not is_composite(expr):
            body = self._sequence(expr.body)
            return relax.Function(expr.params, body, expr.ret_ty, expr.is_pure, expr.attrs, expr.span)
        return self._leaf(expr)


def op_name(expr: relax.Expr) -> str | None:
    """The operator that *expr* calls, without ``relax.``: ``nn.conv2d``, ``add``; None for anything else."""
    if isinstance(expr, Call) and isinstance(expr.op, Op):
        return str(expr.op.name).removeprefix("relax.")
    return None


def is_composite(func: relax.Function) -> bool:
    """Whether *func* is somebody's finished group of operators, which nothing here may open."""
    return func.attrs is not None and any(
        name in func.attrs for name in ("Primitive", "Composite", "Codegen")
    )


def constant_of(array: Array) -> GenericConst:
    """*array* as a constant of its own dtype, which ``relax.const`` alone would narrow to 32 bits."""
    return relax.const(np.asarray(array, order="C"), str(array.dtype))


def static_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """The shape of a tensor when all of it is known."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    dims = ty.shape.values
    return tuple(map(int, dims)) if all(isinstance(d, tvm.tirx.IntImm) for d in dims) else None


def _untyped(expr: relax.Expr) -> bool:
    return expr.ty is None or bool(expr.ty.is_missing())


def _same(new: Sequence[relax.Expr], old: Sequence[relax.Expr]) -> bool:
    return all(a is b or a.same_as(b) for a, b in zip(new, old, strict=True))


def _reads(expr: relax.Expr) -> Iterator[relax.Var]:
    """Each reading of a variable anywhere in *expr*, as often as it is read."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, Call):
        for arg in expr.args:
            yield from _reads(arg)
        yield from _reads(expr.op)
    elif isinstance(expr, RelaxTuple):
        for field in expr.fields:
            yield from _reads(field)
    elif isinstance(expr, relax.TupleGetItem):
        yield from _reads(expr.tuple_value)
    elif isinstance(expr, relax.If):
        for part in (expr.cond, expr.true_branch, expr.false_branch):
            yield from _reads(part)
    elif isinstance(expr, relax.Function):
        yield from _reads(expr.body)
    elif isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            for binding in block.bindings:
                yield from _reads(binding.value)
        yield from _reads(expr.body)
