"""All properties of one table: `check_table`, what `fusion-patterns check` and the pytest plugin run.

A *case* is one property on one strategy. Each is run by Hypothesis on its own, so a failure is told with the
smallest example that was found, printed as Python.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from fusion_patterns.match import plan_fusion
from fusion_patterns.table import load_table
from fusion_patterns.table.model import Row, Table
from fusion_patterns.testing import properties
from fusion_patterns.testing.building import build
from fusion_patterns.testing.draft import seeded
from fusion_patterns.testing.nets import draw_net
from fusion_patterns.testing.rows import Instance, draw_instance, kinds_of_miss
from fusion_patterns.testing.shapes import Infeasible
from fusion_patterns.testing.spec import Module
from fusion_patterns.testing.strategies import instances, modules, near_misses

__all__ = ["Case", "CheckReport", "Failure", "RowReport", "cases", "check_table", "render"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    """A property that does not hold: where, on which example, and what was found instead."""

    case: str
    example: str
    reason: str


@dataclass
class RowReport:
    """What was seen of one row.

    ``taken``: instances that became one composite. ``declined``: near misses that were declined for what was
    broken. ``never_fail``: conditions that no generated graph breaks. ``won``: share of the instances that
    the row gets when the whole table is applied. ``impossible``: why there are no instances.
    """

    row: str
    where: str
    taken: int = 0
    declined: int = 0
    never_fail: list[str] = field(default_factory=list)
    won: float = 0.0
    impossible: str = ""


@dataclass
class CheckReport:
    """The result of :func:`check_table`."""

    table: str
    rows: list[RowReport] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    vacuous: Counter[str] = field(default_factory=Counter)
    covered: int = 0
    convolutions: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every property held, and every row has instances."""
        return not self.failures and not any(row.impossible for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            "ok": self.ok,
            "table": self.table,
            "rows": [vars(row) for row in self.rows],
            "checks": dict(self.checks),
            "vacuous": dict(self.vacuous),
            "covered": self.covered,
            "convolutions": self.convolutions,
            "failures": [vars(failure) for failure in self.failures],
        }


@dataclass(frozen=True)
class Case:
    """One property on one strategy."""

    name: str
    row: str
    """the row that it is about; empty for the whole table"""
    strategy: Callable[[], hypothesis.strategies.SearchStrategy[Any]]
    holds: Callable[[Any], None]
    share: int = 1
    """one of so many examples is enough"""

    def run(self, examples: int, seed: int = 0) -> tuple[int, int, Failure | None]:
        """Returns how many examples held, how many said nothing, and the smallest that did not hold."""
        seen: Counter[str] = Counter()
        last: list[Any] = []

        def test(example: Any) -> None:
            last[:] = [example]
            try:
                self.holds(example)
            except properties.Vacuous:
                seen["vacuous"] += 1
            else:
                seen["held"] += 1

        count = max(1, examples // self.share)
        limited = settings(
            max_examples=count,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )
        try:
            with hypothesis.reporting.with_reporter(lambda text: None):
                hypothesis.seed(seed)(limited(given(self.strategy())(test)))()
        except hypothesis.errors.Unsatisfiable:
            pass
        except Exception as error:  # a property may be broken by any error, TVM raises many kinds
            reason = str(error).split("\nFalsifying example")[0].strip() or type(error).__name__
            return seen["held"], seen["vacuous"], Failure(self.name, repr(last[0]) if last else "", reason)
        return seen["held"], seen["vacuous"], None


def cases(table: Table, *, target: Any = None, device: str | None = None) -> Iterator[Case]:
    """All cases of a table; ``device`` runs modules on an OpenCL device as well ("" is the best one)."""
    for row in table.patterns:
        yield from _cases_of_row(row, table)
    for name, property_ in properties.OF_MODULES.items():
        yield Case(name, "", lambda: modules(table), _of_module(property_, table, target), 2)
    yield Case(
        "equivalence on the CPU",
        "",
        lambda: modules(table, tame=True),
        lambda spec: properties.computes_the_same(spec, table),
        10,
    )
    if device is not None:
        yield Case(
            "equivalence on a device",
            "",
            lambda: modules(table, tame=True),
            lambda spec: properties.runs_the_same(spec, table, device or None, target),
            10,
        )


def _cases_of_row(row: Row, table: Table) -> Iterator[Case]:
    yield Case(
        f"self-match of {row.name}",
        row.name,
        lambda: instances(row, table),
        lambda instance: properties.takes(instance, row, table),
    )
    yield Case(
        f"reason of {row.name}",
        row.name,
        lambda: near_misses(row, table),
        lambda miss: properties.declines(miss, row, table),
    )


def _of_module(property_: Callable[..., None], table: Table, target: Any) -> Callable[[Module], None]:
    if property_ is properties.agrees_on_scopes:
        return lambda spec: property_(spec, table, target)
    return lambda spec: property_(spec, table)


def check_table(
    table: Table | str | os.PathLike[str] | None,
    *,
    target: Any = None,
    examples: int = 100,
    seed: int = 0,
    device: str | None = None,
    progress: Say | None = None,
) -> CheckReport:
    """Run every property on a table.

    ``table``: a path, the name of a built-in table, or a :class:`Table`. ``examples``: graphs for each row,
    and half as many networks. ``device``: an OpenCL device, "" for the best one; ``None`` runs nothing there.
    Raises :class:`TableError` for a table that can't be loaded; what fails is in the report.
    """
    loaded = load_table(table)
    report = CheckReport(loaded.name)
    rows = {row.name: describe(row, loaded) for row in loaded.patterns}
    report.rows = list(rows.values())
    try:
        properties.table_round_trips(loaded)
        report.checks["table round trip"] += 1
    except properties.PropertyError as error:
        report.failures.append(Failure("table round trip", loaded.name, str(error)))
    for case in cases(loaded, target=target, device=device):
        if case.row and rows[case.row].impossible:
            continue
        if progress is not None:
            progress(case.name)
        held, vacuous, failure = case.run(examples, seed)
        kind = case.name.removesuffix(f" of {case.row}")
        report.checks[kind] += held
        report.vacuous[kind] += vacuous
        if failure is not None:
            report.failures.append(failure)
        if case.row:
            note(rows[case.row], kind, held)
    report.covered, report.convolutions = _coverage(loaded, examples, seed)
    return report


def note(row: RowReport, kind: str, held: int) -> None:
    """Add the examples of one case to its row's report."""
    if kind == "self-match":
        row.taken += held
    else:
        row.declined += held


def describe(row: Row, table: Table, examples: int = 20) -> RowReport:
    """What is known of a row before any property is asked: its instances, and what can't be broken."""
    report = RowReport(row.name, str(row.origin))
    drawn = []
    for number in range(examples):
        try:
            drawn.append(draw_instance(seeded(number), row, table))
        except Infeasible as reason:
            report.impossible = str(reason)
    if not drawn:
        return report
    report.impossible = ""
    can_fail = set(kinds_of_miss(row, table))
    report.never_fail = [
        str(predicate.origin) for number, predicate in enumerate(row.where) if str(number) not in can_fail
    ]
    report.won = sum(_won(instance, table) for instance in drawn) / len(drawn)
    return report


def _won(instance: Instance, table: Table) -> bool:
    plan = plan_fusion(build(instance.graph), table)
    members = set(instance.members)
    return any(
        match.row.name == instance.row and members <= {str(op.name) for op in match.ops}
        for match in plan.matches
    )


def _coverage(table: Table, examples: int, seed: int) -> tuple[int, int]:
    covered = total = 0
    for number in range(max(1, examples // 2)):
        mine, all_ = properties.coverage(draw_net(seeded(f"{seed}/{number}"), table), table)
        covered, total = covered + mine, total + all_
    return covered, total


def render(report: CheckReport) -> str:
    """The report for people."""
    width = max((len(row.row) for row in report.rows), default=0)
    lines = [f"{'row':<{width}}  taken  declined  in the whole table"]
    for row in report.rows:
        if row.impossible:
            lines.append(f"{row.row:<{width}}  NO INSTANCE: {row.impossible} [{row.where}]")
            continue
        lines.append(f"{row.row:<{width}}  {row.taken:>5}  {row.declined:>8}  {row.won:>17.0%}")
        if row.never_fail:
            lines.append(f"{'':<{width}}  not broken by any graph: {', '.join(row.never_fail)}")
    if report.convolutions:
        lines.append(f"convolutions in composites: {report.covered} of {report.convolutions}")
    for kind, held in report.checks.items():
        said_nothing = f", {report.vacuous[kind]} said nothing" if report.vacuous[kind] else ""
        lines.append(f"{kind:<24}{held:>6} held{said_nothing}")
    for failure in report.failures:
        lines += [f"FAILED {failure.case}: {failure.reason}", f"  example: {failure.example}"]
    lines.append("all properties hold" if report.ok else "NOT ALL PROPERTIES HOLD")
    return "\n".join(lines)
