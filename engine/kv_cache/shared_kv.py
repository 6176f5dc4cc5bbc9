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
from engine.kv_cache.cross_kv import CrossKVCache, CrossProjections, ScoreObserver
from engine.kv_cache.heads import merged_heads, split_heads
from engine.quantization import Weight, symmetric_scale

SCORE_ROWS = 64
"""Rows of scores, heads times tokens, computed in one product: X is read (and widened) once for all of them. A prompt's scores
are those of one head, as in the other policies."""


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

    def attend(
        self, layer: int, q: Float32, projections: CrossProjections, scratch: Float32, observe: ScoreObserver | None = None
    ) -> Float32:
        q_heads = split_heads(q, self.n_head) * np.float32(self.d_head**-0.5)
        out = np.empty((self.n_head, len(q), self.d_head), np.float32)
        n_together = max(1, SCORE_ROWS // len(q))
        for first in range(0, self.n_head, n_together):
            heads = range(first, min(first + n_together, self.n_head))
            absorbed = np.empty((len(heads), len(q), q.shape[1]), np.float32)
            for i, head in enumerate(heads):
                np.matmul(q_heads[head], self._rows(projections.key, head, scratch), out=absorbed[i])
            scores = self._scores(absorbed.reshape(-1, q.shape[1]), scratch)
            for i, head in enumerate(heads):
                self._weigh(layer, head, scores[i * len(q) : (i + 1) * len(q)], observe)
            mixed = self._mixed(scores, scratch).reshape(absorbed.shape)
            for i, head in enumerate(heads):
                np.matmul(mixed[i], self._rows(projections.value, head, scratch).T, out=out[head])
        merged = merged_heads(out)
        merged += projections.value_bias
        return merged

    def _rows(self, weight: Weight, head: int, scratch: Float32) -> Float32:
        """A head's rows of a projection, float32 [d_head, n_state]."""
        return weight.rows(head * self.d_head, (head + 1) * self.d_head).expand(scratch)

    @abstractmethod
    def _scores(self, absorbed: Float32, scratch: Float32) -> Float32:
        """absorbed [rows, n_state] · Xᵀ: [rows, n_positions]."""

    @abstractmethod
    def _mixed(self, weights: Float32, scratch: Float32) -> Float32:
        """weights [rows, n_positions] · X: [rows, n_state]; `weights` may be overwritten."""


class CrossKVSharedFloat32(_CrossKVShared):
    """X as it is: exact but for the order of additions."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"x": (self._shape, np.float32)}

    def begin(self, audio_features: Float32, log_counts: Float32, scratch: Float32) -> None:
        super().begin(audio_features, log_counts, scratch)
        self._arrays["x"][: len(audio_features)] = audio_features

    def _scores(self, absorbed: Float32, scratch: Float32) -> Float32:
        scores: Float32 = absorbed @ self._arrays["x"][: self._n_positions].T
        return scores

    def _mixed(self, weights: Float32, scratch: Float32) -> Float32:
        mixed: Float32 = weights @ self._arrays["x"][: self._n_positions]
        return mixed


class CrossKVSharedInt8(_CrossKVShared):
    """X as INT8 codes with a float32 scale per position, which moves out of the products; widened by tiles of positions."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"codes": (self._shape, np.int8), "scales": (self._shape[:1], np.float32)}

    def begin(self, audio_features: Float32, log_counts: Float32, scratch: Float32) -> None:
        super().begin(audio_features, log_counts, scratch)
        for tile, divided in self._tiles(scratch):
            x = audio_features[tile]
            scale = symmetric_scale(np.maximum(x.max(axis=1), -x.min(axis=1)))
            self._arrays["scales"][tile] = scale
            np.divide(x, scale[:, None], out=divided)
            self._arrays["codes"][tile] = np.rint(divided, out=divided)

    def _scores(self, absorbed: Float32, scratch: Float32) -> Float32:
        scores: Float32 = np.empty((len(absorbed), self._n_positions), np.float32)
        for tile, widened in self._tiles(scratch):
            np.copyto(widened, self._arrays["codes"][tile])
            np.matmul(absorbed, widened.T, out=scores[:, tile])
        scores *= self._arrays["scales"][: self._n_positions]
        return scores

    def _mixed(self, weights: Float32, scratch: Float32) -> Float32:
        weights *= self._arrays["scales"][: self._n_positions]
        mixed: Float32 = np.zeros((len(weights), self._shape[1]), np.float32)
        for tile, widened in self._tiles(scratch):
            np.copyto(widened, self._arrays["codes"][tile])
            mixed += weights[:, tile] @ widened
        return mixed

    def _tiles(self, scratch: Float32) -> Iterator[tuple[slice, Float32]]:
        """The window's positions a tile at a time, with room for as many rows of X, [rows, n_state]."""
        n_state = self._shape[1]
        n_rows = scratch.size // n_state
        for start in range(0, self._n_positions, n_rows):
            tile = slice(start, min(start + n_rows, self._n_positions))
            yield tile, scratch[: (tile.stop - tile.start) * n_state].reshape(-1, n_state)
