"""The one place that knows TVM's versions and repairs its faults.

Nothing here is imported by a room; :func:`prepare` is called once before anything is compiled. Each repair has a
test that shows the fault without it, so that it can go when upstream no longer needs it.

    versions          apache-tvm-ffi 0.1.15 segfaults in ConvertLayout: refused before TVM is imported
    TIR pipeline      targets with the key ``texture`` get TVM's Adreno TIR pipeline (stock resolves to ``s_tir``, which
                      never lowers textures, and its registration under the name ``adreno`` can't be unpacked)
    texture store     one ``texture2d_store`` of four lanes stays one store (stock writes one lane four times)
    branches          memory is not planned over the branches of an If (stock's VM crashes in the second)
    vector select     a condition that all lanes share becomes a branch (stock casts the bool to a vector, and OpenCL's
                      ``select`` on vectors looks at the sign bit: it always takes the other value)
    epilogue          what follows a reduction stays a stage of its own (stock dlight inlines it into a reduction of
                      one element, and so applies it twice: to the initial value, and to the sum)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from typing import Any

from .errors import VersionError

__all__ = [
    "FFI_RANGE",
    "TVM_RANGE",
    "adreno_tir_pipeline",
    "check_versions",
    "finalize_passes",
    "prepare",
    "repaired_inline",
    "repaired_texture_store",
    "repaired_vector_select",
]

TVM_RANGE = ((0, 27), (0, 28))
FFI_RANGE = ((0, 1, 14), (0, 1, 15))


def _version(package: str) -> tuple[tuple[int, ...], str]:
    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise VersionError(
            f"{package} is not installed; run `pip install 'apache-tvm==0.27.*' 'apache-tvm-ffi>=0.1.14,<0.1.15'`"
        ) from None
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers), text


@lru_cache(maxsize=1)
def check_versions() -> None:
    """Refuse versions that were not tried.

    Reads the packages' metadata only: TVM itself may crash with a wrong FFI. Raises :class:`VersionError`.
    """
    for package, (least, below), remedy in (
        ("apache-tvm", TVM_RANGE, "pip install 'apache-tvm==0.27.*'"),
        ("apache-tvm-ffi", FFI_RANGE, "pip install 'apache-tvm-ffi>=0.1.14,<0.1.15'"),
    ):
        version, text = _version(package)
        if not least <= version < below:
            wanted = ".".join(map(str, least)), ".".join(map(str, below))
            raise VersionError(
                f"{package} {text} was never tried with this package (wanted: >={wanted[0]}, <{wanted[1]}); "
                f"run `{remedy}`"
            )


def repaired_texture_store() -> Any:
    """A pass that gives every ``texture2d_store`` a primitive type.

    TextureFlatten types the call like its first argument, a pointer; VectorizeLoop then splits it into four scalar
    stores before it reaches its own texture case. Run between the two.
    """
    import tvm
    from tvm_ffi import structural_map

    def retype(call: Any) -> Any:
        if getattr(call.op, "name", "") == "tirx.texture2d_store":
            return tvm.ir.Call("tirx.texture2d_store", list(call.args), ret_ty="int32")
        return call

    @tvm.tirx.transform.prim_func_pass(opt_level=0, name="RepairTextureStore")  # type: ignore[untyped-decorator]
    def repair(func: Any, mod: Any, ctx: Any) -> Any:
        return func.with_body(structural_map(func.body, (tvm.ir.Call, retype)))

    return repair


def repaired_vector_select() -> Any:
    """A pass that makes ``Select`` on vectors safe to print as OpenCL's ``select``.

    The built-in picks each lane by the sign bit of its condition. A comparison of vectors sets it; a bool that is
    broadcast, or loaded from memory, does not. Run last, before code generation.
    """
    import tvm
    from tvm import tirx
    from tvm_ffi import structural_map

    compared = ("LT", "LE", "GT", "GE", "EQ", "NE", "And", "Or", "Not")

    def safe(select: Any) -> Any:
        lanes = int(tvm.DataType(str(select.ty.dtype)).lanes)
        condition = select.condition
        if lanes == 1 or type(condition).__name__ in compared:
            return select
        if type(condition).__name__ == "Broadcast":
            return tirx.if_then_else(condition.value, select.true_value, select.false_value)
        zero = tirx.Broadcast(tirx.const(0, "int32"), lanes)
        condition = tirx.NE(tirx.Cast(f"int32x{lanes}", condition), zero)
        return tirx.Select(condition, select.true_value, select.false_value)

    @tvm.tirx.transform.prim_func_pass(opt_level=0, name="RepairVectorSelect")  # type: ignore[untyped-decorator]
    def repair(func: Any, mod: Any, ctx: Any) -> Any:
        return func.with_body(structural_map(func.body, (tirx.Select, safe)))

    return repair


def repaired_guarded_loads() -> Any:
    """A pass that keeps what a ``Select`` loads inside of the buffers.

    OpenCL computes both values of a ``Select``, but StmtSimplify takes the condition for granted in the first, and
    its opposite in the second: of ``min(channel, last)`` behind ``channel <= last`` only the channel is left, and the
    kernel reads beyond the buffer. A place that can't be proven to exist whatever the condition is clamped again. Run
    last, before code generation.
    """
    import tvm
    from tvm import tirx
    from tvm.ir.expr import TensorLoad
    from tvm_ffi import structural_map

    @tvm.tirx.transform.prim_func_pass(opt_level=0, name="RepairGuardedLoads")  # type: ignore[untyped-decorator]
    def repair(func: Any, mod: Any, ctx: Any) -> Any:
        analyzer = _ranges(func.body)

        def clamped(load: Any) -> Any:
            buffer, index = load.source, load.indices[-1]
            if len(load.indices) > 1 or str(buffer.ty.storage_scope) not in ("", "global"):
                return load  # images answer for places that they don't have
            kind, size = tvm.DataType(str(index.ty.dtype)), buffer.ty.shape[0]
            first = last = index
            if isinstance(index, tirx.Ramp):
                first, last = index.base, index.base + index.stride * (int(index.lanes) - 1)

            def limit(value: Any) -> Any:
                value = analyzer.simplify(tirx.Cast(str(kind.with_lanes(1)), value))
                return tirx.Broadcast(value, kind.lanes) if kind.lanes > 1 else value

            scalar = int(tvm.DataType(str(last.ty.dtype)).lanes) == 1
            within = index
            if not (scalar and analyzer.can_prove(last < size)):
                within = tirx.Min(within, limit(size - 1))
            if not (scalar and analyzer.can_prove(first >= 0)):
                within = tirx.Max(within, limit(tirx.const(0, str(kind.with_lanes(1)))))
            return load if within is index else tirx.BufferLoad(buffer, [within])

        def both(select: Any) -> Any:
            values = (
                structural_map(value, (TensorLoad, clamped))
                for value in (select.true_value, select.false_value)
            )
            return tirx.Select(select.condition, *values)

        return func.with_body(structural_map(func.body, (tirx.Select, both)))

    return repair


def _ranges(body: Any) -> Any:
    """An analyzer that knows the ranges of a kernel's loops and threads, and what its lets stand for."""
    from tvm import tirx
    from tvm.ir import Range
    from tvm.sym import Analyzer
    from tvm_ffi import structural_walk

    analyzer = Analyzer()

    def loop(node: Any) -> None:
        analyzer.bind(node.loop_var, Range.from_min_extent(node.min, node.extent))

    def thread(node: Any) -> None:
        if str(node.attr_key) == "thread_extent":
            analyzer.bind(node.node.var, Range.from_min_extent(0, node.value), allow_override=True)

    def let(node: Any) -> None:
        analyzer.bind(node.var, node.value)

    structural_walk(body, [(tirx.For, loop), (tirx.AttrStmt, thread), (tirx.Bind, let)])
    return analyzer


def repaired_inline(sch: Any, blocks: list[Any]) -> list[Any]:
    """dlight's ``try_inline``, which inlines as many blocks as it can and returns the rest; but no epilogue of a
    reduction goes into the reduction.
    """

    def inlined(inline: Callable[[Any], None], *, into_producers: bool) -> bool:
        for place, block in enumerate(blocks):
            if into_producers and any(
                _reduces(sch, producer) for producer in sch.get_producers(block.block_rv)
            ):
                continue
            try:
                inline(block.block_rv)
            except Exception:  # a schedule refuses with errors of its own; the next block is tried
                continue
            blocks.pop(place)
            return True
        return False

    while inlined(sch.compute_inline, into_producers=False) or inlined(
        sch.reverse_compute_inline, into_producers=True
    ):
        pass
    return blocks


def _reduces(sch: Any, block: Any) -> bool:
    """Whether a block sums up; one whose axes of reduction have a single element has lost them by now."""
    return sch.get(block).init is not None


def sums_in_groups(func: Any) -> bool:
    """Whether a block of a PrimFunc sums over parts of an axis that depend on a result's place, as grouped convolutions
    do: ``x[n, o // per_group * size + i]``.

    dlight's ``Reduction`` gives the sums of such a block to other threads than those that then read them from their
    registers, so what an epilogue computes of them is garbage.
    """
    from tvm import s_tir, tirx
    from tvm_ffi import structural_walk

    found = False

    def block(node: Any) -> None:
        nonlocal found
        kept = [axis.var for axis in node.iter_vars if int(axis.iter_type) == 0]
        summed = [axis.var for axis in node.iter_vars if int(axis.iter_type) == 2]

        def index(value: Any) -> bool:
            parts: list[Any] = []
            structural_walk(value, (tirx.FloorDiv, parts.append))
            return _uses(value, summed) and any(_uses(part, kept) for part in parts)

        for region in node.reads:
            found = found or any(index(axis.min) for axis in region.region)

    structural_walk(func.body, (s_tir.SBlock, block))
    return found


def _uses(value: Any, variables: list[Any]) -> bool:
    from tvm import tirx
    from tvm_ffi import structural_walk

    found: list[Any] = []
    structural_walk(value, (tirx.Var, found.append))
    return any(one.same_as(var) for one in found for var in variables)


@contextmanager
def _texture_flatten_repaired() -> Iterator[None]:
    """While the stock pipeline lists its passes, TextureFlatten is followed by the repair."""
    import tvm

    module = tvm.s_tir.backend.adreno.transform
    stock = module.TextureFlatten

    def both() -> Any:
        return tvm.ir.transform.Sequential([stock(), repaired_texture_store()])

    module.TextureFlatten = both
    try:
        yield
    finally:
        module.TextureFlatten = stock


def adreno_tir_pipeline() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """TVM's Adreno TIR pipeline with the texture store repaired, in the form that ``tvm.tirx.build`` unpacks."""
    import tvm
    from tvm.s_tir.backend.adreno.pipeline import default_tir_pipeline
    from tvm.tirx import compilation_pipeline

    stock = default_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0, name="AdrenoTIRPipeline")  # type: ignore[untyped-decorator]
    def pipeline(mod: Any, ctx: Any) -> Any:
        with _texture_flatten_repaired():
            return stock(mod)

    def device() -> Any:
        stock_device = compilation_pipeline.finalize_device_passes()
        return tvm.ir.transform.Sequential([stock_device, repaired_guarded_loads(), repaired_vector_select()])

    return pipeline, compilation_pipeline.finalize_host_passes, device


def finalize_passes(target: Any) -> list[Any]:
    """Stock's last passes without StaticPlanBlockMemory.

    That pass gives both branches of an If one storage, which only the first allocates: TVM's VM crashes in the other.
    """
    from tvm import relax

    return [
        one
        for one in relax.backend.adreno.finalize_passes(target)
        if "StaticPlanBlockMemory" not in str(one.info.name)
    ]


def _has_textures(mod: Any) -> bool:
    for func in mod.functions.values():
        target = func.attrs.get("target", None) if func.attrs else None
        if target is not None and "texture" in [str(key) for key in target.keys]:
            return True
    return False


@lru_cache(maxsize=1)
def prepare() -> None:
    """Check the versions and register the repaired pipelines with TVM, once.

    Afterwards ``relax.build(mod, "qcom/adreno-opencl-texture", ...)`` lowers textures whichever way the TIR pipeline
    is named. Raises :class:`VersionError`.
    """
    check_versions()
    import tvm

    compilation_pipeline = importlib.import_module("tvm.tirx.compilation_pipeline")
    importlib.import_module("tvm.s_tir.backend.adreno.pipeline")
    for name in ("base.common_schedules", "base", "gpu.fallback"):
        module: Any = importlib.import_module(f"tvm.s_tir.dlight.{name}")
        module.try_inline = repaired_inline
    compilation_pipeline.PIPELINE_MAP["adreno"] = adreno_tir_pipeline
    stock_factory = compilation_pipeline.PIPELINE_MAP["s_tir"]

    def by_target(**kwargs: Any) -> tuple[Any, Any, Any]:
        stock, host, device = stock_factory(**kwargs)
        adreno = adreno_tir_pipeline()[0]

        @tvm.transform.module_pass(opt_level=0, name="TIRPipelineByTarget")  # type: ignore[untyped-decorator]
        def pipeline(mod: Any, ctx: Any) -> Any:
            return (adreno if _has_textures(mod) else stock)(mod)

        return pipeline, host, device

    compilation_pipeline.PIPELINE_MAP["s_tir"] = by_target
