"""Runs a manifest on an OpenCL device and times its kernels. Needs NumPy and pyopencl, nothing else."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..errors import DeviceError, ManifestError
from .check import check
from .device import Device, DeviceInfo, devices, first_line, opencl, pick_device
from .interpret import Symbols, bind, check_inputs, evaluate, leaf_params, resolve
from .manifest import (
    NATIVE,
    Alloc,
    Array,
    Bind,
    Call,
    Copy,
    Function,
    If,
    Launch,
    Manifest,
    Result,
    Scalar,
    Shape,
    Step,
    TensorTree,
    View,
    all_steps,
    base,
    leaves,
    reads,
)
from .memory import DeviceTensor, Pool, copy

__all__ = ["Device", "DeviceInfo", "KernelTime", "Session", "devices", "pick_device"]

Value: TypeAlias = "DeviceTensor | Array | tuple[Value, ...] | None"
"""What a name stands for in a run: a tensor, a shape on the host (int64), a tuple, nothing."""


@dataclass(frozen=True)
class KernelTime:
    """How long a kernel takes on the device, from its events. Copies are listed too, as kernel ``copy``."""

    name: str
    label: str
    count: int
    """How often one run starts it."""
    median_ns: int
    """Nanoseconds of one launch: the median of all launches in all repeats."""
    total_ns: int
    """Nanoseconds in one run: the sum over its launches of each launch's median over the repeats."""


@dataclass(frozen=True)
class _Started:
    """A command on the queue."""

    name: str
    label: str
    event: Any


class Session:
    """A manifest, ready to run on a device: kernels compiled, constants uploaded.

    Runs share memory and must not overlap: one session belongs to one thread.
    """

    def __init__(self, manifest: Manifest, device: Device | str | None = None) -> None:
        """Compile and upload.

        Args:
            manifest: what to run.
            device: from `pick_device`, or what `pick_device` takes.

        Raises:
            ManifestError: the manifest isn't whole.
            DeviceError: no usable device, or the device refuses a kernel or a constant.
        """
        check(manifest)
        self.manifest = manifest
        self.device = device if isinstance(device, Device) else pick_device(device)
        # one queue, in order and with event times: memory may be reused before its last reader has run
        timed = opencl().command_queue_properties.PROFILING_ENABLE
        self.queue = opencl().CommandQueue(self.device.context, properties=timed)
        self.pool = Pool(self.device)
        steps = [step for function in manifest.functions.values() for step in all_steps(function.body)]
        labels = {step.kernel: step.label for step in reversed(steps) if isinstance(step, Launch)}
        self.kernels = {
            name: self.device.kernel(kernel, labels.get(name, ""))
            for name, kernel in manifest.kernels.items()
        }
        self.constants: dict[str, DeviceTensor] = {}
        for name, array in manifest.constants.items():
            tensor = manifest.constant_tensors[name]
            constant = self.pool.tensor(array.shape, tensor.dtype, tensor.scope, f"constant {name}")
            constant.write(self.queue, array)
            self.constants[name] = constant
        self.is_straight = not any(isinstance(step, If) for step in steps)
        self.commands = sum(isinstance(step, Launch | Copy) for step in steps)
        self._lifetimes: dict[tuple[int, Result], list[tuple[Step, tuple[str, ...]]]] = {}

    def run(self, inputs: Mapping[str, object] | Sequence[object], function: str = "main") -> list[Array]:
        """Run a function once.

        Args:
            inputs: the input arrays, in order or by name (see `interpret.check_inputs`).
            function: which function of the manifest.

        Returns:
            The results, nested tuples flattened from left to right. A shape comes as int64 (rank,); bfloat16
            comes as its bits in uint16.

        Raises:
            interpret.InputError: the inputs don't fit the parameters.
            ManifestError: no such function, or shapes inside don't fit with these inputs.
            DeviceError: the device refuses or fails a kernel; the message names it.
        """
        return _Run(self).results(function, inputs)

    def profile(
        self, inputs: Mapping[str, object] | Sequence[object], repeats: int = 10, function: str = "main"
    ) -> list[KernelTime]:
        """Time every kernel and copy of a run, after one run to warm up; in the order of their first launch.

        No kernel starts before all of its run are in the queue (`Device.hold`): launching takes the host longer than a
        short kernel takes the device, and a device that waited adds the time of waking up. A run that looks at a
        condition on its way can't be held back so.

        Raises:
            ValueError: `repeats` is less than one.
            FusionPatternsError: as `run` does.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        runs: list[list[_Started]] = []
        for _ in range(repeats + 1):
            run = _Run(self)
            run.results(function, inputs, held=self.is_straight)
            runs.append(run.started)
        groups: dict[tuple[str, str], list[list[int]]] = {}
        for same in zip(*runs[1:], strict=True):  # the same launch in every repeat
            times = [started.event.profile.end - started.event.profile.start for started in same]
            groups.setdefault((same[0].name, same[0].label), []).append(times)
        return [
            KernelTime(
                name,
                label,
                count=len(launches),
                median_ns=round(statistics.median([t for times in launches for t in times])),
                total_ns=round(sum(statistics.median(times) for times in launches)),
            )
            for (name, label), launches in groups.items()
        ]

    def seconds_per_run(
        self,
        inputs: Mapping[str, object] | Sequence[object],
        runs: int = 4,
        repeats: int = 5,
        function: str = "main",
    ) -> float:
        """How long the device takes for a run when one follows the other: seconds on the host's clock.

        Inputs are on the device before, results stay there, and no event is timed, which by itself takes a GPU a
        microsecond or more for every kernel. It is the time of ``2 * runs`` less that of ``runs``, each the median of
        ``repeats``, so what comes before and after them is not in it; all are in the queue before the first begins.

        Raises:
            ValueError: `runs` or `repeats` is less than one.
            FusionPatternsError: as `run` does.
        """
        if min(runs, repeats) < 1:
            raise ValueError(f"runs and repeats must be at least 1, got {runs} and {repeats}")
        queue = opencl().CommandQueue(self.device.context)
        self.run(inputs, function)  # warm
        few, many = (
            statistics.median(
                _Run(self, queue).seconds(function, inputs, count, 2 * runs) for _ in range(repeats)
            )
            for count in (runs, 2 * runs)
        )
        return max(many - few, 0.0) / runs

    def lifetimes(self, steps: tuple[Step, ...], keep: Result) -> list[tuple[Step, tuple[str, ...]]]:
        """Each step with the names that nobody reads after it, when `keep` is read at the end."""
        key = (id(steps), keep)  # the manifest keeps the steps alive, so their id is theirs
        if key not in self._lifetimes:
            live, reverse = set(map(base, leaves(keep))), []
            for step in reversed(steps):
                names = {*reads(step), *(() if isinstance(step, Launch) else (step.value,))}
                reverse.append((step, tuple(sorted(names - live))))
                live |= names
            self._lifetimes[key] = reverse[::-1]
        return self._lifetimes[key]


class _Run:
    """One run of a session."""

    def __init__(self, session: Session, queue: Any = None) -> None:
        self.session = session
        self.pool = session.pool
        self.queue = queue or session.queue
        self.started: list[_Started] = []

    def results(
        self, name: str, inputs: Mapping[str, object] | Sequence[object], *, held: bool = False
    ) -> list[Array]:
        function, arrays = self.checked(name, inputs)
        try:
            args = self.upload(function, arrays)
            with self.held(1) if held else nullcontext():
                value = self.call(function, args)
            results = list(self.download(value))
            self.queue.finish()
        except opencl().Error as error:
            raise self.failure(error) from None
        return results

    def seconds(
        self, name: str, inputs: Mapping[str, object] | Sequence[object], count: int, most: int
    ) -> float:
        """Seconds from the start of so many runs to the end of the last; ``most``: held back as for so many."""
        function, arrays = self.checked(name, inputs)
        try:
            args = self.upload(function, arrays)
            self.queue.finish()
            with self.held(most) if self.session.is_straight else nullcontext():
                for _ in range(count):
                    self.call(function, args)
                begin = time.perf_counter()
            self.queue.finish()
        except opencl().Error as error:
            raise self.failure(error) from None
        return time.perf_counter() - begin

    def held(self, runs: int) -> AbstractContextManager[None]:
        return self.session.device.hold(self.queue, runs * self.session.commands)

    def checked(
        self, name: str, inputs: Mapping[str, object] | Sequence[object]
    ) -> tuple[Function, dict[str, Array]]:
        if name not in self.session.manifest.functions:
            known = ", ".join(self.session.manifest.functions)
            raise ManifestError(f"no function {name!r}; there are: {known}")
        function = self.session.manifest.functions[name]
        return function, check_inputs(function, inputs)[0]

    def upload(self, function: Function, arrays: dict[str, Array]) -> tuple[Value, ...]:
        def walk(leaf: str, tree: TensorTree) -> Value:
            if isinstance(tree, tuple):
                return tuple(walk(f"{leaf}#{i}", item) for i, item in enumerate(tree))
            array = arrays[leaf]
            value = self.pool.tensor(array.shape, tree.dtype, tree.scope, f"parameter {leaf}")
            value.write(self.queue, array)
            return value

        return tuple(walk(p.name, p.tensor) for p in function.params)

    def failure(self, error: Exception) -> DeviceError:
        """What to say of an error that shows only when the queue is waited for."""
        culprits = (s for s in self.started if s.event.command_execution_status < 0)
        who = next((f"kernel {s.name} ({s.label})" for s in culprits), "a run")
        return DeviceError(f"{who} failed on {self.session.device.info}: {first_line(error)}")

    def download(self, value: Value) -> Iterator[Array]:
        if isinstance(value, DeviceTensor):
            yield value.read(self.queue)
        elif isinstance(value, tuple):
            for item in value:
                yield from self.download(item)
        elif value is not None:
            yield value

    def call(self, function: Function, args: tuple[Value, ...]) -> Value:
        env: dict[str, Value] = {
            **self.session.constants,
            **{param.name: arg for param, arg in zip(function.params, args, strict=True)},
        }
        leaf = leaf_params(function)
        symbols = bind(leaf, {name: self.tensor(name, env).shape for name in leaf})
        self.body(function.body, function.result, env, symbols)
        return self.look(function.result, env)

    def body(self, steps: tuple[Step, ...], keep: Result, env: dict[str, Value], symbols: Symbols) -> None:
        for step, dead in self.session.lifetimes(steps, keep):
            if isinstance(step, Launch):
                self.launch(step, env, symbols)
            else:
                env[step.value] = self.value(step, env, symbols)
            for name in dead:
                env.pop(name, None)

    def value(self, step: Step, env: dict[str, Value], symbols: Symbols) -> Value:
        match step:
            case Alloc(name, tensor):
                return self.pool.tensor(resolve(tensor, symbols), tensor.dtype, tensor.scope, f"value {name}")
            case View(name, of, tensor):
                source = self.tensor(of, env)
                view = DeviceTensor(resolve(tensor, symbols), tensor.dtype, tensor.scope, source.lease)
                _fits(f"view {name} of {of}", source.nbytes, view.nbytes, "bytes")
                return view
            case Copy(name, of, tensor):
                source = self.tensor(of, env)
                target = self.pool.tensor(
                    resolve(tensor, symbols), tensor.dtype, tensor.scope, f"value {name}"
                )
                _fits(f"copy {name} of {of}", source.size, target.size, "elements")
                label = f"{source.scope} -> {target.scope}"
                events = copy(self.queue, source, target, self.pool)
                self.started += [_Started("copy", label, event) for event in events]
                return target
            case Call(name, args):
                values = tuple(self.look(arg, env) for arg in args)
                return self.call(self.session.manifest.functions[name], values)
            case Shape(_, dims):
                return np.array([evaluate(dim, symbols) for dim in dims], np.int64)
            case Bind(_, of):
                return self.look(of, env)
            case If():
                condition = self.tensor(step.condition, env)
                _fits(f"condition {step.condition}", 1, condition.size, "element")
                taken = bool(condition.read(self.queue).any())
                steps, result = (step.then, step.then_value) if taken else (step.otherwise, step.else_value)
                inner = dict(env)
                self.body(steps, result, inner, symbols)
                return self.look(result, inner)
        raise AssertionError(step)

    def launch(self, step: Launch, env: dict[str, Value], symbols: Symbols) -> None:
        grid, block = ([evaluate(dim, symbols) for dim in dims] for dims in (step.grid, step.block))
        who = f"kernel {step.kernel} ({step.label})"
        if 0 in grid:
            return  # an empty tensor: nothing to do, and OpenCL refuses an empty launch
        info = self.session.device.info
        if min(*grid, *block) < 1:
            raise ManifestError(f"{who}: grid {grid}, block {block}: both must be positive")
        if math.prod(block) > info.max_work_group or any(map(int.__gt__, block, info.max_work_items)):
            raise DeviceError(
                f"{who}: a work group of {block} is too large for {info}: at most {info.max_work_group} work "
                f"items, {list(info.max_work_items)} by axis; build the module for smaller work groups"
            )
        kernel = self.session.kernels[step.kernel]
        try:
            kernel.set_args(
                *(
                    _scalar(arg, symbols, who) if isinstance(arg, Scalar) else self.tensor(arg, env).handle
                    for arg in step.args
                )
            )
            size = tuple(g * b for g, b in zip(grid, block, strict=True))
            event = opencl().enqueue_nd_range_kernel(self.queue, kernel, size, tuple(block))
        except opencl().Error as error:
            raise DeviceError(f"{who} failed on {info}: {first_line(error)}") from None
        self.started.append(_Started(step.kernel, step.label, event))

    def look(self, result: Result, env: dict[str, Value]) -> Value:
        if result is None:
            return None
        if isinstance(result, tuple):
            return tuple(self.look(item, env) for item in result)
        name, *path = result.split("#")
        value = env[name]
        for item in path:
            assert isinstance(value, tuple)  # check() has seen to it
            value = value[int(item)]
        return value

    def tensor(self, reference: str, env: dict[str, Value]) -> DeviceTensor:
        value = self.look(reference, env)
        assert isinstance(value, DeviceTensor)  # check() has seen to it
        return value


def _fits(what: str, expected: int, got: int, unit: str) -> None:
    if expected != got:
        raise ManifestError(f"{what}: expected {expected} {unit}, got {got}")


def _scalar(scalar: Scalar, symbols: Symbols, who: str) -> Any:
    """The number as the kernel takes it."""
    value = evaluate(scalar.expr, symbols) if isinstance(scalar.expr, str) else scalar.expr
    assert scalar.dtype in NATIVE  # check() has seen to it
    try:
        # OpenCL C has no bool argument; TVM passes an 8-bit integer
        return np.int8(bool(value)) if scalar.dtype == "bool" else np.dtype(scalar.dtype).type(value)
    except (OverflowError, ValueError):
        raise ManifestError(f"{who}: {value} does not fit {scalar.dtype}") from None
