"""A small Whisper with seeded random weights, in both published forms: the real ones' code paths, in milliseconds."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.checkpoints.ctranslate2 import DECODER_PARTS, ENCODER_PARTS, TOP
from engine.checkpoints.huggingface import PARTS
from engine.checkpoints.layout import expected_shapes
from engine.checkpoints.vocabulary import byte_of_character
from engine.dims import ModelDimensions

N_TEXT_TOKENS = 258  # every byte, and two words
SPECIAL = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev", "nospeech"]
SPECIAL_IDS = {f"<|{name}|>": N_TEXT_TOKENS + i for i, name in enumerate([*SPECIAL, "notimestamps"])}
EOT = N_TEXT_TOKENS
TIMESTAMP_BEGIN = N_TEXT_TOKENS + len(SPECIAL_IDS)
SUPPRESSED = [1, 2, 7]

DIMS = ModelDimensions(
    n_mels=80,
    n_audio_ctx=50,
    n_audio_state=64,
    n_audio_head=2,
    n_audio_layer=3,
    n_vocab=TIMESTAMP_BEGIN + 51,
    n_text_ctx=32,
    n_text_state=64,
    n_text_head=2,
    n_text_layer=3,
)

Tensors = dict[str, np.ndarray]


def random_tensors(dims: ModelDimensions = DIMS, seed: int = 0) -> Tensors:
    """float16 tensors under OpenAI's names, scaled so that activations stay of order one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(dims).items():
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        values = rng.standard_normal(shape) / np.sqrt(fan_in)
        if name.endswith(("ln.weight", "ln_post.weight")):
            values = 1 + 0.1 * values
        elif len(shape) == 1:
            values = 0.1 * values
        elif name == "decoder.token_embedding.weight":
            values = 4 * values  # logits far enough apart that rounding does not change the argmax
        tensors[name] = values.astype(np.float16)
    return tensors


def write_tokenizer(directory: Path) -> None:
    characters = sorted(byte_of_character(), key=lambda c: byte_of_character()[c])
    vocab = {character: index for index, character in enumerate(characters)} | {"Ġone": 256, "Ġtwo": 257}
    added = [{"id": index, "content": content} for content, index in SPECIAL_IDS.items()]
    document = {"added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (directory / "tokenizer.json").write_text(json.dumps(document))


def ctranslate2_tensors(tensors: Tensors, dims: ModelDimensions = DIMS) -> Tensors:
    """The same values under CTranslate2's names, its projections stacked."""
    stored = {theirs: tensors[ours] for theirs, ours in TOP.items()}
    for stack, parts, n_layer in (
        ("encoder", ENCODER_PARTS, dims.n_audio_layer),
        ("decoder", DECODER_PARTS, dims.n_text_layer),
    ):
        for layer in range(n_layer):
            for part, ours in parts.items():
                kinds = {"gamma": "weight", "beta": "bias"} if part.endswith("norm") else {"weight": "weight", "bias": "bias"}
                for theirs, kind in kinds.items():
                    prefix = f"{stack}.blocks.{layer}"
                    zero = np.zeros(dims.n_audio_state, np.float16)  # of the key, which has no bias
                    rows = [tensors.get(f"{prefix}.{name}.{kind}", zero) for name in ours]
                    stored[f"{stack}/layer_{layer}/{part}/{theirs}"] = np.concatenate(rows)
    stored["encoder/num_heads"] = np.array(dims.n_audio_head, np.int16)
    stored["decoder/num_heads"] = np.array(dims.n_text_head, np.int16)
    stored["decoder/pre_norm"] = np.array(1, np.int8)
    return stored


def ctranslate2_bytes(stored: Tensors) -> bytes:
    """A model.bin of binary version 6."""

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    types = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
    out = [struct.pack("<I", 6), string("WhisperSpec"), struct.pack("<II", 3, len(stored))]
    for name, tensor in sorted(stored.items()):
        out += [string(name), struct.pack("<B", tensor.ndim), struct.pack(f"<{tensor.ndim}I", *tensor.shape)]
        out += [struct.pack("<BI", types[tensor.dtype.name], tensor.nbytes), tensor.tobytes()]
    out += [struct.pack("<I", 1), string("decoder/projection/weight"), string("decoder/embeddings/weight")]
    return b"".join(out)


def write_ctranslate2(
    directory: Path, change: Callable[[Tensors], None] = lambda stored: None, tensors: Tensors | None = None
) -> None:
    """Write a CTranslate2 checkpoint, its tensors changed by `change` first."""
    stored = ctranslate2_tensors(tensors or random_tensors())
    change(stored)
    (directory / "model.bin").write_bytes(ctranslate2_bytes(stored))
    (directory / "config.json").write_text(json.dumps({"suppress_ids": SUPPRESSED}))
    write_tokenizer(directory)


def huggingface_tensors(tensors: Tensors) -> Tensors:
    """The same values under Hugging Face's names."""
    parts = {ours: theirs for theirs, ours in PARTS.items()}
    renamed = {}
    for name, tensor in tensors.items():
        stack, _, rest = name.partition(".")
        if rest.startswith("blocks."):
            _, layer, part = rest.split(".", 2)
            module, _, kind = part.rpartition(".")
            renamed[f"model.{stack}.layers.{layer}.{parts[module]}.{kind}"] = tensor
        else:
            for ours, theirs in (
                ("positional_embedding", "embed_positions.weight"),
                ("token_embedding", "embed_tokens"),
                ("ln_post", "layer_norm"),
                ("ln.", "layer_norm."),
            ):
                rest = rest.replace(ours, theirs)
            renamed[f"model.{stack}.{rest}"] = tensor
    return renamed


def huggingface_config(dims: ModelDimensions = DIMS) -> dict[str, object]:
    return {
        "num_mel_bins": dims.n_mels,
        "max_source_positions": dims.n_audio_ctx,
        "d_model": dims.n_audio_state,
        "encoder_attention_heads": dims.n_audio_head,
        "encoder_layers": dims.n_audio_layer,
        "vocab_size": dims.n_vocab,
        "max_target_positions": dims.n_text_ctx,
        "decoder_attention_heads": dims.n_text_head,
        "decoder_layers": dims.n_text_layer,
        "suppress_tokens": SUPPRESSED,
    }


def write_huggingface(
    directory: Path, change: Callable[[Tensors], None] = lambda renamed: None, tensors: Tensors | None = None, parts: int = 1
) -> None:
    """Write a Hugging Face checkpoint, in several files with an index where `parts` is more than one."""
    renamed = huggingface_tensors(tensors or random_tensors())
    change(renamed)
    (directory / "config.json").write_text(json.dumps(huggingface_config()))
    write_tokenizer(directory)
    if parts == 1:
        save_file(renamed, directory / "model.safetensors")
        return
    names = sorted(renamed)
    files = {name: f"model-{1 + i * parts // len(names):05}-of-{parts:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: renamed[name] for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
