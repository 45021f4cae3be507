"""What was measured, in an SQLite file: nothing is measured twice, and an interrupted run loses nothing.

Several processes may write one file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .. import __version__
from ..errors import FusionPatternsError
from ..lower.schedule.tiles import Tile

__all__ = ["Outcome", "ResultsError", "Store", "tile_text"]

APPLICATION = 0x46505475  # in the file's header: says that it is ours
FORMAT = 1
BUSY_SECONDS = 30

_TABLE = """
CREATE TABLE result (
  device TEXT, driver TEXT, version TEXT, kernel TEXT, beside TEXT, tile TEXT,
  repeats INTEGER, default_us REAL NOT NULL, us REAL NOT NULL, fault TEXT NOT NULL,
  PRIMARY KEY (device, driver, version, kernel, beside, tile, repeats)
) WITHOUT ROWID
"""


class ResultsError(FusionPatternsError):
    """A file of results that can't be used. The message names it and says what to do."""


@dataclass(frozen=True)
class Outcome:
    """A tile on a device: median microseconds of the profile's tile and of this one, measured in turn.

    ``fault``: why the tile is no good there; then there are no times.
    """

    default_us: float = 0.0
    us: float = 0.0
    fault: str = ""

    @property
    def ratio(self) -> float:
        """Time with this tile over time with the profile's."""
        return self.us / self.default_us


def tile_text(tile: Tile) -> str:
    """A tile in one word: blocks, rows and columns of a thread, threads along z, y and x, threads that share a sum."""
    parts = ((tile.blocks, tile.rows, tile.columns), tile.group, (tile.split,))
    return "/".join("x".join(map(str, part)) for part in parts)


class Store:
    """The results of one device with one driver and this package's version. May be shared by threads."""

    def __init__(self, path: str | os.PathLike[str], device: str, driver: str) -> None:
        """Open or make the file. Raises :class:`ResultsError` if it is damaged or of something else."""
        self.path = os.fspath(path)
        self._place = (device, driver, __version__)
        self._lock = threading.Lock()
        with self._errors():
            self._file = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._errors():
                self._prepare()
        except ResultsError:
            self._file.close()
            raise

    def _prepare(self) -> None:
        one = self._file.execute
        one("BEGIN IMMEDIATE")  # of two that come to a new file, one makes it
        try:
            self._check_or_make()
        except BaseException:
            one("ROLLBACK")
            raise
        one("COMMIT")
        with suppress(
            sqlite3.OperationalError
        ):  # to write is quicker so; where that can't be had it works without
            one("PRAGMA journal_mode = WAL")

    def _check_or_make(self) -> None:
        one = self._file.execute
        kind, number = (one(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if one("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            one(_TABLE)
            one(f"PRAGMA application_id = {APPLICATION}")
            one(f"PRAGMA user_version = {FORMAT}")
        elif kind != APPLICATION:
            raise ResultsError(
                f"{self.path}: a database of another program; name another file for the results"
            )
        elif number != FORMAT:
            raise ResultsError(
                f"{self.path}: results of format {number}, this version reads {FORMAT}; name another file"
            )
        elif (said := one("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ResultsError(f"{self.path}: damaged ({said}); delete it, or name another file")

    def get(self, kernel: str, beside: Tile, tile: Tile, repeats: int) -> Outcome | None:
        """What is known of a tile of a kernel, measured beside the profile's tile ``beside`` with so many launches.

        A tile that is no good is so with any number of launches.
        """
        with self._errors(), self._lock:
            row = self._file.execute(
                "SELECT default_us, us, fault FROM result WHERE device = ? AND driver = ? AND version = ?"
                " AND kernel = ? AND beside = ? AND tile = ? AND (repeats = ? OR fault != '') ORDER BY fault = ''",
                (*self._place, kernel, tile_text(beside), tile_text(tile), repeats),
            ).fetchone()
        return Outcome(*row) if row else None

    def put(self, kernel: str, beside: Tile, tile: Tile, repeats: int, outcome: Outcome) -> None:
        """Keep an outcome; it is in the file when this returns."""
        values = (repeats, outcome.default_us, outcome.us, outcome.fault)
        with self._errors(), self._lock:
            self._file.execute(
                "INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*self._place, kernel, tile_text(beside), tile_text(tile), *values),
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ResultsError(
                f"{self.path}: can't be used for results ({error}); delete it, or name another file"
            ) from None
