"""Against real recordings with transcripts, and openai/whisper's recorded answers for them (`make test-parity`).

They lie beside the project (THIMBLE_SHARED, by default ../shared) and are never needed to build, run or pass the default tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.decoding import DecodingOptions
from engine.errors import UnsupportedAudio
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.benchmarks.parity import compare, read_recorded

pytestmark = pytest.mark.parity

SHARED = Path(os.environ.get("THIMBLE_SHARED", Path(__file__).parents[2].parent / "shared"))
SPEECH = SHARED / "speech"
RECORDED = SHARED / "reference" / "openai-whisper" / "tiny.en.jsonl"


@pytest.fixture(scope="module", autouse=True)
def _need_shared() -> None:
    if not RECORDED.exists():
        pytest.skip(f"no recordings at {SHARED}: set THIMBLE_SHARED")


@pytest.mark.parametrize("name", ["jfk-formats", "sonnet1-formats"])
def test_every_form_that_libsndfile_reads_gives_the_reference_sentence(name: str, tiny_en: Path) -> None:
    from tests.benchmarks.word_errors import normalise, read_set

    engine = Engine(tiny_en)
    heard = 0
    for row in read_set(SPEECH, name):
        try:
            transcript = engine.transcribe(SPEECH / row["path"], LayerTimings())
        except UnsupportedAudio:
            assert row["path"].endswith((".m4a", ".mp4", ".aac", ".webm"))
            continue
        heard += 1
        assert normalise(transcript.text) == normalise(row["text"]), row["path"]
    assert heard == 3


def test_the_first_hundred_texts_equal_the_references_to_the_character(tiny_en_f16: Path) -> None:
    """float16 storage holds OpenAI's weights exactly; the arithmetic is float32, and so are the K/V caches."""
    parity = compare(Engine(tiny_en_f16, "f32"), read_recorded(RECORDED)[:100], SPEECH)
    print(*parity.differences, parity, sep="\n")
    assert parity.equal >= 95
    assert parity.equal_times >= 95


def test_word_errors_are_the_references_and_int8_adds_none(tiny_en: Path, tiny_en_f16: Path) -> None:
    from tests.benchmarks.word_errors import evaluate, read_set

    rows = read_set(SPEECH, "librispeech-test-other")
    once = DecodingOptions("en", temperatures=(0.0,))  # as the reference's were recorded
    exact = evaluate(Engine(tiny_en_f16, "f32"), rows, SPEECH, once)
    int8 = evaluate(Engine(tiny_en, "int8"), rows, SPEECH, once)
    print(f"float32 {exact}\nint8    {int8}")
    assert exact.percent <= 11.6  # openai/whisper itself: 11.37
    assert int8.percent <= exact.percent + 0.3
