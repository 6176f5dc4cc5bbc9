"""When a window's text is nothing that was said: rules beyond the reference's own (engine/DESIGN.md has what was measured)."""

from __future__ import annotations

import re

from engine.decoding.fallback import Fallback
from engine.decoding.task import DecodingResult

GUESS_MARGIN = 0.1
"""Below the no-speech threshold, for a window that no temperature gave a text to trust."""
DOUBTED_ECHO_MARGIN = 0.2
"""Below it, for an echo of the prompt that was not to be trusted at the first temperature."""
ECHOED_SHARE = 0.5
"""Of a text's telling words; where as many are the prompt's, it repeats the prompt."""
TELLING_LETTERS = 5
"""Shorter words are in every text."""


def is_unsaid(result: DecodingResult, text: str, prompt: str, fallback: Fallback) -> bool:
    """Whether the window is silence, by the reference's rule or one of these:

    - no temperature gave a text to trust, and the model rather thinks that nobody speaks;
    - the model thinks that nobody speaks, and the text echoes the caller's prompt, whose words come with undue confidence;
      where the text was not to be trusted at once, a doubt is enough.

    Parameters
    ----------
    text : the window's
    prompt : the initial prompt, where the window was told it; else empty
    """
    threshold = fallback.options.no_speech_threshold
    if threshold is None:
        return False
    if fallback.is_silence(result):
        return True
    trusted = fallback.is_trusted(result)
    if not trusted and not fallback.loops(result) and result.no_speech_prob > threshold - GUESS_MARGIN:
        return True
    at_once = trusted and result.temperature == fallback.options.temperatures[0]
    return result.no_speech_prob > threshold - (0.0 if at_once else DOUBTED_ECHO_MARGIN) and _echoes(text, prompt)


def _echoes(text: str, prompt: str) -> bool:
    words, known = _telling_words(text), set(_telling_words(prompt))
    if words and known:
        return sum(word in known for word in words) >= ECHOED_SHARE * len(words)
    # Languages that put no space between words: the whole of it.
    said = text.strip()
    return len(said) > 1 and not said.isascii() and " " not in said and said in prompt


def _telling_words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if len(word) >= TELLING_LETTERS]
