"""Images that are enlarged: what is rewritten, by how many kernels they are enlarged, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from modules import graph, nn, shape_of, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import load_table, verify
from fusion_patterns.match import plan_fusion
from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.rewrite import op_name
from fusion_patterns.run import Device

TOLERANCE = 1e-5
X = (2, 8, 10, 9)

Emit = Callable[[Any], Any]


def enlarge(
    emit: Emit, x: Any, method: str = "linear", mode: str = "half_pixel", size: tuple[int, int] = X[2:]
) -> Any:
    rounding = "floor" if method == "nearest_neighbor" else ""
    return emit(
        op.image.resize2d(
            x,
            relax.ShapeExpr(list(size)),
            layout="NCHW",
            method=method,
            coordinate_transformation_mode=mode,
            rounding_method=rounding,
        )
    )


def conv(emit: Emit, x: Any, channels: int, seed: int = 0) -> Any:
    return emit(nn.conv2d(x, weight((channels, shape_of(x)[1], 1, 1), seed)))


def part(emit: Emit, x: Any, channels: int, windows: int = 2, **attrs: Any) -> Any:
    """Averages over a few windows of the image, convolved and enlarged."""
    small = emit(nn.adaptive_avg_pool2d(x, [windows, windows]))
    return enlarge(emit, conv(emit, small, channels, channels), **attrs)


def module(build: Callable[[Emit, Any], Any], shape: tuple[int, ...] = X) -> tvm.IRModule:
    return graph(build, [var("x", shape)])


def concats(mod: tvm.IRModule) -> list[int]:
    """How many parts each concat of the normalised module joins."""
    found: list[int] = []

    def visit(expr: Any) -> None:
        if op_name(expr) == "concat":
            found.append(len(expr.args[0].fields))

    relax.analysis.post_order_visit(normalise(mod)["main"], visit)
    return found


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ("xUU", [2, 2]),
        ("UUx", [2, 2]),
        ("UUUUx", [4, 2]),
        ("UUxUU", [2, 2, 3]),
        ("UUUUU", [4, 2]),
        ("UUUU", [4]),
        ("xU", [2]),
        ("UxU", [3]),
        ("xNN", [3]),
    ],
)
def test_neighbours_that_are_enlarged_are_joined_first(parts: str, joined: list[int]) -> None:
    """``U``: enlarged linearly, ``N``: by repeating pixels, ``x``: as it is."""

    def build(emit: Emit, x: Any) -> Any:
        made = {
            "x": lambda k: x,
            "U": lambda k: part(emit, x, 4 + k),
            "N": lambda k: part(emit, x, 4 + k, method="nearest_neighbor", mode="asymmetric"),
        }
        return emit(op.concat([made[kind](k) for k, kind in enumerate(parts)], axis=1))

    assert concats(module(build)) == joined


def test_what_others_read_is_not_joined_first() -> None:
    def build(emit: Emit, x: Any) -> list[Any]:
        a, b = part(emit, x, 4), part(emit, x, 8)
        return [emit(op.concat([x, a, b], axis=1)), a]

    assert concats(module(build)) == [3]


@pytest.mark.opencl
def test_a_pyramid_of_pools_is_enlarged_by_one_kernel(opencl_device: Device) -> None:
    """Of five parts the four that are enlarged; the convolution reads the image where it is."""

    def build(emit: Emit, x: Any) -> Any:
        value = emit(nn.relu(conv(emit, x, 8)))
        parts = [part(emit, value, 4, windows) for windows in (1, 2, 3, 6)]
        return emit(
            nn.conv2d(emit(op.concat([*parts, value], axis=1)), weight((7, 24, 3, 3)), padding=[1, 1])
        )

    report = verify(module(build), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    rows = report.compiled.report.composites
    assert (rows["concat.resized.four"], rows["conv2d.concat"]) == (1, 1)
    assert "resize2d.chain" not in rows


@pytest.mark.parametrize(
    ("row", "channels", "change", "reason"),
    [
        ("concat.resized", (6, 4), {}, "`part_a.C % 4 == 0` does not hold"),
        ("concat.resized.three", (4, 6, 4), {}, "`part_a.C % 4 == 0 and part_b.C % 4 == 0` does not hold"),
        (
            "concat.resized.four",
            (4, 4, 6, 4),
            {},
            "`part_a.C % 4 == 0 and part_b.C % 4 == 0 and part_c.C % 4 == 0` does not hold",
        ),
        ("concat.resized", (4, 4), {"method": "cubic"}, "method"),
        ("concat.resized", (4, 4, 4), {}, "`cat.parts == 2` does not hold"),
    ],
)
def test_near_misses(row: str, channels: tuple[int, ...], change: dict[str, str], reason: str) -> None:
    """Lanes from several parts, another way to enlarge, another number of parts."""

    def build(emit: Emit, x: Any) -> Any:
        parts = [part(emit, x, count, k + 2, **change) for k, count in enumerate(channels)]
        return emit(op.concat(parts, axis=1))

    plan = plan_fusion(normalise(module(build)), load_table())
    assert row not in [match.row for match in plan.matches]
    reasons = [decision.reason for decision in plan.decisions if decision.row == row]
    assert any(reason in why for why in reasons), reasons


# One pixel ------------------------------------------------------------------------------------------------


def gate(emit: Emit, x: Any, join: Any, **attrs: Any) -> Any:
    pixel = conv(emit, emit(op.mean(x, [2, 3], keepdims=True)), shape_of(x)[1])
    large = enlarge(emit, pixel, **attrs)
    return emit(join(x, large))


@pytest.mark.opencl
@pytest.mark.parametrize("method", ["linear", "nearest_neighbor"])
@pytest.mark.parametrize("join", [op.add, op.multiply])
@pytest.mark.parametrize("channels", [8, 7])
def test_a_pixel_that_meets_an_image_is_broadcast(
    opencl_device: Device, channels: int, join: Any, method: str
) -> None:
    def build(emit: Emit, x: Any) -> Any:
        return gate(emit, conv(emit, x, channels, 3), join, method=method)

    mod = module(build)
    report = verify(mod, device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert not resizes(mod)


@pytest.mark.parametrize("case", ["two pixels", "a value beyond the image", "both are pixels"])
def test_what_is_no_pixel_or_meets_none_stays(case: str) -> None:
    def build(emit: Emit, x: Any) -> Any:
        if case == "two pixels":
            return emit(op.add(x, part(emit, x, 8)))
        if case == "a value beyond the image":
            return gate(emit, x, op.add, mode="tf_crop_and_resize")
        pixel = emit(op.mean(x, [2, 3], keepdims=True))
        return emit(op.add(conv(emit, pixel, 8), enlarge(emit, pixel)))

    assert resizes(module(build))


def resizes(mod: tvm.IRModule) -> int:
    count = 0

    def visit(expr: Any) -> None:
        nonlocal count
        count += op_name(expr) == "image.resize2d"

    relax.analysis.post_order_visit(normalise(mod)["main"], visit)
    return count


# What a convolution adds ------------------------------------------------------------------------------------


def level(
    emit: Emit, x: Any, channels: int = 8, above: int = 8, method: str = "linear", groups: int = 1
) -> Any:
    """The level above, enlarged, added to a convolution of this one."""
    small = conv(emit, emit(nn.max_pool2d(x, [2, 2], [2, 2])), above)
    own = emit(nn.conv2d(x, weight((channels, 8 // groups, 1, 1), 1), groups=groups))
    return emit(op.add(own, enlarge(emit, small, method)))


@pytest.mark.opencl
@pytest.mark.parametrize("shape", [X, (1, 8, 21, 13)])
@pytest.mark.parametrize("channels", [8, 5])
def test_a_convolution_adds_what_it_enlarges(
    opencl_device: Device, channels: int, shape: tuple[int, ...]
) -> None:
    """Two images; sizes of which one is not twice the other. What others read as well is there."""

    def build(emit: Emit, x: Any) -> list[Any]:
        small = conv(emit, emit(nn.max_pool2d(x, [2, 2], [2, 2])), channels)
        large = enlarge(emit, small, "nearest_neighbor", "half_pixel", shape[2:])
        value = emit(op.add(conv(emit, x, channels, 1), large))
        return [conv(emit, value, 8, 2), conv(emit, small, 8, 3)]

    report = verify(module(build, shape), device=opencl_device.info.index)
    assert report.ok, (report.first_wrong, report.outputs)
    assert report.worst < TOLERANCE
    assert report.compiled is not None
    rows = report.compiled.report.composites
    assert rows["conv2d.enlarged"] == 1
    assert "resize2d.chain" not in rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "cubic"}, "method"),
        ({"above": 1}, "`up.shape == conv.shape and output.shape == conv.shape` does not hold"),
        ({"groups": 2}, "groups"),
    ],
)
def test_near_misses_of_a_level(change: dict[str, Any], reason: str) -> None:
    plan = plan_fusion(normalise(module(lambda emit, x: level(emit, x, **change))), load_table())
    assert "conv2d.enlarged" not in [match.row for match in plan.matches]
    reasons = [decision.reason for decision in plan.decisions if decision.row == "conv2d.enlarged"]
    assert any(reason in why for why in reasons), reasons
