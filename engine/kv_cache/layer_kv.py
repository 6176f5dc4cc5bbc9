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
from engine.kv_cache.cross_kv import CrossKVCache, CrossProjections, CrossWork
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

    def _attend(self, layer: int, q: Float32, work: CrossWork) -> None:
        for head, q_head in enumerate(split_heads(q, self.n_head)):
            keys, values = self._keys_and_values(layer, head, work.scratch)
            for rows, tile in self._tiles(len(q), work):
                np.matmul(q_head[rows], keys.T, out=tile)
                self._weigh(layer, head, tile, work.observe)
                np.matmul(tile, values, out=q_head[rows])

    @abstractmethod
    def _keys_and_values(self, layer: int, head: int, scratch: Float32) -> tuple[Float32, Float32]:
        """A head's keys and values [kept positions, d_head], but for their scales: views, or written to `scratch`."""


class CrossKVFloat32(_CrossKVByLayer):
    """The plain form."""

    @property
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        return {"kv": ((2, *self._shape), np.float32)}

    def _store(self, layer: int, k: Float32, v: Float32, scratch: Float32) -> None:
        stored, n = self._arrays["kv"][:, layer], k.shape[1]
        stored[0, :, :n], stored[1, :, :n] = k, v

    def _keys_and_values(self, layer: int, head: int, scratch: Float32) -> tuple[Float32, Float32]:
        keys, values = self._arrays["kv"][:, layer, head, : len(self._log_counts)]
        return keys, values


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

    def _attend(self, layer: int, q: Float32, work: CrossWork) -> None:
        k_scales, v_scales = self._arrays["scales"][:, layer]
        q *= k_scales.reshape(-1)
        super()._attend(layer, q, work)
        q *= v_scales.reshape(-1)

    def _keys_and_values(self, layer: int, head: int, scratch: Float32) -> tuple[Float32, Float32]:
        n = len(self._log_counts)
        keys, values = scratch[: 2 * n * self.d_head].reshape(2, n, self.d_head)
        np.copyto(keys, self._arrays["codes"][0, layer, head, :n])
        np.copyto(values, self._arrays["codes"][1, layer, head, :n])
        return keys, values
