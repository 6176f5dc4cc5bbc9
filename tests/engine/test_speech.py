"""Which windows are passed over unheard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.decoding import DecodingOptions
from engine.dims import SAMPLE_RATE, ModelDimensions
from engine.mel import LogMel
from engine.speech import MIN_FRAMES, first_stretch, is_speechless
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.nonspeech import CLIPS

WHISPER = ModelDimensions(80, 1500, 384, 6, 4, 51864, 448, 384, 6, 4)
STEADY = ("silence", "hiss", "hum")


def speechless(samples: np.ndarray, seek: int = 0) -> bool:
    log_mel = LogMel(lambda: iter([samples.astype(np.float32)]), np.empty((WHISPER.n_frames, WHISPER.n_mels), np.float32))
    return is_speechless(log_mel.window(seek))


def speech(recordings: dict[str, Recording]) -> np.ndarray:
    samples, rate = soundfile.read(recordings["demo"].path, dtype="float32")
    assert rate == SAMPLE_RATE
    return samples


def test_silence_hiss_and_hum_are_speechless_at_any_level() -> None:
    steady = {name: make()[: 10 * SAMPLE_RATE] for name, make in CLIPS.items() if name.startswith(STEADY)}
    assert len(steady) == 12
    assert [name for name, samples in steady.items() if not speechless(samples)] == []
    for level in (0.01, 3.0):
        assert speechless(level * steady["hiss-pink"])
        assert speechless(level * steady["hum-fan"])


@pytest.mark.parametrize("level", [1.0, 0.1, 0.01])
def test_speech_is_heard_down_to_40_db_below_its_level(level: float, recordings: dict[str, Recording]) -> None:
    samples = speech(recordings)
    assert not speechless(level * samples)
    start = int(np.argmax(np.abs(samples) > 0.1))
    assert not speechless(level * samples[start : start + SAMPLE_RATE // 4])  # a quarter of a second


@pytest.mark.parametrize("decibels", [10, -5])
def test_speech_is_heard_in_noise(decibels: int, recordings: dict[str, Recording]) -> None:
    """White noise 10 dB below it, and 5 dB louder than it."""
    samples = speech(recordings)
    noise = np.random.default_rng(0).standard_normal(len(samples))
    assert not speechless(samples + noise * np.sqrt(np.mean(samples**2)) * 10 ** (-decibels / 20))


def test_one_word_in_half_a_minute_of_hiss_is_heard(recordings: dict[str, Recording]) -> None:
    samples = speech(recordings)
    start = int(np.argmax(np.abs(samples) > 0.1))
    word = samples[start : start + SAMPLE_RATE // 3]
    hiss = 1e-3 * np.random.default_rng(0).standard_normal(30 * SAMPLE_RATE)
    for second in (1, 15, 28):
        mixed = hiss.copy()
        mixed[second * SAMPLE_RATE :][: len(word)] += word
        assert not speechless(mixed)


def test_silence_between_speech_is_judged_by_itself(recordings: dict[str, Recording]) -> None:
    samples = np.concatenate([speech(recordings), np.zeros(60 * SAMPLE_RATE)])
    assert not speechless(samples, 0)
    assert speechless(samples, 3000)


def heard(samples: np.ndarray, seek: int = 0) -> tuple[float, float]:
    """Seconds of the first stretch of speech, within the window."""
    log_mel = LogMel(lambda: iter([samples.astype(np.float32)]), np.empty((WHISPER.n_frames, WHISPER.n_mels), np.float32))
    stretch = first_stretch(log_mel.window(seek))
    return stretch.start / 100, stretch.stop / 100


@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 8), (8, 0), (7, 9), (3, 3)])
def test_a_stretch_of_speech_lies_between_pauses(
    floor: float, before: int, after: int, recordings: dict[str, Recording]
) -> None:
    """Pauses of 5 s and more, digital silence or hiss, are left out but for half a second; shorter ones belong to it."""
    spoken = speech(recordings)[: 9 * SAMPLE_RATE]
    hiss = floor * np.random.default_rng(0).standard_normal((before + after + 30) * SAMPLE_RATE)
    n = before * SAMPLE_RATE
    samples = np.concatenate([hiss[:n], spoken, hiss[n : n + after * SAMPLE_RATE]])
    begin, end = heard(samples)
    said = np.flatnonzero(np.abs(spoken) > 0.02)[[0, -1]] / SAMPLE_RATE + before
    assert (0 < begin <= said[0] - 0.3) if before > 5 else begin == 0
    assert begin >= said[0] - 1.0 or before < 5
    assert (said[1] + 0.3 <= end <= said[1] + 1.0) if after > 5 else end == len(samples) // 160 / 100


def test_of_several_stretches_the_first_is_given(recordings: dict[str, Recording]) -> None:
    spoken, pause = speech(recordings)[: 5 * SAMPLE_RATE], np.zeros(6 * SAMPLE_RATE)
    samples = np.concatenate([spoken, pause, spoken, pause, spoken])
    first, second = heard(samples), heard(samples, 600)
    assert first[0] == 0.0
    assert first[1] == pytest.approx(5.5, abs=0.4)
    assert second == pytest.approx((4.5, 10.5), abs=0.4)


@pytest.mark.parametrize("decibels", [20, 5])
def test_a_noisy_recording_is_not_cut(decibels: int, recordings: dict[str, Recording]) -> None:
    spoken = speech(recordings)
    noise = np.random.default_rng(0).standard_normal(len(spoken))
    noisy = spoken + noise * np.sqrt(np.mean(spoken**2)) * 10 ** (-decibels / 20)
    assert heard(noisy) == (0.0, min(30.0, len(noisy) // 160 / 100))


def test_of_a_short_steady_sound_nothing_is_said_beforehand() -> None:
    """A vowel of a second is one."""
    tone = 0.1 * np.sin(2 * np.pi * 200 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)
    assert not speechless(tone)
    assert speechless(np.tile(tone, 3))
    assert MIN_FRAMES == 200
    assert is_speechless(np.zeros((0, 80), np.float32))


@pytest.mark.parametrize("n_frames", [1, 9, 10, 499, 500])
def test_a_rest_of_any_length_is_one_stretch(n_frames: int) -> None:
    """What is left of a recording may be shorter than a block."""
    rest = np.random.default_rng(0).uniform(-1.5, 1.5, (n_frames, 80)).astype(np.float32)
    rest += np.linspace(0, 1, n_frames, dtype=np.float32)[:, None]
    assert first_stretch(rest) == slice(0, n_frames)


@pytest.mark.parametrize("kind", [*STEADY, "music", "keys"])
def test_a13_twenty_clips_without_speech_are_empty(kind: str, tiny_en: Path, tmp_path: Path) -> None:
    """Silence, hiss and hum cost no encoder pass; music and clatter are the model's own judgement."""
    engine = Engine(tiny_en)
    for name, make in CLIPS.items():
        if name.startswith(kind):
            samples = make()
            soundfile.write(tmp_path / "x.wav", samples, SAMPLE_RATE, subtype="PCM_16")
            timings = LayerTimings()
            transcript = engine.transcribe(tmp_path / "x.wav", timings, DecodingOptions(initial_prompt="Glossary: Zanzibar"))
            assert (transcript.text, transcript.segments) == ("", ()), name
            assert transcript.seconds == len(samples) / SAMPLE_RATE
            assert ("encode" in timings.stages) == (kind not in STEADY)
