"""The dataflow graph of a Relax function, read once.

Touching a TVM object from Python costs far more than touching a Python one, so each binding is read exactly
once, into a `Value`; everything after works on numbers. A value is known by its place in the function's
bindings, in program order: that number is the same in every process, so a saved plan can name it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

from tvm import relax, tirx
from tvm.ir import GlobalVar, IRModule, Op
from tvm.ir.expr import Constant

from fusion_patterns.match.primfunc import is_elementwise
from fusion_patterns.match.tensors import Tensor, tensor_type
from fusion_patterns.table.ops import ELEMENTWISE

__all__ = ["EXTERNAL", "Graph", "Operand", "Region", "Value", "read_module"]

EXTERNAL = -1
"""The source of an operand that no operator of the same region computes."""

Operand = tuple[int, int]
"""An operand: the number of the value that takes it, and its position among that value's operands."""


@dataclass(frozen=True)
class Region:
    """One binding block. A composite never reaches over the edge of a region."""

    number: int
    is_dataflow: bool


@dataclass(slots=True, eq=False)
class Value:
    """One binding: a variable and what is known of the expression it is bound to.

    ``op`` is the operator's name without ``relax.``, or "" where no row could ever match. ``keys`` identify
    the tensors it takes (two operands with one key are one tensor) and ``sources`` say which values of the
    same region compute them. ``users`` lists the values that take this one, once for each operand;
    ``exits`` says where it leaves other than through a binding.
    """

    number: int
    var: relax.Var
    region: Region
    what: str
    op: str = ""
    call: relax.Call | None = None
    operands: tuple[relax.Expr, ...] = ()
    keys: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    users: list[int] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    obstacle: str = ""
    """Why no row can take this call although its operator may stand in one."""
    is_plain: bool = False
    """Whether the arguments are the operands and nothing else."""
    size: int = -1
    """Bytes of the result; -1 if not looked at yet."""

    @property
    def name(self) -> str:
        """The variable's name."""
        return str(self.var.name)

    def __str__(self) -> str:
        return f"`{self.name}` ({self.what})"


@dataclass(eq=False)
class Graph:
    """The dataflow graph of one function."""

    name: str
    func: relax.Function
    values: list[Value] = field(default_factory=list)
    by_op: dict[str, list[int]] = field(default_factory=dict)
    local_functions: list[str] = field(default_factory=list)
    producers: dict[int, int] = field(default_factory=dict)
    """by the variable's key: the number of the value"""
    aliases: dict[int, int] = field(default_factory=dict)
    """by the variable's key: the key of the variable that it is only another name of"""
    tuples: dict[int, relax.Tuple] = field(default_factory=dict)
    """by the variable's key: the tuple it is bound to"""
    odd: dict[int, str] = field(default_factory=dict)
    """by the variable's key: what it is, if it is no tensor"""
    fields: dict[Any, Any] = field(default_factory=dict)
    """by value or operand, and name: the fields of it that conditions have asked for"""
    answers: dict[Any, dict[int, bool]] = field(default_factory=dict)
    """by condition and by a number for its subjects, or for their types: whether it holds"""
    _tensors: dict[int, Tensor] = field(default_factory=dict)
    _kind_of: dict[int, int] = field(default_factory=dict)
    _kinds: dict[Any, int] = field(default_factory=dict)

    @cached_property
    def bindings(self) -> Any:
        """What each variable is bound to, as TVM's own matcher wants it."""
        return relax.analysis.get_var2val(self.func)

    @cached_property
    def has_symbols(self) -> bool:
        """Whether any dimension in the function is a symbol."""
        return bool(relax.analysis.defined_symbolic_vars(self.func))

    @cached_property
    def descendants(self) -> list[int]:
        """For each value what depends on it, as bits by number."""
        found = [0] * len(self.values)
        for value in reversed(self.values):
            below = 0
            for user in value.users:
                # What stands in a branch of an `if` has the `if`, which stands before it, as a user.
                below |= 1 << user | (found[user] if user > value.number else 0)
            found[value.number] = below
        return found

    def tensor(self, expr: relax.Expr) -> Tensor:
        """Returns what is known of the tensor that ``expr`` (a variable or a constant) holds."""
        key = expr.__chandle__()
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = tensor_type(expr.ty)
        return found

    def kind_of(self, expr: relax.Expr) -> int:
        """Returns a number that all tensors of one dtype and shape have in common."""
        key = expr.__chandle__()
        kind = self._kind_of.get(key)
        if kind is None:
            tensor, kinds = self.tensor(expr), self._kinds
            kind = kinds.setdefault((tensor.dtype, tensor.rank, tensor.shape), len(kinds))
            self._kind_of[key] = kind
        return kind

    def bytes_of(self, value: Value) -> int:
        """Returns the least size that a value's tensor can have."""
        if value.size < 0:
            value.size = self.tensor(value.var).bytes
        return value.size

    def value_of(self, expr: relax.Expr) -> Value | None:
        """Returns the binding that computes ``expr``, or None for parameters and constants."""
        key = expr.__chandle__()
        number = self.producers.get(self.aliases.get(key, key))
        return None if number is None else self.values[number]

    def tuple_of(self, argument: Any) -> relax.Tuple | None:
        """Returns the tuple that an argument is, or is bound to."""
        if isinstance(argument, relax.Tuple):
            return argument
        key = argument.__chandle__()
        return self.tuples.get(self.aliases.get(key, key))

    def is_operand(self, argument: Any) -> bool:
        """Whether an argument is a tensor, not a number or a shape that belongs to the operator."""
        if type(argument) in _VARIABLES:
            key = argument.__chandle__()
            known = key in self.odd or key in self.producers or key in self.aliases
            return known or isinstance(argument.ty, relax.TensorType)
        return isinstance(argument, Constant) and isinstance(argument.ty, relax.TensorType)

    def is_constant(self, expr: relax.Expr) -> bool:
        """Whether the elements of ``expr`` are known at compile time."""
        if isinstance(expr, Constant):
            return True
        value = self.value_of(expr)
        return value is not None and value.what == "constant"

    def uses(self, key: int) -> int:
        """Returns how many operands a tensor is, and how often it leaves a function or a branch."""
        number = self.producers.get(key)
        if number is not None:
            value = self.values[number]
            return len(value.users) + len(value.exits)
        return self._external_uses.get(key, 0)

    @cached_property
    def _external_uses(self) -> dict[int, int]:
        """By the tensor's key: how many operands it is."""
        counts: dict[int, int] = {}
        for value in self.values:
            for key in value.keys:
                counts[key] = counts.get(key, 0) + 1
        return counts


def read_module(mod: IRModule) -> tuple[list[Graph], list[str]]:
    """Returns a graph for each function that may be fused, and the names of the composites it has already."""
    elementwise: dict[str, bool] = {}

    def is_elementwise_kernel(name: str) -> bool:
        known = elementwise.get(name)
        if known is None:
            func = mod[name]
            known = elementwise[name] = isinstance(func, tirx.PrimFunc) and is_elementwise(func) is not None
        return known

    graphs, composites = [], []
    for variable, func in sorted(mod.functions.items(), key=lambda item: str(item[0].name_hint)):
        if not isinstance(func, relax.Function):
            continue
        name = str(variable.name_hint)
        if func.attrs is not None and any(
            name in func.attrs for name in ("Primitive", "Composite", "Codegen")
        ):
            composites.append(name)
        else:
            graphs.append(_Reader(name, func, is_elementwise_kernel).read())
    return graphs, composites


_VARIABLES = (relax.DataflowVar, relax.Var)
_op_names: dict[int, str] = {}
"""Names of operators by handle: operators live as long as the process."""


class _Reader:
    """Reads one function into a `Graph`."""

    def __init__(self, name: str, func: relax.Function, is_elementwise_kernel: Any) -> None:
        self.graph = Graph(name, func)
        self.is_elementwise_kernel = is_elementwise_kernel
        self.regions = 0

    def read(self) -> Graph:
        for parameter in self.graph.func.params:
            self._note_kind(parameter)
        self._sequence(self.graph.func.body, "the function's result")
        return self.graph

    def _sequence(self, sequence: relax.SeqExpr, result: str) -> None:
        for block in sequence.blocks[:]:
            region = Region(self.regions, isinstance(block, relax.DataflowBlock))
            self.regions += 1
            for binding in block.bindings[:]:
                self._binding(binding, region)
        for key in self._variables(sequence.body):
            if key in self.graph.producers:
                self.graph.values[self.graph.producers[key]].exits.append(result)

    def _binding(self, binding: relax.Binding, region: Region) -> None:
        var, bound = binding.var, binding.value
        value = Value(len(self.graph.values), var, region, "")
        self.graph.values.append(value)
        key = var.__chandle__()
        if type(binding) is relax.MatchCast:
            value.what = "match_cast"
            self._use(value, self._variables(bound))
        elif type(bound) is relax.Call:
            self._call(value, bound)
        elif type(bound) in _VARIABLES:
            # Another name for the same value: whoever uses it uses the original.
            value.what = "another name"
            source = bound.__chandle__()
            self.graph.aliases[key] = self.graph.aliases.get(source, source)
            self._note_kind(var)
            return
        else:
            self._other(value, bound)
        self.graph.producers[key] = value.number
        self._note_kind(var)

    def _call(self, value: Value, call: relax.Call) -> None:
        name = self._name_of(call.op)
        arguments = call.args[:]
        if name == "call_tir" and len(arguments) == 2:
            kernel = str(arguments[0].name_hint)
            if self.is_elementwise_kernel(kernel):
                value.op = ELEMENTWISE
            value.what = f"call_tir of {kernel}"
            arguments = [arguments[1]]
        elif name:
            value.op = value.what = name
        else:
            callee = call.op.name_hint if isinstance(call.op, GlobalVar) else call.op
            value.what = f"a call of {callee}"
        value.call = call
        operands: list[relax.Expr] = []
        for argument in arguments:
            self._operand(value, argument, operands)
        value.operands = tuple(operands)
        value.is_plain = len(operands) == len(arguments) and all(map(is_, operands, arguments))
        keys, sources = [], []
        for operand in operands:
            key = operand.__chandle__()
            key = self.graph.aliases.get(key, key)
            keys.append(key)
            number = self.graph.producers.get(key)
            if number is None:
                sources.append(EXTERNAL)
                continue
            source = self.graph.values[number]
            source.users.append(value.number)
            inside = source.op and source.region is value.region
            sources.append(number if inside else EXTERNAL)
        value.keys, value.sources = tuple(keys), tuple(sources)
        if value.op:
            self.graph.by_op.setdefault(value.op, []).append(value.number)

    @staticmethod
    def _name_of(op: Any) -> str:
        """Returns an operator's name without ``relax.``, or "" for a call of anything else."""
        if type(op) is not Op:
            return ""
        handle = op.__chandle__()
        name = _op_names.get(handle)
        if name is None:
            name = _op_names[handle] = str(op.name).removeprefix("relax.")
        return name

    def _operand(self, value: Value, argument: Any, operands: list[relax.Expr]) -> None:
        """Adds the tensors in one argument; numbers and shapes are no operands but part of the operator."""
        whole = self.graph.tuple_of(argument)
        if whole is not None:
            # Where a variable is bound to the tuple, that stays a binding, and a user of the items.
            for item in whole.fields[:]:
                self._operand(value, item, operands)
        elif self.graph.is_operand(argument):
            operands.append(argument)
            kind = self.graph.odd.get(argument.__chandle__())
            if kind is not None:
                value.obstacle = f"its operand `{argument.name}` is {kind}"

    def _other(self, value: Value, bound: Any) -> None:
        if isinstance(bound, relax.If):
            value.what = "if"
            for branch in (bound.true_branch, bound.false_branch):
                self._sequence(branch, f"the result of a branch of `{value.name}`")
            # All that a branch takes must be there before the `if` as a whole.
            self._use(value, self._variables(bound))
            return
        if isinstance(bound, relax.Function):
            value.what = "a local function"
            self.graph.local_functions.append(value.name)
        elif isinstance(bound, relax.Tuple):
            value.what = "a tuple"
            self.graph.tuples[value.var.__chandle__()] = bound
        elif isinstance(bound, relax.TupleGetItem):
            value.what = f"item {bound.index} of a tuple"
        elif isinstance(bound, Constant):
            value.what = "constant"
        else:
            value.what = "an expression"
        self._use(value, self._variables(bound))

    def _use(self, user: Value, keys: list[int]) -> None:
        for key in keys:
            number = self.graph.producers.get(key)
            if number is not None:
                self.graph.values[number].users.append(user.number)

    def _variables(self, expr: Any) -> list[int]:
        """Returns the keys of the variables in an expression, aliases resolved."""
        if type(expr) in _VARIABLES:
            key = expr.__chandle__()
            return [self.graph.aliases.get(key, key)]
        if isinstance(expr, relax.Tuple):
            return [key for item in expr.fields for key in self._variables(item)]
        if isinstance(expr, relax.TupleGetItem):
            return self._variables(expr.tuple_value)
        if isinstance(expr, Constant | relax.ShapeExpr | GlobalVar):
            return []
        keys = (variable.__chandle__() for variable in relax.analysis.free_vars(expr))
        return [self.graph.aliases.get(key, key) for key in keys]

    def _note_kind(self, var: relax.Var) -> None:
        kind = type(var.ty)
        if kind is not relax.TensorType:
            self.graph.odd[var.__chandle__()] = _KINDS.get(kind, "no tensor")


_KINDS = {relax.TupleType: "a tuple", relax.ShapeType: "a shape", relax.FuncType: "a function"}
