"""``python -m torchglb`` is the command ``torchglb``."""

import sys

from torchglb.cli import main

sys.exit(main())
