"""The pytest plugin: the properties of one's own table as tests.

    pytest --fusion-table my.yaml [--fusion-target ...] [--fusion-examples N] [--fusion-device ""]

Each row gets two tests (self-match, reason), the table one for each property of modules; at the end the
coverage of each row is reported. Without ``--fusion-table`` the plugin does nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

__all__: list[str] = []

_NOTE = "fusion_patterns"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("fusion_patterns", "properties of a fusion pattern table")
    group.addoption("--fusion-table", metavar="PATH|NAME", help="the table whose properties are tested")
    group.addoption(
        "--fusion-target", metavar="TARGET", help="TVM target; default qcom/adreno-opencl-texture"
    )
    group.addoption("--fusion-examples", metavar="N", type=int, default=50, help="graphs for each row (50)")
    group.addoption(
        "--fusion-device", metavar="DEVICE", help='OpenCL device; "" is the best one, left out none'
    )
    group.addoption("--fusion-seed", metavar="N", type=int, default=0, help="of what is drawn (0)")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[Any]) -> None:
    """Adds the properties of the table to the tests."""
    name = config.getoption("--fusion-table")
    if name is None:
        return
    from fusion_patterns.errors import FusionPatternsError

    try:
        items.extend(_TableCases.from_parent(session, name=f"fusion-table {name}", table=name).collect())
    except FusionPatternsError as error:
        raise pytest.UsageError(f"--fusion-table {name}: {error}") from None


class _TableCases(pytest.Collector):
    """All cases of a table."""

    def __init__(self, *, table: str, **given: Any) -> None:
        super().__init__(nodeid=f"fusion-table/{table}", **given)
        self.table = table

    def collect(self) -> list[pytest.Item]:
        from fusion_patterns.table import load_table
        from fusion_patterns.testing.check import cases

        table = load_table(self.table)
        option = self.config.getoption
        found = cases(table, target=option("--fusion-target"), device=option("--fusion-device"))
        items: list[pytest.Item] = [_RoundTrip.from_parent(self, name="table round trip", table=table)]
        return [
            *items,
            *(_CaseItem.from_parent(self, name=case.name, case=case, table=table) for case in found),
        ]


class _RoundTrip(pytest.Item):
    def __init__(self, *, table: Any, **given: Any) -> None:
        super().__init__(**given)
        self.table = table

    def runtest(self) -> None:
        from fusion_patterns.testing.properties import table_round_trips

        table_round_trips(self.table)


class _CaseFailedError(Exception):
    """A property does not hold."""


class _CaseItem(pytest.Item):
    """One property on one strategy."""

    def __init__(self, *, case: Any, table: Any, **given: Any) -> None:
        super().__init__(**given)
        self.case, self.table = case, table

    def runtest(self) -> None:
        from fusion_patterns.testing.check import describe

        won = 0.0
        if self.case.row:
            row = next(row for row in self.table.patterns if row.name == self.case.row)
            known = describe(row, self.table)
            if known.impossible:
                raise _CaseFailedError(f"no instance: {known.impossible} [{known.where}]")
            won = known.won
        option = self.config.getoption
        held, vacuous, failure = self.case.run(option("--fusion-examples"), option("--fusion-seed"))
        note = {"row": self.case.row, "held": held, "vacuous": vacuous, "won": won, "name": self.case.name}
        self.user_properties.append((_NOTE, note))
        if failure is not None:
            raise _CaseFailedError(f"{failure.reason}\nexample: {failure.example}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The reason and the example alone."""
        if isinstance(excinfo.value, _CaseFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where the row is written."""
        return self.table.origin.file, None, self.name


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The coverage of each row."""
    if config.getoption("--fusion-table") is None:
        return
    reports = (report for status in ("passed", "failed") for report in terminalreporter.stats.get(status, ()))
    notes = [note for report in reports for key, note in report.user_properties if key == _NOTE]
    rows = list(dict.fromkeys(note["row"] for note in notes if note["row"]))
    if not notes:
        return
    terminalreporter.section(f"fusion table {config.getoption('--fusion-table')}")
    width = max(map(len, [*rows, "row"]))
    if rows:
        terminalreporter.write_line(
            f"{'row':<{width}}  instances taken  near misses declined  in the whole table"
        )
    for row in rows:
        held: Counter[str] = Counter()
        for note in notes:
            if note["row"] == row:
                held[note["name"].split(" ")[0]] += note["held"]
        won = max(note["won"] for note in notes if note["row"] == row)
        line = f"{row:<{width}}  {held['self-match']:>15}  {held['reason']:>20}  {won:>17.0%}"
        terminalreporter.write_line(line)
    for note in notes:
        if not note["row"]:
            said_nothing = f", {note['vacuous']} said nothing" if note["vacuous"] else ""
            terminalreporter.write_line(f"{note['name']:<24}{note['held']:>6} modules{said_nothing}")
