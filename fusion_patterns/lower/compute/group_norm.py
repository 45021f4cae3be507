"""Group normalisation on packed tensors as TE computes.

The sums keep the four lanes of a texel apart, so that they move whole texels; what follows them adds the lanes up.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from .packed import LANES, Packed
from .pooling import wide_of

__all__ = ["GROUP_NORM", "group_norm"]

GROUP_NORM = "group_norm"
"""What the names of all its blocks begin with."""


def group_norm(data: Packed, gamma: Packed, beta: Packed, groups: int, epsilon: float) -> te.Tensor:
    """``(x - mean) / sqrt(variance + epsilon) * gamma + beta``; mean and variance of each group's channels and pixels.

    Four divides the channels of a group; ``gamma`` and ``beta`` are one number for each channel. The variance is the
    mean square of what is left after the mean is taken away. float16 is summed in float32.
    """
    n, channels, height, width = data.shape
    blocks = channels // groups // LANES
    wide = wide_of(data.dtype)
    scale = tirx.const(1.0 / (blocks * LANES * height * width), wide)
    shape = (n, groups, 1, 1, LANES)

    def summed(value: Any, name: str) -> te.Tensor:
        axes = [
            te.reduce_axis((0, d), k)
            for d, k in zip((blocks, height, width), ("kc", "ky", "kx"), strict=True)
        ]
        c, y, x = axes

        def total(b: Any, g: Any, i: Any, j: Any, lane: Any) -> Any:
            return te.sum(value(b, g, c, y, x, lane), axis=axes)

        return te.compute(shape, total, name=f"{GROUP_NORM}_{name}")

    def mean_of(total: te.Tensor, b: Any, g: Any) -> Any:
        lanes = [total[b, g, 0, 0, lane] for lane in range(LANES)]
        return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) * scale

    def element(b: Any, g: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return data.tensor[b, g * blocks + c, y, x, lane].astype(wide)

    total = summed(element, "total")
    mean = te.compute(shape, lambda b, g, i, j, lane: mean_of(total, b, g), name=f"{GROUP_NORM}_mean")

    def square(b: Any, g: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        off = element(b, g, c, y, x, lane) - mean[b, g, 0, 0, lane]
        return off * off

    spread = summed(square, "spread")
    small = tirx.const(epsilon, wide)
    scales = te.compute(
        shape, lambda b, g, i, j, lane: te.rsqrt(mean_of(spread, b, g) + small), name=f"{GROUP_NORM}_scale"
    )

    def normal(b: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        g = c // blocks
        value = (data.tensor[b, c, y, x, lane].astype(wide) - mean[b, g, 0, 0, lane]) * scales[
            b, g, 0, 0, lane
        ]
        return value.astype(data.dtype) * gamma.tensor[c, lane] + beta.tensor[c, lane]

    return te.compute(data.tensor.shape, normal, name="normalise")
