"""Many generated modules through everything, resumable: ``python -m fusion_patterns.testing.fuzz``.

Module number ``n`` follows from the seed and ``n`` alone. Every module is built, matched, outlined, placed
and lowered to OpenCL C, and matches are checked for leaks; every second has all properties asked that need no
run; every tenth runs on the CPU, and as many as asked for run on an OpenCL device. What is done is appended
to a journal, a line for each module, so that a run that was interrupted goes on where it was.

    built     the whole way to OpenCL C        fused     ... with at least one composite
    declined  no row took anything             vacuous   runs whose results say nothing
    refused   an error that says why           wrong     a property that does not hold, or any other error
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fusion_patterns.compiler import compile_module
from fusion_patterns.errors import DeviceError, FusionPatternsError
from fusion_patterns.table import load_table
from fusion_patterns.table.model import Table
from fusion_patterns.testing import properties
from fusion_patterns.testing.building import build
from fusion_patterns.testing.draft import seeded
from fusion_patterns.testing.nets import draw_net
from fusion_patterns.testing.spec import Graph, Module
from fusion_patterns.testing.variants import reduce

__all__ = ["Plan", "Result", "main", "one", "summary"]

ALL_PROPERTIES = 2
"""Every so many modules are asked for all properties."""
ON_CPU = 10
"""Every so many modules run on the CPU."""


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    table: str = "adreno"
    modules: int = 5000
    device_modules: int = 500
    device: str | None = None
    """An OpenCL device; "" is the best one, ``None`` runs nothing on a device."""
    seed: int = 0
    shrink: bool = True

    def runs_on_device(self, number: int) -> bool:
        """Whether module ``number`` is one of those that run on the device; they are spread evenly."""
        if self.device is None or self.device_modules <= 0:
            return False
        every = max(1, self.modules // self.device_modules)
        return number % every == 0 and number // every < self.device_modules


@dataclass
class Result:
    """What became of one module."""

    number: int
    counts: list[str] = field(default_factory=list)
    wrong: list[dict[str, str]] = field(default_factory=list)
    refused: str = ""
    composites: int = 0
    convolutions: int = 0
    covered: int = 0
    seconds: float = 0.0


def one(plan: Plan, number: int) -> Result:
    """One module through everything."""
    began = time.perf_counter()
    result = Result(number)
    table = load_table(plan.table)
    on_device = plan.runs_on_device(number)
    on_cpu = number % ON_CPU == 0
    spec = draw_net(seeded(f"{plan.seed}/{number}"), table, tame=on_device or on_cpu)
    _ask(result, plan, spec, "whole way", partial(_whole_way, result, table))
    checks: dict[str, Any] = {"no leak, no cycle": properties.has_no_leak}
    if number % ALL_PROPERTIES == 0:
        checks = dict(properties.OF_MODULES)
    for name, check in checks.items():
        _ask(result, plan, spec, name, partial(check, table=table))
    if on_cpu and not result.refused:
        result.counts.append("on the CPU")
        _ask(
            result,
            plan,
            spec,
            "equivalence on the CPU",
            lambda spec: properties.computes_the_same(spec, table),
        )
    if on_device and not result.refused:
        result.counts.append("on the device")
        run = partial(properties.runs_the_same, table=table, device=plan.device or None)
        _ask(result, plan, spec, "equivalence on a device", run)
    result.seconds = round(time.perf_counter() - began, 3)
    return result


def _whole_way(result: Result, table: Table, spec: Graph | Module) -> None:
    compiled = compile_module(build(spec), None, table)
    report = compiled.report
    result.composites = sum(report.composites.values())
    result.convolutions, result.covered = report.convs["total"], report.convs["covered"]
    result.counts += ["built", "fused" if result.composites else "declined"]


def _ask(result: Result, plan: Plan, spec: Module, name: str, check: Callable[[Any], None]) -> None:
    """Ask a property; what does not hold is told with the smallest module that was found for it."""
    try:
        check(spec)
    except properties.Vacuous:
        result.counts.append("vacuous")
    except DeviceError:
        raise
    except FusionPatternsError as error:
        result.refused = f"{name}: {error}"
    except Exception as error:  # TVM raises many kinds, and each of them is a fault
        kind = type(error)

        def fails(smaller: Graph | Module) -> bool:
            try:
                check(smaller)
            except Exception as other:
                return type(other) is kind
            return False

        before = list(result.counts)
        small: Graph | Module = reduce(spec, fails) if plan.shrink else spec
        result.counts = before
        said = str(error).strip().splitlines() or [""]
        result.wrong.append(
            {"property": name, "error": f"{kind.__name__}: {said[-1][:500]}", "spec": repr(small)}
        )


def summary(results: list[Result]) -> dict[str, int]:
    """The counts of a run."""
    counts: Counter[str] = Counter(name for result in results for name in result.counts)
    counts["modules"] = len(results)
    counts["refused"] = sum(bool(result.refused) for result in results)
    counts["wrong"] = sum(bool(result.wrong) for result in results)
    for name in ("composites", "convolutions", "covered"):
        counts[name] = sum(getattr(result, name) for result in results)
    order = (
        *(
            "modules",
            "built",
            "fused",
            "declined",
            "refused",
            "wrong",
            "on the CPU",
            "on the device",
            "vacuous",
        ),
        *("composites", "convolutions", "covered"),
    )
    return {name: counts[name] for name in order}


def _read(journal: Path, plan: Plan) -> list[Result]:
    """The results of an earlier run of the same plan; a line that was cut off is done again."""
    if not journal.exists():
        return []
    lines = journal.read_text(encoding="utf-8").splitlines()
    if not lines or json.loads(lines[0]) != asdict(plan):
        raise SystemExit(f"{journal} belongs to another run; remove it or name another file with --journal")
    results = []
    for line in lines[1:]:
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return results


def _run(plan: Plan, numbers: list[int], workers: int) -> Iterator[Result]:
    if workers == 1:
        yield from (one(plan, number) for number in numbers)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(partial(one, plan), numbers, chunksize=4)


def main(arguments: list[str] | None = None) -> int:
    """Run the fuzzer; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fusion_patterns.testing.fuzz", description="Fuzz a pattern table."
    )
    parser.add_argument("--table", default="adreno", help="path or name")
    parser.add_argument("--modules", type=int, default=5000)
    parser.add_argument("--device-modules", type=int, default=500, help="how many of them run on the device")
    parser.add_argument("--device", help='OpenCL device; "" is the best one; left out, none')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--journal", type=Path, default=Path("build/fuzz.jsonl"), help="where results are appended"
    )
    parser.add_argument("--no-shrink", action="store_true", help="report modules as they were drawn")
    given = parser.parse_args(arguments)
    plan = Plan(
        given.table, given.modules, given.device_modules, given.device, given.seed, not given.no_shrink
    )
    given.journal.parent.mkdir(parents=True, exist_ok=True)
    results = _read(given.journal, plan)
    done = {result.number for result in results}
    left = [number for number in range(plan.modules) if number not in done]
    began = time.monotonic()
    with given.journal.open("a", encoding="utf-8") as journal:
        # A line that was cut off ends here, and its module is done again.
        journal.write("\n" if journal.tell() else json.dumps(asdict(plan)) + "\n")
        for count, result in enumerate(_run(plan, left, given.workers), 1):
            results.append(result)
            journal.write(json.dumps(asdict(result)) + "\n")
            journal.flush()
            _say(result, count, len(left), time.monotonic() - began)
    print(json.dumps(summary(results), indent=1))
    return int(any(result.wrong for result in results))


def _say(result: Result, count: int, total: int, seconds: float) -> None:
    for wrong in result.wrong:
        print(
            f"module {result.number}: {wrong['property']}: {wrong['error']}\n  {wrong['spec']}",
            file=sys.stderr,
        )
    if count % 50 == 0 or count == total:
        print(f"{count} of {total} modules, {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
