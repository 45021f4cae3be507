"""A model's distinct kernels -> tiles -> times -> a profile with the fastest tile of each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import tvm

from ..compiler import Progress, TableLike, as_target, compile_kernels
from ..errors import BuildError
from ..lower.kernels import first_line
from ..lower.schedule import KERNEL_ATTR, max_threads, tile_space
from ..lower.schedule.tiles import Tile
from ..lower.schedule.tuned import kernel_key
from ..lower.stages import Lowered, calls_of, lower_packed
from ..place.profiles import Profile, ProfileLike, Tiles, as_profile
from ..run import manifest as m
from .measure import COMPILER, Bench, Built, DeviceLost, Kernel, Measurer, Unfit
from .space import cuts, groups
from .store import Outcome, Store

__all__ = ["KernelResult", "TuneReport", "tunable_kernels", "tune"]

FINALISTS = 3
LONGER = 3
"""The fastest tiles are measured again, over so many times more launches: the least of many medians is too good."""

GAIN = 0.97
"""A tile must take at most this share of the default's time, or the default stays: less may be noise."""

LEAST_US = 0.001
SAY_SECONDS = 5.0


@dataclass(frozen=True)
class KernelResult:
    """What came of one kernel.

    ``default``, ``best``: the profile's tile and the fastest one. ``default_us``, ``best_us``: microseconds of one
    launch with them. ``calls``: launches in one run of the model. ``tried``: tiles that were tried; ``invalid``: how
    many of them were no good, by reason. ``fault``: why the kernel could not be measured at all.
    """

    key: str
    label: str
    shape: tuple[int, ...]
    calls: int
    default: Tile
    best: Tile
    default_us: float = 0.0
    best_us: float = 0.0
    tried: int = 0
    invalid: dict[str, int] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class TuneReport:
    """What came of a model on a device.

    ``base``: the profile that chose the default tiles. ``left_out``: packed kernels that have no tile to choose, with
    the reason. ``waiting``: kernels that an interrupt left untouched.
    """

    model: str
    device: str
    driver: str
    base: Profile
    kernels: list[KernelResult]
    left_out: dict[str, str]
    waiting: int = 0

    @property
    def default_us(self) -> float:
        """Microseconds of all measured kernels in one run of the model, with the profile's tiles."""
        return sum(one.default_us * one.calls for one in self.kernels)

    @property
    def best_us(self) -> float:
        """The same with the fastest tiles."""
        return sum(one.best_us * one.calls for one in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        totals = {"default_us": self.default_us, "best_us": self.best_us}
        return {k: v for k, v in asdict(self).items() if k != "base"} | {"profile": self.base.name} | totals


def tune(
    mod: tvm.IRModule,
    measurer: Measurer,
    target: Any = None,
    table: TableLike = None,
    *,
    profile: ProfileLike = None,
    results: str | os.PathLike[str] = "tune.sqlite",
    trials: int = 32,
    repeats: int = 10,
    name: str = "module",
    progress: Progress | None = None,
) -> TuneReport:
    """Try at most ``trials`` tiles for every distinct packed kernel of a module, and choose the fastest of each.

    ``profile`` chooses the tiles that others are compared with; measured tiles in it are not used. What is known in
    the file ``results`` is not measured again. A time is the median of ``repeats`` launches. An interrupt (Ctrl-C) ends
    it early: the report then holds the kernels that are done. Raises :class:`BuildError`, :class:`TableError`,
    :class:`ResultsError`.
    """
    if trials < 1 or repeats < 1:
        raise BuildError(f"trials {trials}, repeats {repeats}: both must be at least 1")
    target = as_target(target)
    base = as_profile(profile, target)
    say = progress or (lambda line: None)
    with Store(results, measurer.device, measurer.driver) as store:  # better to hear of it before the work
        plain = base.model_copy(update={"tuned": ()})
        fused, lowered = compile_kernels(mod, target, table, profile=plain, progress=progress)
        kernels, left_out = tunable_kernels(fused, lowered, target, base.tiles)
        tuning = _Tuning(measurer, store, target, base.tiles, trials, repeats, say)
        done = tuning.run(kernels)
    return TuneReport(name, measurer.device, measurer.driver, base, done, left_out, len(kernels) - len(done))


def tunable_kernels(
    fused: tvm.IRModule, lowered: Lowered, target: Any, tiles: Tiles
) -> tuple[list[Kernel], dict[str, str]]:
    """The distinct packed kernels of a fused module that have a tile to choose, and why the others have none."""
    calls: dict[str, Any] = {}
    count: Counter[str] = Counter()
    for call in calls_of(fused):
        func = fused[call.args[0]]
        if func.attrs and KERNEL_ATTR in func.attrs and str(call.args[0].name_hint) in lowered.funcs:
            key = kernel_key(func)
            calls.setdefault(key, call)
            count[key] += 1
    kernels, left_out = [], {}
    for key, call in calls.items():
        name = str(call.args[0].name_hint)
        inputs = len(call.args[1].fields)
        kernel = _kernel(key, lowered.labels[name], fused[name], inputs, count[key], target, tiles)
        if isinstance(kernel, str):
            left_out[f"{lowered.labels[name]} {name}"] = kernel
        else:
            kernels.append(kernel)
    return kernels, left_out


def _kernel(
    key: str, label: str, func: Any, inputs: int, calls: int, target: Any, tiles: Tiles
) -> Kernel | str:
    """A kernel with its default tile, or why it has no tile to choose."""
    params = []
    for param in func.params:
        if not hasattr(param.ty, "storage_scope"):
            return "it takes a number that only a run knows"
        try:
            shape = tuple(int(d) for d in param.ty.shape)
        except (TypeError, ValueError):
            return "its shapes are open; give them a size with --bind"
        params.append(m.Tensor(shape, str(param.ty.dtype), str(param.ty.storage_scope) or m.BUFFER))
    fault = ""
    for apart in (False, True):
        try:
            space = tile_space(func, max_threads(target), lanes_apart=apart, tiles=tiles)
        except Exception as error:  # TVM raises many kinds
            fault = first_line(error)
            continue
        if space is None:
            return "its schedule has no tile"
        done = lower_packed("default", func, target, tiles, space.chosen, (apart,))
        if not isinstance(done, str):
            built = Built(space.chosen, *done)
            return Kernel(key, label, func, tuple(params), inputs, calls, space, built)
        fault = done
    return fault


class _Tuning:
    """One run of the tuner over kernels."""

    def __init__(
        self,
        measurer: Measurer,
        store: Store,
        target: Any,
        tiles: Tiles,
        trials: int,
        repeats: int,
        say: Progress,
    ) -> None:
        self.measurer, self.store, self.target, self.tiles = measurer, store, target, tiles
        self.trials, self.repeats, self.say = trials, repeats, say
        self.stop = threading.Event()
        self.said = 0.0

    def run(self, kernels: list[Kernel]) -> list[KernelResult]:
        """Tune kernels, as many at a time as there are devices; those that an interrupt left are missing."""
        done: dict[int, KernelResult] = {}

        def work(number: int) -> None:
            with suppress(_Stopped):
                done[number] = _Trials(
                    self, kernels[number], f"kernel {number + 1} of {len(kernels)}"
                ).result()

        with self._stops_between_tiles():
            if self.measurer.workers == 1:
                for number in range(len(kernels)):
                    work(number)
            else:
                with ThreadPoolExecutor(self.measurer.workers) as pool:
                    for future in [pool.submit(work, number) for number in range(len(kernels))]:
                        try:
                            future.result()
                        except BaseException:
                            self.stop.set()
                            raise
        return [done[number] for number in sorted(done)]

    @contextmanager
    def _stops_between_tiles(self) -> Iterator[None]:
        """The first interrupt waits for the tile in work: one in the middle of TVM would look like its fault."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            if self.stop.is_set():
                raise KeyboardInterrupt
            self.stop.set()
            self.say("stopping after the tile in work; what was measured is kept")

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def tell(self, text: str, *, often: bool = True) -> None:
        """Say how far it is; what is told for every tile only now and then."""
        now = time.monotonic()
        if not often or now - self.said >= SAY_SECONDS:
            self.said = now
            self.say(text)


class _Stopped(Exception):
    """An interrupt came before a kernel was done."""


class _Trials:
    """The tiles of one kernel on their way."""

    def __init__(self, tuning: _Tuning, kernel: Kernel, place: str) -> None:
        self.tuning, self.kernel = tuning, kernel
        self.place = f"{place}, {kernel.label} {'x'.join(map(str, kernel.space.work.shape))}"
        self.outcomes: dict[Tile, Outcome] = {}
        self.open = ExitStack()
        self.bench: Bench | None = None

    def result(self) -> KernelResult:
        """Try the tiles, and measure the fastest again. Raises :class:`_Stopped`."""
        self.tuning.tell(self.place, often=False)
        try:
            with self.open:
                return self._search()
        except DeviceLost as error:
            return self._result(self.kernel.space.chosen, fault=str(error))

    def _search(self) -> KernelResult:
        kernel, tuning = self.kernel, self.tuning
        space, repeats, chosen = kernel.space, tuning.repeats, kernel.space.chosen
        self._measure(chosen, repeats)
        if fault := self.outcomes[chosen].fault:
            return self._result(chosen, fault=fault)
        options = space, tuning.measurer.limits, tuning.tiles
        for tile in cuts(*options, -(-2 * tuning.trials // 3)):
            self._measure(tile, repeats)
        for tile in groups(*options, self._fastest()[0], tuning.trials - len(self.outcomes)):
            self._measure(tile, repeats)
        finalists = [tile for tile in self._fastest() if self._ratio(tile) < 1][:FINALISTS]
        for tile in finalists:
            self._measure(tile, repeats * LONGER)
        good = [tile for tile in finalists if not self.outcomes[tile].fault]
        best = min(good, key=self._ratio, default=chosen)
        return self._result(best if self._ratio(best) <= GAIN else chosen)

    def _result(self, best: Tile, fault: str = "") -> KernelResult:
        kernel, chosen = self.kernel, self.kernel.space.chosen
        outcome = self.outcomes.get(best, Outcome())
        faults = [each.fault for each in self.outcomes.values() if each.fault]
        return KernelResult(
            kernel.key,
            kernel.label,
            kernel.space.work.shape,
            kernel.calls,
            chosen,
            best,
            outcome.default_us,
            outcome.default_us if best == chosen else outcome.us,
            len(self.outcomes),
            dict(Counter(faults).most_common()),
            fault,
        )

    def _ratio(self, tile: Tile) -> float:
        return self.outcomes[tile].ratio

    def _fastest(self) -> list[Tile]:
        return sorted((tile for tile, each in self.outcomes.items() if not each.fault), key=self._ratio)

    def _measure(self, tile: Tile, repeats: int) -> None:
        """Take what is known of a tile, or measure it and keep that."""
        if self.tuning.stop.is_set():
            raise _Stopped
        store, key, chosen = self.tuning.store, self.kernel.key, self.kernel.space.chosen
        outcome = store.get(key, chosen, tile, repeats)
        if outcome is None:
            outcome = self._fresh(tile, repeats)
            store.put(key, chosen, tile, repeats, outcome)
        self.outcomes[tile] = outcome
        best = min((each.ratio for each in self.outcomes.values() if not each.fault), default=1.0)
        self.tuning.tell(f"{self.place}: {len(self.outcomes)} of {self.tuning.trials} tiles, best {best:.2f}")

    def _fresh(self, tile: Tile, repeats: int) -> Outcome:
        built = self._build(tile)
        if isinstance(built, str):
            return Outcome(fault=built)
        for again in (True, False):
            try:
                if self.bench is None:
                    self.bench = self.open.enter_context(self.tuning.measurer.bench(self.kernel))
                default_us, us = self.bench.compare(built, repeats)
                if built is self.kernel.default:
                    us = default_us
                # a clock may be too coarse to count anything
                return Outcome(max(default_us, LEAST_US), max(us, LEAST_US))
            except Unfit as error:
                return Outcome(fault=str(error))
            except DeviceLost:  # perhaps the tile before broke it: once more from the beginning
                self.bench = None
                self.open.close()
                if not again:
                    raise
        raise AssertionError

    def _build(self, tile: Tile) -> Built | str:
        if tile == self.kernel.default.tile:
            return self.kernel.default
        with COMPILER:
            done = lower_packed("candidate", self.kernel.func, self.tuning.target, self.tuning.tiles, tile)
        return done if isinstance(done, str) else Built(tile, *done)
