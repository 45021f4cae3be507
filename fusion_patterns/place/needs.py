"""The layout that each operand of a composite must have for its packed kernel.

Needs are read off the composite's body, op by op: what the anchor wants (data, weight), and how each operand of
the epilogue meets the value (same shape, one number for each channel, any other broadcast). A parameter that two
ops want in two layouts (a tensor that is data and weight at once) is passed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import relax

from .layouts import CHANNEL_VECTOR, DATA, DEPTHWISE, PLAIN, WEIGHT

__all__ = ["ELEMENTWISE", "Needs", "NotPacked", "Operand", "needs_of", "op_name", "static_shape"]

ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        "add subtract multiply divide maximum minimum power abs ceil clip cos erf exp floor log negative nn.relu "
        "nn.relu6 nn.leakyrelu nn.prelu nn.gelu nn.gelu_tanh nn.silu nn.softplus round rsqrt sigmoid sign sin sqrt "
        "square tanh astype greater greater_equal less less_equal equal not_equal logical_and logical_or "
        "logical_not where"
    ).split()
)
"""Ops whose packed form is the same op on packed tensors."""


class NotPacked(Exception):
    """A composite has no packed kernel. ``reason`` is a sentence, ``culprit`` the name of an IR value."""

    def __init__(self, reason: str, culprit: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit


@dataclass(frozen=True)
class Operand:
    """One parameter of the packed composite: which of the composite's parameters, in which layout."""

    param: int
    name: str
    layout: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Needs:
    """What a composite needs: its operands, and for each op argument the operand that it reads.

    ``reads`` maps (number of the binding, number of the argument) to an index into ``operands``.
    """

    operands: tuple[Operand, ...]
    reads: dict[tuple[int, int], int]
    output_layout: str
    output_shape: tuple[int, ...]
    output_dtype: str


def op_name(call: Any) -> str:
    """``relax.nn.conv2d`` for a call of that op; ``""`` for anything else."""
    op = getattr(call, "op", None)
    return str(getattr(op, "name", "")) if op is not None and not isinstance(op, relax.GlobalVar) else ""


def static_shape(expr: Any) -> tuple[int, ...] | None:
    """The shape of a tensor-typed expression as integers, or ``None`` if a dimension is not known."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or not hasattr(ty.shape, "values"):
        return None
    dims = []
    for dim in ty.shape.values:
        value = getattr(dim, "value", None)
        if not isinstance(value, int):
            return None
        dims.append(value)
    return tuple(dims)


def broadcast_layout(shape: tuple[int, ...], result: tuple[int, ...]) -> str:
    """How an elementwise operand of ``shape`` is read when the result has shape (N, C, H, W).

    (1, C, 1, 1) is data of one pixel, so that a gate which another composite computes needs no conversion.
    """
    full = (1,) * (4 - len(shape)) + shape
    if prod(full) == 1 or full[1] != result[1]:
        return PLAIN
    if len(shape) == 4:
        return DATA
    return CHANNEL_VECTOR if full[2] == full[3] == 1 else PLAIN


class _Reader:
    def __init__(self, func: Any) -> None:
        self.params = list(func.params)
        self.number = {param: i for i, param in enumerate(self.params)}
        self.operands: list[Operand] = []
        self.index: dict[tuple[int, str], int] = {}
        self.reads: dict[tuple[int, int], int] = {}

    def read(self, binding: int, arg: int, expr: Any, layout: str, culprit: str) -> None:
        """Note that an op's argument reads ``expr`` in ``layout``, if ``expr`` is a parameter."""
        if expr not in self.number:
            if layout not in (DATA,) and not (layout == PLAIN and static_shape(expr) is not None):
                raise NotPacked(f"a value made inside the composite is wanted as {layout}", culprit)
            return
        number = self.number[expr]
        shape = static_shape(expr)
        if shape is None:
            raise NotPacked(f"parameter `{expr.name}` has no static shape", culprit)
        key = (number, layout)
        if key not in self.index:
            taken = any(other == number for other, _ in self.index)
            self.index[key] = len(self.operands)
            name = expr.name if not taken else f"{expr.name}_{layout.lower()}"
            self.operands.append(Operand(number, name, layout, shape, str(expr.ty.dtype)))
        self.reads[binding, arg] = self.index[key]


def _conv2d(call: Any, culprit: str) -> tuple[str, str]:
    attrs = call.attrs
    if str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "OIHW":
        raise NotPacked(f"conv2d in layout {attrs.data_layout}/{attrs.kernel_layout} has no packed kernel", culprit)
    data, weight = static_shape(call.args[0]), static_shape(call.args[1])
    if data is None or weight is None:
        raise NotPacked("conv2d needs static shapes for a packed kernel", culprit)
    if str(call.args[0].ty.dtype) not in ("float32", "float16"):
        raise NotPacked(f"conv2d on {call.args[0].ty.dtype} has no packed kernel", culprit)
    groups = int(attrs.groups)
    if groups == data[1] and weight[1] == 1 and weight[0] == data[1]:
        return DATA, DEPTHWISE
    if groups == 1 or (weight[1] % 4 == 0 and (weight[0] // groups) % 4 == 0):
        return DATA, WEIGHT
    return DATA, PLAIN


def needs_of(func: Any) -> Needs:
    """What the packed kernel of a composite needs.

    Raises :class:`NotPacked` with the reason if there is none.
    """
    reader = _Reader(func)
    bindings = [b for block in func.body.blocks for b in block.bindings]
    if not bindings:
        raise NotPacked("the composite is empty", "")
    for number, binding in enumerate(bindings):
        call, name = binding.value, binding.var.name
        shape = static_shape(binding.var)
        if shape is None or len(shape) != 4:
            raise NotPacked(f"`{name}` is not a tensor of four static dimensions", name)
        op = op_name(call)
        if op == "relax.nn.conv2d":
            for arg, wanted in enumerate(_conv2d(call, name)):
                reader.read(number, arg, call.args[arg], wanted, name)
        elif op in ELEMENTWISE:
            _elementwise(reader, number, call, op, shape, name)
        elif not isinstance(call, relax.Var):
            raise NotPacked(f"no packed kernel for {op or type(call).__name__}", name)
    output = func.body.body
    shape = static_shape(output)
    assert shape is not None
    if output not in {b.var for b in bindings}:
        raise NotPacked("the composite returns more than one value", output.name if hasattr(output, "name") else "")
    return Needs(tuple(reader.operands), reader.reads, DATA, shape, str(output.ty.dtype))


def _elementwise(reader: _Reader, number: int, call: Any, op: str, shape: tuple[int, ...], name: str) -> None:
    inner = [static_shape(arg) for arg in call.args if isinstance(arg, relax.Var) and arg not in reader.number]
    if inner and all(one != shape for one in inner):
        raise NotPacked(f"`{name}` broadcasts the value that the composite computes to {shape}", name)
    for arg, expr in enumerate(call.args):
        if not isinstance(getattr(expr, "ty", None), relax.TensorType):
            continue
        operand = static_shape(expr)
        if operand is None:
            raise NotPacked(f"an operand of `{name}` has no static shape", name)
        if op == "relax.nn.prelu" and arg == 1:
            if int(call.attrs.axis) != 1:
                raise NotPacked("prelu along another axis than the channels", name)
            wanted = CHANNEL_VECTOR if operand[0] == shape[1] and shape[1] > 1 else PLAIN
        else:
            wanted = broadcast_layout(operand, shape)
        reader.read(number, arg, expr, wanted, name)
