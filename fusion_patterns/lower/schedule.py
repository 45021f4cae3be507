"""The schedule rule of packed kernels: one kernel, nothing in global scratch, whole texels stored.

A fused composite is ``[pad] -> reduction -> epilogue`` or only an epilogue. The epilogue is inlined into the block
that writes the result; what it reads more than once stays in registers. The reduction, its padded input and its
weights are computed in registers inside the thread's tile. Every access to a texture moves four lanes at once.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.s_tir.dlight.base import ScheduleRule
from tvm_ffi import structural_walk

from ..place.profiles import Tiles
from .split import REDUCE, inside, split_sums
from .tiles import DEFAULT, Tile, Work, choose_plain, choose_pool, choose_tile

__all__ = ["KERNEL_ATTR", "PackedKernel", "PlainLoops", "schedule_packed"]

KERNEL_ATTR = "fusion_patterns.kernel"
LANES = 4
DATA_RANK = 5
SPLITTABLE = ("conv2d_packed",)
POOLS = ("global_pool",)
MOST_COPIES = 3
MAX_KERNEL_ROW = 5  # a thread slides such a kernel over an input row that it keeps in registers


class PackedKernel(ScheduleRule):  # type: ignore[misc]
    """Schedules PrimFuncs that carry the attribute ``fusion_patterns.kernel``; leaves all others alone.

    ``lanes_apart``: compute the epilogue lane by lane in registers and store the four together, for ops that TVM can't
    vectorize (``erf``).
    """

    def __init__(self, lanes_apart: bool = False, tiles: Tiles = DEFAULT) -> None:
        super().__init__()
        self.lanes_apart, self.tiles = lanes_apart, tiles

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule of the fused kernel, or ``None`` if it is not one of ours."""
        if not isinstance(func, tirx.PrimFunc) or not func.attrs or KERNEL_ATTR not in func.attrs:
            return None
        limit = int(target.attrs.get("max_threads_per_block", target.attrs.get("max_num_threads", 256)))
        return schedule_packed(func, limit, lanes_apart=self.lanes_apart, tiles=self.tiles)


class PlainLoops(ScheduleRule):  # type: ignore[misc]
    """The last resort for what no rule of TVM's schedules: a kernel for each stage, a thread for each of its results.

    Pooling to windows of unequal size is such a case: its sums have bounds that change from window to window.
    """

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule that binds the loops over results, and leaves everything inside as it is."""
        if not isinstance(func, tirx.PrimFunc):
            return None
        sch = s_tir.Schedule(func)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            kinds = [int(v.iter_type) for v in sch.get(block).iter_vars]
            loops = list(sch.get_loops(block))
            results = [loop for loop, kind in zip(loops, kinds, strict=False) if kind != REDUCE]
            if not results:
                results = [sch.add_unit_loop(block)]
            else:
                sch.reorder(*results, *(loop for loop in loops if loop not in results))
            outer, inner = sch.split(sch.fuse(*results), [None, 64])
            sch.bind(outer, "blockIdx.x")
            sch.bind(inner, "threadIdx.x")
        return sch


def schedule_packed(
    func: Any,
    max_threads: int,
    tile: Tile | None = None,
    *,
    lanes_apart: bool = False,
    tiles: Tiles = DEFAULT,
) -> s_tir.Schedule:
    """Schedule one packed kernel.

    ``max_threads`` is the largest work group of the target; ``tile`` overrides the choice by ``tiles``.
    """
    return _Kernel(s_tir.Schedule(func), max_threads, tile, lanes_apart, tiles).run()


class _Kernel:
    def __init__(
        self, sch: s_tir.Schedule, max_threads: int, tile: Tile | None, lanes_apart: bool, tiles: Tiles
    ) -> None:
        self.sch, self.max_threads, self.tile = sch, max_threads, tile
        self.lanes_apart, self.tiles = lanes_apart, tiles
        root = sch.get_sblock("root")
        self.blocks = list(sch.get_child_blocks(root))
        self.reductions = [b for b in self.blocks if self._is_reduction(b)]

    def run(self) -> s_tir.Schedule:
        sch = self.sch
        last = self.blocks[-1]
        pads = {id(r): self._pad_of(r) for r in self.reductions}
        stages = self._inline([p for p in pads.values() if p is not None])
        if self._is_reduction(last):
            last = sch.cache_write(last, 0, "local")
        elif self.lanes_apart:
            stages.append(last)
            last = sch.cache_write(last, 0, "local")
        shape = tuple(int(d) for d in sch.get(last).writes[0].source.ty.shape)
        if len(shape) != DATA_RANK:
            return self._flat_result(last, shape)
        names = [str(sch.get(block).name_hint) for block in self.reductions]
        tile = self.tile or self._choose(shape, names, even=bool(stages))
        if tile.split > 1:
            sums = [(reduction, self._share_axis(reduction)) for reduction in self.reductions]
            parts = split_sums(sch, last, sums, tile, lambda loop: self._finish(stages, loop))
            for reduction, (partial, inner) in zip(self.reductions, parts, strict=True):
                self._reduce(partial, pads[id(reduction)], inner)
            return sch
        thread = self._tile(last, tile)
        self._finish(stages, thread)
        for reduction in reversed(self.reductions):
            self._reduce(reduction, pads[id(reduction)], thread)
        return sch

    def _choose(self, shape: tuple[int, ...], names: list[str], *, even: bool) -> Tile:
        """The tile by the device's profile and what the reductions allow."""
        work = Work(shape, sums=len(names), even=even)
        if names and all(name.startswith(POOLS) for name in names):
            return choose_pool(work, gcd(*map(self._shares, self.reductions)), self.max_threads, self.tiles)
        if not any(name.startswith("conv2d") for name in names):
            return choose_plain(work, self.max_threads, self.tiles)
        shares = 1
        if all(name.startswith(SPLITTABLE) for name in names):
            shares = gcd(*map(self._shares, self.reductions))
        return choose_tile(
            work,
            self.max_threads,
            self.tiles,
            # a tile must not reach into the next group
            most_blocks=1 if any(name.startswith("conv2d_packed_grouped") for name in names) else 4,
            # neighbours in a transposed convolution start from different rows and columns of the kernel
            most_columns=1 if any(name.startswith("conv2d_transpose") for name in names) else 14,
            shares=shares,
        )

    def _shares(self, reduction: Any) -> int:
        """Into how many shares a reduction can be cut."""
        block = self.sch.get(reduction)
        extents = [int(v.dom.extent) for v in block.iter_vars if int(v.iter_type) == REDUCE]
        return prod(extents) if str(block.name_hint).startswith(POOLS) else extents[0]

    def _share_axis(self, reduction: Any) -> Any:
        """The loop that is cut into shares: the blocks of input channels, or a pool's pixels."""
        loops = self.sch.get_loops(reduction)
        if str(self.sch.get(reduction).name_hint).startswith(POOLS):
            return self.sch.fuse(*loops[DATA_RANK:])
        return loops[DATA_RANK]

    def _finish(self, stages: list[Any], thread: Any) -> None:
        """Compute what the epilogue reads more than once in registers of the thread that writes the result."""
        sch = self.sch
        for stage in reversed(stages):
            sch.set_scope(stage, 0, "local")
            sch.compute_at(stage, thread)
            self._vectorize_tail(stage, thread, apart=self.lanes_apart)

    # Reading the function -----------------------------------------------------------------------------------

    def _is_reduction(self, block: Any) -> bool:
        return any(int(v.iter_type) == REDUCE for v in self.sch.get(block).iter_vars)

    def _pad_of(self, reduction: Any) -> Any:
        """The block that pads a reduction's input, if there is one."""
        for producer in self.sch.get_producers(reduction):
            if not self._is_reduction(producer):
                return producer
        return None

    def _inline(self, pads: list[Any]) -> list[Any]:
        """Inline the epilogue; returns the blocks that are read more than once and stay."""
        sch, kept = self.sch, []
        names = {sch.get(b).name_hint for b in pads}
        for block in reversed(self.blocks[:-1]):
            if self._is_reduction(block) or sch.get(block).name_hint in names:
                continue
            if self._reads(block) <= (MOST_COPIES if self._is_cheap(block) else 1):
                sch.compute_inline(block)
            else:
                kept.append(block)
        return list(reversed(kept))

    def _is_cheap(self, block: Any) -> bool:
        """Whether a block does arithmetic on what a reduction computed, such as adding the bias, and no more.

        To compute that twice costs less than to keep it: see ``Work.even``.
        """
        producers = self.sch.get_producers(block)
        if not producers or not all(self._is_reduction(producer) for producer in producers):
            return False
        calls: list[Any] = []
        structural_walk(self.sch.get(block).body, (Call, calls.append))
        return not calls

    def _reads(self, block: Any) -> int:
        """How often the value of a block is loaded by the blocks that read it."""
        buffer = self.sch.get(block).writes[0].source
        count = 0

        def visit(node: Any) -> None:
            nonlocal count
            count += bool(node.source.same_as(buffer))

        for consumer in self.sch.get_consumers(block):
            structural_walk(self.sch.get(consumer).body, (TensorLoad, visit))
        return count

    # Writing the result -------------------------------------------------------------------------------------

    def _tile(self, last: Any, tile: Tile) -> Any:
        """Tile and bind the loops of the last block; returns the innermost thread loop."""
        sch = self.sch
        n, c, y, x, lane = sch.get_loops(last)
        c, c_in = sch.split(c, [None, tile.blocks])
        y, y_in = sch.split(y, [None, tile.rows])
        x, x_in = sch.split(x, [None, tile.columns])
        z = sch.fuse(n, c)
        z, z_thread = sch.split(z, [None, tile.group[0]])
        y, y_thread = sch.split(y, [None, tile.group[1]])
        x, x_thread = sch.split(x, [None, tile.group[2]])
        sch.reorder(z, y, x, z_thread, y_thread, x_thread, c_in, y_in, x_in, lane)
        for loop, axis in ((z, "z"), (y, "y"), (x, "x")):
            sch.bind(loop, f"blockIdx.{axis}")
        for loop, axis in ((z_thread, "z"), (y_thread, "y"), (x_thread, "x")):
            sch.bind(loop, f"threadIdx.{axis}")
        for loop in (c_in, y_in, x_in):
            sch.unroll(loop)
        sch.vectorize(lane)
        return x_thread

    def _flat_result(self, last: Any, shape: tuple[int, ...]) -> s_tir.Schedule:
        """A result that is not data: one element for each thread, or one texel of a packed weight."""
        sch = self.sch
        *loops, lane = sch.get_loops(last)
        if shape[-1] == LANES and len(shape) > DATA_RANK:
            sch.vectorize(lane)
        else:
            loops.append(lane)
        loop = sch.fuse(*loops)
        extent = int(sch.get(loop).extent)
        outer, inner = sch.split(loop, [None, min(64, self.max_threads, extent)])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
        return sch

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

    # The reduction ------------------------------------------------------------------------------------------

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
        if len(reduce) == 1:
            self._reduce_pixels(block, pad, spatial, reduce[0], thread)
            return
        by_lane = name.startswith(("conv2d_packed", "conv2d_transpose"))
        *outer, ky, kx = reduce[:-1] if by_lane else reduce
        inner = reduce[-1:] if by_lane else []
        sch.reorder(*outer, ky, kx, *tile, *inner, lane)
        row = 1 < int(sch.get(kx).extent) <= MAX_KERNEL_ROW
        data_loop = ky if row else kx
        if pad is not None:
            sch.set_scope(pad, 0, "local")
            sch.compute_at(pad, data_loop)
            self._vectorize_tail(pad, data_loop)
        else:
            self._cache(block, 0, data_loop)
        if name.startswith(("conv2d_packed", "conv2d_depthwise")):
            # a transposed convolution guards its weights: read in place, they are vectors as well
            self._cache(block, 1, kx)
        if row:
            sch.unroll(kx)
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

    def _cache(self, block: Any, read: int, loop: Any) -> None:
        """Read an operand of the reduction by texels, into registers, inside ``loop``."""
        copy = self.sch.cache_read(block, self._operand(block, read), "local", consumer_blocks=[block])
        self.sch.compute_at(copy, loop)
        self._vectorize_tail(copy, loop)

    def _operand(self, block: Any, read: int) -> int:
        """The number of the read region of data (0) or weight (1): the one that is the result is not counted."""
        written = self.sch.get(block).writes[0].source
        numbers = [
            i for i, region in enumerate(self.sch.get(block).reads) if not region.source.same_as(written)
        ]
        return numbers[read]

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
