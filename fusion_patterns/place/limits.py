"""What a target's images can hold: foldings of a tensor into (depth, height, width) and the device's limits.

A scope says where the image's axes are cut (TVM's runtime, ``texture.h``): with separator ``s`` the axes
before ``s - 1`` are the array's depth, axis ``s - 1`` its height, the rest but the last its width, and the
last axis the four channels of a texel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from .layouts import LANES

__all__ = ["FOLDINGS", "TextureLimits", "image_extent"]

FOLDINGS = ("global.texture", "global.texture-nhwc", "global.texture-weight")
"""Scopes in the order in which they are tried. The names say a folding, not a use."""


def image_extent(scope: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(depth, height, width) in texels of a tensor of ``shape`` in ``scope``."""
    rank = len(shape)
    separator = {
        "global.texture": rank - 2,
        "global.texture-nhwc": 2,
        "global.texture-weight": 1,
    }[scope]
    separator = max(1, min(separator, rank - 1))
    return prod(shape[: separator - 1]), shape[separator - 1], prod(shape[separator:-1])


@dataclass(frozen=True)
class TextureLimits:
    """The device limits that a target states.

    ``spatial`` and ``depth`` are texels and layers; 16384 and 2048 are TVM's defaults for Adreno targets.
    """

    textures: bool
    spatial: int
    depth: int
    lacking: str = "the target has no `texture` key"
    """Why there are no textures, where there are none."""

    @classmethod
    def of(cls, target: Any) -> TextureLimits:
        """Read the limits from a ``tvm.target.Target``."""
        attrs = target.attrs
        return cls(
            textures="texture" in [str(key) for key in target.keys],
            spatial=int(attrs.get("texture_spatial_limit", 16384)),
            depth=int(attrs.get("texture_depth_limit", 2048)),
        )

    def why_not(self, scope: str, shape: tuple[int, ...], dtype: str) -> str | None:
        """Why a tensor can't be an image in ``scope``; ``None`` if it can."""
        if not self.textures:
            return self.lacking
        if dtype not in ("float32", "float16"):
            return f"{dtype} has no image format"
        if len(shape) < 3 or shape[-1] != LANES:
            return f"shape {shape} does not end in {LANES} lanes"
        depth, height, width = image_extent(scope, shape)
        if depth > self.depth:
            return f"{scope}: {depth} layers, the device has {self.depth}"
        if max(height, width) > self.spatial:
            return f"{scope}: {height}x{width} texels, the device has {self.spatial}x{self.spatial}"
        return None

    def folding(self, shape: tuple[int, ...], dtype: str) -> tuple[str | None, str]:
        """The first folding that fits, and the reasons why those before it do not."""
        reasons: list[str] = []
        for scope in FOLDINGS:
            reason = self.why_not(scope, shape, dtype)
            if reason is None:
                return scope, "; ".join(reasons)
            if reason not in reasons:
                reasons.append(reason)
        return None, "; ".join(reasons)
