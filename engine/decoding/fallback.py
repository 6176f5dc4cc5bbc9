"""When a window is decoded again at a higher temperature, and when it is silence (openai/whisper transcribe.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.decoding.task import DecodingResult

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COMPRESSION_RATIO_THRESHOLD = 2.4
LOGPROB_THRESHOLD = -1.0
NO_SPEECH_THRESHOLD = 0.6


@dataclass(frozen=True, slots=True)
class Fallback:
    """The temperatures to try in turn; the defaults are openai/whisper's.

    Attributes
    ----------
    temperatures : tuple of float
        The first is tried always; (0.0,) never tries again.
    """

    temperatures: tuple[float, ...] = TEMPERATURES

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0.0 <= temperature <= 1.0 for temperature in self.temperatures):
            raise ValueError(f"temperatures are numbers from 0 to 1, at least one; found {self.temperatures}")

    def decode(self, attempt: Callable[[float], DecodingResult]) -> DecodingResult:
        """The first result that can be trusted; where none can, the likeliest of those that do not loop.

        openai/whisper keeps the last attempt, at temperature 1, then: on recordings it guesses at, that is the worst
        (engine/DESIGN.md). faster-whisper has this rule.
        """
        attempts = []
        for temperature in self.temperatures:
            attempts.append(attempt(temperature))
            if is_trusted(attempts[-1]):
                return attempts[-1]
        return max(attempts, key=lambda result: (not _loops(result), result.avg_logprob))


def is_trusted(result: DecodingResult) -> bool:
    """Neither a loop nor a guess; or silence, of which no other temperature makes speech."""
    if is_silence(result):
        return True
    return not _loops(result) and result.avg_logprob >= LOGPROB_THRESHOLD


def _loops(result: DecodingResult) -> bool:
    return result.compression_ratio > COMPRESSION_RATIO_THRESHOLD


def is_silence(result: DecodingResult) -> bool:
    """The model says so, and what it wrote all the same is a guess."""
    return result.no_speech_prob > NO_SPEECH_THRESHOLD and result.avg_logprob <= LOGPROB_THRESHOLD
