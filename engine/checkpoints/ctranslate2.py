"""CTranslate2's `model.bin` (binary version 6) → tensors under OpenAI's names.

Form: u32 binary version, string spec name, u32 revision, u32 count; per tensor a string name, u8 rank, u32 dimensions,
u8 type, u32 bytes, data; then u32 count of aliases, each two strings. A string is a u16 length and that many bytes
with a closing NUL. All little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.checkpoints.layout import alignment_heads, check_layout
from engine.checkpoints.vocabulary import read_json, read_vocabulary
from engine.dims import ModelDimensions
from engine.errors import CheckpointInvalid, ManifestInvalid
from engine.tensor_file import TensorEntry
from engine.tokenizer import Vocabulary

BINARY_VERSION = 6
SPEC_NAME = "WhisperSpec"
MAX_RANK = 8
MAX_TENSORS = 100_000

TYPES = {0: "F32", 1: "I8", 2: "I16", 3: "I32", 4: "F16", 5: "BF16"}
"""Type numbers of the file (CTranslate2's DataType) by safetensors' names for them."""

# CTranslate2's name of a layer's part → OpenAI's names of what is stacked in it, first rows first.
ENCODER_PARTS = {
    "self_attention/layer_norm": ["attn_ln"],
    "self_attention/linear_0": ["attn.query", "attn.key", "attn.value"],
    "self_attention/linear_1": ["attn.out"],
    "ffn/layer_norm": ["mlp_ln"],
    "ffn/linear_0": ["mlp.0"],
    "ffn/linear_1": ["mlp.2"],
}
DECODER_PARTS = ENCODER_PARTS | {
    "attention/layer_norm": ["cross_attn_ln"],
    "attention/linear_0": ["cross_attn.query"],
    "attention/linear_1": ["cross_attn.key", "cross_attn.value"],
    "attention/linear_2": ["cross_attn.out"],
}
TOP = {
    "encoder/conv1/weight": "encoder.conv1.weight",
    "encoder/conv1/bias": "encoder.conv1.bias",
    "encoder/conv2/weight": "encoder.conv2.weight",
    "encoder/conv2/bias": "encoder.conv2.bias",
    "encoder/position_encodings/encodings": "encoder.positional_embedding",
    "encoder/layer_norm/gamma": "encoder.ln_post.weight",
    "encoder/layer_norm/beta": "encoder.ln_post.bias",
    "decoder/embeddings/weight": "decoder.token_embedding.weight",
    "decoder/position_encodings/encodings": "decoder.positional_embedding",
    "decoder/layer_norm/gamma": "decoder.ln.weight",
    "decoder/layer_norm/beta": "decoder.ln.bias",
}
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
LAYER = re.compile(r"(encoder|decoder)/layer_(\d{1,3})/(.+)/(weight|bias|gamma|beta)")


class _Cursor:
    """Bounds-checked reads, one after another."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.position = 0

    def skip(self, n_bytes: int) -> int:
        begin, self.position = self.position, self.position + n_bytes
        if self.position > len(self.buffer):
            raise CheckpointInvalid(f"model.bin ends at {len(self.buffer)}, inside what starts at {begin}")
        return begin

    def number(self, form: str) -> int:
        begin = self.skip(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self.buffer, begin)
        return int(value)

    def string(self) -> str:
        n_bytes = self.number("<H")
        begin = self.skip(n_bytes)
        return bytes(self.buffer[begin : begin + n_bytes]).rstrip(b"\0").decode("ascii", errors="replace")


def _read_entries(buffer: memoryview) -> dict[str, TensorEntry]:
    cursor = _Cursor(buffer)
    version, spec = cursor.number("<I"), cursor.string()
    if version != BINARY_VERSION or spec != SPEC_NAME:
        raise CheckpointInvalid(f"model.bin is {spec!r} version {version}, expected {SPEC_NAME} {BINARY_VERSION}")
    cursor.number("<I")  # the spec's revision adds optional settings only
    count = cursor.number("<I")
    if count > MAX_TENSORS:
        raise CheckpointInvalid(f"model.bin claims {count} tensors")
    entries: dict[str, TensorEntry] = {}
    for _ in range(count):
        name, rank = cursor.string(), cursor.number("<B")
        if rank > MAX_RANK or name in entries:
            raise CheckpointInvalid(f"model.bin: {name!r} stands twice or has rank {rank}")
        shape = tuple(cursor.number("<I") for _ in range(rank))
        dtype, n_bytes = TYPES.get(cursor.number("<B")), cursor.number("<I")
        begin = cursor.skip(n_bytes)
        if dtype is None:
            raise CheckpointInvalid(f"model.bin: {name!r} has an unknown type")
        entries[name] = TensorEntry(dtype, shape, begin, begin + n_bytes)
        itemsize = 1 if dtype == "I8" else 4 if dtype in ("F32", "I32") else 2
        if math.prod(shape) * itemsize != n_bytes:
            raise CheckpointInvalid(f"model.bin: {name!r} {shape} of {dtype} does not fill {n_bytes} bytes")
    for _ in range(cursor.number("<I")):
        alias, name = cursor.string(), cursor.string()
        if (alias, name) != ("decoder/projection/weight", "decoder/embeddings/weight"):
            raise CheckpointInvalid(f"model.bin: alias {alias!r} of {name!r} is not known")
    if cursor.position != len(buffer):
        raise CheckpointInvalid(f"model.bin: {len(buffer) - cursor.position} bytes follow the end")
    return entries


class CTranslate2Checkpoint:
    """A directory with `model.bin`, `config.json` and `tokenizer.json`.

    Attributes
    ----------
    dims : ModelDimensions
    vocabulary : Vocabulary
    alignment_heads : tuple of (layer, head)
    files : list of Path
        What was read, for the manifest's account of the source.

    Raises
    ------
    CheckpointInvalid
        The files are damaged, not a Whisper model, or quantised.
    """

    format = "ctranslate2"

    def __init__(self, directory: Path) -> None:
        model_bin = directory / "model.bin"
        self.files = [model_bin, directory / "config.json", directory / "tokenizer.json"]
        with model_bin.open("rb") as file:
            if model_bin.stat().st_size == 0:
                raise CheckpointInvalid("model.bin has no bytes")
            self._buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        entries = _read_entries(self._buffer)
        settings = {n: self._scalar(e) for n, e in entries.items() if not e.shape}
        self._sources = dict(self._named({n: e for n, e in entries.items() if e.shape}))
        self.dims = self._dims(settings)
        check_layout({name: self._shape(name) for name in self._sources}, self.dims)
        config = read_json(self.files[1])
        suppress = config.get("suppress_ids", [])
        self.alignment_heads = alignment_heads(config.get("alignment_heads"), self.dims)
        self.vocabulary: Vocabulary = read_vocabulary(self.files[2], suppress, self.dims)

    def read(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Tensor `name` as stored (float32 or float16), a read-only view of the file's mapping."""
        entry, part, parts = self._sources[name]
        tensor = entry.view(self._buffer)
        rows = len(tensor) // parts
        return tensor[part * rows : (part + 1) * rows] if parts > 1 else tensor

    def _scalar(self, entry: TensorEntry) -> int:
        return int(entry.view(self._buffer)[()])

    def _shape(self, name: str) -> tuple[int, ...]:
        entry, _, parts = self._sources[name]
        return (entry.shape[0] // parts, *entry.shape[1:])

    def _named(self, entries: dict[str, TensorEntry]) -> Iterator[tuple[str, tuple[TensorEntry, int, int]]]:
        """OpenAI's names → (stacked tensor, which part of it, of how many)."""
        for name, entry in entries.items():
            if entry.dtype not in ("F32", "F16"):
                raise CheckpointInvalid(f"model.bin: {name!r} is {entry.dtype}; convert float16 or float32 weights")
            match = LAYER.fullmatch(name)
            if name in TOP:
                yield TOP[name], (entry, 0, 1)
                continue
            stack, layer, part, kind = match.groups() if match else ("", "", "", "")
            parts = (ENCODER_PARTS if stack == "encoder" else DECODER_PARTS).get(part, [])
            if not parts or entry.shape[0] % len(parts):
                raise CheckpointInvalid(f"model.bin: {name!r} {entry.shape} is no part of a Whisper model")
            for index, openai in enumerate(parts):
                if kind == "bias" and openai.endswith("key"):
                    rows = entry.shape[0] // len(parts)
                    if np.any(entry.view(self._buffer)[index * rows : (index + 1) * rows]):
                        raise CheckpointInvalid(f"model.bin: {name!r} holds a key bias, which Whisper has not")
                else:
                    yield f"{stack}.blocks.{int(layer)}.{openai}.{KINDS[kind]}", (entry, index, len(parts))

    def _dims(self, settings: dict[str, int]) -> ModelDimensions:
        def shape(name: str, rank: int) -> tuple[int, ...]:
            found = self._shape(name) if name in self._sources else ()
            if len(found) != rank:
                raise CheckpointInvalid(f"model.bin: {name} is missing or has not {rank} dimensions")
            return found

        def layers(stack: str) -> int:
            numbers = [int(n.split(".")[2]) for n in self._sources if n.startswith(f"{stack}.blocks.")]
            return max(numbers, default=-1) + 1

        n_audio_ctx, n_audio_state = shape("encoder.positional_embedding", 2)
        n_text_ctx, n_text_state = shape("decoder.positional_embedding", 2)
        found = {
            "n_mels": shape("encoder.conv1.weight", 3)[1],
            "n_audio_ctx": n_audio_ctx,
            "n_audio_state": n_audio_state,
            "n_audio_head": settings.get("encoder/num_heads", 0),
            "n_audio_layer": layers("encoder"),
            "n_vocab": shape("decoder.token_embedding.weight", 2)[0],
            "n_text_ctx": n_text_ctx,
            "n_text_state": n_text_state,
            "n_text_head": settings.get("decoder/num_heads", 0),
            "n_text_layer": layers("decoder"),
        }
        try:
            return ModelDimensions.from_json(found)
        except ManifestInvalid as error:
            raise CheckpointInvalid(f"model.bin: {error}") from error
