"""Word error rate over a set of recordings with transcripts, and what it took.

    python tests/benchmarks/word_errors.py --set librispeech-test-other --model DIR=KV [--model DIR=KV …] SPEECH_DIR

SPEECH_DIR holds manifest.jsonl: path, set, language, text. Both sides go through Whisper's English normaliser (the
whisper-normalizer package); errors are summed over the set (the jiwer package).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jiwer
from whisper_normalizer.english import EnglishTextNormalizer

from engine.timings import LayerTimings
from engine.transcribe import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--set", action="append", required=True)
    parser.add_argument("--model", action="append", required=True, metavar="DIR=KV")
    args = parser.parse_args()
    normalise = EnglishTextNormalizer()
    rows = [json.loads(line) for line in (args.speech / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["set"] in args.set and row["text"]]
    texts: list[list[str]] = []
    for variant in args.model:
        directory, _, kv = variant.rpartition("=")
        engine = Engine(Path(directory), kv)
        started, audio_seconds = time.perf_counter(), 0.0
        heard = []
        for row in rows:
            transcript = engine.transcribe(args.speech / row["path"], LayerTimings(), "en")
            audio_seconds += transcript.seconds
            heard.append(normalise(transcript.text))
        wall = time.perf_counter() - started
        texts.append(heard)
        output = jiwer.process_words([normalise(row["text"]) for row in rows], heard)
        changed = sum(a != b for a, b in zip(heard, texts[0], strict=True))
        words = output.hits + output.substitutions + output.deletions
        print(
            f"{variant}: {100 * output.wer:.2f} % of {words} words wrong in {len(rows)} recordings "
            f"(S {output.substitutions} D {output.deletions} I {output.insertions}), {changed} transcripts differ from "
            f"the first variant's, {wall:.0f} s for {audio_seconds:.0f} s of sound "
            f"(real-time factor {wall / audio_seconds:.2f})",
            flush=True,
        )
        engine.close()


if __name__ == "__main__":
    main()
