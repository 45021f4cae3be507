"""Scopes for a plain module: the situations of upstream's test of AnnotateCustomMemoryScope, rebuilt.

``upstream``: layout transforms and ``to_vdevice`` copies that TVM 0.27's texture passes leave in `main` of
the same module. Ours may not be more, in sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networks
import pytest
import tvm
from modules import draw, graph, nn, relative_error, texture_target, var
from test_place_rewrite import calls_of, rows
from tvm import relax
from tvm.relax import op

from fusion_patterns.lower.stages import fuse, lower
from fusion_patterns.passes import PlaceScopes
from fusion_patterns.place.decide import bindings_of
from fusion_patterns.place.limits import TextureLimits
from fusion_patterns.place.profiles import load_profile
from fusion_patterns.reference import Reference

CONVERSIONS = ("layout.pack", "layout.unpack", "layout.copy")
X, W, BIAS = (2, 16, 28, 28), (4, 16, 3, 3), (2, 4, 26, 26)


@dataclass(frozen=True)
class Situation:
    """A plain module, and the conversions and copies that upstream makes in it."""

    build: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    upstream: tuple[int, int]

    def module(self) -> tvm.IRModule:
        return graph(self.build, [var(name, shape) for name, shape in self.shapes.items()])


def after(
    *steps: Callable[..., Any], upstream: int = 3, copies: int = 0, **extra: tuple[int, ...]
) -> Situation:
    """One convolution, and what follows it: each step is given `emit`, the last value and the extra
    parameters."""

    def build(emit: Any, x: Any, w: Any, *more: Any) -> Any:
        value = emit(nn.conv2d(x, w))
        for step in steps:
            value = emit(step(value, *more))
        return value

    return Situation(build, {"x": X, "w": W, **extra}, (upstream, copies))


def relu_first(emit: Any, x: Any, w: Any) -> Any:
    return emit(nn.relu(emit(nn.conv2d(emit(nn.relu(x)), w))))


def fused_multiply_add(emit: Any, x: Any, w: Any, scale: Any, bias: Any) -> Any:
    value = emit(nn.relu(emit(op.ewise_fma(emit(nn.conv2d(x, w)), scale, bias))))
    return emit(nn.conv2d(value, w))


def channels_last(emit: Any, x: Any, w: Any) -> Any:
    return emit(nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))


def concat_with_itself(emit: Any, x: Any, w: Any) -> Any:
    value = emit(nn.conv2d(x, w))
    return emit(op.concat([value, emit(nn.relu(value))], axis=1))


def then_split(emit: Any, x: Any, w: Any) -> Any:
    parts = emit(op.split(concat_with_itself(emit, x, w), 2, axis=1))
    return [emit(parts[0]), emit(parts[1])]


def then_transpose(emit: Any, x: Any, w: Any) -> Any:
    parts = emit(op.split(concat_with_itself(emit, x, w), 2, axis=1))
    turned = [emit(op.permute_dims(emit(parts[k]), [3, 2, 1, 0])) for k in range(2)]
    return emit(op.concat(turned, axis=2))


def residual(emit: Any, x: Any, w1: Any, w2: Any, w3: Any, bias: Any) -> Any:
    first = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, w1, strides=2)), bias))))
    scaled = emit(op.multiply(bias, relax.const(0.15, "float32")))
    second = emit(nn.relu(emit(op.add(emit(nn.conv2d(first, w2)), scaled))))
    return emit(nn.relu(emit(nn.conv2d(second, w3, strides=2))))


def two_branches(emit: Any, x: Any, w1: Any, w2: Any, w3: Any, bias: Any) -> Any:
    first = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, w1, strides=2)), bias))))
    return emit(op.concat([emit(nn.conv2d(first, w, strides=2)) for w in (w2, w3)], axis=1))


def pooled_branches(emit: Any, x: Any, w1: Any, w2: Any, w3: Any, w4: Any) -> Any:
    pool = emit(nn.max_pool2d(emit(nn.conv2d(x, w1)), [2, 2], strides=[2, 2]))
    one = emit(nn.conv2d(pool, w2, padding=[0, 0, 1, 1]))
    two = emit(nn.conv2d(pool, w3))
    three = emit(nn.conv2d(pool, w4, padding=[0, 1, 1, 0]))
    return emit(op.add(emit(op.add(one, two)), three))


def mean_and_convs(emit: Any, x: Any, w1: Any, w2: Any, last: int) -> Any:
    mean = emit(op.mean(x, axis=1, keepdims=True))
    convs = [emit(nn.conv2d(x, w1, padding=1))]
    convs.append(emit(nn.conv2d(convs[0], w2, padding=1)))
    total = emit(op.add(*convs))
    gated = emit(op.multiply(emit(op.add(mean, convs[0])), convs[last]))
    return emit(op.add(total, gated))


PAIR = {"x": (2, 32, 40, 40), "w1": (96, 32, 2, 2), "w2": (32, 96, 2, 2)}
SITUATIONS = {
    "conv": after(),
    "conv of 64 channels": Situation(
        lambda e, x, w: e(nn.conv2d(x, w)), {"x": (2, 64, 56, 56), "w": (32, 64, 3, 3)}, (3, 0)
    ),
    "channels last": Situation(channels_last, {"x": (2, 28, 28, 16), "w": (4, 3, 3, 16)}, (3, 0)),
    "relu": after(nn.relu),
    "relu before": Situation(relu_first, {"x": X, "w": W}, (3, 0)),
    "relu and tanh": after(nn.relu, op.tanh),
    "residual": after(op.add, upstream=4, bias=BIAS),
    "an op that is not packed": Situation(
        fused_multiply_add,
        {"x": (2, 4, 28, 28), "w": (4, 4, 3, 3), "scale": BIAS, "bias": BIAS},
        (6, 0),
    ),
    "sum": after(lambda c: op.sum(c, axis=[2, 3])),
    "sum that keeps dimensions": after(lambda c: op.sum(c, axis=[2, 3], keepdims=True)),
    "sum over channels": after(lambda c: op.sum(c, axis=[1, 2])),
    "transpose": after(lambda c: op.permute_dims(c, [3, 2, 1, 0])),
    "expand": after(lambda c: op.expand_dims(c, [-3, 1])),
    "squeeze": Situation(
        lambda e, x, w: e(op.squeeze(e(nn.conv2d(x, w)), [0])), {"x": (1, 16, 28, 28), "w": W}, (3, 0)
    ),
    "slice": after(lambda c: op.strided_slice(c, [1, 2, 3], [0, 0, 0], [4, 26, 26], [2, 3, 4])),
    "concat": Situation(concat_with_itself, {"x": X, "w": W}, (3, 0)),
    "concat and split": Situation(then_split, {"x": X, "w": W}, (4, 0)),
    "concat, split, transpose": Situation(then_transpose, {"x": X, "w": W}, (4, 0)),
    "max pool": after(lambda c: nn.max_pool2d(c, [2, 2], strides=[2, 2])),
    "adaptive pool": after(lambda c: nn.adaptive_avg_pool2d(c, [13, 13])),
    "softmax": after(lambda c: nn.softmax(c, axis=1)),
    "layer norm": after(
        lambda c, gamma, beta: nn.layer_norm(c, gamma, beta, axes=[-2, -1]), gamma=(26, 26), beta=(26, 26)
    ),
    "broadcast": after(op.add, bias=(26, 26)),
    "a number": after(lambda c: op.add(c, relax.const(1, "float32"))),
    "residual block": Situation(
        residual,
        {"x": (2, 32, 40, 40), "w1": (32, 32, 2, 2), "w2": (32, 32, 1, 1), "w3": (32, 32, 2, 2)}
        | {"bias": (1, 32, 1, 1)},
        (7, 0),
    ),
    "odd branch": Situation(two_branches, PAIR | {"w3": (5, 96, 2, 2), "bias": (1, 96, 1, 1)}, (6, 1)),
    "two branches": Situation(two_branches, PAIR | {"w3": (8, 96, 2, 2), "bias": (1, 96, 1, 1)}, (6, 0)),
    "pool and branches": Situation(
        pooled_branches,
        {"x": (2, 32, 40, 40), "w1": (32, 32, 1, 1), "w2": (32, 32, 2, 2)}
        | {"w3": (32, 32, 1, 1), "w4": (32, 32, 2, 2)},
        (6, 0),
    ),
    "mean beside": Situation(
        lambda e, x, w1, w2: mean_and_convs(e, x, w1, w2, 0),
        {"x": (1, 4, 40, 40), "w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3)},
        (6, 3),
    ),
    "mean beside, another order": Situation(
        lambda e, x, w1, w2: mean_and_convs(e, x, w1, w2, 1),
        {"x": (1, 4, 40, 40), "w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3)},
        (6, 2),
    ),
}


@pytest.fixture(scope="module")
def placed() -> dict[str, tvm.IRModule]:
    return {name: PlaceScopes(texture_target())(s.module()) for name, s in SITUATIONS.items()}


def conversions(mod: tvm.IRModule) -> Counter[str]:
    return Counter({row: count for row, count in rows(mod).items() if row in CONVERSIONS})


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_more_conversions_and_copies_than_upstream(placed: dict[str, tvm.IRModule], name: str) -> None:
    made = conversions(placed[name])
    transforms, copies = SITUATIONS[name].upstream
    assert made["layout.copy"] <= copies
    assert made.total() <= transforms + copies


@pytest.mark.parametrize("name", SITUATIONS)
def test_scopes_are_legal_and_calls_agree(placed: dict[str, tvm.IRModule], name: str) -> None:
    mod, limits = placed[name], TextureLimits.of(texture_target())
    relax.analysis.well_formed(mod)
    for call in calls_of(mod):
        callee = mod[call.op]
        for arg, param in zip(call.args, callee.params, strict=True):
            tvm.ir.assert_structural_equal(arg.ty, param.ty)
        tvm.ir.assert_structural_equal(call.ty, callee.ret_ty)
    for binding in bindings_of(mod["main"].body):
        ty = binding.var.ty
        if isinstance(ty, relax.TensorType) and ty.vdevice is not None:
            shape = tuple(int(dim) for dim in ty.shape.values)
            assert limits.why_not(str(ty.vdevice.memory_scope), shape, str(ty.dtype)) is None
    assert all(param.ty.vdevice is None for param in mod["main"].params)


@pytest.mark.parametrize("name", SITUATIONS)
def test_convolutions_read_texture(placed: dict[str, tvm.IRModule], name: str) -> None:
    found = [call for call in calls_of(placed[name]) if call.op.name_hint.startswith("fused_conv2d")]
    assert bool(found) == (name != "channels last")
    for call in found:
        assert str(call.args[0].ty.vdevice.memory_scope) == "global.texture"


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "an op that is not packed"])
def test_the_numbers_do_not_change(placed: dict[str, tvm.IRModule], name: str) -> None:
    mod = SITUATIONS[name].module()
    inputs = draw(mod)
    # (stock TVM can't build `ewise_fma` at all)
    ours, theirs = Reference(placed[name]).run(inputs), Reference(mod).run(inputs)
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["residual block", "pool and branches", "odd branch"])
def test_every_kernel_can_be_made(placed: dict[str, tvm.IRModule], name: str) -> None:
    with texture_target() as target:
        fused = fuse(placed[name])
    assert lower(fused, target).faults == {}


# The vote -------------------------------------------------------------------------------------------------


def test_three_for_texture_one_for_a_buffer() -> None:
    """Of a value's four readers only a row reduction wants a buffer: texture it is, and it is unpacked
    once."""

    def build(emit: Any, x: Any, w: Any) -> Any:
        value = emit(nn.conv2d(x, w, padding=1))
        rest = [emit(nn.conv2d(value, w, padding=1)) for _ in range(3)]
        return [*rest, emit(op.sum(value, axis=[3]))]

    mod = graph(build, [var("x", (1, 8, 6, 6)), var("w", (8, 8, 3, 3))])
    placed = PlaceScopes(texture_target())(mod)
    first, *others = [call for call in calls_of(placed) if call.op.name_hint.startswith("fused_conv2d")]
    assert str(first.ty.vdevice.memory_scope) == "global.texture"
    assert {str(call.args[0].ty.vdevice.memory_scope) for call in others} == {"global.texture"}
    assert conversions(placed) == {"layout.pack": 2, "layout.unpack": 1}


@pytest.mark.parametrize("name", ["light_resnet50", "light_squeezenet"])
def test_a_whole_network_is_packed_once_and_unpacked_once(name: str) -> None:
    placed = PlaceScopes(texture_target())(networks.load(name))
    assert conversions(placed) == {"layout.pack": 1, "layout.unpack": 1}


# What it leaves alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 4), (4,), (1, 4, 4, 4, 4)])
def test_native_tensors_are_not_mistaken_for_packed_ones(shape: tuple[int, ...]) -> None:
    mod = graph(lambda emit, x: emit(op.tanh(emit(nn.relu(x)))), [var("x", shape)])
    placed = PlaceScopes(texture_target())(mod)
    assert calls_of(placed) == []
    assert "vdevice" not in placed.global_infos


def test_symbolic_dimensions_stay_plain() -> None:
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 16, 28, 28, n), "float32"))
    placed = PlaceScopes(texture_target())(graph(lambda emit, x: emit(nn.relu(x)), [x]))
    assert calls_of(placed) == []


def test_constants_of_the_given_module_are_not_touched() -> None:
    weights = relax.const(draw(graph(lambda e, w: e(nn.relu(w)), [var("w", W)]))["w"])
    mod = graph(lambda emit, x: emit(nn.conv2d(x, weights)), [var("x", X)])
    PlaceScopes(texture_target())(mod)
    assert weights.ty.vdevice is None
    assert [call.args[1].same_as(weights) for call in _convs(mod)] == [True]


def _convs(mod: tvm.IRModule) -> list[Any]:
    values = [binding.value for binding in bindings_of(mod["main"].body)]
    return [v for v in values if isinstance(v, relax.Call) and v.op.name == "relax.nn.conv2d"]


def test_the_current_target_and_another_profile() -> None:
    mod = SITUATIONS["relu"].module()
    with texture_target():
        assert conversions(PlaceScopes()(mod)) == {"layout.pack": 2}
    assert conversions(PlaceScopes(texture_target(), load_profile("generic"))(mod)) == {"layout.pack": 2}
