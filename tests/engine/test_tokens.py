"""The same tokens on every processor: recorded on x86-64 (tests/golden/make_tokens.py), compared here, also emulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.timings import LayerTimings
from engine.transcribe import Engine, Transcript
from tests.conftest import Recording

GOLDEN = Path(__file__).parent.parent / "golden" / "tokens.tiny.en.json"


def tokens_of(transcript: Transcript) -> list[int]:
    return [token for segment in transcript.segments for token in segment.tokens]


@pytest.mark.parametrize("name", ["digits", "demo", pytest.param("long", marks=pytest.mark.slow)])
def test_tokens_equal_those_recorded_on_x86(name: str, tiny_en: Path, recordings: dict[str, Recording]) -> None:
    transcript = Engine(tiny_en).transcribe(recordings[name].path, LayerTimings())
    assert tokens_of(transcript) == json.loads(GOLDEN.read_text())[name]
