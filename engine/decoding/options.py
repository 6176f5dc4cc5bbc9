"""What a caller may ask of decoding."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = ("transcribe", "translate")


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Options of one window.

    Attributes
    ----------
    language : str
        A code that the model has.
    task : str
        One of `TASKS`.
    prompt : tuple of int
        Tokens said to have come before the window; only the last `n_text_ctx // 2 - 1` count.
    temperature : float
        From 0, the likeliest token, to 1, drawn by probability.
    seed : int
        Of the draws above temperature 0.
    """

    language: str
    task: str = "transcribe"
    prompt: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task is one of {', '.join(TASKS)}")
        if not 0.0 <= self.temperature <= 1.0:
            raise ValueError(f"temperature is a number from 0 to 1; found {self.temperature}")
