"""Keys and values of one window's audio features.

INT8 scales are per head and channel: all positions come at once. A channel's scale moves out of the product: keys' scales
multiply the query, values' scales the result, so the codes are never multiplied back one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from engine.dims import Float32, Int8, ModelDimensions
from engine.kernels.reference import softmax
from engine.kv_cache.heads import merged_heads, split_heads
from engine.quantization import symmetric_scale

ScoreObserver = Callable[[int, int, Float32], None]
"""Called with a layer, a head and its scores [n, n_audio_ctx]; it must leave them as they are, and not keep them."""


class CrossKVCache(ABC):
    """Keys and values of one window's audio features, per decoder layer."""

    def __init__(self, dims: ModelDimensions) -> None:
        self.n_head = dims.n_text_head
        self.d_head = dims.n_text_state // dims.n_text_head
        self._shape = (dims.n_text_layer, self.n_head, dims.n_audio_ctx, self.d_head)

    @abstractmethod
    def fill(self, layer: int, k: Float32, v: Float32) -> None:
        """Take over k, v [n_audio_ctx, n_state] of `layer`; both are left as they are."""

    @abstractmethod
    def attend(self, layer: int, q: Float32, observe: ScoreObserver | None = None) -> Float32:
        """Attention of q [n, n_state] to every audio position; [n, n_state].

        `observe` is given every head's scores before their softmax.
        """

    @property
    @abstractmethod
    def n_bytes(self) -> int: ...


class CrossKVFloat32(CrossKVCache):
    """The plain form."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__(dims)
        self._k: Float32 = np.zeros(self._shape, np.float32)
        self._v = np.zeros_like(self._k)

    def fill(self, layer: int, k: Float32, v: Float32) -> None:
        self._k[layer], self._v[layer] = split_heads(k, self.n_head), split_heads(v, self.n_head)

    def attend(self, layer: int, q: Float32, observe: ScoreObserver | None = None) -> Float32:
        q_heads = split_heads(q, self.n_head) * np.float32(self.d_head**-0.5)
        out = np.empty((self.n_head, len(q), self.d_head), np.float32)
        for head in range(self.n_head):  # a prompt's scores of all heads at once would be 8 MB
            scores = q_heads[head] @ self._k[layer, head].T
            if observe is not None:
                observe(layer, head, scores)
            softmax(scores)
            np.matmul(scores, self._v[layer, head], out=out[head])
        return merged_heads(out)

    @property
    def n_bytes(self) -> int:
        return self._k.nbytes + self._v.nbytes


class CrossKVInt8(CrossKVCache):
    """INT8 codes with a float32 scale per head and channel."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__(dims)
        n_layer, n_head, n_audio_ctx, d_head = self._shape
        self._codes: Int8 = np.zeros((2, *self._shape), np.int8)
        self._scales: Float32 = np.ones((2, n_layer, n_head, 1, d_head), np.float32)
        self._head: Float32 = np.zeros((n_audio_ctx, d_head), np.float32)  # one head's codes, widened

    def fill(self, layer: int, k: Float32, v: Float32) -> None:
        for index, new in enumerate((k, v)):
            heads = split_heads(new, self.n_head)
            for head in range(self.n_head):
                peak = np.maximum(heads[head].max(axis=0), -heads[head].min(axis=0))
                scale = symmetric_scale(peak)
                self._scales[index, layer, head, 0] = scale
                np.divide(heads[head], scale, out=self._head)
                self._codes[index, layer, head] = np.rint(self._head, out=self._head)

    def attend(self, layer: int, q: Float32, observe: ScoreObserver | None = None) -> Float32:
        k_scales, v_scales = self._scales[:, layer]
        q_heads = split_heads(q, self.n_head) * k_scales * np.float32(self.d_head**-0.5)
        out = np.empty((self.n_head, len(q), self.d_head), np.float32)
        for head in range(self.n_head):
            np.copyto(self._head, self._codes[0, layer, head])
            scores = q_heads[head] @ self._head.T
            if observe is not None:
                observe(layer, head, scores)
            softmax(scores)
            np.copyto(self._head, self._codes[1, layer, head])
            np.matmul(scores, self._head, out=out[head])
        out *= v_scales
        return merged_heads(out)

    @property
    def n_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes
