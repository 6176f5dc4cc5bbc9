"""Shards as they are needed: mapped read-only, handed out as views, unmapped when the next one comes."""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from engine.checkpoints.layout import check_layout
from engine.dims import BLOCK, ModelDimensions
from engine.errors import CheckpointInvalid, ManifestInvalid, ShardCorrupt, ShardMissing, ShardNotMapped
from engine.quantization import Weight
from engine.shards.manifest import MANIFEST_FILE, Manifest, ShardFile, open_verified, read_manifest
from engine.tensor_file import TensorFileHeader
from engine.timings import LayerTimings
from engine.tokenizer import Vocabulary

RESIDENCIES = ("resident", "stream")
"""`stream` keeps one shard mapped at a time; `resident` keeps every shard mapped once it was needed."""

SCALE_SUFFIX = ".scale"
"""A tensor `x` of INT8 codes stands beside `x.scale`."""

VOCABULARY_TABLE = {"token_bytes", "token_begins", "token_order"}

LayerKey = tuple[str, str]
"""(stack, layer): layer is a number, or `stem`, `ln_post` (encoder), `embedding` (decoder)."""


def layer_of(tensor: str) -> tuple[LayerKey, str]:
    """Which layer a tensor of OpenAI's name belongs to, and its name within that layer."""
    stack, part, rest = [*tensor.split(".", 2), ""][:3]
    if part == "blocks":
        layer, _, rest = rest.partition(".")
        return (stack, layer), rest
    if stack == "decoder":
        return (stack, "embedding"), tensor.removeprefix("decoder.")
    return (stack, "ln_post" if part == "ln_post" else "stem"), tensor.removeprefix("encoder.")


class _MappedShard:
    """One mapping and the views into it, by layer and name."""

    def __init__(self, opened: BinaryIO, file: ShardFile, header: TensorFileHeader) -> None:
        found = os.fstat(opened.fileno()).st_size
        if found != file.n_bytes:
            raise ShardCorrupt(f"{file.file} has {found} bytes, expected {file.n_bytes}")
        try:
            self._map = mmap.mmap(opened.fileno(), file.n_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except (OSError, OverflowError) as error:  # no room, or more bytes than a size_t counts
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise ShardMissing(f"{file.file} cannot be mapped: {error.strerror}") from error
            raise ShardNotMapped(
                f"{file.file} of {file.n_bytes} bytes finds no room to be mapped: use residency stream, or smaller shards"
            ) from error
        self.layers: dict[LayerKey, dict[str, Weight]] = {}
        self._ranges: dict[LayerKey, list[list[int]]] = {}  # bytes [begin, end) not read yet
        buffer = memoryview(self._map)
        for name, entry in header.entries.items():
            if name.endswith(SCALE_SUFFIX):
                continue
            key, local = layer_of(name)
            scale = header.entries.get(name + SCALE_SUFFIX)
            weight = Weight(entry.view(buffer), None if scale is None else scale.view(buffer))  # type: ignore[arg-type]
            self.layers.setdefault(key, {})[local] = weight
        buffer.release()
        for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
            ranges = self._ranges.setdefault(layer_of(name)[0], [])
            if ranges and ranges[-1][1] == entry.begin:
                ranges[-1][1] = entry.end
            else:
                ranges.append([entry.begin, entry.end])

    def read(self, key: LayerKey) -> bool:
        """Bring a layer's pages into memory, so that load is load and compute is compute; False if that is done."""
        ranges = self._ranges.pop(key, [])
        for begin, end in ranges:
            first = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, end - first)
        for begin, end in ranges:
            pages = np.frombuffer(self._map, np.uint8, end - begin, begin)[:: mmap.PAGESIZE]
            int(pages.sum(dtype=np.uint8))
            del pages  # or the mapping could not be closed
        return bool(ranges)

    def unmap(self) -> None:
        """Drop the views and the mapping. A view still held elsewhere is a fault of this package: BufferError."""
        for weights in self.layers.values():
            weights.clear()
        self.layers.clear()
        self._map.close()


class ShardStore:
    """The weights of one model directory.

    Parameters
    ----------
    directory : Path
    residency : str
        One of `RESIDENCIES`.

    Raises
    ------
    ModelError
        The directory's files are not what its manifest says; every file's SHA-256 is checked here.
    """

    def __init__(self, directory: Path, residency: str = "resident") -> None:
        if residency not in RESIDENCIES:
            raise ValueError(f"residency is one of {', '.join(RESIDENCIES)}")
        self.directory = directory
        self.residency = residency
        self.manifest = read_manifest(directory)
        check_tensors(self.manifest)
        self._mapped: dict[str, _MappedShard] = {}
        self._file_of: dict[LayerKey, ShardFile] = {}
        # Kept open: what was verified is what is mapped later, whatever takes its name meanwhile.
        self._opened: dict[str, tuple[BinaryIO, TensorFileHeader]] = {}
        self._close_files = weakref.finalize(self, _close_all, self._opened)  # also where nobody calls `close`
        try:
            for file in self.manifest.files:
                self._opened[file.file] = open_verified(directory, self.manifest, file)
                if file.stack != "tokenizer":
                    self._file_of |= {layer_of(name)[0]: file for name in file.tensors}
        except BaseException:
            self.close()
            raise

    @property
    def dims(self) -> ModelDimensions:
        return self.manifest.dims

    @contextmanager
    def layer(self, stack: str, layer: str, timings: LayerTimings) -> Iterator[dict[str, Weight]]:
        """Weights of one layer, by name within the layer, for the length of a `with` block.

        Mapping the shard and reading the layer's pages is added to `timings` as its load and its wait, the block itself
        as its compute. Views must not outlive the block: the next layer may unmap them.

        Raises
        ------
        ShardMissing, ShardCorrupt
            The file has gone or changed its size since the store was opened.
        ShardNotMapped
            There is no room for it.
        """
        started = time.perf_counter()
        shard = self._map(self._file_of[stack, layer], timings)
        loaded = shard.read((stack, layer))
        ready = time.perf_counter()
        if loaded:
            timings.add_load(stack, layer, ready - started)
            timings.add_wait(stack, layer, ready - started)  # nothing is read ahead: all of it stands in the way
        yield shard.layers[stack, layer]
        timings.add_compute(stack, layer, time.perf_counter() - ready)

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
        self._unmap_all()
        self._close_files()

    def _unmap_all(self) -> None:
        while self._mapped:
            self._mapped.popitem()[1].unmap()

    def _map(self, file: ShardFile, timings: LayerTimings) -> _MappedShard:
        shard = self._mapped.get(file.file)
        if shard is not None:
            return shard
        if self.residency == "stream":
            self._unmap_all()
        opened, header = self._opened[file.file]
        shard = _MappedShard(opened, file, header)
        self._mapped[file.file] = shard
        timings.add_shard(file.n_bytes)
        return shard


def _close_all(opened: dict[str, tuple[BinaryIO, TensorFileHeader]]) -> None:
    while opened:
        opened.popitem()[1][0].close()


def check_tensors(manifest: Manifest) -> None:
    """The tensors are those of the dimensions, in dtypes that the kernels know.

    Raises
    ------
    ManifestInvalid
    """
    shapes = {}
    for file in manifest.files:
        if file.stack == "tokenizer":
            if set(file.tensors) != VOCABULARY_TABLE:
                raise ManifestInvalid(f"{file.file} holds other tensors than {', '.join(sorted(VOCABULARY_TABLE))}")
        else:
            _check_dtypes(file)
            shapes.update({n: shape for n, (_, shape) in file.tensors.items() if not n.endswith(SCALE_SUFFIX)})
    try:
        check_layout(shapes, manifest.dims)
    except CheckpointInvalid as error:
        raise ManifestInvalid(f"{MANIFEST_FILE}: {error}") from error


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
