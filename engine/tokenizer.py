"""Token ids → text, and the special tokens.

The vocabulary is a compact table, written at conversion: the bytes of all text tokens end to end, and where each
begins. Nothing is parsed at start, and nothing is held but 0.6 MB.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from engine.byte_pairs import BytePairs
from engine.errors import ManifestInvalid, UnsupportedLanguage
from engine.languages import language_code

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages written without spaces between words (openai/whisper tokenizer.py)."""
REPLACEMENT = "\ufffd"
"""What stands for bytes that are no UTF-8."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the special tokens, from the checkpoint, and the lists that decoding suppresses.

    Attributes
    ----------
    languages : dict of code → id
        Also present in English-only vocabularies, where it is never used.
    non_speech : tuple of int
        The default of the reference's `suppress_tokens="-1"`, without the special tokens.
    blank : int
        The space token, suppressed as the first sampled token.
    """

    eot: int
    sot: int
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    blank: int
    multilingual: bool
    languages: dict[str, int]
    non_speech: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object, n_vocab: int) -> SpecialTokens:
        """Read and check the form that `to_json` gives.

        Raises
        ------
        ManifestInvalid
            A field is missing or unknown, or an id is not in `[0, n_vocab)`.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ManifestInvalid(f"special tokens must hold exactly {', '.join(sorted(names))}")
        languages, non_speech, multilingual = value["languages"], value["non_speech"], value["multilingual"]
        if not isinstance(languages, dict) or not isinstance(non_speech, list) or type(multilingual) is not bool:
            raise ManifestInvalid("special tokens: languages is an object, non_speech a list, multilingual a boolean")
        single = [value[name] for name in names - {"languages", "non_speech", "multilingual"}]
        if any(type(n) is not int or not 0 <= n < n_vocab for n in [*single, *languages.values(), *non_speech]):
            raise ManifestInvalid(f"special tokens: every id is a whole number below n_vocab {n_vocab}")
        return cls(**{**value, "non_speech": tuple(non_speech)})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text tokens' bytes and the special tokens.

    Attributes
    ----------
    token_bytes : uint8 [total]
        All text tokens' bytes, end to end, in the order of their ids.
    token_begins : uint32 [eot + 1]
        Token `i` is `token_bytes[token_begins[i]:token_begins[i + 1]]`.
    """

    token_bytes: npt.NDArray[np.uint8]
    token_begins: npt.NDArray[np.uint32]
    special: SpecialTokens


class Tokenizer:
    """Text of token ids, ids of text, and start sequences.

    Parameters
    ----------
    read_order : callable giving `engine.byte_pairs.byte_order` of the vocabulary
        Called when text is encoded, and what it gives is let go again: few recordings come with a prompt.
    """

    def __init__(self, vocabulary: Vocabulary, read_order: Callable[[], npt.NDArray[np.uint32]]) -> None:
        self.special = vocabulary.special
        self._read_order = read_order
        self._bytes = vocabulary.token_bytes.tobytes()
        self._begins = vocabulary.token_begins

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; special and timestamp tokens add nothing, broken UTF-8 becomes U+FFFD."""
        return self._text_bytes(tokens).decode("utf-8", errors="replace")

    def stream(self) -> Callable[[Iterable[int]], str]:
        """A decoder of one recording's tokens, part by part: a character that two parts share is whole, in the later one.

        Given no tokens, it gives what is left over: broken for good.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def decode(tokens: Iterable[int]) -> str:
            data = self._text_bytes(tokens)
            return decoder.decode(data, final=not data)

        return decode

    def _text_bytes(self, tokens: Iterable[int]) -> bytes:
        begins = self._begins
        return b"".join(self._bytes[begins[t] : begins[t + 1]] for t in tokens if t < self.special.eot)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them special whatever the text says."""
        return BytePairs(self._bytes, self._begins, self._read_order()).encode(text)

    def split_words(self, tokens: Sequence[int], language: str) -> list[tuple[str, int]]:
        """Words of text tokens, each with its leading space and how many tokens it took (openai/whisper tokenizer.py).

        A word begins at a space and at punctuation; in languages without spaces, every character is one.
        """
        words: list[tuple[str, int]] = []
        for text, n_tokens in self._characters(tokens):
            joins = words and language not in WITHOUT_SPACES and text[:1] != " " and text.strip() not in string.punctuation
            if joins:
                before, n_before = words.pop()
                text, n_tokens = before + text, n_before + n_tokens
            words.append((text, n_tokens))
        return words

    def _characters(self, tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Shortest runs of tokens that are whole characters: their text, and how many tokens."""
        whole, at, pending = self.decode(tokens), 0, list[int]()
        for token in tokens:
            pending.append(token)
            text = self.decode(pending)
            broken = text.find(REPLACEMENT)
            # A character that is broken in the whole text too will not be mended by more tokens.
            if broken < 0 or whole[at + broken : at + broken + 1] == REPLACEMENT:
                yield text, len(pending)
                at, pending = at + len(text), []
        if pending:
            yield self.decode(pending), len(pending)

    def language(self, text: str) -> str:
        """The language code that `text` means for this model.

        Raises
        ------
        UnsupportedLanguage
            It means none, or one that the weights were not trained for.
        """
        code = language_code(text)
        allowed = sorted(self.special.languages) if self.special.multilingual else ["en"]
        if code not in allowed:
            known = ", ".join(allowed)
            raise UnsupportedLanguage(f"expected a language that this model has ({known})")
        return code

    def sot_sequence(self, language: str, task: str = "transcribe") -> list[int]:
        """Tokens that start decoding; for an English-only model the start token alone (openai/whisper tokenizer.py)."""
        if not self.special.multilingual:
            return [self.special.sot]
        task_token = {"transcribe": self.special.transcribe, "translate": self.special.translate}[task]
        return [self.special.sot, self.special.languages[language], task_token]
