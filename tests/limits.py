"""A control group of a test's own, with a memory limit that can be moved while a process runs in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class LimitedGroup:
    """A memory control group; v1 and v2 differ in its files' names."""

    def __init__(self, directory: Path, limit_file: str, events_file: str) -> None:
        self._directory, self._limit_file, self._events_file = directory, limit_file, events_file

    def enter(self) -> None:
        """Put this process into it, as a child does before it runs its command."""
        (self._directory / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, n_bytes: int) -> None:
        """OSError where the kernel cannot bring what is in use below it."""
        (self._directory / self._limit_file).write_text(str(n_bytes))

    def oom_kills(self) -> int:
        lines = (self._directory / self._events_file).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))


@contextmanager
def limited_group() -> Iterator[LimitedGroup]:
    """A group below this process's own; the test is skipped where none can be made."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if "memory" in own:
        parent, files = Path("/sys/fs/cgroup/memory", own["memory"]), ("memory.limit_in_bytes", "memory.oom_control")
    else:  # v2 lets only a group without processes hand a controller down: the root, here
        parent, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.events")
    directory = parent / f"thimble-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        if not (directory / files[0]).exists():
            pytest.skip("the memory controller is not handed down to new control groups")
        yield LimitedGroup(directory, *files)
    finally:
        directory.rmdir()
