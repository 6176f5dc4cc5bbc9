"""How many transcripts equal openai/whisper's recorded ones, to the character, and how far segment times are off.

    python tests/benchmarks/parity.py --model DIR [--kv f32] [--first 100] [--set NAME] RECORDED.jsonl SPEECH_DIR

RECORDED has one JSON object a line: path, text, segments `[start, end, text]`. Differences are printed, then the counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.errors import EngineError
from engine.timings import LayerTimings
from engine.transcribe import Engine

TIME_TOLERANCE_SECONDS = 0.021


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", default="f32")
    parser.add_argument("--language", default="en")
    parser.add_argument("--first", type=int)
    parser.add_argument("--set", help="only paths that start with this")
    args = parser.parse_args()
    engine = Engine(args.model, args.kv, "resident")
    rows = [json.loads(line) for line in args.recorded.read_text().splitlines()][: args.first]
    rows = [row for row in rows if not args.set or row["path"].startswith(args.set)]
    equal = same_times = refused = 0
    for row in rows:
        try:
            language = args.language if args.language != "recorded" else None
            transcript = engine.transcribe(args.speech / row["path"], LayerTimings(), language)
        except EngineError as error:
            refused += 1
            print(f"refused {row['path']}: {error.code}", flush=True)
            continue
        times = [(segment.start, segment.end) for segment in transcript.segments]
        recorded = [(start, end) for start, end, _ in row["segments"]]
        pairs = [abs(a - b) for left, right in zip(times, recorded, strict=False) for a, b in zip(left, right, strict=True)]
        same_times += len(times) == len(recorded) and max(pairs, default=0.0) <= TIME_TOLERANCE_SECONDS
        if transcript.text == row["text"]:
            equal += 1
        else:
            print(f"differs {row['path']}\n  theirs {row['text']!r}\n  ours   {transcript.text!r}", flush=True)
    print(f"{equal} of {len(rows)} texts equal, {same_times} with equal times, {refused} refused")


if __name__ == "__main__":
    main()
