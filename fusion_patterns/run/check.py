"""Is a manifest whole? Every name, kernel argument and form is checked here, before any device sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

from ..errors import ManifestError
from .interpret import image_extent, leaf_params, symbols_of
from .manifest import (
    NATIVE,
    SCOPES,
    STORAGE,
    Alloc,
    Bind,
    Call,
    Copy,
    Function,
    If,
    Kernel,
    Launch,
    Manifest,
    Result,
    Scalar,
    Shape,
    Step,
    Tensor,
    TensorTree,
    View,
    base,
)

MAX_NESTING = 32
"""Deepest nesting of branches, calls and tuples; networks have two or three, and the reader recurses."""

Form: TypeAlias = "Tensor | Shape | tuple[Form, ...] | None"
"""What is known of a value before a run."""

_KERNEL_NAME = re.compile(r"[A-Za-z_]\w{0,239}", re.ASCII)
_VALUE_NAME = re.compile(r"[^#\x00-\x1f\x7f]{1,500}")  # "#" separates a tuple's items
_TEXTURE_DTYPES = ("float32", "float16")  # RGBA images of type FLOAT and HALF_FLOAT


def check(manifest: Manifest) -> None:
    """Refuse a manifest that can't run.

    Raises:
        ManifestError: an invalid or repeated name, an undefined value, a missing kernel, an argument of the
            wrong kind, an unknown symbol, dtype or scope, functions that call each other in a circle, or
            nesting deeper than `MAX_NESTING`. The message starts with the place.
    """
    if manifest.constants.keys() != manifest.constant_tensors.keys():
        odd = sorted(manifest.constants.keys() ^ manifest.constant_tensors.keys())
        raise ManifestError(f"constant_tensors: {odd[0]!r} is not among the constants")
    for name, array in manifest.constants.items():
        tensor = manifest.constant_tensors[name]
        where = f"constant {name!r}"
        _value_name(where, name)
        _tensor(where, tensor, set())
        if tensor.shape != array.shape or STORAGE[tensor.dtype] != array.dtype:
            raise ManifestError(
                f"{where}: the array is {array.dtype} {array.shape}, its tensor says {tensor}"
            )
    for name, kernel in manifest.kernels.items():
        _kernel(name, kernel)
    _Checker(manifest).run()


def _value_name(where: str, name: str) -> None:
    if not _VALUE_NAME.fullmatch(name):
        raise ManifestError(
            f"{where}: {name!r} is not a valid name; no '#' and no control characters, please"
        )


def kernel_name(where: str, name: str) -> None:
    """Raises ManifestError unless `name` is a C identifier that is short enough for a file name."""
    if not _KERNEL_NAME.fullmatch(name):
        raise ManifestError(f"{where}: {name!r} must be a C identifier of at most 240 characters")


def _kernel(name: str, kernel: Kernel) -> None:
    where = f"kernel {name!r}"
    kernel_name(where, name)
    if name != kernel.name:
        raise ManifestError(f"{where}: calls itself {kernel.name!r}")
    for i, kind in enumerate(kernel.args):
        scalar, _, dtype = kind.partition(":")
        if kind not in ("buffer", "image_read", "image_write") and (
            scalar != "scalar" or dtype not in NATIVE
        ):
            raise ManifestError(f"{where}, argument {i}: unknown kind {kind!r}")


def _tensor(where: str, tensor: Tensor, symbols: set[str]) -> None:
    if tensor.dtype not in STORAGE:
        raise ManifestError(f"{where}: unknown dtype {tensor.dtype!r}")
    if tensor.scope not in SCOPES:
        raise ManifestError(f"{where}: unknown scope {tensor.scope!r}; one of {', '.join(SCOPES)}")
    _dims(where, tensor.shape, symbols)
    if any(isinstance(dim, int) and dim < 0 for dim in tensor.shape):
        raise ManifestError(f"{where}: negative extent in {tensor.shape}")
    if tensor.is_texture:
        if tensor.dtype not in _TEXTURE_DTYPES:
            raise ManifestError(f"{where}: {tensor.dtype} can't be {tensor.scope}; float32 and float16 can")
        try:
            image_extent([1 if isinstance(dim, str) else dim for dim in tensor.shape], tensor.scope)
        except ManifestError as error:
            raise ManifestError(f"{where}: {error}") from None


def _dims(where: str, dims: Iterable[int | str | float], symbols: set[str]) -> None:
    for dim in dims:
        try:
            unknown = symbols_of(dim) - symbols
        except ManifestError as error:
            raise ManifestError(f"{where}: {error}") from None
        if unknown:
            raise ManifestError(f"{where}: no parameter's shape binds the symbol {min(unknown)!r} of {dim!r}")


class _Checker:
    """Walks the functions, knowing the form of every value in sight."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.results: dict[str, Form] = {}
        self.open: list[str] = []  # functions being walked, outermost first
        self.symbols: set[str] = set()

    def run(self) -> None:
        for name, function in self.manifest.functions.items():
            if function.name != name:
                raise ManifestError(f"function {name!r}: calls itself {function.name!r}")
            self.function(f"function {name!r}", name)

    def function(self, where: str, name: str) -> Form:
        """The form of a function's result, which is walked at most once."""
        if name in self.results:
            return self.results[name]
        if name not in self.manifest.functions:
            raise ManifestError(f"{where}: no function {name!r}")
        if name in self.open or len(self.open) == MAX_NESTING:
            raise ManifestError(f"{where}: calls too deep or in a circle: {' > '.join([*self.open, name])}")
        function, where, outer = self.manifest.functions[name], f"function {name!r}", self.symbols
        self.open.append(name)
        self.symbols = _bound_symbols(function)
        env: dict[str, Form] = dict(self.manifest.constant_tensors)
        for param in function.params:
            _depth(where, param.tensor)
            self.define(where, env, param.name, param.tensor)
        for leaf, tensor in leaf_params(function).items():
            _tensor(f"{where}, parameter {leaf!r}", tensor, self.symbols)
        self.body(where, function.body, env)
        form = self.results[name] = self.form(f"{where}, result", function.result, env)
        self.open.pop()
        self.symbols = outer
        return form

    def body(self, where: str, steps: tuple[Step, ...], env: dict[str, Form], depth: int = 0) -> None:
        if depth > MAX_NESTING:
            raise ManifestError(f"{where[:60]}…: branches nested deeper than {MAX_NESTING}")
        for i, step in enumerate(steps):
            place = f"{where}, step {i} ({type(step).__name__.lower()})"
            if isinstance(step, Launch):
                self.launch(place, step, env)
            else:
                self.define(place, env, step.value, self.bound(place, step, env, depth))

    def define(self, where: str, env: dict[str, Form], name: str, form: Form) -> None:
        _value_name(where, name)
        if name in env:
            raise ManifestError(f"{where}: {name!r} is already defined")
        env[name] = form

    def bound(self, where: str, step: Step, env: dict[str, Form], depth: int) -> Form:
        """What a step binds."""
        match step:
            case Alloc(tensor=tensor):
                _tensor(where, tensor, self.symbols)
                return tensor
            case View(of=of, tensor=tensor) | Copy(of=of, tensor=tensor):
                _tensor(where, tensor, self.symbols)
                source = self.tensor(where, of, env)
                if source.dtype != tensor.dtype and isinstance(step, Copy):
                    raise ManifestError(f"{where}: {of!r} is {source.dtype}, the copy is {tensor.dtype}")
                if isinstance(step, View) and (source.is_texture or tensor.is_texture):
                    raise ManifestError(f"{where}: {of!r}: a texture has no other view; copy it")
                return tensor
            case Call(function=name, args=args):
                result = self.function(where, name)
                params = tuple(param.tensor for param in self.manifest.functions[name].params)
                if not _alike(params, forms := self.form(where, args, env)):
                    raise ManifestError(f"{where}: {name!r} takes {params}, got {forms}")
                return result
            case Shape(dims=dims):
                _dims(where, dims, self.symbols)
                return step
            case Bind(of=result):
                return self.form(where, result, env)
            case If():
                return self.branches(where, step, env, depth)
        raise AssertionError(step)

    def branches(self, where: str, step: If, env: dict[str, Form], depth: int) -> Form:
        condition = self.tensor(where, step.condition, env)
        if condition.dtype not in ("bool", "uint8", "int8") or condition.is_texture:
            raise ManifestError(f"{where}: the condition {step.condition!r} must be bool, not {condition}")
        then, otherwise = dict(env), dict(env)
        self.body(f"{where}, then", step.then, then, depth + 1)
        self.body(f"{where}, otherwise", step.otherwise, otherwise, depth + 1)
        form = self.form(where, step.then_value, then)
        if not _alike(form, other := self.form(where, step.else_value, otherwise)):
            raise ManifestError(f"{where}: the branches give {form} and {other}")
        return form

    def launch(self, where: str, step: Launch, env: dict[str, Form]) -> None:
        where += f" of {step.kernel!r}"
        if step.kernel not in self.manifest.kernels:
            raise ManifestError(f"{where}: no such kernel")
        kinds = self.manifest.kernels[step.kernel].args
        if len(kinds) != len(step.args):
            raise ManifestError(f"{where}: the kernel takes {len(kinds)} arguments, got {len(step.args)}")
        _dims(where, (*step.grid, *step.block), self.symbols)
        for i, (kind, arg) in enumerate(zip(kinds, step.args, strict=True)):
            if isinstance(arg, Scalar):
                _dims(where, (arg.expr,), self.symbols)
                got = f"scalar:{arg.dtype}"
            else:
                got = "image" if self.tensor(where, arg, env).is_texture else "buffer"
            if got != ("image" if kind.startswith("image_") else kind):
                raise ManifestError(f"{where}: argument {i} must be {kind}, got {got} ({arg!r})")

    def form(self, where: str, result: Result, env: dict[str, Form], depth: int = 0) -> Form:
        if depth > MAX_NESTING:
            raise ManifestError(f"{where}: tuples nested deeper than {MAX_NESTING}")
        if result is None:
            return None
        if isinstance(result, tuple):
            return tuple(self.form(where, item, env, depth + 1) for item in result)
        if base(result) not in env:
            raise ManifestError(f"{where}: undefined value {result!r}")
        form = env[base(result)]
        for item in result.split("#")[1:]:
            if not (isinstance(form, tuple) and item.isdecimal() and int(item) < len(form)):
                raise ManifestError(f"{where}: {result!r} is no item of a tuple")
            form = form[int(item)]
        return form

    def tensor(self, where: str, reference: str, env: dict[str, Form]) -> Tensor:
        form = self.form(where, reference, env)
        if not isinstance(form, Tensor):
            raise ManifestError(f"{where}: {reference!r} must be a tensor")
        return form


def _bound_symbols(function: Function) -> set[str]:
    """The symbols that stand alone in a parameter's shape: those that an input gives a value."""
    dims = (dim for tensor in leaf_params(function).values() for dim in tensor.shape)
    return {dim for dim in dims if isinstance(dim, str) and dim.isidentifier()}


def _depth(where: str, tree: TensorTree, depth: int = 0) -> None:
    if depth > MAX_NESTING:
        raise ManifestError(f"{where}: a parameter's tuples are nested deeper than {MAX_NESTING}")
    for item in tree if isinstance(tree, tuple) else ():
        _depth(where, item, depth + 1)


def _alike(a: Form, b: Form) -> bool:
    """Do two values look the same to a kernel: rank, dtype, scope? Extents are compared in the run."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (len(a.shape), a.dtype, a.scope) == (len(b.shape), b.dtype, b.scope)
    return type(a) is type(b)
