"""The shipped property tests on the built-in table: a small share of them, the same graphs each time."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tvm_ffi import structural_equal

from fusion_patterns import cli
from fusion_patterns.match import plan_fusion
from fusion_patterns.table import load_table
from fusion_patterns.table.model import Node, Predicate, Row, Table
from fusion_patterns.testing import Graph, Module, Op, Tensor, build, check_table, properties
from fusion_patterns.testing.check import Case, cases, render
from fusion_patterns.testing.draft import seeded
from fusion_patterns.testing.fuzz import Plan, one, summary
from fusion_patterns.testing.fuzz import main as fuzz
from fusion_patterns.testing.nets import draw_net
from fusion_patterns.testing.rows import draw_instance, draw_near_miss, kinds_of_miss, table_of
from fusion_patterns.testing.variants import reduce, renamed, reordered

TABLE = load_table()
CASES = list(cases(TABLE))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_builtin_table(case: Case) -> None:
    held, vacuous, failure = case.run(examples=6, seed=1)
    assert failure is None, f"{failure.reason}\n{failure.example}"
    assert held + vacuous > 0


def test_specs_print_as_python_and_build_alike() -> None:
    for number in range(5):
        spec = draw_net(seeded(number), TABLE)
        again = eval(repr(spec), {"Module": Module, "Graph": Graph, "Tensor": Tensor, "Op": Op})
        assert again == spec
        assert structural_equal(build(again), build(spec))


def test_other_orders_and_names_are_the_same_graph() -> None:
    spec = draw_net(seeded(3), TABLE)
    for other in (renamed(spec), reordered(spec)):
        assert isinstance(other, Module)
        for old, new in zip(spec.functions, other.functions, strict=True):
            assert sorted(op.op for op in old.ops) == sorted(op.op for op in new.ops)
            assert {*old.types().values()} == {*new.types().values()}


def test_every_row_has_instances_and_most_conditions_can_be_broken() -> None:
    broken = conditions = 0
    for row in TABLE.patterns:
        assert draw_instance(seeded(0), row, TABLE).members
        kinds = kinds_of_miss(row, TABLE)
        conditions += len(row.where)
        broken += sum(kind.isdecimal() for kind in kinds)
        assert draw_near_miss(seeded(0), row, TABLE, "returned").escape
    assert broken > 0.75 * conditions


def test_a_failure_shrinks_to_what_matters() -> None:
    spec = draw_net(seeded(2), TABLE)
    assert any(op.op == "nn.conv2d" for graph in spec.functions for op in graph.ops)

    def has_convolution(spec: object) -> bool:
        functions = spec.functions if isinstance(spec, Module) else (spec,)
        return any(op.op == "nn.conv2d" for graph in functions for op in graph.ops)

    small = reduce(spec, has_convolution)
    assert isinstance(small, Module)
    assert sum(len(graph.ops) for graph in small.functions) <= 3


def test_a_condition_does_not_go_with_a_node_that_another_is_about() -> None:
    """Where a node is absent all that a condition says holds, also what it says of others."""
    for row in TABLE.patterns:
        present = {name for name, node in row.nodes.items() if not node.optional and not node.repeat}
        for predicate in row.where:
            tree = ast.parse(predicate.that or "0", mode="eval").body
            parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
            named = [{found.id for found in ast.walk(part) if isinstance(found, ast.Name)} for part in parts]
            for name in set().union(*named) & set(row.nodes) - present:
                assert all(name in names for names in named), f"{predicate.origin}: {predicate.that}"


def net(*ops: Op, **shapes: tuple[int, ...]) -> Graph:
    """One function; tensors whose names begin with w are constants."""
    tensors = [Tensor(name, shape, constant=name.startswith("w")) for name, shape in shapes.items()]
    return Graph("main", tuple(tensors), ops, (ops[-1].name,))


@pytest.mark.parametrize(
    ("row", "condition", "graph"),
    [
        (
            "conv2d.max_pool",
            "output.shape == pool.shape",
            net(
                Op("conv", "nn.conv2d", ("x", "w"), {"padding": [1, 1]}),
                Op("pool", "nn.max_pool2d", ("conv",), {"pool_size": [2, 2], "strides": [2, 2]}),
                Op("sum", "add", ("pool", "r")),
                x=(1, 8, 8, 8),
                w=(8, 8, 3, 3),
                r=(2, 8, 4, 4),
            ),
        ),
        (
            "conv2d.excite",
            "output.shape == excite.shape",
            net(
                Op("one", "nn.conv2d", ("x", "w")),
                Op("two", "nn.conv2d", ("one", "w_b")),
                Op("sum", "add", ("two", "r")),
                x=(1, 8, 1, 1),
                w=(8, 8, 1, 1),
                w_b=(8, 8, 1, 1),
                r=(1, 8, 4, 4),
            ),
        ),
        (
            "conv2d.gate",
            "gate.shape == excite.shape",
            net(
                Op("conv", "nn.conv2d", ("x", "w")),
                Op("scale", "multiply", ("r", "conv")),
                x=(1, 8, 1, 1),
                w=(8, 8, 1, 1),
                r=(2, 8, 4, 4),
            ),
        ),
    ],
)
def test_what_grows_is_declined_where_nothing_is_in_between(row: str, condition: str, graph: Graph) -> None:
    (one,) = (found for found in TABLE.patterns if found.name == row)
    plan = plan_fusion(build(graph), table_of(one, TABLE))
    assert not any(graph.ops[-1].name == op.name for match in plan.matches for op in match.ops)
    assert any(f"`{condition}` does not hold" in decision.reason for decision in plan.declined())


def test_a_value_of_one_pixel_meets_an_image() -> None:
    for name in ("conv2d.gate", "conv2d.excite.gate", "dense.gate"):
        (row,) = (found for found in TABLE.patterns if found.name == name)
        instance = draw_instance(seeded(0), row, TABLE)
        scale = instance.graph.op_of(instance.nodes["scale"][0])
        assert scale is not None
        types = instance.graph.types()
        assert sorted(types[arg].shape[2:] == (1, 1) for arg in scale.args) == [False, True]


def test_what_is_enlarged_fits_what_it_is_added_to() -> None:
    (row,) = (found for found in TABLE.patterns if found.name == "conv2d.enlarged")
    drawn = [draw_instance(seeded(number), row, TABLE) for number in range(10)]
    for instance in drawn:
        types = instance.graph.types()
        assert types[instance.nodes["up"][0]].shape == types[instance.nodes["conv"][0]].shape
    sizes = {len({types.shape[2:] for types in instance.graph.types().values()}) for instance in drawn}
    assert len(sizes) > 1


def test_a_concat_has_more_parts_than_the_row_names() -> None:
    (row,) = (found for found in TABLE.patterns if found.name == "concat.chain")
    parts = set()
    for number in range(20):
        instance = draw_instance(seeded(number), row, TABLE)
        cat = instance.graph.op_of(instance.nodes["cat"][0])
        assert cat is not None
        parts.add(len(cat.args))
    assert parts == {1, 2, 3}


def wrong_table() -> Table:
    """A row that can't hold: its two conditions speak against each other."""
    node = Node(op=("nn.relu",), inputs=("x",))
    where = (Predicate(tensor="x", rank=4), Predicate(tensor="x", rank=3))
    return Table(name="mine", patterns=(Row(name="dead", nodes={"r": node}, where=where),))


def test_a_row_without_instances_is_reported() -> None:
    report = check_table(wrong_table(), examples=4)
    assert not report.ok
    assert "NO INSTANCE: row dead: no graph fills it" in render(report)
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["impossible"]


MINE = """\
schema_version: 1
name: mine
patterns:
  - name: scaled
    nodes:
      mul: {op: multiply, in: [x, s]}
      act: {op: [nn.relu, sigmoid], in: mul, optional: true}
    where:
      - {tensor: s, broadcast: channel}
      - {tensor: x, rank: 4}
    scopes: {x: texture}
"""


def test_the_plugin_reports_each_row(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(
        [sys.executable, "-c", PLUGIN, "--fusion-table", "mine.yaml", "--fusion-examples", "6", "-q"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "scaled" in found.stdout
    assert "near misses declined" in found.stdout


def test_check_without_pytest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    assert cli.main(["check", str(tmp_path / "mine.yaml"), "--examples", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [row["row"] for row in report["rows"]] == ["scaled"]


PLUGIN = """
import sys
import pytest
from importlib.metadata import entry_points
known = any(p.value == "fusion_patterns.testing.plugin" for p in entry_points(group="pytest11"))
sys.exit(pytest.main([*([] if known else ["-p", "fusion_patterns.testing.plugin"]), *sys.argv[1:]]))
"""


def test_a_plan_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    code = (
        "from fusion_patterns.match import plan_fusion; from fusion_patterns.table import load_table\n"
        "from fusion_patterns.testing.nets import draw_net; from fusion_patterns.testing.draft import seeded\n"
        "from fusion_patterns.testing import build\n"
        "t = load_table()\n"
        "print([plan_fusion(build(draw_net(seeded(n), t)), t).to_json() for n in range(6)])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_fuzzing_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "fuzz.jsonl"
    arguments = ["--modules", "4", "--workers", "1", "--journal", str(journal)]
    assert fuzz(arguments) == 0
    whole = journal.read_text()
    lines = whole.splitlines(keepends=True)
    journal.write_text("".join(lines[:3]) + lines[3][:10])  # cut off in the middle of a line
    assert fuzz(arguments) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.rindex("{") :])["modules"] == 4
    with pytest.raises(SystemExit, match="belongs to another run"):
        fuzz([*arguments, "--seed", "1"])


def test_what_is_wrong_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, **named: object) -> None:
        raise properties.PropertyError("so it is")

    monkeypatch.setattr(properties, "has_no_leak", broken)
    result = one(Plan(shrink=False), 1)
    assert summary([result])["wrong"] == 1
    assert result.wrong[0]["error"] == "PropertyError: so it is"
