"""What a caller may ask of a recording's decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import InvalidOptions

TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_SEQUENCES = 16
"""Beams or draws of one window; each costs a self K/V cache (1.5 MB with tiny, INT8)."""


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Options of one recording, under openai/whisper's names where it has them; the defaults are its library's.

    Attributes
    ----------
    language : str or None
        A code, a code with a region or an English name; None detects it.
    task : str
        `transcribe`, or `translate` to English.
    temperatures : tuple of float
        Tried in turn until a window's text can be trusted, from 0 (the likeliest) to 1 (drawn by probability). A single one
        is never tried again at another.
    best_of : int
        Above temperature 0: draws of a window, of which the likeliest is kept.
    beam_size : int
        At temperature 0: sequences kept side by side. 1 is greedy.
    patience : float
        Of beam search: it ends when `round(beam_size * patience)` sequences have ended.
    length_penalty : float or None
        Rank sequences by log-probability / ((5 + length) / 6) ** length_penalty; None: / length.
    seed : int
        Of the draws above temperature 0.
    top_p : float
        Above temperature 0: draw only from the likeliest tokens that together have this probability.
    repetition_penalty : float
        Above 1, text tokens that the window has already are made less likely (Keskar et al. 2019, CTRL).
    sample_len : int or None
        Tokens a window may take, timestamps included; None: half the context.
    initial_prompt : str
        Text said to have come before the recording: names, spelling, style.
    carry_initial_prompt : bool
        Before every window, not the first alone.
    condition_on_previous_text : bool
        Each window is told the text before it.
    prefix : str
        Text that each window begins with; it is not repeated in the transcript.
    suppress_tokens : tuple of int or None
        Never chosen; None: the checkpoint's non-speech symbols.
    suppress_blank : bool
        A window's first token is neither a space nor the end.
    without_timestamps : bool
        Text alone: a window is one segment.
    word_timestamps : bool
        Also when each word was said.
    compression_ratio_threshold, logprob_threshold, no_speech_threshold : float or None
        See `engine.decoding.fallback`; None switches the rule off.
    hallucination_silence_threshold : float or None
        With word times: seconds of silence around a passage of anomalous words that make it a hallucination; None keeps all.

    Raises
    ------
    InvalidOptions
        A value is out of range, or two contradict each other.
    """

    language: str | None = None
    task: str = "transcribe"
    temperatures: tuple[float, ...] = TEMPERATURES
    best_of: int = 1
    beam_size: int = 1
    patience: float = 1.0
    length_penalty: float | None = None
    seed: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    sample_len: int | None = None
    initial_prompt: str = ""
    carry_initial_prompt: bool = False
    condition_on_previous_text: bool = True
    prefix: str = ""
    suppress_tokens: tuple[int, ...] | None = None
    suppress_blank: bool = True
    without_timestamps: bool = False
    word_timestamps: bool = False
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    hallucination_silence_threshold: float | None = None

    def __post_init__(self) -> None:
        _refuse(self._out_of_range())
        _refuse(self._contradictions())

    def _out_of_range(self) -> dict[str, bool]:
        temperatures = self.temperatures
        return {
            f"task is one of {', '.join(TASKS)}": self.task not in TASKS,
            "temperatures are numbers from 0 to 1, at least one": not temperatures
            or any(not 0.0 <= temperature <= 1.0 for temperature in temperatures),
            f"best_of is from 1 to {MAX_SEQUENCES}": not 1 <= self.best_of <= MAX_SEQUENCES,
            f"beam_size is from 1 to {MAX_SEQUENCES}": not 1 <= self.beam_size <= MAX_SEQUENCES,
            "patience is above 0, up to 10": not 0.0 < self.patience <= 10.0,
            "length_penalty is from 0 to 1": self.length_penalty is not None and not 0.0 <= self.length_penalty <= 1.0,
            "top_p is above 0, up to 1": not 0.0 < self.top_p <= 1.0,
            "repetition_penalty is from 1 to 2": not 1.0 <= self.repetition_penalty <= 2.0,
            "sample_len is at least 1": self.sample_len is not None and self.sample_len < 1,
            "hallucination_silence_threshold is above 0": self.hallucination_silence_threshold is not None
            and not 0.0 < self.hallucination_silence_threshold < math.inf,
            "thresholds are numbers": any(
                threshold is not None and not math.isfinite(threshold)
                for threshold in (self.compression_ratio_threshold, self.logprob_threshold, self.no_speech_threshold)
            ),
        }

    def _contradictions(self) -> dict[str, bool]:
        greedy, drawn = 0.0 in self.temperatures, any(temperature > 0.0 for temperature in self.temperatures)
        return {
            "beam_size works at temperature 0, which is not among the temperatures": self.beam_size > 1 and not greedy,
            "patience is beam search's: give beam_size too": self.patience != 1.0 and self.beam_size == 1,
            "length_penalty ranks several sequences: give beam_size or best_of too": self.length_penalty is not None
            and self.beam_size == self.best_of == 1,
            "best_of works above temperature 0, and no temperature is": self.best_of > 1 and not drawn,
            "top_p works above temperature 0, and no temperature is": self.top_p < 1.0 and not drawn,
            "carry_initial_prompt has nothing to carry: give initial_prompt too": self.carry_initial_prompt
            and not self.initial_prompt.strip(),
            "hallucination_silence_threshold needs word_timestamps": self.hallucination_silence_threshold is not None
            and not self.word_timestamps,
        }

    @property
    def n_sequences(self) -> int:
        """The most that are decoded side by side."""
        return max(self.beam_size, self.best_of)


def _refuse(faults: dict[str, bool]) -> None:
    for rule, is_broken in faults.items():
        if is_broken:
            raise InvalidOptions(rule)
