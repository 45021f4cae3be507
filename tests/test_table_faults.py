"""Every fault of a table that is found at load: the sentence, the line and the column."""

from __future__ import annotations

import pathlib

import pytest

from fusion_patterns.errors import TableError
from fusion_patterns.table import load_table


def row(extra: str) -> str:
    """A table with one valid row, and one more field of that row in line 7."""
    return f"""\
name: t
patterns:
  - name: r
    nodes:
      conv: {{op: nn.conv2d, in: [data, weight]}}
      tail: {{op: $act, repeat: 4}}
    {extra}
sets: {{act: [nn.relu, add]}}
"""


def nodes(text: str) -> str:
    """A table with one row of these nodes, the first of them in line 5."""
    lines = "".join(f"      {line}\n" for line in text.split("\n"))
    return f"name: t\npatterns:\n  - name: r\n    nodes:\n{lines}"


FAULTS = [
    # form
    pytest.param(
        "name: t\npatterns: [\n",
        "3:1: not valid YAML: expected the node content, but found '<stream end>' while parsing a flow node",
        id="syntax",
    ),
    pytest.param(
        "name: t\nname: u\n",
        "2:1: the key 'name' is there twice (first in line 1); keep one",
        id="duplicate key",
    ),
    pytest.param(
        "# nothing\n",
        "1:1: the file is empty; a table needs at least `name:` and `patterns:`",
        id="empty",
    ),
    pytest.param(
        "- a\n- b\n",
        "1:1: a table is a mapping with `name:` and `patterns:`; found a list",
        id="root",
    ),
    pytest.param(
        "name: !!python/name:os.system x\n",
        "1:7: the tag tag:yaml.org,2002:python/name:os.system is not allowed; a table is plain data",
        id="tag",
    ),
    pytest.param(
        "name: t\n---\nname: u\n",
        "2:1: a second document starts; a table is one document",
        id="two documents",
    ),
    pytest.param(
        "name: t\nsets: {a: &a [*a]}\n",
        "2:15: the alias *a stands inside its own anchor",
        id="recursive alias",
    ),
    pytest.param(
        "name: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\n",
        "1:39: nested more than 32 deep",
        id="deep",
    ),
    pytest.param(
        "name: t\nsets: {1: [add]}\n",
        "2:8: a key must be text, not '1'; put it in quotes",
        id="number key",
    ),
    # models
    pytest.param(
        "patterns: []\n",
        "1:1: `name` is missing; add it",
        id="missing",
    ),
    pytest.param(
        "schema_version: 2\nname: t\n",
        "1:17: schema_version 2 is not known; this release reads version 1",
        id="version",
    ),
    pytest.param(
        "name: t\npattern: []\n",
        "2:1: unknown field 'pattern'; did you mean 'patterns'?",
        id="unknown field",
    ),
    pytest.param(
        row("scope: {data: texture}"),
        "7:5: row 'r': unknown field 'scope'; did you mean 'scopes'?",
        id="unknown field in row",
    ),
    pytest.param(
        nodes("a: {op: add, optinal: true}"),
        "5:20: row 'r', node 'a': unknown field 'optinal'; did you mean 'optional'?",
        id="unknown field in node",
    ),
    pytest.param(
        row("where: [{node: conv, atr: groups, equals: 1}]"),
        "7:26: row 'r', condition 1: unknown field 'atr'; did you mean 'attr'?",
        id="unknown field in predicate",
    ),
    pytest.param(
        nodes("a: {op: add, inputs: [x]}"),
        "5:20: row 'r', node 'a': unknown field 'inputs'; known here: op, in, optional, repeat",
        id="inputs",
    ),
    pytest.param(
        row("origin: {file: x}"),
        "7:5: row 'r': unknown field 'origin'; known here: name, because, nodes, anchor, output, "
        "where, leaves, scopes, kernel, priority",
        id="origin",
    ),
    pytest.param(
        "name: t\npatterns:\n  - name: 1 x\n    nodes: {a: {op: add}}\n",
        "3:11: row '1 x': `name` is '1 x'; a row's name has letters, digits, `_`, `.` and `-`, and "
        "starts with a letter",
        id="row name",
    ),
    pytest.param(
        "name: t\npatterns:\n  - {name: r, nodes: {}}\n",
        "3:22: row 'r': `nodes`: expected a mapping with at least one node; found an empty mapping",
        id="no nodes",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: add, repeat: 65}"),
        "6:28: row 'r', node 'b': `repeat`: expected a number from 1 to 64, or {min: 0, max: 16}; found 65",
        id="repeat",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: add, repeat: {min: 3, max: 2}}"),
        "6:28: row 'r', node 'b': `repeat`: min 3 is more than max 2; exchange them",
        id="repeat order",
    ),
    pytest.param(
        row("scopes: {data: image}"),
        "7:20: row 'r': `data`: expected 'texture', 'global' or 'any'; found 'image'",
        id="scope",
    ),
    pytest.param(
        row("scopes: [data]"),
        "7:13: row 'r': `scopes`: expected a mapping of a tensor's name to texture, global or any; "
        "found a list",
        id="scopes list",
    ),
    pytest.param(
        row("priority: high"),
        "7:15: row 'r': `priority`: expected a valid integer, unable to parse string as an integer; "
        "found 'high'",
        id="priority",
    ),
    pytest.param(
        row("where: [{tensor: data, broadcast: chanel}]"),
        "7:39: row 'r', condition 1: `broadcast`: expected scalar, channel, same, other or a list of "
        "these; found 'chanel'",
        id="broadcast",
    ),
    pytest.param(
        row("where: [{node: conv, attr: groups, in: 3}]"),
        "7:44: row 'r', condition 1: `in`: expected a list of values; found 3",
        id="among",
    ),
    pytest.param(
        row("where: [{node: conv, attr: groups, between: [1]}]"),
        "7:49: row 'r', condition 1: `between`: expected two numbers, [least, largest]; found a list",
        id="between",
    ),
    pytest.param(
        row("where: [{node: conv, attr: groups, equals: {a: 1}}]"),
        "7:48: row 'r', condition 1: `equals`: expected a number, a text, true, false or a list of "
        "these; found a mapping",
        id="equals",
    ),
    pytest.param(
        "name: t\npatterns: {r: {}}\n",
        "2:11: `patterns`: expected a list of rows; found a mapping",
        id="patterns mapping",
    ),
    pytest.param(
        "name: t\npatterns: [conv]\n",
        "2:12: row 1: `patterns`: expected a mapping; found 'conv'",
        id="row text",
    ),
    # names
    pytest.param(
        nodes("a: {op: nn.rleu}"),
        "5:15: row 'r', node 'a': unknown operator 'nn.rleu'; did you mean 'nn.relu'?",
        id="op",
    ),
    pytest.param(
        nodes("a: {op: relax.add}"),
        "5:15: row 'r', node 'a': unknown operator 'relax.add'; write it without 'relax.'",
        id="relax op",
    ),
    pytest.param(
        "name: t\nsets: {act: [nn.relu]}\npatterns:\n  - name: r\n    nodes: {a: {op: act}}\n",
        "5:21: row 'r', node 'a': 'act' is no operator; write '$act' for the set or fragment",
        id="set without dollar",
    ),
    pytest.param(
        "name: t\n"
        "sets: {activation: [nn.relu]}\n"
        "patterns:\n"
        "  - name: r\n"
        "    nodes: {a: {op: $activations}}\n",
        "5:21: row 'r', node 'a': unknown set or fragment '$activations'; did you mean '$activation'?",
        id="set",
    ),
    pytest.param(
        "name: t\nsets: {a: []}\n",
        "2:11: set 'a' is empty, so what uses it could never match; add operators or remove it",
        id="empty set",
    ),
    pytest.param(
        "name: t\nsets:\n  a: [$b]\n  b: [add, $a]\n",
        "3:3: set 'a' contains itself: $a -> $b -> $a",
        id="recursive set",
    ),
    pytest.param(
        "name: t\nfragments:\n  f: {nodes: {a: {op: $f, in: x}}}\n",
        "3:3: fragment 'f' contains itself: $f -> $f",
        id="recursive fragment",
    ),
    pytest.param(
        "name: t\nsets: {f: [add]}\nfragments: {f: {nodes: {a: {op: add, in: x}}}}\n",
        "3:13: fragment 'f': a set has the same name; rename one",
        id="same name",
    ),
    pytest.param(
        "name: t\nsets: {a-b: [add]}\n",
        "2:8: set 'a-b': a name has letters, digits and `_`",
        id="set name",
    ),
    # shape
    pytest.param(
        "name: t\npatterns:\n  - {name: r, nodes: {a: {op: add}}}\n  - {name: r, nodes: {a: {op: abs}}}\n",
        "3:12: row 'r' is there twice; rename or remove one",
        id="row twice",
    ),
    pytest.param(
        nodes("a: {op: add, in: [b, x]}\nb: {op: add, in: [a, y]}"),
        "5:25: row 'r', node 'a': `in` names 'b', a later node; put that node before this one",
        id="later node",
    ),
    pytest.param(
        nodes("a: {op: add, in: [a, y]}"),
        "5:25: row 'r', node 'a': `in` names 'a', the node itself",
        id="itself",
    ),
    pytest.param(
        nodes("a: {op: nn.relu, in: [x, y]}"),
        "5:28: row 'r', node 'a': 'nn.relu' has 1 operand, but `in` names 2",
        id="arity",
    ),
    pytest.param(
        "name: t\n"
        "fragments: {f: {nodes: {a: {op: abs, in: x}}}}\n"
        "patterns:\n"
        "  - name: r\n"
        "    nodes: {a: {op: $f, in: [x, y]}}\n",
        "5:29: row 'r', node 'a': a fragment has 1 operand, but `in` names 2",
        id="arity fragment",
    ),
    pytest.param(
        nodes("a: {op: add, in: []}"),
        "5:24: row 'r', node 'a': `in` is empty; name the operands, or leave `in` out to follow the "
        "node before",
        id="empty in",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: add, in: [a, y], repeat: 3}"),
        "6:24: row 'r', node 'b': a repeated node names one value in `in`: the one its first "
        "occurrence takes; each occurrence has further operands of its own, so leave them out",
        id="repeat in",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: add, optional: true, repeat: 3}"),
        "6:30: row 'r', node 'b': a node is optional or repeated, not both; write `repeat` with min: 0",
        id="optional repeat",
    ),
    pytest.param(
        nodes("a: {op: add, optional: true}"),
        "3:5: row 'r': a match starts at a node that is there exactly once, and 'a' is optional; "
        "name another one in `anchor`",
        id="nothing",
    ),
    pytest.param(
        nodes("a-b: {op: add}"),
        "5:7: row 'r', node 'a-b': 'a-b' is no name: letters, digits and `_`; rename the node",
        id="node name",
    ),
    pytest.param(
        nodes("output: {op: add}"),
        "5:7: row 'r', node 'output': 'output' stands for something else; rename the node",
        id="reserved",
    ),
    pytest.param(
        nodes("a: {op: add, in: [others, x]}"),
        "4:5: row 'r': the tensor name 'others' stands for something else; rename it",
        id="reserved tensor",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: nn.conv2d, in: [x, y]}"),
        "5:7: row 'r', node 'a': no later node takes the value of 'a'; use it, remove it, or list it "
        "in `leaves`",
        id="unused",
    ),
    pytest.param(
        nodes("a: {op: add}\nb: {op: nn.conv2d, in: [x, y]}") + "    leaves: a\n",
        "5:7: row 'r': no value connects 'a' with 'b', so this can't be one composite",
        id="apart",
    ),
    pytest.param(
        row("anchor: con"),
        "7:13: row 'r': `anchor` names 'con', which is no node of the row; did you mean 'conv'?",
        id="anchor",
    ),
    pytest.param(
        row("anchor: tail"),
        "7:13: row 'r': a match starts at a node that is there exactly once, and 'tail' is repeated; "
        "name another one in `anchor`",
        id="anchor repeated",
    ),
    pytest.param(
        row("output: con"),
        "7:13: row 'r': `output` names 'con', which is no node of the row; did you mean 'conv'?",
        id="output",
    ),
    pytest.param(
        row("leaves: [weight]"),
        "7:14: row 'r': `leaves` names 'weight', which is no node of the row",
        id="leaves",
    ),
    pytest.param(
        row("leaves: [tail]"),
        "7:13: row 'r': 'tail' is the output and leaves anyway; drop it from `leaves`",
        id="leaves output",
    ),
    pytest.param(
        "name: t\nfragments:\n  f: {nodes: {a: {op: add, in: [x, other]}}}\n",
        "3:36: fragment 'f', node 'a': 'other' is neither the fragment's input 'x' nor an earlier "
        "node; leave out operands from elsewhere",
        id="fragment operand",
    ),
    pytest.param(
        "name: t\nfragments:\n  f: {in: v, nodes: {v: {op: abs, in: v}}}\n",
        "3:11: fragment 'f': the input 'v' is also a node; rename one\n"
        "3:39: fragment 'f', node 'v': `in` names 'v', the node itself",
        id="fragment input",
    ),
    pytest.param(
        "name: t\nfragments:\n  f: {nodes: {a: {op: abs, in: x}, b: {op: abs, in: x}}}\n",
        "3:15: fragment 'f', node 'a': no later node takes the value of 'a'; use it, remove it, or "
        "list it in `leaves`",
        id="fragment unused",
    ),
    pytest.param(
        "name: t\n"
        "fragments:\n"
        "  f: {nodes: {a: {op: abs, in: x}, b: {op: abs, repeat: 64}}}\n"
        "patterns:\n"
        "  - name: r\n"
        "    nodes: {a: {op: abs}, b: {op: $f, repeat: 64}}\n",
        "6:5: row 'r': one match may cover 4161 operators, and 1000 is the most; repeat less",
        id="size",
    ),
    pytest.param(
        row("scopes: {dta: texture}"),
        "7:14: row 'r', scopes: the row has no tensor 'dta'; did you mean 'data'?",
        id="scopes",
    ),
    pytest.param(
        row("scopes: {conv: texture}"),
        "7:14: row 'r', scopes: 'conv' is a node, and inner values live in no scope; write 'output' "
        "for the result",
        id="scopes node",
    ),
    # conditions
    pytest.param(
        row("where: [{attr: groups, equals: 1}]"),
        "7:13: row 'r', condition 1: exactly one of `node`, `tensor` and `that` says what it is on; "
        "found none",
        id="no subject",
    ),
    pytest.param(
        row("where: [{node: conv, tensor: data, rank: 4}]"),
        "7:13: row 'r', condition 1: exactly one of `node`, `tensor` and `that` says what it is on; "
        "found `node` and `tensor`",
        id="two subjects",
    ),
    pytest.param(
        row("where: [{tensor: data}]"),
        "7:13: row 'r', condition 1: it asks for nothing; add one of dtype, rank, constant, static, "
        "broadcast, layout, uses, dim",
        id="no condition",
    ),
    pytest.param(
        row("where: [{node: cnv, attr: groups, equals: 1}]"),
        "7:20: row 'r', condition 1: the row has no node 'cnv'; did you mean 'conv'?",
        id="unknown node",
    ),
    pytest.param(
        row("where: [{node: data, uses: 1}]"),
        "7:20: row 'r', condition 1: 'data' is a tensor; write `tensor: data`",
        id="node is tensor",
    ),
    pytest.param(
        row("where: [{tensor: dat, rank: 4}]"),
        "7:22: row 'r', condition 1: the row has no tensor 'dat'; did you mean 'data'?",
        id="unknown tensor",
    ),
    pytest.param(
        row("where: [{tensor: conv, rank: 4}]"),
        "7:22: row 'r', condition 1: 'conv' is a node; write `node: conv`, or `tensor: output` for "
        "the value that leaves",
        id="tensor is node",
    ),
    pytest.param(
        row("where: [{node: conv, rank: 4}]"),
        "7:26: row 'r', condition 1: `rank` is asked of a tensor, not of a node; here can stand attr, uses",
        id="of the other",
    ),
    pytest.param(
        row("where: [{node: conv, attr: group, equals: 1}]"),
        "7:32: row 'r', condition 1: no operator of this node has an attribute 'group'; did you mean "
        "'groups'?",
        id="attr",
    ),
    pytest.param(
        row("where: [{node: tail, attr: axis, equals: 1}]"),
        "7:32: row 'r', condition 1: no operator of this node has an attribute 'axis'",
        id="attr none",
    ),
    pytest.param(
        row("where: [{node: conv, attr: groups}]"),
        "7:26: row 'r', condition 1: `attr` needs exactly one of `equals`, `in`, `multiple_of`, "
        "`between`; found none",
        id="no comparison",
    ),
    pytest.param(
        row("where: [{node: conv, attr: groups, equals: 1, in: [1]}]"),
        "7:26: row 'r', condition 1: `attr` needs exactly one of `equals`, `in`, `multiple_of`, "
        "`between`; found `equals` and `in`",
        id="two comparisons",
    ),
    pytest.param(
        row("where: [{tensor: data, equals: 1}]"),
        "7:28: row 'r', condition 1: `equals` compares nothing; add `dim`",
        id="comparison of nothing",
    ),
    pytest.param(
        row("where: [{tensor: data, dim: C, between: [4, 1]}]"),
        "7:45: row 'r', condition 1: nothing lies between 4 and 1; exchange them",
        id="between order",
    ),
    pytest.param(
        row("where: [{tensor: data, dim: channels, equals: 1}]"),
        "7:33: row 'r', condition 1: the dimension 'channels' is neither one capital letter of a "
        "layout nor a number from 0",
        id="dim",
    ),
    pytest.param(
        row("where: [{tensor: data, dtype: float}]"),
        "7:35: row 'r', condition 1: unknown element type 'float'; did you mean 'float64'?",
        id="dtype",
    ),
    pytest.param(
        row("where: [{tensor: data, dtype: []}]"),
        "7:28: row 'r', condition 1: `dtype` lists nothing, so it could never hold",
        id="empty list",
    ),
    pytest.param(
        row("where: [{that: data.C == 1, equals: 1}]"),
        "7:33: row 'r', condition 1: `that` stands alone; move `equals` to another condition",
        id="that alone",
    ),
    pytest.param(
        row("where: [{that: conv.groups == }]"),
        "7:34: row 'r', condition 1: can't read the condition from here; write it like `conv.groups "
        "== data.C and weight.I == 1`",
        id="that syntax",
    ),
    pytest.param(
        row("where: [{that: 'conv.groups = 1'}]"),
        "7:33: row 'r', condition 1: can't read the condition from here; write it like `conv.groups "
        "== data.C and weight.I == 1`",
        id="that quoted",
    ),
    pytest.param(
        row("where: [{that: conv.groups == dta.C}]"),
        "7:35: row 'r', condition 1: the row has no node or tensor 'dta'; did you mean 'data'?",
        id="that subject",
    ),
    pytest.param(
        row("where: [{that: conv.group == data.C}]"),
        "7:20: row 'r', condition 1: no operator of this node has an attribute 'group'; did you mean "
        "'groups'?",
        id="that field",
    ),
    pytest.param(
        row("where: [{that: data.groups == 1}]"),
        "7:20: row 'r', condition 1: 'data.groups' is not known: a tensor has `shape`, `uses` and "
        "dimensions such as `data.C`",
        id="that tensor field",
    ),
    pytest.param(
        row("where: [{that: 'data.C[0] == 1'}]"),
        "7:21: row 'r', condition 1: 'data.C' is one number and has no index",
        id="that index",
    ),
    pytest.param(
        row("where: [{that: len(data.C) == 1}]"),
        "7:20: row 'r', condition 1: only numbers, `name.field`, `name.field[0]` and + - * // % can "
        "stand here",
        id="that call",
    ),
    # the table
    pytest.param(
        row("priority: 1") + "disable: [s*]\n",
        "9:11: `disable`: no row is named 's*'",
        id="disable",
    ),
    pytest.param(
        "name: t\npatterns:\n  - {name: conv.chain, nodes: {a: {op: add}}}\ndisable: conv.chan\n",
        "4:10: `disable`: no row is named 'conv.chan'; did you mean 'conv.chain'?",
        id="disable near",
    ),
    pytest.param(
        "name: t\nextends: adrno\n",
        "2:10: `extends`: no built-in table 'adrno', and no such file; did you mean 'adreno'?",
        id="extends",
    ),
    pytest.param(
        "name: t\nextends: other.yaml\n",
        "2:10: `extends`: other.yaml: there is no such file",
        id="extends file",
    ),
    pytest.param(
        "name: t\nextends: t.yaml\n",
        "2:10: `extends`: the tables extend each other in a circle: t.yaml -> t.yaml",
        id="extends itself",
    ),
]


@pytest.mark.parametrize(("text", "message"), FAULTS)
def test_fault(text: str, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("t.yaml").write_text(text)
    with pytest.raises(TableError) as caught:
        load_table("t.yaml")
    assert str(caught.value) == "\n".join(f"t.yaml:{line}" for line in message.split("\n"))


def test_the_valid_row_of_these_tests_loads(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(row("priority: 1"))
    assert [found.priority for found in load_table(file).patterns] == [1]


def test_all_faults_are_told_in_order(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faulty = row("where: [{node: cnv, uses: 1}, {tensor: data, dtype: flot32}]").replace("nn.relu", "nn.rleu")
    pathlib.Path("t.yaml").write_text(faulty)
    with pytest.raises(TableError) as caught:
        load_table("t.yaml")
    assert str(caught.value).split("\n") == [
        "t.yaml:7:20: row 'r', condition 1: the row has no node 'cnv'; did you mean 'conv'?",
        "t.yaml:7:57: row 'r', condition 2: unknown element type 'flot32'; did you mean 'float32'?",
        "t.yaml:8:14: set 'act': unknown operator 'nn.rleu'; did you mean 'nn.relu'?",
    ]


def test_many_faults_are_counted_not_listed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("name: t\n" + "".join(f"k{number}: 1\n" for number in range(90)))
    with pytest.raises(TableError) as caught:
        load_table(file)
    lines = str(caught.value).split("\n")
    assert len(lines) == 51
    assert lines[-1] == f"{file}: and 40 faults more"
