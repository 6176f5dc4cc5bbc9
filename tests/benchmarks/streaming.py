"""What reading ahead hides: one recording from slow storage, with all weights mapped, with two slots, and with one.

    python -m tests.benchmarks.streaming --board PATH_TO_BOARD [--mem 64M] [--read-bps 50M] [--no-cache] MODEL RECORDING

`board` runs a command in a control group (root). The model is dropped from the page cache before and after it is loaded, for
which every file is read; the seconds are the recording's alone, the best of all rounds, the plans taking turns. Without a
memory limit storage is read once and the page cache does the rest; `--no-cache` drops every piece after its use, as where there
is no room for any: then all plans that stream read the same bytes.

The control group's throttle lets a reader that paused for up to 100 ms catch up at full speed (Linux, block/blk-throttle.c),
which no card does: pauses as short as a decoder layer's arithmetic cost nothing with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.shards.manifest import read_manifest
from engine.shards.residency import named
from engine.timings import LayerTimings
from engine.transcribe import Engine

PLANS = ("resident", "two slots", "one slot")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HEAD = ("seconds", "encode", "decode", "compute", "wait", "MB read", "bound", "ratio", "ready", "asked", "faults")


class _Everything(set[object]):
    """Every piece, whatever is taken out."""

    def __contains__(self, piece: object) -> bool:
        return True


def transcribe(directory: Path, recording: Path, plan: str, no_cache: bool) -> None:
    """Print what transcribing took under a plan, as JSON."""
    manifest, timings = read_manifest(directory), LayerTimings()
    residency = named("resident" if plan == "resident" else "stream", manifest)
    if plan == "one slot":
        residency = replace(residency, slots=1)
    with closing(Engine(directory, "int8", residency)) as engine:
        if no_cache:
            engine._store._stream._uncached = _Everything()
        for file in manifest.files:
            descriptor = os.open(directory / file.file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        with timings.stage("whole"):
            engine.transcribe(recording, timings)
        read_bytes = 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before)
    figures = {name: sum(t.seconds for t in getattr(timings, name).values()) for name in ("wait", "compute")}
    figures |= {name: tally.seconds for name, tally in timings.stages.items()}
    print(json.dumps(timings.to_json() | figures | {"read_bytes": read_bytes}))


def measured(args: argparse.Namespace, plan: str) -> dict[str, Any]:
    limits = ["--cpus", "2", "--read-bps", args.read_bps, *(["--mem", args.mem] if args.mem else [])]
    own = [sys.executable, "-m", "tests.benchmarks.streaming", "--plan", plan, args.model, args.recording]
    own += ["--no-cache"] if args.no_cache else []
    command = [args.board, *limits, "--cold", *args.model.glob("*.safetensors"), "--", *own]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def row(found: dict[str, Any], bandwidth: float) -> list[float]:
    """The figures of `HEAD`; the bound is what arithmetic and storage take, whichever is more."""
    bound = max(found["whole"] - found["wait"], found["read_bytes"] / bandwidth)
    ahead = found["prefetch_hits"], found["prefetch_hits"] + found["prefetch_waits"]
    times = [found[name] for name in ("whole", "encode", "decode", "compute", "wait")]
    return [*times, found["read_bytes"] / 1e6, bound, found["whole"] / bound, *ahead, found["compute_major_faults"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--board", type=Path)
    parser.add_argument("--mem", default="")
    parser.add_argument("--read-bps", default="50M")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan", choices=PLANS, help="transcribe here, and say what that took")
    args = parser.parse_args()
    if args.plan:
        transcribe(args.model, args.recording, args.plan, args.no_cache)
        return
    best: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        for plan in PLANS:
            found = measured(args, plan)
            if plan not in best or found["whole"] < best[plan]["whole"]:
                best[plan] = found
    bandwidth = float(args.read_bps[:-1]) * UNITS[args.read_bps[-1]]
    print(f"{'':10}" + "".join(f"{name:>9}" for name in HEAD))
    for plan, found in best.items():
        print(f"{plan:10}" + "".join(f"{n:9.2f}" if isinstance(n, float) else f"{n:9}" for n in row(found, bandwidth)))


if __name__ == "__main__":
    main()
