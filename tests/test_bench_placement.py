"""Counting where tensors live, on a module small enough to count by hand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modules import graph, nn, texture_target, var, weight
from tvm.relax import op

from bench import placement
from fusion_patterns import explain

X = (1, 8, 6, 6)


def test_every_figure() -> None:
    def build(emit: object, x: object) -> object:
        one = emit(nn.relu(emit(nn.conv2d(x, weight((8, 8, 3, 3)), padding=1))))
        two = emit(nn.conv2d(one, weight((8, 8, 3, 3), 1), padding=1))
        return emit(nn.softmax(emit(op.add(two, one)), axis=1))

    mod = graph(build, [var("x", X)])
    found = placement.count("block", mod, explain(mod, target=texture_target()), 0.25, None)
    assert found.convs == (2, 2)
    assert found.texture_inputs == (2, 2)
    assert found.texture == found.buffers == (1, 8 * 36 * 4)  # softmax reads the second result plain
    assert (found.conversions, found.copies) == (1, 0)
    assert found.apart == 4  # two results and two inputs, of which the second is the residual as well
    assert found.cells() == (
        [
            "block",
            "2 of 2",
            "100% of 2",
            "1, 1.2 kB",
            "1, 1.2 kB",
            "1",
            "4",
            "0",
            "0.2 s",
            "does not compile",
            "",
        ]
    )


def test_stock_stands_beside() -> None:
    stock = {"layout_transforms": 3, "to_vdevice": 1, "texture_values": 5, "global_values": 6}
    figures = placement.Figures("net", (1, 1), (1, 1), (1, 8), (0, 0), 2, 4, 0, 1.0, stock)
    assert figures.cells()[-2:] == ["3, 1", "5, 6"]
    assert len(figures.cells()) == len(placement.HEAD)


def test_the_table_replaces_only_what_it_made(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{placement.BEGIN}\nold\n{placement.END}\nafter\n")
    for _ in range(2):
        placement.write(page, "new")
    assert page.read_text() == f"before\n\n{placement.BEGIN}\n\nnew\n\n{placement.END}\nafter\n"
