"""Where every tensor at a composite's edge lives: its layout, its memory scope, and the conversions between.

    layouts.py    packed layouts by name
    limits.py     what a device's images can hold
    needs.py      composite -> the layout that each operand must have, or why it can't be packed
    decide.py     needs and wishes of all composites -> one form for each tensor and reader
    rewrite.py    decisions -> a module in which they are visible (conversions, VDevice types)
"""

from __future__ import annotations

from .decide import Placement, TensorDecision, decide
from .rewrite import place

__all__ = ["Placement", "TensorDecision", "decide", "place"]
