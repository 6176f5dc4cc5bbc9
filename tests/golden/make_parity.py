"""Record openai/whisper's answers for twenty of the recordings beside the project, for tests/parity.

In an environment of its own, as make_golden.py, with this project on the path:

    PYTHONPATH=. python tests/golden/make_parity.py CHECKPOINT_DIR SPEECH_DIR > tests/golden/parity.tiny.en.jsonl

One JSON object a line: path; greedy and with five beams, text and segments [start, end, text]; words [word, start, end].
Float32, one thread, temperature 0 without fallback, conditioned on previous text; word times in a run of their own, as they
change where windows begin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import whisper

from tests.golden.make_golden import load

PATHS = (
    "an4/an401-mdms2-b.sph",
    "azure-samples/wreck-a-nice-beach.wav",
    "deepspeech-samples/arctic_a0024.wav",
    "google-samples/audio_silence_padding.wav",
    "jfk-formats/jfk.mp3",
    "kaldi-gst-samples/english_test.ogg",
    "librispeech-misc/1088-134315-0000.wav",
    "librispeech-test-other/1688-142285-0000.flac",
    "librispeech-test-other/1688-142285-0001.flac",
    "librispeech-test-other/1688-142285-0002.flac",
    "librispeech-test-other/1688-142285-0003.flac",
    "librispeech-test-other/3080-5032-0009.flac",
    "librispeech-test-other/1998-15444-0009.flac",
    "librispeech-train-clean-100/1081-125237-0000.flac",
    "librispeech-train-clean-100/426-122819-0000.flac",
    "mfa-spontaneous/acoustic_corpus.wav",
    "moonshine-samples/two_cities_16k.wav",
    "notld-film/12s_if_anything_should_try_to_break_in.wav",
    "riva-samples/en-US_percent.wav",
    "speechbrain-harvard/spk1_snt2.wav",
)


def main() -> None:
    directory, speech = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    model = load(directory)
    model.set_alignment_heads(whisper._ALIGNMENT_HEADS[directory.name])

    def answer(path: str, **options: Any) -> dict[str, Any]:
        fixed = {"fp16": False, "temperature": 0, "condition_on_previous_text": True, "language": "en"}
        return whisper.transcribe(model, str(speech / path), **fixed, **options)

    def segments(result: dict[str, Any]) -> list[list[Any]]:
        return [[round(s["start"], 2), round(s["end"], 2), s["text"]] for s in result["segments"]]

    for path in PATHS:
        greedy, beam, timed = answer(path), answer(path, beam_size=5), answer(path, word_timestamps=True)
        words = [word for segment in timed["segments"] for word in segment["words"]]
        row = {
            "path": path,
            "text": greedy["text"],
            "segments": segments(greedy),
            "beam": {"text": beam["text"], "segments": segments(beam)},
            "words": [[word["word"], round(float(word["start"]), 2), round(float(word["end"]), 2)] for word in words],
        }
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
