"""Where every tensor at a composite's edge lives: its layout, its memory scope, and the conversions between.

- ``layouts``: packed layouts by name
- ``limits``: what a device's images can hold
- ``profiles``: what moving bytes costs on a device, as data
- ``needs``: composite -> the layout that each operand must have, or why it can't be packed
- ``traffic``: how often a composite's kernel asks for each element
- ``balance``: which composites are worth packing, by minimum cut
- ``choice``: one tensor and its readers -> the scope that costs least
- ``decision``: what was decided, as data
- ``decide``: needs and wishes of all composites -> one form for each tensor and reader
- ``rewrite``: decisions -> a module in which they are visible (conversions, VDevice types)
"""

from __future__ import annotations

from .decide import decide
from .decision import Placement, TensorDecision
from .profiles import Profile, load_profile
from .rewrite import place

__all__ = ["Placement", "Profile", "TensorDecision", "decide", "load_profile", "place"]
