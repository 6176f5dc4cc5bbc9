"""Text → ids: openai/whisper's own for the same texts, and every text comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.byte_pairs import pieces
from engine.shards.store import ShardStore
from engine.tokenizer import Tokenizer
from tests.engine.test_decoding import tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "encodings.tiny.en.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def english(tiny_en: Path) -> Tokenizer:
    store = ShardStore(tiny_en)
    return Tokenizer(store.vocabulary(), store.token_order)


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_ids_are_openai_whispers(text: str, ids: list[int], english: Tokenizer) -> None:
    assert english.encode(text) == ids
    assert english.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", ["one", " two"]),
        ("it's we'll", ["it", "'s", " we", "'ll"]),
        ("a1b", ["a", "1", "b"]),
        ("x  y", ["x", " ", " y"]),
        ("x \n", ["x", " \n"]),
        ("  ", ["  "]),
        (" ...!a", [" ...!", "a"]),
        ("\ty", ["\t", "y"]),
        ("", []),
    ],
)
def test_pieces(text: str, expected: list[str]) -> None:
    assert list(pieces(text)) == expected


def test_bytes_that_no_token_joins_stay_apart() -> None:
    """' one' is a token of the small vocabulary, but no two of its bytes are."""
    small = tokenizer()
    assert small.encode(" one two one") == [*b" one", *b" two", *b" one"]  # no token for what lies between
    assert small.decode(small.encode("anything at all, 北京")) == "anything at all, 北京"


def test_a_lone_surrogate_is_no_crash(english: Tokenizer) -> None:
    assert english.decode(english.encode("a\ud800b")) == "a�b"


def test_a17_a_long_word_takes_no_square_of_its_length(english: Tokenizer) -> None:
    """12,000 bytes without a space; the plain way would take 72 million steps."""
    assert len(english.encode("春风" * 2000)) == 8000
