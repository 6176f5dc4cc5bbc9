"""`thimble plan`: what a model costs within a budget, before it runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes of a size as people write it: `90M`, `1.5G`, `94371840`. K, M and G are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:I?B)?", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 90M, 1.5G or a number of bytes")
    return int(float(found[1]) * UNITS[found[2]])


def plan(args: argparse.Namespace, models: Path) -> None:
    """Print the plan; a budget that does not do ends the command with what would."""
    import engine.transcribe  # noqa: F401 - what a process with an engine has loaded belongs to its size
    from engine.forecast import forecast, read_work
    from engine.memory import available_budget, resident_bytes
    from engine.plan import KV_CHOICES, make_plan
    from engine.published import find_model
    from engine.shards.manifest import read_manifest

    manifest = read_manifest(find_model(models, args.name, args.weights))
    budget = args.budget or available_budget() or sys.maxsize
    made = make_plan(manifest, budget, resident_bytes(), KV_CHOICES if args.kv is None else (args.kv,))
    seconds = forecast(made, args.read_bps, read_work(args.times) if args.times else None)
    if args.json:
        print(json.dumps({"budget_bytes": budget} | made.to_json() | seconds))
        return
    rows = [
        ("budget", budget),
        ("peak", made.peak_bytes),
        ("  process", made.process_bytes),
        ("  work", made.work_bytes),
        ("  arena", made.arena_bytes),
        ("  weights", made.weight_bytes),
        ("read a window", made.window_read_bytes),
        ("read a token", made.token_read_bytes),
    ]
    for name, n_bytes in rows:
        print(f"{name:20} {n_bytes / (1 << 20):8.1f} MiB")
    for name, value in seconds.items():
        print(f"{name.replace('_', ' '):20} {value:8.3f}")
    pinned = sorted(made.residency.pinned)
    n_streamed = sum(file.stack != "tokenizer" for file in manifest.files) - len(pinned)
    ahead = "the next one read ahead" if made.residency.slots > 1 else "one at a time"
    print(f"{'K/V':20} {made.kv}")
    print(f"{'stays mapped':20} {', '.join(pinned) or 'nothing'}")
    print(f"{'streamed':20} {f'{n_streamed} files, {ahead}' if n_streamed else 'nothing'}")
