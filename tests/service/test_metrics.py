"""The metrics page: names, sums and what survives a worker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service.control_group import MemoryGroup, find_memory_group
from service.metrics import Metrics, Sources, resident_bytes
from service.protocol import Ready

TIMINGS = {
    "layers": [
        ["encoder", "0", "load", 0.5, 1],
        ["encoder", "0", "wait", 0.25, 1],
        ["encoder", "0", "compute", 2.0, 4],
        ["decoder", "embedding", "compute", 1.0, 9],
    ],
    "stages": [["encode", 2.5, 1], ["decode", 1.25, 1]],
    "shard_loads": 3,
    "shard_bytes": 1000,
    "shard_read_bytes": 600,
    "prefetch_hits": 7,
    "prefetch_waits": 2,
    "compute_major_faults": 5,
}


def some_metrics(queue_depth: int = 0, pid: int | None = None, group: MemoryGroup | None = None) -> Metrics:
    return Metrics(Sources(lambda: queue_depth, lambda: True, lambda: pid, group), queue_capacity=8)


def value(metrics: Metrics, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", metrics.page().decode(), re.MULTILINE)
    assert found, series
    return float(found[1])


@pytest.fixture
def metrics() -> Metrics:
    return some_metrics(queue_depth=3, pid=os.getpid())


def test_layer_summaries_add_up(metrics: Metrics) -> None:
    for _ in range(2):
        metrics.timings(TIMINGS)
    labels = '{layer="0",stack="encoder"}'
    assert value(metrics, f"thimble_layer_compute_seconds_sum{labels}") == 4.0
    assert value(metrics, f"thimble_layer_compute_seconds_count{labels}") == 8
    assert value(metrics, f"thimble_layer_load_seconds_sum{labels}") == 1.0
    assert value(metrics, f"thimble_layer_wait_seconds_sum{labels}") == 0.5
    assert value(metrics, 'thimble_stage_seconds_sum{stage="encode"}') == 5.0
    assert value(metrics, "thimble_shard_loads_total") == 6
    assert value(metrics, "thimble_shard_mapped_bytes_total") == 2000
    assert value(metrics, "thimble_shard_read_bytes_total") == 1200
    assert value(metrics, "thimble_prefetch_hits_total") == 14
    assert value(metrics, "thimble_prefetch_waits_total") == 4
    assert value(metrics, "thimble_compute_major_faults_total") == 10
    assert value(metrics, "thimble_queue_depth") == 3


def test_series_that_alerts_ask_for_are_there_before_anything_happens(metrics: Metrics) -> None:
    for reason in ("max_jobs", "deadline", "model", "out_of_memory", "killed", "crashed"):
        assert value(metrics, f'thimble_worker_restarts_total{{reason="{reason}"}}') == 0
    assert value(metrics, 'thimble_refusals_total{code="queue_full"}') == 0
    assert (value(metrics, "thimble_ready"), value(metrics, "thimble_queue_capacity")) == (1, 8)
    for outcome in ("done", "failed", "cancelled"):
        assert value(metrics, f'thimble_jobs_total{{outcome="{outcome}"}}') == 0


def test_two_metrics_do_not_share_a_registry(metrics: Metrics) -> None:
    other = some_metrics()
    metrics.worker_restarted("killed")
    assert value(other, 'thimble_worker_restarts_total{reason="killed"}') == 0


def test_a45_a_broken_multiprocess_directory_is_of_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is one process's: files that a killed worker might leave are never read."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (tmp_path / "counter_99999.db").write_bytes(b"")
    (tmp_path / "counter_99998.db").write_bytes(os.urandom(4096))
    metrics = some_metrics()
    metrics.timings(TIMINGS)
    assert value(metrics, "thimble_shard_loads_total") == 3


def test_resident_memory_by_kind_from_a_process_file(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    status = "Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t 500 kB\nRssFile:\t 380 kB\nRssShmem:\t 20 kB\n"
    (tmp_path / "7" / "status").write_text(status)
    assert resident_bytes(7, tmp_path) == {"anonymous": 512_000, "file": 389_120, "shared": 20_480}
    assert resident_bytes(8, tmp_path) == {}  # gone since
    assert resident_bytes(os.getpid())["anonymous"] > 1 << 20


def test_no_worker_is_no_sample_and_no_error() -> None:
    assert "thimble_worker_resident_bytes{" not in some_metrics().page().decode()


def test_the_control_groups_memory_adds_up_to_what_the_limit_is_held_against(v2_container: Path) -> None:
    metrics = some_metrics(group=find_memory_group(v2_container))
    assert value(metrics, "thimble_memory_limit_bytes") == 200 << 20
    kinds = ("anonymous", "file", "shared", "kernel")
    used = [value(metrics, f'thimble_memory_used_bytes{{kind="{kind}"}}') for kind in kinds]
    assert used == [60_000_000, 40_000_000, 3_000_000, 7_000_000]
    assert value(metrics, "thimble_memory_major_faults_total") == 123
    assert value(metrics, "thimble_memory_oom_kills_total") == 2


def test_without_a_control_group_there_are_no_samples_of_it_and_no_error(metrics: Metrics) -> None:
    assert not re.findall(r"^thimble_memory_", metrics.page().decode(), re.MULTILINE)


def test_promtool_finds_no_fault(v2_container: Path) -> None:
    metrics = some_metrics(pid=os.getpid(), group=find_memory_group(v2_container))
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not here (Debian's prometheus package)")
    metrics.timings(TIMINGS)
    metrics.worker_ready(Ready(1, "int8", "reference", {"self": 1, "cross": 2}))
    metrics.refused("queue_full")
    checked = subprocess.run([promtool, "check", "metrics"], input=metrics.page(), capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
