"""Start the service, post a recording to it, print the text and where the time went, stop it. The standard library alone.

python deploy/demo.py RECORDING
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START_SECONDS = 600  # a slow board may fetch the model first
BOUNDARY = "thimble-demo-boundary"
SAMPLE = re.compile(r'(thimble_\w+)\{layer="([^"]+)",stack="([^"]+)"\} (\S+)')


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def post(url: str, recording: Path) -> str:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="recording"\r\n\r\n'
    body = head.encode() + recording.read_bytes() + f"\r\n--{BOUNDARY}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
            return str(json.load(response)["text"])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"refused: {json.load(error)['error']['message']}") from error


def wait_until_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while service.poll() is None and time.monotonic() < deadline:
        try:
            get(f"{url}/readyz")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the service did not become ready; its log is above")


def layer_table(page: str) -> str:
    """Seconds of load and compute per layer, from the metrics page."""
    values = {(stack, layer, name): float(value) for name, layer, stack, value in SAMPLE.findall(page)}
    order = {"stem": -1, "ln_post": 997, "ln": 998, "embedding": 999}
    layers = sorted({key[:2] for key in values}, key=lambda k: (k[0] != "encoder", order.get(k[1]) or int(k[1] or 0)))
    lines = [f"{'stack':8} {'layer':>9} {'passes':>7} {'load ms':>9} {'compute ms':>11}"]
    for stack, layer in layers:
        load, compute, passes = (
            values.get((stack, layer, f"thimble_layer_{name}"), 0.0)
            for name in ("load_seconds_sum", "compute_seconds_sum", "compute_seconds_count")
        )
        lines.append(f"{stack:8} {layer:>9} {passes:7.0f} {1e3 * load:9.1f} {1e3 * compute:11.1f}")
    return "\n".join(lines)


def metric(page: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("usage: python deploy/demo.py RECORDING")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    service = subprocess.Popen([sys.executable, "-m", "service"], env=os.environ | {"THIMBLE_PORT": str(port)})
    try:
        wait_until_ready(url, service)
        started = time.monotonic()
        text = post(f"{url}/transcribe", Path(sys.argv[1]))
        wall = time.monotonic() - started
        page = get(f"{url}/metrics")
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait()
    audio = metric(page, "thimble_audio_seconds_total")
    print(f"\n{text}\n\n{layer_table(page)}\n")
    print(f"{audio:.1f} s of sound in {wall:.1f} s: real-time factor {wall / audio:.2f} (below 1 is faster than real time)")


if __name__ == "__main__":
    main()
