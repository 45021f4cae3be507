"""In which layouts a packed kernel reads the operands of its anchor, or why an anchor has no packed kernel.

Every function of an operator takes a call of it and the name of its value, and returns a layout for each tensor that
the call reads; :class:`NotPacked` says why there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from .calls import op_name, static_shape, tensor_args
from .layouts import CHANNEL_VECTOR, DATA, DENSE, DEPTHWISE, PLAIN, TRANSPOSED, WEIGHT

__all__ = ["ANCHORS", "REDUCTIONS", "ROW_RANK", "NotPacked", "conv2d", "dense", "global_pool"]

ROW_RANK = 2


class NotPacked(Exception):
    """A composite has no packed kernel. ``reason`` is a sentence, ``culprit`` the name of an IR value."""

    def __init__(self, reason: str, culprit: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit


def conv2d(call: Any, culprit: str) -> tuple[str, ...]:
    attrs = call.attrs
    if str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "OIHW":
        raise NotPacked(
            f"conv2d in layout {attrs.data_layout}/{attrs.kernel_layout} has no packed kernel", culprit
        )
    data, weight = floats(call, culprit)
    groups = int(attrs.groups)
    if groups == data[1] and weight[1] == 1 and weight[0] == data[1]:
        return DATA, DEPTHWISE
    if groups == 1 or (weight[1] % 4 == 0 and (weight[0] // groups) % 4 == 0):
        return DATA, WEIGHT
    return DATA, PLAIN


def conv2d_transpose(call: Any, culprit: str) -> tuple[str, ...]:
    attrs = call.attrs
    if str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "IOHW":
        raise NotPacked(f"conv2d_transpose in layout {attrs.data_layout}/{attrs.kernel_layout}", culprit)
    if int(attrs.groups) != 1:
        raise NotPacked("conv2d_transpose with groups has no packed kernel", culprit)
    if any(int(d) != 1 for d in attrs.dilation):
        raise NotPacked("conv2d_transpose with dilation has no packed kernel", culprit)
    floats(call, culprit)
    return DATA, TRANSPOSED


def pool2d(call: Any, culprit: str) -> tuple[str, ...]:
    attrs = call.attrs
    if str(attrs.layout) != "NCHW":
        raise NotPacked(f"pooling in layout {attrs.layout} has no packed kernel", culprit)
    if op_name(call) == "relax.nn.avg_pool2d" and any(int(d) != 1 for d in attrs.dilation):
        raise NotPacked("average pooling with dilation has no packed kernel", culprit)
    floats(call, culprit)
    return (DATA,)


def global_pool(call: Any, culprit: str) -> tuple[str, ...]:
    (data,) = floats(call, culprit)
    result = static_shape(call)
    if result not in ((data[0], data[1], 1, 1), data[:2]):
        raise NotPacked("only pooling of the whole image has a packed kernel", culprit)
    return (DATA,)


def group_norm(call: Any, culprit: str) -> tuple[str, ...]:
    attrs, data = call.attrs, static_shape(call.args[0])
    if data is None or len(data) != 4:
        raise NotPacked("group_norm needs a tensor of four static dimensions for a packed kernel", culprit)
    if str(call.args[0].ty.dtype) not in ("float32", "float16"):
        raise NotPacked(f"group_norm on {call.args[0].ty.dtype} has no packed kernel", culprit)
    axes = sorted(int(axis) % 4 for axis in attrs.axes)
    if int(attrs.channel_axis) not in (1, -3) or axes != [2, 3]:
        raise NotPacked(
            "group_norm of other dimensions than channels and pixels has no packed kernel", culprit
        )
    if data[1] % (4 * int(attrs.num_groups)):
        raise NotPacked(
            f"{int(attrs.num_groups)} groups of {data[1]} channels end inside blocks of four", culprit
        )
    return DATA, CHANNEL_VECTOR, CHANNEL_VECTOR


def dense(call: Any, culprit: str) -> tuple[str, ...]:
    shapes = [static_shape(expr) for expr in tensor_args(call)]
    if any(shape is None or len(shape) != ROW_RANK for shape in shapes):
        raise NotPacked("matmul needs two tensors of two static dimensions for a packed kernel", culprit)
    for expr in tensor_args(call):
        if str(expr.ty.dtype) not in ("float32", "float16"):
            raise NotPacked(f"matmul on {expr.ty.dtype} has no packed kernel", culprit)
    return PLAIN, DENSE


def layer_norm(call: Any, culprit: str) -> tuple[str, ...]:
    if [int(axis) for axis in call.attrs.axes] not in ([1], [-3]):
        raise NotPacked("only a layer norm over the channels has a packed kernel", culprit)
    floats(call, culprit, count=1)
    return DATA, CHANNEL_VECTOR, CHANNEL_VECTOR


def concat(call: Any, culprit: str) -> tuple[str, ...]:
    if int(call.attrs.axis) not in (1, -3):
        raise NotPacked(f"concat along axis {call.attrs.axis}, not the channels", culprit)
    return (DATA,) * len(floats(call, culprit))


def resize2d(call: Any, culprit: str) -> tuple[str, ...]:
    if str(call.attrs.layout) != "NCHW":
        raise NotPacked(f"resize in layout {call.attrs.layout} has no packed kernel", culprit)
    if str(call.attrs.method) not in ("nearest_neighbor", "linear"):
        raise NotPacked(f"resize by {call.attrs.method} has no packed kernel", culprit)
    floats(call, culprit)
    return (DATA,)


def channel_slice(call: Any, culprit: str) -> tuple[str, ...]:
    numbers = [
        [getattr(n, "value", None) for n in arg.fields]
        for arg in call.args[1:]
        if isinstance(arg, relax.Tuple)
    ]
    if len(numbers) < 3 or numbers[0] != [1] or (len(numbers) > 3 and numbers[3] != [1]):
        raise NotPacked("only a slice of consecutive channels has a packed kernel", culprit)
    begin = numbers[1][0]
    if not isinstance(begin, int) or begin < 0:
        raise NotPacked(f"the slice begins at channel {begin}, not at a known one", culprit)
    floats(call, culprit)
    return (DATA,)


def floats(call: Any, culprit: str, count: int | None = None) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a call reads, or of the first so many: static, rank 4, float."""
    shapes: list[tuple[int, ...]] = []
    for expr in tensor_args(call)[:count]:
        shape = static_shape(expr)
        if shape is None or len(shape) != 4:
            raise NotPacked(
                f"{op_name(call)} needs tensors of four static dimensions for a packed kernel", culprit
            )
        if str(expr.ty.dtype) not in ("float32", "float16"):
            raise NotPacked(f"{op_name(call)} on {expr.ty.dtype} has no packed kernel", culprit)
        shapes.append(shape)
    return shapes


ANCHORS: dict[str, Callable[[Any, str], tuple[str, ...]]] = {
    "relax.nn.conv2d": conv2d,
    "relax.nn.conv2d_transpose": conv2d_transpose,
    "relax.nn.max_pool2d": pool2d,
    "relax.nn.avg_pool2d": pool2d,
    "relax.nn.adaptive_avg_pool2d": pool2d,
    "relax.mean": global_pool,
    "relax.nn.layer_norm": layer_norm,
    "relax.nn.group_norm": group_norm,
    "relax.concat": concat,
    "relax.image.resize2d": resize2d,
    "relax.strided_slice": channel_slice,
}
"""By operator what tells the layout of each tensor that a call of it reads, from the call and the name of its value."""

REDUCTIONS = frozenset(ANCHORS) - {"relax.concat", "relax.image.resize2d", "relax.strided_slice"}
"""Anchors that sum: what they compute is computed once, not again for every pixel that reads it."""
