"""Built variants as small files, so that they can be timed where TVM is not installed.

A pack holds everything but the weights' values: kernels don't take longer for other numbers, and the time of a launch
is all that is measured from a pack.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fusion_patterns.errors import ManifestError
from fusion_patterns.run.codec import dict_of, encode, record
from fusion_patterns.run.manifest import Function, Kernel, Manifest, Tensor

__all__ = ["read_pack", "write_pack", "write_whole"]


def write_pack(manifest: Manifest, path: Path, meta: dict[str, Any]) -> None:
    """Write a manifest without its weights, and what is said of it."""
    data = {
        "name": manifest.name,
        "target": manifest.target,
        "functions": {name: encode(one) for name, one in manifest.functions.items()},
        "kernels": {name: encode(one) for name, one in manifest.kernels.items()},
        "constant_tensors": {name: encode(one) for name, one in manifest.constant_tensors.items()},
        "constants": {name: [list(a.shape), a.dtype.str] for name, a in manifest.constants.items()},
        "meta": meta,
    }
    write_whole(path, gzip.compress(json.dumps(data).encode(), mtime=0))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there, so that nobody ever finds half of it."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(data)
    os.replace(beside, path)


def read_pack(path: Path, seed: int = 0) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of a pack with weights drawn from ``seed``, and what is said of it.

    Raises :class:`ManifestError` for a file that is not a pack.
    """
    try:
        return _read(json.loads(gzip.decompress(path.read_bytes())), seed)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        what = f"{type(error).__name__}: {error}"
        raise ManifestError(f"{path}: not a pack ({what}); build it anew with bench.device prepare") from None


def _read(data: dict[str, Any], seed: int) -> tuple[Manifest, dict[str, Any]]:
    generator = np.random.default_rng(seed)
    constants = {}
    for name, (shape, dtype) in data["constants"].items():
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
