"""`Residency`: which weights stay mapped, how the others come and go, and the bytes that takes."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

from engine.dims import TILE_ROWS
from engine.shards.manifest import SCALE_SUFFIX, Manifest, ShardFile
from engine.tensor_file import DTYPES

TOKEN_EMBEDDING = "decoder.token_embedding.weight"  # noqa: S105 (a tensor's name)
"""The one tensor that is streamed in blocks of rows: it is used whole for a token's logits, and a row of it to embed one."""

RESIDENCIES = ("resident", "stream")
"""Ready-made plans: `resident` pins everything; `stream` pins nothing and reads ahead."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The plan that a shard store follows.

    Attributes
    ----------
    pinned : frozenset of str
        Names of the files that are mapped once, when they are first needed, and kept. The others are streamed: mapped, read
        and unmapped again with every pass over them.
    slots : int
        Streamed pieces (a shard, or a block of the embedding) that are mapped at a time. 2: one is computed with while a
        thread reads the next one; more: so many are read ahead; 1: nothing is, arithmetic waits for every piece.
    embedding_rows : int
        Rows in a block of the token embedding where its file is streamed: a multiple of `TILE_ROWS`. The small tensors
        of that file stay mapped.
    """

    pinned: frozenset[str]
    slots: int
    embedding_rows: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots are at least 1, not {self.slots}")
        if self.embedding_rows < 1 or self.embedding_rows % TILE_ROWS:
            raise ValueError(f"embedding_rows are a multiple of {TILE_ROWS}, not {self.embedding_rows}")

    def weight_bytes(self, manifest: Manifest) -> int:
        """The most bytes of weights that are ever mapped: those pinned, and as many slots as the largest streamed piece needs.

        Raises
        ------
        ValueError
            A pinned file is not the manifest's.
        """
        files = {file.file: file for file in manifest.files if file.stack != "tokenizer"}
        if strangers := self.pinned - set(files):
            raise ValueError(f"pinned, but not in the manifest: {', '.join(sorted(strangers))}")
        pinned, largest = sum(_whole_pages(files[name].n_bytes) for name in self.pinned), 0
        for name in set(files) - self.pinned:
            file = files[name]
            if file.part == "embedding":
                pinned += _beside_the_table_bytes(file)
                largest = max(largest, block_bytes(file, self.embedding_rows))
            else:
                largest = max(largest, _whole_pages(file.n_bytes))
        return pinned + self.slots * largest


def named(name: str, manifest: Manifest) -> Residency:
    """One of `RESIDENCIES` for this model.

    Raises
    ------
    ValueError
        There is none of that name.
    """
    if name not in RESIDENCIES:
        raise ValueError(f"residency is one of {', '.join(RESIDENCIES)}")
    files = [file for file in manifest.files if file.stack != "tokenizer"]
    (embedding,) = (file for file in files if file.part == "embedding")
    # As large as the largest shard at most: then no block decides how much memory the slots take.
    largest = max(file.n_bytes for file in files if file is not embedding)
    rows = TILE_ROWS
    while rows < manifest.dims.n_vocab and block_bytes(embedding, rows + TILE_ROWS) <= largest:
        rows += TILE_ROWS
    if name == "resident":
        return Residency(frozenset(file.file for file in files), 1, rows)
    return Residency(frozenset(), 2, rows)


def block_bytes(embedding: ShardFile, rows: int) -> int:
    """The most bytes that a block of so many rows of the token embedding takes mapped: codes and scales lie apart."""
    total = 0
    for name in (TOKEN_EMBEDDING, TOKEN_EMBEDDING + SCALE_SUFFIX):
        if name in embedding.tensors:
            total += _apart(_tensor_bytes(embedding, name) // embedding.tensors[name][1][0] * rows)
    return total


def _beside_the_table_bytes(embedding: ShardFile) -> int:
    table = (TOKEN_EMBEDDING, TOKEN_EMBEDDING + SCALE_SUFFIX)
    return sum(_apart(_tensor_bytes(embedding, name)) for name in embedding.tensors if name not in table)


def _tensor_bytes(file: ShardFile, name: str) -> int:
    dtype, shape = file.tensors[name]
    return math.prod(shape) * DTYPES[dtype].itemsize


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _apart(n_bytes: int) -> int:
    """Whole pages of bytes that may begin anywhere in a page."""
    return _whole_pages(n_bytes) + mmap.PAGESIZE
