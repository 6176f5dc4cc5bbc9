"""`python -m engine` is the `thimble` command."""

from __future__ import annotations

import sys

from engine.cli import main

sys.exit(main())
