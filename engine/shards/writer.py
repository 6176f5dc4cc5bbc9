"""A model directory written whole or not at all: each shard a tile at a time, the manifest last, then one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open

from engine.checkpoints.layout import expected_shapes
from engine.dims import ModelDimensions
from engine.errors import NotEnoughDisk, TargetNotAModel
from engine.shards.manifest import MANIFEST_FILE, Manifest, ShardFile, file_sha256
from engine.shards.store import VOCABULARY_TABLE
from engine.tensor_file import TensorFileWriter, TensorForms, plan_file

DEFAULT_LAYERS_PER_SHARD = 2
DISK_MARGIN_BYTES = 16 << 20
"""Left free beyond the shards' own size; the manifest comes out of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A shard to write: its place in the model, and the names of its tensors (without the scales of INT8 ones)."""

    file: str
    stack: str
    part: str
    start: int
    end: int
    names: tuple[str, ...]


def parts(dims: ModelDimensions, layers_per_shard: int) -> Iterator[Part]:
    """Cut a model into its shards, in the order the data travels; where a stack has fewer layers, one shard holds them all."""
    names = list(expected_shapes(dims))

    def group(stack: str, start: int, end: int) -> tuple[str, ...]:
        prefixes = tuple(f"{stack}.blocks.{layer}." for layer in range(start, end))
        return tuple(name for name in names if name.startswith(prefixes))

    stem = tuple(n for n in names if n.startswith(("encoder.conv", "encoder.positional")))
    yield Part("encoder-stem.safetensors", "encoder", "stem", 0, 0, stem)
    for stack, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        for start in range(0, n_layer, layers_per_shard):
            end = min(start + layers_per_shard, n_layer)
            members = group(stack, start, end)
            if stack == "encoder" and end == n_layer:  # used right after the last layer
                members += ("encoder.ln_post.weight", "encoder.ln_post.bias")
            yield Part(f"{stack}-{start:02}-{end:02}.safetensors", stack, "layers", start, end, members)
    embedding = tuple(n for n in names if n.startswith("decoder.") and not n.startswith("decoder.blocks."))
    yield Part("decoder-embedding.safetensors", "decoder", "embedding", 0, 0, embedding)
    yield Part("vocabulary.safetensors", "tokenizer", "vocabulary", 0, 0, tuple(sorted(VOCABULARY_TABLE)))


@dataclass(frozen=True, slots=True)
class ModelWriter:
    """What is written, and how its numbers are come by.

    Attributes
    ----------
    shards : the parts of the model, each with its tensors as they are stored
    fill : callable
        Given a writer and the name of a tensor (not of a scale): appends all bytes of it, and of its scale if it has one.
    report : callable
        Given one line per file written.
    """

    shards: Sequence[tuple[Part, TensorForms]]
    fill: Callable[[TensorFileWriter, str], None]
    report: Callable[[str], None]

    def write(self, directory: Path, describe: Callable[[], Manifest]) -> Manifest:
        """Write the model as `directory`, which appears whole or not at all.

        Files go to a hidden sibling, each flushed to disk, the manifest last, and the sibling takes the name in one
        rename. A model that was there before serves until then.

        Parameters
        ----------
        describe : callable
            The manifest without its files; asked once there is a place to write to, since telling a checkpoint's digest
            takes as long as writing.

        Raises
        ------
        TargetNotAModel
            `directory` holds something else than a model; it would be lost.
        NotEnoughDisk
            The file system has less room than the model needs, before or while writing.
        """
        _check_target(directory)
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._check_disk(directory.parent)
        partial.mkdir()
        try:
            manifest = self._write_files(partial, describe())
            _take_name(partial, directory)
        except OSError as error:
            raise NotEnoughDisk(f"writing the model failed: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return manifest

    def _check_disk(self, parent: Path) -> None:
        needed = DISK_MARGIN_BYTES
        for _, tensors in self.shards:
            needed += max(entry.end for entry in plan_file(tensors, _metadata("0" * 64))[1].entries.values())
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise NotEnoughDisk(f"the model needs {needed >> 20} MiB, the disk has {free >> 20} MiB free")

    def _write_files(self, partial: Path, manifest: Manifest) -> Manifest:
        files = []
        for part, tensors in self.shards:
            files.append(self._write_shard(partial / part.file, part, tensors, manifest.checkpoint))
            self.report(f"{part.file}: {files[-1].n_bytes / 1e6:.1f} MB")
        manifest = replace(manifest, files=tuple(files))
        path = partial / MANIFEST_FILE
        path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
        _flush(path)
        _flush(partial)
        return manifest

    def _write_shard(self, path: Path, part: Part, tensors: TensorForms, digest: str) -> ShardFile:
        with TensorFileWriter(path, tensors, _metadata(digest)) as writer:
            for name in part.names:
                self.fill(writer, name)
        path.chmod(0o644)
        with safe_open(path, "np"):  # the format's own library: it refuses a header that does not fit the file
            pass
        return ShardFile(
            file=part.file,
            stack=part.stack,
            part=part.part,
            start=part.start,
            end=part.end,
            n_bytes=path.stat().st_size,
            sha256=file_sha256(path),
            tensors={name: (entry.dtype, entry.shape) for name, entry in writer.header.entries.items()},
        )


def _metadata(digest: str) -> dict[str, str]:
    return {"checkpoint": digest}


def _check_target(directory: Path) -> None:
    """A model may be replaced, and an empty directory filled; nothing else may be lost."""
    if not directory.exists():
        return
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    strangers = {name for name in held if name != MANIFEST_FILE and not name.endswith(".safetensors")}
    if strangers or (held and MANIFEST_FILE not in held):
        raise TargetNotAModel(f"{directory.name} is there and holds something else than a model; name another directory")


def _take_name(partial: Path, directory: Path) -> None:
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    _flush(directory.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
