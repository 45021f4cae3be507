"""One network of the corpus, the whole way: import, compile, run, verify, count.

What is found out goes to ``tell`` at once, as parts of the record, so that a network that is stopped half way
keeps what it had; the last ``stage`` told is where it stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import Constant

from fusion_patterns import tvm_compat
from fusion_patterns.compiled import CompiledModule
from fusion_patterns.compiler import as_target, compile_module
from fusion_patterns.double import in_double
from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.frontends import first_line
from fusion_patterns.normalise import normalise
from fusion_patterns.place.layouts import DATA
from fusion_patterns.reference import Reference, stock_launches
from fusion_patterns.run import manifest as m
from fusion_patterns.run.replay import draw_inputs
from fusion_patterns.verification import compare, first_wrong_composite, original_names

__all__ = ["AMPLIFIED", "measure", "operators", "stock_compile", "textures_of_convolutions"]

AMPLIFIED = 1e-4
"""From this relative error on a network is computed in float64 as well, to tell rounding from faults."""

Tell = Callable[..., None]
Array = np.ndarray[Any, Any]


class Clock:
    """Tells the stage that begins, and its seconds when it ends."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.tell(stage=stage)
        begin = time.perf_counter()
        yield
        self.tell(**{f"{stage.replace(' ', '_')}_seconds": round(time.perf_counter() - begin, 3)})


def measure(entry: Mapping[str, Any], tell: Tell, device: str | None = None) -> None:
    """Find out all about one network. A failure is told as ``failed``: stage, kind and reason."""
    import networks

    clock, at = Clock(tell), ["import"]

    def heard(**parts: Any) -> None:
        at[0] = parts.get("stage", at[0])
        tell(**parts)

    clock.tell = heard
    try:
        with clock("import"):
            mod = networks.import_network(dict(entry))
        tell(ops=operators(mod))
        with clock("compile"):
            compiled = compile_module(mod, progress=lambda stage: heard(stage=stage))
        report = compiled.report.to_dict()
        report["declined"] = len(report["declined"])
        labels = Counter(
            step.label
            for function in compiled.manifest.functions.values()
            for step in m.all_steps(function.body)
            if isinstance(step, m.Launch)
        )
        tell(labels=dict(labels.most_common()))
        tell(report=report, **textures_of_convolutions(compiled))
        _verify(mod, compiled, device, heard, clock, dict(entry))
    except Exception as error:  # whatever stops one network must not stop the others
        known = isinstance(error, FusionPatternsError)
        kind = type(error).__name__
        tell(failed={"stage": at[0], "kind": kind, "reason": first_line(error), "known": known})
        if "mod" not in locals():
            return
    normal = normalise(mod)
    tell(normal_ops=operators(normal))
    # As imported stock needs more launches, or as many: `bench.kernel_counts` counts both.
    for which, form in (("normal", normal), ("raw", mod)):
        try:
            with clock(f"stock launches {which}"):
                tell(**{f"stock_{which}": stock_launches(form)})
            break
        except Exception as error:
            tell(**{f"stock_{which}_error": first_line(error)})
    tell(stage="done")


def _verify(
    mod: tvm.IRModule, compiled: CompiledModule, device: str | None, tell: Tell, clock: Clock, entry: Any
) -> None:
    function = compiled.manifest.functions["main"]
    given = draw_inputs(function, 0, {})
    with clock("device build"):
        session = compiled.session(device)
    tell(device=str(session.device.info.name))
    with clock("device run"):
        results = session.run(given)
    with clock("reference"):
        named = original_names(mod, "main", function, given)
        expected = Reference(mod).run(named)
    checks = [compare(f"output {i}", a, b) for i, (a, b) in enumerate(zip(results, expected, strict=True))]
    worst = max(check.error for check in checks)
    tell(
        worst=worst,
        outputs=len(checks),
        finite=all(check.finite for check in checks),
        varies=any(check.varies for check in checks),
    )
    if worst <= AMPLIFIED and all(check.finite for check in checks):
        return
    tell(stage="search for the composite")
    tell(first_wrong=first_wrong_composite(compiled, session, given))
    with clock("float64"):
        exact = in_double(mod, named)
        tell(
            ours_to_float64=max(_distance(a, b) for a, b in zip(results, exact, strict=True)),
            stock_to_float64=max(_distance(a, b) for a, b in zip(expected, exact, strict=True)),
        )


def _distance(result: Array, exact: Array) -> float:
    scale = float(np.abs(exact).max()) or 1.0
    return float(np.abs(result.astype("float64") - exact).max()) / scale


def operators(mod: tvm.IRModule) -> int:
    """Calls of operators and kernels in all functions of a module."""
    count = 0

    def visit(expr: Any) -> None:
        nonlocal count
        count += isinstance(expr, relax.Call)

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return count


def textures_of_convolutions(compiled: CompiledModule) -> dict[str, Any]:
    """How many of the activations that convolutions read, residuals included, lie in texture; and bytes.

    A convolution that no row covers reads one activation from a buffer, whose bytes are not known here.
    """
    placement, inputs, textures, total, held = compiled.placement, 0, 0, 0, 0
    constants = _constant_arguments(compiled.fused)
    for name, needs in placement.needs.items():
        row = str(compiled.fused[name].attrs["fusion_patterns.row"])
        if not row.startswith("conv2d"):
            continue
        for operand, form in zip(needs.operands, placement.operands[name], strict=True):
            if operand.layout != DATA or (name, operand.param) in constants:
                continue
            size = prod(operand.shape) * np.dtype(operand.dtype).itemsize
            is_texture = form.scope.startswith("global.texture")
            inputs, total = inputs + 1, total + size
            textures, held = textures + is_texture, held + size * is_texture
    convs = compiled.report.convs
    inputs += convs["total"] - convs["covered"]
    return {
        "conv_inputs": inputs,
        "conv_inputs_texture": textures,
        "conv_bytes": total,
        "conv_bytes_texture": held,
    }


def _constant_arguments(mod: tvm.IRModule) -> set[tuple[str, int]]:
    """(function, position) of every argument that is a constant."""
    found: set[tuple[str, int]] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, relax.GlobalVar):
            for position, argument in enumerate(expr.args):
                if isinstance(argument, Constant):
                    found.add((str(expr.op.name_hint), position))

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found


def stock_compile(entry: Mapping[str, Any], tell: Tell) -> None:
    """Compile one network with stock TVM's texture pipeline and tell the seconds, or what stops it.

    Ours is timed once more just before, so that both meet the same machine. The pipeline's registration
    and its texture stores are repaired first, else it compiles nothing.
    """
    import networks

    mod = networks.import_network(dict(entry))
    tvm_compat.prepare()
    begin = time.perf_counter()
    compile_module(mod)
    tell(stock_beside_seconds=round(time.perf_counter() - begin, 3))
    begin = time.perf_counter()
    try:
        tvm.compile(mod, as_target())
    except Exception as error:  # TVM raises many kinds
        tell(stock_compile_error=first_line(error))
    else:
        tell(stock_compile_seconds=round(time.perf_counter() - begin, 3))
