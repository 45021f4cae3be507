"""The operators a table may name: how many operands each has, and whether they commute.

Names are Relax names without ``relax.``. The facts are kept here as data, so that a table can be read and
checked where no TVM is installed; a test holds them against TVM's own registry. One name is not Relax's:
``elementwise`` stands for a ``call_tir`` whose PrimFunc was found, by analysis, to be elementwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

__all__ = ["ELEMENTWISE", "OPS", "Kind", "Op"]

ELEMENTWISE = "elementwise"
"""The pseudo-operator: an elementwise ``call_tir``, with any number of operands."""


class Kind(StrEnum):
    """What an operator does to the elements of its operands."""

    UNARY = "unary"
    BINARY = "binary"
    TERNARY = "ternary"
    ANY_ELEMENTWISE = "elementwise"
    """elementwise with any number of operands"""
    REDUCTION = "reduction"
    NORMALISATION = "normalisation"
    """a reduction whose result is combined with the operand again"""
    CONVOLUTION = "convolution"
    MATMUL = "matmul"
    POOL = "pool"
    INJECTIVE = "injective"
    """each element of the result is one element of an operand, or a few for an interpolation"""


@dataclass(frozen=True, slots=True)
class Op:
    """The facts of one operator."""

    name: str
    kind: Kind
    arity: int | None
    """Number of operands that are tensors; None: any number (``concat`` takes a tuple of them)."""
    args: int | None
    """Number of arguments of the call, numbers and shapes included; None: not fixed."""
    commutes: bool = False
    """Whether its two operands may change places."""
    results: int | None = 1
    """Number of tensors in the result; None: not fixed. More than one comes as a tuple."""
    attrs: tuple[str, ...] = ()
    """Names of its attributes, as a predicate may ask for them."""

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the result needs only the elements at its own place."""
        return self.kind in (Kind.UNARY, Kind.BINARY, Kind.TERNARY, Kind.ANY_ELEMENTWISE)


_CONV = (
    "strides",
    "padding",
    "dilation",
    "groups",
    "data_layout",
    "kernel_layout",
    "out_layout",
    "out_dtype",
)
_CONV_TRANSPOSE = (*_CONV, "output_padding")
_POOL = (
    *("pool_size", "strides", "dilation", "padding", "ceil_mode"),
    *("count_include_pad", "layout", "out_layout"),
)
_ADAPTIVE_POOL = ("output_size", "layout", "out_layout")
_AFFINE_NORM = ("axes", "epsilon", "center", "scale")
_RESIZE = (
    *("roi", "layout", "method", "coordinate_transformation_mode", "rounding_method"),
    *("cubic_alpha", "cubic_exclude", "extrapolation_value", "out_dtype"),
)


def _elementwise() -> Iterable[Op]:
    unary = (
        "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf exp floor isfinite isinf isnan"
        " log logical_not negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
        " nn.gelu nn.gelu_tanh nn.relu nn.selu nn.silu"
    )
    for name in unary.split():
        yield Op(name, Kind.UNARY, arity=1, args=1)
    yield Op("astype", Kind.UNARY, arity=1, args=1, attrs=("dtype",))
    yield Op("clip", Kind.UNARY, arity=1, args=3)
    yield Op("nn.leakyrelu", Kind.UNARY, arity=1, args=1, attrs=("alpha",))
    yield Op("nn.softplus", Kind.UNARY, arity=1, args=1, attrs=("beta", "threshold"))
    commuting = (
        "add bitwise_and bitwise_or bitwise_xor equal log_add_exp logical_and logical_or logical_xor"
        " maximum minimum multiply not_equal"
    )
    for name in commuting.split():
        yield Op(name, Kind.BINARY, arity=2, args=2, commutes=True)
    ordered = (
        "atan2 divide floor_divide floor_mod greater greater_equal left_shift less less_equal mod power"
        " right_shift subtract"
    )
    for name in ordered.split():
        yield Op(name, Kind.BINARY, arity=2, args=2)
    yield Op("nn.prelu", Kind.BINARY, arity=2, args=2, attrs=("axis",))
    yield Op("ewise_fma", Kind.TERNARY, arity=3, args=3)
    yield Op("where", Kind.TERNARY, arity=3, args=3)
    yield Op(ELEMENTWISE, Kind.ANY_ELEMENTWISE, arity=None, args=None)


def _contractions() -> Iterable[Op]:
    for n in ("1d", "2d", "3d"):
        yield Op(f"nn.conv{n}", Kind.CONVOLUTION, arity=2, args=2, attrs=_CONV)
        yield Op(f"nn.conv{n}_transpose", Kind.CONVOLUTION, arity=2, args=2, attrs=_CONV_TRANSPOSE)
        yield Op(f"nn.max_pool{n}", Kind.POOL, arity=1, args=1, attrs=_POOL)
        yield Op(f"nn.avg_pool{n}", Kind.POOL, arity=1, args=1, attrs=_POOL)
        yield Op(f"nn.adaptive_avg_pool{n}", Kind.POOL, arity=1, args=1, attrs=_ADAPTIVE_POOL)
    yield Op("matmul", Kind.MATMUL, arity=2, args=2, attrs=("out_dtype",))
    for name in ("max", "mean", "min", "prod", "std", "sum", "variance", "argmax", "argmin"):
        yield Op(name, Kind.REDUCTION, arity=1, args=1, attrs=("axis", "keepdims"))


def _normalisations() -> Iterable[Op]:
    for name in ("nn.softmax", "nn.log_softmax"):
        yield Op(name, Kind.NORMALISATION, arity=1, args=1, attrs=("axis",))
    batch_norm = ("axis", "epsilon", "center", "scale", "momentum", "training")
    yield Op("nn.batch_norm", Kind.NORMALISATION, arity=5, args=5, results=3, attrs=batch_norm)
    group_norm = ("num_groups", "channel_axis", *_AFFINE_NORM)
    yield Op("nn.group_norm", Kind.NORMALISATION, arity=3, args=3, attrs=group_norm)
    yield Op("nn.instance_norm", Kind.NORMALISATION, arity=3, args=3, attrs=("channel_axis", *_AFFINE_NORM))
    yield Op("nn.layer_norm", Kind.NORMALISATION, arity=3, args=3, attrs=_AFFINE_NORM)
    yield Op("nn.rms_norm", Kind.NORMALISATION, arity=2, args=2, attrs=("axes", "epsilon"))


def _injective() -> Iterable[Op]:
    one_operand = {
        "expand_dims": ("axis",),
        "flatten": (),
        "flip": ("axis",),
        "layout_transform": ("index_map", "pad_value"),
        "nn.batch_flatten": (),
        "nn.pad": ("pad_width", "pad_value", "pad_mode"),
        "nn.pixel_shuffle": ("upscale_factor",),
        "permute_dims": ("axes",),
        "repeat": ("repeats", "axis"),
        "squeeze": ("axis",),
        "tile": ("repeats",),
    }
    for name, attrs in one_operand.items():
        yield Op(name, Kind.INJECTIVE, arity=1, args=1, attrs=attrs)
    yield Op("broadcast_to", Kind.INJECTIVE, arity=1, args=2)
    yield Op("reshape", Kind.INJECTIVE, arity=1, args=2)
    yield Op("image.resize2d", Kind.INJECTIVE, arity=1, args=2, attrs=_RESIZE)
    # The axes, begins and ends are arguments; strides are one more, but only if they were given.
    yield Op("strided_slice", Kind.INJECTIVE, arity=1, args=None, attrs=("assume_inbound",))
    yield Op("concat", Kind.INJECTIVE, arity=None, args=1, attrs=("axis",))
    yield Op("stack", Kind.INJECTIVE, arity=None, args=1, attrs=("axis",))
    yield Op("split", Kind.INJECTIVE, arity=1, args=1, results=None, attrs=("indices_or_sections", "axis"))
    yield Op("nn.dropout", Kind.INJECTIVE, arity=1, args=1, results=2, attrs=("rate",))
    yield Op("take", Kind.INJECTIVE, arity=2, args=2, attrs=("axis", "mode"))


def _all() -> dict[str, Op]:
    ops = (*_elementwise(), *_contractions(), *_normalisations(), *_injective())
    return {op.name: op for op in sorted(ops, key=lambda op: op.name)}


OPS: Mapping[str, Op] = MappingProxyType(_all())
"""Every operator a table may name, by name."""
