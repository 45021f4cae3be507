"""Modules that the tests of placing, lowering and running share, and their way through those stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from fusion_patterns import tvm_compat
from fusion_patterns.lower.build import build_manifest
from fusion_patterns.lower.kernels import LoweredFunc
from fusion_patterns.lower.stages import fuse, lower
from fusion_patterns.place import Placement, decide, place
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Manifest, Session

nn = op.nn
Array = np.ndarray[Any, Any]
Emit = Callable[[Any], Any]
TEXTURE = {"data": "texture", "weight": "global", "output": "texture"}


def texture_target(**attrs: int) -> Any:
    """The Adreno texture target with a host; *attrs* replace its limits."""
    device = dict(tvm.target.Target("qcom/adreno-opencl-texture").export()) | attrs
    return tvm.target.Target(device, host={"kind": "llvm"})


def var(name: str, shape: Sequence[int], dtype: str = "float32") -> Any:
    return relax.Var(name, relax.TensorType(shape, dtype))


def array(shape: Sequence[int], seed: int = 0, dtype: str = "float32", scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def const(shape: Sequence[int], seed: int = 0, dtype: str = "float32", scale: float = 1.0) -> Any:
    return relax.const(array(shape, seed, dtype, scale), dtype)


def weight(shape: Sequence[int], seed: int = 0, dtype: str = "float32") -> Any:
    """Weights that keep the size of what they are multiplied with."""
    return const(shape, seed, dtype, scale=float(np.prod(shape[1:])) ** -0.5)


def shape_of(expr: Any) -> tuple[int, ...]:
    return tuple(int(d) for d in expr.ty.shape.values)


def graph(
    build: Callable[..., Any], params: Sequence[Any], name: str = "main", builder: Any = None
) -> tvm.IRModule:
    """A module of one dataflow function; ``build(emit, *params)`` gives its result, or a list of results."""
    builder = builder or relax.BlockBuilder()
    with builder.function(name, list(params)):
        with builder.dataflow():
            out = build(builder.emit, *params)
            if isinstance(out, list):
                out = relax.Tuple([builder.emit_output(value) for value in out])
            else:
                out = builder.emit_output(out)
        builder.emit_func_output(out)
    return builder.finalize()


@dataclass(frozen=True)
class Composite:
    """A composite of a module in the making; calling it gives the Relax call."""

    func: Any
    var: Any
    constants: tuple[Any, ...]

    def __call__(self, *args: Any) -> Any:
        return relax.Call(self.var, [*args, *self.constants])


class Calls:
    """A module in the making: composites as `outline` makes them, and a ``main`` that calls them."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()
        self.count = 0

    def composite(
        self,
        build: Callable[..., Any],
        params: Sequence[Any],
        scopes: Mapping[str, str] = TEXTURE,
        row: str = "conv2d.chain",
    ) -> Composite:
        """A composite named ``fused_<number>``; ``build(emit, *params)`` calls ``emit`` for each operator.

        Tensor constants become parameters.
        """
        builder, bindings = relax.BlockBuilder(), []
        lifted: dict[Any, Any] = {}

        def emit(call: Any) -> Any:
            args = [
                self._lifted(arg, lifted) if isinstance(arg, tvm.ir.GenericConst) else arg
                for arg in call.args
            ]
            call = builder.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
            bindings.append(relax.VarBinding(relax.DataflowVar(f"lv{len(bindings)}", call.ty), call))
            return bindings[-1].var

        build(emit, *params)
        out = relax.Var("out", bindings[-1].var.ty)
        bindings[-1] = relax.VarBinding(out, bindings[-1].value)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], out)
        attrs = {
            "Primitive": 1,
            "Composite": row,
            "fusion_patterns.row": row,
            "fusion_patterns.origin": "table.yaml:1",
            "fusion_patterns.kernel": "conv2d",
            "fusion_patterns.scopes": dict(scopes),
            "number": self.count,  # the builder merges functions that are equal
        }
        func = relax.Function([*params, *lifted.values()], body, out.ty, True).with_attrs(attrs)
        self.count += 1
        return Composite(func, self.builder.add_func(func, f"fused_{self.count - 1}"), tuple(lifted))

    @staticmethod
    def _lifted(constant: Any, lifted: dict[Any, Any]) -> Any:
        if constant not in lifted:
            lifted[constant] = relax.Var(f"number{len(lifted)}", constant.ty)
        return lifted[constant]

    def conv(
        self,
        data: Sequence[int],
        weights: Sequence[int],
        scopes: Mapping[str, str] = TEXTURE,
        then: Callable[..., Any] | None = None,
        extra: Sequence[Any] = (),
        **attrs: Any,
    ) -> Composite:
        """A composite of one conv2d; ``then(emit, conv, *extra)`` goes on from there."""

        def build(emit: Emit, d: Any, w: Any, *more: Any) -> None:
            value = emit(nn.conv2d(d, w, **attrs))
            if then is not None:
                then(emit, value, *more)

        return self.composite(build, [var("data", data), var("weight", weights), *extra], scopes)

    def main(self, build: Callable[..., Any], params: Sequence[Any]) -> tvm.IRModule:
        """The module; ``build(emit, *params)`` gives the result of ``main``, or a list of results."""
        return graph(build, params, builder=self.builder)


def conv_chain(length: int = 4, channels: int = 8, size: int = 6) -> tvm.IRModule:
    """A chain of 3x3 convolutions, each a composite with a constant weight; input and result are plain."""
    calls = Calls()
    shape, kernel = (1, channels, size, size), (channels, channels, 3, 3)
    callees = [calls.conv(shape, kernel, padding=[1, 1]) for _ in range(length)]

    def build(emit: Emit, x: Any) -> Any:
        for seed, callee in enumerate(callees):
            x = emit(callee(x, weight(kernel, seed)))
        return x

    return calls.main(build, [var("x", shape)])


def draw(mod: tvm.IRModule, seed: int = 0, function: str = "main") -> dict[str, Array]:
    """Standard normal inputs by parameter name."""
    return {
        str(param.name): array(shape_of(param), seed + number, str(param.ty.dtype))
        for number, param in enumerate(mod[function].params)
    }


@dataclass
class Built:
    """A module of composites on its way to a device."""

    placed: tvm.IRModule
    placement: Placement
    fused: tvm.IRModule
    funcs: dict[str, LoweredFunc]
    faults: dict[str, str]
    manifest: Manifest

    def source(self, name: str) -> str:
        """OpenCL C of the only kernel of a composite."""
        (launch,) = self.funcs[name].launches
        return launch.source


def build(mod: tvm.IRModule, target: Any = None, *, packed: bool = False) -> Built:
    """Place, fuse and lower a module of composites; fails on any fault.

    ``packed``: kernels read and write packed data only, with conversions where the module is plain.
    """
    tvm_compat.prepare()
    target = target or texture_target()
    placed, placement = place(mod, target, decide(mod, target, packed_only=None) if packed else None)
    assert placement.refused == {}
    with target:
        fused = fuse(placed)
    lowered = lower(fused, target)
    assert lowered.faults == {}
    manifest = build_manifest(fused, lowered.funcs, lowered.labels, name="test", target="opencl")
    return Built(placed, placement, fused, lowered.funcs, lowered.faults, manifest)


def relative_error(ours: Array, theirs: Array) -> float:
    """The largest difference over the reference's largest magnitude; infinite where either is not finite."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    scale = float(np.abs(theirs).max())
    assert scale > 0, "a reference of zeros says nothing"
    return float(np.abs(ours.astype("float64") - theirs.astype("float64")).max()) / scale


def errors(built: Built, mod: tvm.IRModule, device: Device, seed: int = 0) -> list[float]:
    """The relative error of each output on the device, against stock TVM on the CPU."""
    inputs = draw(mod, seed)
    ours = Session(built.manifest, device).run(inputs)
    theirs = Reference(mod).run(inputs)
    return [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]
