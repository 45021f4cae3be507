"""The schedule rule of packed kernels: one kernel, nothing in global scratch, whole texels stored.

A fused composite is ``[pad] -> reduction -> epilogue`` or only an epilogue. The epilogue is inlined into the block
that writes the result; what it reads more than once stays in registers. The reduction, its padded input and its
weights are computed in registers inside the thread's tile. Every access to a texture moves four lanes at once.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir.dlight.base import ScheduleRule

from ...place.anchors import ROW_RANK
from ...place.layouts import LANES
from ...place.profiles import Tiles
from ..compute.group_norm import GROUP_NORM
from ..compute.layer_norm import SUMS
from ..compute.pooling import REACH, STRIDES
from .costs import cheapest_tile
from .guards import channel_axis, guard_lanes, without_guard
from .layer_norm import choose_norm, schedule_norm
from .local_memory import check_local_memory
from .pooled import schedule_pooled
from .reduction import Reductions
from .split import REDUCE, split_sums
from .tiles import (
    DEFAULT,
    FEW_SHARES,
    TEXEL_BYTES,
    Tile,
    Work,
    choose_gated,
    choose_plain,
    choose_pooled,
    choose_tile,
    choose_vectors,
    divisor,
)
from .tuned import Space, TileFault
from .vectors import Image, Sum, schedule_groups, schedule_vectors
from .windows import Windows, choose_cut, schedule_windows

__all__ = ["KERNEL_ATTR", "PackedKernel", "max_threads", "schedule_packed", "tile_space"]

KERNEL_ATTR = "fusion_patterns.kernel"
DATA_RANK = 5
SPLITTABLE = ("conv2d_packed",)
POOLS = ("global_pool",)
MAXIMA = "window_max"
DENSE = "dense"
NORM_PARTS = ("norm_mean", "norm_scale")
UNPACK = "unpack"
FEWEST_THREADS = 32
"""A work group of fewer would sum for long."""


class PackedKernel(ScheduleRule):  # type: ignore[misc]
    """Schedules PrimFuncs that carry the attribute ``fusion_patterns.kernel``; leaves all others alone.

    ``lanes_apart``: compute the epilogue lane by lane in registers and store the four together, for ops that TVM can't
    vectorize (``erf``). ``tile`` overrides the choice by ``tiles``; :class:`TileFault` if the kernel does not allow it.
    """

    def __init__(self, lanes_apart: bool = False, tiles: Tiles = DEFAULT, tile: Tile | None = None) -> None:
        super().__init__()
        self.lanes_apart, self.tiles, self.tile = lanes_apart, tiles, tile

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """A schedule of the fused kernel, or ``None`` if it is not one of ours."""
        if not isinstance(func, tirx.PrimFunc) or not func.attrs or KERNEL_ATTR not in func.attrs:
            return None
        limit = max_threads(target)
        return schedule_packed(func, limit, self.tile, lanes_apart=self.lanes_apart, tiles=self.tiles)


def max_threads(target: Any) -> int:
    """Work items of the target's largest work group."""
    return int(target.attrs.get("max_threads_per_block", target.attrs.get("max_num_threads", 256)))


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
    Raises :class:`TileFault` if the kernel does not allow the tile.
    """
    return _kernel(func, max_threads, tile, lanes_apart, tiles).run()


def tile_space(
    func: Any, max_threads: int, *, lanes_apart: bool = False, tiles: Tiles = DEFAULT
) -> Space | None:
    """Which tiles a packed kernel allows; ``None`` if its schedule has no tile to choose."""
    kernel = _kernel(func, max_threads, None, lanes_apart, tiles)
    kernel.run()
    return kernel.space


def _kernel(func: Any, max_threads: int, tile: Tile | None, lanes_apart: bool, tiles: Tiles) -> _Kernel:
    kernel = _Kernel(s_tir.Schedule(func), max_threads, tile, lanes_apart, tiles)
    if not (kernel.has_few_results() or kernel.norm_sums() or kernel.maxima or kernel.normalises_groups()):
        return kernel
    # casts between indices of two widths would hide from TVM what a thread reads
    narrow = tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]
    return _Kernel(s_tir.Schedule(narrow), max_threads, tile, lanes_apart, tiles)


class _Kernel(Reductions):
    def __init__(
        self, sch: s_tir.Schedule, max_threads: int, tile: Tile | None, lanes_apart: bool, tiles: Tiles
    ) -> None:
        super().__init__(sch, lanes_apart)
        self.max_threads, self.tile, self.tiles = max_threads, tile, tiles
        self.space: Space | None = None
        self.maxima = [b for b in self.blocks if str(sch.get(b).name_hint) == MAXIMA]
        *others, last = self.blocks
        self.is_plain = (
            bool(others)
            and str(sch.get(last).name_hint) == UNPACK
            and len(self._shape(others[-1])) == DATA_RANK
        )
        """Whether the result is written as the module has it: lane by lane, each into an image of its own."""
        self.guarded = ""
        """The block that writes lanes of which the result's last block of channels has fewer than four."""
        self.channel_axis = 1
        """On which axis a result that is written as the module has it has its channels."""

    def run(self) -> s_tir.Schedule:
        """Schedule the kernel."""
        sch = self._run()
        if self.guarded:
            guard_lanes(sch, self.guarded, self.channel_axis)
        return sch

    def _run(self) -> s_tir.Schedule:
        sch, few = self.sch, self.has_few_results()
        if self.normalises_groups():
            return self._group_norm()
        unpack = self.blocks.pop() if self.is_plain else None
        last = self.blocks[-1]
        if self.norm_sums():
            return self._layer_norm(last, unpack)
        pads = {id(r): self._pad_of(r) for r in self.reductions}
        for key, pad in pads.items():
            if pad is not None and self._is_shared(pad):
                pads[key] = None
        inner = self._inner() if self.maxima else None
        kept = [*pads.values(), inner.pixel if inner else None]
        stages = self._inline([block for block in kept if block is not None], self._gates() if few else [])
        if self._is_reduction(last):
            last = sch.cache_write(last, 0, "local")
        elif self.lanes_apart and len(self._shape(last)) > ROW_RANK:
            stages.append(last)
            last = sch.cache_write(last, 0, "local")
        shape = self._shape(last)
        if unpack is not None:
            self._write_plain(last, unpack)
        if inner is not None:
            return self._windows(last, shape, stages, inner, pads)
        if few:
            return self._vectors(last, shape, pads, stages)
        if len(shape) != DATA_RANK:
            return self._flat_result(last, shape)
        if self._averages_a_convolution():
            return self._pooled(last, stages, pads)
        return self._tiled(last, shape, stages, pads)

    def _write_plain(self, last: Any, unpack: Any) -> None:
        """Write the result where ``unpack`` would, lane by lane, before anything is guarded.

        TVM would put the guard of the lanes in place of any other. Nor does it see what a thread reads of a block
        behind such a guard: it is taken away, and comes back at the end.
        """
        sch = self.sch
        self.channel_axis = channel_axis(sch, unpack)
        channels = self._shape(unpack)[self.channel_axis]
        sch.reverse_compute_inline(unpack)
        if channels > LANES and channels % LANES:
            without_guard(sch, last)
            self.guarded = str(sch.get(last).name_hint)

    def _tiled(
        self, last: Any, shape: tuple[int, ...], stages: list[Any], pads: dict[int, Any]
    ) -> s_tir.Schedule:
        """A thread computes a tile of the result, or a share of each sum of it."""
        sch = self.sch
        names = [str(sch.get(block).name_hint) for block in self.reductions]
        if "pool2d_max" in names and len(names) > 1:
            # each thread would compute all pixels of its windows for itself
            raise ValueError(
                "its windows reach beyond the image, where an operand of the epilogue has nothing"
            )
        tile = self._tile_in(self._choose(shape, names, even=bool(stages)))
        if tile.split > 1:
            sums = [(reduction, self._share_axis(reduction)) for reduction in self.reductions]
            parts = split_sums(
                sch, last, sums, tile, lambda loop: self._finish(stages, loop), whole=not self.is_plain
            )
            for reduction, (partial, inner) in zip(self.reductions, parts, strict=True):
                self._reduce(partial, pads[id(reduction)], inner)
            return sch
        thread = self._tile(last, tile)
        self._finish(stages, thread)
        for reduction in reversed(self.reductions):
            self._reduce(reduction, pads[id(reduction)], thread)
        return sch

    def _tile_in(self, space: Space) -> Tile:
        """The tile that was given, if the kernel allows it, or the one by the profile."""
        self.space = space
        fault = space.why_not(self.tile) if self.tile else None
        if fault:
            raise TileFault(fault)
        return self.tile or space.chosen

    def _choose(self, shape: tuple[int, ...], names: list[str], *, even: bool) -> Space:
        """The tile by the device's profile, and which others the reductions allow."""
        work = Work(shape, sums=len(names), even=even)
        limits = self.max_threads, self.tiles.local_bytes
        if not any(name.startswith("conv2d") for name in names):
            return Space(work, choose_plain(work, self.max_threads, self.tiles), *limits)
        # a tile must not reach into the next group
        grouped = any(name.startswith("conv2d_packed_grouped") for name in names)
        shares = 1
        if all(name.startswith(SPLITTABLE) for name in names):
            shares = gcd(*map(self._shares, self.reductions))
            if self.tiles.machine and not grouped:
                # blocks of four products
                steps = sum(prod(self._extents(reduction)) for reduction in self.reductions) // LANES
                chosen = cheapest_tile(work, steps, shares, self.max_threads, self.tiles)
                return Space(work, chosen, *limits, shares)
        # neighbours in a transposed convolution start from different rows and columns of the kernel
        transposed = any(name.startswith("conv2d_transpose") for name in names)
        chosen = choose_tile(
            work,
            self.max_threads,
            self.tiles,
            most_blocks=1 if grouped else 4,
            most_columns=1 if transposed else 14,
            shares=shares,
        )
        return Space(work, chosen, *limits, shares, joins_blocks=not grouped, joins_pixels=not transposed)

    def _extents(self, reduction: Any) -> list[int]:
        """How far each of the loops goes that a reduction sums over."""
        axes = self.sch.get(reduction).iter_vars
        return [int(axis.dom.extent) for axis in axes if int(axis.iter_type) == REDUCE]

    def _shares(self, reduction: Any) -> int:
        """Into how many shares a reduction can be cut."""
        extents = self._extents(reduction)
        is_pool = str(self.sch.get(reduction).name_hint).startswith(POOLS)
        return prod(extents) if is_pool else extents[0]

    def _share_axis(self, reduction: Any) -> Any:
        """The loop that is cut into shares: the blocks of input channels."""
        return self.sch.get_loops(reduction)[DATA_RANK]

    # Sums with few results ----------------------------------------------------------------------------------

    def has_few_results(self) -> bool:
        """Whether the kernel is one of sums over whole images or over the channels of one pixel."""
        names = [str(self.sch.get(block).name_hint) for block in self.reductions]
        if not names or not all(name.startswith((*POOLS, *SPLITTABLE, DENSE)) for name in names):
            return False
        if any(prod(self._shape(block)[2:-1]) > 1 for block in self.reductions):
            return False
        for name, block in zip(names, self.reductions, strict=True):
            extents = self._extents(block)
            if name.startswith("conv2d_packed_grouped") or (
                name.startswith(SPLITTABLE) and prod(extents[1:3]) > 1
            ):
                return False
        return all(self._reads_a_sum(block) for block in self.reductions[1:])

    def _reads_a_sum(self, block: Any) -> bool:
        """Whether a block reads what some reduction computed."""
        return any(
            self._is_reduction(producer) or self._reads_a_sum(producer)
            for producer in self.sch.get_producers(block)
        )

    def _vectors(
        self, last: Any, shape: tuple[int, ...], pads: dict[int, Any], kept: list[Any]
    ) -> s_tir.Schedule:
        """See :mod:`.vectors`. The tile says how the last sum is cut; those before it are cut for as many threads."""
        sch, final = self.sch, self.reductions[-1]
        work = Work((*self._shape(final)[:2], 1, 1, LANES), sums=len(self.reductions))
        shares, image = self._shares(final), None
        if self._is_image(last):
            registers = [block for block in kept if self._is_image(block)]
            work = Work(shape, sums=len(self.reductions))
            inputs = sum(self._products(block) for block in self.reductions)
            tile, areas = choose_gated(work, inputs, shares, self.max_threads, self.tiles)
            split = divisor(shares, tile.split)
            image = Image(areas, not self.is_plain, lambda thread: self._finish(registers, thread))
        else:
            most = self.tiles.sum_group or self.max_threads
            chosen = choose_vectors(work, shares, most, self.tiles)
            limits = most, self.tiles.local_bytes
            tile = self._tile_in(Space(work, chosen, *limits, shares, joins_blocks=False, joins_pixels=False))
            split = tile.split
        for pad in pads.values():
            if pad is not None and not self._reads_a_sum(pad):
                sch.compute_inline(pad)
        *stages, _ = sch.get_child_blocks(sch.get_sblock("root"))
        name = sch.get(final).name_hint
        parts = [
            self._sum(block, tile, split if sch.get(block).name_hint == name else None)
            if self._is_reduction(block)
            else block
            for block in stages
            if not self._is_image(block)
        ]
        check_local_memory(parts, tile, self._shape, self.tiles.local_bytes)
        schedule_vectors(sch, last, parts, tile, apart=self.lanes_apart, image=image)
        return sch

    def _gates(self) -> list[Any]:
        """What has one pixel and is broadcast to an image: a group computes it for its own channels."""
        return [
            block
            for block in self.blocks
            if not self._is_image(block) and any(map(self._is_image, self.sch.get_consumers(block)))
        ]

    def _is_image(self, block: Any) -> bool:
        """Whether a block writes more than one pixel of each channel."""
        return prod(self._shape(block)[2:-1]) > 1

    def _products(self, block: Any) -> int:
        """How many products a group computes of a sum for each element of the last one."""
        reads = prod(self._extents(block))
        return reads if block is self.reductions[-1] else reads * self._shape(block)[1]

    def _sum(self, block: Any, tile: Tile, split: int | None) -> Sum:
        """A sum that is cut into ``split`` shares; ``None``: into those that suit the threads of ``tile``."""
        name, staged = str(self.sch.get(block).name_hint), bool(self.sch.get_producers(block))
        if split is None:
            # a few shares at least: neighbouring threads then read side by side
            blocks = self._shape(block)[1]
            room = self.tiles.local_bytes // (2 * TEXEL_BYTES * blocks) - 1
            most = min(room, max(FEW_SHARES, tile.threads // blocks))
            split = divisor(self._shares(block), most) if self.tiles.split > 1 else 1

        def read(share: Any, loop: Any) -> None:
            # a row is read number by number, and what is staged is in local memory already
            if not staged and not name.startswith(DENSE):
                self._cache(share, 0, loop)
            if not name.startswith(POOLS):
                self._cache(share, 1, loop)

        return Sum(block, 2 if name.startswith(POOLS) else 1, split, read)

    # A norm over groups of channels --------------------------------------------------------------------------

    def normalises_groups(self) -> bool:
        """Whether the kernel normalises groups of channels."""
        return any(str(self.sch.get(block).name_hint).startswith(GROUP_NORM) for block in self.reductions)

    def _group_norm(self) -> s_tir.Schedule:
        """A work group has a group of channels: see :func:`.vectors.schedule_groups`."""
        sch = self.sch
        unpack = self.blocks.pop() if self.is_plain else None
        parts = [block for block in self.blocks if str(sch.get(block).name_hint).startswith(GROUP_NORM)]
        names = {str(sch.get(block).name_hint) for block in parts}
        self.blocks = [block for block in self.blocks if str(sch.get(block).name_hint) not in names]
        last = self.blocks[-1]
        stages = self._inline([])
        if self.lanes_apart:
            stages.append(last)
            last = sch.cache_write(last, 0, "local")
        groups = self._shape(self.reductions[0])[1]
        texels = prod(self._shape(last)[1:4]) // groups
        threads = divisor(texels, min(self.max_threads, self.tiles.local_bytes // (2 * TEXEL_BYTES)))
        if threads < min(FEWEST_THREADS, texels):
            raise ValueError(f"{texels} texels of a group of channels can't be shared evenly by many threads")
        if unpack is not None:
            self._write_plain(last, unpack)

        def read(share: Any, loop: Any) -> None:
            self._cache(share, 0, loop)

        sums = [Sum(block, 3, threads, read) if self._is_reduction(block) else block for block in parts]
        schedule_groups(
            sch,
            last,
            sums,
            groups,
            lambda loop: self._finish(stages, loop),
            plain=self.is_plain,
            apart=self.lanes_apart,
        )
        return sch

    # A convolution whose image is averaged -----------------------------------------------------------------

    def _averages_a_convolution(self) -> bool:
        """Whether the kernel is the average of what one of its sums, over an image, computes."""
        names = [str(self.sch.get(block).name_hint) for block in self.reductions]
        return len(names) == 2 and names[0].startswith(SPLITTABLE) and names[1].startswith(POOLS)

    def _pooled(self, last: Any, stages: list[Any], pads: dict[int, Any]) -> s_tir.Schedule:
        """See :mod:`.pooled`."""
        sch, (convolution, pool) = self.sch, self.reductions
        work, shares = Work(self._shape(convolution)), self._shares(convolution)
        tile = choose_pooled(work, self.max_threads, self.tiles, shares=shares)
        for stage in stages:  # the average itself, where lanes are computed apart
            sch.compute_inline(stage)
        pad, pixel = pads[id(convolution)], pads[id(pool)]
        if pixel is None:
            pixel = sch.cache_write(convolution, 0, "local")
        cut = convolution, self._share_axis(convolution)
        total, thread = schedule_pooled(sch, last, pool, pixel, cut, tile, apart=self.lanes_apart)
        self._reduce(total, pad, thread)
        return sch

    # A layer norm over channels ----------------------------------------------------------------------------

    def norm_sums(self) -> list[Any]:
        """The sums of a layer norm, if the kernel is one."""
        return [b for b in self.reductions if str(self.sch.get(b).name_hint).startswith(SUMS)]

    def _layer_norm(self, last: Any, unpack: Any) -> s_tir.Schedule:
        """See :mod:`.layer_norm`."""
        sch, sums = self.sch, self.norm_sums()
        convolutions = [block for block in self.reductions if block not in sums]
        pads = [self._pad_of(block) for block in convolutions]
        data = next(iter(sch.get_producers(sums[0])), None)
        kept = [block for block in (data, *pads) if block is not None]
        names = {str(sch.get(block).name_hint) for block in kept}
        stages: list[Any] = []
        for block in reversed(self.blocks[:-1]):
            name = str(sch.get(block).name_hint)
            if self._is_reduction(block) or name in names:
                continue
            # of two sums and the result, each reads the mean; what precedes the data is read by it alone
            if self._reads(block) > 1 and name not in NORM_PARTS and self._follows(block, sums[-1]):
                stages.insert(0, block)
            else:
                sch.compute_inline(block)
        shape = self._shape(last)
        if self.lanes_apart:
            stages.append(last)
            last = sch.cache_write(last, 0, "local")
        if unpack is not None:
            self._write_plain(last, unpack)
        tile = choose_norm(shape, self.max_threads, self.tiles, convolves=bool(convolutions))
        if data is None:
            readers = [*sums, *stages, last]
            buffer = sch.get(sums[0]).reads[self._operand(sums[0], 0)].source
            readers = [b for b in readers if any(r.source.same_as(buffer) for r in sch.get(b).reads)]
            data = sch.cache_read(sums[0], self._operand(sums[0], 0), "shared", consumer_blocks=readers)
        elif self._is_reduction(data):
            data = sch.cache_write(data, 0, "local")
        own, thread = schedule_norm(
            sch, last, stages, data, sums, tile, whole=not self.is_plain, apart=self.lanes_apart
        )
        self._finish(stages, thread)
        for convolution, pad in zip(convolutions, pads, strict=True):
            self._reduce(convolution, pad, own)
        return sch

    # A convolution of which maxima are taken ---------------------------------------------------------------

    def _inner(self) -> Windows:
        """What the maxima are taken of."""
        sch, (maxima, *others) = self.sch, self.maxima
        if others or len(self.reductions) > 1:
            raise ValueError("it takes maxima of more than one sum")
        (pixel,) = sch.get_producers(maxima)
        reach, strides = ([int(i) for i in sch.get(maxima).annotations[key]] for key in (REACH, STRIDES))
        if self._is_reduction(pixel):
            pixel = sch.cache_write(pixel, 0, "local")
        sums = self._extents(self.reductions[0])
        shares = sums[0] if str(sch.get(self.reductions[0]).name_hint).startswith(SPLITTABLE) else 1
        kernel = sums[1], sums[2]
        return Windows(pixel, (reach[0], reach[1]), (strides[0], strides[1]), kernel, prod(sums), shares)

    def _windows(
        self, last: Any, shape: tuple[int, ...], stages: list[Any], inner: Windows, pads: dict[int, Any]
    ) -> s_tir.Schedule:
        """See :mod:`.windows`."""
        sch, (convolution,) = self.sch, self.reductions
        cut = choose_cut(shape, inner, self.max_threads, self.tiles)
        whole, apart = not self.is_plain, self.lanes_apart
        sums = convolution, self._share_axis(convolution)
        total, thread = schedule_windows(sch, last, stages, inner.pixel, sums, cut, whole=whole, apart=apart)
        self._reduce(total, pads[id(convolution)], thread)
        return sch

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
        (sch.unroll if self.is_plain else sch.vectorize)(lane)
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
