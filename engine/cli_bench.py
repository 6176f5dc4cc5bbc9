"""`thimble bench`: where the seconds and the bytes of recordings go."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.timings import LayerTimings, Tally
    from engine.wer import Row

MANIFEST_SUFFIX = ".jsonl"


def bench(args: argparse.Namespace, models: Path) -> None:
    """Transcribe, and print seconds by stage and layer, bytes, tokens a second and the peaks of memory."""
    from engine.cli_decoding import decoding_options
    from engine.cli_recordings import load_engine
    from engine.published import find_model
    from engine.timings import LayerTimings

    options, timings = decoding_options(args), LayerTimings()
    recordings = _recordings(args.audio)
    engine = load_engine(args, models)
    if args.cold:
        drop_from_page_cache(find_model(models, args.model, args.weights))
    started = time.perf_counter()
    transcripts = [engine.transcribe(path, timings, options) for path, _ in recordings]
    seconds = time.perf_counter() - started
    decode, tokens = timings.stages.get("decode"), sum(transcript.n_tokens for transcript in transcripts)
    figures: dict[str, float] = {
        "audio_seconds": sum(transcript.seconds for transcript in transcripts),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / decode.seconds if decode is not None else 0.0,
        "shard_loads": timings.shard_loads,
        "shard_bytes": timings.shard_bytes,
        "storage_bytes": timings.shard_read_bytes,
        "prefetch_hits": timings.prefetch_hits,
        "prefetch_waits": timings.prefetch_waits,
        "compute_major_faults": timings.compute_major_faults,
        "self_kv_bytes": engine.kv_bytes["self"],
        "cross_kv_bytes": engine.kv_bytes["cross"],
        **_memory(),
    }
    if engine.plan is not None:
        figures["planned_peak_bytes"] = engine.plan.peak_bytes
    texts = [transcript.text for transcript in transcripts]
    known = [(row, text) for (_, row), text in zip(recordings, texts, strict=True) if row is not None]
    if known:
        figures["words_wrong_percent"] = _words_wrong(known)
    if args.json:
        print(json.dumps(figures | {"timings": timings.to_json(), "texts": texts}))
    else:
        _print_tables(timings, figures)


def _recordings(audio: Path) -> list[tuple[Path, Row | None]]:
    """The recording, or those of a manifest with their transcripts."""
    from engine.wer import read_rows

    if audio.suffix != MANIFEST_SUFFIX:
        return [(audio, None)]
    return [(audio.parent / row.path, row) for row in read_rows(audio)]


def _words_wrong(heard: list[tuple[Row, str]]) -> float:
    """Percent; imports what compares only now, when the peaks of memory are known."""
    from engine.wer import Score, Scorer

    scorer, score = Scorer(), Score("units")
    for row, text in heard:
        scorer.add(score, row, text)
    return score.percent


def _memory() -> dict[str, float]:
    from engine.memory import control_group_peak

    status: dict[str, Any] = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        # proc(5): kB are KiB
        "peak_resident_bytes": int(status["VmHWM"].split()[0]) << 10,
        "anonymous_bytes": int(status["RssAnon"].split()[0]) << 10,
        "file_bytes": int(status["RssFile"].split()[0]) << 10,
        "control_group_peak_bytes": control_group_peak(),
    }


def drop_from_page_cache(directory: Path) -> None:
    """Let the kernel forget a model's files, as far as no other process maps them: they are read from storage again."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not written yet is not forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _print_tables(timings: LayerTimings, figures: dict[str, float]) -> None:
    print(f"{'layer':20} {'passes':>7} {'load ms':>9} {'wait ms':>9} {'compute ms':>11}")
    for (stack, layer), compute in timings.compute.items():
        load, wait = timings.load.get((stack, layer)), timings.wait.get((stack, layer))
        columns = f"{_milliseconds(load):9.1f} {_milliseconds(wait):9.1f} {_milliseconds(compute):11.1f}"
        print(f"{stack + ' ' + layer:20} {compute.count:7} {columns}")
    print(f"\n{'stage':20} {'times':>7} {'ms':>9}")
    for name, tally in timings.stages.items():
        print(f"{name:20} {tally.count:7} {_milliseconds(tally):9.1f}")
    print()
    for name, value in figures.items():
        shown = f"{value / (1 << 20):.1f} MiB" if name.endswith("_bytes") else f"{value:.2f}".removesuffix(".00")
        print(f"{name.removesuffix('_bytes').replace('_', ' '):24} {shown:>12}")


def _milliseconds(tally: Tally | None) -> float:
    return 0.0 if tally is None else 1e3 * tally.seconds
