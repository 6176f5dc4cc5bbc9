"""`thimble bench --compare`: the same work done in several ways, each in a process of its own, as a table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.cli_recordings import say

COMPARISONS = ("kv", "shards", "budget")
SHARDS = ("1", "2", "3", "all")
"""Layers per shard."""
N_BUDGETS = 5
THIMBLE = (sys.executable, "-m", "engine")
SLACK_BYTES = 1 << 20
"""Added to a plan's peak for the budget: a process's size before it has a model differs a little from one to the next."""

Figures = dict[str, Any]
Variant = tuple[str, list[str]]
"""What a row is called, and the options that make it."""


def compare(args: argparse.Namespace, models: Path) -> None:
    """Print a table for each of `args.compare`; with `--json`, one object of rows by name."""
    from engine.published import find_model

    directory = find_model(models, args.model, args.weights)
    makers = {"kv": _kv_variants, "shards": _shard_variants, "budget": _budget_variants}
    tables: dict[str, dict[str, Figures]] = {}
    for name in args.compare:
        tables[name] = rows = dict[str, Figures]()
        for label, options in makers[name](directory, args.kv):
            rows[label] = _measured(args.arguments, options)
            if not args.json:
                _print_row(name, label, rows)
    if args.json:
        print(json.dumps(tables))


def _kv_variants(directory: Path, kv: str | None) -> Iterator[Variant]:
    from engine.kv_cache import KV_POLICIES

    for policy in sorted(KV_POLICIES, key=lambda policy: policy != "f32"):  # the others are compared with it
        yield policy, ["--kv", policy]


def _shard_variants(directory: Path, kv: str | None) -> Iterator[Variant]:
    """The model cut anew, next to the one that is measured: a directory for temporary files may lie in memory.

    By another process: what cuts it would stay in this one, beside what is measured.
    """
    for number in SHARDS:
        with tempfile.TemporaryDirectory(prefix=".compared-", dir=directory.parent) as beside:
            cut = Path(beside, directory.name)
            command = [*THIMBLE, "reshard", str(directory), str(cut), "--layers-per-shard", number]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stderr.strip())
            yield number, ["--model", str(cut), "--residency", "stream", "--cold"]


def _budget_variants(directory: Path, kv: str | None) -> Iterator[Variant]:
    """From all weights in memory to the least, in even steps of the plans that there are."""
    import engine.transcribe  # noqa: F401 - what a process with an engine has loaded belongs to its size
    from engine.memory import resident_bytes
    from engine.plan import KV_CHOICES, all_plans
    from engine.shards.manifest import read_manifest

    plans = all_plans(read_manifest(directory), resident_bytes(), KV_CHOICES[:1] if kv is None else (kv,))
    chosen = sorted({round(i * (len(plans) - 1) / (N_BUDGETS - 1)) for i in range(N_BUDGETS)})
    for number in chosen:
        budget = plans[number].peak_bytes + SLACK_BYTES
        yield f"{budget / (1 << 20):.0f}M", ["--budget", str(budget), "--cold"]


def _measured(arguments: Sequence[str], options: list[str]) -> Figures:
    """What `thimble bench` says of one way; a later option wins over an earlier one."""
    command = [*THIMBLE, *arguments, *options, "--compare", "", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        ending = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        say(f"{' '.join(options)}: {ending}")
        return {}
    figures: Figures = json.loads(done.stdout)
    return figures


def _print_row(name: str, label: str, rows: dict[str, Figures]) -> None:
    """The newest row, below a head where it is the first; where it did not end well, nothing but what it is called."""
    figures, first = rows[label], next((figures for figures in rows.values() if figures), None)
    if first is None or not figures:
        print(label)
        return
    mib = {key: value / (1 << 20) for key, value in figures.items() if key.endswith("_bytes")}
    cells = {
        "peak MiB": f"{mib['peak_resident_bytes']:.1f}",
        "file MiB": f"{mib['file_bytes']:.1f}",
        "K/V MiB": f"{mib['self_kv_bytes'] + mib['cross_kv_bytes']:.1f}",
        "loads": str(figures["shard_loads"]),
        "mapped MB": f"{figures['shard_bytes'] / 1e6:.0f}",
        "read MB": f"{figures['storage_bytes'] / 1e6:.0f}",
        "s": f"{figures['seconds']:.1f}",
        "s/token": f"{1 / figures['tokens_per_second']:.3f}" if figures["tokens_per_second"] else "",
        "changed": str(sum(a != b for a, b in zip(first["texts"], figures["texts"], strict=True))),
    }
    if "planned_peak_bytes" in first:
        cells["foreseen"] = f"{mib['planned_peak_bytes']:.1f}"
    if "words_wrong_percent" in first:
        cells["% wrong"] = f"{figures['words_wrong_percent']:.2f}"
    if figures is first:
        print(f"{name:12} " + " ".join(f"{title:>9}" for title in cells))
    print(f"{label:12} " + " ".join(f"{cell:>9}" for cell in cells.values()), flush=True)
