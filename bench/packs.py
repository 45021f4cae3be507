"""Built variants as small files, so that they can be timed and checked where TVM is not installed.

A pack holds everything but the weights' values. Those lie in a folder beside it, one file for each array, named by
what is in it, since variants share most of them. Without that folder a pack can still be timed, with weights drawn at
random: kernels don't take longer for other numbers.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fusion_patterns.errors import ManifestError
from fusion_patterns.run.codec import dict_of, encode, record
from fusion_patterns.run.manifest import Function, Kernel, Manifest, Tensor

__all__ = ["WEIGHTS", "has_weights", "read_pack", "write_pack", "write_whole"]

WEIGHTS = "weights"


def write_pack(manifest: Manifest, path: Path, meta: dict[str, Any], *, weights: bool = False) -> None:
    """Write a manifest and what is said of it, and its ``weights`` into the folder of that name, if they are wanted."""
    digests = {name: digest(array) for name, array in manifest.constants.items()} if weights else {}
    for name, known in digests.items():
        file = path.parent / WEIGHTS / f"{known}.npy"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.save(buffer, manifest.constants[name])
            write_whole(file, buffer.getvalue())
    data = {
        "name": manifest.name,
        "target": manifest.target,
        "functions": {name: encode(one) for name, one in manifest.functions.items()},
        "kernels": {name: encode(one) for name, one in manifest.kernels.items()},
        "constant_tensors": {name: encode(one) for name, one in manifest.constant_tensors.items()},
        "constants": {
            name: [list(a.shape), a.dtype.str, digests.get(name)] for name, a in manifest.constants.items()
        },
        "meta": meta,
    }
    write_whole(path, gzip.compress(json.dumps(data).encode(), mtime=0))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there, so that nobody ever finds half of it."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(data)
    os.replace(beside, path)


def digest(array: np.ndarray[Any, Any]) -> str:
    """A name for an array by its shape, its dtype and its bytes."""
    head = f"{array.shape} {array.dtype.str}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


def has_weights(path: Path) -> bool:
    """Whether all weights of a pack are there."""
    constants = json.loads(gzip.decompress(path.read_bytes()))["constants"]
    return all(
        known and (path.parent / WEIGHTS / f"{known}.npy").exists() for *_, known in constants.values()
    )


def read_pack(path: Path, seed: int = 0) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of a pack, and what is said of it; weights that are not there are drawn from ``seed``.

    Raises :class:`ManifestError` for a file that is not a pack.
    """
    try:
        return _read(json.loads(gzip.decompress(path.read_bytes())), path.parent / WEIGHTS, seed)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        what = f"{type(error).__name__}: {error}"
        raise ManifestError(f"{path}: not a pack ({what}); build it anew with bench.device prepare") from None


def _read(data: dict[str, Any], weights: Path, seed: int) -> tuple[Manifest, dict[str, Any]]:
    generator = np.random.default_rng(seed)
    constants = {}
    for name, (shape, dtype, known) in data["constants"].items():
        if known and (file := weights / f"{known}.npy").exists():
            constants[name] = np.load(file, allow_pickle=False)
            continue
        drawn = generator.standard_normal(tuple(shape), dtype=np.float32) * 0.05
        constants[name] = drawn.astype(np.dtype(dtype))
    manifest = Manifest(
        data["name"],
        data["target"],
        dict_of(record(Function))(data["functions"], "functions"),
        {
            name: Kernel(name, kernel["source"], tuple(kernel["args"]))
            for name, kernel in data["kernels"].items()
        },
        constants,
        dict_of(record(Tensor))(data["constant_tensors"], "constant_tensors"),
    )
    return manifest, data["meta"]
