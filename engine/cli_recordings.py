"""The commands that listen: `thimble transcribe` and `thimble wer`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli_decoding import decoding_options
from engine.errors import EngineError, NameTaken
from engine.progress import show_progress

if TYPE_CHECKING:
    from engine.timings import LayerTimings
    from engine.transcribe import Engine, Transcript
    from engine.wer import Score

FORMATS = ("txt", "json", "srt", "vtt", "tsv")


def say(line: str) -> None:
    """On standard error: standard output is for results."""
    print(line, file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """An error in one line, with its code or its file."""
    if isinstance(error, EngineError):
        return f"{error} [{error.code}]"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def load_engine(args: argparse.Namespace, models: Path) -> Engine:
    from engine.published import find_model
    from engine.transcribe import Engine

    directory = find_model(models, args.model, args.weights)
    if args.residency is None and args.budget is None:
        return Engine.within_what_is_left(directory, args.kv, args.tail)
    return Engine(directory, args.kv, args.residency or "resident", args.tail, args.budget)


def transcribe(args: argparse.Namespace, models: Path) -> None:
    """`thimble transcribe`: one load, every file; one that fails does not keep the others."""
    from engine.timings import LayerTimings

    options = decoding_options(args)
    engine = load_engine(args, models)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    failed, written = 0, set[Path]()
    for path in args.files:
        timings = LayerTimings()

        def draw(done: float, total: float, name: str = path.name) -> None:
            show_progress(name, done / total, f"{done:.0f} of {total:.0f} s")

        try:
            transcript = engine.transcribe(path, timings, options, on_progress=draw)
            rendered = render(path, transcript, timings, args.format)
            if args.beside:
                say(f"{_write_beside(path, args.format, rendered, written)}")
            else:
                sys.stdout.write(rendered)
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except (EngineError, OSError) as error:
            failed += 1
            say(one_line(error) if isinstance(error, OSError) else f"{path}: {one_line(error)}")
    if failed:
        raise SystemExit(f"thimble: {failed} of {len(args.files)} files failed")


def render(path: Path, transcript: Transcript, timings: LayerTimings, form: str) -> str:
    """A transcript in one of `FORMATS`; `json` is one line with everything that is known."""
    from engine.writers import WRITERS

    if form != "json":
        return WRITERS[form](transcript.segments)
    # A name that is no UTF-8 is still a file's; JSON has to be UTF-8.
    name = os.fsencode(path).decode("utf-8", errors="replace")
    row = {"file": name} | asdict(transcript) | {"timings": timings.to_json()}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write_beside(path: Path, form: str, rendered: str, written: set[Path]) -> Path:
    """Write next to the recording, whole or not at all; never over a recording, nor over what this run wrote.

    Raises
    ------
    NameTaken
    """
    target = path.with_suffix(f".{form}")
    if target == path or target in written:
        what = "the recording itself" if target == path else "that of another recording"
        raise NameTaken(f"its transcript would be {target.name}, and replace {what}")
    written.add(target)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(rendered, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def wer(args: argparse.Namespace, models: Path) -> None:
    """`thimble wer`: error rates by set, the real-time factor and the peak of memory."""
    from engine.timings import LayerTimings
    from engine.wer import Scorer, read_rows

    options = decoding_options(args)
    rows = read_rows(args.manifest, args.sets.split(",") if args.sets else ())
    scorer = Scorer()
    engine = load_engine(args, models)
    heard, scored, refused, audio_seconds, started = list[str](), [], list[str](), 0.0, time.perf_counter()
    for number, row in enumerate(rows, 1):
        try:
            transcript = engine.transcribe(args.manifest.parent / row.path, LayerTimings(), options)
        except (EngineError, OSError) as error:
            refused.append(f"{row.path}: {one_line(error)}")
        else:
            scored.append(row)
            heard.append(transcript.text)
            audio_seconds += transcript.seconds
        show_progress(args.manifest.name, number / len(rows), f"{number} of {len(rows)} recordings")
    seconds = time.perf_counter() - started
    scores = scorer.scores(scored, heard)
    factor = seconds / audio_seconds if audio_seconds else 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # it comes in KiB (getrusage(2))
    if args.json:
        table: dict[str, object] = {name: score.to_json() for name, score in scores.items()}
        figures = {"audio_seconds": audio_seconds, "seconds": seconds, "real_time_factor": factor, "peak_resident_bytes": peak}
        print(json.dumps({"scores": table, "refused": refused} | figures, ensure_ascii=False))
    else:
        _print_scores(scores)
        print(
            f"{audio_seconds:.0f} s of sound in {seconds:.0f} s: real-time factor {factor:.2f}, below 1 is faster than it plays"
        )
        print(f"peak of resident memory: {peak / (1 << 20):.0f} MiB")
    for line in refused:
        say(line)
    if refused:
        raise SystemExit(f"thimble: {len(refused)} of {len(rows)} recordings could not be scored")


def _print_scores(scores: dict[str, Score]) -> None:
    print(f"{'set':44} {'files':>6} {'units':>7} {'wrong':>9} {'subst.':>7} {'deleted':>8} {'inserted':>9}")
    for name, score in scores.items():
        counts = f"{score.substitutions:7} {score.deletions:8} {score.insertions:9}"
        print(f"{name:44} {score.n_files:6} {score.n_units:7} {score.percent:7.2f} % {counts}")


def silence_closed_output() -> None:
    """Let Python's own flush at exit find somewhere to write: the reader of our output has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
