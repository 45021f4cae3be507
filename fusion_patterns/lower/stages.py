"""Placed module -> fused kernels -> scheduled kernels -> OpenCL C: the stages between placement and manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.s_tir import dlight
from tvm.sym import Analyzer
from tvm_ffi import structural_equal, structural_hash

from .. import tvm_compat
from ..place.decide import composites_of
from ..place.profiles import Tiles, TunedTile
from .kernels import LoweredFunc, first_line, lower_kernels, with_c_names
from .legalize import legalize_composites, scope_of, scope_of_type
from .schedule import KERNEL_ATTR, PackedKernel
from .schedule.plain_loops import PlainLoops
from .schedule.rows import ShortRows
from .schedule.tiles import DEFAULT, Tile
from .schedule.tuned import kernel_key, tiles_by_key

__all__ = ["Lowered", "fuse", "lower", "lower_packed", "with_schedules"]

ROW_ATTR = "fusion_patterns.row"


def fuse(placed: tvm.IRModule) -> tvm.IRModule:
    """Legalize, fuse what no row took with stock FuseOps, and turn every group into one PrimFunc.

    PrimFuncs that come from composites carry ``fusion_patterns.row`` and ``fusion_patterns.kernel``.
    """
    composites = {
        name: {
            ROW_ATTR: str(func.attrs[ROW_ATTR]),
            KERNEL_ATTR: str(func.attrs.get(KERNEL_ATTR, "conv2d")),
        }
        for name, func in composites_of(placed).items()
    }
    mod = legalize_composites(placed)
    mod = tvm.transform.Sequential(
        [
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)
    for gv, func in list(mod.functions_items()):
        attrs = composites.get(str(gv.name_hint))
        if attrs is not None and isinstance(func, tirx.PrimFunc):
            mod[gv] = func.with_attrs(attrs)
    return reshapes_as_views(mod)


def reshapes_as_views(mod: tvm.IRModule) -> tvm.IRModule:
    """Turn kernels that only reshape a buffer into ``R.reshape``, which costs nothing.

    Stock RewriteDataflowReshape does not look at scopes: it makes a view of a buffer out of a one-pixel layout
    conversion into a texture.
    """
    rewriter = _Views(mod)
    for gv, func in mod.functions_items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(gv, rewriter.visit_expr(func))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@relax.expr_functor.mutator
class _Views(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.known: dict[str, bool] = {}

    def visit_call_(self, call: Any) -> Any:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir" or len(call.args[1].fields) != 1:
            return call
        source, out = call.args[1].fields[0], call.ty_args[0]
        if not isinstance(out, relax.TensorType) or not isinstance(source.ty, relax.TensorType):
            return call
        if scope_of_type(out) != "global" or scope_of(source) != "global" or source.ty.dtype != out.dtype:
            return call
        # has_reshape_pattern is also true of a slice that keeps the front of a tensor
        if not Analyzer().can_prove_equal(prod(source.ty.shape.values), prod(out.shape.values)):
            return call
        name = str(call.args[0].name_hint)
        if name not in self.known:
            self.known[name] = bool(relax.analysis.has_reshape_pattern(self.mod[name]))
        return relax.op.reshape(source, out.shape) if self.known[name] else call


def fallback_rules() -> list[Any]:
    """Our rule for short rows, then those that TVM's Adreno pipeline uses for what is not in texture."""
    return [ShortRows(), dlight.gpu.Reduction(), dlight.gpu.GeneralReduction(), dlight.gpu.Fallback()]


@dataclass
class Lowered:
    """The kernels of a module.

    ``funcs``: by PrimFunc name. ``scheduled``: the PrimFuncs that they were lowered from. ``labels``: the row (or the
    PrimFunc's name) by PrimFunc name. ``faults``: PrimFuncs that must not or can't be built, with the reason.
    ``tuned``: PrimFuncs for which the profile has a measured tile, with the reason why it was not used, or "".
    """

    funcs: dict[str, LoweredFunc] = field(default_factory=dict)
    scheduled: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, str] = field(default_factory=dict)


def lower(
    fused: tvm.IRModule,
    target: Any,
    cache: dict[Any, Any] | None = None,
    *,
    tiles: Tiles = DEFAULT,
    tuned: Iterable[TunedTile] = (),
) -> Lowered:
    """Schedule and lower each distinct PrimFunc of a fused module once.

    ``cache`` keeps results between calls on modules that share kernels. ``tuned``: measured tiles of single kernels;
    one that a kernel does not allow is left aside.
    """
    result = Lowered()
    measured = tiles_by_key(tuned)
    calls: dict[str, list[Any]] = {}
    for call in calls_of(fused):
        calls.setdefault(str(call.args[0].name_hint), []).append(call)
    store: dict[int, list[tuple[Any, Any, str]]] = cache if cache is not None else {}
    for name in sorted(calls):
        func = fused[name]
        row = str(func.attrs[ROW_ATTR]) if func.attrs and ROW_ATTR in func.attrs else ""
        result.labels[name] = row or name
        scope_fault = call_site_fault(calls[name], func)
        if scope_fault is not None:
            result.faults[name] = scope_fault
            continue
        key = structural_hash(func)
        known = next((value for other, value, _ in store.get(key, []) if structural_equal(other, func)), None)
        if known is None:
            kernel = _unused(name, {taken for entries in store.values() for _, _, taken in entries})
            known = _lower_one(kernel, func, target, tiles, measured)
            store.setdefault(key, []).append((func, known, kernel))
        if isinstance(known, str):
            result.faults[name] = known
        else:
            result.funcs[name], result.scheduled[name], left_aside = known
            if left_aside is not None:
                result.tuned[name] = left_aside
    return result


def with_schedules(fused: tvm.IRModule, lowered: Lowered) -> tvm.IRModule:
    """The fused module with the schedules that its kernels were lowered with."""
    out = fused.clone()
    for name, func in lowered.scheduled.items():
        out[out.get_global_var(name)] = func
    return out


def _unused(name: str, taken: set[str]) -> str:
    """A name for a kernel: in an earlier walk another one may have had this name."""
    own, number = name, 1
    while own in taken:
        own, number = f"{name}_{number}", number + 1
    return own


def _lower_one(
    name: str, func: Any, target: Any, tiles: Tiles, measured: dict[str, Tile]
) -> tuple[LoweredFunc, Any, str | None] | str:
    """Schedule and lower one PrimFunc: by our rule, or by dlight's rules, the plainest last.

    Returns the kernels, the scheduled PrimFunc and, where it has a measured tile, why that was left aside ("": it was
    not); or why there are no kernels.
    """
    if not func.attrs or KERNEL_ATTR not in func.attrs:
        attempts = [[dlight.gpu.Fallback()], [PlainLoops()]]
        if not tvm_compat.sums_in_groups(func):
            attempts.insert(0, fallback_rules())
        done = _first_that_lowers(name, func, target, attempts, tiles.aligned)
        return done if isinstance(done, str) else (*done, None)
    tile = measured.get(kernel_key(func)) if measured else None
    left_aside = None
    if tile is not None:
        done = lower_packed(name, func, target, tiles, tile)
        if not isinstance(done, str):
            return *done, ""
        left_aside = done
    done = lower_packed(name, func, target, tiles)
    return done if isinstance(done, str) else (*done, left_aside)


def lower_packed(
    name: str,
    func: Any,
    target: Any,
    tiles: Tiles = DEFAULT,
    tile: Tile | None = None,
    lanes_apart: tuple[bool, ...] = (False, True),
) -> tuple[LoweredFunc, Any] | str:
    """Schedule and lower one packed PrimFunc as the kernel ``name``, with the tile by ``tiles`` or the one given.

    ``lanes_apart``: what is tried of it (see :class:`PackedKernel`), in order. Returns the kernels and the scheduled
    PrimFunc, or why there are none.
    """
    attempts = [[PackedKernel(apart, tiles, tile)] for apart in lanes_apart]
    return _first_that_lowers(name, func, target, attempts, tiles.aligned)


def _first_that_lowers(
    name: str, func: Any, target: Any, attempts: Iterable[list[Any]], aligned: bool
) -> tuple[LoweredFunc, Any] | str:
    """Schedule by the first rules whose result can be lowered."""
    name, func = name.replace(".", "_"), with_c_names(func)
    fault = "no schedule rule fits"
    for rules in attempts:
        try:
            with target:
                mod = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({name: func}))
        except Exception as error:  # a rule may raise anything; the next one is tried
            fault = first_line(error)
            continue
        done, faults = lower_kernels({name: mod[name]}, target, aligned=aligned)
        if name in done:
            return done[name], mod[name]
        fault = faults[name]
    return fault


def calls_of(mod: tvm.IRModule) -> list[Any]:
    """Every ``call_tir`` of the module."""
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir":
            found.append(expr)

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found


def call_site_fault(calls: list[Any], func: Any) -> str | None:
    """Where a call's tensors are not in the scopes that the PrimFunc's buffers are in."""
    for call in calls:
        out = call.ty_args[0]
        given = [scope_of(arg) for arg in call.args[1].fields]
        given += [scope_of_type(ty) for ty in (out.fields if hasattr(out, "fields") else [out])]
        for param, scope in zip(func.params, given, strict=False):
            own = str(param.ty.storage_scope) if hasattr(param.ty, "storage_scope") else "global"
            if (own or "global") != scope:
                return f"parameter `{param.name}` is in {own}, its call passes {scope}"
    return None
