"""The commands that take a model: what they print, what they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm_ffi import structural_equal

from fusion_patterns import apply_patterns, cli, load_model, verification
from fusion_patterns.run import Device, load
from fusion_patterns.run.interpret import leaf_params
from fusion_patterns.verification import OutputCheck, VerifyReport

MODEL = """\
from tvm.script import ir as I, relax as R

print("models may print")

@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 3, 8, 8), "float32"), w: R.Tensor((8, 3, 3, 3), "float32")):
        with R.dataflow():
            c = R.nn.conv2d(x, w, padding=(1, 1))
            y = R.nn.relu(R.add(c, R.const([[[[1.0]]]], "float32")))
            R.output(y)
        return y
"""
BIND = ["--bind", "n=1"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def test_apply_prints_composites(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", model, *BIND]) == 0
    out, err = capsys.readouterr()
    assert out == "composites by row\n    1  conv2d.first\n"
    assert f"reading {model} ..." in err


@pytest.mark.parametrize("suffix", [".py", ".json"])
def test_what_apply_writes_reads_back(model: str, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"fused{suffix}"
    assert cli.main(["apply", model, *BIND, "-o", str(output)]) == 0
    assert structural_equal(load_model(output), apply_patterns(load_model(model, bind={"n": 1})))


def test_the_model_is_never_overwritten(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", model, "-o", model]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert Path(model).read_text() == MODEL


def test_json_is_one_document(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "fused.json"
    assert cli.main(["apply", model, *BIND, "-o", str(output), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"composites": {"conv2d.first": 1}, "output": str(output)}
    assert err == ""


def test_a_shape_by_name(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", model, "--shape", "x=2,3,8,8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["composites"] == {"conv2d.first": 1}
    assert cli.main(["apply", model, "--shape", "in/put:0=1,3,8,8"]) == 1
    assert "no input is called 'in/put:0'" in capsys.readouterr().err


def test_a_broken_target_is_said_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", model, "-o", "folder", "--target", "toaster"]) == 1
    err = capsys.readouterr().err
    assert "error: target 'toaster'" in err
    assert "reading" not in err


def test_build_refuses_a_folder_of_others(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", model, *BIND, "-o", str(tmp_path)]) == 1
    assert "not empty and not a saved module" in capsys.readouterr().err
    assert Path(model).exists()


def test_build_saves_what_it_reports(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "built"
    assert cli.main(["build", model, *BIND, "-o", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    manifest = load(folder)
    assert report["composites"] == manifest.meta["composites"] == {"conv2d.first": 1}
    assert report["output"] == str(folder)
    assert manifest.name == "model"


@pytest.mark.opencl
def test_run_takes_a_folder_or_a_model(
    model: str, tmp_path: Path, opencl_device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outputs = str(tmp_path / "built"), tmp_path / "out.npz"
    assert cli.main(["build", model, *BIND, "-o", folder]) == 0
    capsys.readouterr()
    seen = []
    for what, bind in ((folder, []), (model, BIND)):
        assert cli.main(["run", what, *bind, "--seed", "3", "--save", str(outputs), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["outputs"][0]["shape"] == [1, 8, 8, 8]
        assert report["device"]["name"] == opencl_device.info.name
        with np.load(outputs) as saved:
            seen.append(saved["output_0"])
    assert np.array_equal(*seen)
    assert cli.main(["run", folder, "--profile", "--repeats", "1"]) == 0
    assert "conv2d.first" in capsys.readouterr().out


@pytest.mark.opencl
@pytest.mark.usefixtures("opencl_device")
def test_verify(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", model, *BIND]) == 0
    out = capsys.readouterr().out
    assert "convolutions     1 of 1 inside a composite" in out
    assert "(stock FuseOps: " in out
    assert "\nverified: worst relative error " in out
    assert cli.main(["verify", model, *BIND, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["stock_launches"] == 1


@pytest.mark.opencl
@pytest.mark.usefixtures("opencl_device")
def test_verify_with_an_open_batch(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def spy(*given: Any, **named: Any) -> VerifyReport:
        seen.append(verification.verify(*given, **named))
        return seen[-1]

    monkeypatch.setattr("fusion_patterns.verify", spy, raising=False)
    assert cli.main(["verify", model, "--open", "n=3"]) == 0
    assert "\nverified: worst relative error " in capsys.readouterr().out
    (report,) = seen
    assert report.compiled is not None
    entry = report.compiled.manifest.functions["main"]
    assert leaf_params(entry)["x"].shape[0] == "n"


@pytest.mark.opencl
@pytest.mark.usefixtures("opencl_device")
def test_a_dimension_that_can_not_stay_open(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", model, "--open", "batch=3"]) == 1
    assert "no symbolic dimension is called 'batch'; it has 'n'" in capsys.readouterr().err
    assert cli.main(["verify", model, *BIND, "--open", "n=3"]) == 1
    assert "no symbolic dimension is called 'n'; it has none" in capsys.readouterr().err
    assert cli.main(["verify", model, "--open", "n=three"]) == 2
    assert "--open n=three: expected NAME=N" in capsys.readouterr().err


def test_wrong_numbers_are_exit_code_1(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = OutputCheck("output 0", float("inf"), 1e-4, finite=False, varies=True)
    report = VerifyReport("a device", [wrong], first_wrong="conv2d.chain `lv` (fused_conv2d_chain_0)")
    monkeypatch.setattr("fusion_patterns.run.pick_device", lambda spec: None)
    monkeypatch.setattr("fusion_patterns.verify", lambda *given, **named: report, raising=False)
    assert cli.main(["verify", model, *BIND]) == 1
    out = capsys.readouterr().out
    assert "NOT FINITE" in out
    assert "first wrong      conv2d.chain `lv`" in out
    assert "NOT VERIFIED" in out
    assert cli.main(["verify", model, *BIND, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["worst"] is None


def test_a_device_that_is_not_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", model, *BIND, "--device", "no such thing"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(("error: no OpenCL device", "error: pyopencl can't be imported"))
    assert err.count("\n") == 1
