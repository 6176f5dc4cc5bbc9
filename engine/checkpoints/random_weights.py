"""A checkpoint of any size of Whisper from its shape alone: seeded random weights, for measuring memory without real ones.

What it hears is nonsense. Every number follows from raw draws of a generator whose stream NumPy promises to keep (PCG64,
NEP 19), by products that IEEE 754 fixes: the same bytes on every processor and with every version.
"""

from __future__ import annotations

from itertools import product
from math import prod, sqrt
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import numpy.typing as npt

from engine.checkpoints.layout import alignment_heads, expected_shapes
from engine.checkpoints.vocabulary import byte_of_character
from engine.dims import ModelDimensions
from engine.errors import InvalidOptions
from engine.languages import LANGUAGES
from engine.tokenizer import SpecialTokens, Vocabulary

SEED = 0
DRAWN_AT_A_TIME = 1 << 20
"""Numbers drawn at a time."""
HALF_RANGE = 1 << 15
"""Draws are 16-bit integers, from -HALF_RANGE on: evenly spread between plus and minus this."""
EMBEDDING_DEVIATION = 8.0
"""Of logits: one token wins clearly (mean log-probability -0.6), so that no window is decoded again at a higher temperature."""
POSITION_DEVIATION = 5.0
"""Of the decoder's positions: they outweigh the last token, whose own row of the embedding would win again and again."""
VECTOR_DEVIATION = 0.1
"""Of biases, and of norms' factors around one."""
OTHER_SPECIAL_TOKENS = 8 + 1501
"""Besides languages: those of `SpecialTokens`, and a timestamp every 0.02 s from 0 to 30."""


def _dims(n_mels: int, n_vocab: int, n_state: int, n_head: int, n_audio_layer: int, n_text_layer: int) -> ModelDimensions:
    return ModelDimensions(
        n_mels=n_mels,
        n_audio_ctx=1500,
        n_audio_state=n_state,
        n_audio_head=n_head,
        n_audio_layer=n_audio_layer,
        n_vocab=n_vocab,
        n_text_ctx=448,
        n_text_state=n_state,
        n_text_head=n_head,
        n_text_layer=n_text_layer,
    )


SIZES = {
    "tiny.en": _dims(80, 51_864, 384, 6, 4, 4),
    "tiny": _dims(80, 51_865, 384, 6, 4, 4),
    "base.en": _dims(80, 51_864, 512, 8, 6, 6),
    "base": _dims(80, 51_865, 512, 8, 6, 6),
    "small.en": _dims(80, 51_864, 768, 12, 12, 12),
    "small": _dims(80, 51_865, 768, 12, 12, 12),
    "medium.en": _dims(80, 51_864, 1024, 16, 24, 24),
    "medium": _dims(80, 51_865, 1024, 16, 24, 24),
    "large-v1": _dims(80, 51_865, 1280, 20, 32, 32),
    "large-v2": _dims(80, 51_865, 1280, 20, 32, 32),
    "large-v3": _dims(128, 51_866, 1280, 20, 32, 32),
    "large-v3-turbo": _dims(128, 51_866, 1280, 20, 32, 4),
}
"""Dimensions by OpenAI's name of the size, as the checkpoints of openai/whisper carry them."""


class RandomCheckpoint:
    """A checkpoint without files.

    Attributes
    ----------
    format : str
        `random` and the size: what the manifest says of where the weights come from.

    Raises
    ------
    InvalidOptions
        `size` is none of `SIZES`.
    """

    def __init__(self, size: str) -> None:
        if size not in SIZES:
            raise InvalidOptions(f"no size of Whisper is called {size!r}; known: {', '.join(SIZES)}")
        self.format = f"random {size}"
        self.files: list[Path] = []
        self.dims = SIZES[size]
        self.alignment_heads = alignment_heads(None, self.dims)
        self.vocabulary = _vocabulary(self.dims)
        self._shapes = expected_shapes(self.dims)

    def read(self, name: str) -> npt.NDArray[np.float16]:
        """Tensor `name`, drawn: about as large as keeps activations of order one."""
        shape = self._shapes[name]
        centre, deviation = _spread(name, shape)
        step = np.float32(deviation * sqrt(3) / HALF_RANGE)  # the even spread's deviation is its half width by √3
        draws = np.random.PCG64(np.random.SeedSequence([SEED, *name.encode()]))
        out = np.empty(prod(shape), np.float16)
        for start in range(0, out.size, DRAWN_AT_A_TIME):
            part = out[start : start + DRAWN_AT_A_TIME]
            raw = draws.random_raw(-(-part.size // 4)).astype("<u8").view("<i2")[: part.size]  # four to a draw of 64 bits
            part[:] = raw * step + np.float32(centre)
        return out.reshape(shape)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Centre and standard deviation of a tensor's numbers."""
    if len(shape) == 1:
        return (1.0 if name.endswith(("ln.weight", "ln_post.weight")) else 0.0), VECTOR_DEVIATION
    if name == "decoder.positional_embedding":
        return 0.0, POSITION_DEVIATION
    scale = EMBEDDING_DEVIATION if name == "decoder.token_embedding.weight" else 1.0
    return 0.0, scale / sqrt(prod(shape[1:]))


def _vocabulary(dims: ModelDimensions) -> Vocabulary:
    """Special tokens where OpenAI has them (openai/whisper tokenizer.py); text tokens of about their lengths, made up.

    GPT-2's order of single bytes, then a space and four letters each.
    """
    eot = 50_257 if dims.is_multilingual else 50_256
    codes = list(LANGUAGES)[: dims.n_vocab - eot - OTHER_SPECIAL_TOKENS]
    after = eot + 2 + len(codes)
    special = SpecialTokens(
        eot=eot,
        sot=eot + 1,
        languages={code: eot + 2 + i for i, code in enumerate(codes)},
        translate=after,
        transcribe=after + 1,
        sot_lm=after + 2,
        sot_prev=after + 3,
        no_speech=after + 4,
        no_timestamps=after + 5,
        timestamp_begin=after + 6,
        blank=list(byte_of_character().values()).index(ord(" ")),
        multilingual=dims.is_multilingual,
        non_speech=(),
    )
    words = (" " + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    single = bytes(byte_of_character().values())
    made_up = "".join(word for word, _ in zip(words, range(eot - len(single)), strict=False)).encode()
    begins = np.concatenate([np.arange(len(single)), np.arange(len(single), len(single) + len(made_up) + 1, 5)])
    return Vocabulary(np.frombuffer(single + made_up, np.uint8), begins.astype(np.uint32), special)
