"""Which PrimFuncs are elementwise: found by reading the function, never by its name.

An elementwise function fills its one output element by element, and each element needs at most the element at
its own place of every input::

    for i0, i1, ...:                   one loop for each dimension of the output, nothing else
        sblock(v0 = i0, v1 = i1, ...): all spatial, no predicate, no init
            out[v0, v1, ...] = f(a[v0, v1, ...], b[0, v1, ...], c[()])

An input may broadcast: its indices are the output's last ones, and a dimension of size 1 is read at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Op, Var
from tvm.ir.expr import TensorLoad

__all__ = ["Elementwise", "is_elementwise"]

_SPATIAL = 0
"""``IterVar.DataPar``: an iteration that no other one depends on."""
_ANNOTATION, _PURE = 0, 1
"""``CallEffectKind``: calls that only compute."""


@dataclass(frozen=True)
class Elementwise:
    """What is known of an elementwise function: for each input, whether it has the output's shape."""

    same_shape: tuple[bool, ...]


def is_elementwise(func: tirx.PrimFunc) -> Elementwise | None:
    """Returns what is known of ``func`` if it is elementwise, else None."""
    buffers = list(func.params)
    if len(buffers) < 2 or not all(_is_buffer(parameter) for parameter in buffers):
        return None
    nest = _loop_nest(func.body)
    if nest is None:
        return None
    loops, realize = nest
    block = realize.block
    if not _is_plain(realize, loops):
        return None
    store = block.body
    output = buffers[-1]
    axes = [axis.var for axis in block.iter_vars]
    if not store.buffer.same_as(output) or not _are(store.indices, axes):
        return None
    if not _covers(loops, output):
        return None
    inputs = buffers[:-1]
    if not _reads_in_place(store.value, inputs, output, axes):
        return None
    return Elementwise(tuple(_equal_shapes(buffer.shape, output.shape) for buffer in inputs))


def _is_buffer(parameter: Any) -> bool:
    return hasattr(parameter, "shape") and hasattr(parameter, "scope")


def _loop_nest(body: Any) -> tuple[list[Any], Any] | None:
    """Returns the loops and the one block in them, or None if the function has another form."""
    if isinstance(body, s_tir.SBlockRealize):
        root = body.block
        if list(root.iter_vars) or list(root.alloc_buffers) or root.init is not None:
            return ([], body) if isinstance(root.body, tirx.BufferStore) else None
        if isinstance(root.body, tirx.BufferStore):
            return [], body
        body = root.body
    loops = []
    while isinstance(body, tirx.For):
        loops.append(body)
        body = body.body
    return (loops, body) if isinstance(body, s_tir.SBlockRealize) else None


def _is_plain(realize: Any, loops: list[Any]) -> bool:
    """Whether the block maps each loop onto one spatial axis, in order, and does nothing but store."""
    block = realize.block
    if block.init is not None or list(block.alloc_buffers) or list(block.match_buffers):
        return False
    if not isinstance(block.body, tirx.BufferStore):
        return False
    if any(int(axis.iter_type) != _SPATIAL for axis in block.iter_vars):
        return False
    if not _are(realize.iter_values, [loop.loop_var for loop in loops]):
        return False
    return isinstance(realize.predicate, tirx.IntImm) and int(realize.predicate.value) == 1


def _covers(loops: list[Any], output: Any) -> bool:
    """Whether the loops run over the whole output and no further."""
    extents = [loop.extent for loop in loops]
    starts_at_zero = all(_is_zero(loop.min) for loop in loops)
    return starts_at_zero and _equal_shapes(extents, output.shape)


def _reads_in_place(value: Any, inputs: list[Any], output: Any, axes: list[Any]) -> bool:
    """Whether a value is computed from nothing but the inputs' elements at the output's own place."""
    loads: list[Any] = []
    calls: list[Any] = []
    places: list[Any] = []

    def index_or_load(node: Any) -> None:
        (loads if isinstance(node, TensorLoad) else places).append(node)

    tvm_ffi.structural_walk(value, [((TensorLoad, Var), index_or_load), (Call, calls.append)])
    if not all(_is_pure(call) for call in calls):
        return False
    # A variable that stands outside of an index would make the element depend on where it is.
    in_indices = sum(sum(isinstance(index, Var) for index in load.indices) for load in loads)
    variables = [place for place in places if any(place.same_as(axis) for axis in axes)]
    if len(variables) != in_indices:
        return False
    return all(_in_place(load, inputs, output, axes) for load in loads)


def _in_place(load: Any, inputs: list[Any], output: Any, axes: list[Any]) -> bool:
    """Whether a load reads an input at the output's own place, broadcast dimensions at 0."""
    if not any(load.source.same_as(buffer) for buffer in inputs):
        return False
    indices, shape = list(load.indices), list(load.source.shape)
    skipped = len(axes) - len(indices)
    if skipped < 0:
        return False
    for index, extent, axis, full in zip(
        indices, shape, axes[skipped:], list(output.shape)[skipped:], strict=True
    ):
        in_place = index.same_as(axis) and tvm_ffi.structural_equal(extent, full)
        if not in_place and not (_is_one(extent) and (_is_zero(index) or index.same_as(axis))):
            return False
    return True


def _is_pure(call: Any) -> bool:
    return isinstance(call.op, Op) and call.op.get_attr("TCallEffectKind") in (_ANNOTATION, _PURE)


def _are(expressions: Any, variables: list[Any]) -> bool:
    found = list(expressions)
    return len(found) == len(variables) and all(a.same_as(b) for a, b in zip(found, variables, strict=True))


def _equal_shapes(left: Any, right: Any) -> bool:
    a, b = list(left), list(right)
    return len(a) == len(b) and all(tvm_ffi.structural_equal(x, y) for x, y in zip(a, b, strict=True))


def _is_zero(expression: Any) -> bool:
    return isinstance(expression, tirx.IntImm) and int(expression.value) == 0


def _is_one(expression: Any) -> bool:
    return isinstance(expression, tirx.IntImm) and int(expression.value) == 1
