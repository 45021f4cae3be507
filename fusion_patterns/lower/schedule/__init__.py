"""Schedules of packed kernels: what a work item computes, what a work group shares."""

from .kernel import KERNEL_ATTR, PackedKernel, max_threads, schedule_packed, tile_space

__all__ = ["KERNEL_ATTR", "PackedKernel", "max_threads", "schedule_packed", "tile_space"]
