"""The CPU through LLVM: what a module computes, and what stock TVM makes of it. The yardstick for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .errors import BuildError
from .lower.kernels import first_line
from .lower.stages import calls_of

__all__ = ["Reference", "stock_launches"]

Array = np.ndarray[Any, Any]


class Reference:
    """A module built for the CPU by stock TVM.

    Modules with composites are fused first (``FuseTIR`` on legalized composites), as any backend would do.
    Raises :class:`BuildError` if stock TVM can't build the module.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        try:
            if any(is_primitive(func) for func in mod.functions.values()):
                mod = relax.transform.FuseTIR()(relax.transform.LegalizeOps()(mod))
            # The first gives the branches of an `If` one storage that only one of them allocates: a segfault.
            # The second makes a view of what is packed into another scope, and forgets to define it.
            faulty = ["StaticPlanBlockMemory", "RewriteDataflowReshape"]
            with tvm.transform.PassContext(disabled_pass=faulty):
                executable = relax.build(mod, tvm.target.Target("llvm"))
            self.vm = relax.VirtualMachine(executable, tvm.cpu())
        except Exception as error:  # TVM raises many kinds
            raise BuildError(f"stock TVM can't build this module for the CPU: {first_line(error)}") from None

    def run(self, inputs: Mapping[str, Array], function: str = "main") -> list[Array]:
        """Run a function.

        ``inputs``: arrays by leaf name (``x``, or ``t#0`` for an item of a tuple parameter), as
        :func:`fusion_patterns.run.replay.draw_inputs` draws them. Returns the results, nested tuples flattened.
        """
        func = self.mod[function]
        args = [self._argument(param.ty, str(param.name), inputs) for param in func.params]
        return flatten(self.vm[function](*args))

    def _argument(self, ty: Any, name: str, inputs: Mapping[str, Array]) -> Any:
        if isinstance(ty, relax.TensorType):
            return tvm.runtime.tensor(np.asarray(inputs[name], order="C"))
        return [self._argument(part, f"{name}#{i}", inputs) for i, part in enumerate(ty.fields)]


def is_primitive(func: Any) -> bool:
    """Whether a function is a composite that somebody fused."""
    return isinstance(func, relax.Function) and bool(func.attrs) and "Primitive" in func.attrs


def flatten(value: Any) -> list[Array]:
    if hasattr(value, "numpy"):
        return [value.numpy()]
    if isinstance(value, Sequence) or type(value).__name__ == "Array":
        return [array for item in value for array in flatten(item)]
    if type(value).__name__ in ("Shape", "ShapeTuple"):
        return [np.array([int(d) for d in value], dtype="int64")]
    raise BuildError(f"a result of type {type(value).__name__} can't be compared")


def stock_launches(mod: tvm.IRModule) -> int:
    """Kernels that one run starts after stock LegalizeOps, FuseOps and FuseTIR, reshapes as views not counted."""
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
        relax.transform.RewriteDataflowReshape(),
    ]
    with tvm.target.Target("llvm"):
        mod = tvm.transform.Sequential(passes)(mod)
    return len(calls_of(mod))
