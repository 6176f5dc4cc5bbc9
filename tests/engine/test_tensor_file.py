"""Files that attack the safetensors header, and agreement with the safetensors library, as a reader and as a writer."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.tensor_file import MAX_HEADER_BYTES, TensorFileError, TensorFileWriter, TensorForms, read_header


def raw(header: object, data: bytes = b"", claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def entry(begin: int, end: int, shape: list[object], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ATTACKS = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2**62 bytes": raw({}, claimed=1 << 62),
    "header past the end": raw({}, claimed=3),
    "header above the limit": raw(b" " * (MAX_HEADER_BYTES + 1)),
    "no JSON": raw(b"{"),
    "no UTF-8": raw(b'{"\xff": 1}'),
    "deep JSON": raw(b"[" * 100_000),
    "no object": raw([1]),
    "metadata not strings": raw({"__metadata__": {"a": 1}}),
    "entry not an object": raw({"a": 1}),
    "unknown dtype": raw({"a": entry(0, 4, [1], "F8_E4M3")}, b"\0" * 4),
    "negative shape": raw({"a": entry(0, 4, [-1])}, b"\0" * 4),
    "shape that overflows": raw({"a": entry(0, 4, [1 << 62, 1 << 62])}, b"\0" * 4),
    "boolean shape": raw({"a": entry(0, 4, [True])}, b"\0" * 4),
    "size is not the shape's": raw({"a": entry(0, 8, [1])}, b"\0" * 8),
    "overlap": raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12),
    "hole": raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"\0" * 12),
    "data too short": raw({"a": entry(0, 8, [2])}, b"\0" * 7),
    "data too long": raw({"a": entry(0, 8, [2])}, b"\0" * 9),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda name: name.replace(" ", "_"))
def test_attack_is_refused_by_us_and_by_the_library(attack: str, tmp_path: Path) -> None:
    path = tmp_path / "attack.safetensors"
    path.write_bytes(ATTACKS[attack])
    with pytest.raises(TensorFileError):
        read_header(path)
    if attack not in ("header above the limit", "unknown dtype"):  # the library's limits are wider there
        with pytest.raises((SafetensorError, OSError, ValueError)), safe_open(path, "np") as file:
            file.keys()


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "codes": rng.integers(-127, 128, (7, 64)).astype(np.int8),
        "single": rng.standard_normal((2, 2, 2)).astype(np.float32),
        "begins": np.arange(9, dtype=np.uint32),
        "nothing": np.zeros((0, 4), np.float32),
    }


def test_views_equal_what_the_library_reads(tmp_path: Path) -> None:
    tensors = some_tensors()
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"checkpoint": "abc"})
    header = read_header(path)
    assert header.metadata == {"checkpoint": "abc"}
    assert set(header.entries) == set(tensors)
    buffer = memoryview(path.read_bytes())
    for name, tensor in tensors.items():
        view = header.entries[name].view(buffer)
        assert view.dtype == tensor.dtype
        assert np.array_equal(view, tensor)
        assert not view.flags.writeable


DTYPE_NAMES = {"float16": "F16", "int8": "I8", "float32": "F32", "uint32": "U32"}


def forms(tensors: dict[str, np.ndarray]) -> TensorForms:
    return {name: (DTYPE_NAMES[tensor.dtype.name], tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("metadata", [{"checkpoint": "abc"}, {"checkpoint": "ab"}, {"checkpoint": "\u00e9"}])  # other paddings
def test_the_writer_writes_the_librarys_bytes_a_row_at_a_time(metadata: dict[str, str], tmp_path: Path) -> None:
    tensors = some_tensors()
    del tensors["begins"]  # as wide as float32: the library orders these two its own way, and no shard holds both
    save_file(tensors, tmp_path / "library", metadata=metadata)
    with TensorFileWriter(tmp_path / "ours", forms(tensors), metadata) as writer:
        for row in range(9):  # turn by turn, so that no tensor is written in one go
            for name, tensor in tensors.items():
                if row < len(tensor):
                    writer.append(name, tensor[row : row + 1].data)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    assert read_header(tmp_path / "ours") == writer.header


@pytest.mark.parametrize(("rows", "said"), [(1, "x are given fewer"), (3, "x is given more")])
def test_a_tensor_that_is_not_given_whole_is_no_file_with_a_hole(rows: int, said: str, tmp_path: Path) -> None:
    def write() -> None:
        with TensorFileWriter(tmp_path / "file", {"x": ("F32", (2, 4)), "y": ("F32", ())}, {}) as writer:
            writer.append("y", np.zeros((), np.float32).data)
            writer.append("x", np.zeros((rows, 4), np.float32).data)

    with pytest.raises(ValueError, match=said):
        write()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("somebody maps this")
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "file", {}, {})
