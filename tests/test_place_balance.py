"""The minimum cut between texture and buffers, against trying every choice."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusion_patterns.place.balance import LAUNCH_BYTES, Flow, cheaper_in_buffers


def conversions(flows: dict[str, Flow], packed: set[str]) -> int:
    """What the conversions cost if these are packed: a tensor is converted once for all its readers."""
    cost = 0
    for flow in flows.values():
        inside = any(reader in packed for reader in flow.packed_readers)
        outside = flow.plain_reader or any(reader not in packed for reader in flow.packed_readers)
        if (flow.writer in packed and outside) or (flow.writer not in packed and inside):
            cost += 2 * flow.bytes + LAUNCH_BYTES
    return cost


@st.composite
def functions(draw: Any) -> tuple[dict[str, Flow], set[str], set[str]]:
    """A chain of values in program order: a composite reads values that stand before it."""
    count = draw(st.integers(1, 6))
    names = [f"c{number}" for number in range(count)]
    fixed = {name for name in names if draw(st.booleans())}
    flows = {"x": Flow(draw(st.integers(0, 10**6)))}
    for name in names:
        for value in draw(st.lists(st.sampled_from(sorted(flows)), min_size=1, max_size=2, unique=True)):
            flows[value].packed_readers.add(name)
        flows[f"v{name}"] = Flow(draw(st.integers(0, 10**6)), writer=name, plain_reader=draw(st.booleans()))
    return flows, fixed, set(names) - fixed


@given(functions())
def test_no_choice_is_cheaper(drawn: tuple[dict[str, Flow], set[str], set[str]]) -> None:
    flows, fixed, free = drawn
    left = cheaper_in_buffers(flows, fixed, free)
    assert set(left) <= free
    chosen = conversions(flows, fixed | (free - set(left)))
    every = [
        conversions(
            flows, fixed | {name for name, packed in zip(sorted(free), choice, strict=True) if packed}
        )
        for choice in product([False, True], repeat=len(free))
    ]
    assert chosen == min(every)


@given(functions())
def test_the_excess_is_what_packing_it_would_cost_more(
    drawn: tuple[dict[str, Flow], set[str], set[str]],
) -> None:
    flows, fixed, free = drawn
    left = cheaper_in_buffers(flows, fixed, free)
    chosen = conversions(flows, fixed | (free - set(left)))
    for name, excess in left.items():
        others = sorted(free - {name})
        forced = min(
            conversions(
                flows, fixed | {name} | {o for o, packed in zip(others, choice, strict=True) if packed}
            )
            for choice in product([False, True], repeat=len(others))
        )
        assert excess == forced - chosen


def test_nothing_to_choose() -> None:
    assert cheaper_in_buffers({"x": Flow(8, packed_readers={"c"})}, {"c"}, set()) == {}


def test_between_two_convs_it_is_packed_and_between_plain_ops_it_is_not() -> None:
    between = {
        "a": Flow(100, "conv", {"pool"}),
        "b": Flow(100, "pool", {"next"}),
        "c": Flow(100, "next", plain_reader=True),
    }
    assert cheaper_in_buffers(between, {"conv", "next"}, {"pool"}) == {}
    alone = {"a": Flow(100, None, {"pool"}), "b": Flow(100, "pool", plain_reader=True)}
    assert cheaper_in_buffers(alone, set(), {"pool"}) == {"pool": 2 * (200 + LAUNCH_BYTES)}
