"""The figures of one compiled module, read off its plan and its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import tvm
from tvm import relax

from ..match import FusionPlan
from ..run import manifest as m

__all__ = ["Declined", "Report", "summarise"]

CONVERSIONS = ("layout.pack", "layout.unpack")
COPY = "layout.copy"


@dataclass(frozen=True)
class Declined:
    """A row that was not applied: which, at which IR value, why, and where the row or condition is written."""

    row: str
    value: str
    reason: str
    where: str


@dataclass
class Report:
    """Figures of one compiled module.

    ``launches``: kernels that one run starts, layout conversions included. ``conversions``: layout transforms at run
    time. ``copies``: copies between scopes at run time. ``texture_values``/``global_values``: tensors that kernels
    write, with their bytes (a symbolic dimension counts as one). ``compile_seconds``: by stage. ``tuned``: kernels that
    the profile has a measured tile for; ``tuned_left_aside``: those that could not take it, with the reason.
    """

    composites: dict[str, int] = field(default_factory=dict)
    convs: dict[str, int] = field(default_factory=lambda: {"total": 0, "covered": 0})
    launches: int = 0
    kernels: int = 0
    conversions: int = 0
    copies: int = 0
    texture_values: int = 0
    global_values: int = 0
    texture_bytes: int = 0
    global_bytes: int = 0
    declined: list[Declined] = field(default_factory=list)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    tuned: int = 0
    tuned_left_aside: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)


def summarise(
    plan: FusionPlan,
    first: FusionPlan,
    normal: tvm.IRModule,
    manifest: m.Manifest,
    refused: list[Declined],
    seconds: dict[str, float],
) -> Report:
    """Make the report of a compiled module.

    ``plan``: what was built; ``first``: the plan before composites were taken out of it; ``refused``: those, and why.
    ``seconds``: time by stage.
    """
    report = Report(compile_seconds={name: round(value, 4) for name, value in seconds.items()})
    report.composites = dict(sorted(Counter(match.row.name for match in plan.matches).items()))
    taken = {(match.function, op) for match in plan.matches for op in match.ops}
    for function, var in convolutions(normal):
        report.convs["total"] += 1
        report.convs["covered"] += (function, var) in taken
    report.declined = refused + list(_declined(first))
    report.kernels = len(manifest.kernels)
    for name in entry_points(manifest):
        _count(manifest, name, report)
    return report


def _declined(plan: FusionPlan) -> Iterator[Declined]:
    """What is worth telling: not that a row for other convolutions did not take one that its own row took."""
    takers = {(match.function, str(match.anchor.name)): match.row.name for match in plan.matches}
    for decision in plan.declined():
        if takers.get((decision.function, decision.anchor), decision.row) == decision.row:
            yield Declined(decision.row, decision.culprit or decision.anchor, decision.reason, decision.where)


def convolutions(mod: tvm.IRModule) -> Iterator[tuple[str, Any]]:
    """(function, variable) of every 2-D convolution, transposed ones included."""
    for gv, func in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if not isinstance(func, relax.Function):
            continue
        found: list[Any] = []

        def visit(expr: Any, found: list[Any] = found) -> None:
            if isinstance(expr, relax.SeqExpr):
                for block in expr.blocks:
                    for binding in block.bindings:
                        op = getattr(getattr(binding, "value", None), "op", None)
                        if getattr(op, "name", "") in ("relax.nn.conv2d", "relax.nn.conv2d_transpose"):
                            found.append(binding.var)

        relax.analysis.post_order_visit(func, visit)
        yield from ((str(gv.name_hint), var) for var in found)


def entry_points(manifest: m.Manifest) -> list[str]:
    """Functions that no other function calls."""
    called = {
        step.function
        for function in manifest.functions.values()
        for step in m.all_steps(function.body)
        if isinstance(step, m.Call)
    }
    return [name for name in manifest.functions if name not in called]


def _count(manifest: m.Manifest, name: str, report: Report) -> None:
    for step in m.all_steps(manifest.functions[name].body):
        if isinstance(step, m.Launch):
            report.launches += 1
            report.conversions += step.label in CONVERSIONS
            report.copies += step.label == COPY
        elif isinstance(step, m.Copy):
            report.copies += 1
        elif isinstance(step, m.Call):
            _count(manifest, step.function, report)
        if isinstance(step, m.Alloc | m.Copy):
            size = prod(d for d in step.tensor.shape if isinstance(d, int))
            size *= m.STORAGE[step.tensor.dtype].itemsize
            if step.tensor.is_texture:
                report.texture_values += 1
                report.texture_bytes += size
            else:
                report.global_values += 1
                report.global_bytes += size
