"""What each window is told of the text before it (openai/whisper transcribe.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PromptHistory:
    """The prompt of the next window.

    Parameters
    ----------
    initial : token ids of the caller's initial prompt; only its last `max_tokens` count
    carry : the initial prompt goes before every window, and the text so far takes what room it leaves
    condition : the text so far goes before a window
    max_tokens : int
        `n_text_ctx // 2 - 1`.

    Attributes
    ----------
    tells_initial : bool
        The next window is told (some of) the initial prompt.
    """

    def __init__(self, initial: Sequence[int], carry: bool, condition: bool, max_tokens: int) -> None:
        self._initial = list(initial)[-max_tokens:]
        self._carry, self._condition, self._max_tokens = carry, condition, max_tokens
        self._said = [] if carry else list(self._initial)
        self.tells_initial = bool(initial)

    def prompt(self) -> list[int]:
        """Tokens to put before the next window; the initial prompt counts as said before the first, until it is forgotten."""
        if not self._carry:
            return self._said[-self._max_tokens :]
        room = self._max_tokens - len(self._initial)
        return self._initial + (self._said[-room:] if room else [])

    def add(self, tokens: Iterable[int], helps: bool) -> None:
        """A window has been decoded.

        `helps` is false where its tokens would mislead the next window: then all that was said so far is forgotten.
        """
        said = [*self._said, *tokens] if helps and self._condition else []
        if not self._carry and (not said or len(said) - len(self._initial) >= self._max_tokens):
            self.tells_initial = False
        self._said = said[-self._max_tokens :]
