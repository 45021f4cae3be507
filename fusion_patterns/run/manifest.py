"""A built module as data: tensors with their memory scopes, kernels, launches and constants.

A :class:`Manifest` is all that a device needs: `opencl.Session` runs it, `store.save` writes it to a folder
and `store.load` reads it back. It knows nothing of TVM, so a saved module replays where TVM isn't installed.

Values are named. Each name is bound once, by a parameter, a constant or a step. A value is a tensor on the
device, a tuple of values, or a shape on the host. ``"v3#0#1"`` addresses an item of a tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ManifestError

Array: TypeAlias = NDArray[Any]
Dim: TypeAlias = int | str
"""An extent: a number, or an expression over the symbols of the parameters' shapes (see `interpret`)."""
Result: TypeAlias = "str | tuple[Result, ...] | None"
"""A value by name, a nested tuple of values, or nothing."""
TensorTree: TypeAlias = "Tensor | tuple[TensorTree, ...]"

BUFFER = "global"
TEXTURES = ("global.texture", "global.texture-nhwc", "global.texture-weight")
SCOPES = (BUFFER, *TEXTURES)

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NATIVE = ("bool", *_INTEGERS, "float16", "float32", "float64")
"""The dtypes that NumPy has too; a kernel's scalar arguments are of these."""
STORAGE: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in NATIVE},
    "bfloat16": np.dtype("uint16"),  # NumPy has no such type: its bits travel instead
}
"""The dtypes a tensor may have, each with the NumPy dtype that holds it on the host."""


@dataclass(frozen=True)
class Tensor:
    """What a tensor is: its row-major shape, its dtype (a key of `STORAGE`), where it lives (`SCOPES`)."""

    shape: tuple[Dim, ...]
    dtype: str
    scope: str = BUFFER

    @property
    def is_texture(self) -> bool:
        return self.scope in TEXTURES


@dataclass(frozen=True)
class Kernel:
    """OpenCL C with one ``__kernel`` function called `name`.

    `args` says what each position takes: ``buffer``, ``image_read``, ``image_write`` or ``scalar:<dtype>``.
    """

    name: str
    source: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    """A number handed to a kernel: a constant, or an expression over the symbols, converted to `dtype`."""

    expr: Dim | float
    dtype: str


@dataclass(frozen=True)
class Alloc:
    """Make room for `tensor` under the name `value`; what it holds is undefined until a launch writes it."""

    value: str
    tensor: Tensor


@dataclass(frozen=True)
class Launch:
    """Start a kernel on `grid` work groups (TVM's ``blockIdx``) of `block` work items (``threadIdx``).

    `label` says what the launch is for: a composite's row, or an op.
    """

    kernel: str
    args: tuple[str | Scalar, ...]
    grid: tuple[Dim, Dim, Dim]
    block: tuple[Dim, Dim, Dim]
    label: str = ""


@dataclass(frozen=True)
class View:
    """Name the same bytes under another shape. Buffers only."""

    value: str
    of: str
    tensor: Tensor


@dataclass(frozen=True)
class Copy:
    """Copy on the device into another scope; the row-major order of the elements stays."""

    value: str
    of: str
    tensor: Tensor


@dataclass(frozen=True)
class If:
    """Run one of two bodies and bind `value` to its result. `condition`: a tensor of one bool or (u)int8."""

    condition: str
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]
    value: str
    then_value: Result
    else_value: Result


@dataclass(frozen=True)
class Call:
    """Run another function of the manifest and bind its result."""

    function: str
    args: tuple[Result, ...]
    value: str


@dataclass(frozen=True)
class Bind:
    """Give a (nested) tuple, or an existing value, a name."""

    value: str
    of: Result


@dataclass(frozen=True)
class Shape:
    """Bind a shape. It lives on the host and can only become a result (an int64 array of shape (rank,))."""

    value: str
    dims: tuple[Dim, ...]


Step: TypeAlias = Alloc | Launch | View | Copy | If | Call | Bind | Shape


@dataclass(frozen=True)
class Param:
    """An input: a tensor, or a nested tuple of them. A plain symbol in a shape is bound by the input."""

    name: str
    tensor: TensorTree


@dataclass(frozen=True)
class Function:
    """Parameters, steps in order, and which values come back."""

    name: str
    params: tuple[Param, ...]
    body: tuple[Step, ...]
    result: Result


@dataclass(frozen=True, eq=False)
class Manifest:
    """A built module.

    `constants` are addressed by name like any value. They are kept in `STORAGE`'s dtypes, row-major, and
    compared by content. `constant_tensors` says dtype and scope of each; one left out is a buffer of the
    array's own dtype. `meta` is free JSON, made by the builder: its report.
    """

    name: str
    target: str
    functions: dict[str, Function]
    kernels: dict[str, Kernel]
    constants: dict[str, Array] = field(default_factory=dict)
    constant_tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = {name: Tensor(a.shape, a.dtype.name) for name, a in self.constants.items()}
        object.__setattr__(self, "constant_tensors", tensors | self.constant_tensors)
        stored = {name: to_storage(a, f"constant {name}") for name, a in self.constants.items()}
        object.__setattr__(self, "constants", stored)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        plain = (f.name for f in fields(self) if f.name != "constants")
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and self.constants.keys() == other.constants.keys()
            and all(_same(a, other.constants[name]) for name, a in self.constants.items())
        )

    __hash__ = None  # type: ignore[assignment]


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def to_storage(array: Array, what: str) -> Array:
    """The array as the host keeps it: row-major, native byte order, in the dtype that `STORAGE` names.

    Raises:
        ManifestError: no tensor can have this array's dtype; `what` says whose it is.
    """
    name = array.dtype.name
    if name not in STORAGE:
        raise ManifestError(f"{what}: dtype {name} is not supported; use one of {', '.join(STORAGE)}")
    if name not in NATIVE:
        array = np.asarray(array, order="C").view(STORAGE[name])
    return np.asarray(array, dtype=STORAGE[name], order="C")


def base(reference: str) -> str:
    """The name in a reference: ``"v3"`` of ``"v3#0#1"``."""
    return reference.partition("#")[0]


def leaves(result: Result) -> Iterator[str]:
    """Every reference in a result, from left to right."""
    if isinstance(result, str):
        yield result
    elif result is not None:
        for item in result:
            yield from leaves(item)


def reads(step: Step) -> Iterator[str]:
    """The names that a step mentions. Of an `If`: also those that only its branches know."""
    match step:
        case Launch(args=args):
            yield from (base(arg) for arg in args if isinstance(arg, str))
        case View(of=of) | Copy(of=of) | Bind(of=of):
            yield from map(base, leaves(of))
        case Call(args=call_args):
            yield from map(base, leaves(call_args))
        case If():
            yield base(step.condition)
            yield from map(base, leaves((step.then_value, step.else_value)))
            for inner in (*step.then, *step.otherwise):
                yield from reads(inner)


def all_steps(body: Iterable[Step]) -> Iterator[Step]:
    """The steps of a body in order, each `If` before the steps of its branches."""
    for step in body:
        yield step
        if isinstance(step, If):
            yield from all_steps(step.then)
            yield from all_steps(step.otherwise)
