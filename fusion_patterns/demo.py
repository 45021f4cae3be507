"""The whole way once, on a trained network: PP-OCR's text detector, out of its package on PyPI.

The input is a page drawn here: words in a small pixel font on a shaded ground. So the detector has
something to find, and an output that varies, which noise would not give.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fusion_patterns.compiler import Progress, compile_module
from fusion_patterns.errors import DeviceError
from fusion_patterns.frontends import load_model
from fusion_patterns.networks import NETWORKS, fetch_model
from fusion_patterns.reference import Reference, stock_launches
from fusion_patterns.report import Report, render_report
from fusion_patterns.run import Session, pick_device
from fusion_patterns.verification import OutputCheck, compare

__all__ = ["Demo", "draw_page", "render", "run"]

NETWORK = "ppocr_v4_det"
SIZE = 320
"""Height and width of the page. The detector takes any multiple of 32; this one keeps the demo short."""

# 5 x 7 pixels a letter, a row a number, the highest of its five bits on the left.
_FONT = {
    "A": (14, 17, 17, 31, 17, 17, 17),
    "E": (31, 16, 16, 30, 16, 16, 31),
    "F": (31, 16, 16, 30, 16, 16, 16),
    "I": (14, 4, 4, 4, 4, 4, 14),
    "N": (17, 25, 21, 19, 17, 17, 17),
    "O": (14, 17, 17, 17, 17, 17, 14),
    "P": (30, 17, 17, 30, 16, 16, 16),
    "R": (30, 17, 17, 30, 20, 18, 17),
    "S": (15, 16, 16, 14, 1, 1, 30),
    "T": (31, 4, 4, 4, 4, 4, 4),
    "U": (17, 17, 17, 17, 17, 17, 14),
    "X": (17, 17, 10, 4, 10, 17, 17),
}
_WORDS = (("FUSION", 5, 30, 40), ("PATTERNS", 4, 110, 60), ("TEXTURE", 3, 190, 30), ("A POINT", 2, 250, 150))
"""Word, size of a font pixel, top, left."""


@dataclass(frozen=True)
class Demo:
    """What the demo found out.

    ``device``: where the texture kernels ran; empty if there is no device, and ``no_device`` says why.
    ``checks``: output by output against the untouched module on the CPU. ``text``: the share of the page
    that the detector takes for text.
    """

    report: Report
    stock_launches: int
    kernels: int
    checks: list[OutputCheck]
    text: float
    device: str
    no_device: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all outputs agree, are finite and vary."""
        return bool(self.checks) and all(check.ok and check.varies for check in self.checks)

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(check.error for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, ready for JSON."""
        return {**asdict(self), "network": NETWORK, "ok": self.ok, "worst": self.worst}


def draw_page(size: int = SIZE) -> np.ndarray[Any, Any]:
    """Dark words on a light ground that gets darker downwards: (1, 3, size, size) in float32.

    The values are as the detector wants them: the mean and deviation of ImageNet are taken out.
    """
    page = np.repeat(np.linspace(0.95, 0.75, size)[:, None], size, axis=1)
    for word, dot, top, left in _WORDS:
        for index, letter in enumerate(word):
            rows = _FONT.get(letter, (0,) * 7)
            bits = np.array([[row >> shift & 1 for shift in (4, 3, 2, 1, 0)] for row in rows])
            ink = np.kron(bits, np.ones((dot, dot)))[
                : max(0, size - top), : max(0, size - left - 6 * dot * index)
            ]
            x = left + 6 * dot * index
            page[top : top + ink.shape[0], x : x + ink.shape[1]] -= 0.65 * ink
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    image = (page[None] - mean[:, None, None]) / deviation[:, None, None]
    return np.asarray(image[None], np.float32)


def run(device: str | None, say: Progress) -> Demo:
    """Fetch, fuse, compile, run, compare. Without a device the fused module runs on the CPU instead."""
    begin = time.perf_counter()
    path = fetch_model(NETWORK, progress=say)
    (name,) = NETWORKS[NETWORK].inputs
    say("reading the network")
    mod = load_model(path, {name: (1, 3, SIZE, SIZE)})
    inputs = {name: draw_page()}
    compiled = compile_module(mod, name=NETWORK, progress=say)
    where, missing = "", ""
    say("building kernels and running on the device")
    try:
        session = Session(compiled.manifest, pick_device(device))
        results, where = session.run(inputs), str(session.device.info.name)
    except DeviceError as error:
        if device is not None:
            raise
        missing = str(error)
        say("running the fused module on the CPU")
        results = Reference(compiled.fused).run(inputs)
    say("running the untouched module on the CPU")
    expected = Reference(mod).run(inputs)
    say("counting the kernels of stock FuseOps")
    checks = [compare(f"output {i}", *pair) for i, pair in enumerate(zip(results, expected, strict=True))]
    return Demo(
        report=compiled.report,
        stock_launches=stock_launches(mod),
        kernels=len(compiled.kernels),
        checks=checks,
        text=float((results[0] > 0.5).mean()),
        device=where,
        no_device=missing,
        seconds=time.perf_counter() - begin,
    )


def render(demo: Demo) -> str:
    """The demo's findings for people."""
    lines = [
        f"{NETWORK}: trained, out of {NETWORKS[NETWORK].requirement}; input: a drawn page of {SIZE} x {SIZE}",
        "",
        render_report(demo.report, stock_launches=demo.stock_launches, reasons=3),
        f"OpenCL C         {demo.kernels} kernels for qcom/adreno-opencl-texture",
    ]
    if demo.device:
        lines.append(f"ran on           {demo.device}, texture kernels with images")
    else:
        lines.append(f"no device        {demo.no_device}")
        lines.append(
            "ran on           the CPU instead, the fused module through LLVM: OpenCL C was made, not run"
        )
    lines.append(f"output           finite and varies: {100 * demo.text:.1f}% of the page is taken for text")
    verdict = "agrees with the untouched module on the CPU" if demo.ok else "DOES NOT AGREE with the CPU"
    lines.append(f"{verdict}: worst relative error {demo.worst:.1e}; {demo.seconds:.0f} seconds")
    return "\n".join(lines)
