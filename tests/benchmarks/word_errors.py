"""Word error rate over a set of recordings with transcripts, and what it took.

    python -m tests.benchmarks.word_errors --set librispeech-test-other --model DIR=KV [--model DIR=KV …] SPEECH_DIR

SPEECH_DIR holds manifest.jsonl: path, set, language, text. Both sides go through Whisper's English normaliser (the
whisper-normalizer package); errors are summed over the set (the jiwer package).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
from whisper_normalizer.english import EnglishTextNormalizer

from engine.decoding import DecodingOptions
from engine.decoding.options import TEMPERATURES
from engine.timings import LayerTimings
from engine.transcribe import Engine

normalise = EnglishTextNormalizer()


@dataclass(frozen=True)
class WordErrors:
    heard: list[str]
    percent: float
    words: int
    errors: tuple[int, int, int]  # substitutions, deletions, insertions
    seconds: float
    audio_seconds: float

    def __str__(self) -> str:
        s, d, i = self.errors
        return (
            f"{self.percent:.2f} % of {self.words} words wrong in {len(self.heard)} recordings (S {s} D {d} I {i}), "
            f"{self.seconds:.0f} s for {self.audio_seconds:.0f} s of sound: real-time factor "
            f"{self.seconds / self.audio_seconds:.2f}"
        )


def read_set(speech: Path, *sets: str) -> list[dict[str, Any]]:
    """Rows of the manifest that belong to the sets and have a transcript."""
    rows = [json.loads(line) for line in (speech / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["set"] in sets and row["text"]]


def evaluate(engine: Engine, rows: list[dict[str, Any]], speech: Path, options: DecodingOptions) -> WordErrors:
    """Transcribe every row's recording and sum the errors."""
    started, audio_seconds, heard = time.perf_counter(), 0.0, []
    for row in rows:
        transcript = engine.transcribe(speech / row["path"], LayerTimings(), options)
        audio_seconds += transcript.seconds
        heard.append(normalise(transcript.text))
    seconds = time.perf_counter() - started
    output = jiwer.process_words([normalise(row["text"]) for row in rows], heard)
    words = output.hits + output.substitutions + output.deletions
    errors = (output.substitutions, output.deletions, output.insertions)
    return WordErrors(heard, 100 * output.wer, words, errors, seconds, audio_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--set", action="append", required=True)
    parser.add_argument("--model", action="append", required=True, metavar="DIR=KV")
    parser.add_argument("--temperatures", default=",".join(map(str, TEMPERATURES)), help="0 decodes every window once")
    args = parser.parse_args()
    options = DecodingOptions("en", temperatures=tuple(map(float, args.temperatures.split(","))))
    rows = read_set(args.speech, *args.set)
    first: list[str] = []
    for variant in args.model:
        directory, _, kv = variant.rpartition("=")
        result = evaluate(Engine(Path(directory), kv), rows, args.speech, options)
        first = first or result.heard
        changed = sum(a != b for a, b in zip(result.heard, first, strict=True))
        print(f"{variant}: {result}, {changed} transcripts differ from the first variant's", flush=True)


if __name__ == "__main__":
    main()
