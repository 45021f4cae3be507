"""How the tuner searches and what it writes down, with a device that is made up: times are a function of the tile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tvm
from modules import graph, nn, shape_of, var, weight
from tvm import relax
from tvm.script import tirx as T

from fusion_patterns import compile_module
from fusion_patterns.compiler import as_target, compile_kernels
from fusion_patterns.errors import BuildError
from fusion_patterns.lower.schedule.tiles import Tile
from fusion_patterns.lower.schedule.tuned import kernel_key
from fusion_patterns.lower.stages import lower
from fusion_patterns.place.profiles import Profile, TunedTile, load_profile
from fusion_patterns.tune import profile_text, render, tune, tuned_profile
from fusion_patterns.tune.measure import Built, DeviceLost, Kernel, Unfit
from fusion_patterns.tune.space import Limits
from fusion_patterns.tune.tuner import KernelResult, TuneReport, tunable_kernels

Time = Callable[[Kernel, Tile], float]


class MadeUp:
    """A device on which a tile takes as long as a function says; what it measured is kept in order."""

    device, driver, limits = "made up", "1", Limits(256, (256, 256, 64))

    def __init__(self, time: Time, workers: int = 1) -> None:
        self.time, self.workers = time, workers
        self.measured: list[tuple[str, Tile, int]] = []
        self.opened = 0

    @contextmanager
    def bench(self, kernel: Kernel) -> Iterator[Any]:
        self.opened += 1
        yield _Bench(self, kernel)


class _Bench:
    def __init__(self, on: MadeUp, kernel: Kernel) -> None:
        self.on, self.kernel = on, kernel

    def compare(self, candidate: Built, repeats: int) -> tuple[float, float]:
        self.on.measured.append((self.kernel.key, candidate.tile, repeats))
        default = self.on.time(self.kernel, self.kernel.default.tile)
        return default, self.on.time(self.kernel, candidate.tile)


def network() -> Any:
    """Two equal convolutions and a third one, between packing and unpacking."""

    def build(emit: Any, x: Any) -> Any:
        for out, kernel in ((8, 1), (8, 1), (16, 3)):
            w = weight((out, shape_of(x)[1], kernel, kernel), out)
            x = emit(nn.relu(emit(nn.conv2d(x, w, padding=kernel // 2))))
        return x

    return graph(build, [var("x", (1, 8, 12, 12))])


def slow_to_fast(kernel: Kernel, tile: Tile) -> float:
    """The more columns a thread computes the better; groups of 32 threads are best."""
    return 100.0 / tile.columns + abs(tile.threads - 32) / 100 + tile.blocks + tile.rows + tile.split


def tuned(
    tmp_path: Path, on: MadeUp, trials: int = 12, profile: Profile | str = "generic", **more: Any
) -> TuneReport:
    options = {"results": tmp_path / "r.sqlite", "trials": trials, "repeats": 2, **more}
    return tune(network(), on, profile=profile, **options)


def test_each_distinct_kernel_is_tuned_once_and_its_calls_are_counted(tmp_path: Path) -> None:
    report = tuned(tmp_path, MadeUp(slow_to_fast))
    assert [(one.label, one.shape, one.calls) for one in report.kernels] == [
        ("layout.pack", (1, 2, 12, 12, 4), 1),
        ("conv2d.chain", (1, 2, 12, 12, 4), 2),
        ("conv2d.chain", (1, 4, 12, 12, 4), 1),
    ]


def test_the_fastest_of_the_tiles_is_found_and_measured_longer(tmp_path: Path) -> None:
    on = MadeUp(slow_to_fast)
    report = tuned(tmp_path, on)
    for one in report.kernels:
        tried = {tile: slow_to_fast(None, tile) for key, tile, _ in on.measured if key == one.key}
        assert len(tried) == one.tried == 12
        assert next(tile for key, tile, _ in on.measured if key == one.key) == one.default
        assert one.best == min(tried, key=tried.__getitem__) != one.default
        assert (one.default_us, one.best_us) == (tried[one.default], tried[one.best])
        longer = [tile for key, tile, repeats in on.measured if key == one.key and repeats == 6]
        assert len(longer) == 3
        assert one.best in longer
    assert report.best_us == sum(one.best_us * one.calls for one in report.kernels) < report.default_us


def test_less_than_three_percent_may_be_noise_and_the_default_stays(tmp_path: Path) -> None:
    on = MadeUp(lambda kernel, tile: 100.0 if tile == kernel.default.tile else 98.0)
    report = tuned(tmp_path, on, trials=4)
    assert all(one.best == one.default and one.best_us == one.default_us == 100.0 for one in report.kernels)
    assert tuned_profile(report).tuned == ()


def test_what_is_measured_is_never_measured_again(tmp_path: Path) -> None:
    first = tuned(tmp_path, MadeUp(slow_to_fast))
    again = MadeUp(slow_to_fast)
    assert tuned(tmp_path, again).to_dict() == first.to_dict()
    assert (again.measured, again.opened) == ([], 0)
    more = MadeUp(slow_to_fast)
    tuned(tmp_path, more, trials=20)
    assert 0 < len(more.measured) < 3 * 20


def test_an_interrupt_keeps_what_was_measured_and_the_same_command_goes_on(tmp_path: Path) -> None:
    whole = MadeUp(slow_to_fast)
    wanted = tuned(tmp_path, whole, results=tmp_path / "whole.sqlite")
    count = 0

    def interrupted(kernel: Kernel, tile: Tile) -> float:
        nonlocal count
        count += 1
        if count == 50:  # in the second kernel; two times are asked for each tile
            os.kill(os.getpid(), signal.SIGINT)
        return slow_to_fast(kernel, tile)

    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    first = MadeUp(interrupted)
    report = tuned(tmp_path, first, progress=said.append)
    assert signal.getsignal(signal.SIGINT) is before
    assert (len(report.kernels), report.waiting) == (1, 2)
    assert "stopping after the tile in work; what was measured is kept" in said
    assert "stopped early: 2 kernels left; the same command goes on from here" in render(report)
    rest = MadeUp(slow_to_fast)
    assert tuned(tmp_path, rest).to_dict() == wanted.to_dict()
    assert first.measured + rest.measured == whole.measured


def test_a_tile_that_is_no_good_is_kept_with_its_reason_and_not_chosen(tmp_path: Path) -> None:
    def picky(kernel: Kernel, tile: Tile) -> float:
        if tile.columns > 2 and tile != kernel.default.tile:
            raise Unfit("wrong results: relative error 1.0e+00, allowed 1e-04")
        return slow_to_fast(kernel, tile)

    report = tuned(tmp_path, MadeUp(picky))
    assert any(one.invalid for one in report.kernels)
    for one in report.kernels:
        assert set(one.invalid) <= {"wrong results: relative error 1.0e+00, allowed 1e-04"}
        assert one.best == one.default or one.best.columns <= 2
    again = MadeUp(slow_to_fast)  # it would be good now, but it is known not to be
    assert tuned(tmp_path, again).to_dict() == report.to_dict()
    assert again.measured == []


def test_a_lost_device_is_opened_again_and_no_tile_is_blamed(tmp_path: Path) -> None:
    lost = iter([False, False, True])

    def once(kernel: Kernel, tile: Tile) -> float:
        if next(lost, False):
            raise DeviceLost("out of resources")
        return slow_to_fast(kernel, tile)

    on = MadeUp(once)
    report = tuned(tmp_path, on)
    assert on.opened == 3 + 1
    assert all(not one.fault and not one.invalid for one in report.kernels)


def test_a_kernel_whose_device_stays_lost_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    def never(kernel: Kernel, tile: Tile) -> float:
        if kernel.label == "layout.pack":
            raise DeviceLost("out of resources")
        return slow_to_fast(kernel, tile)

    report = tuned(tmp_path, MadeUp(never))
    assert [one.fault for one in report.kernels] == ["out of resources", "", ""]
    assert "not measured: out of resources" in render(report)
    again = MadeUp(slow_to_fast)
    assert [one.fault for one in tuned(tmp_path, again).kernels] == ["", "", ""]
    assert {key for key, _, _ in again.measured} == {report.kernels[0].key}


def test_several_devices_share_the_kernels(tmp_path: Path) -> None:
    threads: set[int] = set()
    both = threading.Barrier(2, timeout=20)

    def together(kernel: Kernel, tile: Tile) -> float:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both.wait()  # nobody gets past this alone
        return slow_to_fast(kernel, tile)

    report = tuned(tmp_path, MadeUp(together, workers=2))
    assert len(threads) == 2
    one = tuned(tmp_path, MadeUp(slow_to_fast), results=tmp_path / "one.sqlite")
    assert report.to_dict() == one.to_dict()


# The profile ------------------------------------------------------------------------------------------------


def test_the_profile_is_read_back_and_its_tiles_are_what_is_built(tmp_path: Path) -> None:
    report = tuned(tmp_path, MadeUp(slow_to_fast))
    profile = tuned_profile(report)
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(profile))
    assert load_profile(path) == profile
    assert (profile.name, profile.keys) == ("generic-tuned", ())
    assert profile.sources[-1].startswith(
        "tuned: 3 of 3 kernels of module, measured on made up (driver 1) by"
    )
    base = load_profile("generic")
    assert (profile.texture, profile.tiles, profile.launch) == (base.texture, base.tiles, base.launch)

    plain, mine = compile_module(network(), profile="generic"), compile_module(network(), profile=path)
    assert (plain.report.tuned, mine.report.tuned, mine.report.tuned_left_aside) == (0, 3, {})
    groups = {
        step.label: step.block
        for step in mine.manifest.functions["main"].body
        if type(step).__name__ == "Launch"
    }
    by_label = {one.label: one.best.group[::-1] for one in report.kernels}
    assert groups["layout.pack"] == by_label["layout.pack"]
    assert groups["conv2d.chain"] == by_label["conv2d.chain"]
    changed = [name for name in plain.kernels if plain.kernels[name] != mine.kernels[name]]
    assert len(changed) >= 3


def entry(key: str, **changes: Any) -> TunedTile:
    tile = {"blocks": 1, "rows": 1, "columns": 2, "group": (1, 1, 2), "default_us": 2.0, "best_us": 1.0}
    return TunedTile(key=key, **{**tile, **changes})


def keys() -> dict[str, str]:
    fused, lowered = compile_kernels(network(), profile="generic")
    return {lowered.labels[name]: kernel_key(fused[name]) for name in sorted(lowered.funcs)}


def test_a_tile_that_no_longer_fits_is_left_aside_with_the_reason() -> None:
    base = load_profile("generic")
    stale = base.model_copy(update={"tuned": (entry(keys()["conv2d.chain"], columns=7),)})
    compiled = compile_module(network(), profile=stale)
    ((kernel, reason),) = compiled.report.tuned_left_aside.items()
    assert kernel.startswith("conv2d.chain fused_conv2d_chain")
    assert "7 columns of a thread don't divide 12" in reason
    assert compiled.kernels == compile_module(network(), profile=base).kernels


def test_tiles_of_other_kernels_stay_in_the_profile_and_do_nothing(tmp_path: Path) -> None:
    other = entry("0123456789abcdef")
    base = load_profile("generic").model_copy(update={"tuned": (other,), "name": "mine-tuned"})
    assert compile_module(network(), profile=base).report.tuned == 0
    again = tuned_profile(tuned(tmp_path, MadeUp(slow_to_fast), profile=base))
    assert again.name == "mine-tuned"
    assert again.tuned[0] == other
    assert len(again.tuned) == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{key: 0123456789abcdef}", r"tuned\.0\.blocks: Field required"),
        ("{key: xyz, blocks: 1}", r"tuned\.0\.key: String should match pattern"),
        ("{depth: 3}", r"tuned\.0\.\w+: "),
    ],
)
def test_what_a_profile_must_not_say_of_a_tile(tmp_path: Path, line: str, reason: str) -> None:
    text = profile_text(load_profile("generic")) + f"tuned:\n- {line}\n"
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(BuildError, match=rf"bad\.yaml: {reason}"):
        load_profile(tmp_path / "bad.yaml")


def test_a_kernel_has_one_tile(tmp_path: Path) -> None:
    twice = load_profile("generic").model_copy(update={"tuned": (entry("0123456789abcdef"),) * 2})
    (tmp_path / "twice.yaml").write_text(profile_text(twice))
    with pytest.raises(BuildError, match="kernel 0123456789abcdef has more than one tile"):
        load_profile(tmp_path / "twice.yaml")


# Keys and kernels -------------------------------------------------------------------------------------------


def conv_keys(name: str = "x", out: int = 8, scale: float = 1.0, padding: int = 0) -> list[str]:
    def build(emit: Any, x: Any) -> Any:
        y = emit(nn.relu(emit(nn.conv2d(x, weight((out, 8, 3, 3)), padding=padding))))
        return emit(nn.leakyrelu(y, 0.25 * scale))

    fused, _ = compile_kernels(graph(build, [var(name, (1, 8, 12, 12))]))
    found = [
        f
        for _, f in fused.functions_items()
        if f.attrs and f.attrs.get("fusion_patterns.row") == "conv2d.chain"
    ]
    return [kernel_key(func) for func in found]


def test_a_key_does_not_depend_on_names_but_on_all_else() -> None:
    (key,) = conv_keys()
    assert conv_keys(name="another/input:0") == [key]
    others = [*conv_keys(out=16), *conv_keys(scale=2.0), *conv_keys(padding=1)]
    assert len({key, *others}) == 4


def test_a_key_is_the_same_in_another_process() -> None:
    import subprocess
    import sys

    code = "import sys; sys.path.insert(0, 'tests'); import test_tune_tuner as t; print(t.conv_keys('z')[0])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    root = Path(__file__).resolve().parent.parent
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == conv_keys()


@T.prim_func(s_tir=True, private=True)
def open_batch(x: T.handle, y: T.handle):
    n = T.int64()
    source, result = T.match_buffer(x, (n, 2, 8, 8, 4)), T.match_buffer(y, (n, 2, 8, 8, 4))
    for i, c, h, w, lane in T.grid(n, 2, 8, 8, 4):
        with T.sblock("relu"):
            vi, vc, vh, vw, vl = T.axis.remap("SSSSS", [i, c, h, w, lane])
            result[vi, vc, vh, vw, vl] = T.max(source[vi, vc, vh, vw, vl], T.float32(0))


@T.prim_func(s_tir=True, private=True)
def three_axes(source: T.Buffer((2, 8, 4), "float32"), result: T.Buffer((2, 8, 4), "float32")):
    for i, j, k in T.grid(2, 8, 4):
        with T.sblock("relu"):
            vi, vj, vk = T.axis.remap("SSS", [i, j, k])
            result[vi, vj, vk] = T.max(source[vi, vj, vk], T.float32(0))


def test_kernels_without_a_tile_to_choose_are_left_out_with_the_reason() -> None:
    builder = relax.BlockBuilder()
    functions = {"relu.open": open_batch, "relu.flat": three_axes}
    n = tvm.tirx.Var("n", "int64")
    params = [var("a", (n, 2, 8, 8, 4)), var("b", (2, 8, 4))]
    with builder.function("main", params):
        outs = []
        for (name, func), param in zip(functions.items(), params, strict=True):
            func = func.with_attr("fusion_patterns.kernel", "chain").with_attr("fusion_patterns.row", name)
            gv = builder.add_func(func, name.replace(".", "_"))
            outs.append(
                builder.emit(relax.call_tir(gv, [param], relax.TensorType(param.ty.shape, "float32")))
            )
        builder.emit_func_output(relax.Tuple(outs))
    fused = builder.get()
    lowered = lower(fused, as_target())
    # no schedule takes open shapes so far; one that did would still have nothing to measure
    lowered.funcs.setdefault("relu_open", lowered.funcs["relu_flat"])
    kernels, left_out = tunable_kernels(fused, lowered, as_target(), load_profile("generic").tiles)
    assert kernels == []
    assert left_out == {
        "relu.open relu_open": "its shapes are open; give them a size with --bind",
        "relu.flat relu_flat": "its schedule has no tile",
    }


def test_trials_and_repeats_are_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="trials 0, repeats 2: both must be at least 1"):
        tuned(tmp_path, MadeUp(slow_to_fast), trials=0)


def test_a_clock_that_counts_nothing_does_no_harm(tmp_path: Path) -> None:
    report = tuned(tmp_path, MadeUp(lambda kernel, tile: 0.0), trials=2)
    assert all(one.best == one.default and not one.fault for one in report.kernels)
    assert "ratio 1.00" in render(report)


def test_a_model_without_packed_kernels_is_told(tmp_path: Path) -> None:
    mod = graph(lambda emit, x: emit(nn.relu(x)), [var("x", (4, 5))])
    report = tune(mod, MadeUp(slow_to_fast), results=tmp_path / "r.sqlite")
    assert (report.kernels, report.waiting) == ([], 0)
    assert "no kernel of it has a tile to choose" in render(report)


def test_one_trial_is_the_default_alone(tmp_path: Path) -> None:
    on = MadeUp(slow_to_fast)
    report = tuned(tmp_path, on, trials=1)
    assert [(one.tried, one.best) for one in report.kernels] == [(1, one.default) for one in report.kernels]
    assert len(on.measured) == 3


def test_the_table_has_the_dearest_kernel_first() -> None:
    def one(label: str, us: float, calls: int) -> KernelResult:
        tile = Tile(1, 1, 4, (1, 4, 3))
        best = Tile(2, 1, 4, (1, 4, 3), 2)
        return KernelResult("f" * 16, label, (1, 2, 12, 12, 4), calls, tile, best, us, us / 2, 5, {"x": 1})

    report = TuneReport("net", "gpu", "1", load_profile("generic"), [one("a", 5.0, 1), one("b", 4.0, 2)], {})
    lines = render(report).splitlines()
    assert lines[0] == "net on gpu, driver 1, beside profile generic"
    row = "b 1x2x12x12x4 ffffff 2 4.0 2.0 0.50 5 1 1x1x4/1x4x3/1 -> 2x1x4/1x4x3/2"
    assert lines[2].split() == row.split()
    assert lines[3].startswith("a ")
    assert lines[4] == (
        "one run: 13.0 us in these kernels with the default tiles, 6.5 us with the best (ratio 0.50)"
    )
