"""How often a composite's kernel asks for each element of its operands.

One texel (four channels) is loaded for one use in registers: a convolution asks for its input once for each
tap of the window and each block of four output channels, for its weights once for each output pixel. What a
schedule then keeps in registers lessens all of it alike, in texture as in buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from .calls import op_name, static_shape, tensor_args
from .layouts import DEPTHWISE, LANES
from .needs import Needs

__all__ = ["times_read"]

SWEEPS = 3.0
"""A norm reads its data for the mean, for the variance, and for the result."""


def times_read(func: Any, needs: Needs) -> tuple[float, ...]:
    """For each operand of a composite how often each element is asked for; at least once."""
    times = [0.0] * len(needs.operands)
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    for (number, arg), operand in needs.reads.items():
        binding = bindings[number]
        shapes = [static_shape(expr) or () for expr in tensor_args(binding.value)]
        result = static_shape(binding.var) or ()
        count = _COUNTS.get(op_name(binding.value), _broadcast)
        layouts = [needs.operands[o].layout for (n, _), o in needs.reads.items() if n == number]
        times[operand] += count(binding.value, arg, shapes, result, DEPTHWISE in layouts)
    return tuple(max(1.0, count) for count in times)


_Count = Callable[[Any, int, list[tuple[int, ...]], tuple[int, ...], bool], float]


def _conv2d(
    call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool
) -> float:
    """``alone``: each output channel reads one input channel, so a texel serves its own lanes only."""
    transposed = op_name(call) == "relax.nn.conv2d_transpose"
    weight = shapes[1]
    products = prod(shapes[0] if transposed else result) * prod(weight[1:])
    per_load = LANES if arg == 0 and not alone else 1
    return products / (prod(shapes[arg]) * per_load)


def _window(
    call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool
) -> float:
    return prod(result) * prod(int(size) for size in call.attrs.pool_size) / prod(shapes[arg])


def _group_norm(
    call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool
) -> float:
    return SWEEPS if arg == 0 else _broadcast(call, arg, shapes, result, alone)


def _dense(call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool) -> float:
    return result[0] if arg else result[1] / LANES


def _whole(call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool) -> float:
    return 1.0


def _layer_norm(
    call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool
) -> float:
    """The data is kept in local memory."""
    return prod(result) / prod(shapes[arg])


def _broadcast(
    call: Any, arg: int, shapes: list[tuple[int, ...]], result: tuple[int, ...], alone: bool
) -> float:
    return prod(result) / max(prod(shapes[arg]), 1)


_COUNTS: dict[str, _Count] = {
    "relax.nn.conv2d": _conv2d,
    "relax.nn.conv2d_transpose": _conv2d,
    "relax.nn.max_pool2d": _window,
    "relax.nn.avg_pool2d": _window,
    "relax.nn.adaptive_avg_pool2d": _whole,
    "relax.mean": _whole,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.group_norm": _group_norm,
    "relax.matmul": _dense,
    "relax.concat": _whole,
    "relax.strided_slice": _whole,
}
