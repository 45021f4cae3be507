"""Measurements on real networks: the corpus, kernel counts, and the speed of matching.

Each is a command, run from the root of the checkout: ``python -m bench.corpus``, ``bench.kernel_counts``,
``bench.match``; the last one reads what ``pytest bench/test_match.py`` has measured. They write their tables
into ``docs``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# `tests/networks.py` imports the corpus, for the tests and for what is measured here.
if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))
