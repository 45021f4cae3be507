"""Results on the disk: found again, by this device alone, by several processes, or refused in one sentence."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_patterns.lower.schedule.tiles import Tile
from fusion_patterns.tune.store import Outcome, ResultsError, Store, tile_text

DEFAULT, TILE = Tile(1, 1, 4, (1, 4, 16)), Tile(2, 1, 4, (1, 2, 16), 2)
FAST = Outcome(100.0, 70.0)


def test_an_outcome_is_found_again_after_the_file_was_closed(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", "gpu", "1.0") as store:
        assert store.get("k", DEFAULT, TILE, 10) is None
        store.put("k", DEFAULT, TILE, 10, FAST)
    with Store(tmp_path / "r.sqlite", "gpu", "1.0") as store:
        assert store.get("k", DEFAULT, TILE, 10) == FAST
        assert store.get("k", DEFAULT, TILE, 10).ratio == 0.7


@pytest.mark.parametrize(
    ("device", "driver", "kernel", "default", "tile", "repeats"),
    [
        ("other", "1.0", "k", DEFAULT, TILE, 10),
        ("gpu", "1.1", "k", DEFAULT, TILE, 10),
        ("gpu", "1.0", "other", DEFAULT, TILE, 10),
        ("gpu", "1.0", "k", TILE, TILE, 10),
        ("gpu", "1.0", "k", DEFAULT, DEFAULT, 10),
        ("gpu", "1.0", "k", DEFAULT, TILE, 30),
    ],
)
def test_an_outcome_is_only_for_what_it_was_measured_with(
    tmp_path: Path, device: str, driver: str, kernel: str, default: Tile, tile: Tile, repeats: int
) -> None:
    with Store(tmp_path / "r.sqlite", "gpu", "1.0") as store:
        store.put("k", DEFAULT, TILE, 10, FAST)
    with Store(tmp_path / "r.sqlite", device, driver) as store:
        assert store.get(kernel, default, tile, repeats) is None


def test_a_tile_that_is_no_good_is_so_with_any_number_of_launches(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", "gpu", "1.0") as store:
        store.put("k", DEFAULT, TILE, 10, FAST)
        store.put("k", DEFAULT, TILE, 30, Outcome(fault="wrong results"))
        assert store.get("k", DEFAULT, TILE, 10) == Outcome(fault="wrong results")
        assert store.get("k", DEFAULT, TILE, 99) == Outcome(fault="wrong results")


def test_a_tile_in_one_word() -> None:
    assert tile_text(TILE) == "2x1x4/1x2x16/2"


WRITER = """
import sys
from fusion_patterns.lower.schedule.tiles import Tile
from fusion_patterns.tune.store import Outcome, Store
with Store(sys.argv[1], "gpu", "1.0") as store:
    print("open", flush=True)
    sys.stdin.readline()
    for number in range(1, 101):
        store.put(sys.argv[2], Tile(1, 1, 1, (1, 1, 1)), Tile(1, 1, number, (1, 1, 1)), 1, Outcome(2.0, float(number)))
"""


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for writer in writers:  # both have opened it, and one of them made it
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    one = Tile(1, 1, 1, (1, 1, 1))
    with Store(path, "gpu", "1.0") as store:
        for name in ("a", "b"):
            got = [store.get(name, one, Tile(1, 1, number, (1, 1, 1)), 1) for number in range(1, 101)]
            assert got == [Outcome(2.0, float(number)) for number in range(1, 101)]


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, " * 100)
    with pytest.raises(
        ResultsError, match=r"notes\.txt: can't be used for results \(file is not a database\)"
    ):
        Store(path, "gpu", "1.0")
    assert path.read_text() == "these are my notes, " * 100


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE result (device TEXT)")
    before = path.read_bytes()
    with pytest.raises(
        ResultsError, match=r"other\.sqlite: a database of another program; name another file"
    ):
        Store(path, "gpu", "1.0")
    assert path.read_bytes() == before


def test_results_of_a_later_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    Store(path, "gpu", "1.0").close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 7")
    with pytest.raises(ResultsError, match="results of format 7, this version reads 1; name another file"):
        Store(path, "gpu", "1.0")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with Store(path, "gpu", "1.0") as store:
        for number in range(1, 200):
            store.put("k", DEFAULT, Tile(1, 1, number, (1, 1, 1)), 1, FAST)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ResultsError, match=r"r\.sqlite: (damaged|can't be used for results)"):
        Store(path, "gpu", "1.0")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="unable to open database file"):
        Store(tmp_path / "nowhere" / "r.sqlite", "gpu", "1.0")
