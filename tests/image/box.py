"""A composed service under test, on whatever processor DOCKER_DEFAULT_PLATFORM names (an emulated one takes minutes)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.integration.running import free_port

ROOT = Path(__file__).parent.parent.parent
PLATFORM = os.environ.get("DOCKER_DEFAULT_PLATFORM", "")
EMULATED = bool(PLATFORM)
PATIENCE_SECONDS = 1800.0 if EMULATED else 180.0


def docker(*arguments: str, check: bool = True) -> str:
    """Standard output of a docker command, stripped."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, cwd=ROOT)
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stderr}")
    return done.stdout.strip()


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


class Box:
    """A running container of the service, by its name."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS)

    def answers(self, path: str, status: int) -> bool:
        try:
            return self.client.get(path).status_code == status
        except httpx.TransportError:
            return False

    def wait_until_ready(self) -> None:
        until(lambda: self.answers("/readyz", 200), f"ready: {self.log()}")

    def post(self, recording: Path | bytes) -> httpx.Response:
        content = recording if isinstance(recording, bytes) else recording.read_bytes()
        return self.client.post("/transcribe", files={"file": ("x", content)})

    def metric(self, series: str) -> float:
        lines = [line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines()]
        return next((float(value) for name, _, value in lines if name == series), 0.0)

    def run(self, *command: str, check: bool = True) -> str:
        """A command within the container."""
        return docker("exec", self.name, *command, check=check)

    def state(self, template: str) -> str:
        return docker("inspect", "--format", f"{{{{{template}}}}}", self.name)

    def log(self) -> str:
        done = subprocess.run(["docker", "logs", self.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout

    def lines(self, event: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [row for row in rows if row["event"] == event]

    def worker_pid(self) -> int:
        """Within the container."""
        return int(self.lines("worker ready")[-1]["pid"])


@contextmanager
def started(image: str, *options: str) -> Iterator[Box]:
    """One container beside the composed one, hardened the same, removed with its volume at the end."""
    port = free_port()
    hardened = ("--init", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
    name = docker("run", "--detach", *hardened, "--publish", f"127.0.0.1:{port}:8000", *options, image)
    box = Box(name, port)
    try:
        yield box
    finally:
        box.client.close()
        docker("rm", "--force", "--volumes", name)
