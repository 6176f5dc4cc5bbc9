"""Memory and errors over hours: real recordings with pauses between them, joined into one.

    python -m tests.benchmarks.long_recording --model DIR [--hours 3] SPEECH_DIR SET [SET …]

Joins the sets' recordings, over and over, with pauses of 10 to 90 s of faint hiss between them, until the hours are full; the
first minute has no pauses, so that its windows are full ones.
Transcribes the first minute of it, the whole, and each recording alone, in processes of their own; prints the peaks of
resident memory, and the errors of the whole beside the sum of its parts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from engine.audio import read_blocks
from engine.dims import SAMPLE_RATE
from engine.wer import Row, Score, Scorer, read_rows

PAUSE_SECONDS = 10.0, 90.0
HISS = 2e-4


def join(rows: list[Row], speech: Path, hours: float, out: Path) -> list[Row]:
    """Write the recording; returns what is said in it."""
    draw, noise = random.Random(0), np.random.default_rng(0)  # noqa: S311 - pauses are no secrets
    said: list[Row] = []
    n_samples, end = 0, int(hours * 3600 * SAMPLE_RATE)
    with soundfile.SoundFile(out, "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC") as file:
        while True:
            row = rows[len(said) % len(rows)]
            samples = np.concatenate(list(read_blocks(speech / row.path)))
            seconds = 0.0 if n_samples < 60 * SAMPLE_RATE else draw.uniform(*PAUSE_SECONDS)
            pause = HISS * noise.standard_normal(int(seconds * SAMPLE_RATE))
            if n_samples + len(samples) + len(pause) > end:
                file.write(HISS * noise.standard_normal(end - n_samples))
                return said
            file.write(samples)
            file.write(pause)
            n_samples += len(samples) + len(pause)
            said.append(row)


def transcribe(model: Path, *paths: Path) -> tuple[list[str], int]:
    """Texts, and the peak of resident bytes, of a process that transcribes the files one after another."""
    command = [sys.executable, "-m", "engine", "transcribe", "--model", str(model), "--format", "json", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        texts = [json.loads(line)["text"] for line in child.stdout]
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"thimble transcribe ended with {child.returncode}")
    return texts, usage.ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=3.0)
    args = parser.parse_args()
    rows = read_rows(args.speech / "manifest.jsonl", args.sets)
    with tempfile.TemporaryDirectory() as directory:
        whole, minute = Path(directory, "whole.flac"), Path(directory, "minute.flac")
        said = join(rows, args.speech, args.hours, whole)
        first, rate = soundfile.read(whole, frames=60 * SAMPLE_RATE, dtype="int16")
        soundfile.write(minute, first, rate, subtype="PCM_16")
        _, minute_peak = transcribe(args.model, minute)
        (text,), whole_peak = transcribe(args.model, whole)
    alone, _ = transcribe(args.model, *(args.speech / row.path for row in rows))
    scorer, score, parts = Scorer(), Score("words"), Score("words")
    scorer.add(score, Row("", "", "en", " ".join(row.text for row in said)), text)
    heard = dict(zip((row.path for row in rows), alone, strict=True))
    for row in said:
        scorer.add(parts, row, heard[row.path])
    print(f"{len(said)} recordings in {args.hours:g} h")
    print(f"peak of resident memory: first minute {minute_peak / 1e6:.1f} MB, whole {whole_peak / 1e6:.1f} MB")
    for name, one in (("whole", score), ("parts", parts)):
        counts = f"S {one.substitutions} D {one.deletions} I {one.insertions}"
        print(f"{name}: {one.percent:.2f} % of {one.n_units} words wrong ({counts})")


if __name__ == "__main__":
    main()
