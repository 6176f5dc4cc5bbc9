"""Logit filters: which tokens may come next (openai/whisper decoding.py `LogitFilter` and its three)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.dims import SECONDS_PER_POSITION, Float32
from engine.tokenizer import SpecialTokens

MAX_INITIAL_TIMESTAMP_SECONDS = 1.0
"""The first timestamp is no later than this (openai/whisper `DecodingOptions.max_initial_timestamp`)."""


class LogitFilter(Protocol):
    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        """Ban tokens by setting their logit to -inf.

        Parameters
        ----------
        logits : float32 [n_vocab], changed in place
        sampled : tokens chosen so far in this window, without the start sequence
        """


class SuppressBlank:
    """The first sampled token is neither a space nor the end."""

    def __init__(self, special: SpecialTokens) -> None:
        self._banned = [special.blank, special.eot]

    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        if not sampled:
            logits[self._banned] = -np.inf


class SuppressTokens:
    """Never the non-speech symbols, nor a special token that has its place elsewhere."""

    def __init__(self, special: SpecialTokens) -> None:
        others = (special.transcribe, special.translate, special.sot, special.sot_prev, special.sot_lm)
        self._banned = np.array(sorted({*special.non_speech, *others, special.no_speech}))

    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        logits[self._banned] = -np.inf


class ApplyTimestampRules:
    """Timestamps come in pairs around text, never fall, and win where together they are likelier than any text."""

    def __init__(self, special: SpecialTokens) -> None:
        self._eot = special.eot
        self._no_timestamps = special.no_timestamps
        self._begin = special.timestamp_begin
        self._last_initial = special.timestamp_begin + round(MAX_INITIAL_TIMESTAMP_SECONDS / SECONDS_PER_POSITION)

    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        begin = self._begin
        logits[self._no_timestamps] = -np.inf
        if not sampled:
            logits[:begin] = -np.inf
            logits[self._last_initial + 1 :] = -np.inf
        self._keep_pairs(logits, sampled)
        # log-softmax cancels on both sides, so raw logits do.
        timestamps = logits[begin:]
        best_text = logits[:begin].max()
        if _log_sum_exp(timestamps) > best_text:
            logits[:begin] = -np.inf

    def _keep_pairs(self, logits: Float32, sampled: Sequence[int]) -> None:
        begin = self._begin
        last = len(sampled) >= 1 and sampled[-1] >= begin
        before_last = len(sampled) < 2 or sampled[-2] >= begin
        if last and before_last:
            logits[begin:] = -np.inf  # a pair is complete: text
        elif last:
            logits[: self._eot] = -np.inf  # one closes a segment: its twin, or the end
        timestamps = [token for token in sampled if token >= begin]
        if timestamps:
            opens_next = last and not before_last  # the twin may equal its partner
            logits[begin : timestamps[-1] + (0 if opens_next else 1)] = -np.inf


def _log_sum_exp(values: Float32) -> float:
    peak = values.max()
    if peak == -np.inf:
        return -np.inf
    return float(peak + np.log(np.exp(values - peak).sum()))
