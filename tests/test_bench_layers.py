"""Large memory-bound layers, and stock's texture pipeline with its faults repaired."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modules import array, const, graph, nn, texture_target, var
from tvm.relax import op

from bench import device, device_tables
from bench.layers import LAYERS, layer_table
from bench.stock_texture import repaired_kernels
from bench.variants import build_variant
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session


def small(name: str) -> Any:
    """A layer's module on a small image."""
    build: Any = LAYERS[name]
    body, _ = build.args
    return build.func(body, (2, 8, 10, 6), **build.keywords)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_kernel_of_its_row(name: str) -> None:
    with texture_target():
        manifest = build_variant("ours", small(name), "pocl", layer_table(name))
    label = name.removeprefix(device_tables.LAYER)
    launches = [step for step in manifest.functions["main"].body if getattr(step, "label", "") == label]
    assert len(launches) == 1
    work = manifest.meta["work"][launches[0].kernel]
    assert work["bytes"] >= 2 * 8 * 10 * 6 * 4


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_moves_more_than_a_cache_holds(name: str) -> None:
    build: Any = LAYERS[name]
    n, channels, height, width = build.args[1]
    assert (
        4 * n * channels * height * width * (4 if "resize" in name else 2 if "concat" in name else 1)
        >= 64 << 20
    )


def test_the_names_of_all_layers() -> None:
    assert list(device.importers(["layers"])) == list(LAYERS)


def test_layers_have_a_table_of_their_own() -> None:
    kernels = [
        {"label": "pool2d.chain", "name": "a", "count": 1, "ms": 0.02, "bytes": 60_000_000},
        {"label": "conv2d.chain", "name": "b", "count": 1, "ms": 9.0, "bytes": 60_000_000},
    ]
    figures = {"ms": 9.02, "classes": {"pooling": 0.02}, "kernels": kernels, "launches": 2}
    result = {
        "device": "D",
        "platform": "P",
        "driver": "1",
        "repeats": 3,
        "limits": {"copy": 4e12, "peak": 1e12, "floor": 1e-6},
        "refused": {},
        "networks": {"layer_pool2d.chain": {"ours": figures}},
    }
    text = device_tables.table(result)
    assert "| pool2d.chain | ours | 60 | 20.0 | 3000 | 75% |" in text
    assert "conv2d.chain" not in text
    assert "network" not in text


# Stock's texture pipeline ---------------------------------------------------------------------------------------


def conv(emit: Any, x: Any, channels: int, seed: int, **attrs: Any) -> Any:
    inputs = int(x.ty.shape[1]) // int(attrs.get("groups", 1))
    size = int(attrs.pop("size", 1))
    weight = const((channels, inputs, size, size), seed, scale=(inputs * size * size) ** -0.5)
    return emit(nn.conv2d(x, weight, **attrs))


def depthwise(emit: Any, x: Any) -> list[Any]:
    y = emit(nn.relu(conv(emit, x, 8, 1)))
    return [conv(emit, emit(nn.relu(conv(emit, y, 8, 2, groups=8, size=3, padding=1))), 8, 3)]


def transposed(emit: Any, x: Any) -> list[Any]:
    y = emit(nn.relu(conv(emit, x, 8, 1)))
    return [emit(nn.conv2d_transpose(y, const((8, 4, 2, 2), 2), strides=(2, 2)))]


def concat(emit: Any, x: Any) -> list[Any]:
    y = emit(op.concat([conv(emit, x, 8, 1), conv(emit, x, 4, 2)], axis=1))
    return [conv(emit, y, 8, 3)]


def pools(emit: Any, x: Any) -> list[Any]:
    y = conv(emit, x, 8, 1)
    y = emit(nn.max_pool2d(y, (3, 3), strides=(2, 2), padding=(1, 1)))
    y = emit(nn.avg_pool2d(conv(emit, y, 8, 2), (2, 2)))
    return [conv(emit, y, 8, 3)]


def mean(emit: Any, x: Any) -> list[Any]:
    y = conv(emit, x, 8, 1)
    gate = emit(op.sigmoid(conv(emit, emit(op.mean(y, axis=[2, 3], keepdims=True)), 8, 2)))
    return [conv(emit, emit(op.multiply(y, gate)), 8, 3)]


def split(emit: Any, x: Any) -> list[Any]:
    y = emit(op.split(conv(emit, x, 16, 1), 2, axis=1))
    return [conv(emit, emit(y[0]), 8, 2), conv(emit, emit(y[1]), 8, 3)]


def twice(emit: Any, x: Any) -> list[Any]:
    """One PrimFunc for two images of one shape, of which one is in a texture and one not."""
    y = conv(emit, x, 8, 1, size=3, padding=1)
    z = emit(nn.relu(emit(op.add(y, y))))
    return [conv(emit, z, 8, 2, size=3, padding=1), emit(nn.relu(emit(op.add(x, x))))]


@pytest.mark.opencl
@pytest.mark.parametrize("build", [depthwise, transposed, concat, pools, mean, split, twice])
def test_stock_in_textures_is_right(opencl_device: Device, build: Callable[[Any, Any], Any]) -> None:
    def mod() -> Any:  # stock's pipeline changes constants of the module that it gets
        return graph(build, [var("x", (1, 8, 12, 10))])

    with texture_target():
        manifest = build_variant("stock-texture", mod())
    assert any("image2d_array_t" in kernel.source for kernel in manifest.kernels.values())
    data = array((1, 8, 12, 10), 5)
    for result, wanted in zip(
        Session(manifest, opencl_device).run([data]), Reference(mod()).run({"x": data}), strict=True
    ):
        assert result.std() > 0
        assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_kernel_that_stores_single_lanes_gets_a_buffer_and_no_other() -> None:
    with texture_target():
        done, lowered = repaired_kernels(graph(concat, [var("x", (1, 8, 12, 10))]))
    cats = [name for name in lowered if "concatenate" in name]
    assert cats
    for name in cats:
        assert str(done[name].params[-1].ty.storage_scope) in ("", "global")
    scopes = {str(p.ty.storage_scope) for name in lowered for p in done[name].params}
    assert any("texture" in scope for scope in scopes)
