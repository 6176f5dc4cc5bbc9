"""A piece of a shard in memory: mapped read-only, its pages read, seen as weights, unmapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from engine.errors import ShardCorrupt, ShardMissing, ShardNotMapped
from engine.quantization import Weight
from engine.shards.pieces import Part, Piece
from engine.tensor_file import TensorEntry

READ_BYTES = 512 << 10
"""Bytes read at a time; the next so many are asked for meanwhile. What is being read when it turns out not to be wanted."""

MADV_POPULATE_READ = 22
"""Linux 5.14: map pages and read them, and say so where that fails (madvise(2))."""

# By ctypes, which lets go of the interpreter lock: mmap.madvise keeps it while the storage is read, and so does NumPy where it
# touches fewer than 500 pages.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Span = tuple[int, int, int]
"""Number of the run, first byte counted from the file's begin, number of bytes."""


class Mapping:
    """A piece's runs of bytes, mapped, and the views into them.

    Raises
    ------
    ShardCorrupt, ShardMissing
        The file has changed its size, or cannot be mapped.
    ShardNotMapped
        There is no room for it.
    """

    def __init__(self, opened: BinaryIO, piece: Piece) -> None:
        self._opened, self._piece = opened, piece
        self._maps: list[mmap.mmap] = []
        self._weights: dict[Part, dict[str, Weight]] = {}
        self._check_size()
        try:
            for begin, end in piece.runs:
                run = mmap.mmap(opened.fileno(), end - begin, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=begin)
                self._maps.append(run)
        except (OSError, OverflowError) as error:  # no room, or more bytes than a size_t counts
            self.unmap()
            file = piece.file
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise ShardMissing(f"{file.file} cannot be mapped: {error.strerror}") from error
            raise ShardNotMapped(
                f"{file.file} of {file.n_bytes} bytes finds no room to be mapped: use residency stream, or smaller shards"
            ) from error

    def read(self, part: Part, is_wanted: Callable[[], bool]) -> None:
        """Bring a part's pages into memory, so that load is load and compute is compute.

        Gives up where `is_wanted`, asked before every `READ_BYTES`, says no.

        Raises
        ------
        ShardCorrupt, ShardMissing
            The file was cut short since it was mapped, or cannot be read.
        """
        spans = [
            (run, begin, min(READ_BYTES, end - begin))
            for run, (first, last) in enumerate(self._piece.runs)
            for start, end in part.ranges()
            if first <= start < last
            for begin in range(start - start % mmap.PAGESIZE, end, READ_BYTES)
        ]
        if not _has_populate():
            self._read_into_cache(spans, is_wanted)
            return
        self._advise(spans[0], mmap.MADV_WILLNEED)
        for span, following in zip_longest(spans, spans[1:]):
            if not is_wanted():
                return
            if following:
                self._advise(following, mmap.MADV_WILLNEED)
            if code := self._advise(span, MADV_POPULATE_READ):
                self._fail(os.strerror(code))

    def _advise(self, span: Span, advice: int) -> int:
        """madvise(2); 0, or errno."""
        run, begin, n_bytes = span
        address = np.frombuffer(self._maps[run], np.uint8).ctypes.data + begin - self._piece.runs[run][0]
        return ctypes.get_errno() if _libc.madvise(address, n_bytes, advice) else 0

    def _read_into_cache(self, spans: list[Span], is_wanted: Callable[[], bool]) -> None:
        """The same without Linux 5.14: read each span as a file, then touch its pages, which are in the page cache by then."""
        buffer = bytearray(READ_BYTES)
        for run, begin, n_bytes in spans:
            if not is_wanted():
                return
            try:
                n_read = os.preadv(self._opened.fileno(), [memoryview(buffer)[:n_bytes]], begin)
            except OSError as error:
                self._fail(str(error.strerror))
            if n_read < n_bytes:
                self._fail("it ended early")
            pages = np.frombuffer(self._maps[run], np.uint8, n_bytes, begin - self._piece.runs[run][0])
            pages[:: mmap.PAGESIZE].max()

    def _fail(self, reason: str) -> NoReturn:
        self._check_size()
        raise ShardMissing(f"{self._piece.file.file} cannot be read: {reason}")

    def _check_size(self) -> None:
        file = self._piece.file
        found = os.fstat(self._opened.fileno()).st_size
        if found != file.n_bytes:
            raise ShardCorrupt(f"{file.file} has {found} bytes, expected {file.n_bytes}")

    def weights(self, part: Part) -> dict[str, Weight]:
        """A part's tensors by name, as views; emptied when the mapping goes."""
        if part not in self._weights:
            self._weights[part] = {
                name: Weight(self._view(codes), None if scale is None else self._view(scale))  # type: ignore[arg-type]
                for name, (codes, scale) in part.tensors.items()
            }
        return self._weights[part]

    def _view(self, entry: TensorEntry) -> npt.NDArray[np.generic]:
        for (first, last), run in zip(self._piece.runs, self._maps, strict=True):
            if first <= entry.begin and entry.end <= last:
                return entry.view(memoryview(run), first)
        raise ValueError("the tensor is not one of this piece's")

    def unmap(self) -> None:
        """Drop the views and the mapping. A view still held elsewhere is a fault of this package: BufferError."""
        for weights in self._weights.values():
            weights.clear()
        for run in self._maps:
            run.close()

    def uncache(self) -> None:
        """Have the page cache drop what was mapped."""
        for begin, end in self._piece.runs:
            os.posix_fadvise(self._opened.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


@cache
def _has_populate() -> bool:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return bool(_libc.madvise(address, mmap.PAGESIZE, MADV_POPULATE_READ) == 0)
