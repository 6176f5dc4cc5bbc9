"""A transcript's segments as text, subtitles or a table (openai/whisper utils.py, and the hosted API's forms of them)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.segments import Segment


def timestamp(seconds: float, decimal_mark: str) -> str:
    """`HH:MM:SS` and milliseconds, hours always: players refuse one digit, or none.

    Rounded once, to whole milliseconds: 59.9996 s is a minute.
    """
    milliseconds = _milliseconds(seconds)
    whole, rest = divmod(milliseconds, 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{decimal_mark}{rest:03d}"


def txt(segments: Iterable[Segment]) -> str:
    """A line a segment."""
    return "".join(f"{_one_line(segment.text)}\n" for segment in segments)


def srt(segments: Iterable[Segment]) -> str:
    """SubRip: numbered cues, a comma before the milliseconds, a blank line after each."""
    return "".join(
        f"{number}\n{timestamp(segment.start, ',')} --> {timestamp(segment.end, ',')}\n{_cue(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT (W3C), without cue identifiers."""
    cues = (
        f"{timestamp(segment.start, '.')} --> {timestamp(segment.end, '.')}\n{_cue(segment.text)}\n\n" for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def tsv(segments: Iterable[Segment]) -> str:
    """A table of whole milliseconds and text."""
    rows = (
        f"{_milliseconds(segment.start)}\t{_milliseconds(segment.end)}\t{_one_line(segment.text)}\n" for segment in segments
    )
    return "start\tend\ttext\n" + "".join(rows)


WRITERS: dict[str, Callable[[Iterable[Segment]], str]] = {"txt": txt, "srt": srt, "vtt": vtt, "tsv": tsv}
"""By the ending of their files."""


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _one_line(text: str) -> str:
    """Line ends and tabs are spaces: one would end a cue, or a cell, early."""
    return " ".join(text.split())


def _cue(text: str) -> str:
    return _one_line(text).replace("-->", "->")
