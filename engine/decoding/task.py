"""The token loop: start sequence in, tokens and their confidence out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.decoding.filters import ApplyTimestampRules, LogitFilter, SuppressBlank, SuppressTokens
from engine.decoding.options import DecodingOptions
from engine.decoding.samplers import Sampler
from engine.dims import Float32
from engine.kernels.reference import softmax
from engine.model import Whisper
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DecodingResult:
    """One window's outcome.

    Attributes
    ----------
    tokens : list of int
        Sampled tokens without the end token, timestamps included.
    avg_logprob : float
        Sum of log-probabilities over tokens + 1 (openai/whisper decoding.py).
    no_speech_prob : float
        Probability of the no-speech token right after the start token, before any filter.
    temperature : float
        That the tokens were chosen at.
    compression_ratio : float
        Bytes of the text by bytes of it compressed: text that repeats itself is far above 2.
    """

    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float


def compression_ratio(text: str) -> float:
    """Bytes of the stripped text by bytes of its zlib compression (openai/whisper utils.py)."""
    data = text.strip().encode()
    return len(data) / len(zlib.compress(data))


class DecodingTask:
    """Decodes windows with one model; holds nothing of a window."""

    def __init__(self, model: Whisper, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        special = tokenizer.special
        self._filters: list[LogitFilter] = [
            SuppressBlank(special),
            SuppressTokens(special),
            ApplyTimestampRules(special),
        ]
        # openai/whisper decoding.py `sample_len`: half the context, the rest is left to prompts.
        self._sample_len = model.dims.n_text_ctx // 2

    def run(self, options: DecodingOptions, timings: LayerTimings, check: Callable[[], None]) -> DecodingResult:
        """Decode the window that `Whisper.begin_window` got ready; it can be decoded again.

        `check` is called before every step; what it raises ends the work.
        """
        special, decoder = self._tokenizer.special, self._model.decoder
        start = self._initial_tokens(options)
        sampled: list[int] = []
        sampler = Sampler(options.temperature, options.seed)
        with timings.stage("decode"):
            decoder.restart()
            sot = start.index(special.sot)
            rows = decoder.step(start, [sot, len(start) - 1], timings)
            no_speech_prob = self._no_speech_prob(rows[0])
            logits = rows[1]
            while True:
                check()
                for logit_filter in self._filters:
                    logit_filter.apply(logits, sampled)
                token = sampler.choose(logits)
                if token == special.eot:
                    break
                sampled.append(token)
                if len(sampled) == self._sample_len or len(start) + len(sampled) > self._model.dims.n_text_ctx:
                    break
                logits = decoder.step([token], [0], timings)[0]
        ratio = compression_ratio(self._tokenizer.decode(sampled))
        avg_logprob = sampler.sum_logprob / (len(sampled) + 1)
        return DecodingResult(sampled, avg_logprob, no_speech_prob, options.temperature, ratio)

    def detect_language(self, timings: LayerTimings) -> str:
        """The likeliest language of the window: one step from the start token (openai/whisper `detect_language`).

        The window is ready for `run` afterwards.
        """
        special, decoder = self._tokenizer.special, self._model.decoder
        with timings.stage("detect"):
            decoder.restart()
            logits = decoder.step([special.sot], [0], timings)[0]
        return max(special.languages, key=lambda code: float(logits[special.languages[code]]))

    def _initial_tokens(self, options: DecodingOptions) -> list[int]:
        """The prompt's end behind its own start token, then the start sequence (openai/whisper decoding.py)."""
        sot_sequence = self._tokenizer.sot_sequence(options.language, options.task)
        if not options.prompt:
            return sot_sequence
        kept = options.prompt[-(self._model.dims.n_text_ctx // 2 - 1) :]
        return [self._tokenizer.special.sot_prev, *kept, *sot_sequence]

    def _no_speech_prob(self, logits: Float32) -> float:
        probabilities = logits.copy()
        softmax(probabilities)
        return float(np.float32(probabilities[self._tokenizer.special.no_speech]))
