"""Why every tensor lives where it lives: :func:`explain` and what it returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import tvm

from . import tvm_compat
from .compiler import TableLike, as_target
from .dispatch import registered_kernels
from .errors import FusionPatternsError
from .match import plan_fusion as match_plan
from .normalise import normalise
from .place import Placement, TensorDecision
from .place.profiles import ProfileLike, as_profile
from .placing import Refusal, settle
from .report.text import human_bytes
from .table import load_table
from .table.faults import did_you_mean

__all__ = ["Explanation", "explain"]


def explain(
    mod: tvm.IRModule, table: TableLike = None, target: Any = None, *, profile: ProfileLike = None
) -> Explanation:
    """What is decided for each tensor at a composite's edge, what else was possible at which cost, and who
    asked.

    ``table``: as for :func:`apply_patterns`. ``target``: a TVM target or its name. ``profile``: the device
    profile by which costs are weighted; left out, the one that belongs to the target. No kernel is made: a
    composite that :func:`compile_module` later takes out because it can't be scheduled is explained as if
    it stayed. Raises :class:`TableError`, :class:`BuildError`.
    """
    tvm_compat.check_versions()
    device, normal = as_target(target), normalise(mod)
    settled = settle(
        normal,
        match_plan(normal, load_table(table)),
        device,
        as_profile(profile, device),
        packed_only=registered_kernels(),
    )
    return Explanation(settled.placement, tuple(settled.refused), tuple(settled.left))


@dataclass(frozen=True)
class Explanation:
    """The decisions for one module; ``str()`` of it is the whole story, ``tensor(name)`` one tensor's.

    ``placement``: the decisions as they were made. ``refused``: matches that are not packed, and why.
    ``left``: tensors of composites that cost less in buffers.
    """

    placement: Placement
    refused: tuple[Refusal, ...] = ()
    left: tuple[TensorDecision, ...] = field(default=())

    @cached_property
    def tensors(self) -> tuple[TensorDecision, ...]:
        """Every decision, with the other side of the minimum cut among its alternatives."""
        return (*(self.placement.explained(tensor) for tensor in self.placement.tensors), *self.left)

    def tensor(self, name: str) -> TensorDecision:
        """The decision for the tensor of this name, or ``function.name`` where several functions have one.

        A constant is called after the first operand that it is: ``composite.operand``.
        Raises :class:`FusionPatternsError` for an unknown name.
        """
        every = (*self.placement.tensors, *self.left)
        found = [t for t in every if name in (t.value, f"{t.function}.{t.value}")]
        if not found:
            hint = did_you_mean(name, (tensor.value for tensor in every))
            raise FusionPatternsError(f"no tensor at a composite's edge is called {name!r}{hint}")
        if len(found) > 1:
            names = ", ".join(f"{tensor.function}.{tensor.value}" for tensor in found)
            raise FusionPatternsError(f"{name!r} is the name of several tensors: {names}")
        return self.placement.explained(found[0])

    @property
    def cost(self) -> int:
        """Weighted bytes that all these tensors cause to be moved."""
        return self.placement.cost

    def count(self, *kinds: str) -> int:
        """How many conversions of these kinds are made at run time: ``pack``, ``unpack``, ``copy``."""
        return sum(c.kind in kinds for tensor in self.placement.tensors for c in tensor.conversions)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        return {
            "profile": self.placement.profile.model_dump(mode="json"),
            "cost": self.cost,
            "conversions": self.count("pack", "unpack"),
            "copies": self.count("copy"),
            "tensors": [_data(tensor) for tensor in self.tensors],
            "refused": [asdict(refusal) for refusal in self.refused],
        }

    def tell(self, name: str | None = None) -> tuple[str, dict[str, Any]]:
        """One tensor's story, or the whole one, as text and as plain data."""
        if name is None:
            return str(self), self.to_dict()
        tensor = self.tensor(name)
        return render_tensor(tensor), _data(tensor)

    def __str__(self) -> str:
        parts = [self.summary(), *(render_tensor(tensor) for tensor in self.tensors)]
        if self.refused:
            said = [f"  {r.row} at `{r.value}`: {r.reason} [{r.where}]" for r in self.refused]
            parts.append("\n".join(["not packed", *said]))
        return "\n\n".join(parts)

    def summary(self) -> str:
        """The figures of the whole module, in four lines."""
        written = [tensor for tensor in self.placement.tensors if tensor.writer]
        texture = [tensor for tensor in written if "texture" in tensor.scope]
        buffers = [tensor for tensor in written if "texture" not in tensor.scope]
        sizes = [human_bytes(sum(tensor.bytes for tensor in part)) for part in (texture, buffers)]
        return "\n".join(
            [
                f"in texture   {len(texture)} tensors that composites write, {sizes[0]}",
                f"in buffers   {len(buffers)}, {sizes[1]}",
                f"conversions  {self.count('pack', 'unpack')} of layout, {self.count('copy')} between scopes",
                f"cost         {human_bytes(self.cost)} moved (profile `{self.placement.profile.name}`)",
            ]
        )


def _data(tensor: TensorDecision) -> dict[str, Any]:
    return {**asdict(tensor), "bytes": tensor.bytes}


def render_tensor(tensor: TensorDecision) -> str:
    """One decision in a few lines."""
    who = f"written by {tensor.writer}" if tensor.writer else "written by no composite"
    shape = "x".join(map(str, tensor.shape)) or "a single"
    lines = [
        f"{tensor.function}.{tensor.value}  {shape} {tensor.dtype}, {human_bytes(tensor.bytes)}, {who}",
        f"  decision      {tensor.layout} in {tensor.scope} ({tensor.by}): {tensor.reason}",
    ]
    label = "alternatives"
    for other in tensor.alternatives:
        price = "not possible" if other.cost is None else f"costs {human_bytes(other.cost)}"
        why = f": {other.why}" if other.why else ""
        lines.append(f"  {label:<12}  {other.layout} in {other.scope} {price}{why}")
        label = ""
    label = "readers ask"
    for wish in tensor.wishes:
        again = f", each element {wish.times:,.0f} times" if wish.times >= 2 else ""
        lines.append(f"  {label:<12}  {wish.reader}.{wish.operand}: {wish.layout} in {wish.scope}{again}")
        label = ""
    label = "made of it"
    for conversion in tensor.conversions:
        shared = f", shared by {conversion.readers}" if conversion.readers > 1 else ""
        price = f"costs {human_bytes(conversion.cost)}"
        lines.append(f"  {label:<12}  {conversion.kind} to {conversion.form}, {price}{shared}")
        label = ""
    return "\n".join(lines)
