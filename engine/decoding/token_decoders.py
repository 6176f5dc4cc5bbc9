"""Token choice: greedy or drawn, and beam search (openai/whisper decoding.py `TokenDecoder` and its two)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.dims import Float32
from engine.kernels.reference import log_sum_exp, softmax

TILE = 8192
"""Scores that are looked at together: what is made of them has 64 KiB at most, and not a vocabulary's 415 kB at every token."""
MIN_TEMPERATURE = 1e-3
"""Below it, draws are the likeliest token anyway, and float32 would overflow."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence of tokens of one window.

    Attributes
    ----------
    tokens : list of int
        Without the end token.
    sum_logprob : float
        Of all its tokens, the end included where it came, under the filtered logits at temperature 1.
    """

    tokens: list[int]
    sum_logprob: float


class TokenDecoder(Protocol):
    """Chooses one window's tokens.

    Attributes
    ----------
    live : list of list of int
        Tokens of each sequence that goes on; at first one, of none.
    """

    live: list[list[int]]

    def update(self, logits: Float32) -> list[int]:
        """Choose each live sequence's next token.

        Parameters
        ----------
        logits : float32 [len(live), n_vocab], filtered; left as they are

        Returns
        -------
        sources : which of the sequences before each of the now live ones continues; empty where all have ended
        """

    def hypotheses(self) -> list[Hypothesis]:
        """What to choose from, once no sequence is live or there is no room for more tokens."""


@dataclass
class SamplingDecoder:
    """The likeliest token at temperature 0; above it, `n_draws` sequences drawn by probability, side by side.

    Attributes
    ----------
    seed : int
        The same seed, window and temperature give the same tokens, whatever was decoded before.
    top_p : float
        Draw from the likeliest tokens that have this probability together.
    """

    eot: int
    temperature: float
    seed: int = 0
    n_draws: int = 1
    top_p: float = 1.0
    live: list[list[int]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        # Python's own generator: its draws are the same on every processor, and NumPy's would be one more import.
        self._random = random.Random(self.seed)  # noqa: S311 - tokens are no secrets
        self._sums = [0.0]
        self._ended: list[Hypothesis] = []

    def update(self, logits: Float32) -> list[int]:
        is_first = self.live == [[]] and not self._ended
        before, sums, sources = self.live, self._sums, list[int]()
        self.live, self._sums = [], []
        for source in [0] * self.n_draws if is_first else range(len(before)):
            row = logits[source]
            token = self._draw(row) if self.temperature else int(row.argmax())
            sum_logprob = sums[source] + _logprob(row, token)
            if token == self.eot:
                self._ended.append(Hypothesis(before[source], sum_logprob))
            else:
                self.live.append([*before[source], token])
                self._sums.append(sum_logprob)
                sources.append(source)
        return sources

    def hypotheses(self) -> list[Hypothesis]:
        return self._ended + [Hypothesis(tokens, total) for tokens, total in zip(self.live, self._sums, strict=True)]

    def _draw(self, row: Float32) -> int:
        scale, peak = np.float32(max(self.temperature, MIN_TEMPERATURE)), row.max()
        if self.top_p < 1.0:
            probabilities = (row - peak) / scale
            softmax(probabilities)
            order = np.argsort(probabilities)[::-1]
            # A token stays while those likelier than it do not reach top_p yet: the likeliest always stays.
            reached = np.cumsum(probabilities[order], dtype=np.float64) - probabilities[order] >= self.top_p
            row = row.copy()
            row[order[reached]] = -np.inf

        def weights(start: int) -> npt.NDArray[np.float64]:
            # In float64: 50,000 float32 terms would not add up to their sum.
            exponents: Float32 = (row[start : start + TILE] - peak) / scale
            return np.exp(exponents, out=exponents).astype(np.float64)

        starts = range(0, len(row), TILE)
        ends = np.cumsum([weights(start).sum() for start in starts])
        drawn = min(self._random.random() * ends[-1], np.nextafter(ends[-1], 0.0))
        tile = int(np.searchsorted(ends, drawn, side="right"))
        within = np.cumsum(weights(starts[tile]))
        before = ends[tile - 1] if tile else 0.0
        # The last token with any weight, where rounding puts the draw behind it.
        last = int(np.searchsorted(within, within[-1]))
        return starts[tile] + min(int(np.searchsorted(within, drawn - before, side="right")), last)


@dataclass
class BeamSearchDecoder:
    """The `beam_size` likeliest sequences side by side, until `round(beam_size * patience)` have ended."""

    eot: int
    beam_size: int
    patience: float = 1.0
    live: list[list[int]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        self._sums: list[np.float32] = [np.float32(0.0)]
        self._ended: list[Hypothesis] = []
        self._max_ended = max(1, round(self.beam_size * self.patience))

    def update(self, logits: Float32) -> list[int]:
        candidates = []  # (sum of log-probabilities, source, token)
        for source, row in enumerate(logits):
            log_total = log_sum_exp(row)
            for token in _highest(row, self.beam_size + 1):
                candidates.append((self._sums[source] + (row[token] - log_total), source, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        before, self.live, self._sums, sources = self.live, [], [], list[int]()
        for sum_logprob, source, token in candidates:
            if token == self.eot:
                if len(self._ended) < self._max_ended:
                    self._ended.append(Hypothesis(before[source], float(sum_logprob)))
                continue
            self.live.append([*before[source], token])
            self._sums.append(sum_logprob)
            sources.append(source)
            if len(self.live) == self.beam_size:
                break
        return [] if len(self._ended) >= self._max_ended else sources

    def hypotheses(self) -> list[Hypothesis]:
        """Those that ended; where they are fewer than beams, the likeliest of those cut off fill up."""
        cut = sorted(zip(self._sums, self.live, strict=True), key=lambda pair: -pair[0])
        missing = max(0, self.beam_size - len(self._ended))
        return self._ended + [Hypothesis(tokens, float(total)) for total, tokens in cut[:missing]]


def likeliest(hypotheses: Sequence[Hypothesis], length_penalty: float | None) -> Hypothesis:
    """The best by log-probability for its length (openai/whisper decoding.py `MaximumLikelihoodRanker`).

    `length_penalty` is the exponent of Wu et al. 2016, equation 14; None divides by the length itself.
    """

    def score(hypothesis: Hypothesis) -> float:
        length = len(hypothesis.tokens)
        return hypothesis.sum_logprob / (max(length, 1) if length_penalty is None else ((5 + length) / 6) ** length_penalty)

    return max(hypotheses, key=score)


def _highest(row: Float32, n: int) -> list[int]:
    """Where the `n` largest values are, in no order."""
    found = []
    for start in range(0, len(row), TILE):
        tile = row[start : start + TILE]
        found.append(start + np.argpartition(tile, -min(n, len(tile)))[-n:])
    places = np.concatenate(found)
    return [int(place) for place in places[np.argpartition(row[places], -n)[-n:]]]


def _logprob(row: Float32, token: int) -> float:
    return float(row[token] - log_sum_exp(row))
