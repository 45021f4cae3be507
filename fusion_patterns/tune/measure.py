"""Measuring a kernel with one tile beside the same kernel with the profile's tile: the protocol, and OpenCL right here.

The two take turns, so that a device that gets slower, or faster, does so for both; and a tile whose numbers differ
from those of the profile's tile is no good, whatever its time.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from ..errors import FusionPatternsError
from ..lower.kernels import Argument, LoweredFunc
from ..lower.schedule.tiles import Tile
from ..lower.schedule.tuned import Space
from ..run import manifest as m
from ..run.device import Device, first_line, opencl, pick_device
from ..run.memory import DeviceTensor, Pool
from ..verification import TOLERANCE
from .space import Limits

__all__ = [
    "COMPILER",
    "Bench",
    "Built",
    "DeviceLost",
    "Kernel",
    "LocalMeasurer",
    "Measurer",
    "Unfit",
    "difference",
    "draw",
    "turns",
    "unwritten",
]

Array = np.ndarray[Any, Any]

COMPILER = threading.Lock()
"""TVM's compiler is for one thread at a time; to measure, several may be at work."""


class Unfit(Exception):
    """A tile that the device refuses, or computes wrongly with. The message is the reason."""


class DeviceLost(Exception):
    """The profile's own tile does not run (any more): the device is to blame, not a tile. The message is the reason."""


@dataclass(frozen=True)
class Built:
    """A kernel with one tile: lowered to OpenCL C, and the scheduled PrimFunc for TVM's own runtime."""

    tile: Tile
    lowered: LoweredFunc
    scheduled: Any


@dataclass(frozen=True)
class Kernel:
    """A distinct kernel of a model.

    ``key``: of :func:`lower.tuned.kernel_key`. ``label``: its row. ``func``: the PrimFunc before scheduling.
    ``params``: the tensors that it takes, ``inputs`` of them read, the others written. ``calls``: how often one run of
    the model calls it. ``default``: built with the profile's tile, ``space.chosen``.
    """

    key: str
    label: str
    func: Any
    params: tuple[m.Tensor, ...]
    inputs: int
    calls: int
    space: Space
    default: Built


class Bench(Protocol):
    """A device made ready for one kernel."""

    def compare(self, candidate: Built, repeats: int) -> tuple[float, float]:
        """Median microseconds of one launch with the profile's tile and with the candidate's.

        The two are launched in turn, ``repeats`` times each. Raises :class:`Unfit` if the candidate can't be built or
        run, or its results differ by more than the tolerance; :class:`DeviceLost` if the profile's tile does not run.
        """


class Measurer(Protocol):
    """Something that can time kernels: a device, or a number of equal ones.

    ``device`` and ``driver`` name it in the results. ``workers``: how many kernels it measures at a time.
    """

    device: str
    driver: str
    limits: Limits
    workers: int

    def bench(self, kernel: Kernel) -> AbstractContextManager[Bench]:
        """Make a device ready for a kernel. Raises :class:`DeviceLost`."""


def draw(kernel: Kernel) -> list[Array]:
    """The arrays that a kernel reads, row-major, always the same ones.

    Floats are standard normal, weights smaller so that sums keep the size of what is summed; integers are 0 or 1.
    """
    generator = np.random.default_rng(0)
    arrays = []
    for tensor in kernel.params[: kernel.inputs]:
        shape, dtype = tuple(int(d) for d in tensor.shape), m.STORAGE[tensor.dtype]
        if dtype.kind != "f":
            arrays.append(generator.integers(0, 2, shape).astype(dtype))
            continue
        # packed weights have six axes, (O/4, I/4, KH, KW, 4, 4), and plain ones four
        summed = prod(shape[1:5]) if len(shape) == 6 else prod(shape[1:]) if len(shape) == 4 else 1
        arrays.append((generator.standard_normal(shape) * summed**-0.5).astype(dtype))
    return arrays


def unwritten(kernel: Kernel) -> list[Array]:
    """What the tensors that a kernel writes hold before it runs, lest it passes with what another tile left there."""
    arrays = []
    for tensor in kernel.params[kernel.inputs :]:
        dtype = m.STORAGE[tensor.dtype]
        value = np.nan if dtype.kind == "f" else 85
        arrays.append(np.full(tuple(int(d) for d in tensor.shape), value).astype(dtype))
    return arrays


def difference(expected: list[Array], got: list[Array]) -> str | None:
    """How results differ by more than the tolerance (of the expected array's largest magnitude); ``None``: not."""
    for want, have in zip(expected, got, strict=True):
        wide, other = want.astype(np.float64), have.astype(np.float64)
        finite = np.isfinite(wide)
        if not finite.any():
            return "the profile's tile computes nothing finite to compare with"
        if not np.array_equal(finite, np.isfinite(other)):
            return "wrong results: not finite in other places"
        allowed = TOLERANCE.get(want.dtype.name, 0.0)
        error = float(np.abs(wide[finite] - other[finite]).max()) / (float(np.abs(wide[finite]).max()) or 1.0)
        if error > allowed:
            return f"wrong results: relative error {error:.1e}, allowed {allowed:.0e}"
    return None


def turns(repeats: int) -> Iterator[int]:
    """Whose turn it is, 0 or 1: each so often, and each goes first in turn."""
    for turn in range(repeats):
        yield from (0, 1) if turn % 2 == 0 else (1, 0)


class LocalMeasurer:
    """An OpenCL device of this machine, through its event times."""

    workers = 1

    def __init__(self, device: str | None = None) -> None:
        """``device`` as :func:`run.device.pick_device` takes it. Raises :class:`DeviceError`."""
        self._device = pick_device(device)
        info = self._device.info
        self.device, self.driver = f"{info.name}, {info.platform}", info.driver
        x, y, z = info.max_work_items[:3]
        self.limits = Limits(info.max_work_group, (x, y, z))

    @contextmanager
    def bench(self, kernel: Kernel) -> Iterator[Bench]:
        """A context of its own for each kernel: what a wrong one broke is gone with it."""
        cl = opencl()
        try:
            # a device of its own also lets go of the programs when the kernel is done
            device = Device(self._device.info, cl.Context(self._device.context.devices))
            yield _LocalBench(device, kernel)
        except cl.Error as error:
            raise DeviceLost(first_line(error)) from None


class _LocalBench:
    """A kernel's tensors on the device: every tile reads the same inputs and writes to the same outputs."""

    def __init__(self, device: Device, kernel: Kernel) -> None:
        cl = opencl()
        self.device, self.kernel = device, kernel
        self.queue = cl.CommandQueue(device.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
        self.pool = Pool(device)
        self.params = [self._tensor(tensor) for tensor in kernel.params]
        for tensor, array in zip(self.params, draw(kernel), strict=False):
            tensor.write(self.queue, array)
        self.default: list[_Start] = []

    def compare(self, candidate: Built, repeats: int) -> tuple[float, float]:
        errors = (FusionPatternsError, opencl().Error)
        try:
            self.default = self.default or self._starts(self.kernel.default)
            expected = self._run(self.default)
        except errors as error:
            raise DeviceLost(first_line(error)) from None
        try:
            other = self._starts(candidate)
            if reason := difference(expected, self._run(other)):
                raise Unfit(reason)
            return self._times((self.default, other), repeats)
        except errors as error:
            raise Unfit(first_line(error)) from None

    def _tensor(self, tensor: m.Tensor) -> DeviceTensor:
        shape = tuple(int(d) for d in tensor.shape)
        return self.pool.tensor(shape, tensor.dtype, tensor.scope, "a tensor of the kernel")

    def _starts(self, built: Built) -> list[_Start]:
        """The kernels of a tile, built, with their arguments."""
        scratch = [self._tensor(m.Tensor(*form)) for form in built.lowered.scratch]

        def value(argument: Argument) -> Any:
            if argument.kind == "scalar":
                return np.dtype(argument.dtype).type(argument.expr)
            return (self.params if argument.kind == "param" else scratch)[argument.index].handle

        starts = []
        for launch in built.lowered.launches:
            kernel = self.device.kernel(m.Kernel(launch.kernel, launch.source, launch.signature))
            kernel.set_args(*map(value, launch.args))
            grid, block = tuple(map(int, launch.grid)), tuple(map(int, launch.block))
            size = tuple(g * b for g, b in zip(grid, block, strict=True))
            starts.append(_Start(kernel, size, block, scratch))
        return starts

    def _enqueue(self, starts: list[_Start]) -> list[Any]:
        return [
            opencl().enqueue_nd_range_kernel(self.queue, start.kernel, start.size, start.block)
            for start in starts
        ]

    def _run(self, starts: list[_Start]) -> list[Array]:
        results = self.params[self.kernel.inputs :]
        for tensor, array in zip(results, unwritten(self.kernel), strict=True):
            tensor.write(self.queue, array)
        self._enqueue(starts)
        return [tensor.read(self.queue) for tensor in results]

    def _times(self, both: tuple[list[_Start], list[_Start]], repeats: int) -> tuple[float, float]:
        """Median microseconds of each; nothing starts before all is enqueued, lest the device waits for the host."""
        events: tuple[list[Any], list[Any]] = ([], [])
        try:
            with self.device.hold(self.queue, 2 * repeats * max(map(len, both))):
                for which in turns(repeats):
                    events[which].append(self._enqueue(both[which]))
        finally:
            self.queue.finish()
        one, other = (
            statistics.median(sum(each.profile.end - each.profile.start for each in run) for run in runs)
            for runs in events
        )
        return one / 1e3, other / 1e3


@dataclass(frozen=True)
class _Start:
    """A kernel ready to be started: work items in all and of a group by (x, y, z), and the scratch it needs."""

    kernel: Any
    size: tuple[int, ...]
    block: tuple[int, ...]
    scratch: list[DeviceTensor]
