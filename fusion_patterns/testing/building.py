"""Plain data -> Relax: `build` makes a module of a spec, with weights that follow from their names alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from fusion_patterns.table.ops import ELEMENTWISE
from fusion_patterns.testing.shapes import Infeasible, Type
from fusion_patterns.testing.spec import Graph, Module, Op, Tensor

__all__ = ["build", "sizes_of"]

SYMBOL_SIZE = 2
"""What a symbolic dimension is when a module is run."""


def build(spec: Graph | Module) -> tvm.IRModule:
    """Make the Relax module of a spec; equal specs give equal modules, elements of constants included."""
    functions = spec.functions if isinstance(spec, Module) else (spec,)
    builder = relax.BlockBuilder()
    for graph in functions:
        _Function(graph, builder).emit()
    return builder.finalize()


def sizes_of(spec: Graph | Module) -> dict[str, int]:
    """A size for every symbolic dimension."""
    functions = spec.functions if isinstance(spec, Module) else (spec,)
    shapes = (tensor.shape for graph in functions for tensor in graph.tensors)
    return {dim: SYMBOL_SIZE for shape in shapes for dim in shape if isinstance(dim, str)}


class _Function:
    def __init__(self, graph: Graph, builder: Any) -> None:
        self.graph, self.builder = graph, builder
        self.symbols: dict[str, Any] = {}
        self.types: Mapping[str, Type] = graph.types()

    def emit(self) -> None:
        graph, builder = self.graph, self.builder
        values: dict[str, Any] = {tensor.name: self._tensor(tensor) for tensor in graph.tensors}
        parameters = [values[tensor.name] for tensor in graph.tensors if not tensor.constant]
        with builder.function(graph.name, parameters):
            with builder.dataflow():
                for op in graph.ops:
                    call = self._call(op, [values[arg] for arg in op.args])
                    values[op.name] = builder.emit(call, op.name)
                results = [builder.emit_output(values[name]) for name in graph.results]
            builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.constant:
            return relax.const(_elements(tensor), tensor.dtype)
        shape = [self._dim(dim) for dim in tensor.shape]
        return relax.Var(tensor.name, relax.TensorType(shape, tensor.dtype))

    def _dim(self, dim: int | str) -> Any:
        return self.symbols.setdefault(dim, tirx.Var(dim, "int64")) if isinstance(dim, str) else dim

    def _call(self, op: Op, args: list[Any]) -> Any:
        # An empty layout means none is given, here as in a table.
        attrs = {name: value for name, value in op.attrs.items() if (name, value) != ("out_layout", "")}
        if op.op == ELEMENTWISE:
            return self.builder.call_te(_kernel, *args, primfunc_name_hint=f"elementwise{len(args)}")
        if op.op in ("concat", "stack"):
            return getattr(relax.op, op.op)(args, **attrs)
        if op.op == "image.resize2d":
            attrs["size"] = relax.ShapeExpr(list(attrs["size"]))
        if op.op == "reshape":
            attrs["shape"] = [self._dim(dim) for dim in attrs["shape"]]
        function: Any = relax.op
        for part in op.op.split("."):
            function = getattr(function, part)
        return function(*args, **attrs)


def _kernel(*operands: te.Tensor) -> te.Tensor:
    """An elementwise kernel as an importer might write it."""
    if len(operands) == 1:
        return topi.maximum(operands[0], tirx.const(0.25, operands[0].dtype))
    return topi.add(operands[0], operands[1])


def _elements(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Weights keep the size of what they are multiplied with; all else is from a half to three halves."""
    if any(isinstance(dim, str) for dim in tensor.shape):
        raise Infeasible("a constant of unknown shape")
    shape = tuple(int(dim) for dim in tensor.shape)
    draw = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    if tensor.dtype.startswith(("int", "uint")):
        return draw.integers(1, 4, shape).astype(tensor.dtype)
    if len(shape) >= 3 and shape[0] > 1 and shape[1] >= 1:
        fan_in = prod(shape[1:])
        return np.asarray(draw.standard_normal(shape) * fan_in**-0.5, tensor.dtype)
    return draw.uniform(0.5, 1.5, shape).astype(tensor.dtype)
