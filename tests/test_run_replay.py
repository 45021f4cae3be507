"""The command line of `fusion_patterns.run`, and the room's promise: NumPy and pyopencl, nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fusion_patterns.errors
import fusion_patterns.run
from fusion_patterns.errors import DeviceError
from fusion_patterns.run import (
    Alloc,
    Function,
    Kernel,
    Launch,
    Manifest,
    Param,
    Scalar,
    Tensor,
    pick_device,
    save,
)
from fusion_patterns.run.replay import draw_inputs, main, summary

N = Tensor(("n",), "float32")
SCALE = Kernel(
    "scale",
    "__kernel void scale(__global float* y, __global const float* x, float by) {\n"
    "  y[get_global_id(0)] = x[get_global_id(0)] * by; }\n",
    ("buffer", "buffer", "scalar:float32"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    launch = Launch("scale", ("y", "x", Scalar(2.0, "float32")), ("n", 1, 1), (1, 1, 1), "scale.row")
    function = Function("main", (Param("x", N),), (Alloc("y", N), launch), "y")
    save(Manifest("net", "opencl", {"main": function}, {"scale": SCALE}), tmp_path / "net")
    return tmp_path / "net"


@pytest.fixture
def usable() -> None:
    try:
        pick_device()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.opencl
@pytest.mark.usefixtures("usable")
def test_replay(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([1, 2, 6], np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    arguments = [
        str(folder),
        "--inputs",
        str(tmp_path / "x.npz"),
        "--save",
        str(tmp_path / "out"),
        "--profile",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "output 0: float32 (3,)  min 2  max 12  mean 6" in text
    assert "scale.row" in text
    assert "1 launches" in text
    with np.load(tmp_path / "out") as saved:
        assert np.array_equal(saved["output_0"], 2 * x)

    assert main([*arguments, "--json", "--repeats", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outputs"] == [
        {"shape": [3], "dtype": "float32", "min": 2.0, "max": 12.0, "mean": 6.0, "not_finite": 0}
    ]
    assert [(k["name"], k["count"]) for k in report["kernels"]] == [("scale", 1)]


@pytest.mark.opencl
@pytest.mark.usefixtures("usable")
def test_random_inputs_repeat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for seed in ("0", "0", "1"):
        assert main([str(folder), "--dim", "n=50", "--seed", seed, "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out)["outputs"])
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"parameter x ('n',): n is open; pass --dim n=N"),
        (("--dim", "n"), "--dim n: expected NAME=N"),
        (("--function", "other"), "no function 'other'; use main"),
        (("--inputs", "missing.npz"), "missing.npz"),
        (("--inputs", __file__), "not an .npz file of arrays"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--dim", "n=2", "--device", "no such device"), "no OpenCL device"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main([str(folder), *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_drawn_inputs_have_the_right_types() -> None:
    dtypes = ("float32", "float16", "int64", "bool", "bfloat16")
    params = (
        Param("t", tuple(Tensor(("n", 2), dtype) for dtype in dtypes)),
        Param("s", Tensor((), "float32")),
    )
    drawn = draw_inputs(Function("main", params, (), "t"), 0, {"n": 3})
    assert [a.dtype.name for a in drawn.values()] == [
        "float32",
        "float16",
        "int64",
        "bool",
        "uint16",
        "float32",
    ]
    assert {a.shape for a in drawn.values()} == {(3, 2), ()}


def test_summary_of_odd_outputs() -> None:
    assert summary(np.array([np.nan, 1, np.inf]))["not_finite"] == 2
    assert summary(np.zeros((0, 2), np.int64))["mean"] is None


BARE = """
import sys
hidden = {"tvm", "tvm_ffi", "pydantic", "ruamel", "networkx", "typer", "rich", "ml_dtypes"}
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Wall())
from fusion_patterns.run.replay import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.opencl
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "installed"])
def test_it_runs_where_only_numpy_and_pyopencl_are(folder: Path, tmp_path: Path, copied: bool) -> None:
    package = Path(fusion_patterns.errors.__file__).parent
    root = package.parent
    if copied:  # as one would carry it to a device: this room, the errors, and an empty face
        root = tmp_path / "device"
        shutil.copytree(package / "run", root / "fusion_patterns" / "run")
        shutil.copy(package / "errors.py", root / "fusion_patterns")
        (root / "fusion_patterns" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(folder), "--dim", "n=3", "--json"],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["outputs"][0]["shape"] == [3]


def test_the_module_is_a_command(tmp_path: Path) -> None:
    root = Path(fusion_patterns.errors.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "fusion_patterns.run", "nowhere"],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: nowhere/manifest.json: not found")
