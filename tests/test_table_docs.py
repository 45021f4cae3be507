"""docs/table-format.md: every example loads, every message is one that the tests provoke."""

from __future__ import annotations

import pathlib
import re
import textwrap

import pytest

from fusion_patterns.table import Predicate, Row, Table, load_table
from fusion_patterns.table.faults import field_names
from fusion_patterns.table.model import Fragment, Node

HERE = pathlib.Path(__file__).parent
TEXT = (HERE.parent / "docs" / "table-format.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def whole(block: str) -> str:
    """The example as a whole table: rows get a head, conditions get the row that the page gives them."""
    if block.startswith("- name:"):
        return "name: example\npatterns:\n" + textwrap.indent(block, "  ")
    if block.startswith("- {"):
        row = next(found for found in blocks("yaml") if found.startswith("- name: row\n"))
        return whole(row + "  where:\n" + textwrap.indent(block, "    "))
    return block


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.split("\n")[0])
def test_every_example_loads(block: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(whole(block))
    assert load_table(file).patterns


def test_every_message_is_real() -> None:
    tests = "".join((HERE / name).read_text() for name in ("test_table_faults.py", "test_table_reading.py"))
    # Long messages are written there as several texts in a row.
    tests = re.sub(r'"\s*"', "", tests)
    lines = [line for block in blocks("text") for line in block.splitlines()]
    assert len(lines) > 30
    missing = [
        line for line in lines if re.sub(r"^t\.yaml:(?=\d)", "", line).replace('"', '\\"') not in tests
    ]
    assert missing == []


@pytest.mark.parametrize("model", [Table, Row, Node, Fragment, Predicate])
def test_every_field_is_explained(model: type) -> None:
    examples = "\n".join(blocks("yaml"))
    assert [name for name in field_names(model) if not re.search(rf"\b{name}:", examples)] == []
