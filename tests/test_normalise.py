"""Inference form: each rewrite does what it says, keeps the numbers, and leaves the given module alone."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import networks
import numpy as np
import pytest
import tvm
from networks import random_inputs, run_on_cpu
from tvm import relax, te, topi
from tvm.relax.op import nn
from tvm_ffi import structural_equal

from fusion_patterns.frontends import bind_symbols
from fusion_patterns.normalise import normalise
from fusion_patterns.normalise.fold import FOLDS
from fusion_patterns.normalise.rewrite import op_name

op = relax.op
HAZARDS = Path(__file__).resolve().parents[2] / "shared" / "hazards" / "hazards.py"


def hazards() -> ModuleType | None:
    if not HAZARDS.exists():
        return None
    spec = importlib.util.spec_from_file_location("hazards", HAZARDS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hazards"] = module  # TVMScript reads the source through it
    spec.loader.exec_module(module)
    return module


def const(*shape: int, seed: int = 0, low: float | None = None, dtype: str = "float32") -> relax.Expr:
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(shape) * 0.5 if low is None else rng.uniform(low, low + 1.0, shape)
    return relax.const(value.astype(dtype))


def function(
    build: Callable[..., Any], *shapes: tuple[Any, ...], dtype: str = "float32", dataflow: bool = True
) -> tvm.IRModule:
    """A module whose ``main`` is *build(builder, *parameters)*; the result may be a tuple of values."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with bb.function("main", params):
        if dataflow:
            with bb.dataflow():
                out = bb.emit_output(build(bb, *params))
        else:
            out = bb.emit(build(bb, *params))
        bb.emit_func_output(out)
    return bb.finalize()


def operators(mod: tvm.IRModule, name: str = "main") -> Counter[str]:
    found: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if op_name(expr):
            found[op_name(expr)] += 1  # type: ignore[index]

    relax.analysis.post_order_visit(mod[name], visit)
    return found


def check(mod: tvm.IRModule, *, tolerance: float = 1e-5, numbers: bool = True) -> Counter[str]:
    """Normalise *mod*; the operators of the result. Interface, given module and numbers must be as before."""
    before = tvm.ir.load_json(tvm.ir.save_json(mod))
    out = normalise(mod)
    assert structural_equal(mod, before, map_free_vars=True)
    relax.analysis.well_formed(out)
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {}):
            kept = out[gv.name_hint]
            assert structural_equal(kept.ty, func.ty, map_free_vars=True)
            assert [p.name for p in kept.params] == [p.name for p in func.params]
    if numbers:
        inputs = random_inputs(mod["main"])
        for want, got in zip(run_on_cpu(mod, inputs), run_on_cpu(out, inputs), strict=True):
            assert want.dtype == got.dtype
            assert np.isfinite(want).all()
            scale = max(1e-30, float(np.abs(want.astype("float64")).max()))
            assert float(np.abs(want.astype("float64") - got.astype("float64")).max()) <= tolerance * scale
    return operators(out)


def batch_norm(
    bb: Any, x: relax.Expr, channels: int, *, axis: int = 1, dtype: str = "float32", **attrs: Any
) -> relax.Expr:
    statistics = [const(channels, seed=i, low=0.5 if i in (1, 4) else None, dtype=dtype) for i in range(1, 5)]
    whole = bb.emit(nn.batch_norm(x, *statistics, axis=axis, **({"training": False} | attrs)))
    return bb.emit(relax.TupleGetItem(whole, 0))


# The hazards, each of which must survive.

_HAZARDS = hazards()


@pytest.mark.skipif(_HAZARDS is None, reason="the hazards lie in ../shared")
@pytest.mark.parametrize("name", sorted(_HAZARDS.CASES) if _HAZARDS else [])
def test_hazard_survives_with_its_numbers(name: str) -> None:
    assert _HAZARDS is not None
    mod = _HAZARDS.CASES[name]()
    check(mod, numbers=False)
    if name == "unknown_shape_rank_only":
        return
    mod = bind_symbols(mod, _HAZARDS.SYM[name])
    plain = [
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]
    # Only what some rule has changed can have other numbers.
    if not structural_equal(tvm.transform.Sequential(plain)(mod), normalise(mod)):
        check(mod)


# Batch norm and other channel constants.


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_batch_norm_after_convolution_leaves_weights_and_one_bias(groups: int, biased: bool) -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(nn.conv2d(x, const(8, 8 // groups, 3, 3), padding=1, groups=groups))
        if biased:
            y = bb.emit(op.add(const(8, 1, 1, seed=7), y))
        return nn.relu(batch_norm(bb, y, 8))

    mod = function(build, (2, 8, 6, 6))
    assert check(mod) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1}
    bindings = normalise(mod)["main"].body.blocks[0].bindings
    bias = next(b.value for b in bindings if op_name(b.value) == "add")
    assert [int(d) for d in bias.args[1].ty.shape] == [1, 8, 1, 1]


@pytest.mark.parametrize(("groups", "layout"), [(1, "IOHW"), (2, "IOHW"), (4, "IOHW"), (1, "OIHW")])
def test_batch_norm_after_transposed_convolution(groups: int, layout: str) -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        shape = (4, 6 // groups if groups < 4 else 2, 2, 2)
        shape = shape if layout == "IOHW" else (shape[1], shape[0], *shape[2:])
        y = nn.conv2d_transpose(x, const(*shape), strides=(2, 2), groups=groups, kernel_layout=layout)
        return batch_norm(bb, bb.emit(y), shape[layout.index("O")] * groups)

    found = check(function(build, (1, 4, 5, 5)), numbers=layout == "IOHW")
    assert found == {"nn.conv2d_transpose": 1, "add": 1}


def test_batch_norm_in_other_layout_and_rank() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(nn.conv2d(x, const(3, 3, 4, 6), data_layout="NHWC", kernel_layout="HWIO"))
        flat = bb.emit(op.mean(batch_norm(bb, y, 6, axis=3), [1, 2]))
        return batch_norm(bb, flat, 6)

    assert check(function(build, (1, 6, 6, 4))) == {"nn.conv2d": 1, "add": 2, "mean": 1, "multiply": 1}


def test_batch_norm_of_a_value_with_another_reader_is_scale_and_shift() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(nn.conv2d(x, const(8, 4, 1, 1)))
        return op.add(bb.emit(nn.relu(batch_norm(bb, y, 8))), y)

    assert check(function(build, (1, 4, 6, 6))) == {"nn.conv2d": 1, "multiply": 1, "add": 2, "nn.relu": 1}


def test_batch_norm_with_statistics_as_parameters() -> None:
    def build(bb: Any, x: relax.Expr, scale: relax.Expr) -> relax.Expr:
        vectors = [scale, const(4, seed=2), const(4, seed=3), const(4, seed=4, low=0.5)]
        return relax.TupleGetItem(bb.emit(nn.batch_norm(x, *vectors, axis=1, training=False)), 0)

    assert "nn.batch_norm" not in check(function(build, (1, 4, 6, 6), (4,)))


def test_batch_norm_in_training_form_stays() -> None:
    mod = function(lambda bb, x: batch_norm(bb, x, 4, training=True), (2, 4, 6, 6))
    assert check(mod, numbers=False) == {"nn.batch_norm": 1}


def test_batch_norm_statistics_and_whole_tuple_survive() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        whole = bb.emit(nn.batch_norm(x, *(const(4, seed=i, low=0.5) for i in range(4)), 1, training=False))
        return relax.Tuple([relax.TupleGetItem(whole, i) for i in (2, 1, 0)])

    assert check(function(build, (1, 4, 3, 3))) == {"multiply": 1, "add": 1}
    tuples = function(
        lambda bb, x: nn.batch_norm(x, *(const(4, seed=i, low=0.5) for i in range(4)), 1, training=False),
        (1, 4, 3, 3),
    )
    assert check(tuples) == {"nn.batch_norm": 1}


def test_float16_weights_are_not_pushed_into_denormals() -> None:
    def build(factor: float) -> tvm.IRModule:
        def body(bb: Any, x: relax.Expr) -> relax.Expr:
            y = bb.emit(nn.conv2d(x, const(4, 4, 1, 1, dtype="float16")))
            return op.multiply(y, relax.const(np.full((4, 1, 1), factor, "float16")))

        return function(body, (1, 4, 4, 4), dtype="float16")

    assert check(build(0.5), tolerance=2e-3) == {"nn.conv2d": 1}
    assert check(build(1e-4), numbers=False) == {"nn.conv2d": 1, "multiply": 1}
    assert check(build(6e4), numbers=False) == {"nn.conv2d": 1, "multiply": 1}


def test_scales_and_shifts_in_a_row_are_one_of_each() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = batch_norm(bb, x, 4)
        for i in range(2):
            y = bb.emit(op.multiply(const(4, 1, 1, seed=i), y))
            y = bb.emit(op.add(y, const(4, 1, 1, seed=i + 5)))
        return nn.relu(y)

    assert check(function(build, (1, 4, 5, 5))) == {"multiply": 1, "add": 1, "nn.relu": 1}


def test_learnable_affine_scalars_go_into_the_convolution() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(op.add(bb.emit(nn.conv2d(x, const(4, 4, 1, 1))), const(1, 4, 1, 1, seed=3)))
        y = bb.emit(op.divide(bb.emit(op.subtract(y, relax.const(0.25))), relax.const(4.0)))
        return op.add(y, relax.const(3.0))

    assert check(function(build, (1, 4, 5, 5))) == {"nn.conv2d": 1, "add": 1}


def test_constants_that_are_no_channel_vector_stay() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(op.multiply(bb.emit(nn.conv2d(x, const(5, 4, 1, 1))), const(5)))  # along the width
        y = bb.emit(op.multiply(bb.emit(nn.conv2d(y, const(5, 5, 1, 1))), const(5, 5)))
        return op.divide(relax.const(2.0), bb.emit(op.add(op.abs(y), relax.const(1.0))))

    found = check(function(build, (1, 4, 5, 5)))
    assert (found["multiply"], found["divide"]) == (2, 1)


def test_integer_convolution_keeps_its_bias() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(nn.conv2d(x, relax.const(np.ones((4, 4, 1, 1), "int8")), out_dtype="int32"))
        y = bb.emit(op.add(y, relax.const(np.full((4, 1, 1), 7, "int32"))))
        return op.add(y, relax.const(np.full((4, 1, 1), 2**31 - 1, "int32")))

    assert check(function(build, (1, 4, 3, 3), dtype="int8"), tolerance=0.0) == {"nn.conv2d": 1, "add": 2}


# Padding.


@pytest.mark.parametrize(
    ("widths", "value", "stays"),
    [
        ([0, 0, 0, 0, 1, 2, 0, 3], 0.0, 0),
        ([0, 0, 0, 0, 1, 1, 1, 1], 1.0, 1),
        ([0, 0, 1, 1, 1, 1, 1, 1], 0.0, 1),
    ],
)
def test_padding_with_zeros_becomes_the_convolutions_own(widths: list[int], value: float, stays: int) -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        padded = bb.emit(nn.pad(x, widths, "constant", value))
        inputs = 4 + widths[2] + widths[3]
        return nn.conv2d(padded, const(8, inputs, 3, 3), padding=[1, 0, 2, 0], strides=2)

    assert check(function(build, (1, 4, 6, 6)))["nn.pad"] == stays


def test_padding_that_others_read_stays() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        padded = bb.emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1]))
        return relax.Tuple([bb.emit(nn.conv2d(padded, const(4, 4, 3, 3))), padded])

    assert check(function(build, (1, 4, 6, 6))) == {"nn.pad": 1, "nn.conv2d": 1}


# Kernels that importers write.

_ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "sigmoid": topi.sigmoid,
    "tanh": topi.tanh,
    "exp": topi.exp,
    "erf": topi.erf,
    "abs": topi.abs,
    "floor": topi.floor,
    "ceil": topi.ceil,
    "round": topi.round,
    "nn.relu": topi.nn.relu,
    "nn.leakyrelu": lambda x: topi.nn.leaky_relu(x, 0.1),
    "clip": lambda x: topi.clip(x, -0.5, 0.75),
    "add": lambda x: topi.add(x, 2.0),
    "subtract": lambda x: topi.subtract(x, 2.0),
    "multiply": topi.negative,
    "divide": lambda x: topi.divide(x, 3.0),
    "maximum": lambda x: topi.maximum(x, 0.5),
    "nn.pad": lambda x: topi.nn.pad(x, [0, 1, 0, 2], [0, 0, 3, 2], 0.5),
}


def test_elementwise_kernels_become_operators() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        return relax.Tuple([bb.emit_te(compute, x) for compute in _ELEMENTWISE.values()])

    assert check(function(build, (2, 3, 4, 5)), tolerance=1e-7) == Counter(_ELEMENTWISE.keys())


def test_kernel_of_several_operators_with_broadcast() -> None:
    def compute(x: Any, slope: Any, shift: Any) -> Any:
        return te.compute(
            x.shape, lambda n, c, h, w: te.tanh(x[n, c, h, w] * slope[c, 0, 0] + shift[()]) / x[n, c, h, w]
        )

    def build(bb: Any, x: relax.Expr, slope: relax.Expr, shift: relax.Expr) -> relax.Expr:
        return bb.emit_te(compute, x, slope, shift)

    found = check(function(build, (1, 4, 3, 5), (4, 1, 1), ()), tolerance=1e-6)
    assert found == {"multiply": 1, "add": 1, "tanh": 1, "divide": 1}


_OTHER_KERNELS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: te.compute(x.shape, lambda i, j: x[j, i] * 2.0),
    "by place": lambda x: te.compute(x.shape, lambda i, j: x[i, j] * i.astype("float32")),
    "flipped": lambda x: topi.flip(x, 1),
    "softmax": topi.nn.softmax,
    "mirror": lambda x: topi.nn.mirror_pad(x, [1, 1], [1, 1], "REFLECT"),
    "part": lambda x: topi.strided_slice(x, [0, 0], [4, 2]),
    "cast": lambda x: topi.cast(x, "int32"),
    "row": lambda x: te.compute(x.shape, lambda i, j: te.max(x[i, j], x[0, j])),
    "selected": lambda x: te.compute(x.shape, lambda i, j: tvm.tirx.Select(x[i, j] > 1.0, x[i, j], 0.0)),
}


def test_other_kernels_stay() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        return relax.Tuple([bb.emit_te(compute, x) for compute in _OTHER_KERNELS.values()])

    assert check(function(build, (4, 4)), numbers=False) == {"call_tir": len(_OTHER_KERNELS)}


def test_integer_kernel_stays() -> None:
    mod = function(lambda bb, x: bb.emit_te(lambda t: topi.maximum(t, 3), x), (4, 4), dtype="int32")
    assert check(mod, tolerance=0.0) == {"call_tir": 1}


# Bounds.


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda bb, x: op.minimum(bb.emit(op.maximum(x, relax.const(0.0))), relax.const(6.0)), {"clip": 1}),
        (lambda bb, x: op.maximum(bb.emit(op.minimum(x, relax.const(6.0))), relax.const(-1.0)), {"clip": 1}),
        (lambda bb, x: op.minimum(relax.const(6.0), bb.emit(nn.relu(x))), {"clip": 1}),
        (lambda bb, x: op.clip(bb.emit(op.clip(x, -1, 1)), 0, 6), {"clip": 1}),
        (lambda bb, x: op.maximum(x, relax.const(0.0)), {"nn.relu": 1}),
        (lambda bb, x: nn.relu(bb.emit(nn.relu(x))), {"nn.relu": 1}),
        (lambda bb, x: op.maximum(x, relax.const(-np.inf, "float32")), {}),
        (lambda bb, x: op.maximum(x, relax.const(0.5)), {"maximum": 1}),
        # The bounds cross: which of them wins depends on the order.
        (
            lambda bb, x: op.minimum(bb.emit(op.maximum(x, relax.const(2.0))), relax.const(1.0)),
            {"maximum": 1, "minimum": 1},
        ),
        # A bound for each element is no clip.
        (
            lambda bb, x: op.minimum(bb.emit(op.maximum(x, const(4))), relax.const(1.0)),
            {"maximum": 1, "minimum": 1},
        ),
    ],
)
def test_bounds(build: Callable[..., relax.Expr], found: dict[str, int]) -> None:
    assert check(function(build, (3, 4)), tolerance=0.0) == found


# Constants.


def test_every_fold_gives_what_tvm_computes() -> None:
    """Each operator once on parameters, which TVM runs, and once on constants, which must all be folded."""
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(0.5, 2.0, shape).astype("float32") for shape in ((3, 1, 4), (2, 4)))
    bools = rng.integers(0, 2, (3, 2, 4)).astype(bool)
    special = np.array([0.0, np.nan, np.inf, -1.5], "float32")
    half = (a * 3).astype("float16")
    bytes_ = rng.integers(-100, 100, (3, 2)).astype("int8")
    zeros = relax.const(np.array([3, -5], "int8"))

    def calls(
        a: Any, b: Any, bools: Any, special: Any, half: Any, bytes_: Any
    ) -> dict[str, list[relax.Expr]]:
        unary = {n: [getattr(op, n)(a)] for n in ("abs", "negative", "sqrt", "rsqrt", "exp", "log", "tanh")}
        unary |= {n: [getattr(op, n)(a)] for n in ("sigmoid", "square", "floor", "ceil", "sin", "cos")}
        names = ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "equal", "not_equal")
        binary = {
            n: [getattr(op, n)(a, b)] for n in (*names, "less", "less_equal", "greater", "greater_equal")
        }
        return {
            **unary,
            **binary,
            **{n: [getattr(op, n)(bools, bools)] for n in ("logical_and", "logical_or")},
            **{n: [getattr(op, n)(special)] for n in ("isnan", "isinf", "isfinite")},
            **{
                n: [getattr(op, n)(a, [0, 2], True), getattr(op, n)(a)] for n in ("mean", "sum", "max", "min")
            },
            "prod": [op.prod(a, 1)],
            "logical_not": [op.logical_not(bools)],
            "where": [op.where(bools, a, relax.const(1.0))],
            "nn.relu": [nn.relu(special)],
            "nn.instance_norm": [nn.instance_norm(a, const(3, seed=1), const(3, seed=2), 0, [2])],
            "arange": [op.arange(1, 7, 2, "float32"), op.arange(3, dtype="int64")],
            "cumsum": [op.cumsum(a, 2), op.cumsum(bools, 1, "float32")],
            "floor_divide": [op.floor_divide(a, b)],
            "bitwise_not": [op.bitwise_not(bools)],
            "astype": [op.astype(a, "int32"), op.astype(half, "float32"), op.astype(bools, "float32")],
            "broadcast_to": [op.broadcast_to(a, (3, 2, 4))],
            "concat": [op.concat([a, a], 1)],
            "dequantize": [op.dequantize(bytes_, relax.const(np.array([0.5, 2.0], "float32")), zeros, 1)],
            "expand_dims": [op.expand_dims(b, [0, -1])],
            "full": [op.full((2, 3), relax.const(1.5), "float16")],
            "matmul": [op.matmul(a, op.permute_dims(b))],
            "ones": [op.ones((2, 2), "int64")],
            "zeros": [op.zeros((2, 2), "float32")],
            "permute_dims": [op.permute_dims(a, [2, 0, 1]), op.permute_dims(b)],
            "reshape": [op.reshape(a, (2, 6))],
            "split": [relax.TupleGetItem(op.split(a, [1, 3], 2), 1)],
            "squeeze": [op.squeeze(a, [1]), op.squeeze(a)],
            "strided_slice": [op.strided_slice(a, [0, 2], [0, -3], [3, -1], [2, 1])],
            "take": [op.take(a, relax.const(np.array([2, 0])), 0)],
        }

    values = [a, b, bools, special, half, bytes_]
    assert calls(*map(relax.const, values)).keys() == FOLDS.keys()

    def module(build: Callable[[Any], list[relax.Expr]]) -> tvm.IRModule:
        bb = relax.BlockBuilder()
        params = [relax.Var(f"p{i}", relax.TensorType(v.shape, str(v.dtype))) for i, v in enumerate(values)]
        with bb.function("main", params):
            with bb.dataflow():
                out = bb.emit_output(relax.Tuple([bb.emit(expr) for expr in build(params)]))
            bb.emit_func_output(out)
        return bb.finalize()

    ran = module(lambda params: [expr for exprs in calls(*params).values() for expr in exprs])
    folded = normalise(
        module(lambda params: [e for es in calls(*map(relax.const, values)).values() for e in es])
    )
    assert operators(folded) == {}
    for want, got in zip(run_on_cpu(ran, values), run_on_cpu(folded, values), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_small_constant_is_not_blown_up() -> None:
    mod = function(lambda bb, x: op.multiply(x, bb.emit(op.ones((1024, 1024), "float32"))), (1024, 1024))
    assert check(mod, numbers=False) == {"ones": 1, "multiply": 1}


def test_what_changes_nothing_goes() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(op.reshape(x, (2, 3, 4)))
        y = bb.emit(op.astype(y, "float32"))
        y = bb.emit(op.permute_dims(y, [0, 1, 2]))
        y = bb.emit(op.broadcast_to(y, (2, 3, 4)))
        y = bb.emit(relax.TupleGetItem(bb.emit(nn.dropout(y, 0.5)), 0))
        dead = bb.emit(op.exp(y))
        y = relax.TupleGetItem(bb.emit(relax.Tuple([dead, y])), 1)
        return op.add(bb.emit(y), relax.const(0.0))

    assert check(function(build, (2, 3, 4))) == {"add": 1}


# Shapes of functions.


def test_batch_norm_in_plain_blocks_and_branches() -> None:
    bb = relax.BlockBuilder()
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    x = relax.Var("x", relax.TensorType((1, 4, 5, 5), "float32"))

    def branch(seed: int) -> relax.SeqExpr:
        inner = relax.BlockBuilder()
        with inner.function("branch", [x]):
            y = batch_norm(inner, inner.emit(nn.conv2d(x, const(4, 4, 1, 1, seed=seed))), 4)
            inner.emit_func_output(y)
        return inner.finalize()["branch"].body

    with bb.function("main", [flag, x]):
        chosen = bb.emit(relax.If(flag, branch(1), branch(2)))
        bb.emit_func_output(bb.emit(nn.relu(chosen)))
    assert check(bb.finalize()) == {"nn.conv2d": 2, "add": 2, "nn.relu": 1}


def test_rules_do_not_reach_into_another_dataflow_block() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 5, 5), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            hidden = bb.emit(op.exp(x))
            y = bb.emit_output(nn.conv2d(hidden, const(4, 4, 1, 1)))
        y = bb.emit(relax.op.call_pure_packed("vm.builtin.copy", y, ty_args=y.ty))
        with bb.dataflow():
            z = bb.emit_output(nn.conv2d(bb.emit(nn.relu(y)), const(4, 4, 1, 1)))
        with bb.dataflow():
            z = bb.emit_output(op.multiply(z, const(4, 1, 1)))
        bb.emit_func_output(z)
    assert check(bb.finalize())["nn.conv2d"] == 2


def test_public_kernels_stay() -> None:
    mod = function(lambda bb, x: bb.emit_te(topi.tanh, x), (2, 3))
    kernel = next(gv for gv in mod.functions if gv.name_hint != "main")
    mod.update_func(kernel, mod[kernel].with_attr("global_symbol", kernel.name_hint))
    out = normalise(mod)
    assert kernel.name_hint in {gv.name_hint for gv in out.functions}
    assert operators(out) == {"tanh": 1}


def test_symbolic_batch_keeps_its_symbol() -> None:
    batch = tvm.tirx.Var("n", "int64")

    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = batch_norm(bb, bb.emit(nn.conv2d(x, const(8, 4, 3, 3), padding=1)), 8)
        return op.reshape(bb.emit(nn.relu(y)), (batch, 8 * 36))

    mod = function(build, (batch, 4, 6, 6))
    assert check(mod, numbers=False) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1, "reshape": 1}
    check(bind_symbols(mod, {"n": 3}))


def test_a_finished_composite_stays_closed() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4), "float32"))
    with bb.function("group", [x], attrs={"Primitive": True, "Composite": "theirs"}, private=True):
        with bb.dataflow():
            out = bb.emit_output(op.minimum(bb.emit(op.maximum(x, relax.const(0.0))), relax.const(6.0)))
        group = bb.emit_func_output(out)
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.Call(group, [x])))
    mod = bb.finalize()
    assert structural_equal(normalise(mod)["group"], mod["group"], map_free_vars=True)


# Networks.


def test_squeezenet_keeps_its_numbers() -> None:
    pytest.importorskip("onnxruntime")
    found = check(networks.load("light_squeezenet"))
    assert found["nn.conv2d"] == found["add"] == found["nn.relu"] == 26


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "shapes", "gone"),
    [
        ("ppocr_v4_det", {"x": (1, 3, 64, 64)}, {"call_tir", "nn.batch_norm", "isnan", "where"}),
        ("ppocr_v4_rec", {"x": (1, 3, 48, 64)}, {"call_tir", "nn.batch_norm"}),
        ("nudenet_yolov8n", {"images": (1, 3, 64, 64)}, {"call_tir"}),
        ("light_shufflenet", {}, {"nn.batch_norm", "multiply"}),
        ("light_resnet50", {}, {"nn.batch_norm", "multiply"}),
    ],
)
def test_network_keeps_its_numbers(name: str, shapes: dict[str, tuple[int, ...]], gone: set[str]) -> None:
    found = check(networks.load(name, **shapes), tolerance=2e-5)
    assert not gone & found.keys()


def test_axes_of_one_element_come_and_go_by_one_reshape() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(op.expand_dims(bb.emit(op.expand_dims(x, [2])), [3]))
        y = bb.emit(op.squeeze(bb.emit(nn.relu(y)), [2, 3]))
        return op.expand_dims(bb.emit(op.squeeze(bb.emit(op.expand_dims(y, [0])), [0])), [1])

    assert check(function(build, (2, 6))) == {"reshape": 2, "nn.relu": 1}


def test_a_reshape_that_others_read_stays() -> None:
    def build(bb: Any, x: relax.Expr) -> relax.Expr:
        y = bb.emit(op.reshape(x, (12,)))
        return op.concat([y, bb.emit(nn.relu(bb.emit(op.reshape(bb.emit(op.reshape(y, (3, 4))), (12,)))))], 0)

    assert check(function(build, (2, 6))) == {"reshape": 1, "nn.relu": 1, "concat": 1}
