"""A checkpoint → a model directory of shards. Offline; holds one tensor in memory, of its stored form a tile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from engine.byte_pairs import byte_order
from engine.checkpoints import Checkpoint
from engine.checkpoints.layout import expected_shapes
from engine.dims import BLOCK, Float32
from engine.errors import CheckpointInvalid
from engine.quantization import quantize_blocks
from engine.shards.manifest import SCALE_SUFFIX, WEIGHTS, Manifest, file_sha256
from engine.shards.precision import Keep, check_keep, stored_dtype
from engine.shards.writer import DEFAULT_LAYERS_PER_SHARD, ModelWriter, parts
from engine.tensor_file import DTYPES, TensorFileWriter, TensorForms

TILE_NUMBERS = 1 << 20
"""Numbers of a tensor worked on at a time: 4 MB as float32."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def convert(
    checkpoint: Checkpoint,
    directory: Path,
    weights: str = "int8",
    keep: Keep | None = None,
    layers_per_shard: int = DEFAULT_LAYERS_PER_SHARD,
    report: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Write `checkpoint` as a model directory; it appears whole or not at all (`ModelWriter.write`).

    Parameters
    ----------
    weights : str
        One of `WEIGHTS`, for the matrices of the blocks and the embedding. Convolutions and position encodings follow,
        but are float16 where the matrices are INT8; biases and norms are always float32.
    keep : dict of layer → one of `WEIGHTS`
        Layers whose tensors are stored as finer `weights` would have them.
    layers_per_shard : int, at least 1
    report : callable
        Given one line per file written.

    Raises
    ------
    InvalidOptions
        `keep` names no layer of this model, or a dtype that is no finer.
    CheckpointInvalid
        A weight is not finite, or beyond the dtype that it is stored in.
    TargetNotAModel, NotEnoughDisk
        As `ModelWriter.write`.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights is one of {', '.join(WEIGHTS)}")
    kept = keep or {}
    check_keep(kept, weights, checkpoint.dims)
    table = _vocabulary_table(checkpoint)
    shapes = expected_shapes(checkpoint.dims) | {name: values.shape for name, values in table.items()}
    dtypes = {name: stored_dtype(name, len(shape), weights, kept) for name, shape in shapes.items() if name not in table}
    dtypes |= {name: "U8" if values.dtype == np.uint8 else "U32" for name, values in table.items()}

    def fill(writer: TensorFileWriter, name: str) -> None:
        _append(writer, name, table[name] if name in table else checkpoint.read(name), dtypes[name])

    def describe() -> Manifest:
        return Manifest(
            dims=checkpoint.dims,
            checkpoint=content_digest(checkpoint),
            weights=weights,
            source={"format": checkpoint.format, "sha256": {path.name: file_sha256(path) for path in checkpoint.files}},
            special=checkpoint.vocabulary.special,
            alignment_heads=checkpoint.alignment_heads,
            files=(),
        )

    def forms(names: tuple[str, ...]) -> TensorForms:
        plain = {name: (dtypes[name], shapes[name]) for name in names}
        scaled = [name for name in names if dtypes[name] == "I8"]
        return plain | {name + SCALE_SUFFIX: ("F32", (shapes[name][0], shapes[name][1] // BLOCK)) for name in scaled}

    shards = [(part, forms(part.names)) for part in parts(checkpoint.dims, layers_per_shard)]
    return ModelWriter(shards, fill, report).write(directory, describe)


def content_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's content: names, shapes, and values rounded to float16, then the vocabulary.

    OpenAI published float16 weights, so every faithful container of them has the same digest, whatever its form or width.
    """
    digest = hashlib.sha256()
    for name, shape in sorted(expected_shapes(checkpoint.dims).items()):
        digest.update(f"{name}{list(shape)}".encode())
        for tile in _tiles(checkpoint.read(name)):
            with np.errstate(over="ignore"):
                digest.update(tile.astype("<f2").tobytes())
    vocabulary = checkpoint.vocabulary
    digest.update(vocabulary.token_begins.astype("<u4").tobytes())
    digest.update(vocabulary.token_bytes.tobytes())
    digest.update(json.dumps(vocabulary.special.to_json(), sort_keys=True).encode())
    return digest.hexdigest()


def _vocabulary_table(checkpoint: Checkpoint) -> dict[str, Array]:
    token_bytes, token_begins = checkpoint.vocabulary.token_bytes, checkpoint.vocabulary.token_begins
    order = byte_order(token_bytes.tobytes(), token_begins)
    return {"token_bytes": token_bytes, "token_begins": token_begins, "token_order": order}


def _tiles(tensor: Array) -> Iterator[Array]:
    """The tensor's rows, about `TILE_NUMBERS` numbers of them at a time, as views."""
    rows = max(1, TILE_NUMBERS * len(tensor) // max(1, tensor.size))
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]


def _append(writer: TensorFileWriter, name: str, tensor: Array, dtype: str) -> None:
    """Write the tensor as it goes to disk: itself in `dtype`, or its codes and scales."""
    for tile in _tiles(tensor):
        if not np.isfinite(tile).all():
            raise CheckpointInvalid(f"{name} holds values that are no finite number")
        if dtype == "I8":
            single: Float32 = tile.astype(np.float32)
            codes, scale = quantize_blocks(single)
            writer.append(name, codes.data)
            writer.append(name + SCALE_SUFFIX, scale.data)
            continue
        with np.errstate(over="ignore"):  # the next line finds it
            stored = tile.astype(DTYPES[dtype])
        if dtype == "F16" and not np.isfinite(stored).all():
            raise CheckpointInvalid(f"{name} has values beyond float16; convert with --weights f32")
        writer.append(name, np.ascontiguousarray(stored).data)
