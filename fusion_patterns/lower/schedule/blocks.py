"""What a packed kernel consists of: what its blocks write, read and sum, and which of them are inlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm_ffi import structural_walk

from .split import REDUCE

__all__ = ["Blocks"]

MOST_COPIES = 3


class Blocks:
    """The blocks of one kernel, in program order; ``reductions`` are those that sum or take maxima."""

    def __init__(self, sch: s_tir.Schedule) -> None:
        self.sch = sch
        self.blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
        self.reductions = [block for block in self.blocks if self._is_reduction(block)]

    def _shape(self, block: Any) -> tuple[int, ...]:
        """The shape of what a block writes."""
        return tuple(int(d) for d in self.sch.get(block).writes[0].source.ty.shape)

    def _is_reduction(self, block: Any) -> bool:
        return any(int(v.iter_type) == REDUCE for v in self.sch.get(block).iter_vars)

    def _pad_of(self, reduction: Any) -> Any:
        """The block that pads a reduction's input, if there is one."""
        for producer in self.sch.get_producers(reduction):
            if not self._is_reduction(producer):
                return producer
        return None

    def _is_shared(self, pad: Any) -> bool:
        """Whether the epilogue reads what a sum reads as well, and this is no border, which a sum alone can read."""
        users = self.sch.get_consumers(pad)
        border = str(self.sch.get(pad).name_hint).startswith("pad")
        return not border and not all(self._is_reduction(user) for user in users)

    def _inline(self, pads: list[Any], gates: Sequence[Any] = ()) -> list[Any]:
        """Inline the epilogue; returns the blocks that are read more than once and stay, as do ``gates``."""
        sch, kept = self.sch, []
        names = {str(sch.get(b).name_hint) for b in pads}
        alone = {str(sch.get(b).name_hint) for b in gates}
        for block in reversed(self.blocks[:-1]):
            if self._is_reduction(block) or sch.get(block).name_hint in names:
                continue
            # what goes into a sum and into the epilogue is read at different places: it is computed in both
            users = sch.get_consumers(block)
            twice = any(self._is_reduction(user) or str(sch.get(user).name_hint) in names for user in users)
            if sch.get(block).name_hint in alone:
                kept.append(block)
            elif twice or self._reads(block) <= (MOST_COPIES if self._is_cheap(block) else 1):
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

    def _follows(self, block: Any, other: Any) -> bool:
        """Whether a block reads, through whatever is between, what ``other`` writes."""
        name = self.sch.get(other).name_hint
        return any(
            self.sch.get(producer).name_hint == name or self._follows(producer, other)
            for producer in self.sch.get_producers(block)
        )

    def _operand(self, block: Any, read: int) -> int:
        """The number of the read region of data (0) or weight (1): the one that is the result is not counted."""
        written = self.sch.get(block).writes[0].source
        numbers = [
            i for i, region in enumerate(self.sch.get(block).reads) if not region.source.same_as(written)
        ]
        return numbers[read]
