"""Decoding options on the command line: one table, for every command that decodes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decoding import DecodingOptions


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


# Option, field of DecodingOptions, how it is read, what it means.
_TABLE: tuple[tuple[str, str, Any, str], ...] = (
    ("--language", "language", str, "code or English name (default: detect)"),
    ("--task", "task", str, "transcribe, or translate to English"),
    ("--prompt", "initial_prompt", str, "text said to have come before: names, spelling"),
    ("--carry-prompt", "carry_initial_prompt", bool, "give the prompt to every window, not the first alone"),
    ("--prefix", "prefix", str, "text that every window begins with"),
    ("--no-previous-text", "condition_on_previous_text", bool, "tell a window nothing of the text before it"),
    ("--word-timestamps", "word_timestamps", bool, "also when each word was said (json)"),
    ("--hallucination-silence", "hallucination_silence_threshold", float, "drop odd words between so many seconds of silence"),
    ("--temperature", "temperatures", _temperatures, "one, or several to try in turn (default: 0,0.2,0.4,0.6,0.8,1)"),
    ("--beam-size", "beam_size", int, "sequences kept side by side at temperature 0 (default: 1)"),
    ("--patience", "patience", float, "of beam search (default: 1)"),
    ("--length-penalty", "length_penalty", float, "exponent of the length in ranking (default: mean log-probability)"),
    ("--best-of", "best_of", int, "draws above temperature 0 (default: 1)"),
    ("--seed", "seed", int, "of draws (default: 0)"),
    ("--top-p", "top_p", float, "draw from the likeliest tokens that have this probability together"),
    ("--repetition-penalty", "repetition_penalty", float, "above 1: what was said already is less likely"),
    ("--max-tokens", "sample_len", int, "per window of 30 s (default: 224)"),
)


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add every option; one that is not given leaves its field at the default of `DecodingOptions`."""
    group = parser.add_argument_group("decoding")
    for option, field, read, meaning in _TABLE:
        if read is bool:
            action = "store_false" if option.startswith("--no-") else "store_true"
            group.add_argument(option, dest=field, action=action, default=argparse.SUPPRESS, help=meaning)
        else:
            name = option.removeprefix("--").upper()
            group.add_argument(option, dest=field, type=read, default=argparse.SUPPRESS, metavar=name, help=meaning)


def decoding_options(args: argparse.Namespace) -> DecodingOptions:
    """The options that were given.

    Raises
    ------
    InvalidOptions
        One is out of range, or two contradict each other.
    """
    from engine.decoding import DecodingOptions

    given = vars(args)
    return DecodingOptions(**{field: given[field] for _, field, _, _ in _TABLE if field in given})
