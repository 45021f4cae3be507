"""What a network does to whole channels goes into the weights of the convolution before it.

Everything here is one idea: a convolution is linear, so a scale per output channel can be moved into its
weights. Batch norm in inference form is a scale and a shift per channel, and so becomes, wherever it stands,
a ``multiply`` and an ``add`` of constants that the other rules then take further:

    batch_norm(x, constants)[0]      -> add(multiply(x, S), T)      S, T of shape (1, C, 1, 1)
    multiply(conv(x, W), S)          -> conv(x, S * W)
    multiply(add(conv(x, W), B), S)  -> add(conv(x, S * W), S * B)
    add(add(conv(x, W), B), C)       -> add(conv(x, W), B + C)      B always of shape (1, O, 1, 1)
    conv(pad(x, zeros), W)           -> conv(x, W, padding)
    op(op(x, A), B)                  -> op(x, A op B)               op is multiply or add; A, B constants
    multiply(add(multiply(x, A), T), B) -> add(multiply(x, A * B), T * B)
    add(conv(x, W), conv(x, V))      -> conv(x, W + V)              V's window lies inside of W's
    add(conv(x, W), add(multiply(x, S), T)) -> add(conv(x, W + S at the pixel itself), T)

The last two undo the branches that a network such as RepVGG has for training only: a sum of linear functions of
one value is one of them. The wider window has all the taps, so the narrower one's products are saved as well.

S, B and C may be scalars or vectors along the channels, W must be a constant, and the values in between
must have no other reader. ``divide`` and ``subtract`` by constants count as ``multiply`` and ``add``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm_ffi import structural_equal

from fusion_patterns.normalise.rewrite import Array, Rewriter, constant_of, op_name, static_shape

CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose", "nn.conv2d_transpose")
_FLOATS = ("float16", "float32", "float64")
_LEAST_HALF = 2.0**-9  # a channel whose largest float16 weight is smaller loses digits to denormals


def batch_norm_item(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``batch_norm(x, ...)[0]`` -> scale and shift; ``[1]`` and ``[2]`` -> the statistics, which stay."""
    assert isinstance(expr, relax.TupleGetItem)
    norm = at.definition(expr.tuple_value)
    if op_name(norm) != "nn.batch_norm" or norm.attrs.training:
        return None
    if expr.index:
        return norm.args[expr.index + 2]
    data, statistics = norm.args[0], [at.constant(arg) for arg in norm.args[1:]]
    dtype, rank = str(expr.ty.dtype), expr.ty.ndim
    if dtype not in _FLOATS or rank < 1:
        return None
    axis = int(norm.attrs.axis) % rank
    if any(value is None for value in statistics):
        return _batch_norm_of_variables(at, norm, axis, rank)
    gamma, beta, mean, variance = (np.asarray(value, "float64") for value in statistics)
    scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(variance + norm.attrs.epsilon)
    shift = (beta if norm.attrs.center else 0.0) - mean * scale
    if not (np.isfinite(scale.astype(dtype)).all() and np.isfinite(shift.astype(dtype)).all()):
        return None
    scaled = at.emit(relax.op.multiply(data, _along(scale, axis, rank, dtype)))
    return relax.op.add(scaled, _along(shift, axis, rank, dtype))


def _batch_norm_of_variables(at: Rewriter, norm: Call, axis: int, rank: int) -> relax.Expr:
    """``(x - mean) / sqrt(variance + epsilon) * gamma + beta`` with statistics known only at run time."""
    others = [i for i in range(rank) if i != axis]

    def wide(vector: relax.Expr) -> relax.Expr:
        return at.emit(relax.op.expand_dims(vector, others)) if others else vector

    data, gamma, beta, mean, variance = norm.args
    epsilon = relax.const(float(norm.attrs.epsilon), str(variance.ty.dtype))
    deviation = at.emit(relax.op.sqrt(at.emit(relax.op.add(wide(variance), epsilon))))
    out = relax.op.divide(at.emit(relax.op.subtract(data, wide(mean))), deviation)
    if norm.attrs.scale:
        out = relax.op.multiply(at.emit(out), wide(gamma))
    if norm.attrs.center:
        out = relax.op.add(at.emit(out), wide(beta))
    return out


def scale_into_weights(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``multiply`` or ``divide`` of a convolution, with or without bias, by a constant per channel."""
    assert isinstance(expr, Call)
    for value, by in _operands(expr, commutes=op_name(expr) == "multiply"):
        conv, bias = _convolution(at, value)
        if conv is None:
            continue
        channel = _Channels(conv)
        scale = channel.vector(at.constant(by))
        if scale is None:
            continue
        if op_name(expr) == "divide":
            if not scale.all():
                continue
            scale = 1.0 / scale
        weight = channel.scaled(at.constant(conv.args[1]), scale)
        if weight is None:
            continue
        return _with_weight(at, conv, weight, None if bias is None else bias * scale)
    return None


def merge_biases(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``add`` or ``subtract`` of channel constants after a convolution: one ``add`` of ``(1, O, 1, 1)``."""
    assert isinstance(expr, Call)
    sign = -1.0 if op_name(expr) == "subtract" else 1.0
    for position, (value, by) in enumerate(_operands(expr, commutes=sign > 0)):
        conv, bias = _convolution(at, value)
        if conv is None:
            continue
        channel = _Channels(conv)
        shift = channel.vector(at.constant(by))
        if shift is None:
            continue
        plain = bias is None and sign > 0 and position == 0
        if plain and static_shape(by) == channel.wide_shape:
            continue  # this is the form that we want
        at_conv = value if bias is None else at.definition(value).args[0]
        return relax.op.add(at_conv, channel.wide(sign * shift + (0.0 if bias is None else bias)))
    return None


def join_constants(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """One ``multiply`` or ``add`` of constants after another, also an ``add`` between two ``multiply``."""
    assert isinstance(expr, Call)
    outer = _by_constant(at, expr)
    if outer is None:
        return None
    x, b = outer
    same, between = op_name(expr) or "", None
    inner = _by_constant(at, at.call_of(x, same))
    if inner is None and same == "multiply":
        between = _by_constant(at, at.call_of(x, "add"))
        inner = _by_constant(at, at.call_of(between[0], same)) if between else None
    if inner is None:
        return None
    joined = _combined(np.add if same == "add" else np.multiply, inner[1], b)
    shift = _combined(np.multiply, between[1], b) if between else None
    if joined is None or (between is not None and shift is None):
        return None
    if same == "add":
        return relax.op.add(inner[0], joined)
    scaled = relax.op.multiply(inner[0], joined)
    return scaled if shift is None else relax.op.add(at.emit(scaled), shift)


def join_branches(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """The sum of two convolutions of one value, or of one and that value scaled, as one convolution."""
    assert isinstance(expr, Call)
    for value, other in _operands(expr, commutes=True):
        conv, bias = _convolution(at, value)
        weight = None if conv is None else at.constant(conv.args[1])
        if conv is None or weight is None or not _is_plain_conv2d(conv):
            continue
        joined = weight.astype("float64")
        found, shift = _add_convolution(at, other, conv, joined)
        if not found:
            found, shift = _add_scaled(at, other, conv, joined)
        with np.errstate(over="ignore"):
            joined = joined.astype(weight.dtype)
        if not found or not np.isfinite(joined).all():
            continue
        shifts = [vector for vector in (bias, shift) if vector is not None]
        return _with_weight(at, conv, joined, sum(shifts) if shifts else None)
    return None


def _is_plain_conv2d(conv: Call) -> bool:
    attrs = conv.attrs
    layouts = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or "NCHW")
    plain = op_name(conv) == "nn.conv2d" and layouts == ("NCHW", "OIHW", "NCHW")
    return plain and _Channels(conv).count > 0


def _add_convolution(at: Rewriter, value: relax.Expr, conv: Call, joined: Any) -> tuple[bool, Any]:
    """Add the weight of another convolution of the same value to *joined*; whether that was done, and its bias."""
    other, bias = _convolution(at, value)
    weight = None if other is None else at.constant(other.args[1])
    if other is None or weight is None or not _is_plain_conv2d(other):
        return False, None
    attrs, theirs = conv.attrs, other.attrs
    alike = other.args[0].same_as(conv.args[0]) and int(theirs.groups) == int(attrs.groups)
    alike = alike and list(map(int, theirs.strides)) == list(map(int, attrs.strides))
    rows, columns = (_taps(joined.shape, attrs, weight.shape, theirs, axis) for axis in (0, 1))
    if not alike or rows is None or columns is None or not structural_equal(other.ty, conv.ty):
        return False, None
    joined[:, :, np.array(rows)[:, None], np.array(columns)] += weight
    return True, bias


def _add_scaled(at: Rewriter, value: relax.Expr, conv: Call, joined: Any) -> tuple[bool, Any]:
    """Add the scale of *conv*'s own input to *joined*; whether that was done, and what was added to what was scaled."""
    shifted = _by_constant(at, at.call_of(value, "add"))
    scaled = _by_constant(at, at.call_of(shifted[0] if shifted else value, "multiply"))
    if scaled is None or not scaled[0].same_as(conv.args[0]):
        return False, None
    channel, attrs = _Channels(conv), conv.attrs
    scale, shift = channel.vector(scaled[1]), channel.vector(shifted[1]) if shifted else None
    if scale is None or (shifted is not None and shift is None) or list(map(int, attrs.strides)) != [1, 1]:
        return False, None
    rows, columns = (_taps(joined.shape, attrs, (1, 1, 1, 1), None, axis) for axis in (0, 1))
    if rows is None or columns is None or not structural_equal(conv.args[0].ty, conv.ty):
        return False, None
    outputs = np.arange(channel.count)
    joined[outputs, outputs % joined.shape[1], rows[0], columns[0]] += scale
    return True, shift


def _taps(
    shape: tuple[int, ...], attrs: Any, narrower: tuple[int, ...], theirs: Any, axis: int
) -> list[int] | None:
    """Which taps of a window along height (0) or width (1) read what another window's taps read; None if one lacks.

    Without attributes the other window is a pixel without a border.
    """
    border, step = (int(theirs.padding[axis]), int(theirs.dilation[axis])) if theirs is not None else (0, 1)
    taps = []
    for tap in range(narrower[2 + axis]):
        place, rest = divmod(int(attrs.padding[axis]) - border + tap * step, int(attrs.dilation[axis]))
        if rest or not 0 <= place < shape[2 + axis]:
            return None
        taps.append(place)
    return taps


def _by_constant(at: Rewriter, call: relax.Expr | None) -> tuple[relax.Expr, Array] | None:
    """``(x, constant)`` of a commuting call with one constant operand of a floating dtype."""
    if call is None or str(call.ty.dtype) not in _FLOATS:
        return None
    for x, by in _operands(call, commutes=True):
        value = at.constant(by)
        if value is not None and at.constant(x) is None:
            return x, value
    return None


def _combined(function: Any, a: Array, b: Array) -> relax.Expr | None:
    """``function(a, b)`` as a constant, unless it grows beyond both or leaves what the dtype can hold."""
    with np.errstate(all="ignore"):
        exact = function(a.astype("float64"), b.astype("float64"))
        result = exact.astype(a.dtype)
    held = np.isfinite(result).all() and not np.any((result == 0) & (exact != 0))
    return constant_of(result) if held and result.size <= max(a.size, b.size) else None


def pad_into_convolution(at: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """``conv2d(nn.pad(x))`` -> ``conv2d(x)`` that pads by itself, for zeros around height and width."""
    assert isinstance(expr, Call)
    pad = at.call_of(expr.args[0], "nn.pad")
    if pad is None or pad.attrs.pad_mode != "constant" or float(pad.attrs.pad_value) != 0.0:
        return None
    attrs = expr.attrs
    widths = [int(w) for w in pad.attrs.pad_width]
    around = {dim: widths[2 * i : 2 * i + 2] for i, dim in enumerate(attrs.data_layout)}
    if len(around) != 4 or min(widths) < 0 or any(sum(w) for dim, w in around.items() if dim not in "HW"):
        return None
    top, left, bottom, right = map(int, attrs.padding)
    return relax.op.nn.conv2d(
        pad.args[0],
        expr.args[1],
        attrs.strides,
        [top + around["H"][0], left + around["W"][0], bottom + around["H"][1], right + around["W"][1]],
        attrs.dilation,
        int(attrs.groups),
        attrs.data_layout,
        attrs.kernel_layout,
        attrs.out_layout,
        attrs.out_dtype or None,
    )


class _Channels:
    """The output channels of a convolution: where they lie in its result and in its weight."""

    def __init__(self, conv: Call) -> None:
        attrs = conv.attrs
        layout = str(attrs.out_layout or attrs.data_layout)
        self.axis, self.rank = layout.find("C"), len(layout)
        self._kernel, self._groups = str(attrs.kernel_layout), int(attrs.groups)
        self._transposed = (op_name(conv) or "").endswith("_transpose")
        self.dtype = str(conv.ty.dtype)
        shape = static_shape(conv.args[1]) or ()
        plain = layout.isalpha() and self._kernel.isalpha() and len(shape) == self.rank
        out = shape[self._kernel.find("O")] if plain else 0
        self.count = out * (self._groups if self._transposed else 1)
        if self.dtype not in _FLOATS or str(conv.args[1].ty.dtype) != self.dtype:
            self.count = 0

    @property
    def wide_shape(self) -> tuple[int, ...]:
        return tuple(self.count if i == self.axis else 1 for i in range(self.rank))

    def vector(self, value: Array | None) -> Any:
        """*value* as a float64 vector of one number per channel, if that is what it is."""
        if value is None or not self.count or value.ndim > self.rank:
            return None
        shape = (1,) * (self.rank - value.ndim) + value.shape
        if any(n != 1 and (i != self.axis or n != self.count) for i, n in enumerate(shape)):
            return None
        return np.broadcast_to(value.reshape(-1), (self.count,)).astype("float64")

    def wide(self, vector: Any) -> relax.Expr:
        return _along(vector, self.axis, self.rank, self.dtype)

    def scaled(self, weight: Array | None, scale: Any) -> Array | None:
        """*weight* times *scale* per output channel; None when its dtype can't hold the product well."""
        if weight is None:
            return None
        if self._transposed:
            # Groups lie along the inputs; those of group g make the channels from g * O/groups on.
            inputs, outputs = self._kernel.find("I"), self._kernel.find("O")
            by_input = scale.reshape(self._groups, -1).repeat(weight.shape[inputs] // self._groups, axis=0)
            shape = [n if i in (inputs, outputs) else 1 for i, n in enumerate(weight.shape)]
            factor = (by_input if inputs < outputs else by_input.T).reshape(shape)
        else:
            factor = scale.reshape([-1 if dim == "O" else 1 for dim in self._kernel])
        exact = "float64" if self.dtype == "float64" else "float32"
        with np.errstate(all="ignore"):
            product = (weight * factor.astype(exact)).astype(self.dtype)
        if not np.isfinite(product).all():
            return None
        if self.dtype == "float16":
            largest = np.abs(product).max(axis=tuple(i for i, dim in enumerate(self._kernel) if dim != "O"))
            if np.any((largest > 0) & (largest < _LEAST_HALF)):
                return None
        return np.asarray(product)


def _along(vector: Any, axis: int, rank: int, dtype: str) -> relax.Expr:
    """A constant of *vector* along *axis* of a tensor of *rank*, of extent 1 elsewhere."""
    shape = [-1 if i == axis else 1 for i in range(rank)]
    return constant_of(np.asarray(vector).reshape(shape).astype(dtype))


def _operands(call: Call, *, commutes: bool) -> list[tuple[relax.Expr, relax.Expr]]:
    left, right = call.args
    return [(left, right), (right, left)] if commutes else [(left, right)]


def _convolution(at: Rewriter, value: relax.Expr) -> tuple[Call | None, Any]:
    """The convolution that *value* is, and the vector that was added to it; both without other readers."""
    conv = at.call_of(value, *CONVOLUTIONS)
    if conv is not None:
        return conv, None
    biased = at.call_of(value, "add")
    if biased is None:
        return None, None
    for inner, bias in _operands(biased, commutes=True):
        conv = at.call_of(inner, *CONVOLUTIONS)
        if conv is not None:
            vector = _Channels(conv).vector(at.constant(bias))
            return (conv, vector) if vector is not None else (None, None)
    return None, None


def _with_weight(at: Rewriter, conv: Call, weight: Array, bias: Any) -> relax.Expr:
    """*conv* with another weight, and a vector added to its channels unless *bias* is None."""
    args = [conv.args[0], constant_of(weight), *conv.args[2:]]
    better = Call(conv.op, args, conv.attrs, conv.ty_args, conv.span, conv.ty)
    return better if bias is None else relax.op.add(at.emit(better), _Channels(better).wide(bias))
