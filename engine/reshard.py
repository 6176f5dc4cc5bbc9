"""A model directory → the same model cut into other shards, without its checkpoint. Offline; holds a block of bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from engine.errors import NameTaken, ShardCorrupt, ShardMissing
from engine.shards.manifest import SCALE_SUFFIX, Manifest, open_verified, read_manifest
from engine.shards.store import check_tensors
from engine.shards.writer import ModelWriter, parts
from engine.tensor_file import TensorEntry, TensorFileWriter

COPY_BYTES = 1 << 20
"""Bytes of a tensor copied at a time."""


def reshard(
    source: Path, directory: Path, layers_per_shard: int, report: Callable[[str], None] = lambda line: None
) -> Manifest:
    """Write the model in `source` as `directory` with other shards; it appears whole or not at all (`ModelWriter.write`).

    Every tensor keeps its bytes, and the manifest what it says of the checkpoint: this writes what `convert` would have.

    Parameters
    ----------
    layers_per_shard : int, at least 1
    report : callable
        Given one line per file written.

    Raises
    ------
    NameTaken
        `directory` is `source`, which other processes may be reading by its manifest.
    ModelError
        `source` does not hold a whole, unaltered model: all of it is verified before anything is written.
    TargetNotAModel, NotEnoughDisk
        As `ModelWriter.write`.
    """
    manifest = read_manifest(source)
    check_tensors(manifest)
    if directory.exists() and directory.samefile(source):
        raise NameTaken(f"{directory.name} is the model to be cut; name another directory")
    with ExitStack() as opened_files:
        sources: dict[str, tuple[BinaryIO, TensorEntry, str]] = {}
        for file in manifest.files:
            opened, header = open_verified(source, manifest, file)
            opened_files.enter_context(opened)
            sources |= {name: (opened, entry, file.file) for name, entry in header.entries.items()}

        def stored(name: str) -> list[str]:
            return [stored for stored in (name, name + SCALE_SUFFIX) if stored in sources]

        def fill(writer: TensorFileWriter, name: str) -> None:
            for stored_name in stored(name):
                _copy(writer, stored_name, *sources[stored_name])

        shards = [
            (part, {name: (sources[name][1].dtype, sources[name][1].shape) for own in part.names for name in stored(own)})
            for part in parts(manifest.dims, layers_per_shard)
        ]
        return ModelWriter(shards, fill, report).write(directory, lambda: manifest)


def _copy(writer: TensorFileWriter, name: str, opened: BinaryIO, entry: TensorEntry, file_name: str) -> None:
    for begin in range(entry.begin, entry.end, COPY_BYTES):
        n_bytes = min(COPY_BYTES, entry.end - begin)
        try:
            opened.seek(begin)
            block = opened.read(n_bytes)
        except OSError as error:  # not the fault of the disk that is written to
            raise ShardMissing(f"{file_name} cannot be read: {error.strerror}") from error
        if len(block) != n_bytes:
            raise ShardCorrupt(f"{file_name} was cut short after it was verified")
        writer.append(name, memoryview(block))
