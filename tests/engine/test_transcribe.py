"""Recordings → text, on the real INT8 weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.decoding import DecodingOptions
from engine.errors import AudioTooLong, BadSamples, Cancelled, EmptyAudio, UnsupportedLanguage
from engine.kv_cache import KV_POLICIES
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.words import word_errors, words


@pytest.fixture(scope="module")
def engine(tiny_en: Path) -> Engine:
    return Engine(tiny_en)


def hear(engine: Engine, path: Path, language: str | None = None, **arguments: object) -> str:
    return engine.transcribe(path, LayerTimings(), DecodingOptions(language), **arguments).text


@pytest.mark.parametrize(
    ("kv", "residency"), [*((kv, "resident") for kv in KV_POLICIES), ("int8", "stream"), ("f32", "stream")]
)
def test_demo_is_right_word_for_word(kv: str, residency: str, tiny_en: Path, recordings: dict[str, Recording]) -> None:
    engine = Engine(tiny_en, kv, residency)
    demo = recordings["demo"]
    transcript = engine.transcribe(demo.path, LayerTimings())
    assert words(transcript.text) == words(demo.text)
    assert transcript.language == "en"
    assert transcript.seconds == pytest.approx(demo.seconds, abs=0.01)
    engine.close()


@pytest.mark.parametrize("name", ["digits", "demo", pytest.param("long", marks=pytest.mark.slow)])
def test_shared_f32_hears_the_tokens_of_f32(name: str, tiny_en: Path, recordings: dict[str, Recording]) -> None:
    by_layer, shared = (Engine(tiny_en, kv).transcribe(recordings[name].path, LayerTimings()) for kv in ("f32", "shared-f32"))
    assert [segment.tokens for segment in shared.segments] == [segment.tokens for segment in by_layer.segments]


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_beams_hear_the_digits_under_every_policy(kv: str, tiny_en: Path, recordings: dict[str, Recording]) -> None:
    options = DecodingOptions("en", beam_size=3)
    heard = Engine(tiny_en, kv).transcribe(recordings["digits"].path, LayerTimings(), options).text
    assert words(heard) == [str(number) for number in range(1, 11)]


def test_a_recording_longer_than_a_window_is_whole(engine: Engine, recordings: dict[str, Recording]) -> None:
    """66 s: three windows and more; nothing is lost or said twice where they meet."""
    long = recordings["long"]
    timings = LayerTimings()
    transcript = engine.transcribe(long.path, timings)
    assert word_errors(long.text, transcript.text) <= 2  # of 211: "grey" is spelt "gray"
    assert timings.stages["encode"].count >= 3
    starts = [segment.start for segment in transcript.segments]
    assert starts == sorted(starts)
    assert all(0 <= s.start <= s.end <= transcript.seconds + 0.03 for s in transcript.segments)
    assert "".join(segment.text for segment in transcript.segments) == transcript.text


def test_a14_no_recording_leaves_a_trace_in_the_next(engine: Engine, tiny_en: Path, recordings: dict[str, Recording]) -> None:
    fresh = hear(Engine(tiny_en), recordings["digits"].path)
    hear(engine, recordings["demo"].path)
    assert hear(engine, recordings["digits"].path) == fresh
    with pytest.raises(UnsupportedLanguage):
        hear(engine, recordings["demo"].path, language="fr")
    assert hear(engine, recordings["digits"].path) == fresh


def test_a_stereo_48_khz_float_copy_says_the_same(engine: Engine, recordings: dict[str, Recording], tmp_path: Path) -> None:
    samples, rate = soundfile.read(recordings["demo"].path, dtype="float32")
    up = np.interp(np.arange(len(samples) * 3) / 3, np.arange(len(samples)), samples)
    soundfile.write(tmp_path / "x.wav", np.stack([up, up], 1), rate * 3, subtype="FLOAT")
    assert words(hear(engine, tmp_path / "x.wav")) == words(recordings["demo"].text)


@pytest.mark.parametrize("n_samples", [1, 159, 399])
def test_a05_a_clip_shorter_than_a_frame_or_two_is_no_error(n_samples: int, engine: Engine, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", np.full(n_samples, 0.1, np.float32), 16000)
    transcript = engine.transcribe(tmp_path / "x.wav", LayerTimings())
    assert transcript.seconds == n_samples / 16000
    if n_samples < 160:  # no whole frame: nothing to hear
        assert (transcript.text, transcript.segments) == ("", ())


def test_a05_half_a_second_of_speech_is_heard(engine: Engine, recordings: dict[str, Recording], tmp_path: Path) -> None:
    samples, rate = soundfile.read(recordings["digits"].path, dtype="float32")
    start = int(np.argmax(np.abs(samples) > 0.02))
    soundfile.write(tmp_path / "one.wav", samples[start : start + rate // 2], rate)
    transcript = engine.transcribe(tmp_path / "one.wav", LayerTimings())
    assert transcript.text.strip()
    assert transcript.seconds == 0.5


def test_faults_of_a_recording_have_their_codes(engine: Engine, tmp_path: Path, recordings: dict[str, Recording]) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(EmptyAudio):
        hear(engine, tmp_path / "empty")
    soundfile.write(tmp_path / "nan.wav", np.full(16000, np.nan, np.float32), 16000, subtype="FLOAT")
    with pytest.raises(BadSamples):
        hear(engine, tmp_path / "nan.wav")
    assert words(hear(engine, recordings["demo"].path)) == words(recordings["demo"].text)


def test_a_recording_longer_than_allowed_is_refused(engine: Engine, recordings: dict[str, Recording]) -> None:
    with pytest.raises(AudioTooLong, match="5 s"):
        hear(engine, recordings["demo"].path, max_seconds=5)
    assert hear(engine, recordings["digits"].path, max_seconds=6)


@pytest.mark.parametrize("checks", [0, 3, 20])
def test_a_cancelled_job_stops_within_a_layer_or_a_token(checks: int, engine: Engine, recordings: dict[str, Recording]) -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > checks

    with pytest.raises(Cancelled):
        hear(engine, recordings["demo"].path, should_stop=should_stop)
    assert asked == checks + 1


def test_layers_account_for_the_stages(engine: Engine, recordings: dict[str, Recording]) -> None:
    """Wait and compute of all layers are at least 90 % of the encode and decode stages."""
    timings = LayerTimings()
    engine.transcribe(recordings["demo"].path, timings)
    expected = {("encoder", name) for name in ("stem", "0", "1", "2", "3", "ln_post")}
    expected |= {("decoder", name) for name in ("embedding", "0", "1", "2", "3", "ln")}
    assert set(timings.compute) == expected
    layers = sum(tally.seconds for table in (timings.wait, timings.compute) for tally in table.values())
    stages = timings.stages["encode"].seconds + timings.stages["decode"].seconds
    assert 0.9 * stages <= layers <= stages
