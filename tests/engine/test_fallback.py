"""The temperature ladder: when a window is decoded again, what is kept, and what the next window is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import soundfile

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.decoding import DecodingOptions, DecodingResult, DecodingTask, Fallback
from engine.decoding.options import TEMPERATURES
from engine.decoding.silence import is_unsaid
from engine.decoding.task import compression_ratio
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.engine.test_decoding import EOT, A, B, ScriptedDecoder, run, stamp

LADDER = Fallback(DecodingOptions())


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
    assert LADDER.is_trusted(made) is trusted


def test_silence_is_what_the_model_calls_so_and_only_guesses_at() -> None:
    assert [LADDER.is_silence(made) for made in (GOOD, LOOP, GUESS, SILENCE, result(no_speech=0.9))] == [False] * 3 + [
        True,
        False,
    ]


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

    assert LADDER.decode(attempt) is kept
    assert asked == tried


PROMPT = "Glossary: Zanzibar, Quetzalcoatl"


@pytest.mark.parametrize(
    ("made", "text", "prompt", "unsaid"),
    [
        (SILENCE, " Music", "", True),
        (GOOD, " Yes.", "", False),
        (result(no_speech=0.9), " Yes.", "", False),
        # no temperature gave a text to trust
        (result(avg_logprob=-1.1, no_speech=0.55), " Music", "", True),
        (result(avg_logprob=-1.1, no_speech=0.45), " Music", "", False),
        (result(ratio=2.5, no_speech=0.55), " la la la", "", False),  # a loop is cut, not thrown away
        # the prompt again
        (result(no_speech=0.7), " Zanzibar, quetzalcoatl, Quetzal", PROMPT, True),
        (result(no_speech=0.7), " Zanzibar island people", PROMPT, False),
        (
            result(no_speech=0.65),
            " This is what we have to do in the next year.",
            "What we have to do is the next thing in this year.",
            False,
        ),
        (result(no_speech=0.7), " he", "The meeting", False),
        (result(no_speech=0.7), "春", "春风", False),
        (result(no_speech=0.5), " Zanzibar", PROMPT, False),
        (result(no_speech=0.7), " ...", PROMPT, False),
        (result(no_speech=0.45, temperature=0.4), " Zanzibar", PROMPT, True),  # drawn, and so in doubt
        (result(no_speech=0.45, ratio=5.0), " Zanzibar" * 9, PROMPT, True),
        (result(no_speech=0.35, temperature=0.4), " Zanzibar", PROMPT, False),
        (result(no_speech=0.7), "春风", "又绿江南岸春风", True),
        (result(no_speech=0.7), " Yes.", "", False),
    ],
)
def test_a18_text_that_nobody_said(made: DecodingResult, text: str, prompt: str, unsaid: bool) -> None:
    assert is_unsaid(made, text, prompt, LADDER) is unsaid
    assert not is_unsaid(made, text, prompt, Fallback(DecodingOptions(no_speech_threshold=None)))


@pytest.mark.parametrize(
    ("off", "trusted", "silent"),
    [
        ({"compression_ratio_threshold": None}, [True, True, False, True], [False, False, False, True]),
        ({"logprob_threshold": None}, [True, False, True, True], [False, False, False, True]),
        ({"no_speech_threshold": None}, [True, False, False, False], [False, False, False, False]),
    ],
)
def test_each_rule_can_be_switched_off(off: dict[str, None], trusted: list[bool], silent: list[bool]) -> None:
    fallback = Fallback(DecodingOptions(**off))
    made = (GOOD, LOOP, GUESS, SILENCE)
    assert [fallback.is_trusted(one) for one in made] == trusted
    assert [fallback.is_silence(one) for one in made] == silent


def test_a_threshold_of_ones_own_moves_the_guards_with_it() -> None:
    made = result(avg_logprob=-1.1, no_speech=0.55)
    assert is_unsaid(made, " Music", "", LADDER)
    assert not is_unsaid(made, " Music", "", Fallback(DecodingOptions(no_speech_threshold=0.95)))


def test_text_that_repeats_itself_compresses() -> None:
    assert compression_ratio(" and then" * 40) > 10
    assert compression_ratio(" It takes a recording, writes down what was said, and shows where the time went.") < 1.5
    assert compression_ratio("") == 0


def test_each_attempt_begins_the_window_anew() -> None:
    decoder = ScriptedDecoder([stamp(0), A, EOT, stamp(0), B])
    for expected in ([stamp(0), A], [stamp(0), B]):
        assert run(decoder).tokens == expected
    assert decoder.restarts == 2


class Script:
    """Stands in for `DecodingTask.run`: answers attempts from a list, and keeps what they came with."""

    def __init__(self, results: list[DecodingResult]) -> None:
        self.results = results
        self.prompts: dict[int, list[int]] = {}  # by window, told by its seed
        self.temperatures: list[float] = []

    def run(self, language: str, prompt: Sequence[int], temperature: float, seed: int, *rest: object) -> DecodingResult:
        self.prompts[seed] = list(prompt)
        self.temperatures.append(temperature)
        return self.results.pop(0) if self.results else whole(B, temperature)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[DecodingResult]], Script]:
    def install(results: list[DecodingResult]) -> Script:
        script = Script(results)
        monkeypatch.setattr(DecodingTask, "run", lambda self, *arguments: script.run(*arguments))
        return script

    return install


@pytest.fixture(scope="module")
def engine(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("scripted") / "model"
    convert(open_checkpoint(random_checkpoint), directory, "int8", report=lambda line: None)
    return Engine(directory)


def whole(text: int, temperature: float, ratio: float = 1.0, avg_logprob: float = -0.5) -> DecodingResult:
    """One segment that ends with the window."""
    return DecodingResult([text, text], avg_logprob, 0.0, temperature, ratio)


Scripted = Callable[[list[DecodingResult]], Script]


def test_a_window_drawn_at_a_high_temperature_tells_the_next_nothing(
    engine: Engine, recordings: dict[str, Recording], scripted: Scripted
) -> None:
    """And one at up to 0.5 does: a loop costs its own window, not the rest of the recording."""
    script = scripted(
        [
            whole(A, 0.0),
            whole(A, 0.0, ratio=9.0),
            whole(A, 0.2, ratio=9.0),
            whole(B, 0.4),  # trusted at 0.4: kept as the next window's prompt
            # Never trusted, and likeliest at 1.0.
            *(whole(A, temperature, avg_logprob=temperature - 2.0 - 0.1) for temperature in TEMPERATURES),
        ]
    )
    timings = LayerTimings()
    transcript = engine.transcribe(recordings["digits"].path, timings)
    assert list(script.prompts.values())[:4] == [[], [A, A], [A, A, B, B], []]
    assert script.temperatures[:10] == [0.0, 0.0, 0.2, 0.4, *TEMPERATURES]
    assert timings.fallbacks == 2 + 5
    assert [segment.temperature for segment in transcript.segments][:4] == [0.0, 0.4, 1.0, 0.0]
    assert len(script.prompts) == len(transcript.segments)


@pytest.mark.parametrize(
    ("temperatures", "passes"), [(None, [0.0, 0.2]), ((0.0,), [0.0]), ((0.4,), [0.4]), ((0.0, 0.5), [0.0, 0.5])]
)
def test_a16_a_single_temperature_is_tried_once_and_the_default_is_a_ladder(
    temperatures: tuple[float, ...] | None,
    passes: list[float],
    engine: Engine,
    recordings: dict[str, Recording],
    scripted: Scripted,
) -> None:
    """Compression ratio 5.0 at first, 1.5 then."""
    script = scripted([whole(A, 0.0, ratio=5.0), whole(A, 0.2, ratio=1.5)])
    options = DecodingOptions() if temperatures is None else DecodingOptions(temperatures=temperatures)
    engine.transcribe(recordings["digits"].path, LayerTimings(), options)
    assert script.temperatures[: len(passes)] == passes
    assert script.temperatures[len(passes)] == passes[0]  # the next window


def test_fallback_is_the_same_whatever_was_decoded_before(
    engine: Engine, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    """Random weights guess, so every window goes up the ladder."""
    samples, rate = soundfile.read(recordings["digits"].path, dtype="int16", frames=2 * 16_000)
    path = tmp_path / "x.wav"
    soundfile.write(path, samples, rate)
    timings = LayerTimings()
    first = engine.transcribe(path, timings)
    assert timings.fallbacks > 0
    drawn = engine.transcribe(path, LayerTimings(), DecodingOptions(temperatures=(1.0,), best_of=3))
    assert engine.transcribe(path, LayerTimings()) == first
    assert engine.transcribe(path, LayerTimings(), DecodingOptions(temperatures=(1.0,), best_of=3)) == drawn


def test_each_window_has_draws_of_its_own_and_the_seed_moves_them_all(
    engine: Engine, recordings: dict[str, Recording], scripted: Scripted
) -> None:
    seeds = []
    for seed in (0, 7):
        script = scripted([])
        engine.transcribe(recordings["digits"].path, LayerTimings(), DecodingOptions(seed=seed))
        seeds.append(list(script.prompts))
    assert len(set(seeds[0])) == len(seeds[0]) > 3
    assert [seed + 7 for seed in seeds[0]] == seeds[1]
