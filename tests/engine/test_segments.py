"""Timestamp tokens → segments and seek, case by case (openai/whisper transcribe.py)."""

from __future__ import annotations

import pytest

from engine.segments import Span, emptied, make_segment, split_window
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
    made = emptied(make_segment(span, tokenizer(), seek, N_FRAMES, (-0.5, 0.1, 0.0, 1.0)))
    return made.start, made.end, made.text, made.tokens


def test_times_count_from_the_recordings_start() -> None:
    assert segment(Span([stamp(5), 256, stamp(30)], 5, 30)) == (pytest.approx(2.1), 2.6, " one", (stamp(5), 256, stamp(30)))
    assert segment(Span([stamp(0), 256], 0, None))[1] == 3.0  # the window's end


def test_an_empty_or_blank_segment_keeps_its_place_and_loses_its_tokens() -> None:
    assert segment(Span([stamp(5), A, stamp(5)], 5, 5)) == (pytest.approx(2.1), pytest.approx(2.1), "", ())
    assert segment(Span([stamp(5), 32, stamp(9)], 5, 9))[2:] == ("", ())
