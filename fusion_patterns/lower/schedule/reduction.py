"""Sums and maxima of a thread's tile, in registers: every access to a texture moves four lanes at once."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from .blocks import Blocks
from .split import REDUCE, inside

__all__ = ["CHANNEL_POOL", "UNEQUAL", "Reductions"]

UNEQUAL = "pool2d_adaptive"
CHANNEL_POOL = "channel_pool"
MAX_KERNEL_ROW = 5  # a thread slides such a kernel over an input row that it keeps in registers


class Reductions(Blocks):
    """The blocks of a kernel, and how a thread computes those that sum.

    ``lanes_apart``: the epilogue is computed lane by lane, for ops that TVM can't vectorize.
    """

    def __init__(self, sch: s_tir.Schedule, lanes_apart: bool) -> None:
        super().__init__(sch)
        self.lanes_apart = lanes_apart

    def _reduce(self, block: Any, pad: Any, thread: Any) -> None:
        sch = self.sch
        name = sch.get(block).name_hint
        kinds = [int(v.iter_type) for v in sch.get(block).iter_vars]
        reduce_count = sum(kind == REDUCE for kind in kinds)
        sch.set_scope(block, 0, "local")
        sch.compute_at(block, thread, preserve_unit_loops=True)
        loops = self._inside(block, thread)
        spatial, reduce = loops[: len(loops) - reduce_count], loops[len(loops) - reduce_count :]
        tile, lane = spatial[:-1], spatial[-1]
        if name.startswith("conv2d_gathered"):
            self._reduce_gathered(block, pad, spatial, reduce)
            return
        if name.startswith(CHANNEL_POOL):
            self._reduce_channels(block, pad, spatial, reduce[0], thread)
            return
        if len(reduce) == 1:
            self._reduce_pixels(block, pad, spatial, reduce[0], thread)
            return
        by_lane = name.startswith(("conv2d_packed", "conv2d_transpose"))
        *outer, ky, kx = reduce[:-1] if by_lane else reduce
        inner = reduce[-1:] if by_lane else []
        sch.reorder(*outer, ky, kx, *tile, *inner, lane)
        # windows of unequal size begin anywhere: TVM does not see how far a row of them reaches
        row = 1 < int(sch.get(kx).extent) <= MAX_KERNEL_ROW and not name.startswith(UNEQUAL)
        data_loop = ky if row else kx
        if pad is not None:
            sch.set_scope(pad, 0, "local")
            sch.compute_at(pad, data_loop)
            self._vectorize_tail(pad, data_loop, apart=self.lanes_apart)
        else:
            self._cache(block, 0, data_loop)
        if name.startswith(("conv2d_packed", "conv2d_depthwise")):
            # a transposed convolution guards its weights: read in place, they are vectors as well
            self._cache(block, 1, kx)
        if row:
            sch.unroll(kx)
            if name.startswith("pool2d") and int(sch.get(ky).extent) <= MAX_KERNEL_ROW:
                sch.unroll(ky)  # its loads wait for each other otherwise, and there is little else to do
        for loop in (*tile, *inner):
            sch.unroll(loop)
        sch.vectorize(lane)
        first = [*outer, ky, kx][0]
        init = sch.decompose_reduction(block, first)
        self._vectorize_tail(init, thread)

    def _reduce_pixels(self, block: Any, pad: Any, spatial: list[Any], pixels: Any, thread: Any) -> None:
        """A share of an image's pixels, one after the other."""
        sch = self.sch
        if pad is not None:
            sch.compute_inline(pad)
        sch.reorder(*spatial[:-1], pixels, spatial[-1])
        self._cache(block, 0, pixels)
        sch.vectorize(spatial[-1])
        init = sch.decompose_reduction(block, pixels)
        self._vectorize_tail(init, thread)

    def _reduce_channels(self, block: Any, pad: Any, spatial: list[Any], channels: Any, thread: Any) -> None:
        """A window of channels: its blocks in registers, from which every lane takes its own."""
        sch = self.sch
        sch.set_scope(pad, 0, "local")
        sch.compute_at(pad, thread, preserve_unit_loops=True)
        self._vectorize_tail(pad, thread, apart=self.lanes_apart)
        sch.reorder(*spatial[:-1], channels, spatial[-1])
        for loop in (*spatial, channels):
            sch.unroll(loop)
        init = sch.decompose_reduction(block, channels)
        self._vectorize_tail(init, thread)

    def _cache(self, block: Any, read: int, loop: Any) -> None:
        """Read an operand of the reduction by texels, into registers, inside ``loop``."""
        copy = self.sch.cache_read(block, self._operand(block, read), "local", consumer_blocks=[block])
        self.sch.compute_at(copy, loop)
        self._vectorize_tail(copy, loop)

    def _reduce_gathered(self, block: Any, pad: Any, spatial: list[Any], reduce: list[Any]) -> None:
        """Groups that four does not divide: every lane gathers its own channels."""
        sch = self.sch
        if pad is not None:
            sch.compute_inline(pad)
        for loop in spatial:
            sch.unroll(loop)
        sch.reorder(*reduce, *spatial)
        init = sch.decompose_reduction(block, reduce[0])
        for loop in self._inside(init, self.sch.get_loops(block)[0])[-1:]:
            sch.unroll(loop)

    def _finish(self, stages: list[Any], thread: Any) -> None:
        """Compute what the epilogue reads more than once in registers of the thread that writes the result."""
        sch = self.sch
        for stage in reversed(stages):
            sch.set_scope(stage, 0, "local")
            sch.compute_at(stage, thread)
            self._vectorize_tail(stage, thread, apart=self.lanes_apart)

    def _vectorize_tail(self, block: Any, thread: Any, *, apart: bool = False) -> None:
        """Lanes in one vector, everything between them and the thread unrolled."""
        loops = self._inside(block, thread)
        for loop in loops[:-1]:
            self.sch.unroll(loop)
        if apart:
            self.sch.unroll(loops[-1])
        else:
            self.sch.vectorize(loops[-1])

    def _inside(self, block: Any, loop: Any) -> list[Any]:
        return inside(self.sch, block, loop)
