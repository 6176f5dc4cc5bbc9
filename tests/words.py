"""Words of a text, for comparing what was said with what was heard."""

from __future__ import annotations

import re


def words(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def word_errors(said: str, heard: str) -> int:
    """Words substituted, deleted or inserted (Levenshtein's distance over words)."""
    expected, found = words(said), words(heard)
    row = list(range(len(found) + 1))
    for i, word in enumerate(expected, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(found, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]
