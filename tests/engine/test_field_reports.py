"""Reports of what went wrong for others, as sound, on the real weights; each test bears its report's number.

What the weights make of sound cannot be scripted; the rules themselves are tested with scripted windows in test_seek.py,
test_fallback.py and test_segments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.decoding import DecodingOptions
from engine.timings import LayerTimings
from engine.transcribe import Engine, Transcript
from tests.conftest import Recording
from tests.words import word_errors, words

RATE = 16_000


@pytest.fixture(scope="module")
def engine(tiny_en: Path) -> Engine:
    return Engine(tiny_en)


@pytest.fixture
def hear(engine: Engine, tmp_path: Path) -> Callable[..., Transcript]:
    def transcribe(samples: np.ndarray, rate: int = RATE, subtype: str = "PCM_16", **options: object) -> Transcript:
        soundfile.write(tmp_path / "x.wav", samples, rate, subtype=subtype)
        return engine.transcribe(tmp_path / "x.wav", LayerTimings(), DecodingOptions(**options))

    return transcribe


def samples_of(recording: Recording) -> np.ndarray:
    samples, rate = soundfile.read(recording.path, dtype="float32")
    assert rate == RATE
    return samples


Hear = Callable[..., Transcript]


def test_a10_a_channel_wired_the_other_way_round_cancels_nothing(hear: Hear, recordings: dict[str, Recording]) -> None:
    samples = samples_of(recordings["digits"])
    alone = hear(samples)
    assert hear(np.stack([samples, -samples], 1)).text == alone.text
    for stereo in ([samples, 0 * samples], [0 * samples, samples], [samples, -0.9 * samples], [-samples, samples]):
        assert words(hear(np.stack(stereo, 1)).text) == words(alone.text)


def test_a10_channels_that_only_differ_are_averaged(hear: Hear, recordings: dict[str, Recording]) -> None:
    """Two people, one a channel: both are heard."""
    one, other = samples_of(recordings["digits"]), samples_of(recordings["demo"])
    left = np.concatenate([one, np.zeros(len(other), np.float32)])
    right = np.concatenate([np.zeros(len(one), np.float32), other])
    both = f"{hear(one).text} {hear(other).text}"
    assert word_errors(both, hear(np.stack([left, right], 1)).text) <= 1


@pytest.mark.parametrize("subtype", ["ULAW", "ALAW"])
def test_a11_telephone_sound_is_heard(subtype: str, hear: Hear, recordings: dict[str, Recording]) -> None:
    samples = samples_of(recordings["digits"])
    spectrum = np.fft.rfft(samples)
    half = np.fft.irfft(spectrum[: len(spectrum) // 2 + 1], len(samples) // 2) / 2
    alone = hear(samples).text
    assert word_errors(alone, hear(half.astype(np.float32), RATE // 2, subtype).text) <= 1


def test_a15_one_sentence_over_and_over_costs_nothing_behind_it(hear: Hear, recordings: dict[str, Recording]) -> None:
    samples = samples_of(recordings["digits"])
    start = int(np.argmax(np.abs(samples) > 0.02))
    phrase = samples[start : start + 3 * RATE // 2]
    transcript = hear(np.concatenate([np.tile(phrase, 40), np.zeros(2 * RATE, np.float32), samples]))
    ten = [number for number in words(hear(samples).text) if number.isalnum()]
    assert words(transcript.text)[-len(ten) :] == ten
    starts = [segment.start for segment in transcript.segments]
    assert starts == sorted(starts)


def test_a18_a_prompt_is_never_said(hear: Hear, recordings: dict[str, Recording]) -> None:
    """With speech, with silence, and in the windows after the first."""
    prompt = "Glossary: Zanzibar, Quetzalcoatl, Ouagadougou"
    digits, long = samples_of(recordings["digits"]), samples_of(recordings["long"])
    for samples, carry in ((digits, False), (np.zeros(19_200, np.float32), True), (long, True)):
        said = hear(samples, initial_prompt=prompt, carry_initial_prompt=carry).text.lower()
        assert not any(word in said for word in ("zanzibar", "quetzalcoatl", "ouagadougou", "glossary"))
        assert bool(said) == bool(samples.any())


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(27.0, marks=pytest.mark.slow),
        pytest.param(29.5, marks=pytest.mark.slow),
        30.0,
        pytest.param(30.4, marks=pytest.mark.slow),
        pytest.param(59.9, marks=pytest.mark.slow),
    ],
)
def test_a19_the_last_words_are_there_wherever_the_window_ends(
    seconds: float, hear: Hear, recordings: dict[str, Recording]
) -> None:
    tail = samples_of(recordings["digits"])
    body = samples_of(recordings["long"])
    n_body = int(seconds * RATE) - len(tail)
    transcript = hear(np.concatenate([body[len(body) - n_body :], tail]))
    expected = words(hear(tail).text)
    assert words(transcript.text)[-len(expected) :] == expected
    assert transcript.seconds == seconds


@pytest.mark.parametrize("seconds", [2.37, 0.4, 4.111, 1.9999])
def test_a21_sound_that_is_cut_in_a_word_has_no_times_beyond_it(
    seconds: float, hear: Hear, recordings: dict[str, Recording]
) -> None:
    samples = samples_of(recordings["demo"])[: round(seconds * RATE)]
    for word_timestamps in (False, True):
        transcript = hear(samples, word_timestamps=word_timestamps)
        times = [time for segment in transcript.segments for time in (segment.start, segment.end)]
        spoken = [time for segment in transcript.segments for word in segment.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert spoken == sorted(spoken)
        assert all(0 <= time <= transcript.seconds for time in times + spoken)


def test_a14_whatever_came_before_the_answer_is_that_of_a_fresh_process(
    engine: Engine, tiny_en: Path, hear: Hear, recordings: dict[str, Recording]
) -> None:
    """Beams, words, prompts and high temperatures between; `make test-slow` does fifty against fifty fresh workers."""
    digits, demo = samples_of(recordings["digits"]), samples_of(recordings["demo"])
    fresh = Engine(tiny_en).transcribe(recordings["digits"].path, LayerTimings(), DecodingOptions(word_timestamps=True))
    before: list[tuple[np.ndarray, dict[str, object]]] = [
        (demo, {"beam_size": 3}),
        (np.zeros(19_200, np.float32), {}),
        (demo, {"temperatures": (1.0,), "best_of": 2}),
        (digits, {"initial_prompt": "Zanzibar", "carry_initial_prompt": True}),
        (demo, {"without_timestamps": True, "prefix": "Well,"}),
    ]
    for samples, options in before:
        hear(samples, **options)
        again = engine.transcribe(recordings["digits"].path, LayerTimings(), DecodingOptions(word_timestamps=True))
        assert again == fresh
