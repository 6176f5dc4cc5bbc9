"""Fake trees of /proc and /sys, as a kernel shows them to a service in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def v2_container(tmp_path: Path) -> Path:
    """A container with a control group namespace of its own: Docker on today's boards."""
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "proc/self/mountinfo", "1 0 254:0 / / rw - overlay overlay rw\n" + V2_MOUNT)
    group = "sys/fs/cgroup/"
    write(tmp_path, group + "memory.max", f"{200 << 20}\n")
    write(tmp_path, group + "memory.current", "110000000\n")
    write(tmp_path, group + "memory.events", "low 0\nhigh 0\nmax 40\noom 2\noom_kill 2\noom_group_kill 0\n")
    stat = "anon 60000000\nfile 43000000\nkernel_stack 100\nshmem 3000000\npgmajfault 123\n"
    write(tmp_path, group + "memory.stat", stat)
    return tmp_path
