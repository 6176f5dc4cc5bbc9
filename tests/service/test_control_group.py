"""Which control group this is, what it allows and uses: as Docker, systemd and older kernels show it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.child import MAX_OOM_SCORE_ADJ, OOM_SCORE_ADJ, ChildWatch
from service.control_group import find_memory_group
from tests.service.conftest import V2_MOUNT, write

LIMIT = "killed by the kernel: the memory limit of 200 MiB is used up", "out_of_memory"
MACHINE = "killed by the kernel: the machine's memory is used up", "out_of_memory"
NO_LIMIT_V1 = {"64-bit": 0x7FFFFFFFFFFFF000, "32-bit": 0x7FFFFFFF000}


def test_v2_in_a_container(v2_container: Path) -> None:
    group = find_memory_group(v2_container)
    assert group
    assert group.limit_bytes() == 200 << 20
    assert group.used_bytes() == {"anonymous": 60_000_000, "file": 40_000_000, "shared": 3_000_000, "kernel": 7_000_000}
    assert (group.major_faults(), group.oom_kills()) == (123, 2)


def test_v2_under_systemd_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/thimble.service\n")
    write(tmp_path, "proc/self/mountinfo", V2_MOUNT)
    own = "sys/fs/cgroup/system.slice/thimble.service/"
    write(tmp_path, own + "memory.current", "1000\n")
    write(tmp_path, own + "memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/system.slice/memory.max", "300000000\n")
    write(tmp_path, "sys/fs/cgroup/system.slice/memory.current", "290000000\n")
    group = find_memory_group(tmp_path)
    assert group
    assert group.limit_bytes() == 300_000_000
    assert sum(group.used_bytes().values()) == 290_000_000  # what that limit is held against
    write(tmp_path, own + "memory.max", "200000000\n")
    assert group.limit_bytes() == 200_000_000
    assert group.used_bytes()["kernel"] == 1000  # no memory.stat: unknown kinds are nobody's but the kernel's


@pytest.mark.parametrize(
    ("group_path", "mount_root", "below"),
    [
        ("/docker/abc", "/docker/abc", ""),  # a container without a namespace of its own
        ("/", "/", ""),
        ("/system.slice/thimble.service", "/", "system.slice/thimble.service/"),
        ("/../../elsewhere", "/", ""),
        ("/docker/abc", "/docker/other", ""),
        ("/a..b.slice/x", "/", "a..b.slice/x/"),
    ],
)
def test_v1_finds_its_group_from_any_side_of_a_namespace(tmp_path: Path, group_path: str, mount_root: str, below: str) -> None:
    write(tmp_path, "proc/self/cgroup", f"5:cpu,cpuacct:/x\n4:memory:{group_path}\n1:name=systemd:/\n0::/\n")
    mounts = f"32 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw - "
    write(
        tmp_path,
        "proc/self/mountinfo",
        mounts + "cgroup cgroup rw,memory\n" + V2_MOUNT.replace("cgroup ro", "cgroup/unified ro"),
    )
    own = f"sys/fs/cgroup/memory/{below}"
    write(tmp_path, own + "memory.usage_in_bytes", "110000000\n")
    write(tmp_path, own + "memory.limit_in_bytes", f"{200 << 20}\n")
    write(tmp_path, own + "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(tmp_path, own + "memory.max_usage_in_bytes", "110000000\n")
    stat = "cache 1\nrss 1\ntotal_cache 43000000\ntotal_rss 60000000\ntotal_shmem 3000000\ntotal_pgmajfault 123\n"
    write(tmp_path, own + "memory.stat", stat + f"hierarchical_memory_limit {200 << 20}\n")
    group = find_memory_group(tmp_path)
    assert group
    assert group.limit_bytes() == 200 << 20
    assert group.used_bytes() == {"anonymous": 60_000_000, "file": 40_000_000, "shared": 3_000_000, "kernel": 7_000_000}
    assert (group.major_faults(), group.oom_kills(), group.limit_failures()) == (123, 3, None)
    # v1 does not count failures at its limit: where use has never been that high, it was not the limit.
    watch = ChildWatch(7, tmp_path)
    write(tmp_path, own + "memory.oom_control", "oom_kill 4\n")
    assert watch.cause(-signal.SIGKILL) == MACHINE
    write(tmp_path, own + "memory.max_usage_in_bytes", f"{200 << 20}\n")
    assert watch.cause(-signal.SIGKILL) == LIMIT


@pytest.mark.parametrize("kernel", NO_LIMIT_V1)
def test_v1s_largest_number_is_no_limit(tmp_path: Path, kernel: str) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    write(tmp_path, "proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{NO_LIMIT_V1[kernel]}\n")
    group = find_memory_group(tmp_path)
    assert group
    assert group.limit_bytes() is None


@pytest.mark.parametrize("mounts", ["", V2_MOUNT], ids=["no control groups", "memory controller off"])
def test_a_board_that_counts_no_memory_has_no_group(tmp_path: Path, mounts: str) -> None:
    """Raspberry Pi OS boots with the memory controller off: the group is there, without its memory files."""
    write(tmp_path, "proc/self/cgroup", "0::/\n" if mounts else "")
    write(tmp_path, "proc/self/mountinfo", mounts)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert find_memory_group(tmp_path) is None


def test_a_group_without_memory_files_is_under_one_that_has_them(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/session.scope\n")
    write(tmp_path, "proc/self/mountinfo", V2_MOUNT)
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.current", "1000\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "5000\n")
    group = find_memory_group(tmp_path)
    assert group
    assert group.limit_bytes() == 5000


@pytest.mark.parametrize(
    "odd", [b"1 0 8:1 / /media/pi/Caf\xe9 rw - vfat /dev/sda1 rw\n", b"nonsense\n", b" - cgroup2 cgroup2 rw\n"]
)
def test_odd_lines_of_proc_are_no_error(v2_container: Path, odd: bytes) -> None:
    """A mount point may have any bytes in its name: a memory stick formatted elsewhere."""
    for name in ("mountinfo", "cgroup"):
        path = v2_container / "proc/self" / name
        path.write_bytes(odd + path.read_bytes())
    group = find_memory_group(v2_container)
    assert group
    assert group.limit_bytes() == 200 << 20


def test_this_process_is_in_a_group_or_in_none() -> None:
    group = find_memory_group()
    if group:
        assert sum(group.used_bytes().values()) > 1 << 20


def test_a_child_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed(v2_container: Path) -> None:
    watch = ChildWatch(7, v2_container)
    assert watch.cause(-signal.SIGKILL) == ("killed by SIGKILL", "killed")
    assert watch.cause(-signal.SIGSEGV) == ("killed by SIGSEGV", "killed")
    assert watch.cause(-40) == ("killed by signal 40", "killed")
    assert watch.cause(3) == ("ended with exit status 3", "crashed")
    write(v2_container, "sys/fs/cgroup/memory.events", "oom 3\noom_kill 3\n")
    assert watch.cause(-signal.SIGKILL) == LIMIT
    assert watch.cause(-signal.SIGSEGV) == ("killed by SIGSEGV", "killed")


def test_the_limit_is_not_blamed_where_the_whole_machine_ran_out(v2_container: Path) -> None:
    """The group counts its dead whoever ran out; only its own limit's hits tell which."""
    watch = ChildWatch(7, v2_container)
    write(v2_container, "sys/fs/cgroup/memory.events", "oom 2\noom_kill 3\n")
    assert watch.cause(-signal.SIGKILL) == MACHINE


def test_a_kill_before_this_job_is_not_blamed_for_its_end(v2_container: Path) -> None:
    watch = ChildWatch(7, v2_container)
    write(v2_container, "sys/fs/cgroup/memory.events", "oom 3\noom_kill 3\n")
    watch.look()
    assert watch.cause(-signal.SIGKILL) == ("killed by SIGKILL", "killed")


def test_without_a_group_the_machines_own_count_tells(tmp_path: Path) -> None:
    write(tmp_path, "proc/vmstat", "pgmajfault 9\noom_kill 4\n")
    watch = ChildWatch(7, tmp_path)
    assert watch.cause(-signal.SIGKILL)[1] == "killed"
    write(tmp_path, "proc/vmstat", "pgmajfault 9\noom_kill 5\n")
    assert watch.cause(-signal.SIGKILL) == MACHINE


@pytest.mark.parametrize(("own", "expected"), [(0, 500), (-500, 0), (800, 1000)])
def test_the_child_stands_above_its_parent_whatever_the_parents_score(tmp_path: Path, own: int, expected: int) -> None:
    """systemd's OOMScoreAdjust=, Docker's --oom-score-adj and Kubernetes set the parent's."""
    write(tmp_path, "proc/self/oom_score_adj", f"{own}\n")
    write(tmp_path, "proc/7/oom_score_adj", f"{own}\n")
    ChildWatch(7, tmp_path)
    assert int((tmp_path / "proc/7/oom_score_adj").read_text()) == expected


def test_the_kernel_would_take_the_child_before_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = Path("/proc/self/oom_score_adj").read_text()
        ChildWatch(child.pid)
        score = int(Path(f"/proc/{child.pid}/oom_score_adj").read_text())
        assert score == min(int(before) + OOM_SCORE_ADJ, MAX_OOM_SCORE_ADJ)
        assert Path("/proc/self/oom_score_adj").read_text() == before
        child.kill()
