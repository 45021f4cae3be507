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

from .errors import BuildError
from .lower.kernels import first_line
from .reference import Reference

__all__ = ["in_double"]

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "float32")


def in_double(mod: tvm.IRModule, inputs: Mapping[str, Array], function: str = "main") -> list[Array]:
    """What *function* of *mod* gives for *inputs* when it is computed in float64 on the CPU.

    ``inputs``: as for :meth:`.Reference.run`. Raises :class:`BuildError` where the module can't be widened: other
    functions of it hold constants, or stock TVM can't build it in float64.
    """
    lifted, constants = _constants_as_parameters(mod, function)
    try:
        text = tvm.ir.save_json(lifted)
        for dtype in FLOATS:
            text = text.replace(f'"{dtype}"', '"float64"')
        double = tvm.ir.load_json(text)
    except Exception as error:  # TVM raises many kinds
        raise BuildError(f"this module has no float64 form: {first_line(error)}") from None
    given = {name: _widened(array) for name, array in {**inputs, **constants}.items()}
    return Reference(double).run(given, function)


def _widened(array: Array) -> Array:
    return array.astype("float64") if str(array.dtype) in FLOATS else array


def _constants_as_parameters(mod: tvm.IRModule, function: str) -> tuple[tvm.IRModule, dict[str, Array]]:
    """*mod* with the constants of *function* as more parameters, by name: in JSON constants are opaque bytes."""
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

    func = mod[function]
    body = tvm_ffi.structural_map(func.body, (Constant, lift))
    lifted = mod.clone()
    lifted[function] = relax.Function(
        [*func.params, *parameters.values()], body, func.ret_ty, func.is_pure, func.attrs
    )
    for variable, other in lifted.functions.items():
        if isinstance(other, relax.Function) and _holds_constants(other):
            raise BuildError(f"the constants of `{variable.name_hint}` can't be widened to float64")
    return lifted, arrays


def _holds_constants(func: relax.Function) -> bool:
    found: list[Any] = []

    def note(constant: Any) -> Any:
        found.extend([constant] if isinstance(constant.ty, relax.TensorType) else [])
        return constant

    tvm_ffi.structural_map(func.body, (Constant, note))
    return bool(found)
