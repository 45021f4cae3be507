"""Device benchmarks: kernel classes, what a kernel has to do, distance to the limits, the tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modules import graph, nn, texture_target, var, weight
from tvm.relax import op

from bench import compile_time, device, device_tables, limits, work
from bench.packs import read_pack, write_pack
from bench.variants import build_variant
from fusion_patterns.errors import ManifestError
from fusion_patterns.run import manifest as m
from fusion_patterns.table import load_table

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"copy": 1e9, "peak": 1e12, "floor": 1e-6}


def kernel(label: str, us: float, count: int = 1, **known: Any) -> dict[str, Any]:
    """A kernel whose launch takes *us* microseconds."""
    return {"name": label, "label": label, "count": count, "ms": us * count / 1e3, **known}


def block(channels: int = 8) -> Any:
    """A 3x3 convolution, a pool that a residual keeps apart, a 1x1 convolution."""

    def build(emit: Any, x: Any) -> Any:
        one = emit(nn.relu(emit(nn.conv2d(x, weight((channels, channels, 3, 3)), padding=1))))
        two = emit(nn.conv2d(one, weight((channels, channels, 1, 1), 1)))
        return emit(op.add(two, emit(nn.max_pool2d(one, (3, 3), padding=(1, 1)))))

    return graph(build, [var("x", (1, channels, 6, 6))])


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("conv2d.concat", "convolution"),
        ("conv2d.excite", "convolution"),
        ("conv2d_transpose.chain", "convolution"),
        ("fused_conv2d1_add3_relu", "convolution"),
        ("fused_reshape_concatenate_conv2d", "convolution"),
        ("dense.pooled", "dense"),
        ("fused_matmul_add20", "dense"),
        ("global_pool.mean", "pooling"),
        ("mean", "pooling"),
        ("fused_max_pool2d1", "pooling"),
        ("adaptive_avg_pool2d", "pooling"),
        ("fused_concatenate4_relu", "concat"),
        ("fused_resize2d_add", "resize"),
        ("layout.unpack", "conversion"),
        ("te_layout_transform2", "conversion"),
        ("global -> global.texture", "conversion"),
        ("slice.chain", "shuffle"),
        ("fused_strided_slice1", "shuffle"),
        ("fused_add_tir_sigmoid", "elementwise"),
        ("softmax", "other"),
        ("pad", "other"),
    ],
)
def test_class_of(label: str, name: str) -> None:
    assert device_tables.class_of(label) == name


def test_every_row_of_the_table_has_a_class() -> None:
    classes = {row.name: device_tables.class_of(row.name) for row in load_table().patterns}
    assert "other" not in classes.values(), classes
    assert {classes[name] for name in classes if name.startswith("conv2d")} == {"convolution"}


def test_fractions() -> None:
    kernels = [
        kernel("conv2d.chain", 10, flops=5_000_000, conv3x3=True),  # half of the peak
        kernel("conv2d.chain", 30, 2, flops=3_000_000, conv3x3=True),  # a tenth, most of the time
        kernel("conv2d.chain", 10, flops=9_000_000, conv3x3=False),
        kernel("elementwise.chain", 10, bytes=8_000),  # 0.8
        kernel("pool2d.chain", 30, bytes=6_000),  # 0.2
        kernel("concat.chain", 2.5, bytes=1),  # too short to count, not at the floor
        kernel("resize2d.chain", 1.5, 3, bytes=1),  # at the floor
        kernel("layout.copy", 50),  # nothing is known of it
    ]
    found = device_tables.fractions(kernels, LIMITS)
    total = 10 + 60 + 10 + 10 + 30 + 2.5 + 4.5 + 50
    assert found == pytest.approx(
        {
            "conv_best": 0.5,
            "conv_median": 0.1,
            "memory_best": 0.8,
            "memory_mean": (0.8 * 10 + 0.2 * 30) / 40,
            "memory_time": 40 / total,
            "floor_time": 4.5 / total,
            "floor_launches": 3,
        }
    )


def test_fractions_of_nothing() -> None:
    found = device_tables.fractions([kernel("conv2d.chain", 0.0, conv3x3=True, flops=1)], LIMITS)
    assert found["conv_best"] is None
    assert found["memory_mean"] is None
    assert device_tables.percent(found["conv_best"]) == "-"


def results() -> dict[str, Any]:
    """Two networks; stock's texture pipeline refuses one of them."""

    def one(ms: float, **classes: float) -> dict[str, Any]:
        kernels = [kernel("conv2d.chain", 10, flops=5_000_000, conv3x3=True)]
        return {"ms": ms, "run_ms": ms + 0.5, "classes": classes, "kernels": kernels, "launches": 1}

    names = device_tables.VARIANTS
    full = dict(
        zip(names, (one(ms, convolution=ms, pooling=1.0) for ms in (2.0, 3.0, 1.0, 8.0, 16.0)), strict=True)
    )
    part = {
        "ours": one(1.0, convolution=1.0),
        "stock-buffers": one(1.0, convolution=1.0, pooling=5.0),
    }
    return {
        "device": "D",
        "platform": "P",
        "driver": "1",
        "repeats": 3,
        "limits": LIMITS,
        "refused": {"small": {"stock-texture": "it divides by zero"}, "large": {}},
        "networks": {"large": full, "small": part},
    }


def test_tables() -> None:
    lines = device_tables.table(results()).splitlines()
    assert "| large | 2.000 | 1.50 | 0.50 | 4.00 | 8.00 |" in lines
    assert "| small | 1.000 | - | - | 1.00 | - |" in lines
    assert "| geometric mean |  | 1.50 (1) | 0.50 (1) | 2.00 (2) | 8.00 (1) |" in lines
    assert "| large | 2.500 | 3.40 | 6.60 |" in lines
    assert "| geometric mean |  | 1.84 (2) | 6.60 (1) |" in lines
    assert "| convolution | stock-buffers | 2 | 1.00 (small) | 2.00 |" in lines
    # pooling joined another kernel of ours in the small network, so that one does not compare
    assert "| pooling | stock-buffers | 1 | 1.00 (large) | 1.00 |" in lines
    assert "| large | 50% | 50% | - | - | 0.0% | 0 of 1 | 0.0% |" in lines
    assert lines[-1] == "- small, stock-texture: it divides by zero"


def test_a_network_without_ours_is_listed() -> None:
    broken = results()
    del broken["networks"]["large"]["ours"]
    lines = device_tables.table(broken).splitlines()
    assert "| large | - | - | - | - | - |" in lines
    assert "| geometric mean |  | - | - | 1.00 (1) | - |" in lines


def test_work_of_each_kernel() -> None:
    with texture_target():
        manifest = build_variant("ours-buffers", block(), "pocl")
    labels = {
        step.kernel: step.label
        for step in m.all_steps(manifest.functions["main"].body)
        if isinstance(step, m.Launch)
    }
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in labels.values()}
    for name, one in manifest.meta["work"].items():
        found[labels[name]].append(one)
    convs = sorted(found["conv2d.chain"] + found.get("conv2d.first", []), key=lambda one: int(one["flops"]))
    pixels, channels = 36, 8
    tensor = 4 * channels * pixels
    assert [one["flops"] for one in convs] == [
        2 * pixels * channels * channels,
        2 * pixels * channels * channels * 9,
    ]
    assert [one["conv3x3"] for one in convs] == [False, True]
    # data, weight, result; the 1x1 convolution adds the pool
    assert [one["bytes"] for one in convs] == [
        3 * tensor + 4 * channels * channels,
        2 * tensor + 4 * channels * channels * 9,
    ]
    assert [one["bytes"] for one in found["pool2d.chain"]] == [2 * tensor]
    assert [one["flops"] for one in found["pool2d.chain"]] == [0]


def test_bytes_of_views_tuples_and_unknown_shapes() -> None:
    square, flat, open_ = m.Tensor((4, 4), "float32"), m.Tensor((16,), "float32"), m.Tensor(("n",), "float32")
    one = (1, 1, 1)
    body = (
        m.View("v", "x#1", flat),
        m.Alloc("y", flat),
        m.Launch(
            "both", ("x#1", "v", "y", m.Scalar(3, "int32")), one, one
        ),  # a tensor and a view of it: once
        m.Alloc("z", open_),
        m.Launch("open", ("x#0", "z"), one, one),
    )
    main = m.Function("main", (m.Param("x", (square, square)),), body, "y")
    assert work.kernel_bytes(m.Manifest("t", "opencl", {"main": main}, {})) == {"both": 128}


def test_a_kernel_whose_name_was_taken() -> None:
    names = {"fused_conv2d_chain_1"}
    assert work.composite_name("fused_conv2d_chain_1_kernel", names) == "fused_conv2d_chain_1"
    assert work.composite_name("fused_conv2d_chain_1_2_kernel_1", names) == "fused_conv2d_chain_1"
    assert work.composite_name("fused_softmax_kernel", names) is None


def test_prepared_here_measured_on_a_device(
    tmp_path: Path, opencl_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "ROUNDS", 16)
    monkeypatch.setattr(limits, "FORMS", ((4, "mad"), (8, "fma")))
    mod = block()
    with texture_target():
        for variant in ("ours", "stock-buffers"):
            manifest = build_variant(variant, mod, "pocl")
            meta = {"work": manifest.meta.get("work", {})}
            write_pack(manifest, tmp_path / f"tiny.block.{variant}.json.gz", meta, weights=True)
            (tmp_path / "tiny.block.expected.npz").write_bytes(device.expected(mod, manifest))
    result = device.measure(tmp_path, opencl_device.info.index, 2)
    assert set(result["networks"]) == {"tiny.block"}
    ours = result["networks"]["tiny.block"]["ours"]
    assert ours["launches"] == sum(one["count"] for one in ours["kernels"])
    assert any(one["conv3x3"] for one in ours["kernels"] if "conv3x3" in one)
    assert all(value > 0 for value in result["limits"].values())
    assert device_tables.fractions(ours["kernels"], result["limits"])["conv_best"] > 0
    assert 0 <= ours["error"] < 1e-5
    assert ours["run_ms"] > 0
    assert "| tiny.block |" in device_tables.table(result)
    assert f"| tiny.block | {ours['error']:.1e} | - | - | " in device_tables.table(result)
    _, meta = read_pack(tmp_path / "tiny.block.ours.json.gz")
    assert np.all([one["bytes"] > 0 for one in meta["work"].values()])


def test_without_weights_outputs_are_not_compared(tmp_path: Path, opencl_device: Any) -> None:
    mod, pack = block(), tmp_path / "tiny.ours.json.gz"
    manifest = build_variant("ours", mod, "pocl")
    (tmp_path / "tiny.expected.npz").write_bytes(device.expected(mod, manifest))
    write_pack(manifest, pack, {})
    assert "error" not in device.measure_network({"ours": pack}, opencl_device, 1)["ours"]
    write_pack(manifest, pack, {}, weights=True)
    right = device.measure_network({"ours": pack}, opencl_device, 1)["ours"]["error"]
    assert right < 1e-5
    for file in (tmp_path / "weights").iterdir():  # other numbers under the same names
        np.save(file, np.load(file) * 1.01)
    assert device.measure_network({"ours": pack}, opencl_device, 1)["ours"]["error"] > 1e-3


def test_measuring_needs_no_tvm() -> None:
    code = "import sys, bench.device, bench.limits, bench.packs, fusion_patterns.run; assert 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(["measure", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"bench.device: {tmp_path}: no packs there; build them with: python -m bench.device prepare {tmp_path}\n"
    )
    assert device.main(["measure", str(tmp_path), "--json", str(tmp_path / "no" / "x.json")]) == 1
    assert "--json: there is no folder" in capsys.readouterr().err
    assert device.main(["prepare", str(tmp_path), "--networks", "no_such"]) == 1
    assert "--networks: the corpus has no no_such" in capsys.readouterr().err
    assert device.main(["prepare", str(tmp_path), "--variants", "theirs"]) == 1
    assert "--variants: no theirs; there are ours, ours-textures" in capsys.readouterr().err


def test_files_that_are_no_packs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], opencl_device: Any
) -> None:
    (tmp_path / "net.ours.json.gz").write_bytes(b"text")
    with pytest.raises(
        ManifestError, match=r"net\.ours\.json\.gz: not a pack \(BadGzipFile: .*build it anew"
    ):
        read_pack(tmp_path / "net.ours.json.gz")
    (tmp_path / "net.mine.json.gz").write_bytes(b"text")
    assert device.main(["measure", str(tmp_path), "--device", opencl_device.info.index]) == 1
    assert "net.mine.json.gz: packs are named NETWORK.VARIANT.json.gz" in capsys.readouterr().err


def test_compile_time_of_a_small_module() -> None:
    one = compile_time.compile_time("small", compile_time.small_module(), "pocl")
    assert one.path == "texture"
    assert one.ours > 0
    assert one.stock > 0
    failed = compile_time.CompileTime("broken", 1.0, 0.0, "")
    assert compile_time.render([failed]).splitlines()[-1] == "| broken | 1.0 | - | - | none goes through |"
    known = compile_time.CompileTime("known", 2.0, 20.0, "texture")
    assert compile_time.render([known]).splitlines()[-1] == "| known | 2.0 | 20.0 | 0.10 | texture |"
