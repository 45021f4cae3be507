"""The tuner over TVM's RPC: a tracker and two servers on the loopback.

TVM's wheel has no OpenCL runtime, so what the servers run here is the same scheduled kernels for LLVM, their thread
loops made serial. All else is as with phones: the tracker's queue, sessions, upload, the inputs, TVM's timers.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import tirx
from tvm.rpc import connect_tracker
from tvm_ffi import structural_map

pytest.importorskip("tornado", reason="TVM's tracker needs tornado: pip install 'apache-tvm[rpc]'")

from modules import graph, nn, shape_of, var, weight

from fusion_patterns.compiler import as_target, compile_kernels
from fusion_patterns.errors import DeviceError
from fusion_patterns.lower.schedule.tiles import Tile
from fusion_patterns.place.profiles import load_profile
from fusion_patterns.tune import tune
from fusion_patterns.tune.measure import DeviceLost, Unfit
from fusion_patterns.tune.remote import RpcMeasurer
from fusion_patterns.tune.tuner import tunable_kernels

KEY = "two-of-a-kind"
LLVM = tvm.target.Target("llvm", host="llvm")

FARM = """
import sys, tvm
from tvm.rpc.server import Server
from tvm.rpc.tracker import Tracker
if __name__ == "__main__":
    tracker = Tracker("127.0.0.1", port=39190, port_end=39390, silent=True)
    place = ("127.0.0.1", tracker.port)
    servers = [
        Server("127.0.0.1", port=39400, port_end=39600, tracker_addr=place, key=sys.argv[1], silent=True)
        for _ in range(2)
    ]
    print(f"127.0.0.1:{tracker.port}", flush=True)
    sys.stdin.readline()
    for server in servers:
        server.terminate()
    tracker.terminate()
"""


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a tracker to which two servers have come."""
    script = tmp_path_factory.mktemp("farm") / "farm.py"
    script.write_text(FARM)
    farm = subprocess.Popen(
        [sys.executable, str(script), KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert farm.stdin is not None
    assert farm.stdout is not None
    place = farm.stdout.readline().strip()
    host, _, port = place.partition(":")
    try:
        for _ in range(100):
            if len(connect_tracker(host, int(port)).summary()["server_info"]) == 2:
                break
            time.sleep(0.2)
        yield place
    finally:
        farm.stdin.close()
        farm.wait(timeout=30)


def serial_library(func: Any, target: Any, path: str) -> None:
    """A scheduled kernel for a CPU: buffers for textures, loops for threads; split sums come out wrong."""
    buffers = {
        param: tirx.decl_buffer(param.ty.shape, param.ty.dtype, f"p{number}")
        for number, param in enumerate(func.params)
    }

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    body = structural_map(func.body, [(tvm.ir.Var, lambda var: buffers.get(var, var)), (tirx.For, serial)])
    plain = tirx.PrimFunc(list(buffers.values()), body, func.ret_type, func.attrs)
    tvm.tirx.build(tvm.IRModule({"kernel": plain}), target=target).export_library(path)


def network() -> Any:
    def build(emit: Any, x: Any) -> Any:
        for kernel in (3, 1):
            w = weight((16, shape_of(x)[1], kernel, kernel), kernel)
            x = emit(nn.relu(emit(nn.conv2d(x, w, padding=kernel // 2))))
        return x

    return graph(build, [var("x", (1, 8, 12, 12))])


def test_two_devices_of_a_tracker_tune_a_network(tracker: str, tmp_path: Path) -> None:
    farm = RpcMeasurer(tracker, KEY, LLVM, library=serial_library)
    assert (farm.workers, farm.device) == (2, f"CPU, RPC key {KEY}")
    assert farm.driver.endswith(" llvm")
    options = {"results": tmp_path / "r.sqlite", "trials": 3, "repeats": 2}
    report = tune(network(), farm, profile="generic", **options)
    assert len(report.kernels) >= 2
    for one in report.kernels:
        assert not one.fault
        assert one.tried == 3
        assert 0 < one.best_us <= one.default_us < 1e6

    class Gone(RpcMeasurer):
        def bench(self, kernel: Any) -> Any:
            raise AssertionError("what is measured is never measured again")

    again = tune(network(), Gone(tracker, KEY, LLVM), profile="generic", **options)
    assert again.to_dict() == report.to_dict()


@pytest.fixture(scope="module")
def kernel() -> Any:
    fused, lowered = compile_kernels(network(), profile="generic")
    found, _ = tunable_kernels(fused, lowered, as_target(), load_profile("generic").tiles)
    return next(one for one in found if one.label == "conv2d.chain")


def test_a_tile_with_other_results_is_unfit(tracker: str, kernel: Any) -> None:
    def negated(func: Any, target: Any, path: str) -> None:
        if path.endswith("candidate.so"):
            swapped = (tirx.Max, lambda both: tirx.Min(both.a, both.b))
            func = func.with_body(structural_map(func.body, swapped))
        serial_library(func, target, path)

    farm = RpcMeasurer(tracker, KEY, LLVM, library=negated)
    with (
        farm.bench(kernel) as bench,
        pytest.raises(Unfit, match=r"wrong results: relative error .*, allowed"),
    ):
        bench.compare(kernel.default, 1)


def test_a_tile_that_cannot_be_built_is_unfit(tracker: str, kernel: Any) -> None:
    broken = dataclasses.replace(kernel.default, tile=Tile(1, 1, 1, (1, 1, 1)))

    def library(func: Any, target: Any, path: str) -> None:
        if path.endswith("candidate.so"):
            raise RuntimeError("the linker is missing")
        serial_library(func, target, path)

    farm = RpcMeasurer(tracker, KEY, LLVM, library=library)
    with farm.bench(kernel) as bench, pytest.raises(Unfit, match="the linker is missing"):
        bench.compare(broken, 1)


def test_a_linker_that_is_missing_is_not_blamed_on_a_tile(tracker: str, kernel: Any) -> None:
    def library(func: Any, target: Any, path: str) -> None:
        raise RuntimeError("Require environment variable TVM_NDK_CC")

    farm = RpcMeasurer(tracker, KEY, LLVM, library=library)
    wanted = "its default can't be built for the target: .*TVM_NDK_CC"
    with pytest.raises(DeviceLost, match=wanted), farm.bench(kernel):
        pass


def test_a_device_that_does_not_answer_is_lost(tracker: str, kernel: Any) -> None:
    farm = RpcMeasurer(tracker, KEY, LLVM, library=serial_library)
    with farm.bench(kernel) as bench:
        farm.address = ("127.0.0.1", 9)

        def refused() -> Any:
            raise ConnectionRefusedError("connection refused")

        farm.borrow = refused  # type: ignore[method-assign]
        with pytest.raises(DeviceLost, match="connection refused"):
            bench.compare(kernel.default, 1)


def test_a_key_that_nobody_has_is_told_with_those_there_are(tracker: str) -> None:
    with pytest.raises(
        DeviceError, match=rf"RPC key 'phone': no device is registered under it; there are: {KEY}"
    ):
        RpcMeasurer(tracker, "phone", LLVM)


def test_a_server_without_an_opencl_runtime_is_told(tracker: str) -> None:
    with pytest.raises(
        DeviceError, match=rf"RPC key '{KEY}': TVM has no opencl device there; start its server"
    ):
        RpcMeasurer(tracker, KEY, as_target())


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("127.0.0.1", r"RPC tracker '127\.0\.0\.1': expected host:port, such as 127\.0\.0\.1:9190"),
        (
            "127.0.0.1:1",
            r"RPC tracker 127\.0\.0\.1:1: .*refused.*; start one with `python -m tvm\.exec\.rpc_tracker`",
        ),
    ],
)
def test_a_tracker_that_is_not_there_is_told(place: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        RpcMeasurer(place, KEY, LLVM)


def test_a_tile_that_hangs_costs_its_session_and_the_server_goes_on(tracker: str, kernel: Any) -> None:
    def endless(func: Any, target: Any, path: str) -> None:
        if path.endswith("candidate.so"):
            turn = tirx.Var("turn", "int64")
            func = func.with_body(tirx.For(turn, 0, 10**12, tirx.ForKind.SERIAL, func.body))
        serial_library(func, target, path)

    farm = RpcMeasurer(tracker, KEY, LLVM, seconds=2, library=endless)
    with farm.bench(kernel) as bench:
        began = time.monotonic()
        with pytest.raises(Unfit, match="session has expired"):
            bench.compare(kernel.default, 1)
        assert time.monotonic() - began < 25
    whole = RpcMeasurer(tracker, KEY, LLVM, library=serial_library)
    for _ in range(2):  # whichever of the two servers
        with whole.bench(kernel) as bench:
            assert bench.compare(kernel.default, 1)[1] > 0
