"""The command line without a model: help, usage errors, tables, and what is not imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fusion_patterns import cli
from fusion_patterns.cli_tables import draw
from fusion_patterns.cli_terminal import plain, write_whole
from fusion_patterns.table import Row, builtin_names, load_table

ROOT = Path(__file__).resolve().parent.parent


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("apply", "build", "run", "verify", "tables", "demo"))


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["build", "m.onnx"], 2, "Missing option '--output'"),
        (["apply", "m.onnx", "--shape", "x"], 2, "--shape x: expected NAME=1,3,640,640"),
        (["apply", "m.onnx", "--shape", "x=1,-3"], 2, "--shape x=1,-3: expected NAME=1,3,640,640"),
        (["apply", "m.onnx", "--bind", "n=many"], 2, "--bind n=many: expected NAME=N"),
        (["apply", "m.onnx", "-o", "m.txt"], 2, "the suffix must be .py or .json"),
        (["apply", "m.onnx", "-o", "nowhere/m.py"], 2, "there is no folder nowhere; make it first"),
        (["run", ".", "--table", "adreno"], 2, "--table is for a model; . is compiled already"),
        (["verify", "m.onnx", "--seed", "-1"], 2, "Invalid value for '--seed'"),
        (["verify", "missing.onnx"], 1, "missing.onnx: no such file"),
        (["verify", "m.onnx", "--table", "t.yaml"], 1, "m.onnx: no such file"),
        (["tables", "adrena"], 1, "did you mean 'adreno'?"),
        (["run", "."], 1, "manifest.json: not found; is . a folder that was saved as a module?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert message in said[0]


def test_every_fault_of_a_table_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.yaml"
    table.write_text("name: t\npatterns:\n  - name: r\n    nodes: {a: {op: addd}, b: {op: nn.rleu}}\n")
    assert cli.main(["tables", str(table)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {table}:4:") for line in lines)


def test_an_unforeseen_error_names_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> tuple[str, ...]:
        raise KeyError("lost\nand more")

    monkeypatch.setattr("fusion_patterns.table.builtin_names", fail)
    assert cli.main(["tables"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: KeyError: ")
    assert "FUSION_PATTERNS_TRACEBACK=1" in err
    assert err.count("\n") == 1
    monkeypatch.setenv("FUSION_PATTERNS_TRACEBACK", "1")
    assert cli.main(["tables"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tables"]) == 0
    out = capsys.readouterr().out
    for name in builtin_names():
        table = load_table(name)
        assert f"{name}: {len(table.patterns)} rows" in out
        assert all(f"{row.name}  [{row.origin}]\n  {draw(row)}\n" in out for row in table.patterns)


def test_tables_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tables", "adreno", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    row = table["rows"][0]
    assert row["name"] == "conv2d.chain"
    assert row["where"].startswith("patterns/adreno.yaml:")
    assert "conv: attr groups, equals 1" in row["conditions"]
    assert row["scopes"]["data"] == "texture"


@pytest.mark.parametrize(
    ("nodes", "drawn"),
    [
        (
            {
                "conv": {"op": "nn.conv2d", "in": ["data", "weight"]},
                "bias": {"op": "add", "in": ["conv", "bias_vector"], "optional": True},
                "tail": {"op": ["$unary", "add"], "repeat": {"min": 0, "max": 16}},
            },
            "nn.conv2d(data, weight) > add(_, bias_vector)? > $unary|add{0,16}",
        ),
        (
            {"gate": {"op": "sigmoid", "in": "x"}, "y": {"op": "multiply", "in": ["x", "gate"]}},
            "sigmoid(x) > multiply(x, _)",
        ),
        (
            {
                "a": {"op": "nn.conv2d", "in": ["x", "v"]},
                "b": {"op": "nn.conv2d", "in": ["y", "w"]},
                "sum": {"op": "add", "in": ["a", "b"]},
            },
            "a=nn.conv2d(x, v) > nn.conv2d(y, w) > add(a, _)",
        ),
    ],
)
def test_a_row_in_one_line(nodes: dict[str, object], drawn: str) -> None:
    assert draw(Row.model_validate({"name": "r", "nodes": nodes})) == drawn


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half \udc80")
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_numbers_that_json_lacks() -> None:
    assert plain({"a": [float("nan"), (1, float("inf"))], 2: True}) == {"a": [None, [1, None]], "2": True}


BARE = """
import sys
import zipfile
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi", "onnx", "torch"):
            raise ImportError(f"{name} is not wanted here")
sys.meta_path.insert(0, Wall())
from fusion_patterns.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Usage: fusion-patterns"),
        (["tables"], 0, "adreno"),
        (["run", "."], 1, "is . a folder that was saved"),
    ],
)
def test_tvm_is_not_imported(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BARE}", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_a_reader_that_leaves_is_no_fault() -> None:
    command = f"{sys.executable} -m fusion_patterns tables adreno | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("adreno: ")
    assert done.stderr == ""


@pytest.mark.slow
def test_the_wheel_is_whole(tmp_path: Path) -> None:
    for name in ("fusion_patterns", "patterns", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {path for path in (ROOT / "fusion_patterns").rglob("*") if path.is_file()}
    package = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    tables = {f"fusion_patterns/patterns/{path.name}" for path in (ROOT / "patterns").glob("*.*")}
    assert (package | tables) - held == set()
