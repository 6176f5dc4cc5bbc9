"""What a worker may take where nobody named a budget, and the worker that is started so."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from engine.transcribe import Engine
from service import worker
from service.protocol import Load
from service.worker_memory import MARGIN_BYTES, default_budget
from tests.service.conftest import write

MIB = 1 << 20
OWN_PAGES = 9000


def machine(root: Path, available_kib: int) -> None:
    write(root, "proc/meminfo", f"MemTotal: 472000 kB\nMemFree: 9000 kB\nMemAvailable: {available_kib} kB\n")
    write(root, "proc/self/statm", f"20000 {OWN_PAGES} 5000 1 0 9000 0\n")


def test_what_the_group_has_left_but_for_page_cache(v2_container: Path) -> None:
    """200 MiB, of which anonymous, shared and kernel memory are 70 MB."""
    machine(v2_container, 400_000)
    left = 200 * MIB - (110_000_000 - (43_000_000 - 3_000_000))
    assert default_budget(v2_container) == OWN_PAGES * mmap.PAGESIZE + left - MARGIN_BYTES


def test_the_machine_may_have_less_than_the_limit_allows(v2_container: Path) -> None:
    machine(v2_container, 50_000)
    assert default_budget(v2_container) == OWN_PAGES * mmap.PAGESIZE + 51_200_000 - MARGIN_BYTES


def test_without_a_group_the_machine_tells(tmp_path: Path) -> None:
    machine(tmp_path, 50_000)
    assert default_budget(tmp_path) == OWN_PAGES * mmap.PAGESIZE + 51_200_000 - MARGIN_BYTES


def test_a_machine_that_says_nothing_gives_no_budget(tmp_path: Path) -> None:
    assert default_budget(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemAvailable: 50000 kB\n")
    assert default_budget(tmp_path) is None


def test_a_group_that_is_full_leaves_the_least_there_is(v2_container: Path) -> None:
    machine(v2_container, 400_000)
    write(v2_container, "sys/fs/cgroup/memory.max", "1000000\n")
    assert default_budget(v2_container) == 1


def loaded(model: Path, monkeypatch: pytest.MonkeyPatch, default: int | None, **asked: object) -> Engine:
    monkeypatch.setattr(worker, "default_budget", lambda: default)
    request = {"kv": None, "residency": None, "tail": "merged", "budget_bytes": None} | asked
    return worker._load(Load(str(model), "", "int8", **request))  # type: ignore[arg-type]


def test_a_worker_runs_as_the_memory_allows(tiny_en: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rich, poor = (loaded(tiny_en, monkeypatch, default) for default in (1 << 40, 1))
    assert rich.plan is not None
    assert rich.plan.token_read_bytes == 0
    assert poor.plan is not None  # nobody asked for so little: the least, not a refusal
    assert poor.plan.residency.pinned == frozenset()
    assert poor.plan.peak_bytes < rich.plan.peak_bytes


def test_what_the_operator_says_counts(tiny_en: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(tiny_en, monkeypatch, 1, residency="resident").plan is None
    asked = loaded(tiny_en, monkeypatch, 1, budget_bytes=1 << 40).plan
    assert asked is not None
    assert asked.token_read_bytes == 0
    assert loaded(tiny_en, monkeypatch, None).plan is None
