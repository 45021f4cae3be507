"""A module in float64, to tell what rounding does to a network from what a fault does.

Every float in it becomes a float64: parameters, constants, attributes that name a dtype, and the kernels that
importers wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.expr import Constant

from fusion_patterns.reference import Reference

__all__ = ["in_double"]

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "float32")


def in_double(mod: tvm.IRModule, inputs: Mapping[str, Array]) -> list[Array]:
    """What ``main`` of *mod* gives for *inputs* when it is computed in float64 on the CPU."""
    lifted, constants = _constants_as_parameters(mod)
    text = tvm.ir.save_json(lifted)
    for dtype in FLOATS:
        text = text.replace(f'"{dtype}"', '"float64"')
    double = tvm.ir.load_json(text)
    given = {name: _widened(array) for name, array in {**inputs, **constants}.items()}
    return Reference(double).run(given)


def _widened(array: Array) -> Array:
    return array.astype("float64") if str(array.dtype) in FLOATS else array


def _constants_as_parameters(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, Array]]:
    """*mod* with the constants of ``main`` as more parameters, by name: in JSON constants are opaque "
    "bytes."""
    arrays: dict[str, Array] = {}
    parameters: dict[int, Any] = {}

    def lift(constant: Any) -> Any:
        if not isinstance(constant.ty, relax.TensorType):
            return constant
        key = constant.__chandle__()
        if key not in parameters:
            name = f"constant_{len(parameters)}"
            parameters[key] = relax.Var(name, constant.ty)
            arrays[name] = constant.value.numpy()
        return parameters[key]

    main = mod["main"]
    body = tvm_ffi.structural_map(main.body, (Constant, lift))
    lifted = mod.clone()
    lifted["main"] = relax.Function(
        [*main.params, *parameters.values()], body, main.ret_ty, main.is_pure, main.attrs
    )
    return lifted, arrays
