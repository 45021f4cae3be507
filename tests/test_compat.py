"""TVM's versions and faults: each repair is shown to be needed by stock TVM, and to work.

A test here that fails because the fault is gone says that the repair can go.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tvm
from modules import build, conv_chain, draw, graph, texture_target, var, weight
from tvm import relax, tirx
from tvm.s_tir import dlight
from tvm_ffi import structural_walk

from fusion_patterns import tvm_compat
from fusion_patterns.compiler import as_target, compile_module
from fusion_patterns.errors import VersionError
from fusion_patterns.lower.build import build_manifest
from fusion_patterns.lower.kernels import HOST_PACKAGING, _codegen
from fusion_patterns.lower.schedule import PackedKernel
from fusion_patterns.lower.stages import lower
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session


def python(script: str) -> str:
    """What a script prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Versions ---------------------------------------------------------------------------------------------------

WITHOUT_TVM = """
import importlib.metadata as metadata
import sys

class NoTvm:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi"):
            raise SystemExit(f"{{name}} was imported")

installed = metadata.version
sys.meta_path.insert(0, NoTvm())
metadata.version = lambda name: {versions}.get(name) or installed(name)
import fusion_patterns
try:
    fusion_patterns.{name}
except fusion_patterns.errors.FusionPatternsError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("name", ["compile_module", "apply_patterns", "load_model", "verify"])
def test_an_ffi_that_crashes_is_refused_before_tvm_is_imported(name: str) -> None:
    assert python(WITHOUT_TVM.format(versions={"apache-tvm-ffi": "0.1.15"}, name=name)) == (
        "VersionError apache-tvm-ffi 0.1.15 was never tried with this package (wanted: >=0.1.14, <0.1.15); "
        "run `pip install 'apache-tvm-ffi>=0.1.14,<0.1.15'`"
    )


def test_another_tvm_is_refused_before_it_is_imported() -> None:
    assert python(WITHOUT_TVM.format(versions={"apache-tvm": "0.28.0"}, name="compile_module")) == (
        "VersionError apache-tvm 0.28.0 was never tried with this package (wanted: >=0.27, <0.28); "
        "run `pip install 'apache-tvm==0.27.*'`"
    )


def refuse(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Check made-up versions; a package that is left out has the one that is installed."""
    installed = tvm_compat.metadata.version
    monkeypatch.setattr(
        tvm_compat.metadata, "version", lambda name: versions.get(name.replace("-", "_")) or installed(name)
    )
    tvm_compat.check_versions.__wrapped__()


@pytest.mark.parametrize("version", ["0.1.14", "0.1.14.post1", "0.1.14.9"])
def test_a_good_ffi(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    refuse(monkeypatch, apache_tvm_ffi=version)


@pytest.mark.parametrize("version", ["0.1.13", "0.1.15", "0.1.15.post2", "0.1.15rc1", "0.2.0", "1.0"])
def test_a_bad_ffi(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    with pytest.raises(VersionError, match=rf"^apache-tvm-ffi {re.escape(version)} was never tried"):
        refuse(monkeypatch, apache_tvm_ffi=version)


@pytest.mark.parametrize("version", ["0.26.0", "0.25.0.post1", "0.28.0", "0.28.dev3", "1.0"])
def test_a_bad_tvm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    with pytest.raises(VersionError, match=rf"^apache-tvm {re.escape(version)} was never tried"):
        refuse(monkeypatch, apache_tvm=version)


def test_tvm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise tvm_compat.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tvm_compat.metadata, "version", missing)
    with pytest.raises(VersionError, match=r"^apache-tvm is not installed; run `pip install 'apache-tvm==0"):
        tvm_compat.check_versions.__wrapped__()


# The TIR pipeline -------------------------------------------------------------------------------------------

BUILD = """
import tvm
from tvm import relax

builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
w = relax.Var("w", relax.TensorType((8, 8, 3, 3), "float32"))
with builder.function("main", [x, w]):
    with builder.dataflow():
        a = builder.emit(relax.op.nn.conv2d(x, w, padding=[1, 1]))
        b = builder.emit_output(relax.op.nn.conv2d(a, w, padding=[1, 1]))
    builder.emit_func_output(b)
target = tvm.target.Target(tvm.target.Target("qcom/adreno-opencl-texture"), host={"kind": "llvm"})
if PREPARED:
    from fusion_patterns.tvm_compat import prepare
    prepare()

def opencl(mod):
    if mod.kind == "opencl":
        yield mod.inspect_source()
    for part in mod.imports:
        yield from opencl(part)

try:
    executable = relax.build(builder.finalize(), target, **HOW)
    text = "".join(opencl(executable.mod))
    print("image2d_array_t" in text, "= as_float4(READ_IMAGEF(" in text, "write_imagef(" in text)
except TypeError as error:
    print(error)
"""
HOW = [{}, {"tir_pipeline": "adreno"}, {"tir_pipeline": "s_tir"}, {"tir_pipeline": None}]


def built(prepared: bool, how: dict[str, Any]) -> str:
    return python(f"PREPARED, HOW = {prepared}, {how}\n{BUILD}")


@pytest.mark.parametrize("how", [{}, {"tir_pipeline": "s_tir"}])
def test_stock_resolves_to_a_pipeline_that_indexes_images_like_pointers(how: dict[str, Any]) -> None:
    assert built(False, how) == "True False False"


@pytest.mark.parametrize("how", [{"tir_pipeline": "adreno"}, {"tir_pipeline": None}])
def test_stock_can_not_unpack_the_pipeline_it_registered(how: dict[str, Any]) -> None:
    assert built(False, how) == "cannot unpack non-iterable ModulePass object"


@pytest.mark.parametrize("how", HOW)
def test_textures_are_lowered_however_the_pipeline_is_named(how: dict[str, Any]) -> None:
    assert built(True, how) == "True True True"


def test_other_targets_keep_the_stock_pipeline() -> None:
    tvm_compat.prepare()
    buffers = tvm.target.Target({"kind": "opencl"}, host={"kind": "llvm"})
    plain = tirx.PrimFunc([], tirx.Evaluate(0))
    assert not tvm_compat._has_textures(tvm.IRModule({"f": plain}))
    assert not tvm_compat._has_textures(tvm.IRModule({"f": plain.with_attr("target", buffers)}))
    assert tvm_compat._has_textures(tvm.IRModule({"f": plain.with_attr("target", texture_target())}))


# The texture store ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduled() -> Any:
    """One packed convolution, scheduled, not lowered."""
    tvm_compat.prepare()
    target = texture_target()
    func = build(conv_chain(1), packed=True).fused["fused_0"]
    with target:
        mod = dlight.ApplyDefaultSchedule(PackedKernel())(tvm.IRModule({"conv": func}))
    return tirx.transform.BindTarget(target)(
        tvm.IRModule({"conv": mod["conv"].with_attr("global_symbol", "conv")})
    )


def stores(scheduled: Any, pipeline: Any) -> tuple[list[int], str]:
    """The lanes of each texture store after a TIR pipeline, and the OpenCL C."""
    with tvm.transform.PassContext(disabled_pass=HOST_PACKAGING):
        mod = pipeline(scheduled)
    ((gv, kernel),) = [(gv, f) for gv, f in mod.functions_items() if "calling_conv" in f.attrs]
    lanes: list[int] = []

    def visit(call: Any) -> None:
        if getattr(call.op, "name", "") == "tirx.texture2d_store":
            lanes.append(int(tvm.DataType(str(call.args[-1].ty.dtype)).lanes))

    structural_walk(kernel.body, (tvm.ir.Call, visit))
    return lanes, _codegen(gv, kernel, texture_target(), False)


LANE_BY_LANE = re.compile(r"for \(int (\w+) = 0; \1 < 4; ..\1\) {\s*float4 \w+ = \w+\[\1\];\s*write_imagef\(")


def test_stock_writes_one_lane_four_times_instead_of_a_texel(scheduled: Any) -> None:
    from tvm.s_tir.backend.adreno.pipeline import default_tir_pipeline

    lanes, source = stores(scheduled, default_tir_pipeline())
    assert lanes == [1]
    assert LANE_BY_LANE.search(source)


def test_a_texture_store_stays_whole(scheduled: Any) -> None:
    lanes, source = stores(scheduled, tvm_compat.adreno_tir_pipeline()[0])
    assert lanes == [4]
    assert source.count("write_imagef(") == 1
    assert not LANE_BY_LANE.search(source)


def test_a_split_store_would_not_reach_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = build(conv_chain(1), packed=True).fused
    monkeypatch.setattr(tvm_compat, "repaired_texture_store", lambda: tvm.transform.Sequential([]))
    faults = lower(fused, texture_target()).faults
    assert faults["fused_0"] == "a texture store moves 1 lanes, not a whole texel"


def test_stock_transforms_are_given_back(scheduled: Any) -> None:
    stock = tvm.s_tir.backend.adreno.transform.TextureFlatten
    stores(scheduled, tvm_compat.adreno_tir_pipeline()[0])
    assert tvm.s_tir.backend.adreno.transform.TextureFlatten is stock


# Guarded loads ----------------------------------------------------------------------------------------------


def odd_channels_packed() -> str:
    """OpenCL C that packs 6 channels: the last block of four has two that the buffer does not."""

    def build(emit: Any, x: Any) -> Any:
        return emit(
            relax.op.nn.conv2d(emit(relax.op.nn.conv2d(x, weight((8, 6, 1, 1)))), weight((8, 8, 1, 1)))
        )

    compiled = compile_module(graph(build, [var("x", (1, 6, 12, 10))]))
    return compiled.manifest.kernels["layout_pack_0_kernel"].source


CLAMPED = re.compile(r"= min\(\(\(int4\).*\(int4\)\((\d+), ")


def test_a_guarded_load_stays_inside_of_its_buffer() -> None:
    (last,) = CLAMPED.findall(odd_channels_packed())
    assert int(last) == 6 * 12 * 10 - 1


def test_stock_would_read_beyond_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clamp that packing asks for is gone when OpenCL C is printed."""
    monkeypatch.setattr(tvm_compat, "repaired_guarded_loads", lambda: tvm.transform.Sequential([]))
    source = odd_channels_packed()
    assert "select(" in source
    assert not CLAMPED.findall(source)


# Sums in groups ---------------------------------------------------------------------------------------------


def grouped(groups: int) -> tvm.IRModule:
    """A convolution in groups times its own input."""

    def build(emit: Any, x: Any) -> Any:
        made = emit(relax.op.nn.conv2d(x, weight((8, 8 // groups, 1, 1)), groups=groups))
        return emit(relax.op.multiply(made, x))

    return graph(build, [var("x", (1, 8, 6, 6))])


@pytest.mark.opencl
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_stock_reads_sums_of_groups_from_the_wrong_registers(
    opencl_device: Device, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    mod, target = grouped(groups), as_target()
    with target:
        passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
        passes += [relax.transform.FuseOps(), relax.transform.FuseTIR()]
        fused = tvm.transform.Sequential(passes)(mod)
    inputs = draw(mod)
    expected = Reference(mod).run(inputs)

    def error() -> float:
        lowered = lower(fused, target)
        manifest = build_manifest(fused, lowered.funcs, lowered.labels, name="grouped", target="opencl")
        (found,) = Session(manifest, opencl_device).run(inputs)
        return float(np.abs(found - expected[0]).max() / np.abs(expected[0]).max())

    assert error() < 1e-5
    monkeypatch.setattr(tvm_compat, "sums_in_groups", lambda func: False)
    # What other threads' registers hold is anything, not-a-numbers too: no comparison with those is true.
    assert (not error() <= 1e-2) == (groups > 1)


# Memory of branches -----------------------------------------------------------------------------------------

BRANCHES = """
import numpy as np
import tvm
from tvm import relax

builder = relax.BlockBuilder()
flag = relax.Var("flag", relax.TensorType((), "bool"))
x = relax.Var("x", relax.TensorType((4, 4), "float32"))
with builder.function("main", [flag, x]):
    branches = []
    for last in (relax.op.exp, relax.op.tanh):
        bindings, value = [], x
        for step in (relax.op.nn.softmax, relax.op.nn.softmax, last):
            call = builder.normalize(step(value))
            value = relax.Var("value", call.ty)
            bindings.append(relax.VarBinding(value, call))
        branches.append(relax.SeqExpr([relax.BindingBlock(bindings)], value))
    builder.emit_func_output(builder.emit(relax.If(flag, *branches)))
mod = builder.finalize()
inputs = {"flag": np.array(False), "x": np.ones((4, 4), "float32")}
if STOCK:
    vm = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    vm["main"](*map(tvm.runtime.tensor, inputs.values()))
else:
    from fusion_patterns.reference import Reference
    print(f"{Reference(mod).run(inputs)[0].mean():.4f}")
"""


def test_stocks_memory_plan_crashes_in_the_second_branch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"STOCK = True\n{BRANCHES}"], capture_output=True, check=False
    )
    assert done.returncode < 0


def test_the_reference_runs_both_branches() -> None:
    assert python(f"STOCK = False\n{BRANCHES}") == "0.2449"
