"""Counting launches: ours and three ways of stock's, on a module small enough to count by hand."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import kernel_counts, rows


def test_a_chain_is_a_kernel_for_each_convolution_on_all_sides() -> None:
    found = kernel_counts.count("chain", rows.chain(6))
    assert (found.raw, found.normal, found.by_pattern) == (2, 2, 2)
    assert found.device is not None
    assert found.device >= 2
    assert found.labels["conv2d.chain"] == 2
    assert found.ours == sum(found.labels.values())
    assert found.ours - found.conversions == 2


def test_the_fewest_of_stock_is_the_peer_and_ties_are_listed() -> None:
    better = kernel_counts.Count("better", 5, 1, 9, 7, 6, 10, Counter({"conv2d.chain": 5}))
    tie = kernel_counts.Count("tie", 7, 2, None, 7, 8, None, Counter({"conv2d.chain": 6, "layout.pack": 1}))
    assert better.peer == 7  # what our own table finds for stock stands beside it
    assert tie.peer == 7
    text = kernel_counts.render([better, tie])
    assert "| `better` | 5 | 1 | 9 | 7 | 6 | 10 | 0.71 | 0.83 | 0.50 |" in text
    assert "| `tie` | 7 | 2 |  | 7 | 8 |  | 1.00 | 0.88 |  |" in text
    assert (
        "Fewer than stock's launches, the fewer of both its columns, on 1 of 2; fewer than its kernels on the "
        "device on 1" in text
    )
    assert "| `tie` | 6 conv2d.chain, 1 layout.pack |" in text
    assert "| `better` | 5 conv2d.chain |" not in text
