"""Text that repeats itself: noticed while it is made, and cut where no temperature helps."""

from __future__ import annotations

from collections.abc import Sequence

MAX_REPEATS = 3
"""Of a phrase in a row, where a window's text was found to loop."""
STUCK_TOKENS = 64
"""Text tokens that a phrase fills alone before decoding is given up: the text then compresses far beyond any threshold."""
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

    Timestamps (all from `eot` on) stay, and do not interrupt a row.
    """
    tokens = [*before, *tokens]
    places = [place for place, token in enumerate(tokens) if token < eot]
    period = 1
    while (MAX_REPEATS + 1) * period <= len(places):
        text = [tokens[place] for place in places]
        kept, run = list[int](), 0
        for i, place in enumerate(places):
            run = run + 1 if i >= period and text[i] == text[i - period] else 0
            # The first phrase and MAX_REPEATS - 1 repeats of it; what goes on beyond them is dropped.
            if run <= (MAX_REPEATS - 1) * period or not _goes_on(text, i, run, period):
                kept.append(place)
        places = kept
        period += 1
    left = set(places)
    new = range(len(before), len(tokens))
    return [tokens[place] for place in new if tokens[place] >= eot or place in left]


def _goes_on(text: Sequence[int], i: int, run: int, period: int) -> bool:
    """The row that `text[i]` is part of, `run` tokens into its repeats, comes to more than `MAX_REPEATS` phrases."""
    end = i + 1
    while end < len(text) and text[end] == text[end - period]:
        run, end = run + 1, end + 1
    return run >= MAX_REPEATS * period
