"""How many transcripts equal openai/whisper's recorded ones, to the character, and how far segment times are off.

    python -m tests.benchmarks.parity --model DIR [--kv f32] [--first 100] [--set NAME] RECORDED.jsonl SPEECH_DIR

RECORDED has one JSON object a line: path, text, segments `[start, end, text]`. Differences are printed, then the counts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.decoding import DecodingOptions
from engine.errors import EngineError
from engine.timings import LayerTimings
from engine.transcribe import Engine, Transcript

TIME_TOLERANCE_SECONDS = 0.021


@dataclass
class Parity:
    """Counts over the recordings compared, and the differences in words."""

    n: int = 0
    equal: int = 0
    equal_times: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.equal} of {self.n} texts equal, {self.equal_times} with equal times"


def compare(engine: Engine, rows: list[dict[str, Any]], speech: Path, language: str | None = "en") -> Parity:
    """Transcribe each row's recording and compare with what the row says."""
    parity = Parity()
    for row in rows:
        parity.n += 1
        try:
            transcript = engine.transcribe(speech / row["path"], LayerTimings(), DecodingOptions(language, temperatures=(0.0,)))
        except EngineError as error:
            parity.differences.append(f"{row['path']} refused: {error.code}")
            continue
        parity.equal_times += _same_times(transcript, row["segments"])
        if transcript.text == row["text"]:
            parity.equal += 1
        else:
            parity.differences.append(f"{row['path']}\n  theirs {row['text']!r}\n  ours   {transcript.text!r}")
    return parity


def _same_times(transcript: Transcript, recorded: list[Any]) -> bool:
    ours = [(segment.start, segment.end) for segment in transcript.segments]
    theirs = [(start, end) for start, end, _ in recorded]
    if len(ours) != len(theirs):
        return False
    differences = [abs(a - b) for left, right in zip(ours, theirs, strict=True) for a, b in zip(left, right, strict=True)]
    return max(differences, default=0.0) <= TIME_TOLERANCE_SECONDS


def read_recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", default="f32")
    parser.add_argument("--language", default="en", help="'detect' for multilingual weights")
    parser.add_argument("--first", type=int)
    parser.add_argument("--set", default="", help="only paths that start with this")
    args = parser.parse_args()
    rows = [row for row in read_recorded(args.recorded)[: args.first] if row["path"].startswith(args.set)]
    language = None if args.language == "detect" else args.language
    parity = compare(Engine(args.model, args.kv), rows, args.speech, language)
    print(*parity.differences, parity, sep="\n")


if __name__ == "__main__":
    main()
