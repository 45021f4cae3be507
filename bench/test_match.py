"""The benchmarks of ``make bench-match``, for pytest-benchmark; `bench.match` says who runs against whom.

A group is one network or chain and one table. Its members run in turn, in several turns, so that what else
the machine does falls on all of them; the least CPU time of all turns counts.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from bench import match

TURNS = 3
LARGE = 1000
"""Operators from which on one call in each turn is enough."""

pytestmark = pytest.mark.benchmark(timer=time.process_time)


def measure(benchmark: Any, contest: match.Contest | None, who: str) -> None:
    if contest is None:
        pytest.skip("the corpus does not list this network")
    benchmark.group = contest.group
    benchmark.extra_info.update(contest.facts)
    rounds = 2 if contest.facts.get("ops", 0) < LARGE else 1
    benchmark.pedantic(contest.calls[who], setup=collect, rounds=rounds)


def collect() -> None:
    gc.collect()


# The parameter of the topmost mark changes fastest.


@pytest.mark.parametrize("who", match.BUILTIN_WHO)
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("network", match.NETWORKS)
def test_builtin_table(benchmark: Any, network: str, turn: int, who: str) -> None:
    measure(benchmark, match.builtin_contest(network), who)


@pytest.mark.parametrize("who", match.ROWS_WHO)
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("rows", match.ROWS)
@pytest.mark.parametrize("network", match.NETWORKS)
def test_tables_of_rows(benchmark: Any, network: str, rows: int, turn: int, who: str) -> None:
    measure(benchmark, match.rows_contest(network, rows), who)


@pytest.mark.parametrize("who", match.CHAIN_WHO)
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("length", match.LENGTHS)
@pytest.mark.parametrize("kind", match.CHAINS)
def test_chains(benchmark: Any, kind: str, length: int, turn: int, who: str) -> None:
    measure(benchmark, match.chain_contest(kind, length), who)


@pytest.mark.parametrize("who", ["ours"])
@pytest.mark.parametrize("turn", range(TURNS))
def test_compiling_rows(benchmark: Any, turn: int, who: str) -> None:
    measure(benchmark, match.compiling_contest(), who)
