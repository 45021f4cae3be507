"""Stock TVM's Adreno texture pipeline with what is wrong in it repaired, and nothing made faster.

Beside the texture store and the choice of the TIR pipeline (see :mod:`fusion_patterns.tvm_compat`):

    layouts     grouped convolutions (they divide by zero in NCHW4c) and transposed ones (ConvertLayout aborts) stay in
                NCHW, so in buffers; the conversions are those that ConvertLayout writes
    scopes      a PrimFunc that is called with tensors in other scopes gets a copy for each (stock gives all calls the
                scopes of the last)
    pools       every lane of a thread has an accumulator (stock's lanes share one, or the build stops)
    epilogues   what a convolution's schedule does not inline runs on the device, in kernels of its own (stock leaves
                such loops to the host)
    lanes       what a kernel would store in single lanes to an image is a buffer: rules of dlight that know no textures
                schedule such kernels, and every lane's store would fill the whole texel
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir import dlight
from tvm.s_tir.dlight.base import ScheduleRule

from fusion_patterns.compiler import as_target
from fusion_patterns.errors import BuildError
from fusion_patterns.lower.kernels import LoweredFunc, first_line, lower_kernels
from fusion_patterns.lower.legalize import scope_of, scope_of_type
from fusion_patterns.lower.stages import calls_of

__all__ = ["repaired_kernels"]

MOST_THREADS = 256
PLAIN = "global"
SINGLE_LANES = ("a texture store moves", "Expected Data to be Written equal to Texture Store length")
NCHW = {
    "relax.nn.conv2d": ["NCHW", "OIHW", "NCHW"],
    "relax.nn.conv2d_transpose": ["NCHW", "IOHW", "NCHW"],
}
PACKED = {"relax.nn.conv2d": ["NCHW4c", "OIHW4o", "NCHW4c"]}


def repaired_kernels(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, LoweredFunc]]:
    """The module as stock's texture pipeline schedules it, and its kernels in OpenCL C by PrimFunc.

    Raises :class:`BuildError` where stock can't even then.
    """
    target = as_target()
    try:
        with target:
            before, after = halves(target)
            fused = tvm.transform.Sequential(before)(mod)
    except Exception as error:  # stock aborts in many ways
        raise BuildError(f"stock's texture pipeline: {first_line(error)}") from None
    plain: set[str] = set()
    while True:
        try:
            with target:
                scoped, origins = with_scopes(fused, plain)
                done = tvm.transform.Sequential(after)(scoped)
        except Exception as error:
            raise BuildError(f"stock's texture pipeline: {first_line(error)}") from None
        names = sorted({str(call.args[0].name_hint) for call in calls_of(done)})
        lowered, faults = lower_kernels({name: done[name] for name in names}, target, aligned=False)
        single = {
            origins[name] for name, fault in faults.items() if any(part in fault for part in SINGLE_LANES)
        } - plain
        if not single:
            break
        plain |= single
    for name, reason in faults.items():
        raise BuildError(f"kernel `{name}`: {reason}")
    return done, lowered


def halves(target: Any) -> tuple[list[Any], list[Any]]:
    """Stock's passes, the layouts repaired: those before the scopes are in the PrimFuncs, and those after."""
    passes = list(relax.backend.adreno.pipeline.legalize_passes(target))
    names = [str(one.info.name) for one in passes]
    passes[names.index("ConvertLayout")] = relax.transform.ConvertLayout({}, layouts_of)
    place = names.index("SpecializePrimFuncBasedOnCallSite")
    rules = Conv2d(), dlight.adreno.LayoutTransform(), Pool2D()
    first = names.index("ApplyDefaultSchedule")
    return passes[:place], [
        *passes[place + 1 : first],
        dlight.ApplyDefaultSchedule(*rules),
        *passes[first + 1 :],
    ]


def layouts_of(call: Any) -> dict[str, list[str]]:
    """The layouts that ConvertLayout is to give an operator."""
    is_packed = call.op.name == "relax.nn.conv2d" and int(call.attrs.groups) == 1
    return PACKED if is_packed else NCHW


class Conv2d(ScheduleRule):  # type: ignore[misc]
    """Stock's ``dlight.adreno.Conv2d``, and a kernel for each block of the epilogue that it leaves to the host."""

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule, or ``None`` where stock has none either."""
        sch = dlight.adreno.Conv2d().apply(func, target, tunable)
        for block in sch.get_child_blocks(sch.get_sblock("root")) if sch is not None else []:
            *loops, lane = sch.get_loops(block)
            if all(sch.get(loop).thread_binding is None for loop in (*loops, lane)):
                bind(sch, loops)
                sch.vectorize(lane)
        return sch


class Pool2D(ScheduleRule):  # type: ignore[misc]
    """Stock's ``dlight.adreno.Pool2D``, its threads and its padding as they are, but the lanes innermost."""

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule, or ``None`` where stock has none either."""
        if not isinstance(func, tirx.PrimFunc):
            return None
        sch = s_tir.Schedule(func)
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        pools = [b for b in blocks if str(sch.get(b).name_hint) in ("adaptive_pool_sum", "pool_max")]
        if len(pools) != 1 or [int(v.iter_type) for v in sch.get(pools[0]).iter_vars] != [0] * 5 + [2] * 2:
            return None
        (pool,) = pools
        seen = False
        for block in blocks:
            if block.same_as(pool):
                seen = True
            elif str(sch.get(block).name_hint) == "pad_temp":
                *loops, lane = sch.get_loops(block)
                bind(sch, loops)
                sch.vectorize(lane)
            else:
                (sch.reverse_compute_inline if seen else sch.compute_inline)(block)
        write = sch.cache_write(pool, 0, "local")
        *loops, lane, ky, kx = sch.get_loops(pool)
        thread = bind(sch, loops)
        sch.reverse_compute_at(write, thread)
        sch.reorder(ky, kx, lane)
        sch.vectorize(lane)
        sch.vectorize(sch.get_loops(write)[-1])
        sch.vectorize(sch.get_loops(sch.decompose_reduction(pool, ky))[-1])
        return sch


def bind(sch: Any, loops: list[Any]) -> Any:
    """Share loops among threads as stock does; returns the loop over the threads of a group."""
    fused = sch.fuse(*loops)
    extent = int(sch.get(fused).extent)
    group, thread = sch.split(fused, [None, min(extent & ~(extent - 1), MOST_THREADS)])
    sch.bind(group, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def with_scopes(mod: tvm.IRModule, plain: Iterable[str]) -> tuple[tvm.IRModule, dict[str, str]]:
    """The module with a PrimFunc for each callee and scopes of its tensors, which they state.

    ``plain``: callees whose results are buffers, whatever reads them. Returns also each new PrimFunc's origin.
    """
    rewriter = _Scopes(mod, frozenset(plain))
    for gv, func in mod.functions_items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(gv, rewriter.visit_expr(func))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get()), rewriter.origins


@relax.expr_functor.mutator
class _Scopes(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, plain: frozenset[str]) -> None:
        super().__init__(mod)
        self.mod, self.plain = mod, plain
        self.made: dict[tuple[str, ...], Any] = {}
        self.origins: dict[str, str] = {}

    def visit_call_(self, call: Any) -> Any:
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name == "relax.to_vdevice" and scope_of(call.args[0]) == str(call.attrs.dst_vdevice.memory_scope):
            return call.args[0]
        if name != "relax.call_tir":
            return call
        origin, args, out = str(call.args[0].name_hint), list(call.args[1].fields), call.ty_args[0]
        if origin in self.plain:
            out = in_buffers(out)
        parts = list(out.fields) if isinstance(out, relax.TupleType) else [out]
        scopes = [*map(scope_of, args), *map(scope_of_type, parts)]
        key = (origin, *scopes)
        if key not in self.made:
            self.made[key] = self._copy(origin, scopes)
        made = relax.BlockBuilder().normalize(relax.call_tir(self.made[key], args, parts))
        return tvm.ir.Call(
            made.op, [made.args[0], made.args[1], *call.args[2:]], made.attrs, [out], ret_ty=out
        )

    def _copy(self, origin: str, scopes: list[str]) -> Any:
        func = self.mod[origin]
        changed = {
            param: tirx.decl_buffer(param.ty.shape, param.ty.dtype, param.name, scope=scope)
            for param, scope in zip(func.params, scopes, strict=False)
            if scope != PLAIN
        }
        func = func.specialize(changed) if changed else func
        gv = self.builder_.add_func(func.without_attr("global_symbol"), f"{origin}_in")
        self.origins[str(gv.name_hint)] = origin
        return gv


def in_buffers(ty: Any) -> Any:
    """A tensor type, or a tuple of such, that says of no memory scope."""
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([in_buffers(field) for field in ty.fields])
    return relax.TensorType(ty.shape, ty.dtype)
