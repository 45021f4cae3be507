"""Which composites are worth packing: a minimum cut between texture and buffers.

A convolution is always packed: its kernel pays for any conversion. A pool, a concat, an elementwise chain reads and
writes each element about once, so a conversion on either side costs as much as the kernel. For those the cheapest
choice for the whole function is a minimum cut: packed composites on the source's side, everything that is plain
(other ops, parameters, results) on the sink's. A tensor that many readers want in the other form is converted once,
so its cost is one edge, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

__all__ = ["LAUNCH_BYTES", "Flow", "cheaper_in_buffers"]

LAUNCH_BYTES = 500_000
"""What starting one more kernel costs, in bytes that the device could have moved meanwhile: 5 us at 100 GB/s."""


@dataclass
class Flow:
    """One tensor: who writes it, who reads it, how large it is.

    ``writer``: a composite's name, ``None`` for anything else. ``packed_readers``: composites that read it as data.
    ``plain_reader``: whether anything else reads it too.
    """

    bytes: int
    writer: str | None = None
    packed_readers: set[str] = field(default_factory=set)
    plain_reader: bool = False


def cheaper_in_buffers(flows: Mapping[Any, Flow], fixed: set[str], free: set[str]) -> dict[str, int]:
    """The composites of ``free`` that are better left in buffers, with the bytes that packing them would cost more.

    ``fixed``: composites that are packed in any case. Exact: the sum over all tensors of conversions (each reads and
    writes the tensor once and starts one kernel) is least.
    """
    if not free:
        return {}
    graph = nx.DiGraph()
    source, sink = "packed", "plain"
    for name in sorted(fixed):
        graph.add_edge(source, (name,))
    for name in sorted(free):
        graph.add_node((name,))
    graph.add_nodes_from((source, sink))
    for number, flow in enumerate(flows.values()):
        cost = 2 * flow.bytes + LAUNCH_BYTES
        writer: Any = (flow.writer,) if flow.writer is not None else sink
        readers: list[Any] = [(name,) for name in sorted(flow.packed_readers)]
        if writer != sink and (flow.plain_reader or readers):
            unpacked = ("unpack", number)
            graph.add_edge(writer, unpacked, capacity=cost)
            for reader in [*readers, *([sink] if flow.plain_reader else [])]:
                graph.add_edge(unpacked, reader)
        if readers:
            packed = ("pack", number)
            graph.add_edge(packed, writer, capacity=cost)
            for reader in readers:
                graph.add_edge(reader, packed)
    if not graph.in_degree(sink):
        return {}
    total, (on_source, _) = nx.minimum_cut(graph, source, sink)
    outside = {name for name in free if (name,) not in on_source}
    return {name: _excess(graph, source, sink, name, total) for name in sorted(outside)}


def _excess(graph: nx.DiGraph, source: str, sink: str, name: str, total: int) -> int:
    """How much more the function would cost if this composite were packed."""
    forced = graph.copy()
    forced.add_edge(source, (name,))
    return int(nx.minimum_cut_value(forced, source, sink) - total)
