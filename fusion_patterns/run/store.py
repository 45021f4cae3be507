"""A manifest in a folder: ``manifest.json``, ``kernels/<name>.cl``, ``weights.npz``.

The same manifest always gives the same bytes. The folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ManifestError
from .check import check, kernel_name
from .codec import dict_of, encode, keys, list_of, mapping, record, text
from .manifest import Array, Function, Kernel, Manifest, Tensor

FORMAT = "fusion-patterns/1"
"""The format's name and version; a reader refuses every other one."""

_INDEX = "manifest.json"
_WEIGHTS = "weights.npz"


def save(manifest: Manifest, folder: str | os.PathLike[str]) -> None:
    """Write a manifest to a folder, which must be new, empty, or an earlier saved module.

    All is written to a folder beside it that is renamed at the end. An older module is first moved aside and
    deleted last: whatever interrupts the write, no folder ever holds a part of a module.

    Raises:
        ManifestError: the manifest isn't whole (`check`), `meta` isn't JSON, or the folder holds other files.
        OSError: the file system refused.
    """
    check(manifest)
    target = Path(folder).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        check_folder(target)
    mark = secrets.token_hex(4)
    fresh, aside = (target.with_name(f".{target.name}.{mark}.{kind}") for kind in ("new", "old"))
    try:
        _write(manifest, fresh)
        with _alone(target.parent):
            check_folder(target)
            if target.exists():
                target.rename(aside)
            try:
                fresh.rename(target)
            except BaseException:
                if aside.exists():
                    aside.rename(target)
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time looks at a folder's modules and changes them; where locks are, on Unix."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # this gives the lock back as well


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Replacing a folder deletes it, so it may hold nothing but a module that `save` wrote.

    Raises:
        ManifestError: it is a file, or holds other files.
    """
    target = Path(folder).resolve()
    if not target.exists():
        return
    if not target.is_dir():
        raise ManifestError(f"{target}: is a file; name a folder")
    present = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    if not present:
        return
    try:
        ours = {_INDEX, *_read_index(target)["files"]}
    except ManifestError:
        raise ManifestError(f"{target}: not empty and not a saved module; name another folder") from None
    if foreign := sorted(present - ours):
        raise ManifestError(
            f"{target}: {foreign[0]} is not part of a saved module; move it or name another folder"
        )


def _write(manifest: Manifest, folder: Path) -> None:
    (folder / "kernels").mkdir(parents=True)
    contents = {_kernel_file(name): k.source.encode() for name, k in manifest.kernels.items()}
    contents[_WEIGHTS] = _pack(manifest.constants)
    document = {
        "format": FORMAT,
        "name": manifest.name,
        "target": manifest.target,
        "functions": [encode(f) for _, f in sorted(manifest.functions.items())],
        "kernels": {name: list(kernel.args) for name, kernel in manifest.kernels.items()},
        "constants": {name: encode(tensor) for name, tensor in manifest.constant_tensors.items()},
        "meta": manifest.meta,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
    }
    try:
        index = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        plain = json.loads(index)["meta"] == manifest.meta
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"meta: {error}; only JSON can be saved") from None
    if not plain:
        raise ManifestError("meta: only JSON can be saved: text keys, lists (no tuples), finite numbers")
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    (folder / _INDEX).write_text(index + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str]) -> Manifest:
    """Read a saved module. Nothing in it is executed.

    Raises:
        ManifestError: a file is missing or altered, the format is another one, or the content is not valid.
            One line: the file, what is wrong there, what to do.
    """
    root = Path(folder)
    document = _read_index(root)
    index = root / _INDEX
    try:
        arguments: dict[str, tuple[str, ...]] = dict_of(list_of(text))(document["kernels"], "kernels")
        for name in arguments:
            kernel_name("kernels", name)  # it becomes a path
        if set(document["files"]) != {_WEIGHTS, *map(_kernel_file, arguments)}:
            raise ManifestError("files: they don't fit the kernels")
        functions: tuple[Function, ...] = list_of(record(Function))(document["functions"], "functions")
        if len({function.name for function in functions}) != len(functions):
            raise ManifestError("functions: two have one name")
        sources = {name: _read(root, _kernel_file(name), document["files"]).decode() for name in arguments}
        manifest = Manifest(
            name=text(document["name"], "name"),
            target=text(document["target"], "target"),
            functions={function.name: function for function in functions},
            kernels={name: Kernel(name, sources[name], kinds) for name, kinds in arguments.items()},
            constants=_unpack(root / _WEIGHTS, _read(root, _WEIGHTS, document["files"])),
            constant_tensors=dict_of(record(Tensor))(document["constants"], "constants"),
            meta=mapping(document["meta"], "meta"),
        )
        check(manifest)
    except _FileFault:
        raise
    except (ManifestError, UnicodeDecodeError) as error:
        raise ManifestError(f"{index}: {error}; build it again") from None
    return manifest


def _read_index(root: Path) -> dict[str, Any]:
    """``manifest.json``, with the right keys at its top level."""
    index = root / _INDEX
    expected = {"format", "name", "target", "functions", "kernels", "constants", "meta", "files"}
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{index}: not found; is {root} a folder that was saved as a module?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{index}: not readable JSON ({_line(error)}); build it again") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise ManifestError(f"{index}: format is {found!r}, expected {FORMAT!r}; build it with this version")
    try:
        keys(document, expected, "top level")
        dict_of(text)(document["files"], "files")
    except ManifestError as error:
        raise ManifestError(f"{index}: {error}; build it again") from None
    return document


class _FileFault(ManifestError):
    """A fault of a file other than the index: its message names that file."""


def _read(root: Path, name: str, digests: dict[str, str]) -> bytes:
    """A file's bytes, if they are those that were saved."""
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        raise _FileFault(f"{root / name}: {error.strerror}; copy the whole folder again") from None
    if hashlib.sha256(data).hexdigest() != digests[name]:
        raise _FileFault(f"{root / name}: altered since it was saved (sha256); copy the whole folder again")
    return data


def _kernel_file(name: str) -> str:
    return f"kernels/{name}.cl"


def _pack(constants: dict[str, Array]) -> bytes:
    """A ``.npz`` archive that ``numpy.load`` reads. Sorted and without time stamps, so the bytes repeat."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in sorted(constants):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, constants[name], allow_pickle=False)
    return data.getvalue()


def _unpack(path: Path, data: bytes) -> dict[str, Array]:
    try:
        constants = {}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    name = entry.filename.removesuffix(".npy")
                    constants[name] = np.lib.format.read_array(file, allow_pickle=False)
        return constants
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise _FileFault(f"{path}: not a .npz archive ({_line(error)}); build it again") from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
