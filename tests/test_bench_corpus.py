"""The corpus runner: a process for each network, results that survive being stopped, the page of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import corpus, table

VERIFIED: dict[str, Any] = {
    "name": "small",
    "stage": "done",
    "ops": 10,
    "compile_seconds": 1.5,
    "worst": 2e-6,
    "finite": True,
    "varies": True,
    "device": "some device",
    "report": {
        "convs": {"total": 2, "covered": 2},
        "launches": 4,
        "conversions": 1,
        "texture_bytes": 300,
        "global_bytes": 100,
    },
    "conv_inputs": 2,
    "conv_inputs_texture": 1,
    "conv_bytes": 200,
    "conv_bytes_texture": 100,
    "stock_raw": 9,
    "stock_normal": 5,
}
WRONG = VERIFIED | {"worst": 1e-3}


def failed(stage: str, kind: str = "BuildError", reason: str = "because") -> dict[str, Any]:
    return {
        "name": "bad",
        "stage": stage,
        "failed": {"stage": stage, "kind": kind, "reason": reason, "known": True},
    }


@pytest.mark.parametrize(
    ("record", "word", "said"),
    [
        (VERIFIED, "verified", "error 2.0e-06"),
        (VERIFIED | {"finite": False}, "failed", "not finite"),
        (VERIFIED | {"varies": False}, "failed", "don't vary"),
        (WRONG | {"first_wrong": "conv2d.chain `lv3`"}, "failed", "first at conv2d.chain `lv3`"),
        (WRONG | {"ours_to_float64": 3e-3, "stock_to_float64": 2e-3}, "rounding", "ours 3.0e-03"),
        (WRONG | {"ours_to_float64": 1e-3, "stock_to_float64": 1e-6}, "failed", "error 1.0e-03"),
        (failed("import", reason="no LSTM"), "refused", "by TVM's importer: no LSTM"),
        (failed("match"), "failed", "at match: because"),
        # What is only counted after the verification may run out of time.
        (VERIFIED | failed("stock launches raw", "stopped"), "verified", "error"),
        ({"name": "gone", "stage": "device run"}, "failed", "at device run"),
    ],
)  # fmt: skip
def test_one_word_for_each_outcome(record: dict[str, Any], word: str, said: str) -> None:
    outcome = table.outcome(record)
    assert outcome[0] == word
    assert said in outcome[1]


def test_the_peer_is_stock_at_its_best() -> None:
    assert table.stock(VERIFIED) == 5
    assert table.stock({"stock_raw": 9}) == 9
    assert table.stock({}) is None


def test_the_page_has_a_row_for_each_network() -> None:
    page = table.document([VERIFIED, failed("import", reason="a | b")], 3)
    assert "3 networks are listed, 2 of them have been run: 1 verified" in page
    assert "| `small` | 10 | 2/2 | 4 | 5 | 1 | 50 % | 50 % | 75 % | 1.5 | 2e-06 |" in page
    assert "| `bad` | refused | by TVM's importer: a \\| b |" in page
    assert "Fewer launches than stock on 1 of 1" in page


def test_a_line_cut_short_is_left_out_and_the_last_record_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [json.dumps(VERIFIED), json.dumps(VERIFIED | {"ops": 11}), '{"name": "hal']
    file.write_text("\n".join(lines))
    assert {name: record["ops"] for name, record in corpus.read(file).items()} == {"small": 11}
    assert corpus.read(tmp_path / "none") == {}


def test_a_generated_block_replaces_only_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nby hand\n")
    table.write_block(page, "one", "One", "first")
    table.write_block(page, "two", "Two", "second")
    table.write_block(page, "one", "One", "changed")
    text = page.read_text()
    assert "by hand" in text
    assert "first" not in text
    assert text.index("changed") < text.index("## Two") < text.index("second")
    page.write_text("<!-- one: begin, generated -->\nno end")
    with pytest.raises(ValueError, match="is not followed by"):
        table.write_block(page, "one", "One", "text")


def options(tmp_path: Path, *arguments: str) -> Any:
    return corpus._parser().parse_args([*arguments, "--results", str(tmp_path / "r.jsonl")])


def test_a_network_that_takes_too_long_is_stopped_with_the_stage(tmp_path: Path) -> None:
    record = corpus.network("ow_mtcnn_pnet", "ours", options(tmp_path, "--seconds", "0.3"))
    assert table.outcome(record)[0] == "failed"
    assert record["failed"] == {
        "stage": "start",
        "kind": "stopped",
        "reason": "not done after 0 s",
        "known": False,
    }


def test_a_process_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    record = corpus.network("no such network", "ours", options(tmp_path))
    assert table.outcome(record)[0] == "failed"
    assert "the process ended with 1: KeyError" in record["failed"]["reason"]


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.corpus
def test_a_small_network_goes_the_whole_way(tmp_path: Path, shared: Path, opencl_device: Any) -> None:
    document = tmp_path / "page.md"
    arguments = [
        "--only",
        "ow_mtcnn_rnet",
        "--results",
        str(tmp_path / "r.jsonl"),
        "--document",
        str(document),
    ]
    assert corpus.main(arguments) == 0
    assert "`ow_mtcnn_rnet`" in document.read_text()
    record = corpus.read(tmp_path / "r.jsonl")["ow_mtcnn_rnet"]
    assert record["report"]["convs"] == {"total": 3, "covered": 3}
    before = (tmp_path / "r.jsonl").read_text()
    assert corpus.main(arguments) == 0
    assert (tmp_path / "r.jsonl").read_text() == before
