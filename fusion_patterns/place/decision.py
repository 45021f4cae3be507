"""What placement decides, as data: each tensor's form, what else it could be, and who asked for what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .balance import Balance
from .layouts import DATA, PLAIN, layout
from .needs import Needs
from .profiles import GENERIC, Profile, load_profile

__all__ = [
    "ANY",
    "BY_CUT",
    "GLOBAL",
    "INDEPENDENT",
    "PLAIN_FORM",
    "SCOPES_ATTR",
    "TEXTURE",
    "Alternative",
    "Conversion",
    "Form",
    "Placement",
    "TensorDecision",
    "Wish",
    "bindings_of",
    "byte_count",
    "composites_of",
    "source_shape",
]

SCOPES_ATTR = "fusion_patterns.scopes"
GLOBAL, TEXTURE, ANY = "global", "texture", "any"
INDEPENDENT = "independent"
BY_CUT = "minimum cut"


@dataclass(frozen=True)
class Form:
    """How a tensor is held: layout name and memory scope."""

    layout: str
    scope: str

    @property
    def is_plain(self) -> bool:
        """Whether this is the form in which the module came."""
        return self.layout == PLAIN and self.scope == GLOBAL

    def __str__(self) -> str:
        return f"{self.layout} in {self.scope}"


PLAIN_FORM = Form(PLAIN, GLOBAL)


@dataclass(frozen=True)
class Wish:
    """What one reader asks for: the composite, its operand's name and layout, and the scope of its row.

    ``times``: how often the reader's kernel asks for each element.
    """

    reader: str
    operand: str
    layout: str
    scope: str
    times: float


@dataclass(frozen=True)
class Alternative:
    """A form that a tensor could have, and what it costs in all: written, converted, copied and read.

    ``cost``: weighted bytes (see ``profiles``); ``None`` where the form is not possible, and ``why`` says
    why.
    """

    layout: str
    scope: str
    cost: int | None
    why: str = ""


@dataclass(frozen=True)
class Conversion:
    """Another form of a tensor, made once where the tensor is defined.

    ``kind``: ``pack``, ``unpack``, ``copy`` (another scope, same layout), ``constant`` (made by the
    compiler, so it costs nothing at run time), or ``view`` (the same bytes under another shape, which cost
    nothing either). ``readers``: how many share it.
    """

    kind: str
    form: Form
    bytes: int
    cost: int
    readers: int


@dataclass(frozen=True)
class TensorDecision:
    """What was decided for one tensor, and why.

    ``layout``, ``scope``, ``shape``: the form in which it is written (packed shape). ``writer``: the
    composite that writes it, ``None`` for parameters, constants and results of other operators. ``wishes``:
    what its readers ask for. ``alternatives``: the forms that were weighed against each other.
    ``conversions``: further forms that are made of it. ``by``: ``independent`` if no other tensor's form
    depends on this one (the choice is exact), ``minimum cut`` if it was decided together with others (exact
    as well). ``cost``: weighted bytes that are moved because of this tensor.
    """

    function: str
    value: str
    layout: str
    scope: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    writer: str | None = None
    wishes: tuple[Wish, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    by: str = INDEPENDENT
    cost: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in this form."""
        return byte_count(self.shape, self.dtype)


@dataclass
class Placement:
    """All decisions for a module.

    ``outputs``: form of each composite's result, by the composite's name. ``operands``: form of each operand.
    ``tensors``: one decision for each tensor at a composite's edge, in program order.
    ``refused``: composites that have no packed kernel, with the reason and the culprit.
    ``balances``: by function, what is packed and what would change if it were not.
    """

    profile: Profile = field(default_factory=lambda: load_profile(GENERIC))
    needs: dict[str, Needs] = field(default_factory=dict)
    outputs: dict[str, Form] = field(default_factory=dict)
    operands: dict[str, tuple[Form, ...]] = field(default_factory=dict)
    tensors: list[TensorDecision] = field(default_factory=list)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    balances: dict[str, Balance] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Weighted bytes of all tensors in the forms that were chosen."""
        return sum(tensor.cost for tensor in self.tensors)

    def explained(self, tensor: TensorDecision) -> TensorDecision:
        """The decision with what the other side of the cut would have cost; computed only when asked for."""
        balance = self.balances.get(tensor.function)
        if tensor.writer is None or balance is None or tensor.writer not in balance.free:
            return tensor
        excess = balance.excess(tensor.writer)
        why = f"{excess} more for the whole function, by minimum cut"
        other = (
            Alternative(DATA, TEXTURE, excess, why)
            if tensor.layout == PLAIN
            else Alternative(PLAIN, GLOBAL, tensor.cost + excess, why)
        )
        return replace(tensor, alternatives=(*tensor.alternatives, other))


def byte_count(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor."""
    return prod(shape) * np.dtype(dtype).itemsize


def source_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a layout packs: a channel vector is seen as (C,), whatever its ones."""
    return (prod(shape),) if len(layout(name).axes) == 1 else shape


def composites_of(mod: tvm.IRModule) -> dict[str, Any]:
    """The composites that ``outline`` made, by name, in the order of their names in the module."""
    return {
        gv.name_hint: func
        for gv, func in mod.functions_items()
        if isinstance(func, relax.Function) and func.attrs and SCOPES_ATTR in func.attrs
    }


def bindings_of(body: Any) -> Iterator[Any]:
    """All bindings of a function's body in program order, those in branches included."""
    for block in body.blocks:
        for binding in block.bindings:
            yield binding
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.If):
                yield from bindings_of(binding.value.true_branch)
                yield from bindings_of(binding.value.false_branch)
