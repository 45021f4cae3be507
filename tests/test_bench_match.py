"""The speed benchmark: both sides get the same rows, its figures come out as text, and the engine keeps its lead
on something small."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ROOT, match, rows
from fusion_patterns.match import plan_fusion
from fusion_patterns.outline import outline
from fusion_patterns.table import load_table


@pytest.mark.parametrize("count", [4, 16, 64])
def test_made_up_tables_have_as_many_rows_as_asked_for(count: int) -> None:
    table, patterns = rows.rows_table(count)
    assert len(table.patterns) == len(patterns) == len(set(rows.words(count))) == count


@pytest.mark.parametrize(("build", "convolutions"), [(rows.chain, 10), (rows.residual_chain, 8)])
def test_both_sides_find_the_same_in_chains(build, convolutions: int) -> None:
    mod = build(30)
    table, patterns = rows.rows_table(4)
    assert len(plan_fusion(mod, table).matches) == convolutions
    assert match.composites(match.fuse(patterns)(mod)) == convolutions


def test_stock_is_given_the_words_that_the_table_finds() -> None:
    mod = rows.residual_chain(28)
    patterns = match.stock_rows(mod, load_table())
    assert len(patterns) == 2
    assert match.composites(match.fuse(patterns)(mod)) == len(plan_fusion(mod, load_table()).matches)


def test_growth_is_measured_from_500_on() -> None:
    assert match.exponent({100: 50.0, 500: 1.0, 5000: 10.0}) == pytest.approx(1.0)
    assert match.exponent({10: 1.0, 100: 100.0}) == pytest.approx(2.0)
    assert match.exponent({100: 1.0, 500: 25.0}) == pytest.approx(2.0)


def record(test: str, group: str, who: str, least: float, **facts: Any) -> dict[str, Any]:
    """What pytest-benchmark writes of one benchmark; ``least`` is in milliseconds."""
    stats = {"min": least / 1e3}
    return {
        "name": f"{test}[{who}]",
        "group": group,
        "params": {"who": who},
        "extra_info": facts,
        "stats": stats,
    }


def records() -> list[dict[str, Any]]:
    """One network and a chain of two lengths, with times that are easy to divide."""
    found = []
    for who, least in (
        ("first_plan", 60.0),
        ("plan", 20.0),
        ("outlined", 30.0),
        ("stock", 90.0),
        ("stock", 99.0),
    ):
        found.append(
            record("test_builtin_table", "net", who, least, network="net", ops=176, matches=51, words=5)
        )
    for count in match.ROWS:
        for who, least in (("ours", 8.0 + count / 16), ("stock", 120.0)):
            facts = {"network": "net", "ops": 176, "rows": count, "matches": "53/53"}
            found.append(record("test_tables_of_rows", f"net, {count}", who, least, **facts))
    for length in (500, 5000):
        for who, least in (("builtin", length / 10), ("ours", length / 50), ("stock", length**2 / 1e4)):
            facts = {"chain": "residual", "length": length, "ops": length - 3}
            found.append(record("test_chains", f"residual, {length}", who, least, **facts))
    return [*found, record("test_compiling_rows", "compiling", "ours", 13.4, rows=16)]


def test_what_was_measured_is_told() -> None:
    text = match.matching_text(match.read_results({"benchmarks": records()}))
    assert "compiling the 16 rows to programs takes 13.4 ms" in text
    assert "| `net` | 176 | 51 | 5 | 60 | 20.0 | 30.0 | 90.0 | 4.5 | 3.0 |" in text
    assert (
        "| 53/53 | 8.2 | 120.0 | 14.5 | 53/53 | 9.0 | 120.0 | 13.3 | 53/53 | 12.0 | 120.0 | 10.0 | 1.45 |"
        in text
    )
    assert "| residual | 497 | 50.0 | 10.0 | 25.0 | 2.5 |" in text
    assert "| residual, stock | 2.00 |" in text
    assert "(ours at worst 1.00)" in text
    assert "(at worst 1.45)" in text
    assert "(10.0 on `net`)" in text


def test_what_was_not_measured_is_left_out() -> None:
    chains = [record for record in records() if record["group"] == "residual, 500"]
    text = match.matching_text(match.read_results({"benchmarks": chains}))
    assert "| residual | 497 |" in text
    assert "built-in table\n" not in text
    assert "nan" not in text
    assert "Aimed at" not in text


def test_half_a_group_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = [record for record in records() if record["params"]["who"] != "stock"]
    file, document = tmp_path / "match.json", tmp_path / "performance.md"
    file.write_text(json.dumps({"benchmarks": half}))
    with pytest.raises(SystemExit):
        match.main([str(file), "--document", str(document)])
    assert "'net' was not measured for stock; run all of its tests" in capsys.readouterr().err
    assert not document.exists()


def test_the_suite_runs_and_its_results_become_the_document(tmp_path: Path) -> None:
    file, document = tmp_path / "match.json", tmp_path / "performance.md"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/test_match.py"]
    # a worker of pytest-xdist is no place to time anything: the suite must not think that it is one
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*pytest_, "-k", "test_chains and residual-100-0", "--benchmark-json", str(file)],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert match.main([str(file), "--document", str(document)]) == 0
    (line,) = [line for line in document.read_text().splitlines() if line.startswith("| residual |")]
    kind, ops, builtin, ours, stock, ratio = [cell.strip() for cell in line.strip("|").split("|")]
    assert (kind, ops) == ("residual", "98")
    assert 0 < float(ours) < float(builtin)
    assert float(ratio) == pytest.approx(float(stock) / float(ours), rel=0.05)


def least(calls: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    """The least CPU time of each call, called in turn."""
    best = [math.inf] * len(calls)
    for _ in range(repeat):
        for place, call in enumerate(calls):
            gc.collect()
            begin = time.process_time()
            call()
            best[place] = min(best[place], time.process_time() - begin)
    return best


def test_matching_stays_linear_and_ahead_of_stock() -> None:
    """With a wide margin: the goals themselves are for `make bench-match`, on a quiet machine."""
    table, patterns = rows.rows_table(64)
    small, large, stock = rows.chain(120), rows.chain(600), match.fuse(patterns)
    ours, outlined, more, theirs = least(
        [
            lambda: plan_fusion(small, table),
            lambda: outline(small, plan_fusion(small, table)),
            lambda: plan_fusion(large, table),
            lambda: stock(small),
        ],
        3,
    )
    assert more < 10 * ours
    assert theirs > 3 * ours
    assert theirs > 2 * outlined
