"""What a run needs to know before it touches a device: extents, symbols, inputs, image sizes."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from ..errors import FusionPatternsError, ManifestError
from .manifest import STORAGE, Array, Dim, Function, Tensor, TensorTree

Symbols: TypeAlias = dict[str, int]

MAX_EXPRESSION = 1000
"""Longest expression, in characters: real ones have a few dozen; a limit keeps the parser's stack safe."""
MAX_DEPTH = 100
"""Deepest nesting of operators, well under the interpreter's own recursion limit."""

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


class InputError(FusionPatternsError, ValueError):
    """The arrays given to a run don't fit the function's parameters."""


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    """The checked syntax tree of an expression: ``+ - * // % min max ( )``, symbols, integer literals."""
    if len(text) > MAX_EXPRESSION:
        raise ManifestError(f"expression {text[:40]!r}…: longer than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ManifestError(f"expression {text!r}: not an expression") from None
    for node in _operands(tree, text):
        if isinstance(node, ast.Constant) and type(node.value) is not int:
            raise ManifestError(f"expression {text!r}: {node.value!r} is not an integer")
    return tree


def _operands(node: ast.expr, text: str, depth: int = 0) -> Iterator[ast.Name | ast.Constant]:
    """The symbols and literals of an expression; anything that isn't allowed raises."""
    if depth > MAX_DEPTH:
        raise ManifestError(f"expression {text[:40]!r}…: nested deeper than {MAX_DEPTH}")
    inner: Sequence[ast.expr]
    match node:
        case ast.Name() | ast.Constant():
            yield node
            return
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            inner = (left, right)
        case ast.UnaryOp(ast.USub(), operand):
            inner = (operand,)
        case ast.Call(ast.Name(name), args, []) if name in _CALLS and len(args) > 1:
            inner = args
        case _:
            raise ManifestError(
                f"expression {text!r}: only + - * // % min max, symbols and integers are allowed"
            )
    for child in inner:
        yield from _operands(child, text, depth + 1)


def symbols_of(dim: Dim | float) -> set[str]:
    """The symbols in an extent. Raises ManifestError if it isn't a valid expression."""
    if not isinstance(dim, str):
        return set()
    return {node.id for node in _operands(_parse(dim), dim) if isinstance(node, ast.Name)}


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """The value of an extent. Division and modulo round down, as TVM's ``floordiv`` and ``floormod`` do.

    Raises:
        ManifestError: not an expression, an unknown symbol, a division by zero, or more than 64 bits.
    """
    if isinstance(dim, int):
        return dim
    try:
        value = _value(_parse(dim), symbols)
    except KeyError as error:
        raise ManifestError(f"expression {dim!r}: symbol {error.args[0]!r} has no value") from None
    except ZeroDivisionError:
        raise ManifestError(f"expression {dim!r}: division by zero with {dict(symbols)}") from None
    if not -(2**63) <= value < 2**63:
        raise ManifestError(f"expression {dim!r}: {value} does not fit 64 bits")
    return value


def _value(node: ast.expr, symbols: Mapping[str, int]) -> int:
    match node:
        case ast.Name(name):
            return symbols[name]
        case ast.Constant(int(value)):
            return value
        case ast.BinOp(left, op, right):
            return _BINARY[type(op)](_value(left, symbols), _value(right, symbols))
        case ast.UnaryOp(_, operand):
            return -_value(operand, symbols)
        case ast.Call(ast.Name(name), args):
            return _CALLS[name](*(_value(arg, symbols) for arg in args))
    raise AssertionError(ast.dump(node))  # _operands lets nothing else pass


def resolve(tensor: Tensor, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape as numbers. Raises ManifestError where `evaluate` does, and for a negative extent."""
    shape = tuple(evaluate(dim, symbols) for dim in tensor.shape)
    if any(extent < 0 for extent in shape):
        raise ManifestError(f"shape {tensor.shape} becomes {shape} with {dict(symbols)}: negative extent")
    return shape


def leaf_params(function: Function) -> dict[str, Tensor]:
    """Every tensor that a function takes, by name; an item of a tuple parameter is ``"p#0"``."""

    def walk(name: str, tree: TensorTree) -> Iterator[tuple[str, Tensor]]:
        if isinstance(tree, Tensor):
            yield name, tree
        else:
            for i, item in enumerate(tree):
                yield from walk(f"{name}#{i}", item)

    return dict(leaf for param in function.params for leaf in walk(param.name, param.tensor))


def bind(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Symbols:
    """The symbols' values, read off the actual shapes of a function's leaf parameters.

    Args:
        tensors: what the function expects, by leaf name (`leaf_params`).
        shapes: what it was given, by the same names.

    Raises:
        InputError: a rank or an extent differs; names the parameter, the axis, what was expected and given.
    """
    symbols: Symbols = {}
    for name, tensor in tensors.items():  # plain symbols first: an expression may come before its symbols
        if len(shapes[name]) != len(tensor.shape):
            raise InputError(
                f"parameter {name}: expected {len(tensor.shape)} dimensions {_text(tensor.shape)}, "
                f"got {len(shapes[name])}: {_text(shapes[name])}"
            )
        for dim, extent in zip(tensor.shape, shapes[name], strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                symbols.setdefault(dim, extent)
    for name, tensor in tensors.items():
        for axis, (dim, extent) in enumerate(zip(tensor.shape, shapes[name], strict=True)):
            if (expected := evaluate(dim, symbols)) != extent:
                meaning = f" ({dim})" if isinstance(dim, str) else ""
                raise InputError(
                    f"parameter {name}, dimension {axis}: expected {expected}{meaning}, got {extent}"
                )
    return symbols


def _text(shape: Sequence[Dim]) -> str:
    return f"({', '.join(map(str, shape))})"


def check_inputs(
    function: Function, inputs: Mapping[str, object] | Sequence[object]
) -> tuple[dict[str, Array], Symbols]:
    """The input arrays by leaf name, as the device stores them, and the symbols' values.

    Args:
        function: the function to run.
        inputs: one array per parameter (nested sequences for a tuple parameter), in order or by name. By
            name, the items of a tuple parameter may also be given one by one, as ``"p#0"``.

    Raises:
        InputError: too few, too many or unknown inputs, or one of another dtype or shape.
    """
    tensors = leaf_params(function)
    arrays = dict(_flatten(function, inputs))
    if missing := [name for name in tensors if name not in arrays]:
        raise InputError(f"{function.name}: no input for parameter {', '.join(missing)}")
    if unknown := [name for name in arrays if name not in tensors]:
        known = ", ".join(tensors) or "none"
        raise InputError(f"{function.name}: unknown input {', '.join(unknown)}; the parameters are: {known}")
    for name, array in arrays.items():
        got, expected = array.dtype.name, tensors[name].dtype
        if expected not in (got, *(n for n in ("bfloat16",) if got == STORAGE[n].name)):
            raise InputError(f"parameter {name}: expected {expected}, got {got}")
    symbols = bind(tensors, {name: array.shape for name, array in arrays.items()})
    stored = {}
    for name, tensor in tensors.items():
        array = np.asarray(arrays[name], order="C")
        dtype = STORAGE[tensor.dtype]
        # bits stay bits; everything else may still need its bytes swapped to native order
        stored[name] = array.view(dtype) if tensor.dtype == "bfloat16" else array.astype(dtype, copy=False)
    return stored, symbols


def _flatten(
    function: Function, inputs: Mapping[str, object] | Sequence[object]
) -> Iterator[tuple[str, Array]]:
    def walk(name: str, tree: TensorTree, given: object) -> Iterator[tuple[str, Array]]:
        if isinstance(tree, Tensor):
            if not isinstance(given, np.ndarray | np.generic):
                raise InputError(f"parameter {name}: expected a NumPy array, got {type(given).__name__}")
            yield name, np.asarray(given)
        elif not isinstance(given, Sequence) or len(given) != len(tree):
            raise InputError(f"parameter {name}: expected a tuple of {len(tree)}")
        else:
            for i, (item, array) in enumerate(zip(tree, given, strict=True)):
                yield from walk(f"{name}#{i}", item, array)

    leaf = leaf_params(function)
    if isinstance(inputs, Mapping):
        trees = {param.name: param.tensor for param in function.params}
        for name, given in inputs.items():
            # an unknown name goes through as it is: check_inputs names it
            tree = trees.get(name) or leaf.get(name) or Tensor((), "float32")
            yield from walk(name, tree, given)
        return
    if len(inputs) != len(function.params):
        raise InputError(f"{function.name}: expected {len(function.params)} inputs, got {len(inputs)}")
    for param, given in zip(function.params, inputs, strict=True):
        yield from walk(param.name, param.tensor, given)


def image_extent(shape: Sequence[int], scope: str) -> tuple[int, int, int]:
    """Width, height and layers, in texels, of the RGBA image array that holds a row-major tensor.

    TVM's ``ApplyTexture2DFlattening`` (``src/backend/opencl/runtime/texture.h``): the last axis is the four
    channels; a separator s, which the scope's name stands for, splits the others. Axes before s-1 are the
    layers, axis s-1 is the height, axes from s on are the width. With rank 2 in ``global.texture`` s is 0,
    its unsigned s-1 wraps around, and all of the first axis becomes layers; generated kernels agree with
    that. An empty tensor takes one texel.

    Raises:
        ManifestError: the rank is too low for the scope, or the last axis isn't 4.
    """
    rank = len(shape)
    separators = {"global.texture": rank - 2, "global.texture-nhwc": 2, "global.texture-weight": 1}
    s = separators[scope]
    if rank < 2 or s >= rank or shape[-1] != 4:
        raise ManifestError(
            f"a tensor {_text(shape)} can't be {scope}: the last of at least "
            f"{3 if scope == 'global.texture-nhwc' else 2} axes must be 4"
        )
    axes = list(shape[:-1])
    if s == 0:
        return 1, 1, max(1, axes[0])
    layers, height, width = math.prod(axes[: s - 1]), axes[s - 1], math.prod(axes[s:])
    return max(1, width), max(1, height), max(1, layers)
