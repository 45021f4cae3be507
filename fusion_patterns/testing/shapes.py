"""Shapes and element types of results, by arithmetic on plain data: no TVM in here.

It says for itself what TVM's type inference says again when the module is built; a property compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from fusion_patterns.table.ops import OPS, Kind

__all__ = ["Dim", "Infeasible", "Shape", "Type", "broadcast", "infer"]

Dim = int | str
"""A number, or the name of a symbolic dimension."""
Shape = tuple[Dim, ...]
Attrs = Mapping[str, Any]


class Infeasible(Exception):
    """These choices don't go together: the operator does not take such operands."""


class Type(NamedTuple):
    """What is known of a value at compile time."""

    shape: Shape
    dtype: str


def infer(op: str, operands: Sequence[Type], attrs: Attrs) -> Type:
    """The type of an operator's result; raises `Infeasible` for operands that it does not take."""
    kind = OPS[op].kind
    if op in _RULES:
        return _RULES[op](operands, attrs)
    if kind is Kind.CONVOLUTION:
        return _convolution(op, operands, attrs)
    if kind is Kind.POOL:
        return _pool(op, operands, attrs)
    if kind is Kind.REDUCTION:
        return _reduction(operands, attrs)
    if kind is Kind.NORMALISATION:
        return operands[0]
    if OPS[op].is_elementwise:
        return Type(broadcast([operand.shape for operand in operands]), _elementwise_dtype(op, operands))
    raise Infeasible(f"no rule for the shape of {op}")


_OF_INTEGERS = {"abs", "negative", "sign", "square", "clip", "nn.relu", "round", "floor", "ceil", "trunc"}
_ORDER = {"equal", "not_equal", "greater", "greater_equal", "less", "less_equal"}
_PREDICATES = _ORDER | {"isfinite", "isinf", "isnan", "logical_and", "logical_or"}


def _elementwise_dtype(op: str, operands: Sequence[Type]) -> str:
    if op in _PREDICATES:
        return "bool"
    operands = operands[1:] if op == "where" else operands
    if len({operand.dtype for operand in operands}) > 1:
        raise Infeasible(f"{op} on two element types")
    dtype = operands[0].dtype
    if OPS[op].kind is Kind.UNARY and not dtype.startswith("float") and op not in _OF_INTEGERS:
        raise Infeasible(f"{op} of {dtype}")
    return dtype


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these shapes broadcast to; raises `Infeasible` if there is none."""
    rank = max(map(len, shapes))
    result: list[Dim] = []
    for place in range(rank):
        dims = {shape[place - rank] for shape in shapes if len(shape) >= rank - place} - {1}
        if len(dims) > 1:
            raise Infeasible(f"{shapes} don't broadcast")
        result.append(dims.pop() if dims else 1)
    return tuple(result)


def _number(dim: Dim) -> int:
    if isinstance(dim, str):
        raise Infeasible(f"the dimension {dim} must be a number here")
    return dim


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Infeasible(what)


def _window(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool = False) -> int:
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    _require(room >= 0, "the window is larger than the image")
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    # A window that would begin behind the image is left out.
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _convolution(op: str, operands: Sequence[Type], attrs: Attrs) -> Type:
    (shape, dtype), (weights, weight_dtype) = operands
    dims, transposed = int(op[7]), op.endswith("transpose")
    spatial = "DHW"[3 - dims :]
    layout = str(attrs.get("data_layout", f"NC{spatial}"))
    kernel_layout = str(attrs.get("kernel_layout", f"{'IO' if transposed else 'OI'}{spatial}"))
    _require(len(shape) == len(layout) and len(weights) == len(kernel_layout), f"ranks of {op}")
    _require(dtype == weight_dtype, f"{op} on two element types")
    data = dict(zip(layout, shape, strict=True))
    kernel = dict(zip(kernel_layout, map(_number, weights), strict=True))
    groups, channels = int(attrs.get("groups", 1)), _number(data["C"])
    given = kernel["I"] if transposed else kernel["I"] * groups
    _require(channels == given and channels % groups == 0, "channels of the data")
    _require(transposed or kernel["O"] % groups == 0, "channels of the result")
    result: dict[str, Dim] = {"N": data["N"], "C": kernel["O"] * groups if transposed else kernel["O"]}
    ones, zeros = [1] * dims, [0] * dims
    steps = zip(
        spatial,
        attrs.get("strides", ones),
        attrs.get("padding", zeros),
        attrs.get("dilation", ones),
        attrs.get("output_padding", zeros),
        strict=True,
    )
    for axis, stride, padding, dilation, extra in steps:
        size = _number(data[axis])
        if transposed:
            result[axis] = (size - 1) * stride - 2 * padding + dilation * (kernel[axis] - 1) + extra + 1
        else:
            result[axis] = _window(size, kernel[axis], stride, padding, dilation)
    return Type(tuple(result[axis] for axis in attrs.get("out_layout") or layout), dtype)


def _pool(op: str, operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    dims = int(op[-2])
    spatial = "DHW"[3 - dims :]
    layout = str(attrs.get("layout", f"NC{spatial}"))
    _require(len(shape) == len(layout), f"rank of {op}")
    result = dict(zip(layout, shape, strict=True))
    ones, zeros = [1] * dims, [0] * dims
    for place, axis in enumerate(spatial):
        if "output_size" in attrs:
            result[axis] = (tuple(attrs["output_size"]) * dims)[place]
            continue
        result[axis] = _window(
            _number(result[axis]),
            attrs["pool_size"][place],
            attrs.get("strides", ones)[place],
            attrs.get("padding", zeros)[place],
            attrs.get("dilation", ones)[place],
            ceil=bool(attrs.get("ceil_mode", False)),
        )
    return Type(tuple(result[axis] for axis in attrs.get("out_layout") or layout), dtype)


def _reduction(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    _require(all(-len(shape) <= axis < len(shape) for axis in attrs["axis"]), "axis of a reduction")
    axes = {axis % len(shape) for axis in attrs["axis"]}
    if attrs.get("keepdims"):
        return Type(tuple(1 if place in axes else dim for place, dim in enumerate(shape)), dtype)
    return Type(tuple(dim for place, dim in enumerate(shape) if place not in axes), dtype)


def _matmul(operands: Sequence[Type], attrs: Attrs) -> Type:
    (a, dtype), (b, _) = operands
    _require(len(a) >= 2 and len(b) >= 2 and a[-1] == b[-2], "matmul")
    batch = broadcast([a[:-2], b[:-2]])
    return Type((*batch, a[-2], b[-1]), dtype)


def _concat(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    _require(-len(shape) <= attrs["axis"] < len(shape), "axis of concat")
    axis = attrs["axis"] % len(shape)
    for other in operands[1:]:
        same = other.shape[:axis] + other.shape[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
        _require(len(other.shape) == len(shape) and same and other.dtype == dtype, "concat")
    total = sum(_number(operand.shape[axis]) for operand in operands)
    return Type((*shape[:axis], total, *shape[axis + 1 :]), dtype)


def _slice(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    result = list(shape)
    for axis, begin, end in zip(attrs["axes"], attrs["begin"], attrs["end"], strict=True):
        _require(0 <= begin < end <= _number(shape[axis]), "slice")
        result[axis] = end - begin
    return Type(tuple(result), dtype)


def _pad(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    widths = attrs["pad_width"]
    _require(len(widths) == 2 * len(shape), "pad")
    pairs = zip(shape, widths[::2], widths[1::2], strict=True)
    padded = (dim if not before + after else _number(dim) + before + after for dim, before, after in pairs)
    return Type(tuple(padded), dtype)


def _resize(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    layout = str(attrs.get("layout", "NCHW"))
    _require(len(shape) == len(layout), "rank of resize2d")
    named = dict(zip(layout, shape, strict=True)) | dict(zip("HW", attrs["size"], strict=True))
    return Type(tuple(named[axis] for axis in layout), dtype)


def _permute(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    _require(sorted(attrs["axes"]) == list(range(len(shape))), "axes of permute_dims")
    return Type(tuple(shape[axis] for axis in attrs["axes"]), dtype)


def _expand(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = list(operands[0].shape), operands[0].dtype
    for axis in sorted(attrs["axis"]):
        _require(0 <= axis <= len(shape), "axis of expand_dims")
        shape.insert(axis, 1)
    return Type(tuple(shape), dtype)


def _squeeze(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    _require(all(0 <= axis < len(shape) and shape[axis] == 1 for axis in attrs["axis"]), "axis of squeeze")
    return Type(tuple(dim for place, dim in enumerate(shape) if place not in attrs["axis"]), dtype)


def _flat(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    return Type((prod(map(_number, shape)),), dtype)


def _batch_flat(operands: Sequence[Type], attrs: Attrs) -> Type:
    shape, dtype = operands[0]
    _require(len(shape) > 0, "batch_flatten of a number")
    return Type((shape[0], prod(map(_number, shape[1:]))), dtype)


_RULES: dict[str, Callable[[Sequence[Type], Attrs], Type]] = {
    "astype": lambda operands, attrs: Type(operands[0].shape, attrs["dtype"]),
    "matmul": _matmul,
    "concat": _concat,
    "strided_slice": _slice,
    "nn.pad": _pad,
    "nn.prelu": lambda operands, attrs: operands[0],
    "image.resize2d": _resize,
    "flatten": _flat,
    "nn.batch_flatten": _batch_flat,
    "flip": lambda operands, attrs: operands[0],
    "permute_dims": _permute,
    "reshape": lambda operands, attrs: Type(tuple(attrs["shape"]), operands[0].dtype),
    "expand_dims": _expand,
    "squeeze": _squeeze,
}
