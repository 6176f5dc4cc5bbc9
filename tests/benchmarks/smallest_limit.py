"""The smallest memory limit under which the whole service transcribes a recording, page cache counted.

    python -m tests.benchmarks.smallest_limit --board PATH_TO_BOARD [--low 40] [--high 160] [--step 4] RECORDING

`board` runs a command in a control group (root); here it runs `python -m service` on one core. The recording is posted from
outside the group, twice. Settings come from the environment, as the service reads them. Python, its packages and the model are
dropped from the page cache first: what another process has read already is charged to that one, and would make the limit look
smaller than it is on a board that has just booted.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import httpx

from tests.integration.running import free_port

TIMEOUT_SECONDS = 240


def lives(board: Path, mebibytes: int, recording: Path) -> bool:
    """Whether the service answers twice under this limit with nothing killed; prints what it took."""
    port = free_port()
    command = [board, "--mem", f"{mebibytes}M", "--cpus", "1", "--", sys.executable, "-m", "service"]
    environment = os.environ | {"THIMBLE_PORT": str(port)}
    _drop_from_page_cache()
    group = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    seconds: list[float] = []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_SECONDS) as client:
            deadline = time.monotonic() + 60
            while group.poll() is None and time.monotonic() < deadline and not _is_ready(client):
                time.sleep(0.2)
            for _ in range(2):
                started = time.monotonic()
                response = client.post("/transcribe", files={"file": ("x", recording.read_bytes())})
                if response.status_code == 200 and response.json()["text"]:
                    seconds.append(time.monotonic() - started)
    except httpx.TransportError:
        pass
    finally:
        group.send_signal(signal.SIGTERM)
        _, log = group.communicate()
    report = re.findall(r"^board: .*", log, re.MULTILINE)[-1]
    alive = len(seconds) == 2 and "oom kills 0" in report
    print(f"{mebibytes} MiB: {'lives' if alive else 'dies'}, jobs {[round(s, 1) for s in seconds]} s; {report}", flush=True)
    return alive


def _drop_from_page_cache() -> None:
    """Python's library, the installed packages and the models: what the service maps or reads, but for what we map too."""
    models = Path(os.environ["THIMBLE_DATA_DIR"]) / "models"
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {models}
    endings = {".py", ".pyc", ".so", ".safetensors", ".json"}
    for path in {p for root in roots for p in root.rglob("*") if p.suffix in endings or ".so." in p.name}:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--board", type=Path, required=True)
    parser.add_argument("--low", type=int, default=40, help="MiB known to be too little")
    parser.add_argument("--high", type=int, default=160)
    parser.add_argument("--step", type=int, default=4)
    args = parser.parse_args()
    low, high = args.low, args.high
    if not lives(args.board, high, args.recording):
        raise SystemExit(f"it needs more than {high} MiB")
    while high - low > args.step:
        middle = (low + high) // 2
        low, high = (low, middle) if lives(args.board, middle, args.recording) else (middle, high)
    print(f"the smallest limit that lives is {high} MiB, {low} MiB is too little")


if __name__ == "__main__":
    main()
