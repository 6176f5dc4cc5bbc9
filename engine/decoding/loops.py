"""Text that repeats itself: noticed while it is made, and cut where no temperature helps."""

from __future__ import annotations

from collections.abc import Sequence

MAX_REPEATS = 3
"""Of a phrase in a row, where a window's text was found to loop."""
STUCK_TOKENS = 64
"""Text tokens that a phrase fills alone before a sequence is given up: nothing else would come."""
STUCK_PERIOD = 16
"""Tokens of the longest phrase looked for while decoding."""
CHECK_EVERY = 16
"""Tokens between two looks."""


def is_stuck(sampled: Sequence[int], eot: int) -> bool:
    """The newest `STUCK_TOKENS` text tokens are one phrase, again and again; looked at once in `CHECK_EVERY` tokens."""
    if len(sampled) < STUCK_TOKENS or len(sampled) % CHECK_EVERY:
        return False
    newest = [token for token in sampled if token < eot][-STUCK_TOKENS:]
    if len(newest) < STUCK_TOKENS:
        return False
    return any(newest[period:] == newest[:-period] for period in range(1, STUCK_PERIOD + 1))


def without_repeats(tokens: Sequence[int], eot: int, before: Sequence[int] = ()) -> list[int]:
    """`tokens` with every phrase at most `MAX_REPEATS` times in a row, those that end `before` counted.

    Timestamps (all from `eot` on) stay, and do not interrupt a row. What the text goes on with after a row stays whole, also
    where it begins like the phrase.
    """
    tokens = [*before, *tokens]
    places = [place for place, token in enumerate(tokens) if token < eot]
    period = 1
    while (MAX_REPEATS + 1) * period <= len(places):
        places = _cut([tokens[place] for place in places], places, period)
        period += 1
    left = set(places)
    new = range(len(before), len(tokens))
    return [tokens[place] for place in new if tokens[place] >= eot or place in left]


def _cut(text: Sequence[int], places: Sequence[int], period: int) -> list[int]:
    """Those of `places`, where `text` stands, that are left once no phrase of `period` tokens stands too often."""
    kept, start = list[int](), 0
    while start < len(text):
        end = start + period
        while end < len(text) and text[end] == text[end - period]:
            end += 1
        n_phrases, n_over = divmod(end - start, period)
        if n_phrases <= MAX_REPEATS:
            kept.append(places[start])
            start += 1
            continue
        kept += places[start : start + MAX_REPEATS * period]
        if end < len(text):
            kept += places[end - n_over : end]  # the beginning of what follows
        start = end
    return kept
