"""Token choice at temperature 0: the likeliest."""

from __future__ import annotations

import numpy as np

from engine.dims import Float32


class GreedyDecoder:
    """Chooses tokens and adds up their log-probabilities (openai/whisper decoding.py `GreedyDecoder`).

    Attributes
    ----------
    sum_logprob : float
        Of all chosen tokens, the end included, under the filtered logits.
    """

    def __init__(self) -> None:
        self.sum_logprob = 0.0

    def choose(self, logits: Float32) -> int:
        """The next token of filtered logits [n_vocab]."""
        token = int(logits.argmax())
        peak = logits[token]
        self.sum_logprob -= float(np.log(np.exp(logits - peak).sum()))
        return token
