"""Word times: the rules on scripted words, and openai/whisper's own times on the project's recordings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.decoding import DecodingOptions
from engine.hallucinations import WindowTimes, anomaly_score, is_anomaly, without_hallucinations
from engine.segments import Segment, Word
from engine.timings import LayerTimings
from engine.transcribe import Engine
from engine.words import _merge_punctuation, _shorten_at_sentence_ends, _Timing
from tests.conftest import Recording
from tests.engine.test_decoding import tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "words.tiny.en.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kv", "mean_seconds"), [("f32", 0.01), ("shared-f32", 0.01), ("int8", 0.05)])
def test_words_and_times_are_openai_whispers(
    kv: str, mean_seconds: float, tiny_en: Path, tiny_en_f16: Path, recordings: dict[str, Recording]
) -> None:
    """Float32 to a hundredth; INT8 weights and K/V to a few."""
    is_exact = kv.endswith("f32")
    engine = Engine(tiny_en_f16 if is_exact else tiny_en, kv, tail="whole")
    for name in ("demo", "digits"):
        transcript = engine.transcribe(recordings[name].path, LayerTimings(), DecodingOptions(word_timestamps=True))
        words = [word for segment in transcript.segments for word in segment.words]
        assert [word.word for word in words] == [word for word, *_ in GOLDEN[name]]
        off = [abs(w.start - g[1]) + abs(w.end - g[2]) for w, g in zip(words, GOLDEN[name], strict=True)]
        assert sum(off) / 2 / len(words) < mean_seconds
        assert max(abs(w.probability - g[3]) for w, g in zip(words, GOLDEN[name], strict=True)) < (0.01 if is_exact else 0.2)
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= transcript.seconds
        assert "".join(word.word for word in words) == transcript.text


def test_times_are_the_recordings_where_every_second_position_is_left_out(
    tiny_en: Path, recordings: dict[str, Recording]
) -> None:
    """To a position and a half: 0.03 s."""
    transcript = Engine(tiny_en, "int8-half").transcribe(
        recordings["demo"].path, LayerTimings(), DecodingOptions(word_timestamps=True)
    )
    words = [word for segment in transcript.segments for word in segment.words]
    assert [word.word for word in words] == [word for word, *_ in GOLDEN["demo"]]
    off = [abs(w.start - g[1]) + abs(w.end - g[2]) for w, g in zip(words, GOLDEN["demo"], strict=True)]
    assert sum(off) / 2 / len(words) < 0.03


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (" one two", "en", [" one", " two"]),
        ("naïve, yes.", "en", ["naïve", ",", " yes", "."]),
        ("北京のテスト", "ja", list("北京のテスト")),
        ("北京のテスト", "en", ["北京のテスト"]),
        (" 🎉ņ", "lv", [" 🎉ņ"]),
    ],
)
def test_a22_words_are_whole_characters(text: str, language: str, expected: list[str]) -> None:
    tokens = tokenizer().encode(text)
    words = tokenizer().split_words(tokens, language)
    assert [word for word, _ in words] == expected
    assert sum(n_tokens for _, n_tokens in words) == len(tokens)


def test_a22_bytes_that_are_truly_broken_are_a_word_of_replacement_characters() -> None:
    broken = [*b" a", 0xE5, 0x8C, *b"b"]  # a character that lacks its last byte
    assert tokenizer().split_words(broken, "en") == [(" a��b", 5)]
    assert tokenizer().split_words([*b"a", 0xE5], "ja") == [("a", 1), ("�", 1)]


def timings(*words: str) -> list[_Timing]:
    return [_Timing(word, 1, i, i + 1, 0.9) for i, word in enumerate(words)]


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        ([" Yes", ",", " no", "."], [" Yes,", "", " no.", ""]),
        ([' "', "Yes", "!", '"'], ["", ' "Yes!"', "", ""]),
        ([" (", "a", ")", "?"], ["", " (a)?", "", ""]),
        ([" -", "x"], ["", " -x"]),
        ([" a", " ", "."], [" a", "", " ."]),
        ([], []),
    ],
)
def test_signs_join_the_word_they_belong_to(words: list[str], merged: list[str]) -> None:
    made = timings(*words)
    _merge_punctuation(made)
    assert [timing.word for timing in made] == merged
    assert sum(timing.n_tokens for timing in made) == len(words)


def test_a_pause_is_no_part_of_the_words_around_a_stop() -> None:
    made = [_Timing(" Yes", 1, 0, 0.4, 0.9), _Timing(".", 1, 0.4, 4.0, 0.9), _Timing(" No", 1, 4.0, 9.0, 0.9)]
    _shorten_at_sentence_ends(made, 0.8)
    assert [(timing.start, timing.end) for timing in made] == [(0, 0.4), (0.4, pytest.approx(1.2)), (pytest.approx(8.2), 9.0)]


def said(start: float, end: float, probability: float = 0.9, n_words: int = 2) -> Segment:
    step = (end - start) / n_words
    words = tuple(Word(f" w{i}", start + i * step, start + (i + 1) * step, probability) for i in range(n_words))
    return Segment(0, start, end, " w" * n_words, (1,), -0.5, 0.1, 0.0, 1.0, words)


@pytest.mark.parametrize(
    ("word", "score"),
    [
        (Word(" a", 0, 0.5, 0.9), 0.0),
        (Word(" a", 0, 0.5, 0.1), 1.0),
        (Word(" a", 0, 0.033, 0.9), 1.5),
        (Word(" a", 0, 3.5, 0.1), 2.5),
    ],
)
def test_anomalous_words(word: Word, score: float) -> None:
    assert anomaly_score(word) == pytest.approx(score)


def test_a_segment_of_anomalous_words_is_one() -> None:
    assert not is_anomaly(None)
    assert not is_anomaly(said(0, 1))
    assert is_anomaly(said(0, 1, probability=0.1))  # each of its words
    assert is_anomaly(said(0, 10, n_words=1, probability=0.9))  # one far too long


WINDOW = WindowTimes(0.0, 30.0, 30.0, 60.0)


def test_a_hallucination_between_silences_goes_and_is_looked_at_again() -> None:
    good, odd, later = said(3, 5), said(15, 16, probability=0.1), said(25, 27)
    assert without_hallucinations([good, odd, later], WINDOW, 0.0, 2.0) == ([good], 15)
    assert without_hallucinations([good, said(15, 16), later], WINDOW, 0.0, 2.0)[1] is None


def test_odd_words_close_to_good_ones_stay() -> None:
    segments = [said(3, 5), said(5.2, 6, probability=0.1), said(6.5, 9)]
    assert without_hallucinations(segments, WINDOW, 0.0, 2.0) == (segments, None)


def test_silence_before_an_odd_first_segment_is_skipped() -> None:
    assert without_hallucinations([said(8, 9, probability=0.1)], WINDOW, 0.0, 2.0) == ([], 8)


def test_an_odd_end_of_the_recording_goes() -> None:
    good = said(3, 5)
    window = WindowTimes(0.0, 30.0, 30.0, 30.0)
    assert without_hallucinations([good, said(28.2, 29, probability=0.1)], window, 0.0, 2.0) == ([good], 30.0)
