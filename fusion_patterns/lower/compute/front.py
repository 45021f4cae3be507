"""An operand that meets the first channels only, ``concat(x[:, :k] + shortcut, x[:, k:])``, as one step.

Taken one by one, the slices and the concat would move lanes between blocks, only to put them back where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from ...place.calls import op_name, static_shape, tensor_args
from ...place.needs import ELEMENTWISE
from .packed import LANES, Packed, blocks

__all__ = ["Front", "fronts_of", "on_front"]

SLICE, CONCAT = "relax.strided_slice", "relax.concat"


@dataclass(frozen=True)
class Front:
    """What is computed of the first ``channels`` of ``value``: ``call``, which takes them as the variable ``front``."""

    value: Any
    front: Any
    call: Any
    channels: int


def fronts_of(bindings: Sequence[Any]) -> tuple[dict[Any, Front], set[Any]]:
    """Such steps by the variable that holds the whole, and the variables between, which nothing else reads."""
    calls = {binding.var: binding.value for binding in bindings}
    reads = [arg for call in calls.values() for arg in getattr(call, "args", ())]
    reads += [field for arg in reads for field in getattr(arg, "fields", ())]
    found: dict[Any, Front] = {}
    between: set[Any] = set()
    for var, call in calls.items():
        parts = tensor_args(call) if op_name(call) == CONCAT else []
        if len(parts) != 2 or op_name(calls.get(parts[0])) not in ELEMENTWISE:
            continue
        step = calls[parts[0]]
        slices = [arg for arg in tensor_args(step) if op_name(calls.get(arg)) == SLICE]
        inner = [*slices, *parts]
        if len(slices) != 1 or any(sum(read.same_as(one) for read in reads) != 1 for one in inner):
            continue
        channels, source = (static_shape(parts[0]) or (0, 0))[1], calls[slices[0]].args[0]
        ends = [_first(calls[slices[0]]), _first(calls.get(parts[1]))]
        same = ends == [0, channels] and static_shape(source) == static_shape(var)
        if same and calls[parts[1]].args[0].same_as(source) and int(call.attrs.axis) in (1, -3):
            found[var] = Front(source, slices[0], step, channels)
            between.update(inner)
    return found, between


def _first(call: Any) -> int | None:
    """The channel with which a slice of consecutive channels begins."""
    if op_name(call) != SLICE or [int(axis) for axis in call.args[1].fields] != [1]:
        return None
    steps = call.args[4].fields if len(call.args) > 4 else ()
    return int(call.args[2].fields[0]) if all(int(step) == 1 for step in steps) else None


def on_front(expression: Callable[..., Any], operands: list[Packed], place: int, channels: int) -> te.Tensor:
    """``expression`` on the first ``channels`` of operand ``place``; its other channels as they are."""
    value = operands[place].tensor

    def compute(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        own = value[b, c, y, x, lane]
        changed = expression(
            *(
                own if number == place else operand.at(b, c, y, x, lane, channels)
                for number, operand in enumerate(operands)
            )
        )
        if channels % LANES:
            changed = tirx.Select(c * LANES + lane < channels, changed, own)
        return tirx.if_then_else(c < blocks(channels), changed, own)

    return te.compute(value.shape, compute, name="on_front")
