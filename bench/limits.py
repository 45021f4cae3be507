"""What a device can do at best, to say how far a kernel is from it: measured, not read from a data sheet.

Needs NumPy and pyopencl, like everything that runs on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusion_patterns.errors import DeviceError
from fusion_patterns.run import Device
from fusion_patterns.run.device import first_line, opencl
from fusion_patterns.run.manifest import Kernel

__all__ = ["Limits", "measure_limits"]

COPY_BYTES = 256 << 20  # more than any cache holds
GROUP = 256
GROUPS_PER_UNIT = 32
ROUNDS = 1024
CHAINS = 8
# a GPU is served with any, a CPU needs wide vectors and fma, which some GPUs only imitate
FORMS = tuple((width, function) for width in (4, 8, 16) for function in ("mad", "fma"))
NOTHING = Kernel("nothing", "__kernel void nothing(__global float* out) {}", ("buffer",))


@dataclass(frozen=True)
class Limits:
    """The limits of a device.

    ``copy``: bytes that a large copy reads and writes in a second, both counted. ``peak``: float32 operations in a
    second, a multiply-add being two. ``floor``: seconds that a kernel takes which does nothing.
    """

    copy: float
    peak: float
    floor: float


def measure_limits(device: Device, repeats: int = 5) -> Limits:
    """Measure a device by event times: the best of ``repeats`` for rates, the median of 20 times as many for the floor.

    Raises :class:`DeviceError` where the device does not compile the kernels or has not the memory.
    """
    try:
        return _measured(device, repeats)
    except opencl().Error as error:
        raise DeviceError(f"the limits of {device.info} can't be measured: {first_line(error)}") from None


def _measured(device: Device, repeats: int) -> Limits:
    cl = opencl()
    timed = cl.command_queue_properties.PROFILING_ENABLE
    queue = cl.CommandQueue(device.context, properties=timed)
    size = min(COPY_BYTES, device.info.max_alloc_bytes // 4)
    source, target = (cl.Buffer(device.context, cl.mem_flags.READ_WRITE, size) for _ in range(2))
    for buffer in (source, target):  # memory that nobody has written may not be there yet
        cl.enqueue_fill_buffer(queue, buffer, bytes(4), 0, size)
    copies = seconds(device, queue, lambda: cl.enqueue_copy(queue, target, source, byte_count=size), repeats)
    group = min(GROUP, device.info.max_work_group)
    nothing = device.kernel(NOTHING)
    nothing.set_args(target)
    empty = seconds(device, queue, lambda: start(queue, nothing, group, group), 20 * repeats)
    items = group * min(GROUPS_PER_UNIT * device.info.compute_units, size // 4 // group)
    peak = 0.0
    for width, function in FORMS:
        kernel = device.kernel(multiply_adds(width, function))
        kernel.set_args(target)
        times = seconds(device, queue, partial(start, queue, kernel, items, group), repeats)
        peak = max(peak, 2.0 * width * CHAINS * ROUNDS * items / min(times))
    return Limits(copy=2 * size / min(copies), peak=peak, floor=statistics.median(empty))


def start(queue: Any, kernel: Any, items: int, group: int) -> Any:
    """Start a kernel on so many work items, in groups of ``group``; returns its event."""
    return opencl().enqueue_nd_range_kernel(queue, kernel, (items,), (group,))


def multiply_adds(width: int, function: str) -> Kernel:
    """A kernel of independent chains of multiply-adds (``mad`` or ``fma``) on vectors of ``width`` floats."""
    kind, chains = f"float{width}", range(CHAINS)
    start = "\n".join(f"  {kind} v{i} = ({kind})(x + {i});" for i in chains)
    steps = " ".join(f"v{i} = {function}(v{i}, a, b);" for i in chains)
    total = " + ".join(f"v{i}" for i in chains)
    lanes = " + ".join(f"s.s{lane:x}" for lane in range(width))
    source = f"""
__kernel void {function}{width}(__global float* out) {{
  float x = (float)get_global_id(0) * 1e-6f;
  {kind} a = ({kind})(0.5f + x), b = ({kind})(0.25f);
{start}
  for (int i = 0; i < {ROUNDS}; ++i) {{ {steps} }}
  {kind} s = {total};
  out[get_global_id(0)] = {lanes};
}}
"""
    return Kernel(f"{function}{width}", source, ("buffer",))


def seconds(device: Device, queue: Any, begin: Callable[[], Any], count: int) -> list[float]:
    """Event times of ``count`` starts, all in the queue before the first begins; one more goes before to warm up."""
    begin()
    queue.finish()
    with device.hold(queue, count):
        events = [begin() for _ in range(count)]
    queue.finish()
    return [max(event.profile.end - event.profile.start, 1) * 1e-9 for event in events]
