"""Reshapes and transpositions of a plain tensor whose result a packed kernel reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from modules import array, const, graph, nn, var
from tvm import te
from tvm.relax import op

from fusion_patterns import compile_module
from fusion_patterns.lower.compute.packed import Packed, move
from fusion_patterns.place.layouts import DATA, PLAIN, layout


@pytest.mark.parametrize("channels", [4, 6])
def test_a_look_up_is_what_numpy_moves(channels: int) -> None:
    values = array((2, 5, 3, channels))
    steps = [
        ((2, 5, 3, channels), (2, channels, 3, 5), [0, 3, 2, 1]),
        ((2, channels, 3, 5), (2 * channels, 15), None),
        ((2 * channels, 15), (2, channels, 5, 3), None),
    ]
    data = Packed(te.placeholder(values.shape, "float32", "data"), PLAIN, values.shape)
    result = move(data, steps)
    built = tvm.compile(tvm.IRModule({"main": te.create_prim_func([data.tensor, result])}), target="llvm")
    out = tvm.runtime.tensor(np.zeros([int(d) for d in result.shape], "float32"))
    built["main"](tvm.runtime.tensor(values), out)
    wanted = layout(DATA).pack(values.transpose(0, 3, 2, 1).reshape(2, channels, 5, 3))
    got = np.asarray(out.numpy())
    if channels % 4:  # lanes beyond the last channel are masked later
        got[:, -1, :, :, channels % 4 :] = 0
    np.testing.assert_array_equal(got, wanted)


def moved(read: Any, axes: list[int], dtype: str = "float32") -> Any:
    def build(emit: Any, x: Any) -> Any:
        return read(emit, emit(op.permute_dims(emit(nn.softmax(x, axis=3)), axes)))

    return compile_module(graph(build, [var("x", (2, 8, 6, 6), dtype)])).report


def test_what_nobody_reads_packed_is_left_to_stock() -> None:
    report = moved(lambda e, v: e(nn.softmax(v, axis=3)), [0, 1, 3, 2])
    assert "move.chain" not in report.composites
    (reason,) = [declined.reason for declined in report.declined if declined.row == "move.chain"]
    assert reason == "all that it reads and writes is plain: a kernel of ours would be no better than stock's"


def test_what_a_convolution_reads_is_written_packed() -> None:
    report = moved(lambda e, v: e(nn.conv2d(v, const((4, 8, 1, 1), 1))), [0, 1, 3, 2])
    assert "move.chain" in report.composites
    assert report.launches == 3  # softmax, move, convolution
