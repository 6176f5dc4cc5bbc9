"""Shards as they are needed: handed out as views of mappings, which stay or come and go as a plan says."""

from __future__ import annotations

import os
import resource
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from engine.checkpoints.layout import check_layout
from engine.dims import BLOCK, ModelDimensions
from engine.errors import CheckpointInvalid, ManifestInvalid, ShardCorrupt, ShardMissing
from engine.quantization import Weight
from engine.shards.manifest import MANIFEST_FILE, SCALE_SUFFIX, Manifest, ShardFile, open_verified, read_manifest
from engine.shards.pieces import LayerKey, Piece, Place, cut, layer_of
from engine.shards.prefetch import Orders, Reading, Stream
from engine.shards.residency import Residency, named
from engine.tensor_file import DTYPES, TensorEntry, TensorFileHeader
from engine.timings import LayerTimings
from engine.tokenizer import Vocabulary

VOCABULARY_TABLE = {"token_bytes", "token_begins", "token_order"}


class ShardStore:
    """The weights of one model directory.

    Parameters
    ----------
    directory : Path
    residency : Residency, or one of `RESIDENCIES`
        The plan to follow.

    Raises
    ------
    ModelError
        The directory's files are not what its manifest says; every file's SHA-256 is checked here.
    """

    def __init__(self, directory: Path, residency: Residency | str = "resident") -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        check_tensors(self.manifest)
        self.residency = named(residency, self.manifest) if isinstance(residency, str) else residency
        # Kept open: what was verified is what is mapped later, whatever takes its name meanwhile.
        self._opened: dict[str, tuple[BinaryIO, TensorFileHeader]] = {}
        self._pinned: dict[Piece, Reading] = {}
        try:
            # What is needed first is read last: under a limit that does not hold the whole model, it is still there.
            for file in reversed(self.manifest.files):
                self._opened[file.file] = open_verified(directory, self.manifest, file)
        except BaseException:
            _close_all(self._opened)
            raise
        self._cut = cut(self.manifest, {name: header for name, (_, header) in self._opened.items()}, self.residency)
        # Nothing refers back to the store: one that nobody closes goes at once, and not when the collector comes.
        self._file_of = partial(_file_of, self._opened)
        self._stream = Stream(self._cut, self.residency.slots, self._file_of)
        # Also where nobody calls `close`.
        self._close_files = weakref.finalize(self, _close_all, self._opened, self._stream.orders)

    @property
    def dims(self) -> ModelDimensions:
        return self.manifest.dims

    def layer(self, stack: str, layer: str, timings: LayerTimings) -> AbstractContextManager[dict[str, Weight]]:
        """Weights of one layer, by name within the layer, for the length of a `with` block.

        Added to `timings` are the seconds that mapping the shard and reading the layer's pages took (load), those that this
        thread stood still for it (wait), and those of the block itself (compute). Views must not outlive the block: they
        may be unmapped at its end. The decoder's `embedding` lacks the token embedding, which comes in `embedding_blocks`.

        Raises
        ------
        ShardMissing, ShardCorrupt
            The file has gone or changed its size since the store was opened.
        ShardNotMapped
            There is no room for it.
        """
        return self._use(self._cut.layers[stack, layer], timings)

    def embedding_blocks(self, timings: LayerTimings) -> Iterator[tuple[slice, dict[str, Weight]]]:
        """The token embedding, block of rows after block of rows: which rows, and a layer's weights as `layer` gives them.

        What `layer` says holds for every block; together they count as one pass over the layer `embedding`.
        """
        for start, stop, place in self._cut.blocks:
            with self._use(place, timings) as weights:
                yield slice(start, stop), weights

    def token_rows(self, tokens: Sequence[int], timings: LayerTimings) -> Weight:
        """Copies of some rows of the token embedding, read from its file: nothing need be mapped for them.

        Raises
        ------
        ShardMissing, ShardCorrupt
            The file cannot be read, or has been cut short.
        """
        started = time.perf_counter()
        file, (codes, scale) = self._cut.table
        rows = Weight(
            self._rows(file, codes, tokens),
            None if scale is None else self._rows(file, scale, tokens),  # type: ignore[arg-type]
        )
        seconds = time.perf_counter() - started
        timings.add_load("decoder", "embedding", seconds, 0)  # of the pass whose load counts already
        timings.add_wait("decoder", "embedding", seconds, 0)
        return rows

    def _rows(self, file: ShardFile, entry: TensorEntry, rows: Sequence[int]) -> npt.NDArray[np.generic]:
        row_bytes = (entry.end - entry.begin) // entry.shape[0]
        descriptor = self._opened[file.file][0].fileno()
        try:
            data = b"".join(os.pread(descriptor, row_bytes, entry.begin + row * row_bytes) for row in rows)
        except OSError as error:
            raise ShardMissing(f"{file.file} cannot be read: {error.strerror}") from error
        if len(data) < row_bytes * len(rows):
            raise ShardCorrupt(f"{file.file} ends before its last row, expected {file.n_bytes} bytes")
        return np.frombuffer(data, DTYPES[entry.dtype]).reshape(len(rows), entry.shape[1])

    @contextmanager
    def _use(self, place: Place, timings: LayerTimings) -> Iterator[dict[str, Weight]]:
        piece, number = place
        part = piece.parts[number]
        asked = time.perf_counter()
        reading = self._pinned_reading(piece) if piece.is_pinned else self._stream.ask(piece)
        try:
            weights = reading.take(number, asked, timings)
        except BaseException:
            self._stream.release(reading)
            raise
        reading.is_in_use = True
        faults = _major_faults()
        started = time.perf_counter()
        yield weights
        timings.add_compute(*part.key, time.perf_counter() - started, part.passes)
        timings.compute_major_faults += _major_faults() - faults
        reading.is_in_use = False
        if number == len(piece.parts) - 1:
            self._stream.release(reading)

    def _pinned_reading(self, piece: Piece) -> Reading:
        if piece not in self._pinned:
            self._pinned[piece] = Reading(piece, self._file_of(piece))
        return self._pinned[piece]

    def evict(self) -> None:
        """Unmap what is streamed, and stop reading ahead: no layer will be asked for soon."""
        self._stream.stop()

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, copied out of its file."""
        table = self._vocabulary_table("token_bytes", "token_begins")
        token_bytes, token_begins = table["token_bytes"].astype(np.uint8), table["token_begins"].astype(np.uint32)
        special = self.manifest.special
        ends_rise = np.all(token_begins[1:] >= token_begins[:-1])
        if len(token_begins) != special.eot + 1 or token_begins[-1] != len(token_bytes) or not ends_rise:
            raise ShardCorrupt(f"vocabulary.safetensors is no table of {special.eot} tokens")
        return Vocabulary(token_bytes, token_begins, special)

    def token_order(self) -> npt.NDArray[np.uint32]:
        """The order of the vocabulary's tokens by their bytes, uint32 [eot], read from its file."""
        return self._vocabulary_table("token_order")["token_order"].astype(np.uint32)

    def _vocabulary_table(self, *names: str) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the vocabulary's tensors."""
        (file,) = (file for file in self.manifest.files if file.stack == "tokenizer")
        opened, header = self._opened[file.file]
        opened.seek(0)
        data = memoryview(opened.read())
        return {name: np.array(header.entries[name].view(data)) for name in names}

    def close(self) -> None:
        """Unmap everything and close the files; the store cannot be used any more."""
        self._stream.close()
        while self._pinned:
            self._pinned.popitem()[1].unmap()
        self._close_files()


def _file_of(opened: dict[str, tuple[BinaryIO, TensorFileHeader]], piece: Piece) -> BinaryIO:
    return opened[piece.file.file][0]


def _major_faults() -> int:
    """Pages that this thread has waited for because they were not in memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _close_all(opened: dict[str, tuple[BinaryIO, TensorFileHeader]], orders: Orders | None = None) -> None:
    if orders is not None:
        orders.put(None)
    while opened:
        opened.popitem()[1][0].close()


def check_tensors(manifest: Manifest) -> None:
    """The tensors are those of the dimensions, a layer's in one file, in dtypes that the kernels know.

    Raises
    ------
    ManifestInvalid
    """
    shapes = {}
    homes: dict[LayerKey, ShardFile] = {}
    for file in manifest.files:
        if file.stack == "tokenizer":
            if set(file.tensors) != VOCABULARY_TABLE:
                raise ManifestInvalid(f"{file.file} holds other tensors than {', '.join(sorted(VOCABULARY_TABLE))}")
        else:
            _check_dtypes(file)
            for key in {layer_of(name)[0] for name in file.tensors}:
                if homes.setdefault(key, file) is not file:
                    raise ManifestInvalid(f"{file.file} holds a part of {'.'.join(key)}, and {homes[key].file} another")
            shapes.update({n: shape for n, (_, shape) in file.tensors.items() if not n.endswith(SCALE_SUFFIX)})
    try:
        check_layout(shapes, manifest.dims)
    except CheckpointInvalid as error:
        raise ManifestInvalid(f"{MANIFEST_FILE}: {error}") from error
    for key in (("decoder", "embedding"), ("decoder", "ln")):
        if homes[key].part != "embedding":
            raise ManifestInvalid(f"{homes[key].file} holds {'.'.join(key)}, which belongs to the embedding's file")


def _check_dtypes(file: ShardFile) -> None:
    """INT8 tensors have their scales, in blocks; scales stand beside nothing else; vectors are float32."""
    for name, (dtype, shape) in file.tensors.items():
        if name.endswith(SCALE_SUFFIX):
            if file.tensors.get(name.removesuffix(SCALE_SUFFIX), ("", ()))[0] != "I8":
                raise ManifestInvalid(f"{file.file}: {name} scales nothing")
        elif dtype == "I8":
            expected = ("F32", (shape[0], shape[1] // BLOCK)) if len(shape) == 2 and shape[1] % BLOCK == 0 else None
            if file.tensors.get(name + SCALE_SUFFIX) != expected:
                raise ManifestInvalid(f"{file.file}: {name} is INT8 without a scale per block of {BLOCK}")
        elif dtype not in ("F32", "F16") or (len(shape) == 1 and dtype != "F32"):
            raise ManifestInvalid(f"{file.file}: {name} is {dtype}; expected F32, or F16 or I8 for a matrix")
