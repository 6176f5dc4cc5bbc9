"""A published checkpoint → a model directory of shards. Offline; holds one shard in memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from engine.byte_pairs import byte_order
from engine.checkpoints import Checkpoint
from engine.checkpoints.layout import expected_shapes
from engine.dims import BLOCK, Float32, ModelDimensions
from engine.errors import CheckpointInvalid, NotEnoughDisk, TargetNotAModel
from engine.quantization import quantize_blocks
from engine.shards.manifest import MANIFEST_FILE, WEIGHTS, Manifest, ShardFile, file_sha256
from engine.shards.store import SCALE_SUFFIX
from engine.tensor_file import read_header

DEFAULT_LAYERS_PER_SHARD = 2
TILE_ROWS = 4096
"""Rows of a matrix widened to float32 at a time."""
DISK_MARGIN_BYTES = 16 << 20
"""Left free beyond the model's own size."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard to write: its place in the model and OpenAI's names of its tensors."""

    file: str
    stack: str
    part: str
    start: int
    end: int
    names: tuple[str, ...]


def convert(
    checkpoint: Checkpoint,
    directory: Path,
    weights: str = "int8",
    report: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Write `checkpoint` as a model directory.

    The directory appears whole or not at all: files go to a hidden sibling, each flushed to disk, the manifest last, and
    the sibling takes the name in one rename. A model that was there before serves until then.

    Parameters
    ----------
    weights : str
        One of `WEIGHTS`, for the matrices of the blocks and the embedding. Convolutions and position encodings follow,
        but are float16 where the matrices are INT8; biases and norms are always float32.
    report : callable
        Given one line per file written.

    Raises
    ------
    CheckpointInvalid
        A weight is not finite.
    TargetNotAModel
        `directory` holds something else than a model; it would be lost.
    NotEnoughDisk
        The file system has less room than the model needs, before or while writing.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights is one of {', '.join(WEIGHTS)}")
    _check_target(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(directory.parent, checkpoint.dims, weights)
    partial.mkdir()
    try:
        manifest = _write(checkpoint, partial, weights, report)
        replaced = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)
        _flush(directory.parent)
    except (OSError, SafetensorError) as error:  # the library's error is the system's, in words
        raise NotEnoughDisk(f"writing the model failed: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def content_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's content: names, shapes, and values rounded to float16, then the vocabulary.

    OpenAI published float16 weights, so every faithful container of them has the same digest, whatever its form or width.
    """
    digest = hashlib.sha256()
    for name, shape in sorted(expected_shapes(checkpoint.dims).items()):
        digest.update(f"{name}{list(shape)}".encode())
        tensor = checkpoint.read(name)
        for start in range(0, len(tensor), TILE_ROWS):
            with np.errstate(over="ignore"):
                digest.update(tensor[start : start + TILE_ROWS].astype("<f2").tobytes())
    vocabulary = checkpoint.vocabulary
    digest.update(vocabulary.token_begins.astype("<u4").tobytes())
    digest.update(vocabulary.token_bytes.tobytes())
    digest.update(json.dumps(vocabulary.special.to_json(), sort_keys=True).encode())
    return digest.hexdigest()


def _write(checkpoint: Checkpoint, partial: Path, weights: str, report: Callable[[str], None]) -> Manifest:
    digest = content_digest(checkpoint)
    files = []
    for part in _parts(checkpoint.dims):
        tensors: dict[str, Array] = {}
        for name in part.names:
            tensors.update(_stored(name, checkpoint.read(name), weights))
        files.append(_save(partial, part, tensors, digest))
        report(f"{part.file}: {files[-1].n_bytes / 1e6:.1f} MB")
    vocabulary = checkpoint.vocabulary
    token_bytes, token_begins = vocabulary.token_bytes, vocabulary.token_begins
    table: dict[str, Array] = {"token_bytes": token_bytes, "token_begins": token_begins}
    table["token_order"] = byte_order(token_bytes.tobytes(), token_begins)
    files.append(_save(partial, _Part("vocabulary.safetensors", "tokenizer", "vocabulary", 0, 0, ()), table, digest))
    manifest = Manifest(
        dims=checkpoint.dims,
        checkpoint=digest,
        weights=weights,
        source={"format": checkpoint.format, "sha256": {path.name: file_sha256(path) for path in checkpoint.files}},
        special=vocabulary.special,
        alignment_heads=checkpoint.alignment_heads,
        files=tuple(files),
    )
    path = partial / MANIFEST_FILE
    path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
    _flush(path)
    _flush(partial)
    return manifest


def _parts(dims: ModelDimensions, layers_per_shard: int = DEFAULT_LAYERS_PER_SHARD) -> Iterator[_Part]:
    names = list(expected_shapes(dims))

    def group(stack: str, start: int, end: int) -> tuple[str, ...]:
        prefixes = tuple(f"{stack}.blocks.{layer}." for layer in range(start, end))
        return tuple(name for name in names if name.startswith(prefixes))

    stem = tuple(n for n in names if n.startswith(("encoder.conv", "encoder.positional")))
    yield _Part("encoder-stem.safetensors", "encoder", "stem", 0, 0, stem)
    for stack, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        for start in range(0, n_layer, layers_per_shard):
            end = min(start + layers_per_shard, n_layer)
            members = group(stack, start, end)
            if stack == "encoder" and end == n_layer:  # used right after the last layer
                members += ("encoder.ln_post.weight", "encoder.ln_post.bias")
            yield _Part(f"{stack}-{start:02}-{end:02}.safetensors", stack, "layers", start, end, members)
    embedding = tuple(n for n in names if n.startswith("decoder.") and not n.startswith("decoder.blocks."))
    yield _Part("decoder-embedding.safetensors", "decoder", "embedding", 0, 0, embedding)


def _is_matrix(name: str, rank: int) -> bool:
    return rank == 2 and not name.endswith("positional_embedding")


def _stored(name: str, tensor: Array, weights: str) -> dict[str, Array]:
    """The tensor as it goes to disk: itself, or its codes and scales."""
    finite = all(np.isfinite(tensor[i : i + TILE_ROWS]).all() for i in range(0, len(tensor), TILE_ROWS))
    if not finite:
        raise CheckpointInvalid(f"{name} holds values that are no finite number")
    if tensor.ndim == 1 or weights == "f32":
        return {name: tensor.astype(np.float32)}
    if weights == "f16" or not _is_matrix(name, tensor.ndim):
        half = tensor.astype(np.float16)
        if not np.isfinite(half).all():
            raise CheckpointInvalid(f"{name} has values beyond float16; convert with --weights f32")
        return {name: half}
    rows, cols = tensor.shape
    codes = np.empty((rows, cols), np.int8)
    scale: Float32 = np.empty((rows, cols // BLOCK), np.float32)
    for start in range(0, rows, TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        codes[tile], scale[tile] = quantize_blocks(tensor[tile].astype(np.float32))
    return {name: codes, name + SCALE_SUFFIX: scale}


def _save(partial: Path, part: _Part, tensors: dict[str, Array], digest: str) -> ShardFile:
    path = partial / part.file
    # The library orders tensors by element size, so every offset is aligned.
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path, metadata={"checkpoint": digest})
    path.chmod(0o644)
    _flush(path)
    entries = read_header(path).entries
    return ShardFile(
        file=part.file,
        stack=part.stack,
        part=part.part,
        start=part.start,
        end=part.end,
        n_bytes=path.stat().st_size,
        sha256=file_sha256(path),
        tensors={name: (entry.dtype, entry.shape) for name, entry in entries.items()},
    )


def _check_target(directory: Path) -> None:
    """A model may be replaced, and an empty directory filled; nothing else may be lost."""
    if not directory.exists():
        return
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    strangers = {name for name in held if name != MANIFEST_FILE and not name.endswith(".safetensors")}
    if strangers or (held and MANIFEST_FILE not in held):
        raise TargetNotAModel(f"{directory.name} is there and holds something else than a model; name another directory")


def _check_disk(parent: Path, dims: ModelDimensions, weights: str) -> None:
    itemsize = {"f32": 4.0, "f16": 2.0, "int8": 1.0 + 4 / BLOCK}[weights]
    numbers = sum(int(np.prod(shape)) for shape in expected_shapes(dims).values())
    needed = int(numbers * itemsize) + DISK_MARGIN_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise NotEnoughDisk(f"the model needs {needed >> 20} MiB, the disk has {free >> 20} MiB free")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
