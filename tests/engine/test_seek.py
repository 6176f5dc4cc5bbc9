"""The seek loop with scripted windows: what is kept, where it goes on, and what the guards do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from engine import speech
from engine.decoding import DecodingOptions, DecodingResult, DecodingTask
from engine.errors import InvalidOptions, UnsupportedLanguage
from engine.seek import SeekLoop
from engine.segments import Segment
from engine.timings import LayerTimings
from tests.engine.test_decoding import EOT, A, B, C, special, stamp, tokenizer
from tests.random_checkpoint import DIMS, SPECIAL_IDS

WINDOW_FRAMES = DIMS.n_frames  # 100: 1 s, up to timestamp 50
Script = list[DecodingResult]


def made(*tokens: int, temperature: float = 0.0, ratio: float = 1.0, no_speech: float = 0.0) -> DecodingResult:
    return DecodingResult(list(tokens), -0.3, no_speech, temperature, ratio)


class Sound:
    """Stands in for `LogMel`: seconds that sound like speech, but for those that are silent."""

    def __init__(self, seconds: float, silent: Sequence[int] = ()) -> None:
        self.seconds, self.n_frames, self._silent = seconds, int(seconds * 100), silent
        self._speech = np.random.default_rng(0).uniform(0, 1, (WINDOW_FRAMES, DIMS.n_mels)).astype(np.float32)

    def window(self, seek: int) -> np.ndarray:
        window = np.full_like(self._speech, -1.5) if seek // WINDOW_FRAMES in self._silent else self._speech
        return window[: self.n_frames - seek]


class Stretches(Sound):
    """Sounds like speech in the frames of `spoken`, and is silent else."""

    def __init__(self, seconds: float, *spoken: range) -> None:
        super().__init__(seconds)
        self._frames = np.full((self.n_frames, DIMS.n_mels), -1.5, np.float32)
        for frames in spoken:
            for frame in frames:
                self._frames[frame] = frame // 10 % 2  # one block is louder than the next

    def window(self, seek: int) -> np.ndarray:
        return self._frames[seek : seek + WINDOW_FRAMES]


class Languages:
    """A decoder whose language tokens get scripted probabilities, a window after another."""

    def __init__(self, heard: list[tuple[str, float]]) -> None:
        self.heard, self.n_asked = heard, 0

    def reserve(self, n_sequences: int) -> None: ...

    def restart(self) -> None: ...

    def step(self, tokens: Sequence[int], positions: Sequence[int], timings: LayerTimings) -> np.ndarray:
        code, probability = self.heard[self.n_asked]
        self.n_asked += 1
        logits = np.zeros((1, DIMS.n_vocab), np.float32)
        for name in special().languages:
            logits[0, SPECIAL_IDS[f"<|{name}|>"]] = np.log(probability if name == code else 1 - probability)
        return logits


@pytest.fixture
def transcribe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SeekLoop]:
    """Runs the loop over scripted windows; `loop.asked` has each window's language and prompt."""

    def run(
        script: Script,
        sound: Sound | None = None,
        heard: list[tuple[str, float]] | None = None,
        multilingual: bool = False,
        **options: object,
    ) -> SeekLoop:
        asked: list[tuple[str, list[int]]] = []
        answers = iter(script)

        def decode(self: DecodingTask, language: str, prompt: Sequence[int], *rest: object) -> DecodingResult:
            asked.append((language, list(prompt)))
            return next(answers, made(stamp(0), *b" end", stamp(40)))

        monkeypatch.setattr(DecodingTask, "run", decode)
        decoder = Languages(heard or [])
        lengths: list[int] = []
        model = SimpleNamespace(decoder=decoder, dims=DIMS, begin_window=lambda window, *others: lengths.append(len(window)))
        sound = sound or Sound(len(script) * WINDOW_FRAMES / 100)
        loop = SeekLoop(model, tokenizer(multilingual), [], DecodingOptions(**options), LayerTimings(), lambda: None)
        while loop.seek < sound.n_frames:
            loop.transcribe_window(sound)
        loop.finish()
        loop.asked, loop.n_detections, loop.lengths = asked, decoder.n_asked, lengths
        return loop

    return run


def times(segments: list[Segment]) -> list[tuple[float, float]]:
    return [(round(segment.start, 2), round(segment.end, 2)) for segment in segments]


def texts(segments: list[Segment]) -> list[str]:
    return [segment.text for segment in segments]


def test_windows_follow_closed_segments(transcribe: Callable[..., SeekLoop]) -> None:
    """Speech that the window cut off is decoded again from the last closed segment on."""
    loop = transcribe(
        [
            made(stamp(0), A, stamp(20), stamp(20), B),  # B goes on beyond the window
            made(stamp(0), B, stamp(30)),
        ],
        Sound(1.4),
    )
    assert texts(loop.segments) == ["A", "B"]
    assert times(loop.segments) == [(0.0, 0.4), (0.4, 1.0)]
    assert loop.asked[1] == ("en", [stamp(0), A, stamp(20)])


def test_a19_a_window_without_a_closing_timestamp_yields_its_text(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), A, B, C)], Sound(0.9))
    assert texts(loop.segments) == ["ABC"]
    assert times(loop.segments) == [(0.0, 0.9)]


def test_a15_a_loop_costs_its_own_window(transcribe: Callable[..., SeekLoop]) -> None:
    """A 6-token phrase over and over in windows 3 and 4, at every temperature; from 5 on all is normal."""
    phrase = [A, B, C, A, C, B]
    loops = [made(stamp(0), *phrase * 36, ratio=30.0) for _ in range(12)]
    normal = [made(stamp(0), *text, stamp(50)) for text in (b" one", b" two")]
    loop = transcribe([*normal, *loops, *normal, *normal], Sound(8.0))
    said = "".join(texts(loop.segments))
    assert said == " one two" + "ABCACB" * 3 + " one two one two"
    assert times(loop.segments)[3:] == [(4.0, 5.0), (5.0, 6.0), (6.0, 7.0), (7.0, 8.0)]
    assert loop._timings.loops == 2
    assert all(prompt == [] for _, prompt in loop.asked[8:15])  # nothing of a loop is told to the next window
    assert loop.asked[15][1]


def test_what_stands_behind_a_loop_is_kept(transcribe: Callable[..., SeekLoop]) -> None:
    """The window is not looked at again, so its open end must not be dropped."""
    loops = [made(stamp(0), A, stamp(5), stamp(5), *[B, C] * 9, stamp(20), stamp(20), *b" real", ratio=9.0) for _ in range(6)]
    loop = transcribe(loops, Sound(2.0))
    assert texts(loop.segments) == ["A", "BCBCBC", " real", " end"]
    assert times(loop.segments)[2] == (0.4, 1.0)
    assert loop._timings.loops == 1


def test_text_that_only_compresses_well_is_no_loop(transcribe: Callable[..., SeekLoop]) -> None:
    """Like sentences, or a script of three bytes a letter: nothing is cut, and the open end is decoded again."""
    alike = [made(stamp(0), *b" In room one", stamp(20), stamp(20), *b" In room t", ratio=2.6) for _ in range(6)]
    loop = transcribe([*alike, made(stamp(0), *b" In room two", stamp(30))], Sound(1.3))
    assert texts(loop.segments) == [" In room one", " In room two"]
    assert loop._timings.loops == 0


def test_a21_a_segment_past_the_end_ends_with_the_recording(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), A, stamp(49))], Sound(0.32))
    assert times(loop.segments) == [(0.0, 0.32)]
    assert loop._timings.repairs == 1


def test_a22_a_character_that_two_segments_share_is_whole_in_the_text(transcribe: Callable[..., SeekLoop]) -> None:
    data = "北京のテスト 🎉 ņ".encode()
    for cut in range(1, len(data)):
        for script in (
            [made(stamp(0), *data[:cut], stamp(20), stamp(20), *data[cut:], stamp(40))],
            [made(stamp(0), *data[:cut], stamp(50)), made(stamp(0), *data[cut:], stamp(40))],  # in two windows
        ):
            loop = transcribe(script)
            assert "".join(texts(loop.segments)) == data.decode()
            assert all(texts(loop.segments))
            assert not any("\ufffd" in text for text in texts(loop.segments))


def test_a22_bytes_that_are_never_completed_are_one_replacement_character(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), A, 0xE5, 0x8C, stamp(20), stamp(20), B, stamp(40))])
    assert texts(loop.segments) == ["A", "\ufffdB"]
    loop = transcribe([made(stamp(0), A, 0xE5, stamp(40))])
    assert texts(loop.segments) == ["A\ufffd"]


@pytest.mark.parametrize(
    "tokens",
    [
        [stamp(30), A, stamp(10), stamp(10), B, stamp(20)],  # ends before it starts
        [stamp(5), A, stamp(5), stamp(5), B, stamp(5)],
        [A, stamp(20), stamp(20), B, stamp(40)],  # a first timestamp is missing: its place is far below 0
        [stamp(0), A, stamp(48), stamp(2), B, stamp(3)],
    ],
)
def test_a24_whatever_the_timestamps_segments_are_in_order(tokens: list[int], transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(*tokens), made(stamp(0), C, stamp(9))], Sound(2.0))
    flat = [time for segment in loop.segments for time in (segment.start, segment.end)]
    assert flat == sorted(flat)
    assert flat[0] >= 0.0
    assert flat[-1] <= 2.0
    assert loop._timings.repairs > 0 or len(set(flat)) == len(flat) or tokens[0] == stamp(5)


def test_text_past_the_end_joins_what_was_said_before(transcribe: Callable[..., SeekLoop]) -> None:
    """A cue without time would be none."""
    loop = transcribe([made(stamp(0), A, stamp(15), stamp(40), B, stamp(48))], Sound(0.32))
    assert texts(loop.segments) == ["AB"]
    assert times(loop.segments) == [(0.0, 0.32)]


def test_silence_is_passed_over_unheard(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), A, stamp(50))], Sound(4.0, silent=[0, 1, 3]))
    assert times(loop.segments) == [(2.0, 3.0)]
    assert len(loop.asked) == 1
    assert loop._timings.silent_windows == 3


def test_pauses_part_windows(transcribe: Callable[..., SeekLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause ends a window, and what is behind it begins the next one: no speech waits for a window's last seconds."""
    monkeypatch.setattr(speech, "PAUSE_BLOCKS", 3)  # 0.3 s, in windows of 1 s
    monkeypatch.setattr(speech, "MARGIN_BLOCKS", 1)
    script = [made(stamp(0), A, stamp(15)), made(stamp(5), B, stamp(15), stamp(15), C), made(stamp(0), C, stamp(10))]
    loop = transcribe(script, Stretches(3.0, range(30), range(80, 110), range(170, 230)))
    # 0.3 s and a tenth; from 0.7 s on 0.3 s and a tenth each side; C goes on beyond what was said of it: from 1.0 s
    assert loop.lengths == [40, 50, 20, 80]
    assert texts(loop.segments) == ["A", "B", "C", " end"]
    assert times(loop.segments) == [(0.0, 0.3), (0.8, 1.0), (1.0, 1.2), (1.6, 2.4)]
    assert loop.seek == 300


def test_what_the_model_calls_silence_says_nothing(transcribe: Callable[..., SeekLoop]) -> None:
    silent = DecodingResult([stamp(0), A, stamp(50)], -1.2, 0.9, 0.0, 1.0)
    loop = transcribe([made(stamp(0), B, stamp(50)), silent, made(stamp(0), C, stamp(50))])
    assert texts(loop.segments) == ["B", "C"]
    assert loop.asked[2][1] == [stamp(0), B, stamp(50)]  # and is told to nobody


def test_text_without_a_letter_is_no_segment(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), *b" . . .", stamp(50)), made(stamp(0), *b" 7.", stamp(50))])
    assert texts(loop.segments) == [" 7."]


def test_a20_the_language_is_looked_for_where_speech_is(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([], Sound(4.0, silent=[0, 1]), [("de", 0.9)], multilingual=True)
    assert (loop.language, loop.language_probability) == ("de", pytest.approx(0.9))
    assert loop.n_detections == 1  # sure at once
    assert [language for language, _ in loop.asked] == ["de", "de"]
    assert loop.segments[0].start == 2.0


@pytest.mark.parametrize(
    ("heard", "used", "n_asked"),
    [
        ([("de", 0.7), ("en", 0.95)], ["de", "en", "en"], 2),  # sure the second time
        ([("de", 0.7), ("en", 0.6), ("en", 0.65)], ["de", "de", "de"], 3),  # never as sure as at first
        ([("de", 0.7), ("en", 0.75), ("en", 0.8)], ["de", "en", "en"], 3),
    ],
)
def test_a20_a_doubtful_language_is_looked_for_again(
    heard: list[tuple[str, float]],
    used: list[str],
    n_asked: int,
    transcribe: Callable[..., SeekLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.seek.SURE_LANGUAGE", 0.9)  # of two languages, one always has a half
    loop = transcribe([], Sound(3.0), heard, multilingual=True)
    assert [language for language, _ in loop.asked] == used
    assert (loop.language, loop.n_detections) == (used[-1], n_asked)


def test_a20_a_window_that_turns_out_silent_tells_no_language(transcribe: Callable[..., SeekLoop]) -> None:
    silent = DecodingResult([stamp(0), A, stamp(50)], -1.2, 0.9, 0.0, 1.0)
    loop = transcribe([silent], Sound(2.0), [("de", 0.95), ("en", 0.8)], multilingual=True)
    assert (loop.language, loop.n_detections) == ("en", 2)


def test_a13_where_nothing_is_said_there_is_no_language_but_the_one_asked_for(transcribe: Callable[..., SeekLoop]) -> None:
    quiet = Sound(3.0, silent=[0, 1, 2])
    assert transcribe([], quiet, multilingual=True).language is None
    assert transcribe([], quiet, multilingual=True, language="German").language == "de"
    assert transcribe([], quiet).language == "en"


def test_english_only_weights_do_one_thing() -> None:
    model = SimpleNamespace(decoder=Languages([]), dims=DIMS)
    for options, error in (({"task": "translate"}, InvalidOptions), ({"language": "de"}, UnsupportedLanguage)):
        with pytest.raises(error):
            SeekLoop(model, tokenizer(), [], DecodingOptions(**options), LayerTimings(), lambda: None)


def test_a18_a_prompt_is_told_to_the_first_window_and_never_said(transcribe: Callable[..., SeekLoop]) -> None:
    loop = transcribe([made(stamp(0), A, stamp(50))] * 2, initial_prompt="two B")
    assert loop.asked[0][1] == [*b" two B"]
    assert loop.asked[1][1] == [*b" two B", stamp(0), A, stamp(50)]
    assert "B" not in "".join(texts(loop.segments))


def test_a_prompt_can_be_carried_or_the_text_so_far_left_out(transcribe: Callable[..., SeekLoop]) -> None:
    window = made(stamp(0), A, stamp(50))
    carried = transcribe([window] * 3, initial_prompt="two", carry_initial_prompt=True)
    assert [prompt[:4] for _, prompt in carried.asked] == [[*b" two"]] * 3
    alone = transcribe([window] * 3, initial_prompt="two", condition_on_previous_text=False)
    assert [prompt for _, prompt in alone.asked] == [[*b" two"], [], []]


def test_every_window_moves_on(transcribe: Callable[..., SeekLoop]) -> None:
    """Whatever the tokens are; the loop would not end otherwise."""
    for tokens in ([], [EOT - 1], [stamp(0), stamp(0)], [stamp(0), A, stamp(0), stamp(0), B], [stamp(1), stamp(1), A]):
        loop = transcribe([made(*tokens) for _ in range(200)], Sound(3.0))
        assert loop.seek >= 300
