"""Does the compiled module compute what the untouched one does? On a device, against the CPU, output by output.

A module that rounds to integers on its way may differ by more than rounding though no kernel is wrong: then each
rounding is compared by itself, and the outputs from the integers that the device had (:mod:`.quantised`). And where
the CPU itself loses more digits than the device, the module in float64 is the judge (:mod:`.double`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tvm

from .compiled import CompiledModule
from .compiler import Progress, TableLike, compile_module
from .double import in_double
from .errors import BuildError
from .quantised import from_rounded, quantisations, with_rounded
from .reference import Reference
from .run import manifest as m
from .run.opencl import Session
from .run.replay import draw_inputs

__all__ = ["TOLERANCE", "OutputCheck", "VerifyReport", "compare", "verify"]

Array = np.ndarray[Any, Any]

TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2}
"""Largest error relative to the output's scale (its largest magnitude). Integers and bools must be equal."""


@dataclass(frozen=True)
class OutputCheck:
    """One output against the reference.

    ``error``: largest absolute difference over the reference's largest magnitude. ``finite``: both sides are finite
    everywhere. ``varies``: the reference is not one constant, so that agreement says something.
    """

    name: str
    error: float
    tolerance: float
    finite: bool
    varies: bool

    @property
    def ok(self) -> bool:
        """Whether the output agrees."""
        return self.finite and self.error <= self.tolerance


@dataclass
class VerifyReport:
    """The result of :func:`verify`.

    ``first_wrong``: the composite at which the numbers first went wrong, ``None`` if all is well or no single
    composite is to blame.
    """

    device: str
    outputs: list[OutputCheck] = field(default_factory=list)
    first_wrong: str | None = None
    compiled: CompiledModule | None = None

    @property
    def ok(self) -> bool:
        """Whether every output agrees, and at least one varies."""
        return bool(self.outputs) and all(o.ok for o in self.outputs) and any(o.varies for o in self.outputs)

    @property
    def worst(self) -> float:
        """The largest relative error of all outputs."""
        return max((o.error for o in self.outputs), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            "ok": self.ok,
            "device": self.device,
            "worst": self.worst,
            "outputs": [asdict(o) | {"ok": o.ok} for o in self.outputs],
            "first_wrong": self.first_wrong,
            "report": self.compiled.report.to_dict() if self.compiled else None,
        }


def compare(name: str, result: Array, reference: Array) -> OutputCheck:
    """Compare one output with its reference."""
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return OutputCheck(name, float("inf"), 0.0, False, True)
    varies = reference.size < 2 or bool((reference != reference.flat[0]).any())
    tolerance = TOLERANCE.get(str(reference.dtype), 0.0)
    if reference.size == 0:
        return OutputCheck(name, 0.0, tolerance, True, False)
    wide, expected = result.astype("float64"), reference.astype("float64")
    finite = bool(np.isfinite(wide).all() and np.isfinite(expected).all())
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(wide - expected).max()) / scale if finite else float("inf")
    return OutputCheck(name, error, tolerance, finite, varies)


def verify(
    mod: tvm.IRModule,
    target: Any = None,
    table: TableLike = None,
    device: str | None = None,
    seed: int = 0,
    *,
    inputs: Mapping[str, Array] | None = None,
    symbols: Mapping[str, int] | None = None,
    function: str = "main",
    progress: Progress | None = None,
) -> VerifyReport:
    """Compile a module, run it on an OpenCL device, and compare with the untouched module on the CPU.

    ``inputs``: arrays by parameter name; drawn from ``seed`` if left out. ``symbols``: values of the symbolic
    dimensions for drawn inputs. Raises what :func:`compile_module` raises, and :class:`DeviceError`.
    """
    say = progress or (lambda stage: None)
    compiled = compile_module(mod, target, table, progress=progress)
    entry = compiled.manifest.functions[function]
    given = dict(inputs) if inputs is not None else draw_inputs(entry, seed, dict(symbols or {}))
    say("device")
    session = compiled.session(device)
    results = session.run(given, function)
    say("reference on the CPU")
    named = original_names(mod, function, entry, given)
    reference = Reference(mod).run(named, function)
    report = VerifyReport(str(session.device.info.name), compiled=compiled)
    if len(results) != len(reference):
        report.outputs = [OutputCheck("number of outputs", float("inf"), 0.0, False, True)]
        return report
    report.outputs = [
        compare(f"output {i}", ours, theirs)
        for i, (ours, theirs) in enumerate(zip(results, reference, strict=True))
    ]
    if all(output.ok for output in report.outputs):
        return report
    if quantisations(mod, function):
        say("each rounding to integers by itself")
        report.outputs, wrong = _by_quantisation(mod, target, table, session, given, function)
        report.first_wrong = f"`{wrong}` (quantize)" if wrong else None
    else:
        say("the reference in float64")
        exact = _in_double(mod, named, function, results)
        if exact and all(output.ok for output in exact):
            report.outputs = exact
    if not all(output.ok for output in report.outputs) and report.first_wrong is None:
        say("search for the composite")
        report.first_wrong = first_wrong_composite(compiled, session, given, function)
    return report


def _in_double(
    mod: tvm.IRModule, named: Mapping[str, Array], function: str, results: list[Array]
) -> list[OutputCheck]:
    """The outputs against the same module in float64; none if it has no such form."""
    try:
        exact = in_double(mod, named, function)
    except BuildError:
        return []
    with np.errstate(over="ignore"):
        narrow = [theirs.astype(ours.dtype) for ours, theirs in zip(results, exact, strict=True)]
    return [
        compare(f"output {i}, against float64", ours, theirs)
        for i, (ours, theirs) in enumerate(zip(results, narrow, strict=True))
    ]


def _by_quantisation(
    mod: tvm.IRModule,
    target: Any,
    table: TableLike,
    session: Session,
    given: Mapping[str, Array],
    function: str,
) -> tuple[list[OutputCheck], str]:
    """The outputs, and the integers of all quantisations, each from the integers that the device had before.

    Returns the checks and the name of the first quantisation that is wrong, or an empty one. The module is compiled
    once more, with them as results.
    """
    steps = quantisations(mod, function)
    compiled = compile_module(with_rounded(mod, steps, function), target, table)
    results = Session(compiled.manifest, session.device).run(given, function)
    outputs, rounded = results[: -len(steps)], results[-len(steps) :]
    named = original_names(mod, function, compiled.manifest.functions[function], given)
    named |= {f"rounded_{i}": array for i, array in enumerate(rounded)}
    expected = Reference(from_rounded(mod, steps, function)).run(named, function)
    checks = [
        compare(f"output {i}, from the device's integers", ours, theirs)
        for i, (ours, theirs) in enumerate(zip(outputs, expected, strict=False))
    ]
    floats = expected[-len(steps) :]
    errors = [step.error(a, b) for step, a, b in zip(steps, floats, rounded, strict=True)]
    tolerances = [TOLERANCE.get(str(array.dtype), 0.0) for array in floats]
    finite = all(bool(np.isfinite(array).all()) for array in floats)
    checks.append(OutputCheck(f"{len(steps)} quantisations", max(errors), min(tolerances), finite, True))
    wrong = [s.name for s, error, most in zip(steps, errors, tolerances, strict=True) if error > most]
    return checks, wrong[0] if wrong else ""


def original_names(
    mod: tvm.IRModule, function: str, entry: m.Function, given: Mapping[str, Array]
) -> dict[str, Array]:
    """Inputs by the module's own parameter names; the manifest's may differ where those are not unique."""
    renamed = {}
    for param, ours in zip(mod[function].params, entry.params, strict=True):
        for name, array in given.items():
            if name == ours.name or name.startswith(f"{ours.name}#"):
                renamed[str(param.name) + name[len(ours.name) :]] = array
    return renamed


def first_wrong_composite(
    compiled: CompiledModule, session: Session, given: Mapping[str, Array], function: str = "main"
) -> str | None:
    """The composite, in program order, whose result first differs from the CPU's.

    Every composite's result is read back from the device, unpacked, and compared with the same composite run by stock
    TVM on the CPU.
    """
    from .place.probe import composite_values, unpack_array, with_composite_outputs

    values = composite_values(compiled.fused, compiled.placement, function)
    entry = compiled.manifest.functions[function]
    known = {step.value for step in entry.body if isinstance(step, m.Alloc)}
    values = [value for value in values if value.packed in known]
    if not values:
        return None
    probed = m.Function(function, entry.params, entry.body, tuple(value.packed for value in values))
    manifest = m.Manifest(
        compiled.manifest.name,
        compiled.manifest.target,
        {**compiled.manifest.functions, function: probed},
        compiled.manifest.kernels,
        compiled.manifest.constants,
        compiled.manifest.constant_tensors,
    )
    ours = Session(manifest, session.device).run(given, function)
    probe = with_composite_outputs(compiled.fused, values, function)
    theirs = Reference(probe).run(original_names(compiled.fused, function, entry, given), function)
    for value, packed, expected in zip(values, ours, theirs, strict=True):
        if not compare(value.name, unpack_array(packed, value.layout, expected.shape), expected).ok:
            return f"{value.row} `{value.name}` ({value.composite})"
    return None
