"""What is known of tensors at compile time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

__all__ = ["Tensor", "tensor_type"]


@dataclass(slots=True, eq=False)
class Tensor:
    """What is known of a tensor at compile time: ``shape`` holds None for a dimension that is no number."""

    dtype: str
    rank: int | None
    shape: tuple[int | None, ...] | None
    is_static: bool = field(init=False)
    """whether every dimension is a number"""

    def __post_init__(self) -> None:
        self.is_static = self.shape is not None and None not in self.shape

    @property
    def bytes(self) -> int:
        """The least size it can have: an unknown dimension counts as one element."""
        if self.shape is None:
            return 0
        size = _itemsize(self.dtype)
        for extent in self.shape:
            size *= 1 if extent is None else extent
        return size


def tensor_type(ty: Any) -> Tensor:
    """Returns what a Relax type says of a tensor."""
    if not isinstance(ty, relax.TensorType):
        return Tensor("", None, None)
    dtype = "" if ty.dtype is None else str(ty.dtype.dtype)
    values = getattr(ty.shape, "values", None)
    if values is None:
        rank = None if ty.ndim < 0 else int(ty.ndim)
        return Tensor(dtype, rank, None if rank is None else (None,) * rank)
    # A slice of a TVM array is read faster than the array is iterated over.
    shape = tuple([extent.value if type(extent) is tirx.IntImm else None for extent in values[:]])
    return Tensor(dtype, len(shape), shape)


def _itemsize(dtype: str) -> int:
    bits = "".join(character for character in dtype if character.isdigit())
    return (int(bits) + 7) // 8 if bits else 1
