"""`.safetensors` files: a header validated whole before a tensor is touched, and a writer that holds no whole tensor.

The `safetensors` library validates too, but copies what it reads and wants all it writes at once; shards are computed with
in place, as views of a mapping, and written a tile at a time. Tests hold both against the library's.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

MAX_HEADER_BYTES = 16 << 20
"""A header is a few kilobytes; the library's own limit is 100 MB, more than a board can spare."""

DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # NumPy has no bfloat16: raw bits
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The format's dtype names and how NumPy sees their bytes."""

TensorForms = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensors by name: dtype and shape."""
HEADER_ALIGNMENT = 8
"""Data begin at a multiple of this; the header is padded with spaces (the library's rule)."""


class TensorFileError(ValueError):
    """The file is no valid safetensors file; the message says which rule it breaks."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype name, shape, and its bytes `[begin, end)` counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def view(self, buffer: memoryview, first: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """The tensor as a read-only view of `buffer`, the file's bytes from the `first` on. Lives as long as they do."""
        flat = np.frombuffer(buffer[self.begin - first : self.end - first], dtype=DTYPES[self.dtype])
        return flat.reshape(self.shape)

    def rows(self, start: int, stop: int) -> TensorEntry:
        """Rows `[start, stop)` of a tensor of two dimensions, as a tensor of their own."""
        row_bytes = (self.end - self.begin) // self.shape[0]
        begin = self.begin + start * row_bytes
        return TensorEntry(self.dtype, (stop - start, self.shape[1]), begin, begin + (stop - start) * row_bytes)


@dataclass(frozen=True, slots=True)
class TensorFileHeader:
    """Entries by tensor name, and the file's free-form metadata."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> TensorFileHeader:
    """Read and validate the header of the file at `path`; see `parse_header`."""
    with path.open("rb") as file:
        return parse_header(file)


def parse_header(file: BinaryIO) -> TensorFileHeader:
    """Read and validate the header of an open file.

    Raises
    ------
    TensorFileError
        Too short, header too large or no JSON object, unknown dtype, a size that does not follow from the
        shape, a hole, an overlap, or data that do not end where the file ends.
    OSError
        The file cannot be read.
    """
    file_bytes = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise TensorFileError(f"{file_bytes} bytes are too few for a header")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > MAX_HEADER_BYTES or header_bytes > file_bytes - 8:
        raise TensorFileError(f"the header claims {header_bytes} bytes, the file has {file_bytes}")
    raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TensorFileError("the header is no JSON") from error
    if not isinstance(header, dict):
        raise TensorFileError("the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError("__metadata__ must map names to strings")
    data_begin = 8 + header_bytes
    entries = {name: _entry(name, value, data_begin) for name, value in header.items()}
    _check_cover(entries, data_begin, file_bytes)
    return TensorFileHeader(entries, metadata)


def _entry(name: str, value: object, data_begin: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{name}: an entry holds dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise TensorFileError(f"{name}: dtype {dtype!r} is not supported")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise TensorFileError(f"{name}: shape and data_offsets are lists of whole numbers")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise TensorFileError(f"{name}: {shape} of {dtype} do not fill {offsets}")
    return TensorEntry(dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _check_cover(entries: dict[str, TensorEntry], data_begin: int, file_bytes: int) -> None:
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise TensorFileError(f"{name}: data begin at {entry.begin}, expected {position}: a hole or an overlap")
        position = entry.end
    if position != file_bytes:
        raise TensorFileError(f"the data end at {position}, the file at {file_bytes}")


def plan_file(tensors: TensorForms, metadata: Mapping[str, str]) -> tuple[bytes, TensorFileHeader]:
    """What a file of these tensors begins with, its length and header, and where each tensor goes.

    The widest elements first, so that every offset is aligned, then by name: the library's order, where no two dtypes are of
    one width.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name))
    position, spans = 0, dict[str, tuple[int, int]]()
    for name in ordered:
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        spans[name], position = (position, end), end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    begin = 8 + len(text)
    entries = {name: TensorEntry(*tensors[name], begin + start, begin + end) for name, (start, end) in spans.items()}
    return struct.pack("<Q", len(text)) + text, TensorFileHeader(entries, dict(metadata))


class TensorFileWriter:
    """Writes a new file, a context manager: each tensor part by part from its start on, whichever tensor is next.

    Leaving the block flushes the file to the disk.

    Parameters
    ----------
    path : Path
        Not there yet.
    tensors, metadata
        As `plan_file` takes them.

    Raises
    ------
    OSError
        The disk does not take it.
    ValueError
        A tensor was given more or fewer bytes than it has: a fault of the caller.
    """

    def __init__(self, path: Path, tensors: TensorForms, metadata: Mapping[str, str]) -> None:
        prefix, self.header = plan_file(tensors, metadata)
        self._next = {name: entry.begin for name, entry in self.header.entries.items()}
        self._file = path.open("xb")
        self._file.write(prefix)

    def append(self, name: str, part: memoryview) -> None:
        """Write the next bytes of tensor `name`: `part`, contiguous, in the tensor's own dtype."""
        begin = self._next[name]
        self._next[name] = begin + part.nbytes
        if self._next[name] > self.header.entries[name].end:
            raise ValueError(f"{name} is given more bytes than it has")
        self._file.seek(begin)
        self._file.write(part)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if error is None:
                short = [name for name, entry in self.header.entries.items() if self._next[name] != entry.end]
                if short:
                    raise ValueError(f"{', '.join(short)} are given fewer bytes than they have")
                self._file.flush()
                os.fsync(self._file.fileno())
