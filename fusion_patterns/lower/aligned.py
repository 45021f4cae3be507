"""Vectors that begin at a multiple of their length go through a pointer to vectors.

TVM prints a vector access to a buffer as ``vload4`` or ``vstore4``, which OpenCL allows at any element. A compiler that
does not know where the buffer begins must then make four scalar accesses of it, and each of them moves a quarter of
what it touches:

    vload4(0, data + 4 * i)   ->   ((__global float4*)data)[i]

OpenCL's buffers begin at a multiple of the largest vector (CL_DEVICE_MEM_BASE_ADDR_ALIGN), and that the place is a
multiple of the length is proven; where it can't be, the access stays as it is.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer
from tvm_ffi import structural_map

__all__ = ["with_aligned_vectors"]


def with_aligned_vectors(kernel: Any) -> Any:
    """A device function, as it is after the split of host and device, whose aligned vectors are single accesses."""
    views = _Views()
    body = structural_map(kernel.body, [(TensorLoad, views.load), (tirx.BufferStore, views.store)])
    return kernel.with_body(structural_map(body, (tirx.DeclBuffer, views.declare)))


class _Views:
    """Views of a kernel's buffers as vectors, made when an access first needs one."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, int], Any] = {}
        self.analyzer = Analyzer()

    def load(self, node: Any) -> Any:
        at = self._at(node.source, node.indices)
        return node if at is None else tirx.BufferLoad(*at)

    def store(self, node: Any) -> Any:
        at = self._at(node.buffer, node.indices)
        return node if at is None else tirx.BufferStore(at[0], node.value, at[1])

    def declare(self, node: Any) -> Any:
        """The declaration of a buffer, followed by those of its views."""
        views = [view for (buffer, _), view in self.made.items() if buffer.same_as(node.buffer)]
        declared = [tirx.DeclBuffer(view, data=node.data) for view in views]
        return tirx.SeqStmt([node, *declared]) if declared else node

    def _at(self, buffer: Any, indices: Any) -> tuple[Any, list[Any]] | None:
        """The view, and the place in it, of a vector of consecutive numbers; ``None`` for any other access."""
        index, kind = indices[-1], tvm.DataType(str(buffer.ty.dtype))
        # a bool takes a byte in memory, whatever a vector of them takes; other scopes have vectors already
        if str(kind) == "bool" or kind.lanes > 1 or str(buffer.ty.storage_scope) not in ("", "global"):
            return None
        if len(indices) > 1 or not isinstance(index, tirx.Ramp) or int(index.stride) != 1:
            return None
        lanes = int(index.lanes)
        if not self.analyzer.can_prove(tirx.floormod(index.base, lanes) == 0):
            return None
        if (buffer, lanes) not in self.made:
            shape = (tirx.floordiv(buffer.ty.shape[0], lanes),)
            self.made[buffer, lanes] = tirx.decl_buffer(shape, f"{kind}x{lanes}", f"{buffer.name}_{lanes}")
        return self.made[buffer, lanes], [self.analyzer.simplify(tirx.floordiv(index.base, lanes))]
