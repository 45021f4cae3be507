"""What a device's images can hold."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from modules import texture_target

from fusion_patterns.place.limits import FOLDINGS, TextureLimits, image_extent
from fusion_patterns.run import interpret
from fusion_patterns.run.manifest import TEXTURES

ADRENO = TextureLimits(textures=True, spatial=16384, depth=2048)
PACKED = st.lists(st.integers(1, 40), min_size=2, max_size=5).map(lambda dims: (*dims, 4))


@given(PACKED, st.sampled_from(FOLDINGS))
def test_the_runtime_folds_an_image_as_placement_thinks(shape: tuple[int, ...], scope: str) -> None:
    if scope == "global.texture-nhwc" and len(shape) < 3:
        return
    depth, height, width = image_extent(scope, shape)
    assert interpret.image_extent(shape, scope) == (width, height, depth)


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [
        # texture.h: axes before separator - 1 are layers, that axis is the height, the rest the width
        ("global.texture", (2 * 3, 5, 7)),
        ("global.texture-nhwc", (2, 3, 5 * 7)),
        ("global.texture-weight", (1, 2, 3 * 5 * 7)),
    ],
)
def test_tvms_foldings(scope: str, wanted: tuple[int, ...]) -> None:
    assert image_extent(scope, (2, 3, 5, 7, 4)) == wanted


def test_every_folding_is_a_scope_that_the_runtime_knows() -> None:
    assert sorted(FOLDINGS) == sorted(TEXTURES)


def test_limits_are_read_from_the_target() -> None:
    target = texture_target(texture_depth_limit=17, texture_spatial_limit=99)
    assert TextureLimits.of(target) == TextureLimits(True, 99, 17)
    assert TextureLimits.of(texture_target()) == ADRENO
    assert not TextureLimits.of(tvm.target.Target("opencl")).textures


@pytest.mark.parametrize(
    ("limits", "shape", "dtype", "reason"),
    [
        (TextureLimits(False, 9, 9), (1, 1, 1, 1, 4), "float32", "the target has no `texture` key"),
        (ADRENO, (1, 1, 1, 1, 4), "int8", "int8 has no image format"),
        (ADRENO, (1, 1, 1, 1, 3), "float32", "shape (1, 1, 1, 1, 3) does not end in 4 lanes"),
        (ADRENO, (4, 4), "float16", "shape (4, 4) does not end in 4 lanes"),
        (ADRENO, (1, 2049, 1, 1, 4), "float32", "global.texture: 2049 layers, the device has 2048"),
        (
            ADRENO,
            (1, 1, 16385, 9, 4),
            "float32",
            "global.texture: 16385x9 texels, the device has 16384x16384",
        ),
    ],
)
def test_why_a_tensor_can_not_be_an_image(
    limits: TextureLimits, shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    assert limits.why_not("global.texture", shape, dtype) == reason


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_tensor_at_the_limits_fits(dtype: str) -> None:
    assert ADRENO.why_not("global.texture", (1, 2048, 16384, 16384, 4), dtype) is None


def test_the_next_folding_is_taken_with_the_reason() -> None:
    limits = TextureLimits(True, 64, 3)
    assert limits.folding((1, 3, 8, 8, 4), "float32") == ("global.texture", "")
    assert limits.folding((1, 4, 8, 8, 4), "float32") == (
        "global.texture-nhwc",
        "global.texture: 4 layers, the device has 3",
    )


def test_no_folding_fits() -> None:
    scope, reasons = TextureLimits(True, 8, 3).folding((4, 4, 8, 8, 4), "float32")
    assert scope is None
    assert reasons.split("; ") == [
        "global.texture: 16 layers, the device has 3",
        "global.texture-nhwc: 4 layers, the device has 3",
        "global.texture-weight: 4x256 texels, the device has 8x8",
    ]


def test_a_reason_that_holds_for_all_foldings_is_said_once() -> None:
    scope, reasons = ADRENO.folding((1, 1, 1, 1, 4), "int32")
    assert (scope, reasons) == (None, "int32 has no image format")


@given(PACKED, st.integers(1, 50), st.integers(1, 300), st.sampled_from(["float32", "float16"]))
def test_a_folding_that_is_chosen_fits(shape: tuple[int, ...], depth: int, spatial: int, dtype: Any) -> None:
    limits = TextureLimits(True, spatial, depth)
    scope, _ = limits.folding(shape, dtype)
    if scope is None:
        assert all(limits.why_not(name, shape, dtype) for name in FOLDINGS)
    else:
        width, height, layers = interpret.image_extent(shape, scope)
        assert max(width, height) <= spatial
        assert layers <= depth
