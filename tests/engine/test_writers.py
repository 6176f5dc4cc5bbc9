"""Subtitles, tables and plain text of segments."""

from __future__ import annotations

import pytest

from engine.segments import Segment
from engine.writers import srt, timestamp, tsv, txt, vtt


def said(start: float, end: float, text: str) -> Segment:
    return Segment(0, start, end, text, (1,), -0.5, 0.1, 0.0, 1.0)


TWO = [said(0.0, 2.5, " Hello, world."), said(3661.2344, 3662.0, " It --> goes\non.\n\n Yes\tit does.")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00:00,000"),
        (0.0004, "00:00:00,000"),
        (0.0006, "00:00:00,001"),
        (59.9996, "00:01:00,000"),
        (3599.9996, "01:00:00,000"),
        (3600, "01:00:00,000"),
        (86399.999, "23:59:59,999"),
        (360_000.0, "100:00:00,000"),
    ],
)
def test_a23_times_have_two_digits_of_hours_and_are_rounded_once(seconds: float, text: str) -> None:
    assert timestamp(seconds, ",") == text


def test_a23_srt() -> None:
    assert srt(TWO) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello, world.\n\n2\n01:01:01,234 --> 01:01:02,000\nIt -> goes on. Yes it does.\n\n"
    )


def test_vtt() -> None:
    assert vtt(TWO) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello, world.\n\n"
        "01:01:01.234 --> 01:01:02.000\nIt -> goes on. Yes it does.\n\n"
    )


def test_tsv_and_txt() -> None:
    assert tsv(TWO) == "start\tend\ttext\n0\t2500\tHello, world.\n3661234\t3662000\tIt --> goes on. Yes it does.\n"
    assert txt(TWO) == "Hello, world.\nIt --> goes on. Yes it does.\n"


def test_of_nothing() -> None:
    assert (txt([]), srt([]), vtt([]), tsv([])) == ("", "", "WEBVTT\n\n", "start\tend\ttext\n")
