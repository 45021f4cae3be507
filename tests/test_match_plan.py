"""The plan as data: saved and replayed, told to a listener, traced, counted; the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from match_helpers import chain_table, hazard, module, names, row, table
from tvm import relax
from tvm_ffi import structural_equal

from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.match import Decision, FusionPlan, Match, Outcome, load_plan, plan_fusion
from fusion_patterns.match import engine as engine_module
from fusion_patterns.outline import outline

op, nn = relax.op, relax.op.nn


def build(emit, x, y, w):
    first = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, w)), y))))
    return emit(op.add(emit(nn.conv2d(first, w)), first))


def test_a_plan_replays_on_the_same_module():
    table = chain_table()
    mod, same = module(build), module(build)
    plan = plan_fusion(mod, table)
    again = FusionPlan.from_json(plan.to_json(), same, table)
    assert again.to_json() == plan.to_json()
    assert list(map(str, again.decisions)) == list(map(str, plan.decisions))
    assert structural_equal(outline(same, again), outline(mod, plan))


def test_equal_plans_give_equal_texts():
    assert (
        plan_fusion(module(build), chain_table()).to_json()
        == plan_fusion(module(build), chain_table()).to_json()
    )


def test_weights_do_not_matter_to_a_plan():
    def with_constant(seed):
        import numpy as np

        weight = np.random.RandomState(seed).randn(8, 8, 1, 1).astype("float32")
        return module(lambda emit, x, y: emit(nn.relu(emit(nn.conv2d(x, relax.const(weight))))), weights=[])

    plan = plan_fusion(with_constant(0), chain_table())
    assert len(load_plan(plan.to_json(), with_constant(1), chain_table()).matches) == 1


def test_a_plan_for_another_module_or_table_is_refused():
    text = plan_fusion(module(build), chain_table()).to_json()
    with pytest.raises(FusionPatternsError, match="made for another module; make it again"):
        load_plan(text, module(build, x=(1, 8, 4, 4), y=(1, 8, 4, 4)), chain_table())
    with pytest.raises(FusionPatternsError, match="made for another table; make it again"):
        load_plan(text, module(build), table(*chain_table().patterns[1:]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["matches"][0].update(row="other"),
        lambda data: data["matches"][0].update(word=["nn.conv2d(a, a)"]),
        lambda data: data["matches"][0]["nodes"].update(tail=[99]),
        lambda data: data.pop("selection"),
        lambda data: data.update(version=99),
    ],
)
def test_a_damaged_plan_is_refused(damage):
    data = json.loads(plan_fusion(module(build), chain_table()).to_json())
    damage(data)
    with pytest.raises(FusionPatternsError, match="plan"):
        load_plan(json.dumps(data), module(build), chain_table())


def test_text_that_is_no_plan_is_refused():
    with pytest.raises(FusionPatternsError, match="the plan is damaged"):
        load_plan("{", module(build), chain_table())


class Recorder:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def on_match(self, match: Match) -> None:
        self.told.append(("match", " ".join(names(match))))

    def on_decline(self, decision: Decision) -> None:
        self.told.append(("decline", decision.anchor))

    def on_apply(self, match: Match) -> None:
        self.told.append(("apply", " ".join(names(match))))


def test_a_listener_is_told_each_event_once():
    recorder = Recorder()
    mod = module(lambda emit, x, y, w: emit(op.multiply(emit(nn.conv2d(x, w, groups=2)), y)), w=(8, 4, 1, 1))
    plan_fusion(mod, chain_table(), listener=recorder)
    assert recorder.told == [("match", "lv1"), ("apply", "lv1"), ("decline", "lv")]


def test_counters():
    counters = plan_fusion(module(build), chain_table()).counters
    assert (counters["conv2d.chain"].tried, counters["conv2d.chain"].applied) == (2, 2)
    assert counters["elementwise"].tried == 3
    assert counters["elementwise"].applied == counters["elementwise"].near == 0
    assert counters["conv2d.chain"].seconds > 0


def test_near_misses_are_ranked_by_what_matched():
    made = table(
        row(
            "r",
            {
                "conv": {"op": "nn.conv2d", "in": ["data", "weight"]},
                "act": {"op": "nn.relu"},
                "end": {"op": "tanh"},
            },
        )
    )

    def three(emit, x, y, w):
        one = emit(nn.conv2d(x, w))
        two = emit(nn.relu(emit(nn.conv2d(x, w))))
        return one, emit(op.exp(two))

    plan = plan_fusion(module(three), made)
    assert [(d.outcome, d.progress, d.anchor) for d in plan.decisions] == [
        (Outcome.SKIPPED, 1, "lv"),
        (Outcome.DECLINED, 2, "lv1"),
    ]
    (nearest,) = plan.near_misses(5)
    assert nearest.reason == "`lv2` (nn.relu) should go to tanh as the row says, but goes to `lv3` (exp)"
    assert nearest.where == "test.yaml:1"


def test_reasons_are_made_when_they_are_read(monkeypatch):
    plan = plan_fusion(hazard("squeeze_excite"), chain_table())
    asked = []
    monkeypatch.setattr(Decision, "reason", property(lambda decision: asked.append(decision) or ""))
    assert plan.decisions
    assert not asked
    str(plan.decisions[0])
    assert len(asked) == 1


def test_the_walk_of_a_row_can_be_printed(monkeypatch, capsys):
    monkeypatch.setenv(engine_module.TRACE, "conv2d.*")
    plan_fusion(hazard("squeeze_excite"), chain_table())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "conv2d.chain [test.yaml:1] in main"
    assert lines[1:4] == ["  `c` (nn.conv2d)", "    `r` (nn.relu)", "      `o` (multiply)"]
    assert any("no: fusing would close a cycle" in line for line in lines)
    assert not any("elementwise" in line for line in lines)


def test_the_exact_check_has_the_last_word(monkeypatch):
    def refuse(graph, members, word):
        return "TVM's matcher says no" if len(members) > 2 else ""

    monkeypatch.setattr(engine_module, "disagreement", refuse)
    plan = plan_fusion(module(build), chain_table())
    assert all(len(match.ops) <= 2 for match in plan.matches)
    faults = [decision for decision in plan.decisions if decision.outcome is Outcome.INVALID]
    assert [(fault.anchor, fault.reason) for fault in faults] == [("lv", "TVM's matcher says no")]


def test_a_symbol_that_no_input_tells_is_declined():
    mod = hazard("dynamic_batch")
    made = table(
        row(
            "r",
            {
                "conv": {"op": "nn.conv2d", "in": ["data", "weight"]},
                "act": {"op": "nn.relu", "optional": True},
            },
        )
    )
    assert [names(match) for match in plan_fusion(mod, made).matches] == [["c"]]

    n = mod["main"].params[0].ty.shape.values[0]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2 * n, 8), "float32"))
    size = relax.Var("size", relax.ShapeType([n]))
    with builder.function("main", [x, size]):
        with builder.dataflow():
            out = builder.emit_output(op.tanh(builder.emit(op.reshape(x, (n, 16)))))
        builder.emit_func_output(out)
    plan = plan_fusion(
        builder.finalize(), table(row("r", {"shape": {"op": "reshape"}, "act": {"op": "tanh"}}))
    )
    assert plan.matches == ()
    assert plan.declined()[0].reason == "the symbolic dimension `n` is not a dimension of any of its inputs"


def test_matches_can_be_taken_out_by_the_name_of_their_composite():
    plan = plan_fusion(module(build), chain_table())
    first, second = (match.composite for match in plan.matches)
    less = plan.without([first])
    assert [match.composite for match in less.matches] == [second]
    assert less.match_of(second).ops == plan.match_of(second).ops
    assert less.selection.saved_bytes == plan.match_of(second).saved_bytes
    (removed,) = [d for d in less.declined() if d.row == "conv2d.chain" and d.anchor == "lv"]
    assert removed.reason == "it was taken out of the plan afterwards"
    assert load_plan(less.to_json(), module(build), chain_table()).to_json() == less.to_json()


def chain(emit, x, y, w):
    c = emit(nn.conv2d(x, w))
    r = emit(nn.relu(c))
    return emit(op.tanh(emit(op.add(r, y))))


def test_what_is_left_of_a_match_gets_the_next_best():
    plan = plan_fusion(module(chain), chain_table())
    (whole,) = plan.matches
    assert names(whole) == ["lv", "lv1", "lv2", "lv3"]
    less = plan.instead({whole.composite: "lv2"})
    assert [names(match) for match in less.matches] == [["lv", "lv1"], ["lv3"]]
    short, rest = less.matches
    assert short.composite != whole.composite
    assert less.selection.saved_bytes == short.saved_bytes
    assert load_plan(less.to_json(), module(chain), chain_table()).to_json() == less.to_json()
    # No operator at fault comes back, whatever is refused next.
    least = less.instead({short.composite: "lv1", rest.composite: "lv3"})
    assert [names(match) for match in least.matches] == [["lv"]]
    assert least.instead({least.matches[0].composite: "lv"}).matches == ()


def test_operators_that_can_not_be_built_so_are_taken_in_another_way():
    plan = plan_fusion(module(chain), chain_table())
    seen = []
    while plan.matches and len(seen) < 20:
        seen += [tuple(names(match)) for match in plan.matches]
        plan = plan.instead({match.composite: match.composite for match in plan.matches})
    # none comes twice, and there is an end to it
    assert seen[0] == ("lv", "lv1", "lv2", "lv3")
    assert any(way[0] == "lv" for way in seen[1:])
    assert len(set(seen)) == len(seen)
    assert plan.matches == ()


@pytest.mark.parametrize("culprit", ["", "no such value"])
def test_without_an_operator_at_fault_nothing_takes_the_place(culprit):
    plan = plan_fusion(module(build), chain_table())
    first, second = plan.matches
    less = plan.instead({first.composite: culprit})
    assert [match.composite for match in less.matches] == [second.composite]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from match_helpers import chain_table, module
from test_match_plan import build
from fusion_patterns.match import plan_fusion
plan = plan_fusion(module(build), chain_table())
print(plan.to_json(), *plan.decisions, sep="\\n")
"""


def test_plans_do_not_depend_on_the_hash_seed():
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    runs = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert first == second
    assert "conv2d.chain at `lv`" in first
