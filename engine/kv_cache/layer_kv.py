"""Cross K/V by layer: each decoder layer's keys and values are projected once a window and stored.

INT8 scales are per head and channel: all positions come at once. A channel's scale moves out of the product: keys' scales
multiply the query, values' scales the result, so the codes are never multiplied back one by one.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from engine.dims import Float32, ModelDimensions
from engine.kernels.reference import linear
from engine.kv_cache.cross_kv import CrossKVCache, CrossProjections, ScoreObserver
from engine.kv_cache.heads import split_heads
from engine.quantization import symmetric_scale


class _CrossKVByLayer(CrossKVCache):
    """Projects; how keys and values are stored is a subclass's."""

    def __init__(self, dims: ModelDimensions, every: int = 1) -> None:
        super().__init__(dims, every)
        self._shape = (dims.n_text_layer, self.n_head, self._n_stored, self.d_head)

    def fill(
        self, layer: int, audio_features: Float32, projections: CrossProjections, spare: Float32, scratch: Float32
    ) -> None:
        kept = audio_features[:: self._every]
        k, v = spare[0, : len(kept)], spare[1, : len(kept)]
        linear(kept, projections.key, None, k, scratch)
        linear(kept, projections.value, projections.value_bias, v, scratch)
        self._store(layer, split_heads(k, self.n_head), split_heads(v, self.n_head), scratch)

    @abstractmethod
    def _store(self, layer: int, k: Float32, v: Float32, scratch: Float32) -> None:
        """Take over k, v [n_head, kept positions, d_head]."""


class CrossKVFloat32(_CrossKVByLayer):
    """The plain form."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"kv": ((2, *self._shape), np.float32)}

    def _store(self, layer: int, k: Float32, v: Float32, scratch: Float32) -> None:
        stored, n = self._arrays["kv"][:, layer], k.shape[1]
        stored[0, :, :n], stored[1, :, :n] = k, v

    def attend(
        self,
        layer: int,
        q: Float32,
        projections: CrossProjections,
        scratch: Float32,
        scores: Float32,
        observe: ScoreObserver | None = None,
    ) -> None:
        n = len(self._log_counts)
        keys, values = self._arrays["kv"][:, layer]
        q *= np.float32(self.d_head**-0.5)
        for head, q_head in enumerate(split_heads(q, self.n_head)):
            for rows, tile in self._tiles(len(q), scores, observe):
                np.matmul(q_head[rows], keys[head, :n].T, out=tile)
                self._weigh(layer, head, tile, observe)
                np.matmul(tile, values[head, :n], out=q_head[rows])


class CrossKVInt8(_CrossKVByLayer):
    """INT8 codes with a float32 scale per head and channel; one head's codes are widened at a time."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        n_layer, n_head, _, d_head = self._shape
        return {"codes": ((2, *self._shape), np.int8), "scales": ((2, n_layer, n_head, 1, d_head), np.float32)}

    def _store(self, layer: int, k: Float32, v: Float32, scratch: Float32) -> None:
        codes, scales = self._arrays["codes"], self._arrays["scales"]
        for index, heads in enumerate((k, v)):
            n = heads.shape[1]
            divided = scratch[: n * self.d_head].reshape(n, self.d_head)
            for head in range(self.n_head):
                peak = np.maximum(heads[head].max(axis=0), -heads[head].min(axis=0))
                scale = symmetric_scale(peak)
                scales[index, layer, head, 0] = scale
                np.divide(heads[head], scale, out=divided)
                codes[index, layer, head, :n] = np.rint(divided, out=divided)

    def attend(
        self,
        layer: int,
        q: Float32,
        projections: CrossProjections,
        scratch: Float32,
        scores: Float32,
        observe: ScoreObserver | None = None,
    ) -> None:
        n = len(self._log_counts)
        codes = self._arrays["codes"][:, layer]
        k_scales, v_scales = self._arrays["scales"][:, layer]
        q *= k_scales.reshape(-1)
        q *= np.float32(self.d_head**-0.5)
        keys, values = scratch[: 2 * n * self.d_head].reshape(2, n, self.d_head)
        for head, q_head in enumerate(split_heads(q, self.n_head)):
            np.copyto(keys, codes[0, head, :n])
            np.copyto(values, codes[1, head, :n])
            for rows, tile in self._tiles(len(q), scores, observe):
                np.matmul(q_head[rows], keys.T, out=tile)
                self._weigh(layer, head, tile, observe)
                np.matmul(tile, values, out=q_head[rows])
        q *= v_scales.reshape(-1)
