"""Faults put in on purpose: each must be caught by the properties that are named for it.

What is listed is what was seen to catch the fault; others may as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tvm import relax

from fusion_patterns import outline
from fusion_patterns.lower import legalize
from fusion_patterns.lower.compute import packed
from fusion_patterns.match import engine, predicates, search
from fusion_patterns.run import Device
from fusion_patterns.table import load_table
from fusion_patterns.testing import Graph, Op, Tensor, properties
from fusion_patterns.testing.draft import seeded
from fusion_patterns.testing.nets import draw_net
from fusion_patterns.testing.rows import draw_instance, draw_near_miss

TABLE = load_table()
ROWS = {row.name: row for row in TABLE.patterns}
Patch = pytest.MonkeyPatch


def drop_the_escape_check(patch: Patch) -> None:
    patch.setattr(search, "escape_of", lambda *given, **named: None)


def swap_operands_of_subtract(patch: Patch) -> None:
    stock = outline._Composite._call

    def swapped(self: Any, call: Any) -> Any:
        new = stock(self, call)
        if getattr(call.op, "name", "") != "relax.subtract":
            return new
        return relax.Call(new.op, list(new.args)[::-1], new.attrs, new.ty_args, new.span, new.ty)

    patch.setattr(outline._Composite, "_call", swapped)


def read_bias_along_another_axis(patch: Patch) -> None:
    stock = packed.Packed.at

    def wrong(self: Any, n: Any, c: Any, y: Any, x: Any, lane: Any, channels: int) -> Any:
        return stock(self, n, 0 * c if self.layout == packed.CHANNEL_VECTOR else c, y, x, lane, channels)

    patch.setattr(packed.Packed, "at", wrong)


def match_bias_along_another_axis(patch: Patch) -> None:
    stock = predicates.layout_of
    patch.setattr(predicates, "layout_of", lambda *given: stock(*given).replace("NCHW", "NHCW"))


def skip_lane_masking(patch: Patch) -> None:
    patch.setattr(legalize._Legalizer, "_masked", lambda self, value: value)


def share_kernels_across_scopes(patch: Patch) -> None:
    patch.setattr(legalize, "_scoped", lambda func, scopes: func)


def accept_without_the_exact_check(patch: Patch) -> None:
    patch.setattr(engine.Engine, "refusal", lambda self, candidate: None)


# What is tried. Each example is a call that passes without the fault.

Example = Callable[[], None]


def nets(name: str) -> Iterator[Example]:
    """A property of modules on the first networks."""
    for number in range(4):
        spec = draw_net(seeded(f"m{number}"), TABLE)
        yield lambda spec=spec: properties.OF_MODULES[name](spec, TABLE)  # type: ignore[misc]


def numbers() -> Iterator[Example]:
    """Equivalence on the CPU of a graph with a difference in it."""
    ops = (Op("c", "nn.conv2d", ("x", "w")), Op("t", "tanh", ("c",)), Op("s", "subtract", ("t", "b")))
    spec = Graph("main", (X, tensor("w", 8, 8, 1, 1), tensor("b", 1, 8, 1, 1)), ops, ("s",))
    yield lambda: properties.computes_the_same(spec, TABLE)


def self_match(row: str) -> Iterator[Example]:
    for number in range(4):
        instance = draw_instance(seeded(number), ROWS[row], TABLE)
        yield lambda instance=instance: properties.takes(instance, ROWS[row], TABLE)  # type: ignore[misc]


def reason(row: str, kind: str) -> Iterator[Example]:
    for number in range(4):
        miss = draw_near_miss(seeded(number), ROWS[row], TABLE, kind)
        yield lambda miss=miss: properties.declines(miss, ROWS[row], TABLE)  # type: ignore[misc]


X = Tensor("x", (1, 8, 6, 6))


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, constant=True)


def odd_channels() -> Graph:
    """Six channels, divided by a vector: what stands in the lanes beyond the sixth is 0 / 0."""
    ops = (
        Op("c", "nn.conv2d", ("x", "w")),
        Op("t", "tanh", ("c",)),
        Op("q", "divide", ("t", "d")),
        Op("e", "nn.conv2d", ("q", "u")),
    )
    tensors = (X, tensor("w", 6, 8, 3, 3), tensor("d", 1, 6, 1, 1), tensor("u", 8, 6, 3, 3))
    return Graph("main", tensors, ops, ("e",))


def vector() -> Graph:
    """A bias of rank three, which is read as a vector along the channels."""
    ops = (Op("c", "nn.conv2d", ("x", "w")), Op("b", "maximum", ("c", "v")))
    return Graph("main", (X, tensor("w", 8, 8, 3, 3), tensor("v", 8, 1, 1)), ops, ("b",))


def on_device(spec: Graph) -> Iterator[Example]:
    yield lambda: properties.runs_the_same(spec, TABLE)


HOST = [
    (drop_the_escape_check, "no leak, no cycle", lambda: nets("no leak, no cycle")),
    (drop_the_escape_check, "well-formed", lambda: nets("well-formed")),
    (drop_the_escape_check, "reason", lambda: reason("conv2d.chain", "returned")),
    (swap_operands_of_subtract, "equivalence on the CPU", numbers),
    (match_bias_along_another_axis, "self-match", lambda: self_match("conv2d.depthwise.prologue")),
    (share_kernels_across_scopes, "scope agreement", lambda: nets("scope agreement")),
    (accept_without_the_exact_check, "exact check", lambda: nets("exact check")),
]
DEVICE = [
    (read_bias_along_another_axis, vector),
    (skip_lane_masking, odd_channels),
]


def is_caught(examples: Iterator[Example]) -> bool:
    """Whether one of the examples fails."""
    for example in examples:
        try:
            example()
        except properties.Vacuous:
            continue
        except Exception:  # an ill-formed module fails wherever it is used next
            return True
    return False


@pytest.mark.parametrize(("fault", "name", "examples"), HOST)
def test_a_fault_is_caught(
    fault: Callable[[Patch], None], name: str, examples: Callable[[], Iterator[Example]], monkeypatch: Patch
) -> None:
    assert not is_caught(examples()), f"{name} fails without the fault"
    fault(monkeypatch)
    assert is_caught(examples())


@pytest.mark.opencl
@pytest.mark.parametrize(("fault", "spec"), DEVICE)
def test_a_fault_is_caught_on_a_device(
    opencl_device: Device,
    fault: Callable[[Patch], None],
    spec: Callable[[], Graph],
    monkeypatch: Patch,
) -> None:
    properties.runs_the_same(spec(), TABLE)
    fault(monkeypatch)
    assert is_caught(on_device(spec()))
