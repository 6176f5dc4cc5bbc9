"""Record openai/whisper's words, their times and probabilities, for tests/engine/test_words.py.

In an environment of its own, as make_golden.py, with this project on the path:

    PYTHONPATH=. python tests/golden/make_words.py CHECKPOINT_DIR tests/recordings > tests/golden/words.tiny.en.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import soundfile
import torch
import whisper

from tests.golden.make_golden import load


def main() -> None:
    directory, recordings = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    model = load(directory)
    model.set_alignment_heads(whisper._ALIGNMENT_HEADS[directory.name])
    rows = []
    for name in ("demo", "digits"):
        samples, rate = soundfile.read(recordings / f"{name}.flac", dtype="float32")
        assert rate == 16_000
        result = whisper.transcribe(model, samples, fp16=False, temperature=0.0, language="en", word_timestamps=True)
        words = [word for segment in result["segments"] for word in segment["words"]]
        table = [[w["word"], *(round(float(w[key]), 4) for key in ("start", "end", "probability"))] for w in words]
        rows.append(f"{json.dumps(name)}: [\n    " + ",\n    ".join(map(json.dumps, table)) + "\n  ]")
    print("{\n  " + ",\n  ".join(rows) + "\n}")


if __name__ == "__main__":
    main()
