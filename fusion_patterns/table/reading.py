"""Reading a table from a file: `load_table`.

Whatever is wrong with a table, the caller gets one `TableError` that lists every fault, one a line and the
first one first: ``file.yaml:12:7: what is wrong; what to do``.
"""

from __future__ import annotations

import fnmatch
import os
import weakref
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from fusion_patterns.errors import TableError
from fusion_patterns.table.checks import check
from fusion_patterns.table.faults import Fault, did_you_mean, label, model_faults, unknown_field
from fusion_patterns.table.model import Origin, Predicate, Row, Table
from fusion_patterns.table.source import MAX_BYTES, Document, Path, Place, parse_yaml

__all__ = ["BUILTIN", "builtin_names", "load_table"]

BUILTIN = "adreno"
"""The table that is used when none is named."""

MAX_FAULTS = 50
MAX_EXTENDS = 16

# Installed, the tables lie in the package; in a checkout, beside it.
_PACKAGE = FilePath(__file__).parent.parent
_FOLDER = next((f for f in (_PACKAGE / "patterns", _PACKAGE.parent / "patterns") if f.is_dir()), _PACKAGE)

_Stamp = tuple[str, int, int]
"""A file, when it was changed and its size: as long as they stay the same, so does the table."""


@dataclass(frozen=True)
class _Loaded:
    table: Table
    stamps: tuple[_Stamp, ...]
    """Of the file and of every file that it extends."""


_cache: dict[tuple[str, str], _Loaded] = {}
# Tables known to be complete and valid, by identity, for as long as they live.
_valid: set[int] = set()


def load_table(source: str | os.PathLike[str] | Table | None = None) -> Table:
    """Returns a table that is complete and valid: `extends` is resolved, disabled rows are gone.

    ``source`` is a path to a YAML file, the name of a built-in table, a `Table` (checked and completed in the
    same way), or None for the built-in ``adreno``. A file is read again only after it was changed, and a
    `Table` that needs nothing is returned itself; treat the table as read-only, for it is shared.

    Raises `TableError` that lists all faults, each with file, line and column.
    """
    if isinstance(source, Table):
        if id(source) in _valid:
            return source
        return _complete(source, Document(source.origin.file), {}, [])
    file, shown = _find(BUILTIN if source is None else source)
    return _load(file, shown, ()).table


def builtin_names() -> tuple[str, ...]:
    """Returns the names of the built-in tables."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml")))


def _find(source: str | os.PathLike[str]) -> tuple[FilePath, str]:
    """Returns the file that ``source`` means, and how messages name it."""
    if not isinstance(source, str | os.PathLike):
        raise TableError(
            f"<data>: expected a path, the name of a table or a Table; found {type(source).__name__}"
        )
    text = os.fspath(source)
    if not isinstance(text, str):
        raise TableError(f"<data>: expected a path that is text; found {text!r}")
    if isinstance(source, str) and not text.endswith((".yaml", ".yml")) and FilePath(text).name == text:
        names = builtin_names()
        if text in names:
            return _FOLDER / f"{text}.yaml", f"patterns/{text}.yaml"
        if "\0" in text or not FilePath(text).is_file():
            hint = did_you_mean(text, names) or f"; built in: {', '.join(names)}"
            raise TableError(f"{text}: no built-in table has this name, and no file{hint}")
    return FilePath(text), text


def _stamp(file: FilePath, shown: str) -> _Stamp:
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(error, shown) from None
    return str(file), status.st_mtime_ns, status.st_size


def _unreadable(error: Exception, shown: str) -> TableError:
    reasons: dict[type[Exception], str] = {
        FileNotFoundError: "there is no such file",
        PermissionError: "it can't be opened: permission denied",
        IsADirectoryError: "it is a directory; name a YAML file in it",
        NotADirectoryError: "there is no such file",
    }
    reason = reasons.get(type(error)) or f"it can't be read: {getattr(error, 'strerror', None) or error}"
    return TableError(f"{shown}: {reason}")


def _load(file: FilePath, shown: str, chain: tuple[str, ...]) -> _Loaded:
    """Reads a table; ``chain`` are the files that extend each other down to this one."""
    stamp = _stamp(file, shown)
    key = (os.path.abspath(file), shown)
    cached = _cache.get(key)
    if cached is not None and all(_unchanged(old) for old in cached.stamps):
        return cached
    document = parse_yaml(_text(file, shown, stamp[2]), shown)
    table = _model(document)
    base = None
    if table.extends is not None:
        base = _load_base(table.extends, file, document, (*chain, os.path.realpath(file)))
    own = {row.name: index for index, row in enumerate(table.patterns)}
    faults = [
        Fault(("patterns", index, "name"), f"row '{row.name}' is there twice; rename or remove one")
        for index, row in enumerate(table.patterns)
        if own[row.name] != index
    ]
    complete = _complete(_merge(base.table, table) if base is not None else table, document, own, faults)
    loaded = _Loaded(complete, (stamp, *(base.stamps if base is not None else ())))
    _cache[key] = loaded
    return loaded


def _unchanged(old: _Stamp) -> bool:
    try:
        return _stamp(FilePath(old[0]), old[0]) == old
    except TableError:
        return False


def _text(file: FilePath, shown: str, size: int) -> str:
    if size > MAX_BYTES:
        raise TableError(f"{shown}:1:1: the file has {size} bytes, and a table has at most {MAX_BYTES}")
    try:
        if not file.is_file() and not file.is_dir():
            raise TableError(f"{shown}: it is no ordinary file")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(error, shown) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise TableError(f"{shown}:{line}:{column}: the file is not UTF-8 here; save it as UTF-8") from None


def _model(document: Document) -> Table:
    """Returns the document's data as a table that knows where its rows and conditions were written."""
    value = document.value
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else f"{value!r}"
        raise _error(
            document, [Fault((), f"a table is a mapping with `name:` and `patterns:`; found {found}")]
        )
    try:
        table = Table.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        raise _error(document, [*_origins(value), *model_faults(error, value)]) from None
    if faults := _origins(value):
        raise _error(document, faults)

    def origin(path: Path) -> Origin:
        place = document.place(path)
        return Origin(file=document.file, line=place.line, column=place.column)

    rows: list[Row] = []
    for index, row in enumerate(table.patterns):
        where: list[Predicate] = []
        for number, predicate in enumerate(row.where):
            update = {"origin": origin(("patterns", index, "where", number))}
            where.append(predicate.model_copy(update=update))
        update_row = {"where": tuple(where), "origin": origin(("patterns", index))}
        rows.append(row.model_copy(update=update_row))
    return table.model_copy(update={"patterns": tuple(rows), "origin": origin(())})


def _origins(value: Any) -> list[Fault]:
    """Finds the one field that a file may not set although the models have it."""
    found: list[Path] = [("origin",)] if "origin" in value else []
    rows = value.get("patterns")
    for index, row in enumerate(rows if isinstance(rows, list) else ()):
        if not isinstance(row, dict):
            continue
        if "origin" in row:
            found.append(("patterns", index, "origin"))
        where = row.get("where")
        for number, predicate in enumerate(where if isinstance(where, list) else ()):
            if isinstance(predicate, dict) and "origin" in predicate:
                found.append(("patterns", index, "where", number, "origin"))
    return [Fault(path, label(path, value) + unknown_field(path), key=True) for path in found]


def _load_base(name: str, file: FilePath, document: Document, chain: tuple[str, ...]) -> _Loaded:
    fault = "`extends`: "
    try:
        if name in builtin_names():
            base, shown = _FOLDER / f"{name}.yaml", f"patterns/{name}.yaml"
        else:
            base = file.parent / name
            shown = os.path.join(os.path.dirname(document.file), name)
            if not base.is_file() and FilePath(name).name == name and not name.endswith((".yaml", ".yml")):
                hint = did_you_mean(name, builtin_names()) or f"; built in: {', '.join(builtin_names())}"
                raise TableError(f"no built-in table '{name}', and no such file{hint}")
        if os.path.realpath(base) in chain:
            names = [*chain[chain.index(os.path.realpath(base)) :], os.path.realpath(base)]
            raise TableError(
                "the tables extend each other in a circle: " + " -> ".join(map(os.path.basename, names))
            )
        if len(chain) > MAX_EXTENDS:
            raise TableError(f"more than {MAX_EXTENDS} tables extend each other")
        _stamp(base, shown)
    except (TableError, ValueError) as error:
        raise _error(document, [Fault(("extends",), f"{fault}{error}")]) from None
    return _load(base, shown, chain)


def _merge(base: Table, own: Table) -> Table:
    """Returns ``own`` with the sets, fragments and rows of ``base`` before its own; equal names are replaced.

    The target is that of ``base`` unless ``own`` says its own.
    """
    replaced = {row.name: row for row in own.patterns}
    kept = [replaced.pop(row.name, row) for row in base.patterns]
    added = [row for row in own.patterns if replaced.get(row.name) is row]
    update = {
        "sets": {**base.sets, **own.sets},
        "fragments": {**base.fragments, **own.fragments},
        "patterns": (*kept, *added),
        "target": own.target if "target" in own.model_fields_set else base.target,
    }
    return own.model_copy(update=update)


def _complete(table: Table, document: Document, own: dict[str, int], faults: list[Fault]) -> Table:
    """Returns ``table`` without the rows it disables; raises all faults. ``own`` are the rows of the file."""

    def in_document(fault: Fault) -> Fault:
        match fault.path:
            case ("patterns", int(index), *rest) if table.patterns[index].name in own:
                return fault._replace(path=("patterns", own[table.patterns[index].name], *rest))
            case ("patterns", *_) if document.places:
                return Fault(("extends",), fault.message)
            case ("sets" | "fragments", _, *_) if fault.path[:2] not in document.keys:
                return Fault(("extends",), fault.message)
        return fault

    faults = faults + [in_document(fault) for fault in check(table)]
    if not document.places:
        names = [row.name for row in table.patterns]
        faults += [
            Fault((), f"row '{name}' is there twice")
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        if table.extends is not None:
            faults.append(Fault((), "`extends` is for files; a Table built in code has all its rows"))
    off: set[str] = set()
    for index, pattern in enumerate(table.disable):
        hits = {row.name for row in table.patterns if fnmatch.fnmatchcase(row.name, pattern)}
        if not hits:
            hint = did_you_mean(pattern, (row.name for row in table.patterns))
            faults.append(Fault(("disable", index), f"`disable`: no row is named '{pattern}'{hint}"))
        off |= hits
    if faults:
        raise _error(document, faults)
    if table.disable or table.extends is not None:
        rows = tuple(row for row in table.patterns if row.name not in off)
        table = table.model_copy(update={"patterns": rows, "extends": None, "disable": ()})
    _valid.add(id(table))
    weakref.finalize(table, _valid.discard, id(table))
    return table


def _error(document: Document, faults: list[Fault]) -> TableError:
    placed: set[tuple[Place, str]] = set()
    for fault in faults:
        text = document.texts.get(fault.path)
        if fault.column and text is not None:
            placed.add((Place(text.line, text.column + fault.column - 1), fault.message))
        else:
            placed.add((document.place(fault.path, key=fault.key), fault.message))
    lines = [
        f"{document.file}:{place.line}:{place.column}: {message}"
        if document.places
        else f"{document.file}: {message}"
        for place, message in sorted(placed)
    ]
    if len(lines) > MAX_FAULTS:
        lines = [*lines[:MAX_FAULTS], f"{document.file}: and {len(lines) - MAX_FAULTS} faults more"]
    return TableError("\n".join(lines))
