"""The systemd unit, as systemd-analyze reads it. What it does to the running service: deploy/without-docker.md, "Tried"."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import Settings

UNIT = Path(__file__).parents[2] / "deploy" / "thimble.service"
MAX_EXPOSURE_TENTHS = 15
"""It is at 1.1 to 1.3, by systemd's version; the service's own needs (network, sockets) are the most of it."""


@pytest.fixture
def analyze(tmp_path: Path) -> list[str]:
    """The program and a copy of the unit that starts something which is here."""
    path = shutil.which("systemd-analyze")
    if not path:
        pytest.skip("systemd-analyze is not here (Debian's package systemd)")
    copy = tmp_path / "thimble.service"
    copy.write_text(UNIT.read_text().replace("/opt/thimble/bin/thimble-serve", sys.executable))
    return [path, str(copy)]


def test_systemd_finds_no_fault(analyze: list[str]) -> None:
    done = subprocess.run([analyze[0], "verify", analyze[1]], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "thimble.service" in line]) == (0, [])


def test_it_stays_as_closed_as_it_is(analyze: list[str]) -> None:
    command = [analyze[0], "security", "--offline=true", f"--threshold={MAX_EXPOSURE_TENTHS}", "--no-pager", analyze[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_systemd_waits_longer_than_a_drain_takes() -> None:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(seconds) > Settings.model_fields["drain_seconds"].default + 2
