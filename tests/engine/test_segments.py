"""Timestamp tokens → segments and seek, case by case (openai/whisper transcribe.py)."""

from __future__ import annotations

import pytest

from engine.segments import Segment, Span, Word, in_order, make_segment, says_something, split_window
from tests.engine.test_decoding import A, B, C, stamp, tokenizer
from tests.random_checkpoint import TIMESTAMP_BEGIN

N_FRAMES = 100


@pytest.mark.parametrize(
    ("tokens", "spans", "advance", "is_open"),
    [
        # no pair: one segment, up to its last timestamp or the window's end
        ([stamp(0), A, B, stamp(40)], [Span([stamp(0), A, B, stamp(40)], 0, 40)], N_FRAMES, False),
        ([stamp(0), A, B], [Span([stamp(0), A, B], 0, None)], N_FRAMES, True),
        ([A], [Span([A], 0, None)], N_FRAMES, True),
        ([], [Span([], 0, None)], N_FRAMES, True),
        # text, one timestamp at the very end: nothing follows it
        (
            [stamp(0), A, stamp(10), stamp(10), B, stamp(30)],
            [Span([stamp(0), A, stamp(10)], 0, 10), Span([stamp(10), B, stamp(30)], 10, 30)],
            N_FRAMES,
            False,
        ),
        # speech cut off by the window: its tail is dropped and decoded again
        ([stamp(0), A, stamp(10), stamp(10), B, C], [Span([stamp(0), A, stamp(10)], 0, 10)], 20, True),
        (
            [stamp(0), A, stamp(10), stamp(12), B, stamp(30), stamp(30)],
            [Span([stamp(0), A, stamp(10)], 0, 10), Span([stamp(12), B, stamp(30)], 12, 30)],
            60,
            True,
        ),
        # a pair at 0: no progress by the reference's rule, so the window is passed over
        ([stamp(0), stamp(0), A], [Span([stamp(0)], 0, 0)], N_FRAMES, True),
    ],
)
def test_split(tokens: list[int], spans: list[Span], advance: int, is_open: bool) -> None:
    assert split_window(tokens, TIMESTAMP_BEGIN, N_FRAMES) == (spans, advance, is_open)


def segment(span: Span, seek: int = 200) -> tuple[float, float, str, tuple[int, ...]]:
    made = make_segment(span, tokenizer(), seek, N_FRAMES, (-0.5, 0.1, 0.0, 1.0))
    return made.start, made.end, made.text, made.tokens


def test_times_count_from_the_recordings_start() -> None:
    assert segment(Span([stamp(5), 256, stamp(30)], 5, 30)) == (pytest.approx(2.1), 2.6, " one", (stamp(5), 256, stamp(30)))
    assert segment(Span([stamp(0), 256], 0, None))[1] == 3.0  # the window's end


def test_a_segment_without_time_or_words_says_nothing() -> None:
    for span in (
        Span([stamp(5), A, stamp(5)], 5, 5),
        Span([stamp(5), 32, stamp(9)], 5, 9),
        Span([stamp(5), *b" . .", stamp(9)], 5, 9),
    ):
        assert not says_something(make_segment(span, tokenizer(), 0, N_FRAMES, (-0.5, 0.1, 0.0, 1.0)))
    for text in (" 7.", " — yes", "北"):
        span = Span([stamp(5), *text.encode(), stamp(9)], 5, 9)
        assert says_something(make_segment(span, tokenizer(), 0, N_FRAMES, (-0.5, 0.1, 0.0, 1.0)))


def spoken(start: float, end: float, *words: tuple[float, float]) -> Segment:
    return Segment(0, start, end, " a", (A,), -0.5, 0.1, 0.0, 1.0, tuple(Word(" a", *times, 0.9) for times in words))


def times(segments: list[Segment]) -> list[tuple[float, float]]:
    return [(segment.start, segment.end) for segment in segments]


def test_a21_no_segment_ends_after_the_recording() -> None:
    """`<|0.00|> text <|29.98|>` of 3.2 s; and times within a timestamp's step are no repair."""
    (made,), n_moved = in_order([spoken(0.0, 29.98, (0.5, 3.1), (3.1, 29.98))], 0.0, 3.2)
    assert (made.start, made.end) == (0.0, 3.2)
    assert [(word.start, word.end) for word in made.words] == [(0.5, 3.1), (3.1, 3.2)]
    assert n_moved == 2
    assert in_order([spoken(0.0, 3.21)], 0.0, 3.2) == ([spoken(0.0, 3.2)], 0)


@pytest.mark.parametrize(
    ("given", "floor", "right", "n_moved"),
    [
        ([(99.92, 90.72)], 0.0, [(99.92, 99.92)], 1),  # the report's own
        ([(-0.5, 1.0)], 0.0, [(0.0, 1.0)], 1),
        ([(1.0, 3.0), (1.0, 3.0)], 0.0, [(1.0, 3.0), (3.0, 3.0)], 1),
        ([(1.0, 4.0), (3.0, 5.0)], 0.0, [(1.0, 4.0), (4.0, 5.0)], 1),
        ([(28.0, 29.0)], 30.0, [(30.0, 30.0)], 2),  # a window that jumps back 2 s
        ([(1.0, 2.0), (2.0, 3.0)], 0.0, [(1.0, 2.0), (2.0, 3.0)], 0),
    ],
)
def test_a24_segments_are_in_order_and_repairs_are_counted(
    given: list[tuple[float, float]], floor: float, right: list[tuple[float, float]], n_moved: int
) -> None:
    made, moved = in_order([spoken(*pair) for pair in given], floor, 100.0)
    assert times(made) == right
    assert moved == n_moved


def test_a24_words_are_in_order_too() -> None:
    (made,), n_moved = in_order([spoken(1.0, 5.0, (1.0, 2.0), (1.5, 1.4), (0.2, 6.0))], 0.0, 5.5)
    assert [(word.start, word.end) for word in made.words] == [(1.0, 2.0), (2.0, 2.0), (2.0, 5.5)]
    assert n_moved == 4
