"""`tokenizer.json` (the Hugging Face tokenizers' form, byte-level BPE) → `Vocabulary`.

Both kinds of checkpoint bring this file. Decoding needs only the tokens' bytes; the merges are left behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.dims import ModelDimensions
from engine.errors import CheckpointInvalid, ManifestInvalid
from engine.languages import LANGUAGES
from engine.tokenizer import SpecialTokens, Vocabulary

MAX_JSON_BYTES = 16 << 20
"""Published tokenizer.json files have 2 to 4 MB."""


def byte_of_character() -> dict[str, int]:
    """GPT-2's reversible mapping, inverted: the printable stand-in of each byte → the byte.

    Printable Latin-1 stands for itself, the other 68 bytes for characters from U+0100 on (openai/gpt-2 encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises
    ------
    CheckpointInvalid
        The file is missing, too large, or holds no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointInvalid(f"{path.name} has more than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{path.name} is missing beside the weights") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{path.name} is no JSON") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{path.name} is no JSON object")
    return value


def read_vocabulary(path: Path, suppress: list[int], dims: ModelDimensions) -> Vocabulary:
    """Read the vocabulary from `tokenizer.json` at `path`.

    `suppress` is the checkpoint's own list of suppressed tokens; its ids of text are the non-speech tokens.

    Raises
    ------
    CheckpointInvalid
        The file is damaged, ids of text tokens leave a hole, or a special token is missing or beyond `n_vocab`.
    """
    document = read_json(path)
    try:
        added = {token["content"]: int(token["id"]) for token in document["added_tokens"]}
        vocab: dict[str, int] = document["model"]["vocab"]
        eot = added["<|endoftext|>"]
        token_bytes, token_begins = _table(vocab, eot)
        no_timestamps = added["<|notimestamps|>"]
        special = SpecialTokens(
            eot=eot,
            sot=added["<|startoftranscript|>"],
            translate=added["<|translate|>"],
            transcribe=added["<|transcribe|>"],
            sot_lm=added["<|startoflm|>"],
            sot_prev=added["<|startofprev|>"],
            # Renamed upstream; both names are in published files.
            no_speech=added["<|nospeech|>"] if "<|nospeech|>" in added else added["<|nocaptions|>"],
            no_timestamps=no_timestamps,
            timestamp_begin=no_timestamps + 1,
            blank=vocab["Ġ"],
            multilingual=dims.is_multilingual,
            languages={code: added[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in added},
            non_speech=tuple(sorted(token for token in suppress if 0 <= token < eot)),
        )
        # What conversion writes must be what loading accepts.
        SpecialTokens.from_json(json.loads(json.dumps(special.to_json())), dims.n_vocab)
    except (KeyError, TypeError, ValueError, AttributeError, ManifestInvalid) as error:
        raise CheckpointInvalid(f"{path.name} is no Whisper tokenizer: {error!r}") from error
    return Vocabulary(token_bytes, token_begins, special)


def _table(vocab: dict[str, int], eot: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    texts = {index: text for text, index in vocab.items() if index < eot}
    if sorted(texts) != list(range(eot)):
        raise ValueError(f"the text tokens are not exactly the ids below {eot}")
    byte_of = byte_of_character()
    parts = [bytes(byte_of[character] for character in texts[index]) for index in range(eot)]
    begins = np.zeros(eot + 1, np.uint32)
    np.cumsum([len(part) for part in parts], out=begins[1:])
    return np.frombuffer(b"".join(parts), np.uint8), begins
