"""Networks that round to integers on their way: each rounding compared by itself.

A value near the middle between two integers may be rounded to one of them on the device and to the other on the CPU,
for sums of floats differ in their last digits with the order of their terms. From there on the two compute with
different integers, and their results may differ by far more than rounding, though no kernel is wrong. So the
module is compared in pieces, from one ``quantize`` to the next:

    with_rounded(mod)    the module, with what every ``quantize`` rounded to as further results
    from_rounded(mod)    the module, with those values as further parameters; its further results are the floats that
                         each ``quantize`` takes

The second, run on the CPU with the values that the first had on the device, says what each of them was rounded
from. :meth:`Quantisation.error` says how far they are from what rounding may give. Where integers only go back to
floats, the values are those floats: then what is compiled is hardly another for the further results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .normalise.integers import along

__all__ = ["Quantisation", "from_rounded", "quantisations", "with_rounded"]

Array = np.ndarray[Any, Any]
Numbers = tuple[Array, Array]
"""Scale and zero point in float64, shaped to broadcast against the value that they belong to."""


@dataclass(frozen=True, eq=False)
class Quantisation:
    """One ``quantize`` of a function: ``integers = clip(round(floats / scale) + zero)`` with ``numbers``.

    ``name``: its IR value. ``var``: the integers, or with ``back`` the floats that they go back to:
    ``(integers - zero) * scale`` with those numbers. ``dtype``: of the integers.
    """

    name: str
    var: relax.Var
    data: relax.Expr
    numbers: Numbers
    dtype: str
    back: Numbers | None = None

    def error(self, floats: Array, rounded: Array) -> float:
        """The largest change of *floats*, relative to their largest magnitude, by which rounding gives *rounded*.

        Half a step away is what rounding does, whichever way; infinite where *floats* are not finite.
        """
        if not (np.isfinite(floats).all() and np.isfinite(rounded).all()):
            return float("inf")
        integers, off = rounded.astype("float64"), 0.0
        if self.back is not None:
            scale, zero = self.back
            integers = np.rint(rounded / scale + zero)
            off = _relative(np.abs((integers - zero) * scale - rounded), rounded)
        scale, zero = self.numbers
        held = np.iinfo(self.dtype)
        exact = np.clip(floats.astype("float64") / scale + zero, held.min, held.max)
        beyond = np.maximum(np.abs(exact - integers) - 0.5, 0.0) * scale
        return max(off, _relative(beyond, floats))


def _relative(difference: Array, values: Array) -> float:
    return float(difference.max(initial=0.0)) / (float(np.abs(values).max(initial=0.0)) or 1.0)


def quantisations(mod: tvm.IRModule, function: str = "main") -> list[Quantisation]:
    """Every ``quantize`` to integers outside of branches, with known scales and zero points, in program order."""
    func = mod[function]
    calls = dict(_calls(func, "relax.quantize"))
    readers: dict[relax.Var, list[tuple[relax.Var, Numbers]]] = {var: [] for var in calls}
    for var, call in _calls(func, "relax.dequantize"):
        numbers = _numbers(call)
        if call.args[0] in readers and numbers is not None:
            readers[call.args[0]].append((var, numbers))
    reads = Counter(_read(func))
    found = []
    for var, call in calls.items():
        numbers, dtype, name = _numbers(call), str(call.attrs.out_dtype), str(var.name)
        if numbers is None or "int" not in dtype:
            continue
        steps = [Quantisation(name, back, call.args[0], numbers, dtype, own) for back, own in readers[var]]
        if len(steps) < reads[var] or not steps:
            steps = [Quantisation(name, var, call.args[0], numbers, dtype)]
        found += steps
    return found


def _calls(func: relax.Function, op: str) -> Iterator[tuple[relax.Var, relax.Call]]:
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value if isinstance(binding, relax.VarBinding) else None
            if isinstance(call, relax.Call) and getattr(call.op, "name", "") == op:
                yield binding.var, call


def _read(func: relax.Function) -> Iterator[relax.Var]:
    """Each variable once for each binding, or result, that reads it."""
    for block in func.body.blocks:
        for binding in block.bindings:
            yield from relax.analysis.free_vars(binding.value)
    yield from relax.analysis.free_vars(func.body.body)


def _numbers(call: relax.Call) -> Numbers | None:
    """Scale and zero point of a ``quantize`` or ``dequantize``, where both are constants."""
    scale, zero = (_along(arg, int(call.attrs.axis), call.ty.ndim) for arg in call.args[1:3])
    return None if scale is None or zero is None else (scale, zero)


def with_rounded(mod: tvm.IRModule, steps: Sequence[Quantisation], function: str = "main") -> tvm.IRModule:
    """*mod* with the values of *steps* after the results of *function*."""
    results = {step.var: relax.Var(f"rounded_{i}", step.var.ty) for i, step in enumerate(steps)}

    def change(binding: relax.Binding) -> list[relax.Binding]:
        more = results.get(binding.var)
        return [binding] if more is None else [binding, relax.VarBinding(more, binding.var)]

    return _rebuilt(mod, function, change, [], list(results.values()))


def from_rounded(mod: tvm.IRModule, steps: Sequence[Quantisation], function: str = "main") -> tvm.IRModule:
    """*mod* with the values of *steps* as parameters ``rounded_0`` and so on after those of *function*.

    What each ``quantize`` took stands after the results.
    """
    given = {step.var: relax.Var(f"rounded_{i}", step.var.ty) for i, step in enumerate(steps)}
    taken = {step.var: relax.Var(f"floats_{i}", step.data.ty) for i, step in enumerate(steps)}
    data = {step.var: step.data for step in steps}

    def change(binding: relax.Binding) -> list[relax.Binding]:
        if binding.var not in given:
            return [binding]
        return [
            relax.VarBinding(taken[binding.var], data[binding.var]),
            relax.VarBinding(binding.var, given[binding.var]),
        ]

    return _rebuilt(mod, function, change, list(given.values()), list(taken.values()))


def _rebuilt(
    mod: tvm.IRModule, function: str, change: Any, params: list[relax.Var], results: list[relax.Var]
) -> tvm.IRModule:
    func = mod[function]
    blocks = [
        type(block)([changed for binding in block.bindings for changed in change(binding)])
        for block in func.body.blocks
    ]
    result = relax.Tuple([func.body.body, *results])
    ty = relax.TupleType([func.ret_ty, *(var.ty for var in results)])
    body = relax.SeqExpr(blocks, result)
    out = mod.clone()
    made = relax.Function([*func.params, *params], body, ty, bool(func.is_pure), func.attrs)
    out[out.get_global_var(function)] = made
    return relax.transform.Normalize()(out)


def _along(arg: relax.Expr, axis: int, rank: int) -> Array | None:
    """A constant scale or zero point as float64, shaped to broadcast along *axis*; None if it isn't constant."""
    if not isinstance(arg, tvm.ir.GenericConst):
        return None
    return along(np.asarray(arg.value.numpy(), "float64"), axis, rank)
