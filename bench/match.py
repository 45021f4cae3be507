"""``make bench-match``: how long matching takes, beside stock's ``FuseOpsByPattern`` with the same rows.

    python -m pytest bench/test_match.py --benchmark-json build/match.json
    python -m bench.match build/match.json [--document docs/performance.md]

This module says who runs against whom (a `Contest`) and makes the document's block of what pytest-benchmark
measured. Stock is given what a user of it would write: every word of operators that the table finds in this
network as a `relax.dpl` pattern of its own, longest first, with `has_leaking_intermediate_variables` as the
check, without which it makes cycles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.backend.utils import has_leaking_intermediate_variables
from tvm.relax.transform import FuseOpsByPattern

from bench import ROOT
from bench.rows import chain, residual_chain, rows_table, stock_patterns
from bench.table import table, write_block
from fusion_patterns.match import plan_fusion
from fusion_patterns.match.automaton import Automaton
from fusion_patterns.match.engine import Engine
from fusion_patterns.match.program import compile_row
from fusion_patterns.normalise import normalise
from fusion_patterns.outline import outline
from fusion_patterns.table import Table, load_table

__all__ = ["Contest", "builtin_contest", "chain_contest", "main", "rows_contest", "stock_rows"]

DOCUMENT = ROOT / "docs" / "performance.md"
NETWORKS = ("tv_resnet50", "tv_mobilenet_v2", "tv_inception_v3", "tv_densenet121", "ow_ppocrv4_det")
CHAINS = {"conv-add-relu": chain, "residual": residual_chain}
LENGTHS = (100, 200, 500, 1000, 2000, 5000)
ROWS = (4, 16, 64)
BUILTIN_WHO = ("first_plan", "plan", "outlined", "stock")
ROWS_WHO = ("ours", "stock")
CHAIN_WHO = ("builtin", "ours", "stock")
TESTS: list[tuple[str, tuple[str, ...]]] = [
    ("test_builtin_table", BUILTIN_WHO),
    ("test_tables_of_rows", ROWS_WHO),
    ("test_chains", CHAIN_WHO),
    ("test_compiling_rows", ("ours",)),
]
"""The functions of `bench/test_match.py`, and who runs in each."""


@dataclass(frozen=True)
class Contest:
    """Calls that do the same work, by who does it, and what is known of the work before it is measured."""

    group: str
    calls: Mapping[str, Callable[[], Any]]
    facts: dict[str, Any]


@cache
def network(name: str) -> tvm.IRModule | None:
    """A network of the corpus in inference form; None where the corpus does not list it."""
    import networks

    entry = networks.corpus().get(name)
    return None if entry is None else normalise(networks.import_network(entry))


@cache
def builtin_contest(name: str) -> Contest | None:
    """The built-in table on a network; None where there is no such network."""
    mod, rows = network(name), load_table()
    if mod is None:
        return None
    patterns = stock_rows(mod, rows)
    calls: dict[str, Callable[[], Any]] = {
        "first_plan": lambda: Engine(mod, rows, new_automaton(rows)).plan(),
        "plan": partial(plan_fusion, mod, rows),
        "outlined": lambda: outline(mod, plan_fusion(mod, rows)),
        "stock": partial(fuse(patterns), mod),
    }
    facts = {
        "network": name,
        "ops": operators(mod),
        "matches": len(plan_fusion(mod, rows).matches),
        "words": len(patterns),
    }
    return Contest(f"{name}, built-in table", calls, facts)


@cache
def rows_contest(name: str, count: int) -> Contest | None:
    """A made-up table of *count* rows on a network; None where there is no such network."""
    mod = network(name)
    if mod is None:
        return None
    rows, patterns = rows_table(count)
    stock = partial(fuse(patterns), mod)
    found = f"{len(plan_fusion(mod, rows).matches)}/{composites(stock())}"
    facts = {"network": name, "ops": operators(mod), "rows": count, "matches": found}
    return Contest(f"{name}, {count} rows", {"ours": partial(plan_fusion, mod, rows), "stock": stock}, facts)


@cache
def chain_contest(kind: str, length: int) -> Contest:
    """The built-in table, and the longest made-up one beside stock, on a chain of about *length* operators."""
    mod, builtin = normalise(CHAINS[kind](length)), load_table()
    rows, patterns = rows_table(ROWS[-1])
    calls = {
        "builtin": partial(plan_fusion, mod, builtin),
        "ours": partial(plan_fusion, mod, rows),
        "stock": partial(fuse(patterns), mod),
    }
    facts = {"chain": kind, "length": length, "ops": operators(mod)}
    return Contest(f"{kind} chain of {length}", calls, facts)


def compiling_contest() -> Contest:
    """The built-in table's rows as programs; nobody else does that."""
    rows = load_table()
    facts = {"rows": len(rows.patterns)}
    return Contest("compiling the built-in table", {"ours": partial(new_automaton, rows)}, facts)


def stock_rows(mod: tvm.IRModule, rows: Table) -> list[Any]:
    """The words that *rows* find in *mod*, as stock's patterns: of the longest first."""
    words = dict.fromkeys(match.word for match in plan_fusion(mod, rows).matches)
    return stock_patterns(sorted(words, key=len, reverse=True))


def fuse(patterns: Sequence[Any]) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Stock's pass for these (name, pattern), with its own check for values that leave."""
    checked: list[Any] = [(name, pattern, {}, _keeps_values_inside) for name, pattern in patterns]
    pass_: Callable[[tvm.IRModule], tvm.IRModule] = FuseOpsByPattern(checked, bind_constants=False)
    return pass_


def _keeps_values_inside(context: Any) -> bool:
    return not has_leaking_intermediate_variables(context)


def new_automaton(rows: Table) -> Automaton:
    """An automaton that has not seen any operator yet."""
    return Automaton(tuple(compile_row(row, rows) for row in rows.patterns))


def composites(mod: tvm.IRModule) -> int:
    """Calls of composite functions; equal composites are one function to stock."""
    made = {
        variable
        for variable, func in mod.functions_items()
        if isinstance(func, relax.Function) and "Composite" in (func.attrs or {})
    }
    return sum(
        1
        for func in mod.functions.values()
        if isinstance(func, relax.Function)
        for block in func.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op in made
    )


def operators(mod: tvm.IRModule) -> int:
    """Bindings in the module's functions."""
    return sum(
        len(block.bindings)
        for func in mod.functions.values()
        if isinstance(func, relax.Function)
        for block in func.body.blocks
    )


# The document


@dataclass
class Result:
    """A contest's facts, and the least milliseconds of each side."""

    facts: dict[str, Any]
    least: dict[str, float] = field(default_factory=dict)


def read_results(data: Any) -> dict[str, list[Result]]:
    """What pytest-benchmark's JSON says, by test, in the order of the run.

    Raises `ValueError` if a group lacks one of those who should have run.
    """
    found: dict[str, dict[str, Result]] = {test: {} for test, _ in TESTS}
    for record in data["benchmarks"]:
        test, who = record["name"].partition("[")[0], record["params"]["who"]
        result = found[test].setdefault(record["group"], Result(record["extra_info"]))
        result.least[who] = min(result.least.get(who, math.inf), 1e3 * record["stats"]["min"])
    for test, everybody in TESTS:
        for group, result in found[test].items():
            missing = [who for who in everybody if who not in result.least]
            if missing:
                raise ValueError(f"'{group}' was not measured for {', '.join(missing)}; run all of its tests")
    return {test: list(groups.values()) for test, groups in found.items()}


def builtin_text(results: Sequence[Result], compiling: Result) -> str:
    """The built-in table on real networks."""
    lines = []
    for result in results:
        facts, (first, plan, outlined, stock) = result.facts, [result.least[who] for who in BUILTIN_WHO]
        lines.append(
            (
                f"`{facts['network']}`", facts["ops"], facts["matches"], facts["words"], f"{first:.0f}",
                f"{plan:.1f}", f"{outlined:.1f}", f"{stock:.1f}", f"{stock / plan:.1f}", f"{stock / outlined:.1f}",
            )
        )  # fmt: skip
    header = (
        "network", "ops", "matches", "words", "first plan", "plan", "plan, outline", "stock", "stock/plan",
        "stock/plan, outline",
    )  # fmt: skip
    return (
        "### The built-in table\n\n"
        "*words*: stock gets each word of operators that the table finds in this network as a pattern of its own, "
        "and no others, longest first. Stock's pass also rewrites the module; *plan, outline* does as much. "
        "*first plan*: with an automaton that has seen nothing yet; compiling the "
        f"{compiling.facts['rows']} rows to programs takes {compiling.least['ours']:.1f} ms of it.\n\n"
        f"{table(header, lines)}"
    )


def rows_text(results: Sequence[Result]) -> str:
    """Made-up tables of 4, 16 and 64 rows on real networks."""
    lines = []
    for name, by_rows in _by_network(results).items():
        cells: list[Any] = [f"`{name}`", by_rows[ROWS[0]].facts["ops"]]
        for result in by_rows.values():
            ours, stock = (result.least[who] for who in ROWS_WHO)
            cells += [result.facts["matches"], f"{ours:.1f}", f"{stock:.1f}", f"{stock / ours:.1f}"]
        lines.append((*cells, f"{_growth(by_rows):.2f}"))
    header = ["network", "ops"]
    for count in ROWS:
        header += [f"matches, {count} rows", "ours", "stock", "ratio"]
    return (
        "### Tables of 4, 16 and 64 rows\n\n"
        "A row is one word here, such as `conv2d, add, relu`, and both sides get the same. *matches*: "
        "ours/stock's.\n\n"
        f"{table([*header, 'ours, 64 to 4 rows'], lines)}"
    )


def _by_network(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.facts["network"], {})[result.facts["rows"]] = result
    return {name: by_rows for name, by_rows in found.items() if set(by_rows) == set(ROWS)}


def _growth(by_rows: dict[int, Result]) -> float:
    return by_rows[ROWS[-1]].least["ours"] / by_rows[ROWS[0]].least["ours"]


def chains_text(results: Sequence[Result]) -> str:
    """Chains of 100 to 5,000 operators."""
    lines = []
    for result in results:
        builtin, ours, stock = (result.least[who] for who in CHAIN_WHO)
        times = f"{builtin:.1f}", f"{ours:.1f}", f"{stock:.1f}"
        lines.append((result.facts["chain"], result.facts["ops"], *times, f"{stock / ours:.1f}"))
    header = ("chain", "ops", "ours, built-in table", "ours, 64 rows", "stock, 64 rows", "ratio at 64 rows")
    text = f"### Chains\n\n{table(header, lines)}"
    growth = [(name, f"{value:.2f}") for name, value in exponents(results).items()]
    if growth:
        text += (
            "\nGrowth from 500 to 5,000 operators, as the exponent of a power (1 is linear):\n\n"
            f"{table(('chain, table', 'exponent'), growth)}"
        )
    return text


def exponents(results: Sequence[Result]) -> dict[str, float]:
    """How time grows with length, by chain and side."""
    found = {}
    for kind in dict.fromkeys(result.facts["chain"] for result in results):
        for who, said in zip(CHAIN_WHO, ("built-in", "64 rows", "stock"), strict=True):
            times = {r.facts["length"]: r.least[who] for r in results if r.facts["chain"] == kind}
            if len(times) > 1:
                found[f"{kind}, {said}"] = exponent(times)
    return found


def exponent(by_length: dict[int, float], low: int = 500) -> float:
    """How time grows with length from *low* on: 1 is linear."""
    high = max(by_length)
    low = low if low in by_length and low < high else min(by_length)
    return math.log(by_length[high] / by_length[low]) / math.log(high / low)


def goals_text(rows: Sequence[Result], chains: Sequence[Result]) -> str:
    """What was aimed at, beside what came out; nothing where a part of it was not measured."""
    powers = [value for name, value in exponents(chains).items() if not name.endswith("stock")]
    networks = _by_network(rows)
    if not powers or not networks:
        return ""
    growth = max(_growth(by_rows) for by_rows in networks.values())
    most = {name: by_rows[ROWS[-1]].least for name, by_rows in networks.items()}
    ratios = ", ".join(f"{least['stock'] / least['ours']:.1f} on `{name}`" for name, least in most.items())
    return (
        f"Aimed at: an exponent of at most 1.1 (ours at worst {max(powers):.2f}); at most 1.5 times slower with "
        f"{ROWS[-1]} rows than with {ROWS[0]} (at worst {growth:.2f}); with {ROWS[-1]} rows ten times faster than "
        f"stock on ResNet-50 ({ratios}).\n"
    )


def matching_text(results: dict[str, list[Result]]) -> str:
    """The block *Matching* of the document; what was not measured has no part in it."""
    builtin, rows, chains, compiling = (results[test] for test, _ in TESTS)
    text = [
        "Written by `make bench-match`. Milliseconds of CPU time, the least of several calls, ours and stock's "
        "in turn in one process, on modules in this package's inference form. Stock is `FuseOpsByPattern` with "
        "its check for values that leave; without it that pass makes cycles.\n"
    ]
    if builtin and compiling:
        text.append(builtin_text(builtin, compiling[0]))
    if _by_network(rows):
        text.append(rows_text(rows))
    if chains:
        text.append(chains_text(chains))
    return "\n".join([*text, goals_text(rows, chains)])


def main(arguments: list[str] | None = None) -> int:
    """Write the block *Matching* of the document from what pytest-benchmark measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.match")
    parser.add_argument("results", type=Path, help="what pytest wrote with --benchmark-json")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    try:
        results = read_results(json.loads(options.results.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.results}: {error}")
    write_block(options.document, "matching", "Matching", matching_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
