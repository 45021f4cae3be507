"""What holds for every placement of drawn networks: cost, order, agreement, determinism, numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Calls, build, errors, nn, texture_target, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns.place import Placement, decide, place
from fusion_patterns.place.balance import Balance, Flow
from fusion_patterns.place.choice import Choice, Tensor, choose
from fusion_patterns.place.decide import bindings_of, composites_of
from fusion_patterns.place.decision import Wish
from fusion_patterns.place.limits import TextureLimits
from fusion_patterns.place.profiles import Memory, Profile, load_profile
from fusion_patterns.run import Device

LIMITS = TextureLimits(textures=True, spatial=16384, depth=2048)
PROFILES = ("adreno", "generic")
SCOPES = ("texture", "global", "any")
repeatable = settings(derandomize=True, max_examples=40, deadline=None)


# One tensor -----------------------------------------------------------------------------------------------

weights = st.sampled_from([0.25, 0.5, 1.0, 2.0])
memories = st.builds(Memory, read=weights, again=weights, write=weights)
profiles = st.builds(
    lambda texture, buffer, launch: Profile(
        name="drawn", keys=(), texture=texture, buffer=buffer, launch=launch, sources=("drawn",)
    ),
    memories,
    memories,
    st.integers(0, 10_000),
)
wishes = st.lists(
    st.builds(
        Wish,
        reader=st.text("abc", min_size=1, max_size=3),
        operand=st.just("data"),
        layout=st.just("NCHW4c"),
        scope=st.sampled_from(SCOPES),
        times=st.sampled_from([1.0, 2.0, 9.0]),
    ),
    max_size=5,
)
tensors = st.builds(
    lambda height, wishes, own, plain: Tensor(
        "NCHW4c", (1, 2, height, 3, 4), "float32", 96 * height, tuple(wishes), own, read_plain=plain
    ),
    st.integers(1, 50),
    wishes,
    st.sampled_from(SCOPES),
    st.booleans(),
)


def price(tensor: Tensor, profile: Profile, scope: str, readers: tuple[str, ...]) -> int:
    """What it costs to hold a tensor in one scope and to give each reader its own."""
    cost = profile.write(scope, tensor.bytes)
    for other in sorted(set(readers) - {scope}):
        cost += profile.convert(tensor.bytes, scope, other)
    if tensor.read_plain:
        cost += profile.convert(tensor.bytes, scope, "global")
    for wish, each in zip(tensor.wishes, readers, strict=True):
        cost += profile.read(each, tensor.bytes, wish.times)
    return cost


def greedy(tensor: Tensor) -> tuple[str, tuple[str, ...]]:
    """The first reader that says anything decides; who says nothing follows."""
    said = [wish.scope for wish in tensor.wishes if wish.scope != "any"]
    first = said[0] if said else tensor.own if tensor.own != "any" else "texture"
    name = {"texture": "global.texture", "global": "global"}
    scope = name[str(first)]
    return scope, tuple(name.get(wish.scope, scope) for wish in tensor.wishes)


@repeatable
@given(tensors, profiles)
def test_a_tensor_never_costs_more_than_by_the_greedy_choice(tensor: Tensor, profile: Profile) -> None:
    choice = choose(tensor, LIMITS, profile)
    ours = price(tensor, profile, choice.scope, choice.readers)
    assert ours <= price(tensor, profile, *greedy(tensor))
    stated = next(a.cost for a in choice.alternatives if a.scope == choice.scope)
    assert stated is not None
    assert stated == ours  # what is printed is what it costs


@repeatable
@given(tensors, profiles)
def test_a_stated_wish_is_a_need(tensor: Tensor, profile: Profile) -> None:
    choice = choose(tensor, LIMITS, profile)
    for wish, scope in zip(tensor.wishes, choice.readers, strict=True):
        if wish.scope != "any":
            assert ("texture" in scope) == (wish.scope == "texture")
    forms = {scope for scope in choice.readers if scope != choice.scope}
    assert {
        c.form.scope for c in choice.conversions if c.kind == "copy"
    } == forms  # one copy for each, shared


@repeatable
@given(tensors, profiles, st.randoms(use_true_random=False))
def test_the_order_of_the_readers_changes_nothing(tensor: Tensor, profile: Profile, random: Any) -> None:
    order = list(range(len(tensor.wishes)))
    random.shuffle(order)
    mixed = Tensor(
        tensor.layout,
        tensor.shape,
        tensor.dtype,
        tensor.bytes,
        tuple(tensor.wishes[k] for k in order),
        tensor.own,
        read_plain=tensor.read_plain,
    )
    one, other = choose(tensor, LIMITS, profile), choose(mixed, LIMITS, profile)
    assert (one.scope, one.reason, one.alternatives) == (other.scope, other.reason, other.alternatives)
    assert [one.readers[k] for k in order] == list(other.readers)
    assert sorted(map(str, one.conversions)) == sorted(map(str, other.conversions))


def test_a_vote_that_a_cheaper_copy_overrules_says_so() -> None:
    """To read it often from a buffer costs more than one copy for the reader that wants a buffer."""
    asked = (Wish("a", "data", "NCHW4c", "global", 1.0), Wish("b", "data", "NCHW4c", "any", 1000.0))
    tensor = Tensor("NCHW4c", (1, 2, 50, 50, 4), "float32", 80_000, asked, "any")
    choice: Choice = choose(tensor, LIMITS, load_profile("adreno"))
    assert choice.scope == "global.texture"
    assert choice.readers == ("global", "global.texture")
    assert "bytes moved in texture, " in choice.reason


# A whole function -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One composite of a drawn network: its kind, which earlier values it reads, what it wishes."""

    kind: str
    reads: tuple[int, ...]
    scope: str
    output: str


steps = st.builds(
    Step,
    st.sampled_from(["conv", "pool", "add", "maximum", "softmax"]),
    st.tuples(st.integers(0, 10), st.integers(0, 10)),
    st.sampled_from(SCOPES),
    st.sampled_from(SCOPES),
)
networks = st.lists(steps, min_size=1, max_size=6)
SHAPE = (1, 8, 6, 5)


def network(drawn: list[Step]) -> tvm.IRModule:
    """Composites over values of one shape, and softmax for what no composite takes; all results are
    returned."""
    calls = Calls()

    def composite(step: Step) -> Any:
        scopes = {"data": step.scope, "other": step.scope, "weight": "global", "output": step.output}
        if step.kind == "conv":
            return calls.conv(SHAPE, (8, 8, 3, 3), scopes, padding=[1, 1])
        two = [var("data", SHAPE), var("other", SHAPE)]
        if step.kind == "pool":
            return calls.composite(
                lambda e, d: e(nn.max_pool2d(d, [3, 3], padding=[1, 1])), two[:1], scopes, "pool2d.chain"
            )
        if step.kind == "add":
            return calls.composite(lambda e, d, o: e(op.add(d, o)), two, scopes, "elementwise.chain")
        return calls.composite(
            lambda e, d, o: e(nn.relu(e(op.maximum(d, o)))), two, scopes, "elementwise.chain"
        )

    made = [None if step.kind == "softmax" else composite(step) for step in drawn]

    def body(emit: Any, x: Any) -> Any:
        values = [x]
        for number, (step, func) in enumerate(zip(drawn, made, strict=True)):
            first, second = (values[k % len(values)] for k in step.reads)
            if func is None:
                values.append(emit(nn.softmax(first, axis=1)))
            elif step.kind == "conv":
                values.append(emit(func(first, weight((8, 8, 3, 3), number))))
            else:
                values.append(emit(func(*([first] if step.kind == "pool" else [first, second]))))
        return values[1:]

    return calls.main(body, [var("x", SHAPE)])


def without_refused(mod: tvm.IRModule) -> tuple[tvm.IRModule, Placement]:
    """The module with refused composites inlined, as the compiler takes them out of its plan."""
    placement = decide(mod, texture_target())
    while placement.refused:
        functions = {gv.name_hint: func for gv, func in mod.functions_items()}
        mod = mod.clone()
        for name in placement.refused:
            func = functions[name]
            attrs = {k: v for k, v in func.attrs.items() if not k.startswith("fusion_patterns")}
            mod[mod.get_global_var(name)] = relax.Function(
                func.params, func.body, func.ret_ty, True, tvm.ir.make_node("ir.DictAttrs", **attrs)
            )
        placement = decide(mod, texture_target())
    return mod, placement


@repeatable
@given(networks)
def test_every_call_agrees_with_its_callee(drawn: list[Step]) -> None:
    mod, placement = without_refused(network(drawn))
    placed, _ = place(mod, texture_target(), placement)
    relax.analysis.well_formed(placed)
    for binding in bindings_of(placed["main"].body):
        call = binding.value
        if isinstance(getattr(call, "op", None), tvm.ir.GlobalVar):
            callee = placed[call.op]
            for arg, param in zip(call.args, callee.params, strict=True):
                tvm.ir.assert_structural_equal(arg.ty, param.ty)
            tvm.ir.assert_structural_equal(call.ty, callee.ret_ty)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(placed)), placed)


@repeatable
@given(networks)
def test_conversions_are_those_that_the_decisions_say(drawn: list[Step]) -> None:
    mod, placement = without_refused(network(drawn))
    placed, _ = place(mod, texture_target(), placement)
    said = sorted(
        f"layout.{c.kind}" for t in placement.tensors for c in t.conversions if c.kind != "constant"
    )
    calls = [b.value for b in bindings_of(placed["main"].body)]
    rows = [
        str(placed[call.op].attrs["Composite"])
        for call in calls
        if isinstance(getattr(call, "op", None), tvm.ir.GlobalVar)
    ]
    assert sorted(row for row in rows if row.startswith("layout.")) == said


@repeatable
@given(networks, st.sampled_from(PROFILES))
def test_packing_never_costs_more_than_by_the_greedy_choice(drawn: list[Step], profile: str) -> None:
    """Greedy: in program order, each composite is packed if that is cheaper, given those before it."""
    mod = network(drawn)
    balance = decide(mod, texture_target(), load_profile(profile)).balances["main"]
    packed: set[str] = set()
    for name in sorted(balance.free):
        if balance.cost(packed | {name}) < balance.cost(packed):
            packed.add(name)
    best = balance.free - set(balance.left)
    assert balance.cost(best) <= balance.cost(packed)
    for name in balance.free:  # and each stands on its cheaper side
        assert balance.excess(name) >= 0


def test_what_a_kernel_saves_can_pay_for_the_conversions() -> None:
    flows: Mapping[str, Flow] = {"x": Flow(100, None, {"a"}), "y": Flow(100, "a", plain_reader=True)}
    free = Profile.model_validate({**load_profile("generic").model_dump(), "launch": 0})
    assert Balance(flows, set(), {"a"}, {"a": 399}, free).left == {"a": 1}
    assert Balance(flows, set(), {"a"}, {"a": 401}, free).left == {}
    assert Balance(flows, set(), {"a"}, {"a": -10}, free).left == {"a": 410}


@pytest.mark.opencl
@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_unchanged_on_a_device(seed: int, opencl_device: Device) -> None:
    rng = np.random.default_rng(seed)
    kinds = ["conv", "pool", "add", "maximum", "conv"]
    drawn = [
        Step(kind, tuple(rng.integers(0, 10, 2)), str(rng.choice(SCOPES)), str(rng.choice(SCOPES)))
        for kind in kinds
    ]
    mod, _ = without_refused(network(drawn))
    assert max(errors(build(mod), mod, opencl_device, seed)) < 1e-4


@pytest.mark.opencl
def test_one_pixel_goes_in_and_out_as_a_view(opencl_device: Device) -> None:
    """A parameter that is a gate, and a result of one pixel: packed and plain are the same bytes."""
    calls = Calls()
    gate = calls.conv(
        SHAPE,
        (8, 8, 6, 5),
        {"data": "texture", "weight": "global", "gate": "any", "output": "texture"},
        then=lambda emit, value, gate: emit(op.multiply(value, gate)),
        extra=[var("gate", (1, 8, 1, 1))],
    )
    mod = calls.main(
        lambda emit, x, g: emit(gate(x, weight((8, 8, 6, 5)), g)), [var("x", SHAPE), var("g", (1, 8, 1, 1))]
    )
    built = build(mod)
    kinds = [c.kind for t in built.placement.tensors for c in t.conversions if c.kind != "constant"]
    assert sorted(kinds) == ["pack", "view", "view"]
    assert max(errors(built, mod, opencl_device)) < 1e-5
    assert [type(step).__name__ for step in built.manifest.functions["main"].body].count("Launch") == 2


# Determinism ----------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import tvm
from modules import texture_target
from test_place_property import Step, network, without_refused
from fusion_patterns.place import place
drawn = [
    Step("conv", (0, 0), "texture", "any"),
    Step("pool", (1, 1), "any", "any"),
    Step("add", (1, 2), "any", "any"),
    Step("conv", (1, 1), "global", "texture"),
    Step("conv", (3, 3), "texture", "global"),
    Step("softmax", (5, 5), "any", "any"),
]
mod, placement = without_refused(network(drawn))
placed, _ = place(mod, texture_target(), placement)
print(placed.script())
for tensor in placement.tensors:
    print(placement.explained(tensor))
"""


def test_the_hash_seed_changes_nothing() -> None:
    folder = Path(__file__).parent
    said = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(folder.parent)}
        script = SCRIPT.format(tests=str(folder))
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert len(composites_of(network([Step("conv", (0, 0), "any", "any")]))) == 1
