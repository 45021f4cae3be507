"""What the user is told: figures of a compiled module, as text and as JSON."""

from __future__ import annotations

from .summary import Declined, Report, summarise
from .text import render_report

__all__ = ["Declined", "Report", "render_report", "summarise"]
