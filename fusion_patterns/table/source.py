"""YAML text as plain values that remember where each of them was written.

This reads the part of YAML 1.2 that a table needs, from ruamel.yaml's stream of events: mappings with text as
keys, lists, text, numbers, true, false, null, and aliases. Tags and several documents in one file are
refused, and so is all that grows without bound: the size of the text, the nesting, the number of values
after aliases are expanded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from fusion_patterns.errors import TableError

__all__ = ["MAX_BYTES", "Document", "Path", "Place", "parse_yaml", "plain_value"]

MAX_BYTES = 1_000_000
MAX_VALUES = 100_000
MAX_DEPTH = 32

Path = tuple[str | int, ...]
"""The keys and indices that lead to a value: ``("patterns", 0, "nodes", "conv")``."""


class Place(NamedTuple):
    """A line and a column, both from 1."""

    line: int
    column: int


@dataclass
class Document:
    """The values of a YAML text, and where each was written."""

    file: str
    value: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    """Where each value starts."""
    keys: dict[Path, Place] = field(default_factory=dict)
    """Where the key of each mapping's entry starts."""
    texts: dict[Path, Place] = field(default_factory=dict)
    """Where the first character of each text stands, after its quotation mark; for texts on one line."""

    def place(self, path: Path, *, key: bool = False) -> Place:
        """Returns where the value at ``path`` was written, or else the nearest value around it.

        With ``key=True`` an entry of a mapping is where its key is.
        """
        for end in range(len(path), -1, -1):
            prefix = path[:end]
            if key and prefix in self.keys:
                return self.keys[prefix]
            if prefix in self.places:
                return self.places[prefix]
        return Place(1, 1)


# The core schema of YAML 1.2: `yes`, `on`, `010` and `1:30` are no booleans, octals or times here.
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


def plain_value(text: str) -> Any:
    """Returns what an unquoted YAML scalar means; raises ValueError for a number of absurd length."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        bases = {"0o": 8, "0x": 16}
        return int(text[2:], bases[text[:2]]) if text[:2] in bases else int(text)
    if _FLOAT.fullmatch(text):
        if text[-1] in "fF":
            return -math.inf if text[0] == "-" else math.inf
        return math.nan if text[-1] in "nN" else float(text)
    return text


def parse_yaml(text: str, file: str) -> Document:
    """Returns the document in ``text``; raises `TableError` with the position of the first fault."""
    try:
        return _Reader(text, file).document()
    except TableError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        # The last sentence of ruamel's messages may advise on its own settings, which are not the user's.
        problem = " ".join(filter(None, (error.problem, error.context))).split("\n")[0].strip()
        raise TableError(f"{file}:{line}:{column}: not valid YAML: {problem}") from None
    except Exception as error:
        # The scanner meets odd input with errors of any type (a bad escape, a control character); whatever
        # it is, it is the file's fault, and the user shall see one line.
        problem = str(error).split("\n")[0] or type(error).__name__
        raise TableError(f"{file}:1:1: not valid YAML: {problem}") from None


class _Node:
    """A value as written; an alias is the same node again."""

    __slots__ = ("closed", "content", "place", "quoted", "single_line")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.content: Any = None
        """Text, or a list of nodes, or a dict of key to (place of the key, node)."""
        self.quoted = False
        self.single_line = False
        self.closed = False


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.events: Iterator[Any] = iter(YAML(typ="safe", pure=True).parse(text))
        self.anchors: dict[str, _Node] = {}
        self.budget = MAX_VALUES
        self.result = Document(file)

    def document(self) -> Document:
        root: _Node | None = None
        for event in self.events:
            kind = type(event).__name__
            if kind in ("StreamStartEvent", "DocumentEndEvent", "StreamEndEvent", "CommentEvent"):
                continue
            if kind == "DocumentStartEvent":
                if root is not None:
                    raise self._error(_place(event), "a second document starts; a table is one document")
                continue
            root = self._node(event, 0)
        if root is None:
            raise self._error(
                Place(1, 1), "the file is empty; a table needs at least `name:` and `patterns:`"
            )
        self.budget = MAX_VALUES
        self.result.value = self._value(root, (), 0)
        return self.result

    def _node(self, event: Any, depth: int) -> _Node:
        kind = type(event).__name__
        place = _place(event)
        self._count(place, depth)
        if kind == "AliasEvent":
            if event.anchor not in self.anchors:
                raise self._error(place, f"the alias *{event.anchor} has no anchor before it")
            node = self.anchors[event.anchor]
            if not node.closed:
                raise self._error(place, f"the alias *{event.anchor} stands inside its own anchor")
            return node
        node = _Node(place)
        if getattr(event, "anchor", None):
            self.anchors[event.anchor] = node
        if getattr(event, "tag", None) is not None:
            raise self._error(place, f"the tag {event.tag} is not allowed; a table is plain data")
        if kind == "ScalarEvent":
            node.content = event.value
            node.quoted = not event.implicit[0]
            node.single_line = (
                event.style in (None, "", "'", '"') and event.start_mark.line == event.end_mark.line
            )
        elif kind == "SequenceStartEvent":
            node.content = []
            while type(item := next(self.events)).__name__ != "SequenceEndEvent":
                node.content.append(self._node(item, depth + 1))
        else:
            node.content = self._mapping(depth)
        node.closed = True
        return node

    def _mapping(self, depth: int) -> dict[str, tuple[Place, _Node]]:
        entries: dict[str, tuple[Place, _Node]] = {}
        while type(event := next(self.events)).__name__ != "MappingEndEvent":
            place = _place(event)
            key = self._node(event, depth + 1)
            text = key.content
            if not isinstance(text, str) or not (key.quoted or isinstance(plain_value(text), str)):
                shown = f"'{text}'; put it in quotes" if isinstance(text, str) else "a list or a mapping"
                raise self._error(place, f"a key must be text, not {shown}")
            if text in entries:
                first = entries[text][0].line
                raise self._error(place, f"the key '{text}' is there twice (first in line {first}); keep one")
            entries[text] = (place, self._node(next(self.events), depth + 1))
        return entries

    def _value(self, node: _Node, path: Path, depth: int) -> Any:
        self._count(node.place, depth)
        self.result.places[path] = node.place
        content = node.content
        if isinstance(content, dict):
            for key, (place, _) in content.items():
                self.result.keys[(*path, key)] = place
            return {key: self._value(child, (*path, key), depth + 1) for key, (_, child) in content.items()}
        if isinstance(content, list):
            return [self._value(child, (*path, index), depth + 1) for index, child in enumerate(content)]
        if node.single_line:
            line, column = node.place
            self.result.texts[path] = Place(line, column + node.quoted)
        if node.quoted:
            return content
        try:
            return plain_value(content)
        except ValueError:
            raise self._error(node.place, "the number is too long") from None

    def _count(self, place: Place, depth: int) -> None:
        self.budget -= 1
        if self.budget < 0:
            raise self._error(place, f"more than {MAX_VALUES} values, counting each use of an alias")
        if depth > MAX_DEPTH:
            raise self._error(place, f"nested more than {MAX_DEPTH} deep")

    def _error(self, place: Place, message: str) -> TableError:
        return TableError(f"{self.file}:{place.line}:{place.column}: {message}")


def _place(event: Any) -> Place:
    return Place(event.start_mark.line + 1, event.start_mark.column + 1)
