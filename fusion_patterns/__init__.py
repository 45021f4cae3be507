"""Fusion patterns as data for Apache TVM Relax, with a memory scope for every input.

    from fusion_patterns import apply_patterns, compile_module, verify

    fused = apply_patterns(mod)                      # composites by the built-in table
    fused = apply_patterns(mod, "my_table.yaml")     # or by one's own
    exe = compile_module(mod, "qcom/adreno-opencl-texture")
    exe.run([x])

Names are imported when they are first used: :mod:`fusion_patterns.run` replays a saved module where TVM is
not installed, and a wrong TVM is refused with a sentence instead of a crash.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiled import CompiledModule
    from .compiler import ApplyPatterns, apply_patterns, compile_module, pipeline, plan_fusion
    from .dispatch import KernelCall, register_kernel
    from .explanation import Explanation, explain
    from .frontends import load_model
    from .match import FusionPlan
    from .passes import DispatchConv2d, PlaceScopes
    from .table import Table, load_table
    from .verification import VerifyReport, verify

__version__ = "0.1.0"

_HOME = {
    "ApplyPatterns": "compiler",
    "CompiledModule": "compiled",
    "DispatchConv2d": "passes",
    "Explanation": "explanation",
    "FusionPlan": "match",
    "KernelCall": "dispatch",
    "PlaceScopes": "passes",
    "Table": "table",
    "VerifyReport": "verification",
    "apply_patterns": "compiler",
    "compile_module": "compiler",
    "explain": "explanation",
    "load_model": "frontends",
    "load_table": "table",
    "pipeline": "compiler",
    "plan_fusion": "compiler",
    "register_kernel": "dispatch",
    "verify": "verification",
}

__all__ = [  # noqa: RUF022 - grouped as they are used
    "load_model",
    "load_table",
    "apply_patterns",
    "plan_fusion",
    "explain",
    "compile_module",
    "verify",
    "ApplyPatterns",
    "PlaceScopes",
    "DispatchConv2d",
    "register_kernel",
    "pipeline",
    "CompiledModule",
    "Explanation",
    "FusionPlan",
    "KernelCall",
    "Table",
    "VerifyReport",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] not in ("table",):
        from .tvm_compat import check_versions

        check_versions()
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
