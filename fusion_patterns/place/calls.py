"""What a call of an operator says of itself: its operator, the tensors that it reads, their shapes."""

from __future__ import annotations

from typing import Any

from tvm import relax

__all__ = ["op_name", "replace_tensor_args", "static_shape", "tensor_args"]


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


def tensor_args(call: Any) -> list[Any]:
    """The tensors that a call reads, in order; those of a tuple one by one."""
    found = []
    for arg in call.args:
        if _is_tensor_tuple(arg):
            found += list(arg.fields)
        elif isinstance(getattr(arg, "ty", None), relax.TensorType):
            found.append(arg)
    return found


def _is_tensor_tuple(arg: Any) -> bool:
    return isinstance(arg, relax.Tuple) and all(
        isinstance(getattr(field, "ty", None), relax.TensorType) for field in arg.fields
    )


def replace_tensor_args(call: Any, tensors: list[Any]) -> list[Any]:
    """The call's arguments with other tensors in the places of :func:`tensor_args`."""
    rest = iter(tensors)
    args = []
    for arg in call.args:
        if _is_tensor_tuple(arg):
            args.append(relax.Tuple([next(rest) for _ in arg.fields]))
        elif isinstance(getattr(arg, "ty", None), relax.TensorType):
            args.append(next(rest))
        else:
            args.append(arg)
    return args
