"""When each word was said (openai/whisper timing.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from engine.alignment import AttentionMatrix, cheapest_path
from engine.dims import FRAMES_PER_POSITION, SECONDS_PER_POSITION
from engine.model import Whisper
from engine.segments import APPENDED, PREPENDED, SECONDS_PER_FRAME, Segment, Word
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer

# Source of these: openai/whisper timing.py.
SENTENCE_ENDS = ".。!！?？"
MAX_MEDIAN_SECONDS = 0.7
"""No window's median word counts as longer than this."""


@dataclass(slots=True)
class _Timing:
    """A word on its way: seconds from the window's start."""

    word: str
    n_tokens: int
    start: float
    end: float
    probability: float


class WordTimer:
    """Times the words of one recording's windows, which it is given in order.

    Parameters
    ----------
    heads : the checkpoint's alignment heads
    task : str
    """

    def __init__(self, model: Whisper, tokenizer: Tokenizer, heads: Sequence[tuple[int, int]], task: str) -> None:
        self._model, self._tokenizer, self._heads, self._task = model, tokenizer, heads, task
        self.last_speech_seconds = 0.0

    def add_words(self, segments: list[Segment], n_frames: int, language: str, timings: LayerTimings) -> list[Segment]:
        """The window's segments with their words, and with the times of these.

        Parameters
        ----------
        segments : of the window that the decoder is ready for
        n_frames : content frames of the window
        """
        eot = self._tokenizer.special.eot
        texts = [[token for token in segment.tokens if token < eot] for segment in segments]
        tokens = [token for text in texts for token in text]
        if not tokens:
            return segments
        with timings.stage("align"):
            words = self._align(tokens, n_frames, language, timings)
        durations = [word.end - word.start for word in words if word.end != word.start]
        median = min(MAX_MEDIAN_SECONDS, float(np.median(durations))) if durations else 0.0
        if durations:
            _shorten_at_sentence_ends(words, 2 * median)
        _merge_punctuation(words)
        offset = segments[0].seek * SECONDS_PER_FRAME
        timed, index = [], 0
        for segment, text in zip(segments, texts, strict=True):
            n_tokens, own = 0, []
            while index < len(words) and n_tokens < len(text):
                word = words[index]
                if word.word:
                    times = round(offset + word.start, 2), round(offset + word.end, 2)
                    own.append(Word(word.word, *times, word.probability))
                n_tokens += word.n_tokens
                index += 1
            timed.append(self._fitted(segment, own, median))
        return timed

    def _align(self, tokens: list[int], n_frames: int, language: str, timings: LayerTimings) -> list[_Timing]:
        """Words of the window's text with their times and probabilities."""
        special, decoder = self._tokenizer.special, self._model.decoder
        start = self._tokenizer.sot_sequence(language, self._task)
        n_positions = max(1, n_frames // FRAMES_PER_POSITION)
        attention = AttentionMatrix(self._heads, n_positions)
        decoder.restart()
        fed = [*start, special.no_timestamps, *tokens, special.eot]
        asked = slice(len(start) + 1, len(fed) - 1)
        likely = decoder.token_probabilities(fed, asked, special.eot, timings, attention.observe)
        # Row i tells when the token after position i begins; the last one asked about ends where the end token would begin.
        at_token, at_position = cheapest_path(-attention.mean()[len(start) : -1])
        begins = np.concatenate([[True], np.diff(at_token) > 0])  # of each token's stay
        seconds = at_position[begins] * SECONDS_PER_POSITION
        timed, begin = [], 0
        for word, n_tokens in self._tokenizer.split_words(tokens, language):
            end = begin + n_tokens
            probability = float(np.mean(likely[begin:end]))
            timed.append(_Timing(word, n_tokens, float(seconds[begin]), float(seconds[end]), probability))
            begin = end
        return timed

    def _fitted(self, segment: Segment, words: list[Word], median: float) -> Segment:
        """The segment and its words, long words at its ends shortened and each one's times fitted to the other's."""
        if not words:
            return segment
        self._shorten_after_a_pause(words, median)
        first, last = words[0], words[-1]
        start, end = first.start, last.end
        # The segment's own time is believed where the first or last word is far too long.
        if segment.start < first.end and segment.start - 0.5 > first.start:
            words[0] = replace(first, start=max(0.0, min(first.end - median, segment.start)))
            start = segment.start
        last = words[-1]
        if segment.end > last.start and segment.end + 0.5 < last.end:
            words[-1] = replace(last, end=max(last.start + median, segment.end))
            end = segment.end
        self.last_speech_seconds = end
        return replace(segment, start=start, end=end, words=tuple(words))

    def _shorten_after_a_pause(self, words: list[Word], median: float) -> None:
        """After a pause, neither the first word nor the first two are longer than twice the median each."""
        longest = 2 * median
        first = words[0]
        second = words[1] if len(words) > 1 else None
        if first.end - self.last_speech_seconds <= 4 * median:
            return
        if first.end - first.start <= longest and (second is None or second.end - first.start <= 2 * longest):
            return
        if second is not None and second.end - second.start > longest:
            boundary = max(second.end / 2, second.end - longest)
            first, words[1] = replace(first, end=boundary), replace(second, start=boundary)
        words[0] = replace(first, start=max(0.0, first.end - longest))


def _shorten_at_sentence_ends(words: list[_Timing], longest: float) -> None:
    """A stop, and a word after one, last no longer than `longest` seconds: the rest is a pause."""
    for before, word in pairwise(words):
        if word.end - word.start > longest:
            if word.word in SENTENCE_ENDS:
                word.end = word.start + longest
            elif before.word in SENTENCE_ENDS:
                word.start = word.end - longest


def _merge_punctuation(words: list[_Timing]) -> None:
    """Join signs to the word that they belong to; what is joined to another is left empty."""
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        sign, word = words[i], words[following]
        if sign.word.startswith(" ") and sign.word.strip() in PREPENDED:
            word.word, word.n_tokens = sign.word + word.word, sign.n_tokens + word.n_tokens
            sign.word, sign.n_tokens = "", 0
        else:
            following = i
    previous = 0
    for i in range(1, len(words)):
        word, sign = words[previous], words[i]
        if not word.word.endswith(" ") and sign.word in APPENDED:
            word.word, word.n_tokens = word.word + sign.word, word.n_tokens + sign.n_tokens
            sign.word, sign.n_tokens = "", 0
        else:
            previous = i
