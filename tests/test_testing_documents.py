"""Broken tables, models and folders, on a disk that may be full: a sentence each time, and never half a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusion_patterns import cli
from fusion_patterns.cli_terminal import write_whole
from fusion_patterns.errors import FusionPatternsError, TableError
from fusion_patterns.run import Bind, Function, Manifest, Param, load, save
from fusion_patterns.run import Tensor as RunTensor
from fusion_patterns.table import builtin_names, load_table
from fusion_patterns.table.reading import _FOLDER
from fusion_patterns.testing import build
from fusion_patterns.testing.draft import seeded
from fusion_patterns.testing.nets import draw_net

TEXT = (_FOLDER / "adreno.yaml").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
PATIENCE = 10.0
"""Seconds that a broken table may take."""
SMALL = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
WRONG = (
    "",
    "null",
    "[]",
    "{}",
    "1",
    "-1",
    "1e400",
    "true",
    "$nothing",
    "[[[]]]",
    "{a: {b: c}}",
    "'",
    "\t",
    "&a *a",
    "0x",
)

# Tables


@st.composite
def broken_tables(draw: st.DrawFn) -> str:
    """The built-in table with a few lines changed: gone, twice, cut off, moved, or with a wrong value."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(("gone", "twice", "cut", "moved", "value", "indent", "text")))
        line = lines[place]
        if how == "gone":
            del lines[place]
        elif how == "twice":
            lines.insert(place, line)
        elif how == "cut":
            lines[place] = line[: draw(st.integers(0, len(line)))]
        elif how == "moved":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(place))
        elif how == "value":
            key, _, _ = line.partition(":")
            lines[place] = f"{key}: {draw(st.sampled_from(WRONG))}"
        elif how == "indent":
            lines[place] = " " * draw(st.integers(0, 3)) + line
        else:
            lines[place] = draw(st.text(max_size=20))
    return "\n".join(lines)


def reads_or_says_where(folder: Path, text: str) -> None:
    """A table is read, or refused with the file's name, soon."""
    file = folder / "table.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    began, said = time.monotonic(), ""
    try:
        load_table(file)
    except TableError as error:
        said = str(error)
    assert all(line.startswith((str(file), " ")) or "more" in line for line in said.splitlines())
    assert time.monotonic() - began < PATIENCE


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(97 + n)}: &{chr(97 + n)} [{', '.join([f'*{chr(96 + n)}'] * 9)}]\n" for n in range(1, 20)
)
DEEP = "sets: " + "[" * 5000 + "]" * 5000
HUGE = TEXT.replace("repeat: 16", "repeat: 99999999999")
LONG = "schema_version: 1\nname: x\nsets: {a: [" + ", ".join(["add"] * 200_000) + "]}\n"
SELF = "schema_version: 1\nname: x\nsets: {a: [$b], b: [$a]}\npatterns: [{name: r, nodes: {n: {op: $a, in: x}}}]\n"


@SMALL
@given(text=st.one_of(broken_tables(), st.text(max_size=200)))
@example(text=BOMB)
@example(text=DEEP)
@example(text=HUGE)
@example(text=LONG)
@example(text=SELF)
@example(text="\ufeff")
@example(text="a: \x00")
@example(text="? [a, b]\n: c")
@example(text="!!python/object/apply:os.system ['true']")
def test_broken_tables(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    reads_or_says_where(tmp_path_factory.mktemp("table"), text)


def test_tables_that_extend_each_other(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"schema_version: 1\nname: {name}\nextends: {other}.yaml\n")
    with pytest.raises(TableError, match="extends"):
        load_table(tmp_path / "a.yaml")


# Models and folders: cut off, or with a byte changed


def model_json(folder: Path) -> bytes:
    return str(tvm.ir.save_json(build(draw_net(seeded(1))))).encode()


def model_onnx(folder: Path) -> bytes:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    weights = onnx.numpy_helper.from_array(np.ones((4, 3, 1, 1), "float32"), "w")
    nodes = [onnx.helper.make_node("Conv", ["x", "w"], ["c"]), onnx.helper.make_node("Relu", ["c"], ["y"])]
    shapes = [value("x", 1, [1, 3, 4, 4])], [value("y", 1, [1, 4, 4, 4])]
    graph = onnx.helper.make_graph(nodes, "g", *shapes, [weights])
    opset = [onnx.helper.make_opsetid("", 18)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opset).SerializeToString())


@pytest.mark.parametrize(("suffix", "make"), [(".json", model_json), (".onnx", model_onnx)])
def test_truncated_models(
    suffix: str, make: Callable[[Path], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make(tmp_path)
    for cut in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2):
        (tmp_path / f"cut{suffix}").write_bytes(whole[:cut])
        code = cli.main(["apply", str(tmp_path / f"cut{suffix}"), "-o", str(tmp_path / "fused.py")])
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert "not foreseen" not in err
        if code:
            assert "error: " in err
            assert not (tmp_path / "fused.py").exists()


def manifest() -> Manifest:
    tensor = RunTensor((2, 2), "float32", "global")
    function = Function("main", (Param("x", tensor),), (Bind("y", "x"),), "y")
    weights = {"w": np.arange(4, dtype="float32").reshape(2, 2)}
    return Manifest("m", "opencl", {"main": function}, {}, weights, {"w": tensor})


@SMALL
@given(data=st.data())
def test_damaged_folders(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run") / "module"
    save(manifest(), folder)
    file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(content))
    said, read = "", None
    try:
        read = load(folder)
    except FusionPatternsError as error:
        said = str(error)
    if read is not None:  # a byte of free text was changed
        assert read.functions.keys() == {"main"}
    else:
        assert str(folder) in said


# Disks


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tiny: Path) -> None:
    target = tiny / "fused.json"
    target.write_text("before")
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, "x" * 200_000)
    assert target.read_text() == "before"
    big = manifest()
    tensor = RunTensor((400, 400), "float32", "global")
    big.constants["v"] = np.random.default_rng(0).standard_normal((400, 400)).astype("float32")
    big.constant_tensors["v"] = tensor
    save(manifest(), tiny / "module")
    with pytest.raises(OSError, match="No space left"):
        save(big, tiny / "module")
    assert "v" not in load(tiny / "module").constants
    assert sorted(path.name for path in tiny.iterdir()) == ["fused.json", "module"]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """What a full disk does, for users who can't mount one."""
    code = (
        "import sys; from pathlib import Path; from fusion_patterns.cli_terminal import write_whole\n"
        "write_whole(Path(sys.argv[1]), 'x' * 100000)"
    )
    (tmp_path / "out").write_text("before")
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in found.stderr
    assert (tmp_path / "out").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["rename", "write_bytes", "write_text"])
def test_an_interrupted_write(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(manifest(), tmp_path / "module")
    before = load(tmp_path / "module")

    def interrupt(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(manifest(), tmp_path / "module")
    assert load(tmp_path / "module").functions == before.functions
    assert [path.name for path in tmp_path.iterdir()] == ["module"]


def _as_nobody(table: str, said: str) -> None:
    with open(said, "w", encoding="utf-8") as sys.stderr:
        if os.geteuid() == 0:
            os.seteuid(65534)
        code = cli.main(["tables", table])
    os._exit(code)


def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT)
    (tmp_path / "t.yaml").chmod(0)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_as_nobody, args=(str(tmp_path / "t.yaml"), str(tmp_path / "said")))
    child.start()
    child.join()
    said = (tmp_path / "said").read_text()
    assert child.exitcode == 1
    assert "permission denied" in said.lower()
    assert "Traceback" not in said


def test_a_folder_and_a_device_are_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, Path("/dev/null"), Path("/dev/zero")):
        assert cli.main(["tables", str(path)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert "not foreseen" not in err


def _save_often(folder: str) -> None:
    for _ in range(20):
        save(manifest(), folder)


def test_two_processes_write_one_folder(tmp_path: Path) -> None:
    """Whoever is last wins; what is there is whole, and nothing is left beside it."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_save_often, args=(str(tmp_path / "module"),)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert load(tmp_path / "module").functions == manifest().functions
    assert [path.name for path in tmp_path.iterdir()] == ["module"]


# The command line


@SMALL
@given(arguments=st.lists(st.sampled_from((
    "apply", "build", "run", "verify", "tables", "demo", "missing.onnx", ".", "-o", "--shape", "x=1,2", "--table",
    "adreno", "--bind", "n=1", "--seed", "-1", "--json", "--nonsense", "", "\udcff", "=", "--version", "-h",
)), max_size=6))  # fmt: skip
def test_any_arguments(arguments: list[str]) -> None:
    if "demo" in arguments:
        arguments = [*arguments, "--nonsense"]
    assert cli.main(arguments) in (0, 1, 2)


def test_the_tables_are_as_they_were() -> None:
    assert builtin_names() == tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
    assert json.loads((_FOLDER / "table.schema.json").read_text())
