"""A bar on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys

WIDTH = 40


def show_progress(name: str, share: float, amount: str) -> None:
    """Draw `share` of the way to the end, from 0 to 1, on standard error where that is a terminal; 1 ends the line."""
    if sys.stderr.isatty():
        filled = "#" * int(WIDTH * share)
        end = "\n" if share >= 1.0 else ""
        print(f"\r{name[-24:]:24} [{filled:{WIDTH}}] {amount}", end=end, file=sys.stderr, flush=True)
