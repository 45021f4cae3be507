"""``make bench-match``: how long matching takes, beside stock's ``FuseOpsByPattern`` with the same rows.

    python -m bench.match [--repeat 5] [--document docs/performance.md]

One process; each time is the least CPU time of several calls, ours and stock's in turn, so that what else the
machine does falls out. Stock is given what a user of it would write: every word of operators that the table
finds in this network as a `relax.dpl` pattern of its own, longest first, with
`has_leaking_intermediate_variables` as the check, without which it makes cycles.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.backend.utils import has_leaking_intermediate_variables
from tvm.relax.transform import FuseOpsByPattern

from bench import ROOT
from bench.rows import chain, residual_chain, rows_table, stock_patterns
from bench.table import table, write_block
from fusion_patterns.lower.normalise import normalise
from fusion_patterns.match import plan_fusion
from fusion_patterns.match.automaton import Automaton
from fusion_patterns.match.engine import Engine
from fusion_patterns.match.program import compile_row
from fusion_patterns.outline import outline
from fusion_patterns.table import Table, load_table

__all__ = ["main", "stock_rows"]

DOCUMENT = ROOT / "docs" / "performance.md"
NETWORKS = ("tv_resnet50", "tv_mobilenet_v2", "tv_inception_v3", "tv_densenet121", "ow_ppocrv4_det")
LENGTHS = (100, 200, 500, 1000, 2000, 5000)
ROWS = (4, 16, 64)


def least(calls: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    """The least milliseconds of CPU time of each call, called in turn."""
    best = [math.inf] * len(calls)
    for _ in range(repeat):
        for place, call in enumerate(calls):
            gc.collect()
            begin = time.process_time()
            call()
            best[place] = min(best[place], 1e3 * (time.process_time() - begin))
    return best


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


def _plan_and_outline(mod: tvm.IRModule, rows: Table) -> None:
    outline(mod, plan_fusion(mod, rows))


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


def measure_builtin(modules: dict[str, tvm.IRModule], repeat: int) -> str:
    """The built-in table on real networks."""
    rows = load_table()
    lines = []
    for name, mod in modules.items():
        patterns = stock_rows(mod, rows)
        stock = fuse(patterns)
        plan = plan_fusion(mod, rows)
        cold = least([partial(_cold, mod, rows)], min(repeat, 3))[0]
        ours, outlined, theirs = least(
            [
                partial(plan_fusion, mod, rows),
                partial(_plan_and_outline, mod, rows),
                partial(stock, mod),
            ],
            repeat,
        )
        lines.append(
            (
                f"`{name}`", operators(mod), len(plan.matches), len(patterns), f"{cold:.0f}", f"{ours:.1f}",
                f"{outlined:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}", f"{theirs / outlined:.1f}",
            )
        )  # fmt: skip
        print(*lines[-1], flush=True)
    header = (
        "network",
        "ops",
        "matches",
        "words",
        "first plan",
        "plan",
        "plan, outline",
        "stock",
        "ratio",
        "outlined",
    )
    return table(header, lines)


def _cold(mod: tvm.IRModule, rows: Table) -> None:
    """A plan with an automaton that has not seen any operator yet."""
    Engine(mod, rows, _automaton(rows)).plan()


def measure_rows(
    modules: dict[str, tvm.IRModule], repeat: int
) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Tables of 4, 16 and 64 rows, each a word of its own, on real networks and a chain."""
    lines, spent = [], {}
    for name, mod in modules.items():
        times: list[tuple[float, float]] = []
        cells: list[Any] = [f"`{name}`", operators(mod)]
        for count in ROWS:
            rows, patterns = rows_table(count)
            stock = fuse(patterns)
            mine = len(plan_fusion(mod, rows).matches)
            ours, theirs = least(
                [partial(plan_fusion, mod, rows), partial(stock, mod)],
                repeat,
            )
            times.append((ours, theirs))
            cells += [
                f"{mine}/{composites(stock(mod))}",
                f"{ours:.1f}",
                f"{theirs:.1f}",
                f"{theirs / ours:.1f}",
            ]
        spent[name] = times
        lines.append((*cells, f"{times[-1][0] / times[0][0]:.2f}"))
        print(*lines[-1], flush=True)
    header = ["network", "ops"]
    for count in ROWS:
        header += [f"matches, {count} rows", "ours", "stock", "ratio"]
    return table([*header, "ours, 64 to 4 rows"], lines), spent


def measure_chains(repeat: int, lengths: Sequence[int] = LENGTHS) -> tuple[str, dict[str, float]]:
    """Chains of 100 to 5,000 operators: the built-in table, and 64 rows beside stock."""
    rows, (many, patterns) = load_table(), rows_table(ROWS[-1])
    stock = fuse(patterns)
    lines, exponents = [], {}
    for kind, build in (("conv-add-relu", chain), ("residual", residual_chain)):
        known: dict[str, dict[int, float]] = {"built-in": {}, "64 rows": {}, "stock": {}}
        for length in lengths:
            mod = normalise(build(length))
            times = least(
                [
                    partial(plan_fusion, mod, rows),
                    partial(plan_fusion, mod, many),
                    partial(stock, mod),
                ],
                repeat if length <= 1000 else min(repeat, 2),
            )
            for who, spent in zip(known, times, strict=True):
                known[who][length] = spent
            lines.append(
                (kind, operators(mod), *(f"{spent:.1f}" for spent in times), f"{times[2] / times[1]:.1f}")
            )
            print(*lines[-1], flush=True)
        for who, by_length in known.items():
            exponents[f"{kind}, {who}"] = exponent(by_length)
    header = ("chain", "ops", "ours, built-in table", "ours, 64 rows", "stock, 64 rows", "ratio at 64 rows")
    return table(header, lines), exponents


def exponent(by_length: dict[int, float], low: int = 500) -> float:
    """How time grows with length from *low* on: 1 is linear."""
    high = max(by_length)
    low = low if low in by_length else min(by_length)
    return math.log(by_length[high] / by_length[low]) / math.log(high / low)


def operators(mod: tvm.IRModule) -> int:
    """Bindings in the module's functions."""
    return sum(
        len(block.bindings)
        for func in mod.functions.values()
        if isinstance(func, relax.Function)
        for block in func.body.blocks
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the block *Matching* of the document."""
    parser = argparse.ArgumentParser(prog="python -m bench.match")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args(arguments)
    import networks

    entries = networks.corpus()
    modules = {
        name: normalise(networks.import_network(entries[name]))
        for name in options.networks
        if name in entries
    }
    builtin = measure_builtin(modules, options.repeat)
    by_rows, times = measure_rows(modules, options.repeat)
    chains, exponents = measure_chains(options.repeat)
    rows = load_table()
    programs = least([partial(_automaton, rows)], options.repeat)[0]
    text = [
        "Written by `make bench-match`. Milliseconds of CPU time, the least of several calls, ours and stock's "
        "in turn in one process, on modules in this package's inference form. Stock is `FuseOpsByPattern` with "
        "its check for values that leave; without it that pass makes cycles.\n",
        "### The built-in table\n",
        "*words*: stock gets each word of operators that the table finds in this network as a pattern of its own, "
        "and no others, longest first. Stock's pass also rewrites the module; *plan, outline* does as much. "
        f"*first plan*: with an automaton that has seen nothing yet; compiling the {len(rows.patterns)} rows to "
        f"programs takes {programs:.1f} ms of it.\n",
        builtin,
        "### Tables of 4, 16 and 64 rows\n",
        "A row is one word here, such as `conv2d, add, relu`, and both sides get the same. *matches*: ours/stock's.\n",
        by_rows,
        "### Chains\n",
        chains,
        "Growth from 500 to 5,000 operators, as the exponent of a power (1 is linear):\n",
        table(("chain, table", "exponent"), [(name, f"{value:.2f}") for name, value in exponents.items()]),
        _goals(times, exponents),
    ]
    write_block(options.document, "matching", "Matching", "\n".join(text))
    return 0


def _goals(times: dict[str, list[tuple[float, float]]], exponents: dict[str, float]) -> str:
    """What was aimed at, beside what came out. ``times``: ours and stock's by number of rows."""
    power = max((value for name, value in exponents.items() if not name.endswith("stock")), default=math.nan)
    growth = max((spent[-1][0] / spent[0][0] for spent in times.values()), default=math.nan)
    ratios = ", ".join(f"{spent[-1][1] / spent[-1][0]:.1f} on `{name}`" for name, spent in times.items())
    return (
        f"Aimed at: an exponent of at most 1.1 (ours at worst {power:.2f}); at most 1.5 times slower with "
        f"{ROWS[-1]} rows than with {ROWS[0]} (at worst {growth:.2f}); with {ROWS[-1]} rows ten times faster than "
        f"stock on ResNet-50 ({ratios}).\n"
    )


def _automaton(rows: Table) -> Automaton:
    return Automaton(tuple(compile_row(row, rows) for row in rows.patterns))


if __name__ == "__main__":
    sys.exit(main())
