"""Timestamp tokens → segments, and how far to seek (openai/whisper transcribe.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.dims import FRAMES_PER_POSITION, HOP_LENGTH, SAMPLE_RATE, SECONDS_PER_POSITION
from engine.tokenizer import REPLACEMENT, Tokenizer

SECONDS_PER_FRAME = HOP_LENGTH / SAMPLE_RATE


# Source of these: openai/whisper timing.py.
PREPENDED = "\"'“¿([{-"
"""Signs that belong to the word after them."""
APPENDED = "\"'.。,，!！?？:：”)]}、"
"""Signs that belong to the word before them."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its punctuation and its leading space; seconds from the recording's start.

    Attributes
    ----------
    probability : float
        Mean of its tokens' probabilities.
    """

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the recording and its text.

    Attributes
    ----------
    seek : int
        First frame of the window it came from.
    start, end : float
        Seconds from the recording's start.
    text : str
        With its leading space; empty where nothing was said.
    tokens : tuple of int
        Timestamps included.
    words : tuple of Word
        Where word times were asked for.
    """

    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one segment, and its positions within the window: `end` is None for the window's end."""

    tokens: Sequence[int]
    start: int
    end: int | None


def split_window(tokens: Sequence[int], timestamp_begin: int, n_frames: int) -> tuple[list[Span], int, bool]:
    """Cut one window's tokens at its timestamps.

    Parameters
    ----------
    tokens : sampled tokens of the window
    n_frames : content frames of the window

    Returns
    -------
    spans : list of Span
    advance : frames to the next window
        The whole window, unless speech was cut off at its end: then up to the last closed segment.
    is_open : whether the tokens leave open if speech goes on at the end: they do not end in text and one timestamp
    """
    stamps: list[bool] = [token >= timestamp_begin for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if stamps[i - 1] and stamps[i]]
    # Text and one timestamp at the very end: no speech follows, so the tail is whole too.
    single_ending = stamps[-2:] == [False, True]
    if not cuts:
        last = next((token for token in reversed(tokens) if token >= timestamp_begin), timestamp_begin)
        end = last - timestamp_begin
        return [Span(tokens, 0, end or None)], n_frames, not single_ending
    if single_ending:
        cuts.append(len(tokens))
    spans = []
    for begin, cut in zip([0, *cuts], cuts, strict=False):
        part = tokens[begin:cut]
        spans.append(Span(part, part[0] - timestamp_begin, part[-1] - timestamp_begin))
    if single_ending:
        return spans, n_frames, False
    advance = (tokens[cuts[-1] - 1] - timestamp_begin) * FRAMES_PER_POSITION
    # The timestamp rules make a closing timestamp greater than 0; a window must move on whatever the tokens are.
    return spans, advance or n_frames, True


def make_segment(
    span: Span, tokenizer: Tokenizer, seek: int, n_frames: int, confidence: tuple[float, float, float, float]
) -> Segment:
    """The segment of a span.

    `confidence` is its window's avg_logprob, no_speech_prob, temperature and compression_ratio.
    """
    offset = seek * SECONDS_PER_FRAME
    start = offset + span.start * SECONDS_PER_POSITION
    end = offset + (n_frames * SECONDS_PER_FRAME if span.end is None else span.end * SECONDS_PER_POSITION)
    return Segment(seek, start, end, tokenizer.decode(span.tokens), tuple(span.tokens), *confidence)


def says_something(segment: Segment) -> bool:
    """It takes time, and its text holds a letter or a digit of some script.

    The reference keeps the place of segments without time or text. Text of signs alone (" . . .") is what the weights make
    of hiss and hum. A piece of a character may be a letter's.
    """
    said = any(character.isalnum() or character == REPLACEMENT for character in segment.text)
    return said and segment.start != segment.end


def without_empty(segments: Sequence[Segment]) -> list[Segment]:
    """The segments, those without time or text joined to a neighbour: a cue must have both.

    A segment has no text of its own where it holds the first bytes of a character alone; it has no time where the recording
    ended before it.
    """
    kept: list[Segment] = []
    for segment in segments:
        before = kept[-1] if kept else None
        if before is not None and (segment.start == segment.end or not before.text):
            kept[-1] = _joined(before, segment)
        else:
            kept.append(segment)
    if len(kept) > 1 and not kept[-1].text:
        kept[-2:] = [_joined(*kept[-2:])]
    return kept


def _joined(first: Segment, second: Segment) -> Segment:
    tokens, words = first.tokens + second.tokens, first.words + second.words
    return replace(first, end=second.end, text=first.text + second.text, tokens=tokens, words=words)


def in_order(segments: Sequence[Segment], floor: float, seconds: float) -> tuple[list[Segment], int]:
    """The segments and their words within the recording, in order, none over another.

    Parameters
    ----------
    floor : end of the last segment before these
    seconds : the recording's length

    Returns
    -------
    segments : list of Segment
    n_moved : times moved by more than timestamps' own coarseness
    """
    n_moved = 0

    def within(time: float, earliest: float) -> float:
        nonlocal n_moved
        moved = min(max(time, earliest), seconds)
        n_moved += abs(moved - time) > SECONDS_PER_POSITION
        return moved

    ordered = []
    said_until = floor
    for segment in segments:
        start = within(segment.start, floor)
        floor = within(segment.end, start)
        words = []
        for word in segment.words:
            word_start = within(word.start, said_until)
            said_until = within(word.end, word_start)
            words.append(replace(word, start=word_start, end=said_until))
        ordered.append(replace(segment, start=start, end=floor, words=tuple(words)))
    return ordered, n_moved
