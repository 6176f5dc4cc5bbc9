"""Record what tiny.en (INT8 weights and K/V caches, as it is served) hears in the project's recordings, token for token.

    python -m tests.golden.make_tokens

On x86-64 alone: tests/engine/test_tokens.py holds every processor to these.
"""

from __future__ import annotations

import json
import platform

from engine.cli import data_directory
from engine.published import model_directory
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import RECORDINGS
from tests.engine.test_tokens import GOLDEN, tokens_of


def main() -> None:
    if platform.machine() != "x86_64":
        raise SystemExit("record on x86-64: the others are held to it")
    engine = Engine(model_directory(data_directory() / "models", "tiny.en", "int8"))
    table = {path.stem: tokens_of(engine.transcribe(path, LayerTimings())) for path in sorted(RECORDINGS.glob("*.flac"))}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in table.items())
    GOLDEN.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
