"""Cross K/V for all layers at once: the audio features X themselves.

Every layer sees the same X, its key projection has no bias, and attention weights a sum to one. So a head's scores
(W_q x) · (W_k X) are (W_kᵀ W_q x) · X, and its result Σ a (W_v X + b) is W_v (Σ a X) + b: nothing is stored by layer, for
n_head times the attention arithmetic, with the layer's own weights at every token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engine.dims import Float32, ModelDimensions
from engine.kv_cache.cross_kv import CrossKVCache, CrossProjections, CrossWork
from engine.kv_cache.heads import split_heads
from engine.quantization import Weight, symmetric_scale

PRODUCT_ELEMENTS = 16_384
"""Of rows, heads times tokens, that are multiplied with X in one product: X is read (and widened) once for all of them. 64 KiB:
for tiny 42 rows, all heads of five beams."""


class _CrossKVShared(CrossKVCache):
    """Attention to X; how it is stored is a subclass's."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__(dims)
        self.layers_to_fill = range(0)
        self._shape = (dims.n_audio_ctx, dims.n_audio_state)

    def fill(
        self, layer: int, audio_features: Float32, projections: CrossProjections, spare: Float32, scratch: Float32
    ) -> None:
        raise ValueError(f"layer {layer} has no keys and values of its own: the audio features serve all of them")

    def _attend(self, layer: int, q: Float32, work: CrossWork) -> None:
        n_state, n = q.shape[1], self._n_positions
        n_together = max(1, min(PRODUCT_ELEMENTS // n_state, work.scores.size // n))
        n_rows = len(q) if work.observe is not None else n_together
        for start in range(0, len(q), n_rows):
            rows = split_heads(q[start : start + n_rows], self.n_head)
            n_heads = max(1, n_together // rows.shape[1])
            for first in range(0, self.n_head, n_heads):
                self._attend_heads(layer, first, rows[first : first + n_heads], work)
        q += work.projections.value_bias

    def _attend_heads(self, layer: int, first: int, rows: Float32, work: CrossWork) -> None:
        """Some heads' rows [heads, n, d_head], the first head's number being `first`, together; they become the result."""
        n_heads, n, _ = rows.shape
        absorbed: Float32 = np.empty((n_heads, n, self._shape[1]), np.float32)
        for i in range(n_heads):
            np.matmul(rows[i], self._rows(work.projections.key, first + i, work.scratch), out=absorbed[i])
        ((_, tile),) = self._tiles(n_heads * n, work)
        flat = absorbed.reshape(n_heads * n, -1)
        self._score(flat, work.scratch, tile)
        for i in range(n_heads):
            self._weigh(layer, first + i, tile[i * n : (i + 1) * n], work.observe)
        self._mix(tile, work.scratch, flat)
        for i in range(n_heads):
            np.matmul(absorbed[i], self._rows(work.projections.value, first + i, work.scratch).T, out=rows[i])

    def _rows(self, weight: Weight, head: int, scratch: Float32) -> Float32:
        """A head's rows of a projection, float32 [d_head, n_state]."""
        return weight.rows(head * self.d_head, (head + 1) * self.d_head).expand(scratch)

    @abstractmethod
    def _score(self, absorbed: Float32, scratch: Float32, out: Float32) -> None:
        """absorbed [rows, n_state] · Xᵀ to `out` [rows, n_positions]."""

    @abstractmethod
    def _mix(self, weights: Float32, scratch: Float32, out: Float32) -> None:
        """weights [rows, n_positions] · X to `out` [rows, n_state]; `weights` may be overwritten."""


class CrossKVSharedFloat32(_CrossKVShared):
    """X as it is: exact but for the order of additions."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"x": (self._shape, np.float32)}

    def begin(self, audio_features: Float32, log_counts: Float32, scratch: Float32) -> None:
        super().begin(audio_features, log_counts, scratch)
        self._arrays["x"][: len(audio_features)] = audio_features

    def _score(self, absorbed: Float32, scratch: Float32, out: Float32) -> None:
        np.matmul(absorbed, self._arrays["x"][: self._n_positions].T, out=out)

    def _mix(self, weights: Float32, scratch: Float32, out: Float32) -> None:
        np.matmul(weights, self._arrays["x"][: self._n_positions], out=out)


class CrossKVSharedInt8(_CrossKVShared):
    """X as INT8 codes with a float32 scale per position, which moves out of the products; widened by tiles of positions."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"codes": (self._shape, np.int8), "scales": (self._shape[:1], np.float32)}

    def begin(self, audio_features: Float32, log_counts: Float32, scratch: Float32) -> None:
        super().begin(audio_features, log_counts, scratch)
        for tile, divided in self._position_tiles(scratch):
            x = audio_features[tile]
            scale = symmetric_scale(np.maximum(x.max(axis=1), -x.min(axis=1)))
            self._arrays["scales"][tile] = scale
            np.divide(x, scale[:, None], out=divided)
            self._arrays["codes"][tile] = np.rint(divided, out=divided)

    def _score(self, absorbed: Float32, scratch: Float32, out: Float32) -> None:
        for tile, widened in self._widened(scratch):
            np.matmul(absorbed, widened.T, out=out[:, tile])
        out *= self._arrays["scales"][: self._n_positions]

    def _mix(self, weights: Float32, scratch: Float32, out: Float32) -> None:
        weights *= self._arrays["scales"][: self._n_positions]
        out[:] = 0.0
        for tile, widened in self._widened(scratch):
            out += weights[:, tile] @ widened

    def _widened(self, scratch: Float32) -> Iterator[tuple[slice, Float32]]:
        """The codes in float32, [rows, n_state], a tile of positions at a time."""
        for tile, room in self._position_tiles(scratch):
            np.copyto(room, self._arrays["codes"][tile])
            yield tile, room

    def _position_tiles(self, scratch: Float32) -> Iterator[tuple[slice, Float32]]:
        """The window's positions a tile at a time, with room for as many rows of X, [rows, n_state]."""
        n_state = self._shape[1]
        n_rows = scratch.size // n_state
        for start in range(0, self._n_positions, n_rows):
            tile = slice(start, min(start + n_rows, self._n_positions))
            yield tile, scratch[: (tile.stop - tile.start) * n_state].reshape(-1, n_state)
