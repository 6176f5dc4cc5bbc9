"""Token choice: the likeliest at temperature 0, drawn by probability above it (openai/whisper decoding.py `GreedyDecoder`)."""

from __future__ import annotations

import random

import numpy as np

from engine.dims import Float32
from engine.kernels.reference import softmax


class Sampler:
    """Chooses one window's tokens and adds up their log-probabilities.

    Parameters
    ----------
    temperature : float
        What logits are divided by before a token is drawn; 0 takes the likeliest.
    seed : int
        Of the draws: the same seed, window and temperature give the same tokens, whatever was decoded before.

    Attributes
    ----------
    sum_logprob : float
        Of all chosen tokens, the end included, under the filtered logits at temperature 1.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        # Python's own generator: its draws are the same on every processor, and NumPy's would be one more import.
        self._random = random.Random(seed)  # noqa: S311 - tokens are no secrets
        self.sum_logprob = 0.0

    def choose(self, logits: Float32) -> int:
        """The next token of filtered logits [n_vocab], which stay as they are."""
        likeliest = int(logits.argmax())
        token = self._draw(logits) if self._temperature else likeliest
        peak = logits[likeliest]
        self.sum_logprob += float(logits[token] - peak) - float(np.log(np.exp(logits - peak).sum()))
        return token

    def _draw(self, logits: Float32) -> int:
        probabilities = logits / np.float32(self._temperature)
        softmax(probabilities)
        # In float64: 50,000 float32 terms would not add up to 1. The last token with any probability, where they still don't.
        total = np.cumsum(probabilities, dtype=np.float64)
        return int(np.searchsorted(total, self._random.random() * total[-1], side="right"))
