"""What Prometheus sees: a real service and a page made for the purpose, first while all is well, then in trouble.

The board is the service as it runs, with real weights: a few jobs, then a full queue, two killed workers, its end.
The made page is `Metrics` over a fake control group (256 MiB): what a host may lack (a limit), and what nobody can order from a
kernel (kills, faults).
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from service.control_group import find_memory_group
from service.metrics import Metrics, Sources
from service.protocol import Ready
from tests.integration.running import free_port
from tests.service.conftest import V2_MOUNT, write

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/thimble.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']} {panel['id']}{target['refId']}": (target["expr"], target.get("instant", False))
    for panel in PANELS
    for target in panel.get("targets", [])
}
ALERTS = re.findall(r"^ +- alert: (\w+)$", (DEPLOY / "alerts.yml").read_text(encoding="utf-8"), re.MULTILINE)

SCRAPE = "500ms"
STEP_SECONDS = 0.5
VARIABLES = {
    "$__rate_interval": "5s",  # ten scrapes
    "$__interval_ms": "2000",
    "$__interval": "2s",
    "$__range": "60s",
}
KILLED = 'thimble_worker_restarts_total{reason="killed"}'
HANG_SECONDS = 60.0


def program(name: str) -> str:
    path = shutil.which(name)
    if not path:
        pytest.skip(f"{name} is not here (Debian's packages prometheus and, from Debian 13 on, promtool)")
    return path


@dataclass
class MadePage:
    """A metrics page under a limit, of a service that is well until `into_trouble`."""

    root: Path
    depth: int = 0
    is_ready: bool = True
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        write(self.root, "proc/self/cgroup", "0::/\n")
        write(self.root, "proc/self/mountinfo", V2_MOUNT)
        self._write_group(anonymous=80 << 20, file=150 << 20, major_faults=37, kills=0)
        sources = Sources(lambda: self.depth, lambda: self.is_ready, os.getpid, find_memory_group(self.root))
        self.metrics = Metrics(sources, queue_capacity=8)
        self.metrics.worker_ready(Ready(1, "int8", "reference", {"self": 1, "cross": 2}))
        self._work(wait=0.1)

    def _write_group(self, anonymous: int, file: int, major_faults: int, kills: int) -> None:
        group = "sys/fs/cgroup/"
        write(self.root, group + "memory.max", f"{256 << 20}\n")
        write(self.root, group + "memory.current", f"{anonymous + file + (1 << 20)}\n")
        write(self.root, group + "memory.events", f"oom_kill {kills}\n")
        write(self.root, group + "memory.stat", f"anon {anonymous}\nfile {file}\nshmem 0\npgmajfault {major_faults}\n")

    def _work(self, wait: float) -> None:
        layers = [["encoder", "0", "load", wait, 9], ["encoder", "0", "wait", wait, 9], ["encoder", "0", "compute", 2.0, 9]]
        self.metrics.timings({"layers": layers})

    def into_trouble(self) -> None:
        self.depth, self.is_ready = 1, False
        self._work(wait=8.0)
        self._write_group(anonymous=230 << 20, file=20 << 20, major_faults=50_000, kills=1)

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """Its address."""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 (self is the page)
                page = self.metrics.page()
                handler.send_response(200)
                handler.send_header("Content-Type", CONTENT_TYPE_LATEST)
                handler.send_header("Content-Length", str(len(page)))
                handler.end_headers()
                handler.wfile.write(page)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Not on the tests' standard error."""

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


class Prometheus:
    """A started Prometheus, with deploy/prometheus.yml but for its targets and intervals."""

    def __init__(self, directory: Path, targets: list[str]) -> None:
        config = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
        replaced = {
            "targets: [thimble:8000]": f"targets: [{', '.join(targets)}]",
            "scrape_interval: 15s": f"scrape_interval: {SCRAPE}",
            "evaluation_interval: 30s": "evaluation_interval: 1s",
        }
        for old, new in replaced.items():
            assert config.count(old) == 1, old
            config = config.replace(old, new)
        (directory / "prometheus.yml").write_text(config, encoding="utf-8")
        shutil.copy(DEPLOY / "alerts.yml", directory)
        address = f"127.0.0.1:{free_port()}"
        own = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        self.log = directory / "log"
        with self.log.open("wb") as log:
            command = [program("prometheus"), *own, f"--web.listen-address={address}"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = httpx.Client(base_url=f"http://{address}", timeout=HANG_SECONDS)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer of the HTTP API; a query that does not parse is an error here."""
        body = self.client.get(f"/api/v1/{path}", params=parameters).json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]

    def wait_for(self, expression: str) -> None:
        """Wait until an expression answers something."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            if self.get("query", query=expression)["result"]:
                return
            time.sleep(0.1)
        raise AssertionError(f"never came: {expression}")

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(HANG_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()


@dataclass
class Scene:
    """What was scraped: from `began` to `well` nothing was wrong, from there to `ended` everything was.

    The first job had ended at `first`.

    Attributes
    ----------
    instances : dict
        "board" and "made", as Prometheus calls them.
    pages : dict
        Their metrics pages just before the trouble.
    """

    prometheus: Prometheus
    instances: dict[str, str]
    pages: dict[str, str]
    began: float
    first: float
    well: float
    ended: float

    def asked(self, expression: str, begin: float, end: float, instant: bool = False) -> list[dict[str, Any]]:
        """The series of an answer that hold a number, as Grafana asks: over a range, or at its end."""
        if instant:
            answer = self.prometheus.get("query", query=expression, time=end)
            series = [{**row, "values": [row["value"]]} for row in answer["result"]]
        else:
            series = self.prometheus.get("query_range", query=expression, start=begin, end=end, step=STEP_SECONDS)["result"]
        return [row for row in series if any(value != "NaN" for _, value in row["values"])]

    def shown(self, name: str, where: str, trouble: bool = False) -> list[dict[str, Any]]:
        """What the dashboard's query `name` shows of an instance."""
        begin, end = (self.well, self.ended) if trouble else (self.began, self.well)
        expression, instant = QUERIES[name]
        return self.asked(self.filled(expression, where), begin, end, instant)

    def filled(self, expression: str, where: str) -> str:
        """A dashboard's expression with its variables' values."""
        for variable, value in {"$instance": self.instances[where], **VARIABLES}.items():
            expression = expression.replace(variable, value)
        return expression
