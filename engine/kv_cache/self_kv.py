"""Keys and values of the decoder's own tokens.

INT8 scales are per token and head: tokens come one by one, so no channel's range is known beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.arena import DECODE, Arena, Room
from engine.dims import Float32, ModelDimensions
from engine.kernels.reference import softmax
from engine.kv_cache.heads import split_heads
from engine.quantization import symmetric_scale


class SelfKVCache(ABC):
    """Keys and values of the tokens decoded so far, per sequence and layer.

    Sequences (beams, or draws of the same window) are of one length: they grow a token at a time, together. Which of the
    stored places holds which sequence is a list, so that a sequence that goes on is never copied.

    Attributes
    ----------
    length : int
        Tokens held by every layer of every sequence; `advance` moves it once a step has passed all layers.
    """

    def __init__(self, dims: ModelDimensions) -> None:
        self.length = 0
        self.n_layer = dims.n_text_layer
        self.n_head = dims.n_text_head
        self.n_ctx = dims.n_text_ctx
        self.d_head = dims.n_text_state // dims.n_text_head
        self._places = [0]  # of the live sequences
        self._n_places = 1

    def rooms(self, n_sequences: int = 1) -> list[Room]:
        """What it needs of an arena for so many sequences."""
        return [
            Room(f"self_{name}", (n_sequences, *shape), dtype, frozenset({DECODE}))
            for name, (shape, dtype) in self._form.items()
        ]

    def bind(self, arena: Arena) -> None:
        """Live in `arena` from now on, which has its `rooms`."""
        self._arena = {name: arena[f"self_{name}"] for name in self._form}
        self.reserve(1)

    def reserve(self, n_sequences: int) -> None:
        """Make room for this many sequences; every token is forgotten. What does not fit the arena has memory of its own."""
        self._n_places = n_sequences
        arrays = self._arena
        if any(len(array) < n_sequences for array in arrays.values()):
            arrays = {name: np.empty((n_sequences, *shape), dtype) for name, (shape, dtype) in self._form.items()}
        self._arrays = arrays
        self.reset()

    def reset(self) -> None:
        """Forget every token; one sequence is live."""
        self.length = 0
        self._places = [0]

    def advance(self, n_rows: int) -> None:
        """`n_rows` tokens, as for `append`, have passed every layer."""
        self.length += self._n_new(n_rows)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i go on from what was sequence `sources[i]`; those that are no source end.

        Raises
        ------
        ValueError
            There are more than `reserve` made room for.
        """
        if len(sources) > self._n_places:
            raise ValueError(f"{len(sources)} sequences do not fit the {self._n_places} places reserved")
        before = self._places
        free = [place for place in range(self._n_places) if place not in {before[source] for source in sources}]
        taken: set[int] = set()
        self._places = []
        for source in sources:
            place = before[source]
            if place in taken:
                self._copy(place, free[-1])
                place = free.pop()
            taken.add(place)
            self._places.append(place)

    @property
    @abstractmethod
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        """Its arrays for one sequence: shapes, of which the last but one is the tokens', and dtypes."""

    def _copy(self, source: int, target: int) -> None:
        """Copy the held tokens of one place to another."""
        for array in self._arrays.values():
            array[target, ..., : self.length, :] = array[source, ..., : self.length, :]

    @property
    def n_bytes(self) -> int:
        """Of the sequences that are reserved, scales included."""
        return sum(array[: self._n_places].nbytes for array in self._arrays.values())

    @abstractmethod
    def _store(self, place: int, layer: int, at: slice, k: Float32, v: Float32) -> None:
        """Put k, v [n_head, n, d_head] at tokens `at`; they may be overwritten."""

    @abstractmethod
    def _keys(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        """K [n_head, end, d_head] of the first `end` tokens, float32: a view of the cache, or written to `scratch`."""

    @abstractmethod
    def _values(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        """V, likewise."""

    def append(self, layer: int, k: Float32, v: Float32, first: int = 0) -> None:
        """Put k, v of new tokens after those held. A later `append` before `advance` overwrites them.

        Parameters
        ----------
        k, v : [n, n_state], overwritten
            Of n tokens of the one live sequence, or of one token of each live sequence.
        first : int
            How many of the new tokens come before these, in other calls.

        Raises
        ------
        ValueError
            As `new_positions`.
        """
        n_new = self._n_new(len(k))
        at = slice(self.new_positions(first + len(k)).stop - n_new, self.length + first + n_new)
        k_heads, v_heads = split_heads(k, self.n_head), split_heads(v, self.n_head)
        for i, place in enumerate(self._places):
            rows = slice(i * n_new, (i + 1) * n_new)
            self._store(place, layer, at, k_heads[:, rows], v_heads[:, rows])

    def attend(self, layer: int, q: Float32, scratch: Float32, scores: Float32) -> None:
        """Causal attention of the newest tokens, each to its own sequence; their keys and values were appended before.

        Parameters
        ----------
        q : [n, n_state], as for `append`, overwritten: row i holds what token i attended to
        scratch : flat, at least 2 · n_text_ctx · n_state elements
            Where codes are expanded: the keys of a sequence, then its values.
        scores : flat, at least n_head · n_text_ctx elements: so many rows of scores exist at a time
        """
        n_new = self._n_new(len(q))
        q_heads = split_heads(q, self.n_head)
        n_rows = min(n_new, scores.size // (self.n_head * (self.length + n_new)))
        for i, place in enumerate(self._places):
            for start in range(0, n_new, n_rows):
                stop = min(start + n_rows, n_new)
                end = self.length + stop
                rows = q_heads[:, i * n_new + start : i * n_new + stop]
                tile = scores[: self.n_head * (stop - start) * end].reshape(self.n_head, stop - start, end)
                keys = self._keys(place, layer, end, scratch)
                np.matmul(rows, keys.transpose(0, 2, 1), out=tile)
                tile *= np.float32(self.d_head**-0.5)
                for row in range(stop - start - 1):  # a token sees those held, and the new ones up to itself
                    tile[:, row, self.length + start + row + 1 :] = -np.inf
                softmax(tile)
                values = self._values(place, layer, end, scratch[self.n_head * end * self.d_head :])
                np.matmul(tile, values, out=rows)

    def new_positions(self, n_rows: int) -> slice:
        """Positions that the next `n_rows` tokens, as for `append`, take in their sequences.

        Raises
        ------
        ValueError
            They do not fit `n_text_ctx`, or are neither of one sequence nor one of each.
        """
        n_new = self._n_new(n_rows)
        if self.length + n_new > self.n_ctx:
            raise ValueError(f"{self.length} + {n_new} tokens do not fit n_text_ctx {self.n_ctx}")
        return slice(self.length, self.length + n_new)

    def _n_new(self, n_rows: int) -> int:
        """New tokens of each sequence."""
        n_live = len(self._places)
        if n_live > 1 and n_rows != n_live:
            raise ValueError(f"{n_rows} tokens for {n_live} sequences: expected one each")
        return 1 if n_live > 1 else n_rows


class SelfKVFloat32(SelfKVCache):
    """The plain form."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"kv": ((2, self.n_layer, self.n_head, self.n_ctx, self.d_head), np.float32)}

    def _store(self, place: int, layer: int, at: slice, k: Float32, v: Float32) -> None:
        stored = self._arrays["kv"][place]
        stored[0, layer, :, at], stored[1, layer, :, at] = k, v

    def _keys(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        keys: Float32 = self._arrays["kv"][place, 0, layer, :, :end]
        return keys

    def _values(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        values: Float32 = self._arrays["kv"][place, 1, layer, :, :end]
        return values


class SelfKVInt8(SelfKVCache):
    """INT8 codes with a float32 scale per token and head."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        shape = (2, self.n_layer, self.n_head, self.n_ctx)
        return {"codes": ((*shape, self.d_head), np.int8), "scales": ((*shape, 1), np.float32)}

    def _store(self, place: int, layer: int, at: slice, k: Float32, v: Float32) -> None:
        codes, scales = (self._arrays[name][place] for name in ("codes", "scales"))
        for index, new in enumerate((k, v)):
            scale = symmetric_scale(np.maximum(new.max(axis=2, keepdims=True), -new.min(axis=2, keepdims=True)))
            scales[index, layer, :, at] = scale
            new /= scale
            codes[index, layer, :, at] = np.rint(new, out=new)

    def _keys(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        return self._expanded(0, place, layer, end, scratch)

    def _values(self, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        return self._expanded(1, place, layer, end, scratch)

    def _expanded(self, index: int, place: int, layer: int, end: int, scratch: Float32) -> Float32:
        out = scratch[: self.n_head * end * self.d_head].reshape(self.n_head, end, self.d_head)
        codes, scales = (self._arrays[name][place, index, layer, :, :end] for name in ("codes", "scales"))
        expanded: Float32 = np.multiply(codes, scales, out=out)
        return expanded
