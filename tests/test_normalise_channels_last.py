"""Channels that importers put last for a while stay where they were, where that spares transpositions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from modules import const
from networks import random_inputs, run_on_cpu
from test_normalise import function, operators
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import nn
from tvm_ffi import structural_hash

from fusion_patterns.normalise import normalise

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def normal(mod: tvm.IRModule) -> tvm.IRModule:
    """The module in inference form, which computes what it did."""
    before = structural_hash(mod)
    out = normalise(mod)
    assert structural_hash(mod) == before
    inputs = random_inputs(mod["main"])
    for ours, theirs in zip(run_on_cpu(out, inputs), run_on_cpu(mod, inputs), strict=True):
        assert ours.std() > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6)
    return out


def dense(bb: Any, x: Any, outputs: int, seed: int = 0, rank: int = 2) -> Any:
    inputs = int(x.ty.shape.values[-1])
    weight = const((1,) * (rank - 2) + (inputs, outputs), seed, scale=inputs**-0.5)
    return bb.emit(op.add(bb.emit(op.matmul(x, weight)), const((outputs,), seed + 1)))


def norm(bb: Any, x: Any, axes: tuple[int, ...] = (-1,)) -> Any:
    shape = [int(x.ty.shape.values[axis]) for axis in axes]
    return bb.emit(nn.layer_norm(x, const(shape, 5), const(shape, 6), axes=list(axes)))


def block(bb: Any, x: Any, flat: bool = True) -> Any:
    """A ConvNeXt block behind its depthwise convolution, as importers write it."""
    n, c, h, w = (int(dim) for dim in x.ty.shape.values)
    y = norm(bb, bb.emit(op.permute_dims(x, LAST)))
    y = dense(bb, bb.emit(op.reshape(y, (n * h * w, c))) if flat else y, 4 * c)
    y = bb.emit(nn.gelu(bb.emit(op.reshape(y, (n, h, w, 4 * c))) if flat else y))
    y = dense(bb, bb.emit(op.reshape(y, (n * h * w, 4 * c))) if flat else y, c, 3)
    y = bb.emit(op.permute_dims(bb.emit(op.reshape(y, (n, h, w, c))) if flat else y, FIRST))
    return bb.emit(op.add(bb.emit(op.multiply(y, const((c, 1, 1), 8))), x))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("shape", [(1, 6, 4, 5), (3, 8, 3, 3), (2, 5, 1, 1)])
def test_a_convnext_block(flat: bool, shape: tuple[int, ...]) -> None:
    found = operators(normal(function(lambda bb, x: block(bb, x, flat), shape)))
    assert found["nn.conv2d"] == 2
    assert found["nn.layer_norm"] == 1
    assert not found["permute_dims"] + found["reshape"] + found["matmul"] + found["multiply"]


def test_the_layer_norm_is_one_of_the_channels() -> None:
    out = normal(function(lambda bb, x: block(bb, x), (1, 6, 4, 5)))
    (call,) = [
        b.value
        for b in out["main"].body.blocks[0].bindings
        if getattr(b.value.op, "name", "") == "relax.nn.layer_norm"
    ]
    assert [int(axis) for axis in call.attrs.axes] == [1]
    assert [int(dim) for dim in call.args[0].ty.shape.values] == [1, 6, 4, 5]


def test_tokens_of_an_image() -> None:
    """(N, HW, C) and back, with a constant for each token and a residual among them."""

    def build(bb: Any, x: Any) -> Any:
        tokens = bb.emit(op.permute_dims(bb.emit(op.reshape(x, (2, 6, 20))), [0, 2, 1]))
        tokens = bb.emit(op.add(tokens, const((2, 20, 6), 9)))
        value = dense(bb, norm(bb, tokens), 6, rank=3)
        tokens = bb.emit(op.add(tokens, bb.emit(op.tanh(value))))
        return bb.emit(op.reshape(bb.emit(op.permute_dims(tokens, [0, 2, 1])), (2, 6, 4, 5)))

    found = operators(normal(function(build, (2, 6, 4, 5))))
    assert found["nn.conv2d"] == 1
    assert not found["permute_dims"] + found["reshape"] + found["matmul"]


def test_heads_of_channels_are_a_reshape_of_the_image() -> None:
    """Attention between channels: queries leave the region transposed, which is the image's own order."""

    def build(bb: Any, x: Any) -> Any:
        tokens = bb.emit(op.permute_dims(bb.emit(op.reshape(x, (1, 6, 20))), [0, 2, 1]))
        heads = bb.emit(op.reshape(dense(bb, norm(bb, tokens), 12, rank=3), (1, 20, 3, 2, 2)))
        turned = bb.emit(op.permute_dims(heads, [2, 0, 3, 4, 1]))
        weights = bb.emit(nn.softmax(turned, axis=-1))
        back = bb.emit(op.permute_dims(bb.emit(op.reshape(weights, (1, 12, 20))), [0, 2, 1]))
        return bb.emit(op.permute_dims(dense(bb, back, 6, rank=3), [0, 2, 1]))

    found = operators(normal(function(build, (1, 6, 4, 5))))
    assert found["nn.conv2d"] == 2
    assert not found["permute_dims"]


def test_a_value_that_others_read_is_transposed_for_them() -> None:
    """One transposition instead of three."""

    def build(bb: Any, x: Any) -> Any:
        y = norm(bb, bb.emit(op.permute_dims(x, LAST)))
        other = bb.emit(nn.softmax(y, axis=1))
        z = bb.emit(op.permute_dims(bb.emit(nn.relu(y)), FIRST))
        w = bb.emit(op.permute_dims(bb.emit(op.tanh(y)), FIRST))
        return bb.emit_output(relax.Tuple([z, w, other]))

    found = operators(normal(function(build, (1, 6, 4, 5))))
    assert found["permute_dims"] == 1
    assert found["nn.layer_norm"] == 1


def untouched(mod: tvm.IRModule) -> None:
    before, after = operators(mod), operators(normalise(mod))
    for name in ("permute_dims", "matmul", "nn.layer_norm"):
        assert before[name] == after[name]
    assert not after["nn.conv2d"]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda bb, x: norm(bb, bb.emit(op.permute_dims(x, LAST))), id="it stays last"),
        pytest.param(
            lambda bb, x: bb.emit(op.permute_dims(norm(bb, bb.emit(op.permute_dims(x, LAST)), (1,)), FIRST)),
            id="a norm of rows",
        ),
        pytest.param(
            lambda bb, x: bb.emit(
                op.permute_dims(bb.emit(nn.softmax(bb.emit(op.permute_dims(x, LAST)), axis=1)), FIRST)
            ),
            id="an operator that is not known",
        ),
        pytest.param(
            lambda bb, x: bb.emit(
                op.permute_dims(
                    bb.emit(op.add(bb.emit(op.permute_dims(x, LAST)), const((1, 4, 1, 1), 1))), FIRST
                )
            ),
            id="a constant for each row",
        ),
    ],
)
def test_what_spares_no_transposition_or_is_not_known_stays(build: Any) -> None:
    mod = function(build, (1, 6, 4, 5))
    untouched(mod)
    normal(mod)


def test_a_weight_that_is_not_known_stays() -> None:
    def build(bb: Any, x: Any, w: Any) -> Any:
        y = bb.emit(op.matmul(bb.emit(op.permute_dims(x, LAST)), w))
        return bb.emit(op.permute_dims(y, FIRST))

    untouched(function(build, (1, 6, 4, 5), (6, 6)))


def test_an_unknown_batch_stays() -> None:
    n = tirx.Var("n", "int64")

    def build(bb: Any, x: Any) -> Any:
        return bb.emit(op.permute_dims(norm(bb, bb.emit(op.permute_dims(x, LAST))), FIRST))

    untouched(function(build, (n, 6, 4, 5)))


def test_rows_of_a_matrix_are_no_images_of_one_pixel() -> None:
    def build(bb: Any, x: Any) -> Any:
        turned = bb.emit(op.permute_dims(bb.emit(op.permute_dims(x, [1, 0])), [1, 0]))
        return norm(bb, dense(bb, turned, 4))

    assert not operators(normal(function(build, (7, 6))))["nn.conv2d"]


def test_what_a_region_gives_back_stays_the_image_that_it_was() -> None:
    """An activation behind the way back is not taken for one on other images."""

    def build(bb: Any, x: Any) -> Any:
        y = bb.emit(op.permute_dims(norm(bb, bb.emit(op.permute_dims(x, LAST))), FIRST))
        return bb.emit(nn.conv2d(bb.emit(op.tanh(y)), const((4, 6, 1, 1), 3)))

    found = operators(normal(function(build, (2, 6, 4, 5))))
    assert not found["reshape"] + found["permute_dims"]


def test_each_function_for_itself() -> None:
    bb = relax.BlockBuilder()
    for name in ("main", "other"):
        x = relax.Var("x", relax.TensorType((1, 6, 4, 5), "float32"))
        with bb.function(name, [x], attrs={"global_symbol": name}):
            with bb.dataflow():
                turned = norm(bb, bb.emit(op.permute_dims(x, LAST)))
                out = bb.emit_output(op.permute_dims(turned, FIRST) if name == "main" else turned)
            bb.emit_func_output(out)
    mod = bb.finalize()
    out = normalise(mod)
    assert operators(out, "main")["permute_dims"] == 0
    assert operators(out, "other")["permute_dims"] == 1
