"""Measuring on devices that TVM's RPC tracker lends: phones, with TVM's own OpenCL runtime on them.

A session is asked for each tile anew, so that a tile which hangs or crashes a device costs that session alone, and
all devices of a key share the kernels.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm

from ..errors import DeviceError
from ..lower.kernels import first_line
from ..run.manifest import BUFFER
from .measure import (
    COMPILER,
    Array,
    Bench,
    Built,
    DeviceLost,
    Kernel,
    Unfit,
    difference,
    draw,
    turns,
    unwritten,
)
from .space import Limits

__all__ = ["Library", "RpcMeasurer", "device_library"]

Library = Callable[[Any, Any, str], None]
"""Build a scheduled PrimFunc for a target and write the library to a path."""

NUMBER = 3
"""Launches of one measurement."""


def device_library(func: Any, target: Any, path: str) -> None:
    """A shared library with the kernel: linked for Android where the target's host is, else for this machine."""
    options: dict[str, Any] = {}
    if "android" in str(target.host.attrs.get("mtriple", "")):
        from tvm.support import ndk

        options["fcompile"] = ndk.create_shared
    tvm.tirx.build(tvm.IRModule({"kernel": func}), target=target).export_library(path, **options)


class RpcMeasurer:
    """The devices that a tracker lends under one key; all are taken to be of one kind."""

    def __init__(
        self,
        tracker: str,
        key: str,
        target: Any,
        *,
        seconds: int = 60,
        library: Library = device_library,
    ) -> None:
        """Ask the tracker, and one device what it is.

        ``tracker`` is ``host:port``; ``seconds``: how long a device is borrowed for one tile at most. Raises
        :class:`DeviceError` if there is no tracker, no device under the key, or no runtime for the target on it.
        """
        host, _, port = tracker.rpartition(":")
        if not host or not port.isdecimal():
            raise DeviceError(f"RPC tracker {tracker!r}: expected host:port, such as 127.0.0.1:9190")
        self.address, self.key, self.seconds = (host, int(port)), key, seconds
        self.target, self.library = target, library
        self.workers = self._count()
        kind = str(target.kind.name)
        self.runtime = "cpu" if kind == "llvm" else kind
        try:
            device = self.borrow().device(self.runtime)
            if not device.exist:
                raise DeviceError(
                    f"RPC key {key!r}: TVM has no {kind} device there; start its server with a runtime that has"
                )
            name = "CPU" if kind == "llvm" else str(device.device_name)
            self.device, self.driver = f"{name}, RPC key {key}", f"TVM {tvm.__version__} {kind}"
            self.limits = Limits(1024, (1024, 1024, 1024)) if kind == "llvm" else _limits(device)
        except DeviceError:
            raise
        except Exception as error:  # TVM raises many kinds
            raise DeviceError(f"RPC tracker {tracker}, key {key!r}: {first_line(error)}") from None

    def _count(self) -> int:
        try:
            from tvm.rpc import connect_tracker

            # TVM itself would try for a minute
            socket.create_connection(self.address, timeout=5).close()
            servers = connect_tracker(*self.address).summary()["server_info"]
        except Exception as error:  # TVM and the sockets raise many kinds
            place = ":".join(map(str, self.address))
            raise DeviceError(
                f"RPC tracker {place}: {first_line(error)}; start one with `python -m tvm.exec.rpc_tracker`"
            ) from None
        found = sum(str(server["key"]) == f"server:{self.key}" for server in servers)
        if not found:
            known = sorted({str(server["key"]).partition(":")[2] for server in servers})
            raise DeviceError(
                f"RPC key {self.key!r}: no device is registered under it; there are: {', '.join(known) or 'none'}"
            )
        return found

    def borrow(self) -> Any:
        """A session on a device, as soon as one is free; it ends when nothing refers to it, or after ``seconds``."""
        from tvm.rpc import connect_tracker

        return connect_tracker(*self.address).request(self.key, session_timeout=self.seconds)

    @contextmanager
    def bench(self, kernel: Kernel) -> Iterator[Bench]:
        """The inputs and the library of the profile's tile are made once for each kernel."""
        with tempfile.TemporaryDirectory(prefix="fusion-patterns-tune-") as folder:
            try:
                bench = _RpcBench(self, kernel, Path(folder))
            except Exception as error:  # TVM and the linker raise many kinds
                raise DeviceLost(f"its default can't be built for the target: {first_line(error)}") from None
            yield bench


class _Broken(Exception):
    """A session ended while a candidate was in it."""


class _RpcBench:
    def __init__(self, farm: RpcMeasurer, kernel: Kernel, folder: Path) -> None:
        self.farm, self.kernel, self.folder = farm, kernel, folder
        self.inputs, self.blank = draw(kernel), unwritten(kernel)
        self.default = self._library(kernel.default, "default.so")

    def _library(self, built: Built, name: str) -> str:
        path = os.fspath(self.folder / name)
        with COMPILER:
            func = built.scheduled.with_attr("global_symbol", "kernel")
            self.farm.library(func, self.farm.target, path)
        return path

    def compare(self, candidate: Built, repeats: int) -> tuple[float, float]:
        try:
            path = self._library(candidate, "candidate.so")
        except Exception as error:  # TVM and the linker raise many kinds
            raise Unfit(first_line(error)) from None
        try:
            return self._compare(path, repeats)
        except _Broken:  # by the tile, or by the way there: once more tells
            try:
                return self._compare(path, repeats)
            except _Broken as error:
                raise Unfit(str(error)) from None

    def _compare(self, path: str, repeats: int) -> tuple[float, float]:
        try:
            session = self.farm.borrow()
            device = session.device(self.farm.runtime)
            args = [_upload(device, *pair) for pair in self._operands()]
            default = _load(session, self.default)
            expected = self._run(default, args)
        except Exception as error:  # TVM raises many kinds
            raise DeviceLost(first_line(error)) from None
        try:
            other = _load(session, path)
            got = self._run(other, args)
            timers = [_timer(module, device, args) for module in (default, other)]
            times: tuple[list[float], list[float]] = ([], [])
            for which in turns(repeats):
                times[which].append(timers[which]())
        except Exception as error:
            raise _Broken(first_line(error)) from None
        if reason := difference(expected, got):
            raise Unfit(reason)
        return statistics.median(times[0]), statistics.median(times[1])

    def _operands(self) -> Iterator[tuple[Array, str]]:
        textures = "texture" in [str(key) for key in self.farm.target.keys]
        for array, tensor in zip([*self.inputs, *self.blank], self.kernel.params, strict=True):
            yield array, tensor.scope if textures else BUFFER

    def _run(self, module: Any, args: list[Any]) -> list[Array]:
        results = args[self.kernel.inputs :]
        for result, array in zip(results, self.blank, strict=True):
            result.copyfrom(array)
        module["kernel"](*args)
        return [result.numpy() for result in results]


def _upload(device: Any, array: Array, scope: str) -> Any:
    tensor = tvm.runtime.empty(array.shape, array.dtype.name, device, None if scope == BUFFER else scope)
    return tensor.copyfrom(array)


def _load(session: Any, path: str) -> Any:
    session.upload(path)
    return session.load_module(os.path.basename(path))


def _timer(module: Any, device: Any, args: list[Any]) -> Callable[[], float]:
    """Microseconds of one launch, by the clock of TVM's runtime there."""
    evaluate = module.time_evaluator("kernel", device, number=NUMBER, repeat=1)
    return lambda: float(evaluate(*args).mean) * 1e6


def _limits(device: Any) -> Limits:
    x, y, z = (int(size) for size in device.max_thread_dimensions)
    return Limits(int(device.max_threads_per_block), (x, y, z))
