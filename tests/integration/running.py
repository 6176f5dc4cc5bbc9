"""The service as its own process, with real weights, for tests that post to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment_without_settings() -> dict[str, str]:
    """This process's, but for what would set up a service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("THIMBLE_")}


class Service:
    """A started service; its log lines are parsed JSON."""

    def __init__(self, data_dir: Path, environment: dict[str, str]) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = data_dir / "log"
        own = {"THIMBLE_DATA_DIR": str(data_dir), "THIMBLE_PORT": str(self.port)} | environment
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "service"]
            self.process = subprocess.Popen(command, env=environment_without_settings() | own, stderr=log, stdout=log)
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS)

    def wait_for(self, path: str, status: int, seconds: float = 60.0) -> httpx.Response:
        """The first answer with this status."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                response = self.client.get(path)
            except httpx.TransportError:
                pass
            else:
                if response.status_code == status:
                    return response
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{path} did not answer {status}: {self.log.read_text()}")

    def post(self, content: Path | bytes, **fields: str) -> httpx.Response:
        data = content if isinstance(content, bytes) else content.read_bytes()
        return self.client.post("/transcribe", files={"file": ("x", data)}, data=fields)

    def metrics(self) -> str:
        return self.client.get("/metrics").text

    def metric(self, name: str) -> float:
        """The value of a series by its full name, labels included; 0 where it is absent."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_for_metric(self, name: str, value: float, seconds: float = 30.0) -> None:
        """Wait until a series has a value: what follows an answer is counted just after it."""
        deadline = time.monotonic() + seconds
        while self.metric(name) != value and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.metric(name) == value

    def worker_pid(self) -> int:
        pids = [line["pid"] for line in self.lines() if line["event"] == "worker ready"]
        return int(pids[-1])

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def spooled(self) -> list[str]:
        return sorted(path.name for path in (self.data_dir / "spool").iterdir())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.process.kill()


@contextmanager
def running(data_dir: Path, ready: bool = True, **environment: str) -> Iterator[Service]:
    """A service with these settings (`MODEL="…"` is THIMBLE_MODEL), stopped at the end of the block."""
    service = Service(data_dir, {f"THIMBLE_{name}": value for name, value in environment.items()})
    try:
        if ready:
            service.wait_for("/readyz", 200)
        yield service
    finally:
        service.stop()
