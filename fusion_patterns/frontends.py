"""A model file becomes a Relax module: ONNX, torch export, TVMScript and TVM's own JSON.

    mod = load_model("detector.onnx", shapes={"x": (1, 3, 640, 640)})
    mod = load_model("encoder.json", bind={"batch": 1})

Whatever is wrong with a file, or with what was asked of it, comes out as one :class:`ModelError` of one
line: the file, what is wrong, what to do about it. onnx, onnxruntime and torch are imported only when a
file needs them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm import relax, tirx

from fusion_patterns.errors import ModelError

Shapes = Mapping[str, Sequence[int | str]]
"""Input name -> its dimensions. A string keeps that dimension open, as a symbol of that name."""


def load_model(
    path: str | Path, shapes: Shapes | None = None, bind: Mapping[str, int] | None = None
) -> tvm.IRModule:
    """Import the model in *path*; the suffix says its format.

    ========= =====================================================================================
    ``.onnx`` ONNX. Shape arithmetic and constants are folded before import, so inputs whose height
              or width the file leaves open need *shapes*. An open batch may stay open.
    ``.pt2``  ``torch.export.save``; parameters become constants of the module. An open first dimension is
              called ``batch``.
    ``.py``   TVMScript: the file is run, and its ``Module`` or its only IRModule is taken.
    ``.json`` TVM's own (``tvm.ir.save_json``).
    ========= =====================================================================================

    *shapes* gives the dimensions of inputs, by the names that the file uses; *bind* gives values to
    symbolic dimensions by their names, in every public function. Dtypes stay those of the file.

    Raises :class:`ModelError` for a file that is missing, damaged or of another kind, for an operator that
    TVM's importer doesn't know, for shapes that don't fit, and for names that the model doesn't have.
    """
    path, shapes, bind = Path(path), dict(shapes or {}), dict(bind or {})
    for name, size in [*bind.items(), *((n, d) for n, dims in shapes.items() for d in dims)]:
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{path}: {name!r} is given the size {size}; sizes start at 1")
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if path.is_dir():
        raise ModelError(f"{path}: is a folder; name the model file in it")
    if path.suffix.lower() not in _READERS:
        raise ModelError(f"{path}: unknown suffix {path.suffix!r}; a model is one of {', '.join(_READERS)}")
    if path.stat().st_size == 0:
        raise ModelError(f"{path}: the file is empty")
    mod = _READERS[path.suffix.lower()](path, shapes, bind)
    if not any(isinstance(f, relax.Function) for f in mod.functions.values()):
        raise ModelError(f"{path}: holds no Relax function, so there is nothing to compile")
    return mod


def bind_inputs(mod: tvm.IRModule, shapes: Shapes, *, where: str = "module") -> tvm.IRModule:
    """Give the symbolic dimensions of ``main``'s parameters the values that *shapes* asks for.

    Raises :class:`ModelError` for an unknown parameter, another rank, or a dimension that is already
    something else.
    """
    main = next((f for gv, f in mod.functions.items() if gv.name_hint == "main"), None)
    params = {p.name: p for p in main.params} if isinstance(main, relax.Function) else {}
    sizes: dict[str, int] = {}
    for name, wanted in shapes.items():
        check_name(name, params, "input", where)
        held = params[name].ty
        if not isinstance(held, relax.TensorType) or not isinstance(held.shape, relax.ShapeExpr):
            raise ModelError(f"{where}: input {name!r} has no dimensions that could be set")
        dims = list(held.shape.values)
        check_shape(name, [int(d) if isinstance(d, tirx.IntImm) else str(d) for d in dims], wanted, where)
        for dim, size in zip(dims, wanted, strict=True):
            if not isinstance(dim, tirx.IntImm) and isinstance(size, int):
                if not isinstance(dim, tirx.Var):
                    raise ModelError(f"{where}: input {name!r} has the dimension {dim}; bind its symbols")
                if sizes.setdefault(dim.name, size) != size:
                    raise ModelError(
                        f"{where}: input {name!r} needs {dim.name} = {size}; it is {sizes[dim.name]} already"
                    )
    return bind_symbols(mod, sizes, where=where)


def bind_symbols(mod: tvm.IRModule, sizes: Mapping[str, int], *, where: str = "module") -> tvm.IRModule:
    """Replace symbolic dimensions by *sizes* in every public function that has a symbol of that name.

    A private function stays as general as it is: its callers may want it for more than one size.

    Raises :class:`ModelError` for a name that no public function of *mod* has.
    """
    if not sizes:
        return mod
    check_open(mod, sizes, where=where)
    out = mod.clone()
    for gv, func in mod.functions.items():
        mine = {name: size for name, size in sizes.items() if name in _symbols(func)}
        if mine:
            out.update_func(gv, func.bind_symbolic_vars(mine))
    return out


def check_open(mod: tvm.IRModule, names: Iterable[str], *, where: str = "module") -> None:
    """Raise :class:`ModelError` for a name that is no symbolic dimension of a public function of *mod*."""
    known = {symbol for func in mod.functions.values() for symbol in _symbols(func)}
    for name in names:
        check_name(name, known, "symbolic dimension", where)


def _symbols(func: Any) -> set[str]:
    """Names of a public function's symbolic dimensions; none for any other."""
    if not isinstance(func, relax.Function) or "global_symbol" not in (func.attrs or {}):
        return set()
    return {s.name for p in func.params for s in relax.analysis.definable_tir_vars_in_type(p.ty)}


def check_name(name: str, known: Iterable[str], kind: str, where: str) -> None:
    """Raise a :class:`ModelError` that lists what there is when *name* is not in *known*."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1)
    there = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, names)) or 'none'}"
    raise ModelError(f"{where}: no {kind} is called {name!r}; {there}")


def check_shape(name: str, held: Sequence[int | str], wanted: Sequence[int | str], where: str) -> None:
    """Raise a :class:`ModelError` unless *wanted* says something for each open dimension of *held* only."""
    fits = len(held) == len(wanted) and all(
        isinstance(h, str) or h == w for h, w in zip(held, wanted, strict=True)
    )
    if not fits:
        want, have = (" x ".join(map(str, dims)) or "()" for dims in (wanted, held))
        raise ModelError(f"{where}: input {name!r} is {have} in the file, so it can't be {want}")


def need(module: str, extra: str, where: str) -> ModuleType:
    """Import *module*, or say which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = first_line(error)
        raise ModelError(
            f"{where}: needs {module}: pip install 'fusion-patterns[{extra}]' ({why})"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, with operators by their names."""
    # TVM prints the whole record of an operator where its name is meant.
    text = re.sub(r"ir\.Op\(span=.*?name=\"([\w.]+)\".*?support_level=\d+\)", r"\1", str(error))
    lines = [line.strip().removeprefix("error: ") for line in text.splitlines()]
    said = [
        line for line in lines if line and not line.startswith(("Traceback", "File ", "[", "Check failed"))
    ]
    return (said or lines or [""])[0][:300] or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep importers from talking to the terminal; yields what they printed.

    TVM's C++ writes to the file itself, also when a builder that an error left half done is destroyed: so
    the frames that hold it are cleared while nobody listens.
    """
    said, logged, errors = io.StringIO(), logging.root.manager.disable, os.dup(2)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        tempfile.TemporaryFile() as nowhere,
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield said
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            logging.disable(logged)
            os.dup2(errors, 2)
            os.close(errors)


def _read_onnx(path: Path, shapes: Shapes, bind: Mapping[str, int]) -> tvm.IRModule:
    from fusion_patterns import frontends_onnx

    return frontends_onnx.read(path, shapes, bind)


def _read_torch(path: Path) -> tvm.IRModule:
    if not zipfile.is_zipfile(path):
        raise ModelError(f"{path}: is not a file of torch.export.save, or it is cut short")
    torch = need("torch", "torch", str(path))
    try:
        with quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"{path}: torch {torch.__version__} can't load it ({first_line(error)}); export it anew"
        ) from error
    return import_exported(program, where=str(path))


def import_exported(program: Any, *, where: str = "exported program") -> tvm.IRModule:
    """A ``torch.export.ExportedProgram`` as a module whose constants are its parameters.

    Raises :class:`ModelError` that names the operators which TVM's importer doesn't have.
    """
    from tvm.relax.frontend.torch import from_exported_program

    try:
        with quiet(), _float_divisors(program):
            mod = from_exported_program(program, unwrap_unit_return_tuple=True)
    except Exception as error:
        raise ModelError(f"{where}: TVM's torch importer stops: {first_line(error)}") from error
    return _with_batch(mod)


def _with_batch(mod: tvm.IRModule) -> tvm.IRModule:
    """*mod* with ``batch`` as the name of the open first dimension: torch forgets names, and calls it ``s77``."""
    main = mod["main"]
    tensors = [param.ty.shape.values for param in main.params if isinstance(param.ty, relax.TensorType)]
    first = {shape[0].name for shape in tensors if shape and isinstance(shape[0], tirx.Var)}
    symbols = {s.name for param in main.params for s in relax.analysis.definable_tir_vars_in_type(param.ty)}
    if len(first) != 1 or "batch" in symbols or not re.fullmatch(r"s\d+", name := first.pop()):
        return mod
    out = mod.clone()
    out.update_func(out.get_global_var("main"), main.bind_symbolic_vars({name: tirx.Var("batch", "int64")}))
    return out


@contextlib.contextmanager
def _float_divisors(program: Any) -> Iterator[None]:
    """``div(floats, 2)`` reads ``div(floats, 2.0)`` for a while: the importer makes an int32 of the 2."""
    changed = []
    for node in program.graph.nodes:
        held = node.meta.get("val")
        floats = getattr(getattr(held, "dtype", None), "is_floating_point", False)
        if floats and "div" in str(node.target) and len(node.args) > 1 and type(node.args[1]) is int:
            changed.append((node, node.args))
            node.args = (node.args[0], float(node.args[1]), *node.args[2:])
    try:
        yield
    finally:
        for node, args in changed:
            node.args = args


def _read_script(path: Path) -> tvm.IRModule:
    name = f"_fusion_patterns_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # TVMScript reads the source of the class again through its module.
    sys.modules[name] = module
    try:
        with quiet():
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ModelError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{path}:{_line_in(path, error)}: {what}") from error
    finally:
        sys.modules.pop(name, None)
    found = {n: v for n, v in vars(module).items() if isinstance(v, tvm.IRModule)}
    if "Module" in found or len(found) == 1:
        return found.get("Module") or next(iter(found.values()))
    there = ", ".join(sorted(found)) or "no IRModule"
    raise ModelError(f"{path}: has {there}; call the module to compile 'Module'")


def _line_in(path: Path, error: BaseException) -> int:
    """The line of *path* that *error* names, as TVM's parser does, or that its traceback went through."""
    named = re.search(rf"--> {re.escape(str(path))}:(\d+)", str(error))
    if named:
        return int(named[1])
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _read_json(path: Path) -> tvm.IRModule:
    try:
        with quiet():
            mod = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ModelError(f"{path}: is not what tvm.ir.save_json of TVM {tvm.__version__} writes") from error
    if not isinstance(mod, tvm.IRModule):
        raise ModelError(f"{path}: holds a {type(mod).__name__}, not an IRModule")
    return mod


def _bound(read: Callable[[Path], tvm.IRModule]) -> Callable[[Path, Shapes, Mapping[str, int]], tvm.IRModule]:
    """A reader whose module gets its symbols bound after import."""

    def reader(path: Path, shapes: Shapes, bind: Mapping[str, int]) -> tvm.IRModule:
        mod = bind_symbols(read(path), bind, where=str(path))
        return bind_inputs(mod, shapes, where=str(path))

    return reader


_READERS: dict[str, Callable[[Path, Shapes, Mapping[str, int]], tvm.IRModule]] = {
    ".onnx": _read_onnx,
    ".pt2": _bound(_read_torch),
    ".py": _bound(_read_script),
    ".json": _bound(_read_json),
}
