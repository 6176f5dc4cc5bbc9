"""Text → token ids: byte pair encoding over the table that conversion wrote (for prompts; most recordings need none).

GPT-2's scheme: the text is cut into pieces at spaces and changes of kind, and within a piece the two neighbours whose
joined bytes have the lowest id are joined, until no two have one. Ids were given in the order of the merges, so the
table of bytes is all it takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
"""Pieces of their own (openai/gpt-2 encoder.py, whose pattern `pieces` follows)."""


def byte_order(token_bytes: bytes, token_begins: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Ids of all text tokens in the order of their bytes, uint32 [n_text_tokens]: what `BytePairs` searches."""
    begins = token_begins.tolist()
    return np.array(sorted(range(len(begins) - 1), key=lambda i: token_bytes[begins[i] : begins[i + 1]]), np.uint32)


def pieces(text: str) -> Iterator[str]:
    """The parts of `text` that no token crosses: words and numbers with the space before them, runs of other signs, spaces."""
    at = 0
    while at < len(text):
        end = _piece_end(text, at)
        yield text[at:end]
        at = end


def _piece_end(text: str, at: int) -> int:
    for contraction in CONTRACTIONS:
        if text.startswith(contraction, at):
            return at + len(contraction)
    first = at + 1 if text[at] == " " and at + 1 < len(text) else at
    kind = _kind(text[first])
    end = first + 1 if kind != "space" else at + 1
    while end < len(text) and _kind(text[end]) == kind:
        end += 1
    # Of several spaces before a word, the last belongs to the word.
    return end - 1 if kind == "space" and end < len(text) and end - at > 1 else end


def _kind(character: str) -> str:
    if character.isspace():
        return "space"
    return "letter" if character.isalpha() else "number" if character.isnumeric() else "sign"


class BytePairs:
    """Encodes text.

    Parameters
    ----------
    token_bytes, token_begins : the vocabulary's table
    order : uint32 [n_text_tokens], as `byte_order` gives it
    """

    def __init__(self, token_bytes: bytes, token_begins: npt.NDArray[np.uint32], order: npt.NDArray[np.uint32]) -> None:
        self._bytes, self._begins, self._order = token_bytes, token_begins, order

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a code point that is no character (a lone surrogate) counts as U+FFFD."""
        data = (piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode() for piece in pieces(text))
        return [token for piece in data for token in self._joined(piece)]

    def _joined(self, piece: bytes) -> list[int]:
        """Ids of one piece. A heap keeps the pairs, so that a piece of n bytes takes n log n steps: prompts may be one word."""
        after = {start: start + 1 for start in range(len(piece))}  # where the part that starts here ends
        before = {end: start for start, end in after.items()}
        heap: list[tuple[int, int, int, int]] = []

        def offer(start: int) -> None:
            middle = after[start]
            if middle < len(piece) and (token := self._id(piece[start : after[middle]])) is not None:
                heapq.heappush(heap, (token, start, middle, after[middle]))

        for start in range(len(piece)):
            offer(start)
        while heap:
            _, start, middle, end = heapq.heappop(heap)
            if after.get(start) != middle or after.get(middle) != end:
                continue  # one of the two was joined to something else meanwhile
            del after[middle]
            after[start], before[end] = end, start
            offer(start)
            if start:
                offer(before[start])
        return [self._known(piece[start:end]) for start, end in sorted(after.items())]

    def _known(self, part: bytes) -> int:
        token = self._id(part)
        if token is None:
            raise ValueError("the vocabulary lacks a byte")  # conversion refuses such a one
        return token

    def _id(self, part: bytes) -> int | None:
        """The token that is exactly `part`, by binary search."""
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            token = int(self._order[middle])
            found = self._bytes[self._begins[token] : self._begins[token + 1]]
            if found == part:
                return token
            low, high = (middle + 1, high) if found < part else (low, middle)
        return None
