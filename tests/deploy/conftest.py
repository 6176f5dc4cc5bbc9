"""The one scene that all of test_prometheus.py looks at."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Recording
from tests.deploy.scene import HANG_SECONDS, KILLED, STEP_SECONDS, MadePage, Prometheus, Scene, program
from tests.integration.running import Service, running


@pytest.fixture(scope="module")
def scene(tiny_en: Path, recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    program("prometheus")
    page = MadePage(tmp_path_factory.mktemp("made"))
    data = tmp_path_factory.mktemp("board")
    # A worker a job, so that layers are loaded more than once.
    with (
        running(data, ready=False, MODEL=str(tiny_en), QUEUE_CAPACITY="1", WORKER_MAX_JOBS="1") as board,
        page.served() as made,
    ):
        instances = {"board": f"127.0.0.1:{board.port}", "made": made}
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), list(instances.values()))
        try:
            prometheus.wait_until_ready()  # its first scrape is 5 s away: enough for the board to start
            board.wait_for("/readyz", 200)
            prometheus.wait_for("count(thimble_ready == 1) == 2")
            began = time.time()
            assert board.post(recordings["digits"].path).status_code == 200
            prometheus.wait_for('thimble_jobs_total{outcome="done"} == 1')
            first = _after_a_step()
            assert board.post(recordings["digits"].path).status_code == 200
            board.post(b"no sound")  # a job that fails, and a code of its own
            prometheus.wait_for('thimble_jobs_total{outcome="failed"} == 1')
            well = _after_a_step()
            pages = {"board": board.metrics(), "made": page.metrics.page().decode()}
            page.into_trouble()
            _trouble(board, recordings["digits"].path)
            prometheus.wait_for(f"{KILLED} >= 2")
            prometheus.wait_for("thimble_memory_oom_kills_total == 1")
            prometheus.wait_for('ALERTS{alertstate="firing"}')
            board.stop()
            prometheus.wait_for("up == 0")
            yield Scene(prometheus, instances, pages, began, first, well, ended=_after_a_step())
        finally:
            prometheus.stop()


def _after_a_step() -> float:
    """The time, once a range that ends now has a step behind the last scrape."""
    time.sleep(2 * STEP_SECONDS)
    return time.time()


def _trouble(board: Service, recording: Path) -> None:
    """Three recordings at once for one place and a worker, then two killed workers."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert 429 in [answer.status_code for answer in pool.map(board.post, [recording] * 3)]
    deadline = time.monotonic() + HANG_SECONDS
    while board.metric(KILLED) < 2 and time.monotonic() < deadline:
        # The last one that was ready may be leaving after its job, and then counts as that.
        with contextlib.suppress(ProcessLookupError):
            os.kill(board.worker_pid(), signal.SIGKILL)
        time.sleep(0.1)
