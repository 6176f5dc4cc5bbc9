"""When a window's text is nothing that was said: rules beyond the reference's own (engine/DESIGN.md has what was measured)."""

from __future__ import annotations

import re

from engine.decoding.fallback import Fallback
from engine.decoding.task import DecodingResult

GUESS_NO_SPEECH = 0.5
"""No-speech probability above which a window that no temperature gave a text to trust is silence."""
DOUBTED_ECHO = 0.4
"""And above which an echo of the prompt is silence, that was not to be trusted at the first temperature."""
ECHOED_SHARE = 0.5
"""Of a text's words; where as many are the prompt's, and the model calls the window silent, it repeats the prompt."""


def is_unsaid(result: DecodingResult, text: str, prompt: str, fallback: Fallback) -> bool:
    """Whether the window is silence, by the reference's rule or one of these:

    - no temperature gave a text to trust, and the model rather thinks that nobody speaks;
    - the model thinks that nobody speaks, and the text echoes the caller's prompt, whose words come with undue confidence;
      where the text was not to be trusted at once, a doubt is enough.

    Parameters
    ----------
    text, prompt : the window's text, and the initial prompt that it was decoded with
    """
    threshold = fallback.options.no_speech_threshold
    if threshold is None:
        return False
    if fallback.is_silence(result):
        return True
    trusted = fallback.is_trusted(result)
    if not trusted and not fallback.loops(result) and result.no_speech_prob > GUESS_NO_SPEECH:
        return True
    at_once = trusted and result.temperature == fallback.options.temperatures[0]
    return result.no_speech_prob > (threshold if at_once else DOUBTED_ECHO) and _echoes(text, prompt)


def _echoes(text: str, prompt: str) -> bool:
    words, known = _words(text), set(_words(prompt))
    if not words or not known:
        return False
    if text.strip() in prompt:  # languages that put no space between words
        return True
    return sum(word in known for word in words) >= ECHOED_SHARE * len(words)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
