"""The tuner on a real OpenCL device, end to end: times, numbers, the profile, and the command."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from modules import graph, nn, op, shape_of, var, weight

from fusion_patterns import cli, compile_module
from fusion_patterns.compiler import as_target, compile_kernels
from fusion_patterns.lower.schedule.tiles import Tile
from fusion_patterns.place.profiles import load_profile
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device
from fusion_patterns.run.replay import draw_inputs
from fusion_patterns.tune import LocalMeasurer, profile_text, tune, tuned_profile
from fusion_patterns.tune.measure import Built, DeviceLost, Kernel, Unfit, difference, draw, turns
from fusion_patterns.tune.tuner import tunable_kernels

pytestmark = pytest.mark.opencl


def conv(emit: Any, x: Any, out: int, kernel: int, **attrs: Any) -> Any:
    w = weight((out, shape_of(x)[1] // attrs.get("groups", 1), kernel, kernel), out)
    return emit(nn.conv2d(x, w, padding=kernel // 2, **attrs))


def network() -> Any:
    """A strided convolution and a depthwise one with a residual, between packing and unpacking."""

    def build(emit: Any, x: Any) -> Any:
        x = emit(nn.relu(conv(emit, x, 16, 3, strides=2)))
        return emit(nn.relu(emit(op.add(conv(emit, x, 16, 3, groups=16), x))))

    return graph(build, [var("x", (1, 8, 24, 24))])


def many_kinds() -> Any:
    """Every kind of packed kernel: also grouped and transposed, what keeps values in registers, and pools."""

    def build(emit: Any, x: Any) -> Any:
        x = emit(nn.silu(conv(emit, x, 16, 3)))
        y = emit(nn.gelu(conv(emit, x, 32, 1)))
        y = emit(nn.relu(conv(emit, y, 32, 3, groups=4)))
        x = emit(nn.relu(emit(op.add(conv(emit, y, 16, 1), x))))
        x = emit(op.concat([x, emit(nn.max_pool2d(x, pool_size=3, strides=1, padding=1))], axis=1))
        x = emit(nn.relu(emit(nn.conv2d_transpose(x, weight((32, 16, 2, 2)), strides=2))))
        x = emit(nn.relu(conv(emit, x, 16, 5, groups=16, strides=2)))
        return emit(op.mean(x, axis=[2, 3], keepdims=True))

    return graph(build, [var("x", (1, 8, 12, 12))])


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    fused, lowered = compile_kernels(network(), profile="pocl")
    return tunable_kernels(fused, lowered, as_target(), load_profile("pocl").tiles)[0]


def test_a_tuned_module_computes_the_same_numbers(opencl_device: Device, tmp_path: Path) -> None:
    report = tune(
        network(), LocalMeasurer(), profile="pocl", results=tmp_path / "r.sqlite", trials=4, repeats=2
    )
    assert len(report.kernels) == 3
    for one in report.kernels:
        assert not one.fault
        assert one.tried == 4
        assert 0 < one.best_us <= one.default_us
    assert report.device.startswith(opencl_device.info.name)
    path = tmp_path / "tuned.yaml"
    path.write_text(profile_text(tuned_profile(report)))
    compiled = compile_module(network(), profile=path)
    assert compiled.report.tuned == len(load_profile(path).tuned)
    assert compiled.report.tuned_left_aside == {}
    inputs = draw_inputs(compiled.manifest.functions["main"], 0, {})
    expected = Reference(network()).run(inputs)
    assert difference(expected, compiled.run(inputs)) is None


@pytest.mark.slow
def test_every_tile_computes_what_the_default_does(opencl_device: Device, tmp_path: Path) -> None:
    report = tune(
        many_kinds(), LocalMeasurer(), profile="pocl", results=tmp_path / "r.sqlite", trials=24, repeats=1
    )
    assert {one.label for one in report.kernels} >= {
        "layout.pack", "conv2d.chain", "conv2d.grouped", "conv2d_transpose.chain", "pool2d.chain"
    }  # fmt: skip
    assert {one.label: (one.fault, one.invalid) for one in report.kernels if one.fault or one.invalid} == {}


def test_a_tile_that_computes_something_else_is_unfit(opencl_device: Device, kernels: list[Kernel]) -> None:
    kernel = next(one for one in kernels if one.label == "conv2d.chain")
    launch = kernel.default.lowered.launches[0]
    assert "max(" in launch.source
    wrong = dataclasses.replace(launch, source=launch.source.replace("max(", "min("))
    lowered = dataclasses.replace(kernel.default.lowered, launches=(wrong,))
    with LocalMeasurer().bench(kernel) as bench:
        with pytest.raises(Unfit, match=r"wrong results: relative error \d\.\de[+-]\d\d, allowed 1e-04"):
            bench.compare(Built(Tile(1, 1, 1, (1, 1, 1)), lowered, None), 1)
        default_us, us = bench.compare(kernel.default, 3)
        assert 0 < default_us < 1e6
        assert 0 < us < 1e6


def test_a_tile_that_leaves_something_out_is_unfit(opencl_device: Device, kernels: list[Kernel]) -> None:
    kernel = next(one for one in kernels if one.label == "conv2d.chain")
    launch = kernel.default.lowered.launches[0]
    assert launch.grid != (1, 1, 1)
    part = dataclasses.replace(
        kernel.default.lowered, launches=(dataclasses.replace(launch, grid=(1, 1, 1)),)
    )
    with LocalMeasurer().bench(kernel) as bench:
        bench.compare(kernel.default, 1)  # its results must not be taken for the other's
        with pytest.raises(Unfit, match="wrong results: not finite in other places"):
            bench.compare(Built(Tile(1, 1, 1, (1, 1, 1)), part, None), 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "__kernel void default_kernel() { nonsense }"}, "does not compile on"),
        ({"block": (100_000, 1, 1)}, "INVALID_WORK_GROUP_SIZE"),
    ],
)
def test_a_tile_that_does_not_start_is_unfit(
    opencl_device: Device, kernels: list[Kernel], change: dict[str, Any], reason: str
) -> None:
    kernel = kernels[-1]
    launch = dataclasses.replace(kernel.default.lowered.launches[0], **change)
    broken = Built(
        Tile(1, 1, 1, (1, 1, 1)), dataclasses.replace(kernel.default.lowered, launches=(launch,)), None
    )
    with LocalMeasurer().bench(kernel) as bench:
        with pytest.raises(Unfit, match=reason):
            bench.compare(broken, 1)
        assert bench.compare(kernel.default, 1)[1] > 0
    nowhere = dataclasses.replace(kernel, default=broken)
    with LocalMeasurer().bench(nowhere) as bench, pytest.raises(DeviceLost, match=reason):
        bench.compare(kernel.default, 1)


# What needs no device ---------------------------------------------------------------------------------------


def test_inputs_are_always_the_same_and_sums_keep_their_size(kernels: list[Kernel]) -> None:
    kernel = next(one for one in kernels if len(one.params[1].shape) == 6)
    data, weights, *_ = draw(kernel)
    assert [a.shape for a in draw(kernel)] == [tensor.shape for tensor in kernel.params[: kernel.inputs]]
    assert np.array_equal(data, draw(kernel)[0])
    assert 0.9 < data.std() < 1.1
    fan_in = np.prod(weights.shape[1:5])
    assert 0.9 < weights.std() * fan_in**0.5 < 1.1


@pytest.mark.parametrize(
    ("expected", "got", "said"),
    [
        ([1.0, -2.0], [1.0001, -2.0], None),
        ([1.0, -2.0], [1.001, -2.0], "wrong results: relative error 5.0e-04, allowed 1e-04"),
        ([1.0, np.inf], [1.0, np.inf], None),
        ([1.0, np.inf], [1.0, 7.0], "wrong results: not finite in other places"),
        ([np.nan, np.nan], [np.nan, np.nan], "the profile's tile computes nothing finite to compare with"),
    ],
)
def test_results_differ_by_more_than_the_tolerance_or_not(
    expected: list[float], got: list[float], said: str | None
) -> None:
    arrays = [np.array(expected, np.float32)], [np.array(got, np.float32)]
    assert difference(*arrays) == said


def test_each_goes_first_in_turn() -> None:
    assert list(turns(5)) == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.json"
    path.write_text(tvm.ir.save_json(network()))
    return path


def test_the_command_writes_a_profile_that_builds(
    opencl_device: Device, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, results = tmp_path / "mine.yaml", tmp_path / "r.sqlite"
    words = ["tune", str(model), "--profile", "pocl", "--trials", "3", "--repeats", "2"]
    words += ["--out", str(out), "--results", str(results)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "kernel 1 of 3, layout.pack" in said.err
    assert f"profile written to {out}, results kept in {results}" in said.out
    assert "one run: " in said.out
    assert load_profile(out).name == "pocl-tuned"

    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["output"] == str(out)
    assert data["waiting"] == 0
    assert data["best_us"] <= data["default_us"]
    assert {"key", "label", "calls", "default_us", "best_us", "best"} <= set(data["kernels"][0])

    assert cli.main(["build", str(model), "--profile", str(out), "-o", str(tmp_path / "built")]) == 0
    tuned = len(load_profile(out).tuned)
    assert (f"measured tiles   {tuned} used, 0 left aside" in capsys.readouterr().out) == bool(tuned)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--out", "x.txt"], 2, "--out x.txt: the suffix must be .yaml"),
        (["--out", "nowhere/x.yaml"], 2, "--out nowhere/x.yaml: there is no folder nowhere; make it first"),
        (["--rpc-key", "phone"], 2, "--rpc-tracker and --rpc-key go together"),
        (
            ["--rpc-key", "p", "--rpc-tracker", "h:1", "--device", "d"],
            2,
            "--device is for a device of this machine",
        ),
        (["--rpc-key", "p", "--rpc-tracker", "nonsense"], 1, "RPC tracker 'nonsense': expected host:port"),
        (["--trials", "0"], 2, "Invalid value for '--trials'"),
        (["--profile", "nosuch"], 1, "no device profile is called 'nosuch'"),
        (["--device", "nosuch"], 1, "no OpenCL device fits 'nosuch'"),
        (["--results", "net.json"], 1, "net.json: can't be used for results (file is not a database)"),
    ],
)
def test_what_the_command_refuses(
    opencl_device: Device,
    model: Path,
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model.parent)
    before = model.read_bytes()
    assert cli.main(["tune", "net.json", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert model.read_bytes() == before
    assert not (model.parent / "net-tuned.yaml").exists()


def test_ctrl_c_keeps_what_was_measured(opencl_device: Device, model: Path, tmp_path: Path) -> None:
    out, results = tmp_path / "mine.yaml", tmp_path / "r.sqlite"
    words = ["tune", str(model), "--profile", "pocl", "--trials", "200", "--repeats", "2"]
    words += ["--out", str(out), "--results", str(results)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fusion_patterns", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if " of 200 tiles, best " in line:
            process.send_signal(signal.SIGINT)
            break
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped early: " in printed
    assert "Traceback" not in error
    assert load_profile(out).sources[-1].startswith("tuned: ")
    import sqlite3

    with sqlite3.connect(results) as file:
        assert file.execute("SELECT count(*) FROM result").fetchone()[0] > 1
