"""Reports as text for a terminal: short lines, the figures first."""

from __future__ import annotations

from collections import Counter

from .summary import Report

__all__ = ["human_bytes", "render_report"]


def human_bytes(size: int) -> str:
    """A size with a unit: ``12.3 MB`` (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def render_report(report: Report, *, stock_launches: int | None = None, reasons: int = 5) -> str:
    """The report in a few lines.

    ``stock_launches``: kernels of stock FuseOps on the same module, printed beside ours. ``reasons``: how many of the
    most frequent reasons for a decline are shown.
    """
    lines = ["composites by row"]
    width = max((len(row) for row in report.composites), default=4)
    lines += [f"  {row:<{width}}  {count:>5}" for row, count in report.composites.items()] or ["  none"]
    convs = report.convs
    lines.append(f"convolutions     {convs['covered']} of {convs['total']} inside a composite")
    stock = f" (stock FuseOps: {stock_launches})" if stock_launches is not None else ""
    lines.append(f"kernel launches  {report.launches}{stock}, of {report.kernels} distinct kernels")
    lines.append(f"conversions      {report.conversions} layout transforms, {report.copies} scope copies")
    lines.append(
        f"in texture       {report.texture_values} tensors, {human_bytes(report.texture_bytes)}; "
        f"in buffers {report.global_values}, {human_bytes(report.global_bytes)}"
    )
    total = sum(report.compile_seconds.values())
    stages = ", ".join(f"{name} {value:.2f}" for name, value in report.compile_seconds.items())
    lines.append(f"compile seconds  {total:.2f} ({stages})")
    if report.tuned:
        aside = report.tuned_left_aside
        lines.append(f"measured tiles   {report.tuned - len(aside)} used, {len(aside)} left aside")
        lines += [f"  {kernel}: {reason}" for kernel, reason in list(aside.items())[:reasons]]
    counted = Counter((entry.row, entry.reason, entry.where) for entry in report.declined)
    if counted:
        lines.append(f"declined         {len(report.declined)}; most frequent:")
        for (row, reason, where), count in counted.most_common(reasons):
            lines.append(f"  {count:>4} x {row}: {reason} [{where}]")
    return "\n".join(lines)
