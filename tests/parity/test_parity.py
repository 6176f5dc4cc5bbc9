"""Against real recordings with transcripts, and openai/whisper's recorded answers for them (`make test-parity`).

They lie beside the project (THIMBLE_SHARED, by default ../shared) and are never needed to build, run or pass the default tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.audio import read_blocks
from engine.cli import data_directory
from engine.decoding import DecodingOptions
from engine.errors import UnsupportedAudio
from engine.fetch import fetch
from engine.published import model_directory
from engine.timings import LayerTimings
from engine.transcribe import Engine, Transcript
from engine.wer import Row, Score, Scorer, read_rows
from tests.benchmarks.parity import by_rate, compare, read_recorded

pytestmark = pytest.mark.parity

SHARED = Path(os.environ.get("THIMBLE_SHARED", Path(__file__).parents[2].parent / "shared"))
SPEECH = SHARED / "speech"
RECORDED = SHARED / "reference" / "openai-whisper"
GOLDEN = Path(__file__).parent.parent / "golden"
ONCE = DecodingOptions("en", temperatures=(0.0,))
"""As the reference's answers were recorded."""


@pytest.fixture(scope="module", autouse=True)
def _need_shared() -> None:
    if not RECORDED.exists():
        pytest.skip(f"no recordings at {SHARED}: set THIMBLE_SHARED")


@pytest.fixture(scope="module")
def exact(tiny_en_f16: Path) -> Engine:
    """float16 storage holds OpenAI's weights exactly; the arithmetic is float32, and so are the K/V caches."""
    return Engine(tiny_en_f16, "f32", tail="whole")


@pytest.fixture(scope="module")
def base() -> Engine:
    directory = model_directory(data_directory() / "models", "base", "int8")
    fetch("base", directory, "int8")
    return Engine(directory)


def hear(engine: Engine, path: str, **options: object) -> Transcript:
    return engine.transcribe(SPEECH / path, LayerTimings(), DecodingOptions(**options))


@pytest.mark.parametrize("name", ["jfk-formats", "sonnet1-formats"])
def test_every_form_that_libsndfile_reads_gives_the_reference_sentence(name: str, tiny_en: Path) -> None:
    engine, scorer, heard = Engine(tiny_en), Scorer(), 0
    for row in read_rows(SPEECH / "manifest.jsonl", [name]):
        try:
            transcript = hear(engine, row.path)
        except UnsupportedAudio:
            assert row.path.endswith((".m4a", ".mp4", ".aac", ".webm"))
            continue
        heard += 1
        assert scorer.units(transcript.text, "en") == scorer.units(row.text, "en"), row.path
    assert heard == 3


@pytest.mark.parametrize(("rate", "texts", "times"), [("16 kHz", 0.98, 0.95), ("other rates", 0.90, 0.90)])
def test_texts_equal_the_references_to_the_character(rate: str, texts: float, times: float, exact: Engine) -> None:
    rows = by_rate(read_recorded(RECORDED / "tiny.en.jsonl"), SPEECH)[rate]
    parity = compare(exact, rows, SPEECH, ONCE)
    print(*parity.differences, f"{rate}: {parity}", sep="\n")
    assert parity.n > 100
    assert parity.equal >= texts * parity.n
    assert parity.equal_times >= times * parity.n


def test_beams_and_words_are_the_references_on_twenty_recordings(exact: Engine) -> None:
    """tests/golden/make_parity.py recorded them."""
    rows = read_recorded(GOLDEN / "parity.tiny.en.jsonl")
    assert len(rows) == 20
    greedy = compare(exact, rows, SPEECH, ONCE)
    beams = [row["beam"] | {"path": row["path"]} for row in rows]
    five = compare(exact, beams, SPEECH, DecodingOptions("en", temperatures=(0.0,), beam_size=5))
    print(*greedy.differences, greedy, *five.differences, five, sep="\n")
    assert min(greedy.equal, five.equal) >= 19
    for row in rows:
        transcript = hear(exact, row["path"], language="en", temperatures=(0.0,), word_timestamps=True)
        words = [word for segment in transcript.segments for word in segment.words]
        assert [word.word for word in words] == [word for word, *_ in row["words"]]
        off = [abs(ours.start - start) + abs(ours.end - end) for ours, (_, start, end) in zip(words, row["words"], strict=True)]
        assert sum(off) / 2 / len(words) < 0.05, row["path"]


def test_word_errors_are_the_references_and_int8_adds_none(tiny_en: Path, exact: Engine) -> None:
    scorer, rows = Scorer(), read_rows(SPEECH / "manifest.jsonl", ["librispeech-test-other"])

    def percent(engine: Engine) -> float:
        texts = [engine.transcribe(SPEECH / row.path, LayerTimings(), ONCE).text for row in rows]
        return scorer.scores(rows, texts)["total"].percent

    float32, int8 = percent(exact), percent(Engine(tiny_en))
    print(f"float32 {float32:.2f} %, int8 {int8:.2f} %")
    assert float32 <= 11.6  # openai/whisper itself: 11.37
    assert int8 <= float32 + 0.3


def test_a_long_recording_is_as_good_as_its_parts(tiny_en: Path) -> None:
    """The derived set's other file is WebM, which libsndfile does not read."""
    scorer, engine = Scorer(), Engine(tiny_en)
    (long,) = (
        row for row in read_rows(SPEECH / "manifest.jsonl", ["librispeech-longform-derived"]) if row.path.endswith("mp3")
    )
    whole, parts = Score("words"), Score("words")
    scorer.add(whole, long, hear(engine, long.path).text)
    for row in read_rows(SPEECH / "manifest.jsonl", ["librispeech-test-other"]):
        # Joined in it as they are: their transcripts are pieces of its.
        if row.text in long.text:
            scorer.add(parts, row, hear(engine, row.path).text)
    print(f"whole {whole.percent:.2f} % of {whole.n_units}, parts {parts.percent:.2f} % of {parts.n_units}")
    assert parts.n_units >= 0.9 * whole.n_units
    assert whole.percent <= parts.percent + 1.0


def test_languages_are_detected_and_heard_as_by_the_reference(base: Engine) -> None:
    scorer, ours, theirs = Scorer(), Score("units"), Score("units")
    languages = {row["path"]: row["language"] for row in read_recorded(SPEECH / "manifest.jsonl")}
    transcripts = {row.path: row for row in read_rows(SPEECH / "manifest.jsonl")}
    right = n = 0
    for recorded in read_recorded(RECORDED / "base.jsonl"):
        path = recorded["path"]
        try:
            transcript = hear(base, path)
        except UnsupportedAudio:
            continue
        n += 1
        right += transcript.language == languages[path]
        assert "\ufffd" not in transcript.text, f"a22: {path}"
        if path in transcripts:
            scorer.add(ours, transcripts[path], transcript.text)
            scorer.add(theirs, transcripts[path], recorded["text"])
    print(f"{right} of {n} languages right; {ours.percent:.2f} % of units wrong, openai/whisper {theirs.percent:.2f} %")
    assert right >= 0.9 * n
    assert ours.percent <= theirs.percent + 1.0


def test_translation_is_english_and_the_references(base: Engine) -> None:
    """Recorded with `task="translate"`, base, float32; INT8 may word it another way, so words in common are counted."""
    scorer = Scorer()
    for row in read_recorded(GOLDEN / "translate.base.jsonl"):
        transcript = hear(base, row["path"], task="translate", temperatures=(0.0,))
        assert transcript.language == row["language"] != "en"
        ours, theirs = set(scorer.units(transcript.text, "en")), set(scorer.units(row["text"], "en"))
        assert len(ours & theirs) >= 0.6 * len(theirs), f"{transcript.text!r} for {row['text']!r}"


def test_a20_forty_seconds_of_silence_tell_no_language(base: Engine, tmp_path: Path) -> None:
    for path, language in (("fleurs-es/fleurs-es-001.ogg", "es"), ("fleurs-de/fleurs-de-001.ogg", "de")):
        samples = np.concatenate([np.zeros(40 * 16_000, np.float32), *read_blocks(_existing(path))])
        soundfile.write(tmp_path / "x.wav", samples, 16_000)
        transcript = base.transcribe(tmp_path / "x.wav", LayerTimings())
        assert transcript.language == language
        assert transcript.language_probability > 0.5
        assert transcript.segments[0].start >= 39.5


def _existing(path: str) -> Path:
    """The recording, or its set's first."""
    return SPEECH / path if (SPEECH / path).exists() else sorted((SPEECH / path).parent.iterdir())[0]


@pytest.mark.parametrize("change", [lambda x: np.stack([x, -x], 1), lambda x: np.stack([x, 0 * x], 1)])
def test_a10_real_speech_out_of_phase_or_on_one_side_is_the_same(
    change: Callable[[np.ndarray], np.ndarray], tiny_en: Path, tmp_path: Path
) -> None:
    engine, rows = Engine(tiny_en), read_rows(SPEECH / "manifest.jsonl", ["librispeech-test-other"])[:3]
    for row in rows:
        samples = np.concatenate(list(read_blocks(SPEECH / row.path)))
        soundfile.write(tmp_path / "x.wav", change(samples), 16_000, subtype="FLOAT")
        changed = engine.transcribe(tmp_path / "x.wav", LayerTimings()).text
        alone, other = Score("words"), Score("words")
        Scorer().add(alone, row, hear(engine, row.path).text)
        Scorer().add(other, Row("", "", "en", hear(engine, row.path).text), changed)
        assert other.percent == 0.0
