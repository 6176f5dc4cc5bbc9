"""How much memory the worker may take where nobody named a budget."""

from __future__ import annotations

import mmap
from pathlib import Path

from service.control_group import find_memory_group

MARGIN_BYTES = 8 << 20
"""Left to the others: the front end with an upload under way, pages of the recording, what the kernel itself needs."""


def default_budget(root: Path = Path("/")) -> int | None:
    """Resident bytes that this process may have: those it has, and what the control group and the machine have left.

    Page cache counts as left, for the kernel drops it where somebody needs room. That holds for pages of this process's own
    libraries too, most of which work never touches: they are in what it has, and in what is left. (service/DESIGN.md has the
    limits at which the plan that follows was fastest.)

    Parameters
    ----------
    root : Path
        Below which `proc` and `sys` are.

    Returns
    -------
    n_bytes : int or None
        None where neither says how much is left.
    """
    left = []
    group = find_memory_group(root)
    limit = group.limit_bytes() if group else None
    if group is not None and limit is not None:
        used = group.used_bytes()
        left.append(limit - sum(used[kind] for kind in ("anonymous", "shared", "kernel")))
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) << 10)  # proc(5): kB are KiB
    own = _text(root / "proc/self/statm").split()
    if not left or len(own) < 2:
        return None
    return max(1, int(own[1]) * mmap.PAGESIZE + min(left) - MARGIN_BYTES)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
