"""One network, five ways to OpenCL: ours, ours all and nothing in textures, and stock TVM's two pipelines.

ours             the built-in table, placed as the device's profile says
ours-textures    the same with every wish for a texture granted, whatever the profile says of textures
ours-buffers     the same composites and kernels, every scope global: what placement alone brings
stock-buffers    stock LegalizeOps, FuseOps, FuseTIR, dlight: plain buffers
stock-texture    stock's Adreno texture pipeline with its correctness faults repaired and nothing made faster
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from bench.stock_texture import repaired_kernels
from bench.work import work_of
from fusion_patterns import tvm_compat
from fusion_patterns.compiled import CompiledModule
from fusion_patterns.compiler import as_target, compile_module
from fusion_patterns.errors import BuildError
from fusion_patterns.lower.build import build_manifest
from fusion_patterns.lower.kernels import LoweredFunc, first_line, lower_kernels
from fusion_patterns.lower.stages import calls_of, lower, reshapes_as_views
from fusion_patterns.normalise import normalise
from fusion_patterns.place.profiles import as_profile
from fusion_patterns.run import Manifest
from fusion_patterns.table import Table, load_table
from fusion_patterns.table.model import Scope

__all__ = ["VARIANTS", "build_variant"]


def ours(mod: tvm.IRModule, profile: str | None = None, table: Table | None = None) -> Manifest:
    """The product as it is."""
    return with_work(compile_module(mod, table=table, profile=profile))


def ours_textures(mod: tvm.IRModule, profile: str | None = None, table: Table | None = None) -> Manifest:
    """The product with every wish for a texture granted."""
    chosen = as_profile(profile, as_target()).model_copy(update={"textures": True})
    return with_work(compile_module(mod, table=table, profile=chosen))


def ours_buffers(mod: tvm.IRModule, profile: str | None = None, table: Table | None = None) -> Manifest:
    """The same composites, all scopes global."""
    return with_work(compile_module(mod, table=without_textures(table or load_table()), profile=profile))


def with_work(compiled: CompiledModule) -> Manifest:
    """The manifest, with what each kernel has to do (see :mod:`bench.work`) as ``meta["work"]``."""
    compiled.manifest.meta["work"] = work_of(compiled.manifest, compiled.fused)
    return compiled.manifest


def without_textures(table: Table) -> Table:
    """The table with every scope wish turned into ``global``."""
    rows = []
    for row in table.patterns:
        names = {*row.scopes, "output", "others"}
        rows.append(row.model_copy(update={"scopes": dict.fromkeys(sorted(names), Scope.GLOBAL)}))
    return table.model_copy(update={"patterns": tuple(rows)})


def stock_buffers(mod: tvm.IRModule, profile: str | None = None, table: Table | None = None) -> Manifest:
    """Stock fusion and dlight schedules on the normalised module, in plain buffers."""
    target = as_target()
    with target:
        fused = tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(normalise(mod))
    fused = reshapes_as_views(fused)
    lowered = lower(fused, target)
    _raise(lowered.faults)
    return build_manifest(fused, lowered.funcs, lowered.labels, name="stock-buffers", target="opencl")


def stock_texture(mod: tvm.IRModule, profile: str | None = None, table: Table | None = None) -> Manifest:
    """Stock's Adreno texture pipeline on the normalised module, with its correctness faults repaired."""
    done, lowered = repaired_kernels(normalise(mod))
    names = sorted(lowered)
    return build_manifest(
        done, lowered, {name: name for name in names}, name="stock-texture", target="opencl"
    )


def stock_kernels(mod: tvm.IRModule, target: Any = None) -> tuple[tvm.IRModule, dict[str, LoweredFunc]]:
    """Stock's Adreno pipeline on the module as it is: the scheduled module, and its kernels in OpenCL C by PrimFunc.

    In textures or in buffers, as the target says. Raises :class:`BuildError` where stock can't.
    """
    target = as_target(target)
    try:
        with target:
            passes = relax.backend.adreno.pipeline.legalize_passes(target)
            done = tvm.transform.Sequential(passes)(mod)
    except Exception as error:  # stock aborts in many ways
        kind = "texture" if "texture" in target.keys else "buffer"
        raise BuildError(f"stock's {kind} pipeline: {first_line(error)}") from None
    names = sorted({str(call.args[0].name_hint) for call in calls_of(done)})
    lowered, faults = lower_kernels({name: done[name] for name in names}, target, aligned=False)
    _raise(faults)
    return done, lowered


def _raise(faults: dict[str, str]) -> None:
    for name, reason in faults.items():
        raise BuildError(f"kernel `{name}`: {reason}")


VARIANTS: dict[str, Callable[[tvm.IRModule, str | None, Table | None], Manifest]] = {
    "ours": ours,
    "ours-textures": ours_textures,
    "ours-buffers": ours_buffers,
    "stock-buffers": stock_buffers,
    "stock-texture": stock_texture,
}


def build_variant(
    name: str, mod: tvm.IRModule, profile: str | None = None, table: Table | None = None
) -> Manifest:
    """Build one variant of a network. ``table``: ours with this one, not the built-in.

    Raises :class:`BuildError` where stock can't.
    """
    tvm_compat.prepare()
    return VARIANTS[name](mod, profile, table)
