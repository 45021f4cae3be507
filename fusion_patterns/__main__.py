"""``python -m fusion_patterns``: the same as the command ``fusion-patterns``."""

import sys

from fusion_patterns.cli import main

sys.exit(main())
