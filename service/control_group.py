"""The memory that the kernel lets this service have, how it is used, and whom the kernel killed for want of it.

Read from the control group (cgroups(7); cgroup v2: kernel Documentation/admin-guide/cgroup-v2.rst, v1:
cgroup-v1/memory.rst), through a root that a test replaces. Docker, compose's `mem_limit` and systemd's `MemoryMax=` all set
limits there. A board may have the memory controller off (Raspberry Pi OS boots so): then there is no group to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT_BYTES = 1 << 42
"""v1 says "no limit" by the largest number of pages it can count: 2^63 bytes, 2^43 on a 32-bit kernel."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What one version of control groups calls its files and fields."""

    limit: str
    usage: str
    events: str
    anonymous: str
    file: str  # with what is shared
    shared: str
    major_faults: str


_V2 = _Files("memory.max", "memory.current", "memory.events", "anon", "file", "shmem", "pgmajfault")
_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    "total_rss",
    "total_cache",
    "total_shmem",
    "total_pgmajfault",
)


class MemoryGroup:
    """A control group with its memory files, and the groups above it, as far as they can be seen."""

    def __init__(self, directories: list[Path], files: _Files) -> None:
        self._directories, self._files = directories, files

    def limit_bytes(self) -> int | None:
        """The smallest limit from here upwards; None where there is none."""
        limits = [int(text) for text in self._limits() if text.isdecimal()]
        return min((limit for limit in limits if limit < NO_LIMIT_BYTES), default=None)

    def used_bytes(self) -> dict[str, int]:
        """Memory in use by kind, in sum what the limit is held against.

        `anonymous` is the processes' own, `file` the page cache with mapped weights and code, which the kernel drops where it
        needs room; `shared` is shared memory and files on a tmpfs; `kernel` the rest.
        """
        fields = self._fields("memory.stat")
        anonymous, file, shared = (fields.get(n, 0) for n in (self._files.anonymous, self._files.file, self._files.shared))
        usage = int(self._read(self._files.usage) or 0)
        kinds = {"anonymous": anonymous, "file": max(0, file - shared), "shared": shared}
        return kinds | {"kernel": max(0, usage - anonymous - file)}

    def major_faults(self) -> int:
        """Pages that had to be read from storage because somebody touched them, since the group was made."""
        return self._fields("memory.stat").get(self._files.major_faults, 0)

    def oom_kills(self) -> int:
        """Processes of the group that the kernel killed for want of memory, since the group was made."""
        return self._fields(self._files.events).get("oom_kill", 0)

    def _limits(self) -> Iterator[str]:
        for directory in self._directories:
            yield _text(directory / self._files.limit)

    def _read(self, name: str) -> str:
        return _text(self._directories[0] / name)

    def _fields(self, name: str) -> dict[str, int]:
        return _fields(self._read(name))


def find_memory_group(root: Path = Path("/")) -> MemoryGroup | None:
    """The control group of this process, None where no memory controller accounts for it.

    Parameters
    ----------
    root : Path
        Below which `proc` and `sys` are.
    """
    groups: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)  # v2's line names no controller
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount_root, mount_point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and "memory" in options.replace(" ", ",").split(","):
            path, files = groups.get("memory", "/"), _V1
        elif kind == "cgroup2":
            path, files = groups.get("", "/"), _V2
        else:
            continue
        directories = list(_upwards(root / mount_point.lstrip("/"), mount_root, path))
        if (directories[0] / files.usage).exists():
            return MemoryGroup(directories, files)
    return None


def _upwards(mount_point: Path, mount_root: str, path: str) -> Iterator[Path]:
    """The group's directory, then those above it, down to the mount.

    A container sees its own group as the mount's root: what `path` says beyond `mount_root` is the way below the mount point,
    and a path outside of it (another namespace's) leaves the mount point itself.
    """
    inside = Path(path).is_relative_to(mount_root) and ".." not in path
    directory = mount_point / Path(path).relative_to(mount_root) if inside else mount_point
    yield directory
    while directory != mount_point:
        directory = directory.parent
        yield directory


def machine_oom_kills(root: Path = Path("/")) -> int:
    """Processes of the whole machine that the kernel killed for want of memory, since it booted."""
    return _fields(_text(root / "proc/vmstat")).get("oom_kill", 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _fields(text: str) -> dict[str, int]:
    """`name number` lines."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
