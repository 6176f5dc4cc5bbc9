"""Hugging Face safetensors (`WhisperForConditionalGeneration`) → tensors under OpenAI's names."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoints.layout import alignment_heads, check_layout
from engine.checkpoints.vocabulary import read_json, read_vocabulary
from engine.dims import ModelDimensions
from engine.errors import CheckpointInvalid, ManifestInvalid
from engine.tensor_file import TensorEntry, TensorFileError, read_header
from engine.tokenizer import Vocabulary

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TIED = "proj_out.weight"
"""The logits' projection: the token embedding again, sometimes stored twice."""

RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?:model\.)?(encoder|decoder)\.layers\.(\d+)\.(.+)", r"\1.blocks.\2.\3"),
        (r"(?:model\.)?(encoder\.conv[12]\..+)", r"\1"),
        (r"(?:model\.)?(encoder|decoder)\.embed_positions\.weight", r"\1.positional_embedding"),
        (r"(?:model\.)?decoder\.embed_tokens\.weight", r"decoder.token_embedding.weight"),
        (r"(?:model\.)?encoder\.layer_norm\.(weight|bias)", r"encoder.ln_post.\1"),
        (r"(?:model\.)?decoder\.layer_norm\.(weight|bias)", r"decoder.ln.\1"),
    )
]
PARTS = {
    "self_attn_layer_norm": "attn_ln",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
"""Hugging Face's name of a layer's part → OpenAI's."""


def openai_name(name: str) -> str:
    """OpenAI's name of the tensor; a name no rule knows is given back as it is, and `check_layout` refuses it."""
    for pattern, replacement in RULES:
        match = pattern.fullmatch(name)
        if match:
            renamed = match.expand(replacement)
            head, _, kind = renamed.rpartition(".")
            prefix = re.match(r"((?:encoder|decoder)\.blocks\.\d+)\.(.+)", head)
            if prefix and prefix[2] in PARTS:
                return f"{prefix[1]}.{PARTS[prefix[2]]}.{kind}"
            return renamed if not prefix else name
    return name


class HuggingFaceCheckpoint:
    """A directory with `model.safetensors` (or parts and their index), `config.json`, `tokenizer.json`.

    `generation_config.json` is read for the suppressed tokens and the alignment heads where it is there; `config.json` has
    the tokens in older files.

    Raises
    ------
    CheckpointInvalid
        The files are damaged, or not a Whisper model; naming the file and the tensor.
    """

    format = "huggingface"

    def __init__(self, directory: Path) -> None:
        config = read_json(directory / CONFIG_FILE)
        self.files = [directory / CONFIG_FILE, directory / TOKENIZER_FILE]
        self.dims = _dims(config)
        self._sources: dict[str, tuple[memoryview, TensorEntry]] = {}
        tied: tuple[memoryview, TensorEntry] | None = None
        for path in _weight_files(directory):
            self.files.append(path)
            buffer, entries = _open(path)
            for name, entry in entries.items():
                if name == TIED:
                    tied = (buffer, entry)
                elif openai_name(name) in self._sources:
                    raise CheckpointInvalid(f"{path.name}: {name} stands twice")
                else:
                    self._sources[openai_name(name)] = (buffer, entry)
        check_layout({name: entry.shape for name, (_, entry) in self._sources.items()}, self.dims)
        self._check_dtypes()
        if tied is not None and not np.array_equal(_widen(*tied), self.read("decoder.token_embedding.weight")):
            raise CheckpointInvalid(f"{TIED} is not the token embedding: logits are not tied")
        suppress, heads = config.get("suppress_tokens"), config.get("alignment_heads")
        if (directory / GENERATION_FILE).exists():
            self.files.append(directory / GENERATION_FILE)
            generation = read_json(directory / GENERATION_FILE)
            suppress, heads = generation.get("suppress_tokens", suppress), generation.get("alignment_heads", heads)
        self.alignment_heads = alignment_heads(heads, self.dims)
        self.vocabulary: Vocabulary = read_vocabulary(directory / TOKENIZER_FILE, suppress or [], self.dims)

    def read(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Tensor `name`, float32 or float16: a view of the file's mapping, or bfloat16 widened exactly to float32."""
        return _widen(*self._sources[name])

    def _check_dtypes(self) -> None:
        for name, (_, entry) in self._sources.items():
            if entry.dtype not in ("F32", "F16", "BF16"):
                raise CheckpointInvalid(f"{name} is {entry.dtype}; expected F32, F16 or BF16")


def _widen(buffer: memoryview, entry: TensorEntry) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    tensor = entry.view(buffer)
    if entry.dtype == "BF16":  # the upper half of a float32
        return (tensor.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return tensor


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    index = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointInvalid(f"{INDEX_FILE} has no weight_map")
    if any(not isinstance(name, str) or Path(name).name != name for name in index.values()):
        raise CheckpointInvalid(f"{INDEX_FILE} names files outside its own directory")
    names = sorted(set(index.values()))
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise CheckpointInvalid(f"{', '.join(missing)} is missing beside {INDEX_FILE}")
    return [directory / name for name in names]


def _open(path: Path) -> tuple[memoryview, dict[str, TensorEntry]]:
    try:
        header = read_header(path)
    except TensorFileError as error:
        raise CheckpointInvalid(f"{path.name}: {error}") from error
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), header.entries


def _dims(config: dict[str, Any]) -> ModelDimensions:
    fields = {
        "n_mels": "num_mel_bins",
        "n_audio_ctx": "max_source_positions",
        "n_audio_state": "d_model",
        "n_audio_head": "encoder_attention_heads",
        "n_audio_layer": "encoder_layers",
        "n_vocab": "vocab_size",
        "n_text_ctx": "max_target_positions",
        "n_text_state": "d_model",
        "n_text_head": "decoder_attention_heads",
        "n_text_layer": "decoder_layers",
    }
    missing = sorted(key for key in fields.values() if key not in config)
    if missing:
        raise CheckpointInvalid(f"{CONFIG_FILE} lacks {', '.join(missing)}")
    if config.get("activation_function", "gelu") != "gelu":
        raise CheckpointInvalid(f"{CONFIG_FILE}: activation_function is {config['activation_function']!r}, Whisper's is gelu")
    try:
        return ModelDimensions.from_json({name: config[key] for name, key in fields.items()})
    except ManifestInvalid as error:
        raise CheckpointInvalid(f"{CONFIG_FILE}: {error}") from error
