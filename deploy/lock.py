"""Write deploy/requirements.txt: what the image takes from wheels, pinned by version and by hash, for all three processors.

    python deploy/lock.py

Resolved from pyproject.toml for Debian 13's Python; `DEBIAN` is what the image takes from Debian in its place. A wheel that a
processor lacks ends it with pip's own error. pip takes environment markers from the Python that runs it, so look at the diff.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "deploy" / "requirements.txt"
PYTHON = "3.13"
DEBIAN = {"numpy", "soundfile"}
"""No wheels for arm/v7."""
PLATFORMS = {
    "amd64": ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64"),
    "arm64": ("manylinux_2_17_aarch64", "manylinux2014_aarch64", "manylinux_2_28_aarch64"),
    "arm/v7": ("manylinux_2_17_armv7l", "manylinux2014_armv7l", "manylinux_2_31_armv7l"),
}
HEADER = """\
# Written by deploy/lock.py: do not edit. One set of versions for amd64, arm64 and arm/v7.
# pip install --no-deps --require-hashes -r deploy/requirements.txt
"""


def report(requirements: list[str], tags: tuple[str, ...], *options: str) -> list[tuple[str, str, str]]:
    """Name, version and SHA-256 of each wheel that pip would install on a processor."""
    platforms = [option for tag in tags for option in ("--platform", tag)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "--target", "/nonexistent"]
    done = subprocess.run([*command, *platforms, *options, *requirements], stdout=subprocess.PIPE, check=True)
    return [
        (
            re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(),
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in json.loads(done.stdout)["install"]
    ]


def main() -> None:
    """Resolve once, then find every processor's wheel of each version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [item for item in project["dependencies"] if re.split(r"[<>=]", item)[0] not in DEBIAN]
    hashes: dict[str, set[str]] = {}
    pins: list[str] = []
    for tags in PLATFORMS.values():
        found = report(pins, tags, "--no-deps") if pins else report(wanted, tags)
        pins = pins or sorted(f"{name}=={version}" for name, version, _ in found)
        for name, version, sha256 in found:
            hashes.setdefault(f"{name}=={version}", set()).add(sha256)
    lines = [pin + "".join(f" \\\n    --hash=sha256:{value}" for value in sorted(hashes[pin])) for pin in pins]
    TARGET.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
