"""The last resort for kernels that no rule of TVM's schedules."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule

from .split import REDUCE

__all__ = ["PlainLoops"]


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
