"""Open batch and image sizes: without a value for them what needs static shapes lies in buffers; with one, not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tvm
from modules import const, graph, nn, var, weight
from networks import load
from tvm import tirx
from tvm.relax import op

from fusion_patterns import compile_module, verify
from fusion_patterns.frontends import bind_symbols, load_model
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device
from fusion_patterns.verification import compare

UNKNOWN = "has a shape that is not known at compile time"


def network(dims: Iterable[Any]) -> tvm.IRModule:
    """conv, depthwise conv, residual, max pool with its own padding, global pooling, a gate, a classifier."""

    def build(emit: Any, x: Any) -> Any:
        a = emit(
            nn.relu(emit(op.add(emit(nn.conv2d(x, weight((8, 3, 3, 3)), padding=1)), const((1, 8, 1, 1)))))
        )
        d = emit(nn.conv2d(a, weight((8, 1, 3, 3), 2), strides=2, padding=1, groups=8))
        e = emit(op.add(emit(nn.conv2d(emit(op.clip(d, 0.0, 6.0)), weight((8, 8, 1, 1), 3))), d))
        p = emit(nn.max_pool2d(e, (3, 3), strides=(2, 2), padding=1))
        gate = emit(op.sigmoid(emit(op.mean(p, [2, 3], keepdims=True))))
        scaled = emit(op.multiply(p, gate))
        flat = emit(op.mean(scaled, [2, 3]))
        return [emit(op.matmul(flat, weight((8, 5), 4))), scaled]

    return graph(build, [var("x", list(dims))])


def symbols(*names: str) -> list[Any]:
    return [tirx.Var(name, "int64") for name in names]


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["batch"], {"batch": 3}),
        (["batch"], {"batch": 1}),
        (["batch", "height", "width"], {"batch": 2, "height": 13, "width": 10}),
        (["batch", "height", "width"], {"batch": 1, "height": 8, "width": 33}),
    ],
)
def test_open_sizes_run_in_buffers_and_bound_ones_in_textures(
    opencl_device: Device, names: list[str], sizes: dict[str, int]
) -> None:
    batch, *image = symbols(*names)
    mod = network([batch, 3, *(image or (16, 16))])
    report = verify(mod, device=opencl_device.info.index, symbols=sizes)
    assert report.ok, report.outputs
    made = report.compiled.report
    assert made.convs == {"total": 3, "covered": 0}
    assert made.texture_values == 0
    told = [d.reason for d in made.declined if d.row == "conv2d.chain"]
    assert [reason for reason in told if UNKNOWN in reason]
    assert all("adreno.yaml:" in d.where for d in made.declined)

    bound = bind_symbols(mod, sizes)
    report = verify(bound, device=opencl_device.info.index)
    assert report.ok, report.outputs
    assert report.compiled.report.convs == {"total": 3, "covered": 3}
    assert report.compiled.report.texture_values > 3


@pytest.mark.opencl
def test_one_compilation_serves_every_size(opencl_device: Device) -> None:
    mod = network([*symbols("batch"), 3, *symbols("height", "width")])
    compiled, reference = compile_module(mod), Reference(mod)
    for shape in ((1, 3, 8, 8), (2, 3, 11, 6), (3, 3, 32, 17)):
        x = np.random.default_rng(0).standard_normal(shape).astype("float32")
        results = compiled.run({"x": x}, opencl_device.info.index)
        for ours, theirs in zip(results, reference.run({"x": x}), strict=True):
            check = compare("", ours, theirs)
            assert check.ok, (shape, check)


@pytest.mark.opencl
def test_what_is_static_in_an_open_module_is_still_fused(opencl_device: Device) -> None:
    """Only the values that the open size reaches are left in buffers."""

    def build(emit: Any, x: Any, y: Any) -> Any:
        fixed = emit(nn.relu(emit(nn.conv2d(y, weight((8, 8, 3, 3)), padding=1))))
        return [fixed, emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 3, 3), 1), padding=1))))]

    (batch,) = symbols("batch")
    mod = graph(build, [var("x", [batch, 8, 8, 8]), var("y", (1, 8, 8, 8))])
    report = verify(mod, device=opencl_device.info.index, symbols={"batch": 2})
    assert report.ok
    assert report.compiled.report.convs == {"total": 2, "covered": 1}
    assert report.compiled.report.texture_values > 0


# Real networks ----------------------------------------------------------------------------------------------


@pytest.mark.opencl
@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize("width", [192, "width"])
def test_a_trained_classifier_with_an_open_batch(opencl_device: Device, width: int | str) -> None:
    mod = load("ppocr_v2_cls", x=("batch", 3, 48, width))
    sizes = {"batch": 2} if width == 192 else {"batch": 1, "width": 100}
    report = verify(mod, device=opencl_device.info.index, symbols=sizes)
    assert report.ok, report.outputs
    assert report.compiled.report.convs == {"total": 53, "covered": 0}
    bound = compile_module(bind_symbols(mod, sizes)).report
    assert bound.convs == {"total": 53, "covered": 53}


@pytest.mark.opencl
@pytest.mark.slow
def test_an_exported_network_with_an_open_batch(tmp_path: Path, opencl_device: Device) -> None:
    torch = pytest.importorskip("torch")
    networks.declare_torchvision_operators()
    pytest.importorskip("torchvision")
    entry = networks.corpus().get("tv_mobilenet_v2") or pytest.skip("needs ../shared/corpus")
    model = networks._torch_model(entry)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=(batch,))
    torch.export.save(program, tmp_path / "mobilenet.pt2")
    mod = load_model(tmp_path / "mobilenet.pt2")
    report = verify(mod, device=opencl_device.info.index, symbols={"batch": 2})
    assert report.ok, report.outputs
    assert report.compiled.report.convs == {"total": 52, "covered": 0}
    bound = compile_module(load_model(tmp_path / "mobilenet.pt2", bind={"batch": 1})).report
    assert bound.convs == {"total": 52, "covered": 52}
