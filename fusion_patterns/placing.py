"""Placement of a whole plan: composites that can't be packed, or cost less in buffers, are taken out of it.

This is the compiler's way without kernels; explanations and passes of their own go it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import tvm

from .match import FusionPlan
from .outline import outline
from .place import Placement, Profile, TensorDecision, decide

__all__ = ["Refusal", "Settled", "settle"]


@dataclass(frozen=True)
class Refusal:
    """A match that is not packed: its row, where the row is written, the IR value, and why."""

    row: str
    where: str
    value: str
    reason: str


@dataclass
class Settled:
    """A plan of which every composite is placed.

    ``plan``, ``outlined``: what is left, and the module with its composites. ``placement``: its decisions.
    ``refused``: what was taken out. ``left``: the decisions for tensors of composites that cost less in
    buffers.
    """

    plan: FusionPlan
    outlined: tvm.IRModule
    placement: Placement
    refused: list[Refusal] = field(default_factory=list)
    left: list[TensorDecision] = field(default_factory=list)


def settle(
    normal: tvm.IRModule,
    plan: FusionPlan,
    target: Any,
    profile: Profile | None = None,
    *,
    packed_only: Collection[str] | None = (),
) -> Settled:
    """Place a plan for a normalised module, without composites that must or should stay as they came.

    ``packed_only``: see :func:`.place.decide`.
    """
    refused: list[Refusal] = []
    left: list[TensorDecision] = []
    while True:
        outlined = outline(normal, plan)
        placement = decide(outlined, target, profile, packed_only=packed_only)
        if not placement.refused:
            return Settled(plan, outlined, placement, refused, left)
        for name, (reason, culprit) in sorted(placement.refused.items()):
            match = plan.match_of(name)
            value = culprit or str(match.outputs[0].name)
            refused.append(Refusal(match.row.name, str(match.row.origin), value, reason))
        out = [tensor for tensor in placement.tensors if tensor.writer in placement.refused]
        left += [placement.explained(tensor) for tensor in out]
        plan = plan.instead({name: culprit for name, (_, culprit) in placement.refused.items()})
