"""`manifest.json`: what a model directory holds, and the check that it does.

A model directory is this file and the `.safetensors` files that it lists: the encoder's stem, groups of encoder layers,
groups of decoder layers, the embedding, and the vocabulary. The manifest is written last, so a directory with one is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.checkpoints.layout import alignment_heads
from engine.dims import BLOCK, ModelDimensions
from engine.errors import (
    CheckpointInvalid,
    ManifestInvalid,
    ModelNotFound,
    ModelOutdated,
    ShardCorrupt,
    ShardMismatch,
    ShardMissing,
)
from engine.tensor_file import TensorFileError, TensorFileHeader, parse_header
from engine.tokenizer import SpecialTokens

MANIFEST_FILE = "manifest.json"
FORMAT = "thimble-shards"
VERSION = 2
OUTDATED = (1,)
"""Versions of before: 1 lacked the alignment heads and the vocabulary's order."""
WEIGHTS = ("f32", "f16", "int8")
"""What `thimble convert --weights` takes."""
SCALE_SUFFIX = ".scale"
"""A tensor `x` of INT8 codes stands beside `x.scale`."""
MAX_MANIFEST_BYTES = 4 << 20
HASH_READ_BYTES = 1 << 20

AGAIN = "fetch or convert the model again"

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of the model.

    Attributes
    ----------
    file : str
        Name within the directory.
    stack : str
        `encoder`, `decoder` or `tokenizer`.
    part : str
        `stem`, `layers`, `embedding` or `vocabulary`.
    start, end : int
        Layers `[start, end)`; `[0, 0)` where the part is not `layers`.
    n_bytes, sha256 : int, str
        Of the whole file.
    tensors : dict of name → [dtype, shape]
        As in the file's header.
    """

    file: str
    stack: str
    part: str
    start: int
    end: int
    n_bytes: int
    sha256: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    def to_json(self) -> dict[str, object]:
        return {
            "file": self.file,
            "stack": self.stack,
            "part": self.part,
            "layers": [self.start, self.end],
            "bytes": self.n_bytes,
            "sha256": self.sha256,
            "tensors": {
                name: {"dtype": dtype, "shape": list(shape)} | ({"block": BLOCK} if dtype == "I8" else {})
                for name, (dtype, shape) in self.tensors.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model directory's contents.

    Attributes
    ----------
    checkpoint : str
        SHA-256 of the source's content (`engine.convert.content_digest`); each shard's header carries it too.
    weights : str
        One of `WEIGHTS`: how the matrices are stored, but for layers kept finer (`precision.kept_layers`).
    alignment_heads : tuple of (layer, head)
        Heads of cross-attention that follow the sound: word times come from them.
    source : dict
        Format of the checkpoint and SHA-256 of each of its files.
    """

    dims: ModelDimensions
    checkpoint: str
    weights: str
    source: dict[str, Any]
    special: SpecialTokens
    alignment_heads: tuple[tuple[int, int], ...]
    files: tuple[ShardFile, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "checkpoint": self.checkpoint,
            "weights": self.weights,
            "dims": self.dims.to_json(),
            "source": self.source,
            "special_tokens": self.special.to_json(),
            "alignment_heads": [list(pair) for pair in self.alignment_heads],
            "files": [file.to_json() for file in self.files],
        }

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json` in `directory`; the shards are not looked at.

    Raises
    ------
    ModelNotFound
        There is none.
    ModelOutdated
        It is of an earlier version.
    ManifestInvalid
        It is no manifest of this version, or contradicts itself.
    """
    path = directory / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestInvalid(f"{MANIFEST_FILE} has more than {MAX_MANIFEST_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{directory.name} holds no {MANIFEST_FILE}; `thimble fetch` or `thimble convert` writes a model"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ManifestInvalid(f"{MANIFEST_FILE} cannot be read as JSON") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ManifestInvalid(f"{MANIFEST_FILE} is not of the format {FORMAT}")
    if value.get("version") != VERSION:
        found = f"{MANIFEST_FILE} is version {value.get('version')!r}, expected {VERSION}; {AGAIN}"
        raise ModelOutdated(found) if value.get("version") in OUTDATED else ManifestInvalid(found)
    try:
        dims = ModelDimensions.from_json(value["dims"])
        manifest = Manifest(
            dims=dims,
            checkpoint=value["checkpoint"],
            weights=value["weights"],
            source=value["source"],
            special=SpecialTokens.from_json(value["special_tokens"], dims.n_vocab),
            alignment_heads=alignment_heads(value["alignment_heads"] or [], dims),
            files=tuple(_file(entry) for entry in value["files"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointInvalid) as error:
        raise ManifestInvalid(f"{MANIFEST_FILE} lacks or garbles a field: {error!r}") from error
    _check_coverage(manifest)
    return manifest


def _file(entry: dict[str, Any]) -> ShardFile:
    start, end = entry["layers"]
    file = ShardFile(
        file=entry["file"],
        stack=entry["stack"],
        part=entry["part"],
        start=start,
        end=end,
        n_bytes=entry["bytes"],
        sha256=entry["sha256"],
        tensors={name: (t["dtype"], tuple(t["shape"])) for name, t in entry["tensors"].items()},
    )
    if not _FILE_NAME.fullmatch(file.file) or not _SHA256.fullmatch(file.sha256):
        raise ValueError("a file's name or sha256 is not of the expected form")
    if any(type(number) is not int or number < 0 for number in (start, end, file.n_bytes)):
        raise ValueError("a file's layers or bytes are no whole numbers")
    return file


def _check_coverage(manifest: Manifest) -> None:
    """Every part is there once, and the layer groups tile `[0, n_layer)` of both stacks."""
    dims = manifest.dims
    expected = {("encoder", "stem"): 1, ("decoder", "embedding"): 1, ("tokenizer", "vocabulary"): 1}
    for (stack, part), count in expected.items():
        if sum(file.stack == stack and file.part == part for file in manifest.files) != count:
            raise ManifestInvalid(f"{MANIFEST_FILE} must list exactly one {stack} {part}")
    for stack, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        position = 0
        groups = [(file.start, file.end) for file in manifest.files if (file.stack, file.part) == (stack, "layers")]
        for start, end in sorted(groups):
            if start != position or end <= start:
                raise ManifestInvalid(f"{MANIFEST_FILE}: {stack} layers [{start}, {end}) do not follow {position}")
            position = end
        if position != n_layer:
            raise ManifestInvalid(f"{MANIFEST_FILE}: {stack} layers end at {position}, dims say {n_layer}")
    if len({file.file for file in manifest.files}) != len(manifest.files):
        raise ManifestInvalid(f"{MANIFEST_FILE} lists a file twice")


def verify(directory: Path, manifest: Manifest) -> None:
    """Check that every file is what the manifest says; files that it does not list are ignored.

    Raises
    ------
    ShardMissing, ShardCorrupt, ShardMismatch, ManifestInvalid
        Naming the file, and how to get it again.
    """
    for file in manifest.files:
        open_verified(directory, manifest, file)[0].close()


def open_verified(directory: Path, manifest: Manifest, file: ShardFile) -> tuple[BinaryIO, TensorFileHeader]:
    """Open one file and check its size, header and SHA-256; see `verify`.

    The open file goes on being what was checked, also where another model takes its name.
    """
    try:
        opened = (directory / file.file).open("rb")
    except FileNotFoundError as error:
        raise ShardMissing(f"{file.file} is missing; {AGAIN}") from error
    except OSError as error:
        raise ShardMissing(f"{file.file} cannot be read: {error.strerror}") from error
    try:
        return opened, _verified_header(opened, manifest, file)
    except BaseException:
        opened.close()
        raise


def _verified_header(opened: BinaryIO, manifest: Manifest, file: ShardFile) -> TensorFileHeader:
    try:
        found_bytes = opened.seek(0, 2)
        if found_bytes != file.n_bytes:
            raise ShardCorrupt(f"{file.file} has {found_bytes} bytes, expected {file.n_bytes}; {AGAIN}")
        header = parse_header(opened)
        opened.seek(0)
        digest = _sha256(opened)
    except OSError as error:
        raise ShardMissing(f"{file.file} cannot be read: {error.strerror}") from error
    except TensorFileError as error:
        raise ShardCorrupt(f"{file.file}: {error}; {AGAIN}") from error
    if header.metadata.get("checkpoint") != manifest.checkpoint:
        raise ShardMismatch(f"{file.file} was cut from another checkpoint than {MANIFEST_FILE}; {AGAIN}")
    if digest != file.sha256:
        raise ShardCorrupt(f"{file.file} has SHA-256 {digest[:12]}…, expected {file.sha256[:12]}…; {AGAIN}")
    if {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()} != file.tensors:
        raise ManifestInvalid(f"{MANIFEST_FILE} lists other tensors for {file.file} than it holds; {AGAIN}")
    return header


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(HASH_READ_BYTES):
        digest.update(block)
    return digest.hexdigest()
