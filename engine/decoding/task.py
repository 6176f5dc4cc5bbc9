"""The token loop: start sequence in, tokens and their confidence out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.decoding.filters import LogitFilter, make_filters
from engine.decoding.loops import is_stuck
from engine.decoding.options import DecodingOptions
from engine.decoding.token_decoders import BeamSearchDecoder, SamplingDecoder, TokenDecoder, likeliest
from engine.dims import Float32
from engine.kernels.reference import log_sum_exp
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
    is_stuck : bool
        Decoding was given up: the text had become one phrase, again and again.
    """

    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float
    is_stuck: bool = False


def compression_ratio(text: str) -> float:
    """Bytes of the stripped text by bytes of its zlib compression (openai/whisper utils.py)."""
    data = text.strip().encode()
    return len(data) / len(zlib.compress(data))


class DecodingTask:
    """Decodes the windows of one recording; holds nothing of a window.

    Parameters
    ----------
    prefix : token ids of `options.prefix`
    """

    def __init__(self, model: Whisper, tokenizer: Tokenizer, options: DecodingOptions, prefix: Sequence[int] = ()) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._filters: list[LogitFilter] = make_filters(tokenizer.special, options)
        # openai/whisper decoding.py: half the context is for what is sampled, the rest for what comes before. Its prefix may
        # take all the room there is; ours is cut, so that prompt, start, prefix and an answer always fit.
        self._n_ctx = model.dims.n_text_ctx
        self._sample_len = min(options.sample_len or self._n_ctx // 2, self._n_ctx // 2)
        self._prefix = list(prefix)[-(self._n_ctx // 4) :]

    def run(
        self,
        language: str,
        prompt: Sequence[int],
        temperature: float,
        seed: int,
        timings: LayerTimings,
        check: Callable[[], None],
    ) -> DecodingResult:
        """Decode the window that `Whisper.begin_window` got ready; it can be decoded again.

        Parameters
        ----------
        prompt : tokens said to have come before the window; only the last `n_text_ctx // 2 - 1` count
        check : called before every step; what it raises ends the work

        Raises
        ------
        NonFiniteLogits
        """
        special, decoder = self._tokenizer.special, self._model.decoder
        start = self._initial_tokens(language, prompt)
        chooser = self._token_decoder(temperature, seed)
        with timings.stage("decode"):
            decoder.restart()
            rows = decoder.step(start, [start.index(special.sot), len(start) - 1], timings)
            no_speech_prob = self._no_speech_prob(rows[0])
            logits = rows[1:]
            while True:
                check()
                for row, sampled in zip(logits, chooser.live, strict=True):
                    for logit_filter in self._filters:
                        logit_filter.apply(row, sampled)
                sources = chooser.update(logits)
                stuck = bool(sources) and all(is_stuck(sampled, special.eot) for sampled in chooser.live)
                if not sources or stuck or self._is_full(start, chooser.live[0]):
                    break
                decoder.reorder(sources)
                newest = [sampled[-1] for sampled in chooser.live]
                logits = decoder.step(newest, range(len(newest)), timings)
        best = likeliest(chooser.hypotheses(), self._options.length_penalty)
        ratio = compression_ratio(self._tokenizer.decode(best.tokens))
        avg_logprob = best.sum_logprob / (len(best.tokens) + 1)
        return DecodingResult(best.tokens, avg_logprob, no_speech_prob, temperature, ratio, stuck)

    def _token_decoder(self, temperature: float, seed: int) -> TokenDecoder:
        eot, options = self._tokenizer.special.eot, self._options
        if temperature == 0.0 and options.beam_size > 1:
            return BeamSearchDecoder(eot, options.beam_size, options.patience)
        return SamplingDecoder(eot, temperature, seed, options.best_of if temperature else 1, options.top_p)

    def _is_full(self, start: list[int], sampled: list[int]) -> bool:
        return len(sampled) >= self._sample_len or len(start) + len(sampled) > self._n_ctx

    def _initial_tokens(self, language: str, prompt: Sequence[int]) -> list[int]:
        """The prompt's end behind its own start token, the start sequence, the prefix (openai/whisper decoding.py)."""
        start = self._tokenizer.sot_sequence(language, self._options.task)
        if self._options.without_timestamps:
            start.append(self._tokenizer.special.no_timestamps)
        start += self._prefix
        if not prompt:
            return start
        return [self._tokenizer.special.sot_prev, *prompt[-(self._n_ctx // 2 - 1) :], *start]

    def _no_speech_prob(self, logits: Float32) -> float:
        return float(np.exp(logits[self._tokenizer.special.no_speech] - log_sum_exp(logits)))
