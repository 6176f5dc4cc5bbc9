"""When a window is decoded again at a higher temperature, and when it is silence (openai/whisper transcribe.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.decoding.options import DecodingOptions
from engine.decoding.task import DecodingResult


@dataclass(frozen=True, slots=True)
class Fallback:
    """The rules of `options`: its temperatures and its three thresholds."""

    options: DecodingOptions

    def decode(self, attempt: Callable[[float], DecodingResult]) -> DecodingResult:
        """The first result that can be trusted; where none can, the likeliest of those that do not loop.

        openai/whisper keeps the last attempt, at temperature 1, then: on recordings it guesses at, that is the worst
        (engine/DESIGN.md). faster-whisper has this rule.
        """
        attempts = []
        for temperature in self.options.temperatures:
            attempts.append(attempt(temperature))
            if self.is_trusted(attempts[-1]):
                return attempts[-1]
        return max(attempts, key=lambda result: (not self.loops(result), result.avg_logprob))

    def is_trusted(self, result: DecodingResult) -> bool:
        """Neither a loop nor a guess; or silence, of which no other temperature makes speech."""
        threshold = self.options.logprob_threshold
        if self.is_silence(result):
            return True
        return not self.loops(result) and (threshold is None or result.avg_logprob >= threshold)

    def loops(self, result: DecodingResult) -> bool:
        """The text repeats itself: as a whole, or at its end for so long that decoding was given up."""
        threshold = self.options.compression_ratio_threshold
        return threshold is not None and (result.compression_ratio > threshold or result.is_stuck)

    def is_silence(self, result: DecodingResult) -> bool:
        """The model says so, and what it wrote all the same is a guess."""
        no_speech, logprob = self.options.no_speech_threshold, self.options.logprob_threshold
        if no_speech is None or result.no_speech_prob <= no_speech:
            return False
        return logprob is None or result.avg_logprob <= logprob
