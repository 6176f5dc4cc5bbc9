"""The temperature ladder: when a window is decoded again, what is kept, and what the next window is told of it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.decoding import DecodingOptions, DecodingResult, Fallback, is_silence
from engine.decoding.fallback import TEMPERATURES, is_trusted
from engine.decoding.samplers import Sampler
from engine.decoding.task import compression_ratio
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.engine.test_decoding import EOT, A, B, ScriptedDecoder, stamp, task


def result(avg_logprob: float = -0.3, no_speech: float = 0.1, ratio: float = 1.5, temperature: float = 0.0) -> DecodingResult:
    return DecodingResult([A], avg_logprob, no_speech, temperature, ratio)


GOOD, LOOP, GUESS = result(), result(ratio=2.5), result(avg_logprob=-1.1)
WILD, WORSE_LOOP = result(avg_logprob=-2.9), result(avg_logprob=-0.9, ratio=2.5)
SILENCE = result(avg_logprob=-1.1, no_speech=0.7)


@pytest.mark.parametrize(
    ("made", "trusted"),
    [
        (GOOD, True),
        (LOOP, False),
        (GUESS, False),
        (SILENCE, True),
        (result(ratio=2.4), True),  # the thresholds themselves are good enough
        (result(avg_logprob=-1.0), True),
        (result(avg_logprob=-1.1, no_speech=0.6), False),  # not silent enough to be silence
        (result(avg_logprob=-1.1, no_speech=0.7, ratio=9.0), True),  # silence wins over a loop
        (result(no_speech=0.9), True),  # speech, whatever the no-speech token says
    ],
)
def test_what_is_trusted(made: DecodingResult, trusted: bool) -> None:
    assert is_trusted(made) is trusted


def test_silence_is_what_the_model_calls_so_and_only_guesses_at() -> None:
    assert [is_silence(made) for made in (GOOD, LOOP, GUESS, SILENCE, result(no_speech=0.9))] == [False] * 3 + [True, False]


@pytest.mark.parametrize(
    ("script", "tried", "kept"),
    [
        ([GOOD], [0.0], GOOD),
        ([LOOP, GOOD], [0.0, 0.2], GOOD),
        ([LOOP, GUESS, LOOP, SILENCE], [0.0, 0.2, 0.4, 0.6], SILENCE),
        # Where none is trusted: what does not loop, then what is likeliest; not simply the last.
        ([LOOP, GUESS, LOOP, WILD, WILD, WILD], list(TEMPERATURES), GUESS),
        ([LOOP, WORSE_LOOP, WORSE_LOOP, WORSE_LOOP, WORSE_LOOP, WORSE_LOOP], list(TEMPERATURES), LOOP),
    ],
)
def test_the_ladder_ends_at_the_first_that_is_trusted(
    script: list[DecodingResult], tried: list[float], kept: DecodingResult
) -> None:
    asked: list[float] = []

    def attempt(temperature: float) -> DecodingResult:
        asked.append(temperature)
        return script[len(asked) - 1]

    assert Fallback().decode(attempt) is kept
    assert asked == tried


@pytest.mark.parametrize("temperatures", [(), (-0.1,), (0.0, 1.1), (math.nan,)])
def test_temperatures_that_make_no_ladder_are_refused(temperatures: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Fallback(temperatures)
    if temperatures:
        with pytest.raises(ValueError, match="from 0 to 1"):
            DecodingOptions("en", temperature=temperatures[-1])


def test_text_that_repeats_itself_compresses() -> None:
    assert compression_ratio(" and then" * 40) > 10
    assert compression_ratio(" It takes a recording, writes down what was said, and shows where the time went.") < 1.5
    assert compression_ratio("") == 0


LOGITS = np.log(np.array([0.1, 0.6, 0.3], np.float32))


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0])
def test_draws_follow_the_probabilities_at_the_temperature(temperature: float) -> None:
    sampler = Sampler(temperature, seed=7)
    counts = Counter(sampler.choose(LOGITS) for _ in range(1000))
    weights = np.array([0.1, 0.6, 0.3]) ** (1 / temperature)
    for token, expected in enumerate(weights / weights.sum()):
        assert counts[token] / 1000 == pytest.approx(expected, abs=0.04)


def test_a_log_probability_is_that_at_temperature_1_of_what_was_drawn() -> None:
    sampler = Sampler(0.7, seed=3)
    tokens = [sampler.choose(LOGITS) for _ in range(50)]
    assert sampler.sum_logprob == pytest.approx(float(sum(LOGITS[token] for token in tokens)), rel=1e-5)
    assert len(set(tokens)) > 1


def test_the_seed_alone_decides_the_draws() -> None:
    def drawn(seed: int) -> list[int]:
        sampler = Sampler(1.0, seed)
        return [sampler.choose(LOGITS) for _ in range(40)]

    assert drawn(5) == drawn(5) != drawn(6)


def test_a_banned_token_is_never_drawn() -> None:
    logits = np.zeros(100, np.float32)
    logits[50:] = -np.inf
    sampler = Sampler(1.0, seed=1)
    assert max(sampler.choose(logits) for _ in range(500)) < 50


def test_each_attempt_begins_the_window_anew() -> None:
    decoder = ScriptedDecoder([stamp(0), A, EOT, stamp(0), B])
    decoding = task(decoder)
    for expected in ([stamp(0), A], [stamp(0), B]):
        assert decoding.run(DecodingOptions("en"), LayerTimings(), lambda: None).tokens == expected
    assert decoder.restarts == 2


class ScriptedTask:
    """Answers attempts from a list; keeps the options they came with."""

    def __init__(self, results: list[DecodingResult]) -> None:
        self.results, self.asked = results, list[DecodingOptions]()

    def run(self, options: DecodingOptions, *rest: object) -> DecodingResult:
        self.asked.append(options)
        return self.results.pop(0)


@pytest.fixture
def engine(random_checkpoint: Path, tmp_path: Path) -> Engine:
    convert(open_checkpoint(random_checkpoint), tmp_path / "model", "int8", lambda line: None)
    return Engine(tmp_path / "model")


def whole(text: int, temperature: float, ratio: float = 1.0, avg_logprob: float = -0.5) -> DecodingResult:
    """One segment that ends with the window."""
    return DecodingResult([text, text], avg_logprob, 0.0, temperature, ratio)


def test_a_window_drawn_at_a_high_temperature_tells_the_next_nothing(
    engine: Engine, recordings: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one at up to 0.5 does: a loop costs its own window, not the rest of the recording."""
    scripted = ScriptedTask(
        [
            whole(A, 0.0),
            whole(A, 0.0, ratio=9.0),
            whole(A, 0.2, ratio=9.0),
            whole(B, 0.4),  # trusted at 0.4: kept as the next window's prompt
            # Never trusted, and likeliest at 1.0.
            *(whole(A, temperature, ratio=9.0, avg_logprob=temperature - 1.0) for temperature in TEMPERATURES),
        ]
    )
    scripted.results += [whole(B, 0.0)] * 50
    monkeypatch.setattr(engine, "_task", scripted)
    timings = LayerTimings()
    transcript = engine.transcribe(recordings["digits"].path, timings, "en")
    windows = dict.fromkeys(options.seed for options in scripted.asked)
    prompts = {options.seed: options.prompt for options in scripted.asked}
    assert list(prompts.values())[:4] == [(), (A, A), (A, A, B, B), ()]
    assert [options.temperature for options in scripted.asked[:10]] == [0.0, 0.0, 0.2, 0.4, *TEMPERATURES]
    assert timings.fallbacks == 2 + 5
    assert [segment.temperature for segment in transcript.segments][:4] == [0.0, 0.4, 1.0, 0.0]
    assert len(windows) == len(transcript.segments)


def test_one_temperature_alone_is_tried_once(
    engine: Engine, recordings: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = ScriptedTask([whole(A, 0.0, ratio=9.0)] * 50)
    monkeypatch.setattr(engine, "_task", scripted)
    timings = LayerTimings()
    engine.transcribe(recordings["digits"].path, timings, "en", fallback=Fallback((0.0,)))
    assert timings.fallbacks == 0
    assert {options.temperature for options in scripted.asked} == {0.0}


def test_fallback_is_the_same_whatever_was_decoded_before(engine: Engine, recordings: dict[str, Recording]) -> None:
    """Random weights guess, so every window goes up the ladder."""
    timings = LayerTimings()
    first = engine.transcribe(recordings["digits"].path, timings, "en")
    assert timings.fallbacks > 0
    engine.transcribe(recordings["digits"].path, LayerTimings(), "en", fallback=Fallback((1.0,)))
    assert engine.transcribe(recordings["digits"].path, LayerTimings(), "en") == first
