"""A manifest as data: expressions, inputs, image sizes, the check, and the saved folder. No device."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_patterns.errors import ManifestError
from fusion_patterns.run import (
    Alloc,
    Bind,
    Call,
    Copy,
    Function,
    If,
    InputError,
    Kernel,
    Launch,
    Manifest,
    Param,
    Scalar,
    Shape,
    Tensor,
    View,
    check,
    load,
    save,
    store,
)
from fusion_patterns.run.check import MAX_NESTING
from fusion_patterns.run.interpret import check_inputs, evaluate, image_extent

F = Tensor(("n", 4), "float32")
IMAGE = replace(F, scope="global.texture")
FLAG = Tensor((), "bool")


def everything() -> Manifest:
    """A manifest with every kind of step."""
    main = Function(
        "main",
        (Param("data/0", F), Param("pair", (F, (FLAG,)))),
        (
            Alloc("a", F),
            Launch("k", ("a", "data/0", Scalar("n * 4", "int64"), Scalar(float("-inf"), "float32")),
                   ("(n + 3) // 4", 1, 1), (4, 1, 1), "row"),
            View("v", "a", Tensor(("n * 4",), "float32")),
            Copy("i", "a", IMAGE),
            If("pair#1#0", (Copy("t", "i", F),), (), "if", ("t",), ("pair#0",)),
            Call("twice", ("if#0",), "c"),
            Bind("b", ("c", (), None)),
            Shape("s", ("n", 4)),
        ),
        ("b", ("v", "s"), "w", "half"),
    )  # fmt: skip
    twice = Function("twice", (Param("x", F),), (), "x")
    return Manifest(
        "net",
        "opencl",
        {"main": main, "twice": twice},
        {
            "k": Kernel(
                "k", "__kernel void k() {} // µ\n", ("buffer", "buffer", "scalar:int64", "scalar:float32")
            )
        },
        {
            "w": np.arange(8, dtype="float32").reshape(2, 4),
            "half": np.array([[np.nan, 1]], "float16"),
            "z": np.array(3),
        },
        {"w": Tensor((2, 4), "float32", "global.texture-weight")},
        {"convs": {"total": 3}, "rate": 0.5},
    )


# --- expressions, inputs, images ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("n", 7), ("-n // 2", -4), ("(n + 3) % 4", 2), ("min(n, 4) * max(1, m, 2)", 12), (" 5 ", 5)],
)
def test_expressions(text: str, value: int) -> None:
    assert evaluate(text, {"n": 7, "m": 3}) == value


@pytest.mark.parametrize(
    "text",
    ["n / 2", "n ** 9", "f(n)", "n.real", "'a'", "1.5", "True", "", "n +", "min(n)", "[n]", "n if n else 1",
     "-" * 900 + "1", "(" * 300 + "1" + ")" * 300, "1+" * 1000 + "1", "k",
     "n // 0", "9999999999 * 99999999999"],
)  # fmt: skip
def test_refused_expressions(text: str) -> None:
    with pytest.raises(ManifestError, match="expression"):
        evaluate(text, {"n": 7})


TWO = Function(
    "main", (Param("x", Tensor(("n", "n * 2"), "float32")), Param("y", Tensor(("n",), "int8"))), (), "x"
)


def test_symbols_come_from_the_inputs() -> None:
    x, y = np.zeros((3, 6), np.float32), np.zeros(3, np.int8)
    for inputs in ([x, y], {"y": y, "x": x}):
        arrays, symbols = check_inputs(TWO, inputs)
        assert symbols == {"n": 3}
        assert list(arrays) == ["x", "y"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 7), np.float32), np.zeros(3, np.int8), r"x, dimension 1: expected 6 \(n \* 2\), got 7"),
        (np.zeros((3, 6), np.float32), np.zeros(4, np.int8), r"y, dimension 0: expected 3 \(n\), got 4"),
        (
            np.zeros((3, 6, 1), np.float32),
            np.zeros(3, np.int8),
            r"x: expected 2 dimensions \(n, n \* 2\), got 3",
        ),
        (np.zeros((3, 6), np.float64), np.zeros(3, np.int8), "x: expected float32, got float64"),
        ([[1.0]], np.zeros(3, np.int8), "x: expected a NumPy array, got list"),
    ],
)
def test_unfit_inputs_are_named(x: object, y: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_inputs(TWO, [x, y])


def test_inputs_must_be_all_and_only_the_parameters() -> None:
    x, y = np.zeros((3, 6), np.float32), np.zeros(3, np.int8)
    with pytest.raises(InputError, match="expected 2 inputs, got 1"):
        check_inputs(TWO, [x])
    with pytest.raises(InputError, match="no input for parameter y"):
        check_inputs(TWO, {"x": x})
    with pytest.raises(InputError, match="unknown input z; the parameters are: x, y"):
        check_inputs(TWO, {"x": x, "y": y, "z": y})


def test_tuple_inputs_nest_or_are_flat_names() -> None:
    function = everything().functions["main"]
    x, flag = np.zeros((2, 4), np.float32), np.array(True)
    nested, _ = check_inputs(function, [x, (x, (flag,))])
    flat, _ = check_inputs(function, {"data/0": x, "pair#0": x, "pair#1#0": flag})
    assert list(nested) == list(flat) == ["data/0", "pair#0", "pair#1#0"]
    with pytest.raises(InputError, match="pair: expected a tuple of 2"):
        check_inputs(function, [x, (x,)])


@pytest.mark.parametrize(
    ("shape", "scope", "extent"),
    [
        ((2, 3, 5, 7, 4), "global.texture", (7, 5, 6)),
        ((2, 3, 5, 7, 4), "global.texture-nhwc", (35, 3, 2)),
        ((2, 3, 5, 7, 4), "global.texture-weight", (105, 2, 1)),
        ((6, 7, 4), "global.texture", (7, 6, 1)),
        ((7, 4), "global.texture", (1, 1, 7)),
        ((7, 4), "global.texture-weight", (1, 7, 1)),
        ((0, 3, 4), "global.texture", (3, 1, 1)),
    ],
)
def test_image_extent(shape: tuple[int, ...], scope: str, extent: tuple[int, int, int]) -> None:
    assert image_extent(shape, scope) == extent


@pytest.mark.parametrize(
    ("shape", "scope"), [((4,), "texture"), ((2, 4), "texture-nhwc"), ((2, 3), "texture")]
)
def test_no_image_for_this_shape(shape: tuple[int, ...], scope: str) -> None:
    with pytest.raises(ManifestError, match="axes must be 4"):
        image_extent(shape, f"global.{scope}")


# --- the check ---------------------------------------------------------------------------------------------


def small(*body: object, result: object = (), params: tuple[Param, ...] = (Param("x", F),)) -> Manifest:
    kernel = Kernel("k", "", ("buffer", "image_read", "scalar:int32"))
    return Manifest("m", "opencl", {"main": Function("main", params, body, result)}, {"k": kernel})  # type: ignore[arg-type]


def launch(*args: object, kernel: str = "k", n: str = "n") -> Launch:
    return Launch(kernel, args, (n, 1, 1), (1, 1, 1))  # type: ignore[arg-type]


def nested_ifs(depth: int) -> If:
    step = If("c", (), (), "v", "x", "x")
    for _ in range(depth):
        step = If("c", (step,), (), "v", "x", "x")
    return step


FAULTS = {
    "undefined value 'y'": small(result="y"),
    "step 0 .launch. of 'q': no such kernel": small(launch("x", kernel="q")),
    "the kernel takes 3 arguments, got 1": small(launch("x")),
    "argument 1 must be image_read, got buffer": small(launch("x", "x", Scalar(1, "int32"))),
    "argument 2 must be scalar:int32, got scalar:int64": small(
        Copy("i", "x", IMAGE), launch("x", "i", Scalar(1, "int64"))
    ),
    "binds the symbol 'q'": small(Copy("i", "x", IMAGE), launch("x", "i", Scalar(1, "int32"), n="q")),
    "'x' is already defined": small(Alloc("x", F)),
    "'y#z' is not a valid name": small(Alloc("y#z", F)),
    "unknown dtype 'float8'": small(Alloc("y", Tensor((1,), "float8"))),
    "unknown scope 'local'": small(Alloc("y", Tensor((1,), "int8", "local"))),
    "int8 can't be global.texture": small(Alloc("y", Tensor((1, 4), "int8", "global.texture"))),
    "the last of at least 2 axes must be 4": small(Alloc("y", Tensor((1, 3), "float32", "global.texture"))),
    "negative extent": small(Alloc("y", Tensor((-1,), "int8"))),
    "a texture has no other view": small(Copy("i", "x", IMAGE), View("v", "i", F)),
    "'x' is float32, the copy is float16": small(Copy("i", "x", replace(F, dtype="float16"))),
    "'x#0' is no item of a tuple": small(result="x#0"),
    "'t' must be a tensor": small(Bind("t", ("x",)), View("v", "t", F)),
    "'s' must be a tensor": small(Shape("s", (1,)), View("v", "s", F)),
    "the condition 'x' must be bool": small(If("x", (), (), "v", None, None)),
    "the branches give": small(If("c", (), (), "v", "x", "c"), params=(Param("x", F), Param("c", FLAG))),
    "undefined value 'inner'": small(
        If("c", (Alloc("inner", F),), (), "v", "inner", "x"),
        result="inner",
        params=(Param("x", F), Param("c", FLAG)),
    ),
    "no function 'other'": small(Call("other", (), "y")),
    "in a circle: main > main": small(Call("main", ("x",), "y")),
    "branches nested deeper than 32": small(nested_ifs(40), params=(Param("x", F), Param("c", FLAG))),
    "must be a C identifier": replace(small(), kernels={"../k": Kernel("../k", "", ())}),
    "unknown kind 'pointer'": replace(small(), kernels={"k": Kernel("k", "", ("pointer",))}),
    "calls itself 'main'": replace(small(), functions={"other": small().functions["main"]}),
    "'w' is not among the constants": replace(small(), constant_tensors={"w": F}),
    "constant 'w': the array is": replace(
        small(), constants={"w": np.zeros(3, "float32")}, constant_tensors={"w": Tensor((4,), "float32")}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_the_check_says_where_and_what(message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        check(FAULTS[message])
    assert "\n" not in str(caught.value)


def test_a_whole_manifest_passes() -> None:
    check(everything())


def test_constants_of_foreign_types_are_refused() -> None:
    with pytest.raises(ManifestError, match="constant w: dtype complex128 is not supported"):
        replace(small(), constants={"w": np.zeros(1, complex)})


# --- the folder --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(everything(), tmp_path / "net")
    return tmp_path / "net"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_save_and_load_give_the_same_manifest_and_bytes(saved: Path, tmp_path: Path) -> None:
    loaded = load(saved)
    assert loaded == everything()
    assert loaded != replace(everything(), constants={"w": np.zeros((2, 4), "float32")})
    save(loaded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(saved)
    assert sorted(contents(saved)) == ["kernels/k.cl", "manifest.json", "weights.npz"]
    with np.load(saved / "weights.npz") as weights:
        assert np.array_equal(weights["w"], everything().constants["w"])


def test_what_the_check_allows_to_nest_can_be_read_back(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(MAX_NESTING):
        deep = (deep,)
    step = If("c", (), (), "v", deep, deep)
    for _ in range(MAX_NESTING - 1):
        step = If("c", (step,), (), "v", "x", "x")
    manifest = small(step, Bind("t", deep), result="t", params=(Param("x", F), Param("c", FLAG)))
    save(manifest, tmp_path / "net")
    assert load(tmp_path / "net") == manifest


def test_bfloat16_travels_as_bits(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    manifest = replace(small(), constants={"w": np.array([1, -2], bfloat16)}, constant_tensors={})
    assert manifest.constant_tensors["w"] == Tensor((2,), "bfloat16")
    save(manifest, tmp_path / "net")
    loaded = load(tmp_path / "net")
    assert loaded == manifest
    assert loaded.constants["w"].tolist() == [0x3F80, 0xC000]


def test_save_replaces_a_saved_module_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    save(small(), saved)
    assert load(saved) == small()
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ManifestError, match=r"notes\.txt is not part of a saved module"):
        save(everything(), saved)
    (tmp_path / "other").mkdir()
    save(small(), tmp_path / "other")  # an empty folder may be used
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("")
    with pytest.raises(ManifestError, match="not a saved module"):
        save(small(), tmp_path / "mine")
    with pytest.raises(ManifestError, match="is a file"):
        save(small(), tmp_path / "mine" / "a")


@pytest.mark.parametrize("when", ["write_bytes", "write_text", "rename"])
def test_an_interrupted_save_leaves_the_old_module(
    saved: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = contents(saved)
    real = getattr(Path, when)
    calls = []

    def interrupted(self: Path, *args: object, **options: object) -> object:
        calls.append(self)
        if when != "rename" or len(calls) == 2:  # the first rename moves the old module aside
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(Path, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(small(), saved)
    monkeypatch.undo()
    assert contents(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["net"]


def test_an_unfit_manifest_is_not_written(tmp_path: Path) -> None:
    odd: list[Any] = [{"a": (1,)}, {"a": float("nan")}, {"a": np.float32(1)}, {1: 2}]
    for meta in odd:
        with pytest.raises(ManifestError, match="only JSON"):
            save(replace(small(), meta=meta), tmp_path / "net")
    with pytest.raises(ManifestError, match="undefined"):
        save(small(result="y"), tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


def edit(folder: Path, *path: str | int, value: object) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    part = document
    for key in path[:-1]:
        part = part[key]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(document))


BODY = ("functions", 0, "body", 0)
DEEP: list[object] = []
for _ in range(200):
    DEEP = [DEEP]
DAMAGE: dict[str, tuple[tuple[str | int, ...], object]] = {
    "format is 'fusion-patterns/9', expected 'fusion-patterns/1'": (("format",), "fusion-patterns/9"),
    "missing field 'target'": (("target",), None),
    "unknown field 'extra'": (("extra",), 1),
    r"functions\[0\].body\[0\]: unknown step 'jump'": ((*BODY, "step"), "jump"),
    r"functions\[0\].body\[0\]: unknown field 'speed'": ((*BODY, "speed"), 1),
    r"functions\[0\].body\[0\].value: expected text, got 7": ((*BODY, "value"), 7),
    r"body\[0\].tensor.shape\[0\]: expected an integer or an expression, got true": (
        (*BODY, "tensor", "shape", 0), True),
    r"body\[1\].grid: expected a list of 3, got \[1\]": (("functions", 0, "body", 1, "grid"), [1]),
    "undefined value 'b9'": (("functions", 0, "result"), "b9"),
    "nested too deep": (("functions", 0, "result"), DEEP),
    "no such kernel": (("functions", 0, "body", 1, "kernel"), "other"),
    "must be a C identifier": (("kernels", "../../k"), []),
    "files: they don't fit the kernels": (("files", "../../secret"), "00"),
    "two have one name": (("functions", 0, "name"), "twice"),
    "dtype": (("constants", "z", "dtype"), "int32"),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_index_is_refused(saved: Path, message: str) -> None:
    path, value = DAMAGE[message]
    edit(saved, *path, value=value)
    with pytest.raises(ManifestError, match=message) as caught:
        load(saved)
    assert str(caught.value).startswith(str(saved / "manifest.json"))
    assert "build it" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_an_unreadable_index_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ManifestError, match=r"manifest\.json: ") as caught:
        load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["kernels/k.cl", "weights.npz"])
def test_missing_and_altered_files_are_refused(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data + b" ")
    with pytest.raises(ManifestError, match=f"{name}: altered since it was saved .*copy the whole folder"):
        load(saved)
    (saved / name).unlink()
    with pytest.raises(ManifestError, match=f"{name}: No such file .*copy the whole folder"):
        load(saved)


def test_weights_that_are_no_arrays_are_refused(saved: Path) -> None:
    import hashlib
    import io

    pickled = io.BytesIO()
    np.savez(pickled, w=np.array([{}], dtype=object))
    for data in (b"PK", pickled.getvalue()):
        (saved / "weights.npz").write_bytes(data)
        edit(saved, "files", "weights.npz", value=hashlib.sha256(data).hexdigest())
        with pytest.raises(ManifestError, match=r"weights\.npz: not a \.npz archive"):
            load(saved)


def test_a_folder_that_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"not found; is .* a folder that was saved as a module"):
        load(tmp_path)


def test_an_old_module_moves_back_if_the_new_one_cannot_take_its_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_write", lambda manifest, folder: None)  # nothing there to rename
    with pytest.raises(FileNotFoundError):
        save(small(), saved)
    assert load(saved) == everything()
    shutil.rmtree(saved)
