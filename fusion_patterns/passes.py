"""Passes that do one step of the way on a plain module: place its tensors, or bind its convolutions to a
kernel."""

from __future__ import annotations

from importlib import resources
from typing import Any

import tvm
import tvm_ffi

from . import tvm_compat
from .compiler import TableLike, as_target
from .dispatch import KernelBuilder, build_kernel, kernel_builder, lowered_conversions, replace_composites
from .errors import BuildError
from .match import plan_fusion as match_plan
from .normalise import normalise
from .place import place
from .place.decide import has_convolution
from .place.decision import composites_of
from .place.profiles import ProfileLike, as_profile
from .placing import settle
from .table import Table, load_table

__all__ = ["DispatchConv2d", "PlaceScopes"]

tvm_ffi.register_error("BuildError", BuildError)  # else it leaves a pass as a RuntimeError


def PlaceScopes(target: Any = None, profile: ProfileLike = None) -> Any:
    """A pass that places the tensors of a plain module, operator by operator, without fusing anything.

    Every operator that has a packed kernel becomes a composite of its own where that pays; tensors between
    them stay packed, in the scope that costs least, and carry it as ``VDevice`` in their types. Parameters
    and results stay as they are, so conversions stand at the edges. ``target`` is a TVM target or its name,
    by default the current one; ``profile`` replaces the device profile that belongs to it. The given module
    is not changed.
    """
    table = _single_ops()
    tvm_compat.check_versions()

    @tvm.transform.module_pass(opt_level=0, name="fusion_patterns.PlaceScopes")  # type: ignore[untyped-decorator]
    def run(mod: tvm.IRModule, ctx: Any) -> tvm.IRModule:
        device = as_target(target)
        normal = normalise(mod)
        settled = settle(normal, match_plan(normal, table), device, as_profile(profile, device))
        return place(settled.outlined, device, settled.placement)[0]

    return run


def DispatchConv2d(kernel: str | KernelBuilder, table: TableLike = None, target: Any = None) -> Any:
    """A pass that binds every convolution, with its epilogue, to a kernel of one's own; the rest stays as
    it is.

    ``kernel``: a registered name, or a function from :class:`KernelCall` to a scheduled PrimFunc;
    convolutions for which it returns ``None`` stay plain. ``table`` says how far an epilogue goes,
    ``target`` which scopes there are. The result calls PrimFuncs that are marked as scheduled and opaque,
    and our own for the layout conversions around them; it can be compiled by :func:`compile_module` or any
    other pipeline. The given module is not changed. Raises :class:`FusionPatternsError` for an unknown
    name; :class:`BuildError`, when it runs, if a PrimFunc does not fit its call.
    """
    build, loaded = kernel_builder(kernel), load_table(table)
    tvm_compat.check_versions()

    @tvm.transform.module_pass(opt_level=0, name="fusion_patterns.DispatchConv2d")  # type: ignore[untyped-decorator]
    def run(mod: tvm.IRModule, ctx: Any) -> tvm.IRModule:
        device, normal = as_target(target), normalise(mod)
        plan = match_plan(normal, loaded)
        while True:
            settled = settle(normal, plan, device, packed_only=None)
            placed = place(settled.outlined, device, settled.placement)[0]
            # composites that are equal have become one
            ours = composites_of(settled.outlined).keys() & composites_of(placed).keys()
            bound = {name: _kernel(build, name, placed, device) for name in sorted(ours)}
            others = [name for name, func in bound.items() if func is None]
            if not others:
                return lowered_conversions(replace_composites(placed, bound)) if bound else mod
            # a tensor's scope depends on who reads it, so it is placed again without them
            plan = settled.plan.without(others)

    return run


def _kernel(build: KernelBuilder, name: str, placed: tvm.IRModule, target: Any) -> Any:
    """The kernel for a composite, or ``None``: it has no convolution, or the builder does not want it."""
    func = placed[name]
    return build_kernel(build, name, func, target) if has_convolution(func) else None


def _single_ops() -> Table:
    """The table in which every operator that has a packed kernel is a row."""
    with resources.as_file(resources.files("fusion_patterns.place").joinpath("single_ops.yaml")) as path:
        return load_table(path)
