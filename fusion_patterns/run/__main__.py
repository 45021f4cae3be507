"""``python -m fusion_patterns.run FOLDER``: see `replay`."""

import sys

from .replay import main

sys.exit(main())
