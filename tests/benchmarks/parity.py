"""How many transcripts equal openai/whisper's recorded ones, to the character, and how far segment times are off.

    python -m tests.benchmarks.parity --model DIR [--kv f32] [--beam-size 5] [--first 100] RECORDED.jsonl SPEECH_DIR

RECORDED has one JSON object a line: path, text, segments `[start, end, text]`; SPEECH_DIR its recordings and manifest.jsonl,
which tells their sample rates. Differences are printed, then the counts.

Our segments end with the recording and hold a letter or digit; the reference's need not. Its times are cut at the recording's
end, and its empty segments left out, before they are compared.
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
ENGINE_RATE = 16_000


@dataclass
class Parity:
    """Counts over the recordings compared, and the differences in words."""

    n: int = 0
    equal: int = 0
    equal_times: int = 0
    refused: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        share = f"{100 * self.equal / self.n:.1f} %, times {100 * self.equal_times / self.n:.1f} %" if self.n else "none"
        return f"{self.equal} of {self.n} texts equal, {self.equal_times} with equal times ({share}); {self.refused} refused"


def compare(engine: Engine, rows: list[dict[str, Any]], speech: Path, options: DecodingOptions) -> Parity:
    """Transcribe each row's recording and compare with what the row says; forms that are refused are counted apart."""
    parity = Parity()
    for row in rows:
        try:
            transcript = engine.transcribe(speech / row["path"], LayerTimings(), options)
        except EngineError as error:
            parity.refused += 1
            parity.differences.append(f"{row['path']} refused: {error.code}")
            continue
        parity.n += 1
        times_equal, text_equal = _same_times(transcript, row["segments"]), transcript.text == row["text"]
        parity.equal_times += times_equal
        parity.equal += text_equal
        if not text_equal:
            parity.differences.append(f"{row['path']}\n  theirs {row['text']!r}\n  ours   {transcript.text!r}")
        elif not times_equal:
            ours = [(round(segment.start, 2), round(segment.end, 2)) for segment in transcript.segments]
            parity.differences.append(f"{row['path']}\n  theirs {[pair[:2] for pair in row['segments']]}\n  ours   {ours}")
    return parity


def _same_times(transcript: Transcript, recorded: list[Any]) -> bool:
    ours = [(segment.start, segment.end) for segment in transcript.segments]
    end = transcript.seconds
    said = [row for row in recorded if row[0] != row[1] and any(map(str.isalnum, row[2]))]
    theirs = [(min(row[0], end), min(row[1], end)) for row in said]
    if len(ours) != len(theirs):
        return False
    differences = [abs(a - b) for left, right in zip(ours, theirs, strict=True) for a, b in zip(left, right, strict=True)]
    return max(differences, default=0.0) <= TIME_TOLERANCE_SECONDS


def read_recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_rate(rows: list[dict[str, Any]], speech: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows whose recordings have the engine's sample rate, and the others."""
    rates = {row["path"]: row["sample_rate"] for row in read_recorded(speech / "manifest.jsonl")}
    own = [row for row in rows if rates[row["path"]] == ENGINE_RATE]
    return {"16 kHz": own, "other rates": [row for row in rows if row not in own]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", default="f32")
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--language", default="en", help="'detect' for multilingual weights")
    parser.add_argument("--first", type=int)
    parser.add_argument("--set", default="", help="only paths that start with this")
    args = parser.parse_args()
    rows = [row for row in read_recorded(args.recorded)[: args.first] if row["path"].startswith(args.set)]
    language = None if args.language == "detect" else args.language
    options = DecodingOptions(language, temperatures=(0.0,), beam_size=args.beam_size)
    engine = Engine(args.model, args.kv, tail="whole")
    for name, part in by_rate(rows, args.speech).items():
        parity = compare(engine, part, args.speech, options)
        print(*parity.differences, f"{name}: {parity}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
