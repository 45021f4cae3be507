"""The demo: its page, its words, and, slowly, all of it."""

from __future__ import annotations

import json

import networks
import numpy as np
import pytest

from fusion_patterns import cli, demo
from fusion_patterns.errors import DeviceError
from fusion_patterns.report import Report
from fusion_patterns.verification import OutputCheck


def test_the_page_has_words_on_a_ground() -> None:
    page = demo.draw_page()
    assert page.shape == (1, 3, demo.SIZE, demo.SIZE)
    assert page.dtype == np.float32
    dark = float((page[0, 0] < 0).mean())
    assert 0.02 < dark < 0.3


def finding(**changes: object) -> demo.Demo:
    facts = {
        "report": Report(composites={"conv2d.chain": 2}, launches=3, kernels=2),
        "stock_launches": 5,
        "kernels": 2,
        "checks": [OutputCheck("output 0", 1e-6, 1e-4, finite=True, varies=True)],
        "text": 0.07,
        "device": "a device",
        "no_device": "",
        "seconds": 1.0,
    }
    return demo.Demo(**{**facts, **changes})


def test_what_it_says() -> None:
    text = demo.render(finding())
    assert "  conv2d.chain      2" in text
    assert "kernel launches  3 (stock FuseOps: 5), of 2 distinct kernels" in text
    assert "agrees with the untouched module on the CPU: worst relative error 1.0e-06" in text
    alone = demo.render(finding(device="", no_device="no OpenCL device; install a driver"))
    assert "no device        no OpenCL device; install a driver" in alone
    assert "OpenCL C was made, not run" in alone


@pytest.mark.parametrize("change", [{"varies": False}, {"finite": False}, {"error": 1.0}])
def test_it_is_not_well_when_numbers_are_not(change: dict[str, object]) -> None:
    facts = {"name": "output 0", "error": 0.0, "tolerance": 1e-4, "finite": True, "varies": True}
    assert not finding(checks=[OutputCheck(**{**facts, **change})]).ok


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize("with_device", [True, False])
def test_all_of_it(
    with_device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    networks.fetch(demo.NETWORK)
    if not with_device:

        def none(spec: str | None = None) -> None:
            raise DeviceError("no OpenCL device")

        monkeypatch.setattr(demo, "pick_device", none)
    assert cli.main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["worst"] < 1e-4
    assert found["report"]["convs"]["covered"] > 0
    assert 0.01 < found["text"] < 0.3
    assert bool(found["device"]) == (with_device and not found["no_device"])
