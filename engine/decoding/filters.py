"""Logit filters: which tokens may come next (openai/whisper decoding.py `LogitFilter` and its three)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.decoding.options import DecodingOptions
from engine.dims import SECONDS_PER_POSITION, Float32
from engine.errors import InvalidOptions
from engine.kernels.reference import log_sum_exp
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
    """Never the tokens asked for (by default the non-speech symbols), nor a special token that has its place elsewhere.

    Raises
    ------
    InvalidOptions
        `tokens` holds what is no text token.
    """

    def __init__(self, special: SpecialTokens, tokens: Sequence[int] | None = None) -> None:
        if any(not 0 <= token < special.eot for token in tokens or ()):
            raise InvalidOptions(f"suppress_tokens are ids of text tokens, from 0 to {special.eot - 1}")
        others = (special.transcribe, special.translate, special.sot, special.sot_prev, special.sot_lm)
        asked = special.non_speech if tokens is None else tokens
        self._banned = np.array(sorted({*asked, *others, special.no_speech}))

    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        logits[self._banned] = -np.inf


class PenalizeRepetition:
    """Text tokens that the window has already are made less likely (Keskar et al. 2019, CTRL, section 4.1)."""

    def __init__(self, special: SpecialTokens, penalty: float) -> None:
        self._eot = special.eot  # timestamps repeat by rule, and the end comes once
        self._penalty = np.float32(penalty)

    def apply(self, logits: Float32, sampled: Sequence[int]) -> None:
        said = np.array(sorted({token for token in sampled if token < self._eot}), np.intp)
        scores = logits[said]
        logits[said] = np.where(scores > 0, scores / self._penalty, scores * self._penalty)


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
        if log_sum_exp(timestamps) > best_text:
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


def make_filters(special: SpecialTokens, options: DecodingOptions) -> list[LogitFilter]:
    """The filters that `options` ask for, in the reference's order.

    Raises
    ------
    InvalidOptions
        As `SuppressTokens`.
    """
    filters: list[LogitFilter] = []
    if options.repetition_penalty > 1.0:
        filters.append(PenalizeRepetition(special, options.repetition_penalty))
    if options.suppress_blank:
        filters.append(SuppressBlank(special))
    filters.append(SuppressTokens(special, options.suppress_tokens))
    if not options.without_timestamps:
        filters.append(ApplyTimestampRules(special))
    return filters
