"""Files that attack the safetensors header, and agreement with the safetensors library on those that do not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.tensor_file import MAX_HEADER_BYTES, TensorFileError, read_header


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


def test_views_equal_what_the_library_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "codes": rng.integers(-127, 128, (7, 64)).astype(np.int8),
        "single": rng.standard_normal((2, 2, 2)).astype(np.float32),
        "begins": np.arange(9, dtype=np.uint32),
        "nothing": np.zeros((0, 4), np.float32),
    }
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
