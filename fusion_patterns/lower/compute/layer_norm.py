"""Layer norm over the channels of packed images, ``(x - mean) / sqrt(variance + epsilon) * gamma + beta``.

The variance is a sum of squared differences from the mean, as in TVM's own layer norm.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from .packed import LANES, Packed, blocks

__all__ = ["SUMS", "layer_norm"]

SUMS = "norm_sum"


def layer_norm(data: Packed, gamma: Packed, beta: Packed, attrs: Any, dtype: str) -> te.Tensor:
    """Layer norm over the channels of ``data`` (N, C/4, H, W, 4); ``gamma`` and ``beta`` are (C/4, 4).

    Sums and the normalisation itself are in float32. Lanes beyond the last channel must be zero in ``data``.
    """
    batch, channels, height, width = data.shape
    count = tirx.const(float(channels), "float32")
    sums = (batch, 1, height, width, LANES)

    def at(n: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        return data.tensor[n, c, y, x, lane].astype("float32")

    def over_lanes(sum_: te.Tensor, n: Any, y: Any, x: Any) -> Any:
        return (sum_[n, 0, y, x, 0] + sum_[n, 0, y, x, 1] + sum_[n, 0, y, x, 2] + sum_[n, 0, y, x, 3]) / count

    c1, c2 = (te.reduce_axis((0, blocks(channels)), name) for name in ("c1", "c2"))
    total = te.compute(
        sums, lambda n, _, y, x, lane: te.sum(at(n, c1, y, x, lane), axis=c1), name=f"{SUMS}_data"
    )
    mean = te.compute(
        (batch, 1, height, width), lambda n, _, y, x: over_lanes(total, n, y, x), name="norm_mean"
    )

    def squared(n: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        difference = at(n, c, y, x, lane) - mean[n, 0, y, x]
        square = difference * difference
        if channels % LANES == 0:
            return square
        return tirx.Select(c * LANES + lane < channels, square, tirx.const(0, "float32"))

    squares = te.compute(
        sums, lambda n, _, y, x, lane: te.sum(squared(n, c2, y, x, lane), axis=c2), name=f"{SUMS}_squares"
    )
    epsilon = tirx.const(float(attrs.epsilon), "float32")
    scale = te.compute(
        (batch, 1, height, width),
        lambda n, _, y, x: tirx.const(1, "float32") / tirx.sqrt(over_lanes(squares, n, y, x) + epsilon),
        name="norm_scale",
    )

    def normalised(n: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        value = (at(n, c, y, x, lane) - mean[n, 0, y, x]) * scale[n, 0, y, x]
        if attrs.scale:
            value = value * gamma.tensor[c, lane].astype("float32")
        if attrs.center:
            value = value + beta.tensor[c, lane].astype("float32")
        return value.astype(dtype)

    return te.compute(data.tensor.shape, normalised, name="layer_norm")
