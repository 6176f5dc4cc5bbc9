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
    peak: str
    events: str
    anonymous: str
    file: str  # with what is shared
    shared: str
    major_faults: str


_V2 = _Files("memory.max", "memory.current", "memory.peak", "memory.events", "anon", "file", "shmem", "pgmajfault")
_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "total_rss",
    "total_cache",
    "total_shmem",
    "total_pgmajfault",
)


class MemoryGroup:
    """A control group with its memory files, and the groups above it, as far as they can be seen.

    Parameters
    ----------
    directories : list of Path
        The group's own, then those above it; not empty.
    """

    def __init__(self, directories: list[Path], files: _Files) -> None:
        self._directories, self._files = directories, files

    def limit_bytes(self) -> int | None:
        """The smallest limit from here upwards; None where there is none."""
        return min(self._limits(), default=(None, None))[0]

    def used_bytes(self) -> dict[str, int]:
        """Memory in use by kind, in sum what the limit is held against: of all processes under it.

        `anonymous` is the processes' own, `file` the page cache with mapped weights and code, which the kernel drops where it
        needs room; `shared` is shared memory and files on a tmpfs; `kernel` the rest.
        """
        limited = min(self._limits(), default=(0, self._directories[0]))[1]
        fields = _fields(_text(limited / "memory.stat"))
        anonymous, file, shared = (fields.get(n, 0) for n in (self._files.anonymous, self._files.file, self._files.shared))
        usage = int(_text(limited / self._files.usage) or 0)
        kinds = {"anonymous": anonymous, "file": max(0, file - shared), "shared": shared}
        return kinds | {"kernel": max(0, usage - anonymous - file)}

    def limit_failures(self) -> int | None:
        """How often an allocation failed at a limit from here upwards, which a shortage elsewhere does not raise; v1: None.

        v1's failcnt is no such count: where Docker limits memory and memory with swap to the same, it stays 0 (seen on 6.18).
        """
        if self._files is _V1:
            return None
        return sum(_fields(_text(directory / self._files.events)).get("oom", 0) for directory in self._directories)

    def has_been_full(self) -> bool:
        """Whether use has ever stood at a limit from here upwards, if only with page cache."""
        return any(int(_text(directory / self._files.peak) or 0) >= limit for limit, directory in self._limits())

    def major_faults(self) -> int:
        """Pages that had to be read from storage because somebody touched them, since the group was made."""
        return self._fields("memory.stat").get(self._files.major_faults, 0)

    def oom_kills(self) -> int:
        """Processes of the group that the kernel killed for want of memory, the machine's too, since the group was made."""
        return self._fields(self._files.events).get("oom_kill", 0)

    def _limits(self) -> Iterator[tuple[int, Path]]:
        for directory in self._directories:
            text = _text(directory / self._files.limit)
            if text.isdecimal() and int(text) < NO_LIMIT_BYTES:
                yield int(text), directory

    def _fields(self, name: str) -> dict[str, int]:
        return _fields(_text(self._directories[0] / name))


def find_memory_group(root: Path = Path("/")) -> MemoryGroup | None:
    """The control group of this process, None where no memory controller accounts for it.

    Parameters
    ----------
    root : Path
        Below which `proc` and `sys` are.
    """
    groups: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups |= dict.fromkeys(controllers.split(","), path)  # v2's line names no controller
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, kind_and_options = left.split(), right.split(" ", 2)
        if len(mount) < 5:
            continue
        if kind_and_options[0] == "cgroup" and "memory" in kind_and_options[-1].split(","):
            path, files = groups.get("memory", "/"), _V1
        elif kind_and_options[0] == "cgroup2":
            path, files = groups.get("", "/"), _V2
        else:
            continue
        mount_root, mount_point = mount[3], root / mount[4].lstrip("/")
        # A group may have no memory files of its own and yet lie under one that has.
        directories = [d for d in _upwards(mount_point, mount_root, path) if _text(d / files.usage)]
        if directories:
            return MemoryGroup(directories, files)
    return None


def _upwards(mount_point: Path, mount_root: str, path: str) -> Iterator[Path]:
    """The group's directory, then those above it, down to the mount.

    A container sees its own group as the mount's root: what `path` says beyond `mount_root` is the way below the mount point,
    and a path outside of it (another namespace's) leaves the mount point itself.
    """
    inside = Path(path).is_relative_to(mount_root) and ".." not in Path(path).parts
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
        return path.read_text(errors="surrogateescape").strip()  # a mount point may have any bytes in its name
    except OSError:
        return ""


def _fields(text: str) -> dict[str, int]:
    """`name number` lines."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
