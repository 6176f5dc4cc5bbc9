"""How much memory this process has, and may take where nobody says: what its control group and the machine have left."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNTOUCHED_BYTES = 8 << 20
"""A budget may be this much above what is left: a plan counts what short recordings never touch (engine/DESIGN.md)."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Where one version of control groups is mounted (systemd's and Docker's place), and what it calls its files and fields."""

    mount: str
    limit: str
    usage: str
    peak: str
    file: str  # with what is shared
    shared: str


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "memory.peak", "file", "shmem")
_V1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "total_cache",
    "total_shmem",
)


def resident_bytes(root: Path = Path("/")) -> int:
    """Of this process, now (proc(5), statm)."""
    return int(_text(root / "proc/self/statm").split()[1]) * mmap.PAGESIZE


def available_budget(others_bytes: int = 0, root: Path = Path("/")) -> int | None:
    """Resident bytes that this process may have: those it has, and what the control group and the machine have left.

    Page cache counts as left, for the kernel drops it where somebody needs room. That holds for pages of this process's own
    libraries too, most of which work never touches: they are in what it has, and in what is left. (engine/DESIGN.md has the
    limits at which the plan that follows was fastest.)

    Parameters
    ----------
    others_bytes : int
        What others will want beside this process, of the same memory.
    root : Path
        Below which `proc` and `sys` are.

    Returns
    -------
    n_bytes : int or None
        At least 1; None where neither says how much is left.
    """
    left = []
    for directory, files in _groups(root):
        limit, fields = _text(directory / files.limit), _fields(directory / "memory.stat")
        if limit.isdecimal():  # v2 says "max" where there is none, v1 more than any machine has
            kept = int(_text(directory / files.usage)) - fields.get(files.file, 0) + fields.get(files.shared, 0)
            left.append(int(limit) - kept)
    if "MemAvailable:" in (meminfo := _fields(root / "proc/meminfo")):
        left.append(meminfo["MemAvailable:"] << 10)  # proc(5): kB are KiB
    return max(1, resident_bytes(root) + min(left) + UNTOUCHED_BYTES - others_bytes) if left else None


def control_group_peak(root: Path = Path("/")) -> int:
    """Bytes, page cache counted, that this process's control group had at most; 0 where there is none to be read."""
    return next((int(_text(directory / files.peak) or 0) for directory, files in _groups(root)), 0)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's control group and those above it, as far as they can be seen and have memory files (cgroups(7))."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]  # a name may have a line feed in it
        if controllers and "memory" not in controllers.split(","):  # v2's line names none
            continue
        files = _V1 if controllers else _V2
        mount = root / files.mount
        directory = mount / path.lstrip("/")  # in a container the host's path: then the mount is all there is
        while directory.is_relative_to(mount):
            if _text(directory / files.usage):
                yield directory, files
            directory = directory.parent


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    """`name number` lines, with or without a unit behind them."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
