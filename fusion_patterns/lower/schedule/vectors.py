"""Kernels whose results are few: sums over a whole image, or over all channels of one pixel.

Each sum is split over a work group, and its shares are added up through local memory, in two steps where there are
many. What another sum of the same kernel reads (the channels of a pool, the hidden vector of squeeze-and-excitation) is
computed by every group for itself and staged in local memory:

    shares of a sum -> sum -> its epilogue, staged -> shares of the next sum -> sum -> epilogue, result

The result may be an image that one pixel is broadcast to, such as the gate of squeeze-and-excitation: then every group
computes the pixel for its own channels, and stages it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm_ffi import structural_walk

from ..compute.packed import LANES
from .split import REDUCE, inside
from .tiles import Tile, divisor, divisors

__all__ = ["Image", "Sum", "schedule_groups", "schedule_vectors"]

MANY = 16
"""More shares than these are added up in two steps."""

FEW = 64
"""So many shares are read one after the other without a loop."""

IN_FLIGHT = 16
"""So many reads of a share don't wait for each other, unrolled: few threads sum long, and each waits for its memory."""

GROUP_IN_FLIGHT = 8192
"""No more reads of a whole group than these: threads of large groups have few registers each."""


@dataclass(frozen=True)
class Sum:
    """A reduction of the kernel.

    ``block``; ``cut``: its first so many reduction loops, as one, are cut into ``split`` shares; ``read``: reads its
    operands by texels (block of one share, the loop inside of which).
    """

    block: Any
    cut: int
    split: int
    read: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Image:
    """A result of many pixels.

    ``areas``: over how many groups the pixels of a block are shared; the threads of a group divide those of an area.
    ``whole``: texels are stored, not lanes one by one. ``finish``: places what the epilogue keeps in registers (loop
    over the threads that write the result).
    """

    areas: int
    whole: bool
    finish: Callable[[Any], None]


def schedule_vectors(
    sch: s_tir.Schedule,
    last: Any,
    stages: list[Sum | Any],
    tile: Tile,
    *,
    apart: bool = False,
    image: Image | None = None,
) -> None:
    """Schedule a kernel of sums with few results.

    ``last`` writes the result: (N, C/4, H, W, 4), or (N, C) row-major. ``stages``: in program order the sums, and the
    blocks between them that are staged in local memory. ``tile``: how many blocks of the result belong to a group
    (``group[0]``), and over how many threads (``split``) the last sum of each is split. ``apart``: stage without
    vectors, for ops that TVM can't vectorize. ``image``: the result is one, to which the last pixel is broadcast.
    """
    _Vectors(sch, tile, apart, image).run(last, stages)


def schedule_groups(
    sch: s_tir.Schedule,
    last: Any,
    stages: list[Sum | Any],
    groups: int,
    finish: Callable[[Any], None],
    *,
    plain: bool = False,
    apart: bool = False,
) -> None:
    """Schedule a kernel of sums over groups of channels.

    As :func:`schedule_vectors`, but ``last`` writes an image, (N, C/4, H, W, 4), and a work group computes one of so
    many ``groups`` of its channels, sums and result. ``finish`` places what the epilogue keeps in registers, given the
    loop over a thread's texels; ``plain``: the result is stored lane by lane. All sums are split alike, evenly.
    """
    threads = max(stage.split for stage in stages if isinstance(stage, Sum))
    _Vectors(sch, Tile(1, 1, 1, (1, 1, 1), threads), apart, None).run_image(
        last, stages, groups, finish, plain
    )


class _Vectors:
    def __init__(self, sch: s_tir.Schedule, tile: Tile, apart: bool, image: Image | None) -> None:
        self.sch, self.apart, self.image = sch, apart, image
        self.blocks, self.split = tile.group[0], tile.split
        self.group: Any = None

    def run(self, last: Any, stages: list[Sum | Any]) -> None:
        steps = [self._cut(stage) if isinstance(stage, Sum) else [] for stage in stages]
        final = max(number for number, stage in enumerate(stages) if isinstance(stage, Sum))
        loops = self._groups(last)
        row = len(loops) == 1
        if self.image is not None:
            self.image.finish(self._tell_off(loops, own=True, row=False))
        self._stages(stages, steps, final)
        if self.image is None:
            self._tell_off(loops, own=True, row=row)

    def run_image(
        self, last: Any, stages: list[Sum | Any], groups: int, finish: Callable[[Any], None], plain: bool
    ) -> None:
        sch = self.sch
        steps = [self._cut(stage) if isinstance(stage, Sum) else [] for stage in stages]
        batch, channel, y, x, lane = sch.get_loops(last)
        number, channel = sch.split(channel, [groups, None])
        self.group = sch.fuse(batch, number)
        sch.bind(self.group, "blockIdx.x")
        (sch.unroll if plain else sch.vectorize)(lane)
        # the threads share the texels evenly, so this guards nothing
        several, thread = sch.split(sch.fuse(channel, y, x), [None, self.split])
        sch.reorder(thread, several)
        sch.bind(thread, "threadIdx.x")
        finish(several)
        self._stages(stages, steps, final=0)

    def _stages(self, stages: list[Sum | Any], steps: list[list[Any]], final: int) -> None:
        """Place what a group computes in local memory, and tell it off to threads; ``final``: the last sum's number."""
        # Consumers before what they read: a block can only be placed where all of its readers are. All are placed
        # before any is told off to threads: a guard would hide from TVM how much of a vector is read.
        copies: list[list[Any]] = []
        for stage, adding in reversed(list(zip(stages, steps, strict=True))):
            copies.insert(0, [self._place_step(block) for block in reversed(adding)][::-1])
            if not adding:
                self._place(stage)
        for number, stage in enumerate(stages):
            # of the last sum a group computes its own part, of those before it all
            own = number >= final
            for step, (block, copy) in enumerate(zip(steps[number], copies[number], strict=True)):
                thread = self._each(copy, own)
                self.sch.compute_at(block, thread, preserve_unit_loops=True)
                self._add_up(block, thread, stage if step == 0 else None)
            if not isinstance(stage, Sum):
                self._each(stage, own, apart=self.apart)

    def _groups(self, last: Any) -> list[Any]:
        """Cut the result into groups; returns the loops over what a group writes, lanes in vectors."""
        sch = self.sch
        batch, channel, *rest = sch.get_loops(last)
        outer, channel = sch.split(channel, [None, self.blocks * (1 if rest else LANES)])
        sch.bind(batch, "blockIdx.y")
        sch.bind(outer, "blockIdx.x")
        self.group = outer
        if rest:
            (sch.unroll if self.image is not None and not self.image.whole else sch.vectorize)(rest.pop())
        if self.image is not None:
            area, pixel = sch.split(sch.fuse(*rest), [self.image.areas, None])
            sch.reorder(outer, area, channel, pixel)
            sch.bind(area, "blockIdx.z")
            self.group, rest = area, [pixel]
        return [channel, *rest]

    # Sums -----------------------------------------------------------------------------------------------------

    def _cut(self, stage: Sum) -> list[Any]:
        """Cut a sum into shares; returns the reductions that make it up, the shares first, the sum last."""
        sch, block = self.sch, stage.block
        if stage.split == 1:
            return [block]
        spatial, reduce = self._by_kind(block)
        axis = sch.fuse(*reduce[: stage.cut]) if stage.cut > 1 else reduce[0]
        # neighbouring threads take neighbouring shares: they read side by side
        _, share = sch.split(axis, [None, stage.split])
        steps = [sch.rfactor(share, len(spatial) - 1)]
        few = min(divisors(stage.split), key=lambda d: (d + stage.split // d, -d))
        if stage.split > MANY and few > 1:
            _, (share,) = self._by_kind(block)
            _, share = sch.split(share, [None, few])
            steps.append(sch.rfactor(share, len(spatial) - 1))
        return [*steps, block]

    def _place_step(self, block: Any) -> Any:
        """A step sums in registers; returns the block that leaves its sums in local memory."""
        copy = self.sch.cache_write(block, 0, "local")
        self._place(copy)
        self.sch.compute_at(block, self.group, preserve_unit_loops=True)
        return copy

    def _add_up(self, block: Any, thread: Any, stage: Sum | None) -> None:
        sch = self.sch
        # once placed, a block has one loop for each of its axes
        loops = inside(sch, block, thread)
        kinds = [int(axis.iter_type) for axis in sch.get(block).iter_vars]
        spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != REDUCE]
        reduce = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == REDUCE]
        sch.reorder(*spatial[:-1], *reduce, spatial[-1])
        if stage is not None:
            loop = reduce[0]
            if len(reduce) == 1 and stage.split > 1:
                several = divisor(int(sch.get(loop).extent), min(IN_FLIGHT, GROUP_IN_FLIGHT // stage.split))
                reduce = list(sch.split(loop, [None, several]))
                loop = reduce[-1]
            stage.read(block, loop)
            for loop in reduce[1:]:
                sch.unroll(loop)
        sch.vectorize(spatial[-1])
        init = sch.decompose_reduction(block, reduce[0])
        sch.vectorize(inside(sch, init, thread)[-1])
        if stage is None and int(sch.get(reduce[0]).extent) <= FEW:
            sch.unroll(reduce[0])  # reads of local memory don't wait for each other either

    def _by_kind(self, block: Any) -> tuple[list[Any], list[Any]]:
        """Of a block's loops those over results and those of the reduction, in whatever order they are."""
        loops = list(self.sch.get_loops(block))
        realize = self.sch.get(loops[-1]).body
        summed: list[Any] = []
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if int(axis.iter_type) == REDUCE:
                structural_walk(value, (tirx.Var, summed.append))

        def sums(loop: Any) -> bool:
            return any(var.same_as(self.sch.get(loop).loop_var) for var in summed)

        return [loop for loop in loops if not sums(loop)], [loop for loop in loops if sums(loop)]

    # Stages in local memory -----------------------------------------------------------------------------------

    def _place(self, block: Any) -> None:
        self.sch.set_scope(block, 0, "shared")
        self.sch.compute_at(block, self.group, preserve_unit_loops=True)

    def _each(self, block: Any, own: bool, *, apart: bool = False) -> Any:
        """A thread for each texel of a block; returns the loop over threads."""
        batch, *loops = inside(self.sch, block, self.group)
        row = len(loops) == 1
        if not row:
            lane = loops.pop()
            if apart:
                self.sch.unroll(lane)
            else:
                self.sch.vectorize(lane)
        return self._tell_off(loops, own=own, row=row, batch=batch)

    def _tell_off(self, loops: list[Any], *, own: bool, row: bool, batch: Any = None) -> Any:
        """Tell the texels of a group off to its threads; returns the innermost loop over threads.

        Along y the threads of a group take the blocks of its ``own`` part, one each, so that no guard hides from TVM
        which part of a vector they read; along x they take the rest of the loops.
        """
        sch = self.sch
        if own:
            channel, *rest = loops
            if row:
                channel, number = sch.split(channel, [self.blocks, LANES])
                rest = [number]
            if not rest:
                sch.reorder(channel, batch)
                rest = [batch]
            _, thread = sch.split(sch.fuse(*rest), [None, self.split])
            y = channel
        else:
            _, y, thread = sch.split(sch.fuse(*loops), [None, self.blocks, self.split])
        sch.bind(y, "threadIdx.y")
        sch.bind(thread, "threadIdx.x")
        return thread
