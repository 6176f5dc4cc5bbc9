"""How a plan cuts the weights into pieces, and in which order a transcription asks for these."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from engine.shards.manifest import SCALE_SUFFIX, Manifest, ShardFile
from engine.shards.residency import TOKEN_EMBEDDING, Residency
from engine.tensor_file import TensorEntry, TensorFileHeader

LayerKey = tuple[str, str]
"""(stack, layer): layer is a number, or `stem`, `ln_post` (encoder), `embedding`, `ln` (decoder)."""

Stored = tuple[TensorEntry, TensorEntry | None]
"""Where a tensor's bytes are in its file, and where its scales' are."""


def layer_of(tensor: str) -> tuple[LayerKey, str]:
    """Which layer a tensor of OpenAI's name belongs to, and its name within that layer."""
    stack, part, rest = [*tensor.split(".", 2), ""][:3]
    if part == "blocks":
        layer, _, rest = rest.partition(".")
        return (stack, layer), rest
    if stack == "decoder":
        return (stack, "ln" if part == "ln" else "embedding"), tensor.removeprefix("decoder.")
    return (stack, "ln_post" if part == "ln_post" else "stem"), tensor.removeprefix("encoder.")


TABLE = layer_of(TOKEN_EMBEDDING)[1]
"""The token embedding's name within its layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is asked for at once: a layer, or a block of the token embedding's rows.

    Attributes
    ----------
    tensors : dict of name within the layer → Stored
    passes : int
        As how many passes over the layer a use of it counts: 1, or 0 for a block that is not the embedding's first.
    """

    key: LayerKey
    tensors: dict[str, Stored]
    passes: int = 1

    def ranges(self) -> list[tuple[int, int]]:
        """Bytes `[begin, end)` of the file, in order; those that touch are one."""
        entries = [entry for stored in self.tensors.values() for entry in stored if entry is not None]
        return _joined((entry.begin, entry.end) for entry in entries)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is mapped and unmapped as one: a shard, or a block of the embedding's rows.

    Attributes
    ----------
    parts : tuple of Part
        In the order of their use.
    runs : tuple of (begin, end)
        Bytes of the file that are mapped: the parts' own, from the begin of a page to the end of one, or of the file.
    """

    file: ShardFile
    parts: tuple[Part, ...]
    is_pinned: bool
    runs: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        page = mmap.ALLOCATIONGRANULARITY
        ranges = [range_ for part in self.parts for range_ in part.ranges()]
        pages = _joined((begin - begin % page, end + -end % page) for begin, end in ranges)
        object.__setattr__(self, "runs", tuple((begin, min(end, self.file.n_bytes)) for begin, end in pages))

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory."""
        return sum(end - begin + -end % mmap.PAGESIZE for begin, end in self.runs)


Place = tuple[Piece, int]
"""A piece, and the number of a part of it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A model's weights as a plan cuts them.

    Attributes
    ----------
    layers : dict of layer → Place
        The embedding's is what lies beside the token embedding.
    table : (ShardFile, Stored)
        The token embedding.
    blocks : list of (first row, row after the last, Place)
        Of the token embedding; one block where it is pinned.
    order : list of Piece
        Streamed pieces as they are asked for from a window's begin: by the encoder, by the decoder for the cross K/V, by the
        decoder for a token, and by the logits.
    token_begin : int
        Where in `order` a token begins: what comes after the last piece.
    """

    layers: dict[LayerKey, Place]
    table: tuple[ShardFile, Stored]
    blocks: list[tuple[int, int, Place]]
    order: list[Piece]
    token_begin: int


def cut(manifest: Manifest, headers: Mapping[str, TensorFileHeader], residency: Residency) -> Cut:
    """Cut the weights as `residency` says.

    Parameters
    ----------
    headers : of the manifest's files, by name
    """
    layers = {
        key: (file, Part(key, tensors))
        for file in manifest.files
        if file.stack != "tokenizer"
        for key, tensors in _layers(headers[file.file]).items()
    }
    dims = manifest.dims
    encoder = [layers["encoder", str(name)] for name in ("stem", *range(dims.n_audio_layer), "ln_post")]
    decoder = [layers["decoder", str(layer)] for layer in range(dims.n_text_layer)]
    embedding, beside = layers["decoder", "embedding"]
    table = beside.tensors.pop(TABLE)
    rows = dims.n_vocab if embedding.file in residency.pinned else residency.embedding_rows
    ranges = [(start, min(start + rows, dims.n_vocab)) for start in range(0, dims.n_vocab, rows)]
    blocks = [(embedding, _block(table, start, stop)) for start, stop in ranges]

    stays = [pair for pair in (*encoder, *decoder, *blocks) if pair[0].file in residency.pinned]
    # What lies beside the token embedding is small, and used at every token: it stays in any case.
    stays += [(embedding, beside), layers["decoder", "ln"]]
    pinned = _by_file(sorted(stays, key=lambda pair: pair[0].file), is_pinned=True)
    passes = []
    for pairs in (encoder, decoder):
        passes.append(_by_file([pair for pair in pairs if pair[0].file not in residency.pinned], is_pinned=False))
    of_blocks = [Piece(file, (part,), False) for file, part in blocks if file.file not in residency.pinned]

    of_encoder, of_decoder = passes
    of_window, of_token = of_encoder + of_decoder, of_decoder + of_blocks
    places = {part: (piece, i) for piece in (*pinned, *of_window, *of_blocks) for i, part in enumerate(piece.parts)}
    return Cut(
        {key: places[part] for key, (_, part) in layers.items()},
        (embedding, table),
        [(start, stop, places[part]) for (start, stop), (_, part) in zip(ranges, blocks, strict=True)],
        of_window + of_token,
        len(of_window) if of_token else 0,
    )


def _layers(header: TensorFileHeader) -> dict[LayerKey, dict[str, Stored]]:
    """A file's tensors by layer, each with its scales."""
    layers: dict[LayerKey, dict[str, Stored]] = {}
    for name, entry in header.entries.items():
        if not name.endswith(SCALE_SUFFIX):
            key, local = layer_of(name)
            layers.setdefault(key, {})[local] = entry, header.entries.get(name + SCALE_SUFFIX)
    return layers


def _block(table: Stored, start: int, stop: int) -> Part:
    codes, scales = table
    rows = codes.rows(start, stop), None if scales is None else scales.rows(start, stop)
    return Part(("decoder", "embedding"), {TABLE: rows}, 1 if start == 0 else 0)


def _by_file(pairs: Iterable[tuple[ShardFile, Part]], is_pinned: bool) -> list[Piece]:
    """A piece of every run of parts in one file."""
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].file)]
    return [Piece(group[0][0], tuple(part for _, part in group), is_pinned) for group in groups]


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
