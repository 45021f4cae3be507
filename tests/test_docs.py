"""The pages tell the truth: their Python runs, what it prints is what they say, and what they name exists.

``python tests/test_docs.py`` writes docs/command-line.md anew from the commands themselves.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fusion_patterns import cli
from fusion_patterns.cli_tables import draw
from fusion_patterns.run import Device
from fusion_patterns.table import load_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)( opencl)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND_LINE = ROOT / "docs" / "command-line.md"
FOLLOWS = re.compile(r"\n*```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[bool, int, str, str | None]]:
    """``(needs a device, line, code, the text block right after it or None)`` of a page's blocks."""
    text = page.read_text()
    found = []
    for block in BLOCK.finditer(text):
        if block[1] == language:
            said = FOLLOWS.match(text, block.end())
            line = text.count("\n", 0, block.start(3))
            found.append((bool(block[2]), line, block[3], said[1] if said else None))
    return found


def run(page: Path, *, device: bool) -> None:
    """Run a page's Python from top to bottom in one namespace; with or without what needs a device."""
    space: dict[str, Any] = {}
    for needs_device, line, code, said in blocks(page, "python"):
        if needs_device and not device:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(page), "exec"), space)
        if said is not None:
            assert printed.getvalue() == said, f"{page.name}:{line}"


def pages(*, device: bool) -> Iterator[Any]:
    for page in PAGES:
        if any(needs_device or not device for needs_device, *_ in blocks(page, "python")):
            yield pytest.param(page, id=page.stem)


@pytest.mark.parametrize("page", list(pages(device=False)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, device=False)


@pytest.mark.opencl
@pytest.mark.parametrize("page", list(pages(device=True)))
def test_examples_run_on_a_device(
    page: Path, opencl_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, device=True)


def commands() -> dict[str, Any]:
    """Name -> command, in the order of ``--help``."""
    return dict(typer.main.get_command(cli.app).commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path) -> None:
    lines = [line for _, _, code, _ in blocks(page, "console") for line in code.splitlines()]
    for line in lines:
        if not line.startswith("$ fusion-patterns "):
            continue
        name, *words = shlex.split(line.removeprefix("$ fusion-patterns "), comments=True)
        options = {option for param in commands()[name].params for option in param.opts}
        assert [word for word in words if word.startswith("-") and word not in options] == []


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.usefixtures("opencl_device")
def test_the_readmes_figures_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(code for _, _, code, _ in blocks(ROOT / "README.md", "console") if "verify light" in code)
    command, *lines = shown.split("\n$ ")[0].splitlines()
    assert cli.main(shlex.split(command)[2:]) == 0
    out = capsys.readouterr().out.splitlines()
    varies = ("compile seconds", "declined", "device", "output", "verified", "     ")
    assert [line for line in lines if not line.startswith(varies) and line not in out] == []


def test_the_readmes_table_loads_and_is_drawn_as_it_says(tmp_path: Path) -> None:
    ((_, _, code, _),) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "mine.yaml").write_text(code)
    row = load_table(tmp_path / "mine.yaml").patterns[-1]
    assert f"\n{row.name}\n  {draw(row)}\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_tests_and_names_that_the_faults_page_cites_exist() -> None:
    text = (ROOT / "docs" / "tvm-faults.md").read_text()
    cited = re.findall(r"`(test_\w+)`", text)
    there = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert len(cited) > 10
    assert [name for name in cited if f"def {name}(" not in there] == []


def test_rooms_import_only_rooms_below_them() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page.partition("## Rooms")[2].partition("\n## ")[0]
    rooms = [
        set(re.findall(r"`(\w+)/?`", cell)) for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    ]
    package = ROOT / "fusion_patterns"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert set().union(*rooms) - there == set()
    for height, room in enumerate(rooms):
        files = [file for name in room for file in (package / name).glob("*.py")]
        files += [package / f"{name}.py" for name in room if (package / f"{name}.py").exists()]
        higher = set().union(*rooms[height + 1 :])
        assert {name for file in files for name in imported(file)} & higher == set(), sorted(room)


def imported(file: Path) -> Iterator[str]:
    """The rooms that a module imports, inside functions too."""
    depth = len(file.relative_to(ROOT / "fusion_patterns").parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            path = (node.module or "").split(".") if node.module else []
            names = [[*path, alias.name] for alias in node.names]
            if node.level:
                names = [["fusion_patterns", *name] for name in names] if node.level == depth else []
        else:
            continue
        yield from (name[1] for name in names if name[0] == "fusion_patterns" and len(name) > 1)


def test_the_command_line_page_is_in_step() -> None:
    assert COMMAND_LINE.read_text() == command_line_page(), "run python tests/test_docs.py"


MARK = "<!-- from here on made by tests/test_docs.py -->\n\n"


def command_line_page() -> str:
    """The page: its text as it is, then a section for each command made from the command itself."""
    lines = [COMMAND_LINE.read_text().partition(MARK)[0] + MARK.rstrip("\n"), ""]
    for name, command in commands().items():
        usage = " ".join(param.metavar for param in command.params if param.param_type_name == "argument")
        lines += [f"## {name}", "", f"`fusion-patterns {name} {usage}".rstrip() + "`", "", command.help, ""]
        lines += ["| | |", "| --- | --- |"]
        for param in command.params:
            shown = ", ".join(param.opts) if param.param_type_name == "option" else ""
            shown = " ".join(part for part in (shown, param.metavar) if part).replace("|", "\\|")
            given = param.default is not None and param.default is not False
            default = f" Default: {param.default}." if given else ""
            lines.append(f"| `{shown}` | {param.help}{default} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line_page())
