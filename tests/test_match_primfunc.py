"""Elementwise PrimFuncs are found by what they do, whatever they are called."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.script.parser import tirx as T

from fusion_patterns.match.primfunc import is_elementwise

SHAPE = (1, 8, 6, 6)


def kernel(build, *shapes):
    """Returns the PrimFunc of a TE computation over placeholders of these shapes."""
    inputs = [te.placeholder(shape, name=f"in{place}") for place, shape in enumerate(shapes)]
    return te.create_prim_func([*inputs, build(*inputs)])


def in_place(*reads):
    """Returns a TE compute of ``SHAPE`` that adds up what ``reads`` take at each place."""
    return lambda *inputs: te.compute(SHAPE, lambda *at: sum(read(inputs, at) for read in reads))


@pytest.mark.parametrize(
    ("build", "shapes", "same_shape"),
    [
        (lambda a: te.compute(SHAPE, lambda *at: te.max(a(*at), 0.0)), [SHAPE], (True,)),
        (lambda a: te.compute(SHAPE, lambda *at: te.exp(a(*at)) * a(*at)), [SHAPE], (True,)),
        (
            in_place(lambda i, at: i[0](*at), lambda i, at: i[1](0, at[1], 0, 0)),
            [SHAPE, (1, 8, 1, 1)],
            (True, False),
        ),
        (in_place(lambda i, at: i[0](*at), lambda i, at: i[1](*at[2:])), [SHAPE, (6, 6)], (True, False)),
        (in_place(lambda i, at: i[0](*at), lambda i, at: i[1]()), [SHAPE, ()], (True, False)),
    ],
    ids=["unary", "transcendental", "channel", "fewer dimensions", "scalar"],
)
def test_elementwise(build, shapes, same_shape):
    analysis = is_elementwise(kernel(build, *shapes))
    assert analysis is not None
    assert analysis.same_shape == same_shape


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda a: te.compute(SHAPE, lambda n, c, h, w: a(n, c, w, h)), [SHAPE]),
        (lambda a: te.compute(SHAPE, lambda n, c, h, w: a(n, c, h, 5 - w)), [SHAPE]),
        (lambda a: te.compute(SHAPE, lambda n, c, h, w: a(n, c, h, w) + tirx.Cast("float32", h)), [SHAPE]),
        (lambda a: te.compute((1, 8), lambda n, c: a(n, c, 0, 0)), [SHAPE]),
        (lambda a: te.compute(SHAPE, lambda n, c, h, w: a(h, w)), [(6, 8)]),
    ],
    ids=["transposed", "reversed", "place is a value", "slice", "larger input"],
)
def test_not_elementwise(build, shapes):
    assert is_elementwise(kernel(build, *shapes)) is None


def test_a_reduction_is_not_elementwise():
    def total(a):
        k = te.reduce_axis((0, 8), name="k")
        return te.compute((1, 1, 6, 6), lambda n, c, h, w: te.sum(a(n, k, h, w), axis=k))

    assert is_elementwise(kernel(total, SHAPE)) is None


def test_two_stages_are_not_elementwise():
    def twice(a):
        first = te.compute(SHAPE, lambda *at: a(*at) + 1.0)
        return te.compute(SHAPE, lambda *at: first(*at) * 2.0)

    assert is_elementwise(kernel(twice, SHAPE)) is None


def test_a_part_of_the_output_is_not_all_of_it():
    @T.prim_func(private=True, s_tir=True)
    def relu(a: T.Buffer((8, 8), "float32"), b: T.Buffer((8, 8), "float32")):
        for i, j in T.grid(4, 8):
            with T.sblock("half"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = T.max(a[vi, vj], T.float32(0))

    assert is_elementwise(relu) is None


def test_symbolic_shapes_are_compared_as_expressions():
    n = tirx.Var("n", "int64")
    same = kernel(lambda a, b: te.compute((n, 8), lambda i, j: a(i, j) + b(i, j)), (n, 8), (n, 8))
    analysis = is_elementwise(same)
    assert analysis is not None
    assert analysis.same_shape == (True, True)


@pytest.mark.parametrize("op", ["sigmoid", "tanh", "exp", "nn.relu", "nn.leakyrelu", "rsqrt"])
def test_what_relax_makes_of_an_activation(op):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    call = relax.op
    for part in op.split("."):
        call = getattr(call, part)
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(call(x)))
    mod = relax.transform.LegalizeOps()(builder.finalize())
    kernels = [func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert len(kernels) == 1
    assert is_elementwise(kernels[0]) is not None
