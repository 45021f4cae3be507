"""Which composites are worth packing: a minimum cut between texture and buffers.

A convolution is always packed: its kernel pays for any conversion. A pool, a concat, an elementwise chain
reads and writes each element about once, so a conversion on either side costs as much as the kernel. For
those the cheapest choice for the whole function is a minimum cut: packed composites on the source's side,
everything that is plain (other ops, parameters, results) on the sink's. A tensor that many readers want in
the other form is converted once, so its cost is one edge, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import networkx as nx

from .profiles import GENERIC, Profile, load_profile

__all__ = ["LAUNCH_BYTES", "Balance", "Flow", "cheaper_in_buffers"]

LAUNCH_BYTES = load_profile(GENERIC).launch
"""What starting one more kernel costs on a device that nothing is known of."""

SOURCE, SINK = "packed", "plain"


@dataclass
class Flow:
    """One tensor: who writes it, who reads it, how large it is.

    ``writer``: a composite's name, ``None`` for anything else. ``packed_readers``: composites that read it
    as data. ``plain_reader``: whether anything else reads it too.
    ``is_view``: packed and plain are the same bytes.
    """

    bytes: int
    writer: str | None = None
    packed_readers: set[str] = field(default_factory=set)
    plain_reader: bool = False
    is_view: bool = False


class Balance:
    """The cheapest choice between packed and plain for all composites of one function.

    ``flows``: its tensors by any key. ``fixed``: composites that are packed in any case. ``free``: the
    others. ``gains``: what a free composite's own kernel saves by being packed (may be negative).
    ``packed_scope``: where packed tensors are. The sum over all kernels and conversions is least.
    """

    def __init__(
        self,
        flows: Mapping[Any, Flow],
        fixed: set[str],
        free: set[str],
        gains: Mapping[str, int] | None = None,
        profile: Profile | None = None,
        packed_scope: str = "global.texture",
    ) -> None:
        self.flows, self.fixed, self.free = list(flows.values()), fixed, free
        self.gains = dict(gains or {})
        self.profile = profile or load_profile(GENERIC)
        self.packed_scope = packed_scope
        self._cut = cache(self._cut_once)

    def cost(self, packed: set[str]) -> int:
        """What it costs to pack these (beside the fixed ones): conversions, and savings that are missed."""
        packed = packed | self.fixed
        total = 0
        for name, gain in self.gains.items():
            total += max(gain, 0) if name not in packed else max(-gain, 0)
        for flow in self.flows:
            inside = any(reader in packed for reader in flow.packed_readers)
            outside = flow.plain_reader or any(reader not in packed for reader in flow.packed_readers)
            if flow.writer in packed and outside:
                total += self._unpack(flow)
            elif flow.writer not in packed and inside:
                total += self._pack(flow)
        return total

    @cached_property
    def left(self) -> dict[str, int]:
        """The free composites that are better left in buffers, with what packing each would cost more."""
        if not self.free:
            return {}
        _, packed = self._cut(None, True)
        return {name: self.excess(name) for name in sorted(self.free - packed)}

    def excess(self, name: str) -> int:
        """How much more the whole function would cost if this free composite were on the other side."""
        total, packed = self._cut(None, True)
        return self._cut(name, name not in packed)[0] - total

    def _pack(self, flow: Flow) -> int:
        return 0 if flow.is_view else self.profile.convert(flow.bytes, "global", self.packed_scope)

    def _unpack(self, flow: Flow) -> int:
        return 0 if flow.is_view else self.profile.convert(flow.bytes, self.packed_scope, "global")

    @cached_property
    def _graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from((SOURCE, SINK))
        for name in sorted(self.fixed):
            graph.add_edge(SOURCE, (name,))
        for name in sorted(self.free):
            gain = self.gains.get(name, 0)
            if gain >= 0:
                graph.add_edge(SOURCE, (name,), capacity=gain)
            else:
                graph.add_edge((name,), SINK, capacity=-gain)
        for number, flow in enumerate(self.flows):
            self._add_flow(graph, number, flow)
        return graph

    def _add_flow(self, graph: nx.DiGraph, number: int, flow: Flow) -> None:
        writer: Any = (flow.writer,) if flow.writer is not None else SINK
        readers: list[Any] = [(name,) for name in sorted(flow.packed_readers)]
        if writer != SINK and (flow.plain_reader or readers):
            unpacked = ("unpack", number)
            graph.add_edge(writer, unpacked, capacity=self._unpack(flow))
            for reader in [*readers, *([SINK] if flow.plain_reader else [])]:
                graph.add_edge(unpacked, reader)
        if readers:
            packed = ("pack", number)
            graph.add_edge(packed, writer, capacity=self._pack(flow))
            for reader in readers:
                graph.add_edge(reader, packed)

    def _cut_once(self, forced: str | None, packed: bool) -> tuple[int, frozenset[str]]:
        """The least cost, and which free composites are packed; ``forced`` must be, or must not."""
        graph = self._graph
        if forced is not None:
            graph = graph.copy()
            # the edge may be there, with the composite's gain; without a capacity it can't be cut
            graph.add_edge(*((SOURCE, (forced,)) if packed else ((forced,), SINK)))
            graph.edges[(SOURCE, (forced,)) if packed else ((forced,), SINK)].pop("capacity", None)
        total, (on_source, _) = nx.minimum_cut(graph, SOURCE, SINK)
        return int(total), frozenset(name for name in self.free if (name,) in on_source)


def cheaper_in_buffers(flows: Mapping[Any, Flow], fixed: set[str], free: set[str]) -> dict[str, int]:
    """The composites of ``free`` that are better left in buffers, on a device that nothing is known of."""
    return Balance(flows, fixed, free).left
