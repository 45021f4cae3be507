"""`load_table`: which file it reads, what it refuses to read, `extends` and `disable`, origins."""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusion_patterns.errors import TableError
from fusion_patterns.table import (
    Fragment,
    Node,
    Origin,
    Predicate,
    Row,
    Table,
    builtin_names,
    load_table,
    reading,
)
from fusion_patterns.table.faults import field_names
from fusion_patterns.table.source import parse_yaml

BASE = """\
name: base
target: {kind: opencl, keys: [adreno]}
sets: {act: [nn.relu], binary: [add]}
patterns:
  - name: one
    nodes: {a: {op: $act}}
  - name: two
    nodes: {a: {op: $binary}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    pathlib.Path(name).write_text(text, encoding="utf-8")
    return name


def message(source: object) -> str:
    with pytest.raises(TableError) as caught:
        load_table(source)  # type: ignore[arg-type]
    return str(caught.value)


def faults(source: str) -> list[str]:
    """What is wrong with a table that may also be valid; any other exception is a failure."""
    try:
        load_table(source)
    except TableError as error:
        return str(error).split("\n")
    return []


# Which file


def test_none_is_the_builtin_table() -> None:
    assert load_table() is load_table(None) is load_table("adreno")
    assert load_table().name == "adreno"
    assert "adreno" in builtin_names()


def test_a_builtin_row_is_from_the_patterns_folder() -> None:
    origin = load_table().patterns[0].origin
    assert origin.file == "patterns/adreno.yaml"
    text = pathlib.Path(reading._FOLDER, "adreno.yaml").read_text().split("\n")
    assert text[origin.line - 1] == "  - name: conv2d.chain"


def test_a_path_like_is_always_a_path() -> None:
    pathlib.Path("adreno").write_text("name: mine\n")
    assert load_table(pathlib.Path("adreno")).name == "mine"
    assert load_table("adreno").name == "adreno"


def test_a_bare_name_may_be_a_file() -> None:
    assert load_table(write("mine", "name: mine\n")).name == "mine"


def test_origins_are_as_the_user_wrote_them() -> None:
    pathlib.Path("sub").mkdir()
    text = BASE + "    where:\n      - {node: a, uses: 1}\n"
    table = load_table(write("sub/../sub/t.yaml", text))
    assert str(table.patterns[1].origin) == "sub/../sub/t.yaml:7"
    assert table.patterns[1].where[0].origin == Origin(file="sub/../sub/t.yaml", line=10, column=9)


def test_a_table_built_in_code_is_checked() -> None:
    good = Table(name="t", patterns=(Row.model_validate({"name": "r", "nodes": {"a": {"op": "add"}}}),))
    assert load_table(good) is good
    assert load_table(load_table()) is load_table()
    row = Row.model_validate({"name": "r", "nodes": {"a": {"op": "nn.rleu"}}})
    bad = Table(name="t", patterns=(row,))
    assert message(bad) == "<data>: row 'r', node 'a': unknown operator 'nn.rleu'; did you mean 'nn.relu'?"
    assert message(Table(name="t", extends="adreno")).startswith("<data>: `extends` is for files")
    assert (
        message(Table(name="t", patterns=(*good.patterns, *good.patterns)))
        == "<data>: row 'r' is there twice"
    )


# Files that can't be read


def test_files_that_are_not_there() -> None:
    assert message("no.yaml") == "no.yaml: there is no such file"
    assert message("base.yaml/no.yaml") == "base.yaml/no.yaml: there is no such file"
    assert message("adrno") == "adrno: no built-in table has this name, and no file; did you mean 'adreno'?"
    assert message("zzz").startswith("zzz: no built-in table has this name, and no file; built in: adreno")
    assert message("") == ": no built-in table has this name, and no file; built in: " + ", ".join(
        builtin_names()
    )


def test_sources_of_the_wrong_type() -> None:
    assert message(3) == "<data>: expected a path, the name of a table or a Table; found int"
    assert message(os.fsdecode(b"a\xff") + ".yaml").endswith("there is no such file")
    assert "can't be read" in message("a\0.yaml")


def test_a_directory(folder: pathlib.Path) -> None:
    assert message(folder) == f"{folder}: it is a directory; name a YAML file in it"


def test_a_pipe_is_not_waited_for() -> None:
    os.mkfifo("pipe.yaml")
    assert message("pipe.yaml") == "pipe.yaml: it is no ordinary file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission() -> None:
    pathlib.Path(write("t.yaml", BASE)).chmod(0)
    assert message("t.yaml") == "t.yaml: it can't be opened: permission denied"


def test_a_file_that_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    write("t.yaml", BASE)
    monkeypatch.setattr(pathlib.Path, "open", denied)
    assert message("t.yaml") == "t.yaml: it can't be opened: permission denied"


def test_text_that_is_not_utf8() -> None:
    pathlib.Path("t.yaml").write_bytes(b"name: t\n# caf\xe9\n")
    assert message("t.yaml") == "t.yaml:2:6: the file is not UTF-8 here; save it as UTF-8"


def test_a_byte_order_mark_is_fine() -> None:
    pathlib.Path("t.yaml").write_bytes(b"\xef\xbb\xbfname: t\n")
    assert load_table("t.yaml").name == "t"


# Files that would cost too much


def test_a_huge_file() -> None:
    assert message(write("t.yaml", "#" * 1_000_001)).startswith("t.yaml:1:1: the file has 1000001 bytes")


def test_a_bomb_of_aliases_is_quick() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    start = time.perf_counter()
    assert "more than 100000 values, counting each use of an alias" in message(
        write("t.yaml", "\n".join(lines))
    )
    assert time.perf_counter() - start < 2


def test_a_long_number() -> None:
    assert message(write("t.yaml", "name: " + "9" * 5000)) == "t.yaml:1:7: the number is too long"


def test_an_alias_shares_conditions_between_rows() -> None:
    text = """\
name: t
patterns:
  - name: one
    nodes: {a: {op: nn.conv2d, in: [data, weight]}}
    where: &plain
      - {node: a, attr: groups, equals: 1}
  - name: two
    nodes: {a: {op: nn.conv2d, in: [data, weight]}}
    where: *plain
"""
    one, two = load_table(write("t.yaml", text)).patterns
    assert one.where == two.where
    assert two.where[0].origin.line == 6


YAML_LIKE = st.text(st.sampled_from("ab:,-[]{}#&*!|>'\"%@`\n\t 1.?\\~\x01é"), max_size=40)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(YAML_LIKE)
@example("%YAML 1.1\n---\na: 1")
@example('"\\xzz"')
@example("a: &a {b: *a}")
@example("? {a: b}\n: c")
def test_no_text_gives_another_error(text: str) -> None:
    write("t.yaml", text)
    for line in faults("t.yaml"):
        assert line.startswith("t.yaml:")


MODELS = (Table, Row, Node, Fragment, Predicate)
FIELDS = sorted({name for model in MODELS for name in (*field_names(model), "a", "s", "origin")})
JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.sampled_from(["add", "$s", "a", "nn.conv2d", "output"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON_LIKE, JSON_LIKE, JSON_LIKE)
def test_no_data_gives_another_error(nodes: object, where: object, sets: object) -> None:
    row = {"name": "r", "nodes": nodes, "where": where, "scopes": where}
    write("t.yaml", json.dumps({"name": "t", "sets": sets, "fragments": sets, "patterns": [row, where]}))
    for line in faults("t.yaml"):
        assert line.startswith("t.yaml:")


# Plain values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("yes", "yes"), ("on", "on"), ("No", "No"), ("1:30", "1:30"), ("1_000", "1_000"), ("=", "=")],
        *[("010", 10), ("0o17", 15), ("0x1F", 31), ("-3", -3), ("1e3", 1000.0), (".5", 0.5), ("1.", 1.0)],
        *[("true", True), ("False", False), ("~", None), ("", None), (".inf", float("inf")), ("'1'", "1")],
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}", "t.yaml").value["a"]
    assert found == value
    assert type(found) is type(value)


# extends and disable


def test_extends_puts_the_base_first_and_replaces_in_place() -> None:
    write("base.yaml", BASE)
    own = """\
name: own
extends: base.yaml
sets: {act: [sigmoid]}
patterns:
  - name: three
    nodes: {a: {op: abs}}
  - name: one
    nodes: {a: {op: $act}, b: {op: $binary}}
"""
    table = load_table(write("own.yaml", own))
    assert [(row.name, str(row.origin)) for row in table.patterns] == [
        ("one", "own.yaml:7"),
        ("two", "base.yaml:7"),
        ("three", "own.yaml:5"),
    ]
    assert table.sets == {"act": ("sigmoid",), "binary": ("add",)}
    assert (table.name, table.extends, table.disable) == ("own", None, ())
    assert table.target.keys == ("adreno",)


def test_extends_a_builtin_table() -> None:
    table = load_table(write("own.yaml", "name: own\nextends: adreno\ndisable: conv2d.grouped*\n"))
    base = [row.name for row in load_table().patterns]
    assert [row.name for row in table.patterns] == [
        name for name in base if not name.startswith("conv2d.grouped")
    ]
    assert len(table.patterns) == len(base) - 2


def test_disable_may_name_rows_of_the_same_table() -> None:
    assert [row.name for row in load_table(write("t.yaml", BASE + "disable: [one]\n")).patterns] == ["two"]


def test_a_base_is_beside_the_file_that_extends_it() -> None:
    pathlib.Path("sub").mkdir()
    write("sub/base.yaml", BASE.replace("nn.relu", "nn.rleu"))
    write("sub/own.yaml", "name: own\nextends: base.yaml\n")
    assert message("sub/own.yaml").startswith("sub/base.yaml:3:14: set 'act': unknown operator 'nn.rleu'")


def test_a_set_that_breaks_a_row_of_the_base() -> None:
    write("base.yaml", BASE.replace("a: {op: $act}", "a: {op: $act, in: [x]}, b: {op: $binary, in: [a, y]}"))
    write("own.yaml", "name: own\nextends: base.yaml\nsets: {binary: [nn.relu]}\n")
    assert message("own.yaml") == (
        "own.yaml:2:10: row 'one', node 'b': 'nn.relu' has 1 operand, but `in` names 2"
    )


def test_a_set_that_breaks_a_set_of_the_base() -> None:
    write("base.yaml", "name: base\nsets: {a: [$b], b: [add]}\n")
    write("own.yaml", "name: own\nextends: base.yaml\nsets: {b: [$a]}\n")
    assert message("own.yaml") == "own.yaml:2:10: set 'a' contains itself: $a -> $b -> $a"


def test_circles_of_extends() -> None:
    write("a.yaml", "name: a\nextends: b.yaml\n")
    write("b.yaml", "name: b\nextends: ./a.yaml\n")
    expected = "b.yaml:2:10: `extends`: the tables extend each other in a circle: a.yaml -> b.yaml -> a.yaml"
    assert message("a.yaml") == expected


def test_a_long_chain_of_extends() -> None:
    write("t0.yaml", "name: t\n")
    for number in range(1, 40):
        write(f"t{number}.yaml", f"name: t\nextends: t{number - 1}.yaml\n")
    assert message("t39.yaml").endswith("`extends`: more than 16 tables extend each other")


# The cache


def test_a_table_is_read_again_only_after_a_change() -> None:
    write("base.yaml", BASE)
    write("own.yaml", "name: own\nextends: base.yaml\n")
    first = load_table("own.yaml")
    assert load_table("own.yaml") is first
    write("base.yaml", BASE.replace("two", "second"))
    assert [row.name for row in load_table("own.yaml").patterns] == ["one", "second"]
