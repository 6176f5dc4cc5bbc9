"""Language detection and error rates by language, ours beside openai/whisper's recorded answers for the same recordings.

    python -m tests.benchmarks.languages --model DIR [--kv f32] [--tail whole] [--temperatures 0] RECORDED.jsonl SPEECH_DIR

RECORDED has path, text and language a line; SPEECH_DIR its recordings and manifest.jsonl. The language is never given. Errors
are words, or characters in Chinese, Japanese and Korean, over recordings with a transcript that no recogniser wrote.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from engine.decoding import DecodingOptions
from engine.decoding.options import TEMPERATURES
from engine.errors import EngineError
from engine.timings import LayerTimings
from engine.transcribe import Engine
from engine.wer import Row, Score, Scorer, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--tail", default="merged")
    parser.add_argument("--temperatures", default=",".join(map(str, TEMPERATURES)))
    args = parser.parse_args()
    options = DecodingOptions(temperatures=tuple(map(float, args.temperatures.split(","))))
    manifest = args.speech / "manifest.jsonl"
    languages = {row["path"]: row["language"] for row in map(json.loads, manifest.read_text(encoding="utf-8").splitlines())}
    transcripts = {row.path: row for row in read_rows(manifest)}
    engine, scorer = Engine(args.model, args.kv, tail=args.tail), Scorer()
    right, known, theirs_right, replaced = Counter[str](), Counter[str](), Counter[str](), 0
    ours, theirs = dict[str, Score](), dict[str, Score]()
    for recorded in map(json.loads, args.recorded.read_text(encoding="utf-8").splitlines()):
        path = recorded["path"]
        try:
            transcript = engine.transcribe(args.speech / path, LayerTimings(), options)
        except EngineError as error:
            print(f"{path} refused: {error.code}")
            continue
        language = languages[path]
        known[language] += 1
        right[language] += transcript.language == language
        theirs_right[language] += recorded["language"] == language
        replaced += "\ufffd" in transcript.text
        if transcript.language != language:
            print(f"{path}: {language} taken for {transcript.language} ({transcript.language_probability:.2f})")
        row: Row | None = transcripts.get(path)
        if row is not None:
            for table, text in ((ours, transcript.text), (theirs, recorded["text"])):
                for name in (language, "total"):
                    scorer.add(table.setdefault(name, Score("units")), row, text)
    print(f"{'language':9} {'right':>9} {'theirs':>9} {'units':>7} {'wrong':>9} {'theirs':>9}")
    for language in [*sorted(known), "total"]:
        total = language == "total"
        n, n_right = (sum(known.values()), sum(right.values())) if total else (known[language], right[language])
        n_theirs = sum(theirs_right.values()) if total else theirs_right[language]
        score, other = ours.get(language, Score("units")), theirs.get(language, Score("units"))
        counts = f"{n_right:4}/{n:<4} {n_theirs:4}/{n:<4} {score.n_units:7}"
        print(f"{language:9} {counts} {score.percent:7.2f} % {other.percent:7.2f} %")
    print(f"texts with a replacement character: {replaced}")


if __name__ == "__main__":
    main()
