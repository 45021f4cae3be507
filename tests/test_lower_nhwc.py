"""Images with their channels last at the edges of packed kernels: what is read and written so, and what is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from modules import Calls, const, graph, nn, var, weight
from tvm.relax import op

from fusion_patterns import compile_module, load_table
from fusion_patterns.place.anchors import NotPacked
from fusion_patterns.place.layouts import DATA, PLAIN
from fusion_patterns.place.needs import needs_of
from fusion_patterns.testing.rows import table_of

X = (1, 8, 6, 10)


def first(channels: int = 8, size: int = 3, image: int = 3, stride: int = 1, axes: Any = (0, 3, 1, 2)) -> Any:
    """A caller's image of 20x20 pixels, turned, and its convolution."""
    sides = [20, 20, 20, 20]
    sides[0], sides[axes[1]] = 1, image

    def build(emit: Any, x: Any) -> Any:
        turned = emit(op.permute_dims(x, list(axes)))
        return emit(nn.conv2d(turned, weight((channels, image, size, size)), strides=[stride, stride]))

    return graph(build, [var("x", sides)])


def last(
    axes: Any = (0, 2, 3, 1), channels: int = 8, tail: Callable[..., Any] | None = None, groups: int = 1
) -> Any:
    """A convolution whose result is turned."""

    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.conv2d(x, weight((channels, 8 // groups, 1, 1)), groups=groups))
        return emit(op.permute_dims(tail(emit, value) if tail else value, list(axes)))

    return graph(build, [var("x", X)])


def labels(compiled: Any) -> list[str]:
    return [step.label for step in compiled.manifest.functions["main"].body if hasattr(step, "grid")]


def reasons(row: str, mod: Any) -> list[str]:
    """Why a row does not take the only convolution of a module."""
    (alone,) = [table_of(found, load_table()) for found in load_table().patterns if found.name == row]
    figures = compile_module(mod, table=alone).report
    assert row not in figures.composites
    return [declined.reason for declined in figures.declined if declined.row == row]


def test_the_callers_image_is_read_without_a_launch_before() -> None:
    compiled = compile_module(first())
    assert labels(compiled) == ["conv2d.first.nhwc"]


def test_an_image_that_is_read_often_is_packed_where_it_is_turned() -> None:
    compiled = compile_module(first(64, 7))
    assert labels(compiled) == ["move.chain", "conv2d.first"]
    (reason,) = reasons("conv2d.first.nhwc", first(64, 7))
    assert "`weight.O * weight.H * weight.W <= 256 * conv.strides[0] * conv.strides[1]`" in reason


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (lambda: first(image=4), "dimension 3 of `x` (data of `lv`) is 4"),
        (lambda: first(axes=(0, 3, 2, 1)), "axes of `lv` (permute_dims) is [0, 3, 2, 1]"),
    ],
)
def test_near_misses_of_a_first_convolution(module: Callable[[], Any], wanted: str) -> None:
    (reason,) = reasons("conv2d.first.nhwc", module())
    assert wanted in reason


@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (3, 0, 1, 2), (0, 1, 3, 2)])
def test_a_result_in_another_order_of_axes_is_written_so(axes: Any) -> None:
    compiled = compile_module(last(axes))
    assert labels(compiled)[-1] == "conv2d.to_nhwc"
    assert "transpose" not in " ".join(labels(compiled))


@pytest.mark.parametrize(
    ("row", "module", "wanted"),
    [
        (
            "conv2d.to_nhwc",
            lambda: last(tail=lambda e, v: e(op.add(e(nn.relu(v)), const((2, 8, 6, 10))))),
            "`tail.shape == conv.shape` does not hold",
        ),
        ("conv2d.to_nhwc", lambda: last(groups=2), "groups of"),
        ("conv2d.depthwise.to_nhwc", lambda: last(groups=2), "does not hold"),
    ],
)
def test_near_misses_of_a_last_convolution(row: str, module: Callable[[], Any], wanted: str) -> None:
    (reason,) = reasons(row, module())
    assert wanted in reason


@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (3, 0, 1, 2)])
@pytest.mark.parametrize("height", [8, 9])
@pytest.mark.parametrize(("channels", "guarded"), [(2, 0), (6, 2), (7, 1), (8, 0)])
def test_lanes_beyond_the_last_channel_are_not_written(
    channels: int, guarded: int, height: int, axes: tuple[int, ...]
) -> None:
    """They would be the next pixel's, which a kernel that runs in order hides by writing that one later."""

    def build(emit: Any, x: Any) -> Any:
        return emit(op.permute_dims(emit(nn.conv2d(x, weight((channels, 5, 1, 1)))), list(axes)))

    compiled = compile_module(graph(build, [var("x", (2, 5, height, 11))]))
    (kernel,) = (k for k in compiled.manifest.kernels.values() if "nhwc" in k.name)
    lines = [line.strip() for line in kernel.source.splitlines()]
    stores = [k for k, line in enumerate(lines) if re.match(r"unpack\w*\[", line)]
    block = [lines[k - 1] for k in stores if re.match(r"if \(.*get_group_id\(2\)", lines[k - 1])]
    assert (len(stores), len(block)) == (min(channels, 4), guarded)


def test_a_result_that_others_read_as_it_is_keeps_its_order() -> None:
    def build(emit: Any, x: Any) -> Any:
        value = emit(nn.conv2d(x, weight((8, 8, 1, 1))))
        return [emit(op.permute_dims(value, [0, 2, 3, 1])), emit(nn.conv2d(value, weight((8, 8, 1, 1), 1)))]

    figures = compile_module(graph(build, [var("x", X)])).report
    assert figures.composites == {"conv2d.chain": 2}


# What a composite needs -----------------------------------------------------------------------------------


def needs(build: Callable[..., Any], *params: Any) -> Any:
    return needs_of(Calls().composite(build, list(params)).func)


def test_a_turned_image_is_read_plain_and_a_turned_result_written_plain() -> None:
    found = needs(lambda e, d: e(nn.relu(e(op.permute_dims(d, [0, 3, 1, 2])))), var("data", (1, 6, 10, 8)))
    assert [operand.layout for operand in found.operands] == [PLAIN]
    assert (found.output_layout, found.output_shape) == (DATA, X)
    found = needs(lambda e, d: e(op.permute_dims(e(nn.relu(d)), [0, 2, 3, 1])), var("data", X))
    assert [operand.layout for operand in found.operands] == [DATA]
    assert (found.output_layout, found.output_shape) == (PLAIN, (1, 6, 10, 8))


@pytest.mark.parametrize(
    ("build", "shape", "wanted"),
    [
        (
            lambda e, d: e(nn.relu(e(op.permute_dims(e(nn.relu(d)), [0, 2, 3, 1])))),
            X,
            "changes the order of axes inside of the composite",
        ),
    ],
)
def test_other_turns_are_refused(build: Callable[..., Any], shape: tuple[int, ...], wanted: str) -> None:
    with pytest.raises(NotPacked, match=wanted):
        needs(build, var("data", shape))


@pytest.mark.parametrize("axis", [1, -1])
def test_prelu_of_rows_has_a_slope_for_each_channel(axis: int) -> None:
    def build(emit: Any, d: Any, w: Any, slope: Any) -> Any:
        return emit(nn.prelu(emit(op.matmul(d, w)), slope, axis=axis))

    found = needs(build, var("data", (2, 8)), var("weight", (8, 5)), var("slope", (5,)))
    assert [operand.layout for operand in found.operands][-1] == PLAIN


def test_prelu_of_rows_along_the_images_is_refused() -> None:
    def build(emit: Any, d: Any, w: Any, slope: Any) -> Any:
        return emit(nn.prelu(emit(op.matmul(d, w)), slope, axis=0))

    with pytest.raises(NotPacked, match="prelu along another axis"):
        needs(build, var("data", (2, 8)), var("weight", (8, 5)), var("slope", (2,)))
