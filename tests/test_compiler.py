"""The whole way as a user walks it: apply_patterns, passes, pipelines, compile_module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from modules import const, draw, graph, nn, relative_error, var, weight
from tvm import relax
from tvm.relax import op

import fusion_patterns
from fusion_patterns import (
    ApplyPatterns,
    apply_patterns,
    compile_module,
    load_table,
    pipeline,
    plan_fusion,
)
from fusion_patterns.compiler import as_target
from fusion_patterns.errors import BuildError, DeviceError, TableError
from fusion_patterns.lower.schedule import PackedKernel
from fusion_patterns.place import load_profile
from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.decide import composites_of, decide
from fusion_patterns.place.needs import needs_of
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session, load
from fusion_patterns.verification import verify
from fusion_patterns.vm import has_runtime

X = (1, 8, 8, 8)
W = (8, 8, 3, 3)


def network() -> tvm.IRModule:
    """conv + bias + relu, depthwise + clip, conv + residual, softmax."""

    def build(emit: Any, x: Any) -> Any:
        a = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, weight(W), padding=[1, 1])), const((1, 8, 1, 1), 1)))))
        d = emit(nn.conv2d(a, weight((8, 1, 3, 3), 2), padding=[1, 1], groups=8))
        d = emit(op.clip(d, 0.0, 6.0))
        c = emit(op.add(emit(nn.conv2d(d, weight(W, 3), padding=[1, 1])), a))
        return emit(nn.softmax(c, axis=1))

    return graph(build, [var("x", X)])


def opencl(mod: Any) -> str:
    """OpenCL C of a built module and of what it imports."""
    text = str(mod.inspect_source()) if mod.kind == "opencl" else ""
    return text + "".join(opencl(part) for part in mod.imports)


# apply_patterns ---------------------------------------------------------------------------------------------


def test_apply_patterns_is_pure() -> None:
    mod = network()
    before = tvm.ir.save_json(mod)
    fused = apply_patterns(mod)
    assert tvm.ir.save_json(mod) == before
    assert sorted(str(f.attrs["Composite"]) for f in composites_of(fused).values()) == [
        "conv2d.chain",
        "conv2d.chain",
        "conv2d.depthwise",
    ]
    relax.analysis.well_formed(fused)


def test_a_composite_says_where_its_inputs_live() -> None:
    (func,) = [
        f for f in composites_of(apply_patterns(network())).values() if "depthwise" in f.attrs["Composite"]
    ]
    scopes = {str(name): str(scope) for name, scope in func.attrs["fusion_patterns.scopes"].items()}
    assert scopes["output"] == "texture"
    assert sorted(scopes.values()) == ["global", "texture", "texture"]  # weight; data, output
    (row,) = [row for row in load_table().patterns if row.name == "conv2d.depthwise"]
    assert str(func.attrs["fusion_patterns.origin"]) == str(row.origin)
    assert str(func.attrs["fusion_patterns.kernel"]) == row.kernel


def test_the_pass_does_what_the_function_does() -> None:
    mod = network()
    run = tvm.transform.Sequential([relax.transform.ConvertToDataflow(), ApplyPatterns()])
    tvm.ir.assert_structural_equal(run(mod), apply_patterns(mod))


def test_the_plan_is_what_apply_patterns_does() -> None:
    plan = plan_fusion(network())
    assert sorted(match.composite for match in plan.matches) == sorted(
        composites_of(apply_patterns(network()))
    )


@pytest.mark.parametrize("call", [apply_patterns, plan_fusion, ApplyPatterns, pipeline])
def test_a_table_that_is_not_there(call: Any) -> None:
    arguments = () if call in (ApplyPatterns, pipeline) else (network(),)
    with pytest.raises(TableError, match=r"missing\.yaml"):
        call(*arguments, "missing.yaml")


def test_a_target_that_tvm_does_not_know() -> None:
    with pytest.raises(BuildError, match=r"^target 'qcom/nothing': .*; try qcom/adreno-opencl-texture$"):
        compile_module(network(), "qcom/nothing")


def test_the_current_target_is_taken() -> None:
    with tvm.target.Target({"kind": "opencl"}, host={"kind": "llvm"}):
        assert "texture" not in as_target().keys
    assert "texture" in as_target().keys


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fusion_patterns' has no attribute 'nothing'$"):
        _ = fusion_patterns.nothing


# relax.build ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executable() -> Any:
    mod = network()
    before = tvm.ir.save_json(mod)
    built = relax.build(mod, as_target(), relax_pipeline=pipeline())
    assert tvm.ir.save_json(mod) == before
    return built


def test_relax_build_makes_texture_kernels(executable: Any) -> None:
    source = opencl(executable.mod)
    assert source.count("= as_float4(READ_IMAGEF(") >= 3
    assert source.count("write_imagef(") >= 3


def test_the_pipelines_kernels_are_those_of_compile_module(executable: Any) -> None:
    source = opencl(executable.mod)
    names = [kernel for kernel in compile_module(network()).kernels if kernel.startswith("fused_")]
    assert names
    assert all(f"__kernel void {name}" in source for name in names)


@pytest.mark.skipif(not tvm.opencl(0).exist, reason="this TVM was built without its OpenCL runtime")
def test_tvms_own_runtime_runs_it(executable: Any) -> None:
    devices = [tvm.opencl(0)] * 2
    inputs = draw(network())
    result = relax.VirtualMachine(executable, devices)["main"](tvm.runtime.tensor(inputs["x"], tvm.opencl(0)))
    assert relative_error(result.numpy(), Reference(network()).run(inputs)[0]) < 1e-5


# compile_module ---------------------------------------------------------------------------------------------

KEYS = [
    "composites",
    "convs",
    "launches",
    "conversions",
    "copies",
    "texture_values",
    "global_values",
    "texture_bytes",
    "global_bytes",
    "declined",
    "compile_seconds",
]


def test_the_report_has_the_promised_keys() -> None:
    report = compile_module(network()).report.to_dict()
    assert [key for key in KEYS if key not in report] == []
    assert report["composites"] == {"conv2d.chain": 2, "conv2d.depthwise": 1}
    assert report["convs"] == {"total": 3, "covered": 3}
    assert report["launches"] == 5  # three composites, a conversion, softmax
    assert (report["conversions"], report["copies"]) == (1, 0)
    assert report["texture_values"] == 3
    assert report["texture_bytes"] == 3 * 8 * 8 * 8 * 4
    json.dumps(report)


def test_progress_names_each_stage_as_it_begins() -> None:
    stages: list[str] = []
    compiled = compile_module(network(), progress=stages.append)
    assert stages == list(compiled.report.compile_seconds)
    assert all(seconds >= 0 for seconds in compiled.report.compile_seconds.values())


def test_kernels_are_opencl_c_by_name() -> None:
    kernels = compile_module(network()).kernels
    assert len(kernels) >= 5
    assert all(f"__kernel void {name}(" in source for name, source in kernels.items())


@pytest.mark.opencl
def test_run_and_save(opencl_device: Device, tmp_path: Path) -> None:
    mod = network()
    compiled = compile_module(mod)
    inputs = draw(mod)
    by_name = compiled.run(inputs, opencl_device.info.index)
    in_order = compiled.run(list(inputs.values()), opencl_device.info.index)
    assert len(by_name) == 1
    assert relative_error(by_name[0], Reference(mod).run(inputs)[0]) < 1e-5
    assert np.array_equal(by_name[0], in_order[0])
    compiled.save(tmp_path / "saved")
    again = Session(load(tmp_path / "saved"), opencl_device).run(inputs)
    assert np.array_equal(by_name[0], again[0])


# Falling back -----------------------------------------------------------------------------------------------


def refuse_depthwise(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = PackedKernel.apply

    def apply(self: PackedKernel, func: Any, target: Any, tunable: bool) -> Any:
        if func.attrs and str(func.attrs.get("fusion_patterns.row", "")) == "conv2d.depthwise":
            raise RuntimeError("ScheduleError: no loop to bind")
        return stock(self, func, target, tunable)

    monkeypatch.setattr(PackedKernel, "apply", apply)


@pytest.mark.opencl
def test_a_composite_whose_kernel_fails_goes_and_the_build_goes_on(
    monkeypatch: pytest.MonkeyPatch, opencl_device: Device
) -> None:
    refuse_depthwise(monkeypatch)
    mod = network()
    compiled = compile_module(mod)
    assert compiled.report.composites.get("conv2d.depthwise") is None
    assert compiled.report.convs == {"total": 3, "covered": 2}
    # its operators are tried in another way, which fails as well
    ways = [d for d in compiled.report.declined if d.row == "conv2d.depthwise"]
    assert len(ways) == 2
    assert all("no loop to bind" in way.reason and "adreno.yaml:" in way.where for way in ways)
    inputs = draw(mod)
    result = compiled.run(inputs, opencl_device.info.index)
    assert relative_error(result[0], Reference(mod).run(inputs)[0]) < 1e-5


def test_a_composite_that_can_not_be_packed_goes_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(func: Any) -> Any:
        if "depthwise" in str(func.attrs["Composite"]):
            raise NotPacked("no packed kernel today", "the culprit")
        return needs_of(func)

    monkeypatch.setattr(sys.modules[decide.__module__], "needs_of", refuse)
    report = compile_module(network()).report
    found = [(d.value, d.reason) for d in report.declined if d.row == "conv2d.depthwise"]
    assert found == [("the culprit", "no packed kernel today")]
    assert report.composites == {"conv2d.chain": 2}


@pytest.mark.opencl
def test_a_prologue_that_can_not_be_packed_leaves_its_convolution_to_another_row(
    opencl_device: Device,
) -> None:
    def build(emit: Any, x: Any) -> Any:
        # Rows, and what they are of is read twice, so `conv2d.prologue` wants it.
        part = emit(op.strided_slice(x, axes=[2], begin=[2], end=[8]))
        left = emit(nn.conv2d(part, weight((8, 8, 1, 1))))
        return [left, emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 1, 1), 1)))))]

    report = verify(graph(build, [var("x", X)]), device=opencl_device.info.index)
    assert report.ok
    made = report.compiled.report
    assert made.convs == {"total": 2, "covered": 2}
    (declined,) = [d for d in made.declined if d.row == "conv2d.prologue"]
    assert declined.reason == "only a slice of consecutive channels has a packed kernel"
    assert made.composites["conv2d.chain"] == 2


# Determinism ------------------------------------------------------------------------------------------------

HASH = """
import json, sys
sys.path.insert(0, {tests!r})
from test_compiler import network
from fusion_patterns import compile_module

compiled = compile_module(network())
compiled.save({folder!r})
"""


def test_the_same_kernels_and_manifest_under_any_hash_seed(tmp_path: Path) -> None:
    saved = []
    for seed in ("0", "4711"):
        folder = tmp_path / seed
        script = HASH.format(tests=str(Path(__file__).parent), folder=str(folder))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        manifest = json.loads(files.pop("manifest.json"))
        del manifest["meta"]["compile_seconds"]
        saved.append((manifest, files))
    assert len(saved[0][1]) > 3
    assert saved[0] == saved[1]


@pytest.mark.opencl
def test_pooling_to_unequal_windows_is_bound_by_the_last_resort(opencl_device: Device) -> None:
    mod = graph(lambda emit, x: emit(op.nn.adaptive_avg_pool2d(x, [5, 3])), [var("x", (1, 8, 13, 14))])
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok
    assert report.compiled.report.composites == {}
    assert report.compiled.report.launches == 2


def test_tvms_own_runtime_is_refused_with_a_sentence_where_there_is_none() -> None:
    if has_runtime():
        pytest.skip("TVM has an OpenCL runtime here")
    mod = graph(lambda emit, x: emit(nn.relu(x)), [var("x", (1, 4, 2, 2))])
    with pytest.raises(DeviceError, match="TVM has no OpenCL runtime here"):
        compile_module(mod).run([np.zeros((1, 4, 2, 2), "float32")], device="tvm")


@pytest.mark.parametrize("profile", ["adreno", "nvidia-opencl", "pocl", "generic"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_every_profile_has_a_tile_for_every_size(profile: str, kernel: int) -> None:
    """Sizes of real networks, with an epilogue that reads the sum once and one that reads it often."""
    sizes = [7, 10, 13, 14, 20, 28, 40, 56]
    variables = [
        var(f"x{size}_{channels}", (1, channels, size, size)) for size in sizes for channels in (64, 130)
    ]

    def network_of(emit: Any, *inputs: Any) -> list[Any]:
        results = []
        for x in inputs:
            channels = int(x.ty.shape[1])
            sum_of = emit(nn.conv2d(x, weight((256, channels, kernel, kernel)), padding=[kernel // 2] * 2))
            results.append(emit(nn.relu(sum_of)))
            other = emit(nn.conv2d(x, weight((36, channels, kernel, kernel)), padding=[kernel // 2] * 2))
            gated = emit(op.multiply(other, emit(op.sigmoid(other))))
            results.append(emit(op.multiply(gated, emit(op.sigmoid(gated)))))
        return results

    report = compile_module(graph(network_of, variables), profile=profile).report
    assert report.convs == {"total": 32, "covered": 32}


def test_relax_build_takes_the_schedules_that_were_checked() -> None:
    """Epilogues that can't be vectorized, windows of unequal size, and names that C does not know."""

    def build(emit: Any, x: Any) -> Any:
        gelu = emit(nn.gelu(emit(nn.conv2d(x, weight(W), padding=[1, 1]))))
        return emit(nn.adaptive_avg_pool1d(emit(op.reshape(gelu, (1, 8, 64))), [5]))

    mod = graph(build, [var("gpu_0/data:0", X)])
    built = relax.build(mod, as_target(), relax_pipeline=pipeline())
    source = opencl(built.mod)
    profile = load_profile("adreno")
    # TVM prints the vectors of its own build
    profile = profile.model_copy(update={"tiles": profile.tiles.model_copy(update={"aligned": False})})
    kernels = compile_module(mod, profile=profile).kernels
    assert len(kernels) == 4
    for kernel in kernels.values():
        assert kernel[kernel.rindex("__kernel") :].strip() in source
