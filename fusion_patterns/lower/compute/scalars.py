"""What each elementwise Relax op does to one scalar.

Formulas are Relax's own (``python/tvm/relax/op``): gelu with erf, gelu_tanh with its tanh fit, round half to even.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

__all__ = ["scalar_expression"]

Expression = Callable[..., Any]


def _const(value: float, like: Any) -> Any:
    return tirx.const(value, str(like.dtype) if hasattr(like, "dtype") else str(like.ty.dtype))


def _sigmoid(x: Any) -> Any:
    return tirx.sigmoid(x)


def _erf(x: Any) -> Any:
    return tirx.erf(x)


def _gelu(x: Any) -> Any:
    return x * _const(0.5, x) * (_const(1.0, x) + _erf(x * _const(1 / math.sqrt(2), x)))


def _gelu_tanh(x: Any) -> Any:
    inner = _const(math.sqrt(2 / math.pi), x) * (x + _const(0.044715, x) * x * x * x)
    return _const(0.5, x) * x * (_const(1.0, x) + tirx.tanh(inner))


def _selu(x: Any) -> Any:
    zero, one = _const(0, x), _const(1, x)
    below = tirx.min(zero, _const(1.6732632423543772, x) * (tirx.exp(x) - one))
    return _const(1.0507009873554805, x) * (tirx.max(x, zero) + below)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return tirx.Select(condition, yes, no)


_PLAIN: dict[str, Expression] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": tirx.div,
    "maximum": tirx.max,
    "minimum": tirx.min,
    "power": tirx.power,
    "abs": tirx.abs,
    "ceil": tirx.ceil,
    "cos": tirx.cos,
    "erf": _erf,
    "exp": tirx.exp,
    "floor": tirx.floor,
    "log": tirx.log,
    "negative": lambda a: -a,
    "nn.relu": lambda a: tirx.max(a, _const(0, a)),
    "nn.relu6": lambda a: tirx.min(tirx.max(a, _const(0, a)), _const(6, a)),
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.selu": _selu,
    "nn.silu": lambda a: a * _sigmoid(a),
    "nn.prelu": lambda a, slope: _select(a > _const(0, a), a, a * slope),
    "round": tirx.nearbyint,
    "rsqrt": lambda a: _const(1, a) / tirx.sqrt(a),
    "sigmoid": _sigmoid,
    "sign": lambda a: _select(
        a > _const(0, a), _const(1, a), _select(a < _const(0, a), _const(-1, a), _const(0, a))
    ),
    "sin": tirx.sin,
    "sqrt": tirx.sqrt,
    "square": lambda a: a * a,
    "tanh": tirx.tanh,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "equal": lambda a, b: tirx.EQ(a, b),
    "not_equal": lambda a, b: tirx.NE(a, b),
    "logical_and": lambda a, b: tirx.And(a, b),
    "logical_or": lambda a, b: tirx.Or(a, b),
    "logical_not": lambda a: tirx.Not(a),
    "where": _select,
}


def scalar_expression(call: Any) -> Expression | None:
    """The scalar function of an elementwise call, over its *tensor* operands; ``None`` if the op is not known."""
    name = str(call.op.name).removeprefix("relax.")
    if name == "clip":
        low, high = (_number(arg) for arg in call.args[1:])
        return lambda a: tirx.min(tirx.max(a, _const(low, a)), _const(high, a))
    if name == "nn.leakyrelu":
        alpha = float(call.attrs.alpha)
        return lambda a: _select(a > _const(0, a), a, a * _const(alpha, a))
    if name == "nn.softplus":
        beta, threshold = float(call.attrs.beta), float(call.attrs.threshold)
        return lambda a: _select(
            a * _const(beta, a) > _const(threshold, a),
            a,
            tirx.log(_const(1, a) + tirx.exp(a * _const(beta, a))) / _const(beta, a),
        )
    if name == "astype":
        dtype = str(call.attrs.dtype)
        return lambda a: a.astype(dtype)
    return _PLAIN.get(name)


def _number(arg: Any) -> float:
    value = getattr(arg, "value", arg)
    return float(getattr(value, "value", value))
