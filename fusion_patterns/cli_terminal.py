"""Where the words of a command go: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Say", "explain_error", "plain", "progress", "show", "write_whole"]

Say = Callable[[str], None]
"""Is told what begins now."""

TRACEBACK = "FUSION_PATTERNS_TRACEBACK"
"""Environment variable: errors come with Python's traceback."""


def show(text: str, data: Any, *, as_json: bool) -> None:
    """Print a result: *text* for people, or *data* as one JSON document for machines."""
    sys.stdout.write((json.dumps(plain(data), indent=1, allow_nan=False) if as_json else text) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """*value* as JSON can hold it: a number that is not finite becomes ``null``."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress(*, silent: bool) -> Iterator[Say]:
    """Say what happens: a line that moves on a terminal, plain lines elsewhere, nothing when *silent*.

    When silent, what a model file prints goes to standard error: standard output holds the result alone.
    """
    if silent:
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda stage: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: print(f"{stage} ...", file=sys.stderr, flush=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as moving:
        task = moving.add_task("")
        yield lambda stage: moving.reset(task, description=stage)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside *path* and move it there: whatever interrupts this, no half of it is ever seen."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def explain_error(error: BaseException, *, expected: bool) -> str:
    """What is said of an error: its own words if it was *expected*, or else its kind and how to see more."""
    if expected:
        return "\n".join(f"error: {line}" for line in str(error).splitlines())
    if isinstance(error, OSError) and error.strerror:
        return f"error: {error.filename or 'the system'}: {error.strerror}"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return (
        f"error: {type(error).__name__}: {said[:300]} (not foreseen; {TRACEBACK}=1 shows where it comes from)"
    )
