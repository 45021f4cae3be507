"""Every tensor's decision, what else was possible at which cost, the readers' wishes, the copies made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import networks
import pytest
import tvm
from modules import array, graph, nn, texture_target, var, weight
from tvm import relax
from tvm.relax import op

from fusion_patterns import cli, explain
from fusion_patterns.errors import BuildError, FusionPatternsError
from fusion_patterns.explanation import Explanation, render_tensor
from fusion_patterns.place import load_profile
from fusion_patterns.place.decision import BY_CUT, INDEPENDENT
from fusion_patterns.place.profiles import shipped_profiles

X, W = (1, 8, 12, 12), (8, 8, 3, 3)


def network() -> tvm.IRModule:
    """conv -> pool -> conv, softmax of the first one's result, and a pool that stands alone between plain
    ops."""

    def build(emit: Any, x: Any) -> list[Any]:
        bias = relax.const(array((1, 8, 1, 1), 1))
        first = emit(nn.relu(emit(op.add(emit(nn.conv2d(x, weight(W), padding=1)), bias))))
        pool = emit(nn.max_pool2d(first, [3, 3], padding=[1, 1]))
        last = emit(nn.conv2d(pool, weight(W, 1), padding=1))
        alone = emit(nn.softmax(emit(nn.max_pool2d(emit(nn.softmax(x, axis=1)), [2, 2])), axis=1))
        return [emit(nn.softmax(first, axis=1)), last, alone]

    return graph(build, [var("x", X)])


@pytest.fixture(scope="module")
def story() -> Explanation:
    return explain(network(), target=texture_target())


def test_a_result_in_texture(story: Explanation) -> None:
    first = story.tensor("lv2")
    assert (first.writer, first.layout, first.scope, first.by) == (
        "fused_conv2d_chain_0",
        "NCHW4c",
        "global.texture",
        INDEPENDENT,
    )
    assert first.bytes == 8 * 12 * 12 * 4
    in_texture, in_buffer = first.alternatives
    assert (in_texture.scope, in_buffer.scope) == ("global.texture", "global")
    assert in_texture.cost is not None
    assert in_buffer.cost is not None
    assert in_texture.cost < in_buffer.cost
    assert first.cost == in_texture.cost
    assert [(w.reader, w.scope, w.times) for w in first.wishes] == [("fused_pool2d_chain_0", "texture", 9.0)]
    assert [(c.kind, str(c.form)) for c in first.conversions] == [("unpack", "plain in global")]


def test_the_cost_is_what_the_profile_says(story: Explanation) -> None:
    """Written once, read by the pool nine times over, unpacked for softmax."""
    first, profile = story.tensor("lv2"), load_profile("adreno")
    size = first.bytes
    read_by_pool = size * (profile.texture.read + 8 * profile.texture.again)
    unpack = size * (profile.texture.read + profile.buffer.write) + profile.launch
    assert first.cost == round(size * profile.texture.write + read_by_pool + unpack)


def test_what_was_decided_by_the_cut_knows_the_other_side(story: Explanation) -> None:
    pool = next(t for t in story.tensors if t.writer == "fused_pool2d_chain_0")
    assert pool.by == BY_CUT
    plain = pool.alternatives[-1]
    assert (plain.layout, plain.scope) == ("plain", "global")
    assert plain.cost is not None
    assert plain.cost > pool.cost
    assert plain.why.endswith(" more for the whole function, by minimum cut")


def test_what_costs_less_in_buffers_is_told_as_well(story: Explanation) -> None:
    (alone,) = story.left
    assert (alone.layout, alone.scope, alone.by) == ("plain", "global", BY_CUT)
    (packed,) = alone.alternatives
    assert packed.layout == "NCHW4c"
    assert packed.cost is not None
    assert str(packed.cost) in alone.reason
    (refusal,) = story.refused
    assert refusal.row == "pool2d.chain"
    assert refusal.reason == alone.reason
    assert "adreno.yaml:" in refusal.where


def test_parameters_and_constants(story: Explanation) -> None:
    x = story.tensor("x")
    assert (x.layout, x.scope, x.writer) == ("plain", "global", None)
    assert [c.kind for c in x.conversions] == ["pack"]
    weights = story.tensor("fused_conv2d_chain_0.weight")
    assert (weights.layout, weights.scope) == ("OIHW4i4o", "global")
    assert [(c.kind, c.cost) for c in weights.conversions] == [("constant", 0)]


def test_names_that_are_not_there(story: Explanation) -> None:
    with pytest.raises(
        FusionPatternsError, match=r"no tensor at a composite's edge is called 'lv22'; did you mean"
    ):
        story.tensor("lv22")
    assert story.tensor("main.lv2") == story.tensor("lv2")


def test_a_name_in_two_functions() -> None:
    mod = network()
    main = mod["main"]
    mod["other"] = relax.utils.copy_with_new_vars(main).with_attr("global_symbol", "other")
    story = explain(mod, target=texture_target())
    with pytest.raises(
        FusionPatternsError, match=r"'lv2' is the name of several tensors: main.lv2, other.lv2"
    ):
        story.tensor("lv2")
    assert story.tensor("other.lv2").function == "other"


def test_no_image_holds_it() -> None:
    story = explain(network(), target=texture_target(texture_depth_limit=1, texture_spatial_limit=4))
    impossible, buffer = story.tensor("lv2").alternatives[:2]
    assert impossible.cost is None
    assert impossible.why.startswith("global.texture: 2 layers, the device has 1; global.texture-nhwc: ")
    assert (story.tensor("lv2").scope, buffer.scope) == ("global", "global")
    assert "not possible: global.texture: 2 layers" in render_tensor(story.tensor("lv2"))


def test_the_text(story: Explanation) -> None:
    assert render_tensor(story.tensor("lv2")).splitlines()[:5] == [
        "main.lv2  1x2x12x12x4 float32, 4.6 kB, written by fused_conv2d_chain_0",
        "  decision      NCHW4c in global.texture (independent): "
        "1 of 1 readers ask for texture, 0 for a buffer",
        "  alternatives  NCHW4c in global.texture costs 520.7 kB",
        "                NCHW4c in global costs 1.0 MB",
        "  readers ask   fused_pool2d_chain_0.data: NCHW4c in texture, each element 9 times",
    ]
    whole = str(story)
    assert whole.startswith("in texture   2 tensors that composites write, 9.2 kB\nin buffers   1, 4.6 kB\n")
    assert "conversions  2 of layout, 0 between scopes" in whole
    assert "not packed\n  pool2d.chain at `" in whole


def test_the_data(story: Explanation) -> None:
    data = json.loads(json.dumps(story.to_dict()))
    assert (data["conversions"], data["copies"]) == (2, 0)
    assert data["cost"] == sum(tensor["cost"] for tensor in data["tensors"])
    names = [tensor["value"] for tensor in data["tensors"]]
    assert len(names) == len(set(names))
    assert data["profile"]["name"] == "adreno"
    assert data["profile"]["sources"]


def test_every_sum_is_the_sum_of_its_parts(story: Explanation) -> None:
    for tensor in story.placement.tensors:
        made = sum(conversion.cost for conversion in tensor.conversions)
        assert tensor.cost >= made if tensor.writer else True


def test_resnet_50_is_packed_once_and_never_unpacked() -> None:
    """One conversion in; what comes out is one pixel, whose packed form is the plain one. No copy at all."""
    story = explain(networks.load("light_resnet50"), target=texture_target())
    assert (story.count("pack"), story.count("unpack"), story.count("view"), story.count("copy")) == (
        1,
        0,
        1,
        0,
    )
    assert story.refused == ()
    convs = [name for name in story.placement.needs if name.startswith("fused_conv2d")]
    assert len(convs) == 49  # four of the 53 are summed with another in one kernel
    assert all("texture" in story.placement.operands[name][0].scope for name in convs)


# Profiles -------------------------------------------------------------------------------------------------


def test_every_shipped_profile_names_its_sources() -> None:
    assert {"adreno", "generic"} <= {profile.name for profile in shipped_profiles()}
    assert all(profile.sources for profile in shipped_profiles())


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{name: mine, keys: [], launch: 0, sources: [measured], "
        "texture: {read: 4, again: 4, write: 4}, buffer: {read: 1, again: 1, write: 1}}"
    )

    def build(emit: Any, x: Any) -> list[Any]:
        first = emit(nn.conv2d(x, weight(W)))
        return [emit(nn.softmax(first, axis=1)), emit(nn.conv2d(first, weight(W)))]

    story = explain(graph(build, [var("x", X)]), target=texture_target(), profile=path)
    assert story.tensor("lv").scope == "global"  # to unpack it from there and to copy it is cheaper
    assert [c.kind for c in story.tensor("lv").conversions] == ["copy", "unpack"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: x", "mine.yaml: not YAML: "),
        ("{name: x, keys: [], launch: -1}", "mine.yaml: texture: Field required"),
        ("[1]", "mine.yaml: the file: "),
        (
            "{name: x, keys: [], texture: {read: 1, again: 1, write: -1}, "
            "buffer: {read: 1, again: 1, write: 1}, launch: 1, sources: [a]}",
            "mine.yaml: texture.write: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_profile_that_is_not_valid(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BuildError) as error:
        load_profile(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_that_is_not_there() -> None:
    with pytest.raises(BuildError, match="no device profile is called 'mali'; shipped: adreno, "):
        load_profile("mali")
    with pytest.raises(BuildError, match=r"mali.yaml: no such file"):
        load_profile("mali.yaml")


# The command ----------------------------------------------------------------------------------------------

MODEL = """\
from tvm.script import ir as I, relax as R

@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((8, 4, 3, 3), "float32")):
        with R.dataflow():
            c = R.nn.conv2d(x, w, padding=(1, 1))
            y = R.nn.relu(c)
            R.output(y)
        return y
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def test_the_command_tells_all(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", model]) == 0
    out = capsys.readouterr().out
    assert out.startswith("in texture   0 tensors that composites write, 0 B\nin buffers   1, 2.0 kB\n")
    assert "\nmain.x  1x4x8x8 float32" in out
    assert "pack to NCHW4c in global.texture" in out


def test_the_command_tells_one_tensor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", model, "--tensor", "x", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["value"], data["scope"], data["conversions"][0]["kind"]) == ("x", "global", "pack")
    assert cli.main(["explain", model, "--tensor", "z"]) == 1
    assert "error: no tensor at a composite's edge is called 'z'" in capsys.readouterr().err


def test_the_package_gives_the_function_whatever_was_imported_before() -> None:
    code = "import fusion_patterns.explanation, fusion_patterns as fp; print(callable(fp.explain))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
