"""Tensors on a device: where their bytes lie, how they get there and back, when their room is free again."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DeviceError
from .device import Device, opencl
from .interpret import image_extent
from .manifest import BUFFER, STORAGE, Array

_KEPT = 4
"""Free memory that a pool keeps for reuse: at most one part in so many of the device's memory."""


class Lease:
    """Device memory that goes back to its pool when nothing refers to it any more.

    Python counts the references, so views, tuples and results that share a tensor need no bookkeeping. The
    memory may be handed on while kernels that use it still wait: they all go through one in-order queue.
    """

    __slots__ = ("handle", "key", "nbytes", "pool")

    def __init__(self, pool: Pool, key: tuple[object, ...], handle: Any, nbytes: int) -> None:
        self.pool, self.key, self.handle, self.nbytes = pool, key, handle, nbytes

    def __del__(self) -> None:
        self.pool.give_back(self)


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A value on the device: numbers for its shape, a key of `STORAGE`, a scope, and its memory."""

    shape: tuple[int, ...]
    dtype: str
    scope: str
    lease: Lease = field(repr=False)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.size * STORAGE[self.dtype].itemsize

    @property
    def handle(self) -> Any:
        """The ``pyopencl.Buffer`` or ``pyopencl.Image``."""
        return self.lease.handle

    @property
    def box(self) -> dict[str, tuple[int, int, int]]:
        """The whole image, as OpenCL's copies want it; nothing for a buffer."""
        if self.scope == BUFFER:
            return {}
        return {"origin": (0, 0, 0), "region": image_extent(self.shape, self.scope)}

    def write(self, queue: Any, array: Array) -> None:
        """Fill it with a row-major array of its size, held as `STORAGE` says. Waits for the queue."""
        if self.size:
            opencl().enqueue_copy(queue, self.handle, array, **self.box)

    def read(self, queue: Any) -> Array:
        """Its elements, held as `STORAGE` says. Waits for the queue."""
        kept = STORAGE[self.dtype]
        raw = np.zeros(self.shape, np.uint8 if self.dtype == "bool" else kept)
        if self.size:
            opencl().enqueue_copy(queue, raw, self.handle, **self.box)
        # a kernel may write any non-zero byte for true; NumPy wants exactly 1
        return raw != 0 if self.dtype == "bool" else raw


class Pool:
    """Hands out device memory and takes it back for tensors of the same form."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._free_bytes = 0
        self._free: dict[tuple[object, ...], list[Any]] = defaultdict(list)

    def tensor(self, shape: tuple[int, ...], dtype: str, scope: str, what: str) -> DeviceTensor:
        """A tensor with undefined content; at least one element large, as OpenCL has nothing smaller.

        Raises:
            DeviceError: it doesn't fit the device's limits or memory; `what` says whose it is.
        """
        limits, itemsize = self.device.info, STORAGE[dtype].itemsize
        key: tuple[object, ...]
        if scope == BUFFER:
            nbytes = max(1, math.prod(shape)) * itemsize
            key = (nbytes,)
        else:
            extent = image_extent(shape, scope)
            nbytes = math.prod(extent) * 4 * itemsize
            key = (*extent, dtype)
            if any(size > limit for size, limit in zip(extent, limits.max_image, strict=True)):
                raise DeviceError(
                    f"{what}: {scope} {shape} is an image of {extent} texels, {limits} takes at most "
                    f"{limits.max_image}; keep it in a buffer"
                )
        if nbytes > limits.max_alloc_bytes:
            raise DeviceError(f"{what}: {nbytes} bytes, {limits} allocates at most {limits.max_alloc_bytes}")
        if self._free[key]:
            handle = self._free[key].pop()
            self._free_bytes -= nbytes
        else:
            handle = self._new(key, nbytes, dtype, what)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return DeviceTensor(shape, dtype, scope, Lease(self, key, handle, nbytes))

    def _new(self, key: tuple[object, ...], nbytes: int, dtype: str, what: str) -> Any:
        cl = opencl()
        context, flags = self.device.context, cl.mem_flags.READ_WRITE
        for attempt in range(2):
            try:
                if len(key) == 1:
                    return cl.Buffer(context, flags, nbytes)
                channel = cl.channel_type.FLOAT if dtype == "float32" else cl.channel_type.HALF_FLOAT
                texel = cl.ImageFormat(cl.channel_order.RGBA, channel)
                return cl.create_image(context, flags, texel, shape=key[:3], is_array=True)
            except cl.Error as error:
                if attempt:
                    refusal = f"{self.device.info} refuses {nbytes} bytes with {self.live_bytes} in use"
                    raise DeviceError(f"{what}: {refusal} ({error})") from None
                self._free.clear()  # perhaps what lies idle is what's missing
                self._free_bytes = 0
        raise AssertionError

    def give_back(self, lease: Lease) -> None:
        """Take memory back: keep it for reuse, or let it go where enough is kept already."""
        self.live_bytes -= lease.nbytes
        if self._free_bytes + lease.nbytes <= self.device.info.memory_bytes // _KEPT:
            self._free[lease.key].append(lease.handle)
            self._free_bytes += lease.nbytes


def copy(queue: Any, source: DeviceTensor, target: DeviceTensor, pool: Pool) -> list[Any]:
    """Copy a tensor's elements, in row-major order, into another of the same size and dtype.

    Returns:
        The events of the copies: two where images of different forms go through a buffer.
    """
    cl = opencl()
    if not source.size:
        return []
    a, b = source.box, target.box
    if a and b and a != b:
        between = pool.tensor(source.shape, source.dtype, BUFFER, "a copy between images")
        return copy(queue, source, between, pool) + copy(queue, between, target, pool)
    if a and b:
        return [
            cl.enqueue_copy(
                queue,
                target.handle,
                source.handle,
                src_origin=(0, 0, 0),
                dest_origin=(0, 0, 0),
                region=a["region"],
            )
        ]
    if a or b:
        return [cl.enqueue_copy(queue, target.handle, source.handle, offset=0, **(a or b))]
    return [cl.enqueue_copy(queue, target.handle, source.handle, byte_count=source.nbytes)]
