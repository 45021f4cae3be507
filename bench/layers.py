"""Single memory-bound layers on large images: what share of a device's copy bandwidth their kernels reach.

The networks' own layers are too short for that on a large GPU: a kernel takes hardly longer than one that does nothing.
Each layer is a module of its own, named ``layer_`` and the row whose kernel it is for. Two 1x1 convolutions, from and
to four channels, stand around it, so that what it reads and writes is packed and in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from bench.device_tables import LAYER
from fusion_patterns.table import Table, load_table

__all__ = ["LAYERS", "layer_table"]

FEW = 4
Emit = Callable[[Any], Any]


def layer(
    body: Callable[[Emit, Any], Any], shape: tuple[int, int, int, int], *, kept: bool = False
) -> tvm.IRModule:
    """A module whose layer ``body`` reads a tensor of ``shape`` (N, C, H, W) that a convolution made.

    ``kept``: that tensor has another reader, so that the layer does not become the convolution's epilogue.
    """
    n, channels, height, width = shape
    x = relax.Var("x", relax.TensorType((n, FEW, height, width), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            emit = builder.emit
            data = emit(op.nn.conv2d(x, filled((channels, FEW, 1, 1))))
            result = emit(body(emit, data))
            results = [narrow(emit, result), *([narrow(emit, data)] if kept else [])]
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.get()


def narrow(emit: Emit, data: Any) -> Any:
    """A convolution to few channels, which reads all of ``data`` and writes little."""
    return emit(op.nn.conv2d(data, filled((FEW, int(data.ty.shape[1]), 1, 1))))


def filled(shape: tuple[int, ...]) -> Any:
    """Constant weights; no time depends on them."""
    return relax.const(np.full(shape, 1 / 64, "float32"))


def elementwise(emit: Emit, data: Any) -> Any:
    """A factor and an offset for each channel, then a clip."""
    vector = filled((1, int(data.ty.shape[1]), 1, 1))
    return op.clip(emit(op.add(emit(op.multiply(data, vector)), vector)), 0, 6)


def depthwise(emit: Emit, data: Any) -> Any:
    """A depthwise 3x3 convolution."""
    channels = int(data.ty.shape[1])
    return op.nn.conv2d(data, filled((channels, 1, 3, 3)), padding=(1, 1), groups=channels)


def pool(emit: Emit, data: Any) -> Any:
    """A 3x3 maximum with a stride of two, as after a network's first convolution."""
    return op.nn.max_pool2d(data, (3, 3), strides=(2, 2), padding=(1, 1))


def global_pool(emit: Emit, data: Any) -> Any:
    """The mean of each image."""
    return op.mean(data, axis=[2, 3], keepdims=True)


def resize(emit: Emit, data: Any) -> Any:
    """Each pixel four times."""
    height, width = (int(d) for d in data.ty.shape.values[2:])
    return op.image.resize2d(
        data,
        (2 * height, 2 * width),
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    )


def concat(emit: Emit, data: Any) -> Any:
    """Two tensors, one after the other along the channels."""
    channels = int(data.ty.shape[1])
    return op.concat([data, emit(op.nn.conv2d(data, filled((channels, channels, 1, 1))))], axis=1)


LAYERS: dict[str, Callable[[], tvm.IRModule]] = {
    f"{LAYER}{row}": build
    for row, build in {
        # what is read and what is written are 64 MB each, or the larger of them is
        "elementwise.chain": partial(layer, elementwise, (1, 64, 512, 512), kept=True),
        "conv2d.depthwise": partial(layer, depthwise, (1, 64, 512, 512)),
        "pool2d.chain": partial(layer, pool, (1, 64, 512, 512)),
        "global_pool.mean": partial(layer, global_pool, (16, 128, 96, 96)),
        "resize2d.chain": partial(layer, resize, (1, 64, 256, 256)),
        "concat.chain": partial(layer, concat, (1, 32, 512, 512)),
    }.items()
}
"""By name what builds the module of a layer."""


def layer_table(name: str) -> Table:
    """Of the built-in table the row that a layer is for, and that of the convolutions around it."""
    table = load_table()
    rows = "conv2d.chain", name.removeprefix(LAYER)
    return table.model_copy(update={"patterns": tuple(row for row in table.patterns if row.name in rows)})
