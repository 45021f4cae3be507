"""The whole way: a Relax module in, composites, texture kernels and a manifest out.

    normalise -> match and select -> outline -> place -> legalize, fuse -> schedule, lower -> manifest

A composite whose packed kernel can't be placed, scheduled or lowered is taken out of the plan with the reason, and
the way is walked again without it: such an op costs speed, it never breaks the build.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import relax

from . import tvm_compat
from .compiled import Array, CompiledModule
from .dispatch import bind_kernels, check_kernels, registered_kernels
from .errors import BuildError, FusionPatternsError
from .lower.build import build_manifest
from .lower.kernels import first_line
from .lower.stages import Lowered, fuse, lower, with_schedules
from .match import FusionPlan
from .match import plan_fusion as match_plan
from .normalise import normalise
from .outline import outline
from .place import Placement, decide, place
from .place.profiles import Profile, load_profile, profile_for
from .report.summary import Declined, Report, summarise
from .table import Table, load_table
from .vm import run_on_vm

__all__ = [
    "ApplyPatterns",
    "apply_patterns",
    "as_target",
    "compile_kernels",
    "compile_module",
    "pipeline",
    "plan_fusion",
]

TableLike = Table | str | os.PathLike[str] | None
ProfileLike = Profile | str | os.PathLike[str] | None
DEFAULT_TARGET = "qcom/adreno-opencl-texture"
Progress = Callable[[str], None]


def as_target(target: Any = None) -> Any:
    """A ``tvm.target.Target`` with a host.

    ``None`` is the current target, or ``qcom/adreno-opencl-texture``. Raises :class:`BuildError` for a target that TVM
    does not know.
    """
    if target is None:
        target = tvm.target.Target.current(allow_none=True) or DEFAULT_TARGET
    try:
        target = tvm.target.Target(target)
        return target if target.host is not None else tvm.target.Target(target, host={"kind": "llvm"})
    except Exception as error:  # TVM raises several kinds for a bad target
        raise BuildError(f"target {target!r}: {first_line(error)}; try {DEFAULT_TARGET}") from None


def plan_fusion(mod: tvm.IRModule, table: TableLike = None, *, target: Any = None) -> FusionPlan:
    """What :func:`apply_patterns` would do, as data: matches, and for each row and anchor the outcome and reason.

    The module is normalised first; the plan belongs to ``normalise(mod)``. ``table`` is a path, the name of a built-in
    table, a :class:`Table`, or ``None`` for the built-in table of ``target``.
    """
    del target  # one built-in table so far; its rows fit every OpenCL target
    tvm_compat.check_versions()
    return match_plan(normalise(mod), load_table(table))


def apply_patterns(mod: tvm.IRModule, table: TableLike = None, *, target: Any = None) -> tvm.IRModule:
    """Fuse a module by a table: the result has a private composite function for each match.

    Every composite carries its row, where the row was written, the kernel, and the memory scope that each input and
    the output ask for (attributes ``fusion_patterns.*``). ``mod`` itself is not changed.
    Raises :class:`TableError` for a table that is not valid.
    """
    del target
    tvm_compat.check_versions()
    table = load_table(table)
    mod = normalise(mod)
    return outline(mod, match_plan(mod, table))


def ApplyPatterns(table: TableLike = None) -> Any:
    """:func:`apply_patterns` as a ``tvm.transform.Pass``."""
    loaded = load_table(table)

    @tvm.transform.module_pass(opt_level=0, name="fusion_patterns.ApplyPatterns")  # type: ignore[untyped-decorator]
    def run(mod: tvm.IRModule, ctx: Any) -> tvm.IRModule:
        return apply_patterns(mod, loaded)

    return run


def pipeline(table: TableLike = None, *, profile: ProfileLike = None) -> Any:
    """A Relax pipeline for ``relax.build(mod, target, relax_pipeline=pipeline(table))``.

    Fuses, places, schedules, and lowers to what TVM's VM runs. The target is the current one or the one that
    ``relax.build`` is given. TVM prints the OpenCL C, so a profile's ``aligned`` says nothing here.
    """
    loaded = load_table(table)
    tvm_compat.prepare()

    @tvm.transform.module_pass(opt_level=0, name="fusion_patterns.pipeline")  # type: ignore[untyped-decorator]
    def run(mod: tvm.IRModule, ctx: Any) -> tvm.IRModule:
        target = as_target(tvm.target.Target.current(allow_none=True))
        work = _Compilation(mod, loaded, target, None, profile).kernels()
        fused = with_schedules(work.fused, work.lowered)
        with target:
            # stock's RewriteDataflowReshape is left out: it makes buffers of textures
            passes = [
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
            ]
            passes += tvm_compat.finalize_passes(target)
            return tvm.transform.Sequential(passes)(fused)

    return run


def compile_module(
    mod: tvm.IRModule,
    target: Any = None,
    table: TableLike = None,
    *,
    profile: ProfileLike = None,
    name: str = "module",
    progress: Progress | None = None,
) -> CompiledModule:
    """Compile a module to OpenCL C with textures, and to a manifest that runs it.

    ``profile``: how the device likes its work cut and what moving bytes costs there: the name of a shipped profile
    (``adreno``, ``nvidia-opencl``, ``pocl``) or a YAML file; by default the target's. ``progress`` is called with
    the name of each stage as it begins. Raises :class:`BuildError` with the IR value and
    the reason if the module can't be run from a manifest, :class:`TableError`, :class:`VersionError`.
    """
    tvm_compat.prepare()
    work = _Compilation(mod, load_table(table), as_target(target), progress, profile)
    work.kernels()
    return work.finish(name)


def compile_kernels(
    mod: tvm.IRModule,
    target: Any = None,
    table: TableLike = None,
    *,
    profile: ProfileLike = None,
    progress: Progress | None = None,
) -> tuple[tvm.IRModule, Lowered]:
    """The way up to the kernels: the fused module, whose PrimFuncs are not scheduled yet, and its kernels by PrimFunc.

    Parameters and errors as of :func:`compile_module`.
    """
    tvm_compat.prepare()
    work = _Compilation(mod, load_table(table), as_target(target), progress, profile).kernels()
    return work.fused, work.lowered


class _Compilation:
    """One module on its way, with the time that each stage took."""

    def __init__(
        self,
        mod: tvm.IRModule,
        table: Table,
        target: Any,
        progress: Progress | None,
        profile: ProfileLike = None,
    ) -> None:
        check_kernels(table)
        self.original, self.table, self.target, self.progress = mod, table, target, progress
        if isinstance(profile, Profile):
            self.profile = profile
        else:
            self.profile = profile_for(target) if profile is None else load_profile(profile)
        self.seconds: dict[str, float] = {}
        self.declined: list[Declined] = []
        self.cache: dict[Any, Any] = {}
        self.normal: tvm.IRModule
        self.plan: FusionPlan
        self.first_plan: FusionPlan
        self.outlined: tvm.IRModule
        self.placement: Placement
        self.fused: tvm.IRModule
        self.lowered: Lowered

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def kernels(self) -> _Compilation:
        """Walk the way to lowered kernels, as often as a composite has to be taken out."""
        with self.stage("normalise"):
            self.normal = normalise(self.original)
        with self.stage("match"):
            self.plan = self.first_plan = match_plan(self.normal, self.table)
        while True:
            refused = self._attempt()
            if not refused:
                return self
            self._refuse(refused)

    def _attempt(self) -> dict[str, tuple[str, str]]:
        """One walk from plan to kernels; returns the composites that must go, with reason and culprit."""
        with self.stage("outline"):
            self.outlined = outline(self.normal, self.plan)
        with self.stage("place"):
            self.placement = decide(
                self.outlined, self.target, self.profile, packed_only=registered_kernels()
            )
            if self.placement.refused:
                return self.placement.refused
            placed, self.placement = place(self.outlined, self.target, self.placement)
            placed = bind_kernels(placed, self.target)
        with self.stage("legalize and fuse"), self.target:
            self.fused = _stock("legalize and fuse", lambda: fuse(placed))
        with self.stage("schedule and lower"):
            tiles, tuned = self.profile.tiles, self.profile.tuned
            self.lowered = lower(self.fused, self.target, self.cache, tiles=tiles, tuned=tuned)
        ours = {name: reason for name, reason in self.lowered.faults.items() if name in self.placement.needs}
        if ours:
            return {name: (reason, name) for name, reason in ours.items()}
        if self.lowered.faults:
            name, reason = next(iter(self.lowered.faults.items()))
            raise BuildError(
                f"kernel `{name}` can't be built for {self.target.kind.name}: {reason}; no row took part in it, "
                "stock TVM made it from ops that it can't schedule"
            )
        return {}

    def _refuse(self, refused: dict[str, tuple[str, str]]) -> None:
        for name, (reason, culprit) in sorted(refused.items()):
            match = self.plan.match_of(name)
            self.declined.append(
                Declined(match.row.name, culprit or match.outputs[0].name, reason, str(match.row.origin))
            )
        self.plan = self.plan.instead({name: culprit for name, (_, culprit) in refused.items()})

    def left_aside(self) -> dict[str, str]:
        """The kernels whose measured tile was not used, with the reason, by row and name."""
        reasons = self.lowered.tuned.items()
        return {f"{self.lowered.labels[name]} {name}": reason for name, reason in reasons if reason}

    def finish(self, name: str) -> CompiledModule:
        with self.stage("manifest"):
            manifest = build_manifest(
                self.fused,
                self.lowered.funcs,
                self.lowered.labels,
                name=name,
                target=str(self.target.kind.name),
            )
        report: Report = summarise(
            self.plan, self.first_plan, self.normal, manifest, self.declined, self.seconds
        )
        report.tuned = len(self.lowered.tuned)
        report.tuned_left_aside = self.left_aside()
        return CompiledModule(manifest, report, self.original, self.outlined, self.placement, self._on_vm)

    def _on_vm(self, inputs: Mapping[str, Array], function: str) -> list[Array]:
        """Build the same module for TVM's own runtime and run it there."""
        passes = pipeline(self.table, profile=self.profile)
        return run_on_vm(self.original, self.target, passes, inputs, function)


def _stock(stage: str, run: Callable[[], tvm.IRModule]) -> tvm.IRModule:
    """Run a stage that goes through stock TVM; what it raises becomes one line."""
    try:
        return run()
    except FusionPatternsError:
        raise
    except Exception as error:  # TVM raises many kinds
        raise BuildError(
            f"{stage}: stock TVM can't lower an op that no row took: {first_line(error)}"
        ) from None
