"""Products of rows with a matrix as TE computes: the dense layers at the end of a classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te

from ...place.layouts import DATA
from .packed import LANES, Packed, blocks, gather

__all__ = ["dense", "elementwise_rows"]


def dense(data: Packed, weight: Packed, dtype: str) -> te.Tensor:
    """``data`` times ``weight``: (N, O) in row-major order. float16 is summed in float32.

    ``data`` is a plain (N, I), or packed pixels (N, I/4, 1, 1, 4); ``weight`` is (O/4, I, 4) with zero beyond O: the
    threads that share a sum read it side by side.
    """
    rows, inputs = data.shape[:2]
    outputs = weight.shape[1]
    wide = "float32" if dtype == "float16" else dtype
    i = te.reduce_axis((0, inputs), "i")

    def element(n: Any) -> Any:
        return gather(data.tensor, n, i, 0, 0) if data.layout == DATA else data.tensor[n, i]

    product = te.compute(
        (rows, blocks(outputs), LANES),
        lambda n, o, lane: te.sum(element(n).astype(wide) * weight.tensor[o, i, lane].astype(wide), axis=i),
        name="dense",
    )
    return te.compute(
        (rows, outputs),
        lambda n, k: product[n, k // LANES, k % LANES].astype(dtype),
        name="flat",
    )


def elementwise_rows(
    expression: Callable[..., Any], operands: list[Packed], shape: tuple[int, ...], name: str
) -> te.Tensor:
    """An elementwise op on plain operands that broadcast to rows of ``shape`` (N, C)."""

    def compute(*index: Any) -> Any:
        values = []
        for operand in operands:
            own = index[len(index) - len(operand.shape) :]
            values.append(
                operand.tensor[tuple(i if d > 1 else 0 for i, d in zip(own, operand.shape, strict=True))]
                if own
                else operand.tensor[()]
            )
        return expression(*values)

    return te.compute(shape, compute, name=name)
