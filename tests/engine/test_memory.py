"""What is left for a process that nobody gave a budget, from trees of /proc and /sys as kernels show them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from engine.memory import UNTOUCHED_BYTES, available_budget, control_group_peak, resident_bytes

MIB = 1 << 20
OWN_PAGES = 9000
OWN = OWN_PAGES * mmap.PAGESIZE


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """400,000 KiB of it are left."""
    write(tmp_path, "proc/meminfo", "MemTotal: 472000 kB\nMemFree: 9000 kB\nMemAvailable: 400000 kB\nHugePages_Total: 0\n")
    write(tmp_path, "proc/self/statm", f"20000 {OWN_PAGES} 5000 1 0 9000 0\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def v2(root: Path, group: str, limit: str, usage: int) -> None:
    """43 MB of the usage are page cache, 3 of these on a tmpfs."""
    directory = f"sys/fs/cgroup{group}/"
    write(root, directory + "memory.max", f"{limit}\n")
    write(root, directory + "memory.current", f"{usage}\n")
    write(root, directory + "memory.peak", f"{usage + 7}\n")
    write(root, directory + "memory.stat", "anon 60000000\nfile 43000000\nkernel_stack 100\nshmem 3000000\n")


def test_what_the_group_has_left_but_for_page_cache(machine: Path) -> None:
    v2(machine, "", str(200 * MIB), 110_000_000)
    assert available_budget(root=machine) == OWN + 200 * MIB - (110_000_000 - 40_000_000) + UNTOUCHED_BYTES
    assert available_budget(5 * MIB, machine) == OWN + 195 * MIB - 70_000_000 + UNTOUCHED_BYTES
    assert control_group_peak(machine) == 110_000_007


def test_a_group_above_may_leave_less(machine: Path) -> None:
    """A service without a limit of its own in a slice that has one."""
    write(machine, "proc/self/cgroup", "0::/boxes.slice/thimble.service\n")
    v2(machine, "/boxes.slice/thimble.service", "max", 80_000_000)
    v2(machine, "/boxes.slice", str(150 * MIB), 140_000_000)
    assert available_budget(root=machine) == OWN + 150 * MIB - 100_000_000 + UNTOUCHED_BYTES
    assert control_group_peak(machine) == 80_000_007


@pytest.mark.parametrize("path", ["/docker/5f", "/"], ids=["the host's path", "its own"])
def test_version_one_in_a_container(machine: Path, path: str) -> None:
    """The host's path leads nowhere there, and the container's group is the mount."""
    write(machine, "proc/self/cgroup", f"9:cpu,cpuacct:{path}\n4:memory:{path}\n0::{path}\n")
    directory = "sys/fs/cgroup/memory/"
    write(machine, directory + "memory.limit_in_bytes", f"{100 * MIB}\n")
    write(machine, directory + "memory.usage_in_bytes", "70000000\n")
    write(machine, directory + "memory.max_usage_in_bytes", "71000000\n")
    write(machine, directory + "memory.stat", "cache 1\ntotal_cache 30000000\ntotal_shmem 1000000\n")
    assert available_budget(root=machine) == OWN + 100 * MIB - 41_000_000 + UNTOUCHED_BYTES
    assert control_group_peak(machine) == 71_000_000


def test_the_machine_may_have_less_than_the_limit_allows(machine: Path) -> None:
    v2(machine, "", str(2000 * MIB), 110_000_000)
    assert available_budget(root=machine) == OWN + (400_000 << 10) + UNTOUCHED_BYTES


@pytest.mark.parametrize("limit", [None, "max"], ids=["no group", "no limit"])
def test_without_a_limit_the_machine_tells(machine: Path, limit: str | None) -> None:
    if limit is not None:
        v2(machine, "", limit, 110_000_000)
    assert available_budget(root=machine) == OWN + (400_000 << 10) + UNTOUCHED_BYTES


def test_a_machine_that_says_nothing_gives_no_budget(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    (machine / "proc/self/cgroup").unlink()
    assert available_budget(root=machine) is None
    assert control_group_peak(machine) == 0


def test_a_group_that_is_full_leaves_the_least_there_is(machine: Path) -> None:
    v2(machine, "", "1000000", 110_000_000)
    assert available_budget(root=machine) == 1


def test_this_machine_says_something() -> None:
    left = available_budget()
    assert left is not None
    assert left > 1
    assert resident_bytes() > MIB
