"""OpenCL devices: which there are, which can be trusted, and what a refusal means."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeviceError
from .manifest import Kernel

DEVICE_VARIABLE = "FUSION_PATTERNS_DEVICE"
"""The environment variable that chooses a device when the caller doesn't."""

_BUSY = Kernel(
    "busy",
    """
__kernel void busy(__global float* out, int rounds) {
  float x = (float)get_global_id(0);
  for (int i = 0; i < rounds; ++i) x = mad(x, 0.5f, 1.0f);
  if (x < 0.0f) out[0] = x;
}
""",
    ("buffer", "scalar:int32"),
)
"""Takes as long as it is told to, and touches no memory."""

_TRIAL_ROUNDS = 1 << 14
_SUBMIT_SECONDS = 30e-6
"""A driver takes 5 to 10 us to hand a kernel to a GPU (seen on an H200, driver 580); with room to spare."""
_MOST_SECONDS = 0.25  # systems stop a kernel that runs for seconds

_DRIVERS = "install a driver: apt install pocl-opencl-icd (any CPU), or the GPU's own OpenCL driver"
_SYSTEM_ICDS = "/etc/OpenCL/vendors"  # where Linux keeps the list of drivers (Khronos ICD loader)


@cache
def opencl() -> Any:
    """The module ``pyopencl``, imported on first use.

    Raises:
        DeviceError: it isn't installed.
    """
    if any(Path(_SYSTEM_ICDS).glob("*.icd")):  # the loader inside pyopencl's wheel looks elsewhere
        os.environ.setdefault("OCL_ICD_VENDORS", _SYSTEM_ICDS)
    try:
        import pyopencl
    except ImportError as error:
        raise DeviceError(f"pyopencl can't be imported ({error}); pip install pyopencl") from None
    return pyopencl


def first_line(error: Exception) -> str:
    """The first line of an error of pyopencl's, which says what went wrong; how to look further follows."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class DeviceInfo:
    """What a driver says about a device. Image sizes are in texels, memory in bytes."""

    index: str
    """``"<platform>:<device>"``, as `pick_device` takes it."""
    name: str
    platform: str
    driver: str
    version: str
    kind: str
    """``"gpu"``, ``"cpu"`` or ``"other"``."""
    images: bool
    float16: bool
    float64: bool
    compute_units: int
    memory_bytes: int
    max_alloc_bytes: int
    max_work_group: int
    max_work_items: tuple[int, ...]
    max_image: tuple[int, int, int]
    """Width, height and layers of an image array."""

    def __str__(self) -> str:
        return f"{self.name} [{self.index}]"


@dataclass(eq=False)
class Device:
    """A device that has passed the probe, with its context. Made by `pick_device`."""

    info: DeviceInfo
    context: Any = field(repr=False)
    _programs: dict[str, Any] = field(default_factory=dict, repr=False)

    @contextmanager
    def hold(self, queue: Any, commands: int) -> Iterator[None]:
        """Let what is put into an OpenCL queue meanwhile wait until the device has all of it.

        A gate keeps the driver from starting before all is in the queue. Some drivers hand nothing over to the device
        before the gate opens, and a GPU that is through with a short kernel sooner than the next one reaches it seems
        to take twice as long for each: so it is kept busy while about so many ``commands`` are handed over.
        """
        cl = opencl()
        gate = cl.UserEvent(self.context)
        cl.enqueue_barrier(queue, wait_for=[gate])
        try:
            if self.info.kind == "gpu":
                self._busy.start(queue, min(commands * _SUBMIT_SECONDS, _MOST_SECONDS))
            yield
        finally:
            gate.set_status(cl.command_execution_status.COMPLETE)

    @cached_property
    def _busy(self) -> _Busy:
        return _Busy(self)

    def kernel(self, kernel: Kernel, label: str = "") -> Any:
        """A new ``pyopencl.Kernel``; each source is compiled once per process.

        Raises:
            DeviceError: it doesn't compile here, has no function of that name, or takes other arguments.
        """
        cl = opencl()
        who = f"kernel {kernel.name}{f' ({label})' if label else ''}"
        if kernel.source not in self._programs:
            self._programs[kernel.source] = self._build(kernel.source, who)
        try:
            made = cl.Kernel(self._programs[kernel.source], kernel.name)
        except cl.Error:
            raise DeviceError(f"{who}: its source has no __kernel function {kernel.name}") from None
        if made.num_args != len(kernel.args):
            raise DeviceError(f"{who}: takes {made.num_args} arguments, the manifest says {len(kernel.args)}")
        return made

    def _build(self, source: str, who: str) -> Any:
        cl = opencl()
        program = cl.Program(self.context, source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pyopencl warns whenever a compiler says anything at all
                return program.build()
        except cl.Error as error:
            log = _build_log(program, self.context.devices[0]) or str(error)
        if not self.info.float16 and re.search(r"\bcl_khr_fp16\b|\bhalf\d*\b|_imageh\b", source):
            raise DeviceError(
                f"{who}: needs float16 arithmetic, which {self.info} lacks; choose another device, "
                "or build the module in float32"
            )
        raise DeviceError(f"{who}: does not compile on {self.info}: {log}")


class _Busy:
    """Keeps a device busy for a while."""

    def __init__(self, device: Device) -> None:
        cl = opencl()
        self.kernel = device.kernel(_BUSY)
        self.out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 4)
        self.group = min(256, device.info.max_work_group)
        self.items = self.group * device.info.compute_units
        queue = cl.CommandQueue(device.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
        self._enqueue(queue, _TRIAL_ROUNDS)  # the first start of a kernel takes longer
        trial = self._enqueue(queue, _TRIAL_ROUNDS)
        queue.finish()
        self.seconds = max(trial.profile.end - trial.profile.start, 1) * 1e-9 / _TRIAL_ROUNDS

    def start(self, queue: Any, seconds: float) -> None:
        """Put into the queue what takes so long."""
        self._enqueue(queue, min(round(seconds / self.seconds), 2**31 - 1))

    def _enqueue(self, queue: Any, rounds: int) -> Any:
        self.kernel.set_args(self.out, np.int32(rounds))
        return opencl().enqueue_nd_range_kernel(queue, self.kernel, (self.items,), (self.group,))


def _build_log(program: Any, device: Any) -> str:
    """The compiler's first three complaints, on one line; errors before anything else."""
    cl = opencl()
    try:
        log = program.get_build_info(device, cl.program_build_info.LOG)
    except cl.Error:
        return ""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return " | ".join([line for line in lines if "error" in line.lower()][:3] or lines[:3])


def devices() -> list[DeviceInfo]:
    """Every device that a driver offers, in the drivers' order. None of them has been tried yet.

    Raises:
        DeviceError: pyopencl isn't installed.
    """
    return [info for info, _ in _found()]


@cache
def _found() -> list[tuple[DeviceInfo, Any]]:
    cl = opencl()
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # "platform not found": the loader knows no driver
        return []
    found = []
    for p, platform in enumerate(platforms):
        try:
            offered = platform.get_devices()
        except cl.Error:  # a driver without its hardware
            continue
        found += [(_describe(f"{p}:{d}", device), device) for d, device in enumerate(offered)]
    return found


def _describe(index: str, device: Any) -> DeviceInfo:
    kinds = opencl().device_type
    extensions = device.extensions.split()
    images = bool(device.image_support)
    return DeviceInfo(
        index=index,
        name=device.name.strip(),
        platform=device.platform.name.strip(),
        driver=device.driver_version.strip(),
        version=device.version.strip(),
        kind="gpu" if device.type & kinds.GPU else "cpu" if device.type & kinds.CPU else "other",
        images=images,
        float16="cl_khr_fp16" in extensions,
        float64="cl_khr_fp64" in extensions,
        compute_units=device.max_compute_units,
        memory_bytes=device.global_mem_size,
        max_alloc_bytes=device.max_mem_alloc_size,
        max_work_group=device.max_work_group_size,
        max_work_items=tuple(device.max_work_item_sizes),
        max_image=(device.image2d_max_width, device.image2d_max_height, device.image_max_array_size)
        if images
        else (0, 0, 0),
    )


def pick_device(spec: str | None = None) -> Device:
    """The device to run on, after it has compiled and run a small image kernel correctly.

    Args:
        spec: ``"0:1"`` (platform and device), a part of a device's or its platform's name, or None: the
            environment variable `DEVICE_VARIABLE`, else the first usable device, GPUs before others.

    Raises:
        DeviceError: no such device, or none of them is usable; says why of each, and what to do.
    """
    spec = spec or os.environ.get(DEVICE_VARIABLE) or None
    found = _found()
    if not found:
        raise DeviceError(f"no OpenCL device; {_DRIVERS}")
    wanted = sorted(
        (info for info, _ in found if spec is None or _fits(info, spec)), key=lambda info: info.kind != "gpu"
    )
    if not wanted:
        raise DeviceError(f"no OpenCL device fits {spec!r}; there are: {', '.join(str(i) for i, _ in found)}")
    reasons = []
    for info in wanted:
        usable = _probed(info.index)
        if isinstance(usable, Device):
            return usable
        reasons.append(f"{info}: {usable}")
    raise DeviceError(f"no usable OpenCL device ({'; '.join(reasons)}); {_DRIVERS}")


def _fits(info: DeviceInfo, spec: str) -> bool:
    if re.fullmatch(r"\d+:\d+", spec):
        return info.index == spec
    return spec.lower() in f"{info.name} {info.platform}".lower()


_PROBE = Kernel(
    "probe",
    """
__kernel void probe(read_only image2d_array_t source, write_only image2d_array_t target) {
  int4 at = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);
  write_imagef(target, at, read_imagef(source, at) * 2.0f);
}
""",
    ("image_read", "image_write"),
)


@cache
def _probed(index: str) -> Device | str:
    """The device, or why it can't be used. Drivers exist that list a device and compile nothing for it."""
    cl = opencl()
    info, raw = next(pair for pair in _found() if pair[0].index == index)
    if not info.images:
        return "has no images"
    try:
        device = Device(info, cl.Context([raw]))
        queue = cl.CommandQueue(device.context)
        kernel = device.kernel(_PROBE)
        texel = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.FLOAT)
        for layers in (1, 2):  # an array of one layer is a case of its own for some drivers
            width, height = 3, 2
            extent = (width, height, layers)
            source, target = (
                cl.create_image(device.context, cl.mem_flags.READ_WRITE, texel, shape=extent, is_array=True)
                for _ in range(2)
            )
            given = np.arange(layers * height * width * 4, dtype=np.float32)
            got = np.zeros_like(given)
            cl.enqueue_copy(queue, source, given, origin=(0, 0, 0), region=extent)
            kernel.set_args(source, target)
            cl.enqueue_nd_range_kernel(queue, kernel, extent, None)
            cl.enqueue_copy(queue, got, target, origin=(0, 0, 0), region=extent)
            if not np.array_equal(got, given * 2):
                return "computes wrong results with images"
    except (cl.Error, DeviceError) as error:
        return str(error).partition("\n")[0]
    return device
