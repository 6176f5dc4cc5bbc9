"""Keys and values of the decoder: allocated once, at their full size, float32 or INT8.

INT8 scales: self-attention per token and head (tokens come one by one, so no channel's range is known beforehand),
cross-attention per head and channel (all positions come at once). A channel's scale moves out of the product: keys'
scales multiply the query, values' scales the result, so the codes are never multiplied back one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from engine.dims import Float32, Int8, ModelDimensions
from engine.kernels.reference import softmax
from engine.quantization import symmetric_scale

KV_POLICIES = ("f32", "int8")
"""Names that `make_caches` takes."""


class SelfKVCache(ABC):
    """Keys and values of the tokens decoded so far, per layer.

    Attributes
    ----------
    length : int
        Tokens held by every layer; `advance` moves it once a step has passed all layers.
    """

    def __init__(self, dims: ModelDimensions) -> None:
        self.length = 0
        self.n_head = dims.n_text_head
        self.n_ctx = dims.n_text_ctx
        self.d_head = dims.n_text_state // dims.n_text_head

    def reset(self) -> None:
        """Forget every token."""
        self.length = 0

    def advance(self, n_tokens: int) -> None:
        self.length += n_tokens

    @abstractmethod
    def append(self, layer: int, k: Float32, v: Float32) -> None:
        """Put k, v [n, n_state] of new tokens after those held. A later `append` before `advance` overwrites them."""

    @abstractmethod
    def keys_values(self, layer: int, end: int) -> tuple[Float32, Float32]:
        """K and V [n_head, end, d_head] of the first `end` tokens, float32: views of the cache or of its scratch."""

    @property
    @abstractmethod
    def n_bytes(self) -> int: ...

    def attend(self, layer: int, q: Float32) -> Float32:
        """Causal attention of the newest tokens; their keys and values were appended before.

        Parameters
        ----------
        q : [n, n_state]

        Returns
        -------
        out : [n, n_state]
        """
        n = len(q)
        end = self.length + n
        keys, values = self.keys_values(layer, end)
        scores = np.matmul(_heads(q, self.n_head), keys.transpose(0, 2, 1))
        scores *= np.float32(self.d_head**-0.5)
        if n > 1:  # token i of the new ones sees the held tokens and the new ones up to itself
            scores += np.triu(np.full((n, end), -np.inf, np.float32), k=self.length + 1)
        softmax(scores)
        return _merged(np.matmul(scores, values))

    def _place(self, n: int) -> slice:
        if self.length + n > self.n_ctx:
            raise ValueError(f"{self.length} + {n} tokens do not fit n_text_ctx {self.n_ctx}")
        return slice(self.length, self.length + n)


class SelfKVFloat32(SelfKVCache):
    """The plain form."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__(dims)
        self._k: Float32 = np.zeros((dims.n_text_layer, self.n_head, self.n_ctx, self.d_head), np.float32)
        self._v = np.zeros_like(self._k)

    def append(self, layer: int, k: Float32, v: Float32) -> None:
        place = self._place(len(k))
        self._k[layer, :, place] = _heads(k, self.n_head)
        self._v[layer, :, place] = _heads(v, self.n_head)

    def keys_values(self, layer: int, end: int) -> tuple[Float32, Float32]:
        return self._k[layer, :, :end], self._v[layer, :, :end]

    @property
    def n_bytes(self) -> int:
        return self._k.nbytes + self._v.nbytes


class SelfKVInt8(SelfKVCache):
    """INT8 codes with a float32 scale per token and head."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__(dims)
        shape = (2, dims.n_text_layer, self.n_head, self.n_ctx, self.d_head)
        self._codes: Int8 = np.zeros(shape, np.int8)
        self._scales: Float32 = np.ones((*shape[:-1], 1), np.float32)
        self._scratch: Float32 = np.zeros((2, *shape[2:]), np.float32)

    def append(self, layer: int, k: Float32, v: Float32) -> None:
        place = self._place(len(k))
        for index, new in enumerate((k, v)):
            heads = _heads(new, self.n_head)
            scale = symmetric_scale(np.abs(heads).max(axis=2, keepdims=True))
            self._scales[index, layer, :, place] = scale
            self._codes[index, layer, :, place] = np.rint(heads / scale)

    def keys_values(self, layer: int, end: int) -> tuple[Float32, Float32]:
        out = self._scratch[:, :, :end]
        np.multiply(self._codes[:, layer, :, :end], self._scales[:, layer, :, :end], out=out)
        return out[0], out[1]

    @property
    def n_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes


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
    def attend(self, layer: int, q: Float32) -> Float32:
        """Attention of q [n, n_state] to every audio position; [n, n_state]."""

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
        self._k[layer], self._v[layer] = _heads(k, self.n_head), _heads(v, self.n_head)

    def attend(self, layer: int, q: Float32) -> Float32:
        q_heads = _heads(q, self.n_head) * np.float32(self.d_head**-0.5)
        out = np.empty((self.n_head, len(q), self.d_head), np.float32)
        for head in range(self.n_head):  # a prompt's scores of all heads at once would be 8 MB
            scores = q_heads[head] @ self._k[layer, head].T
            softmax(scores)
            np.matmul(scores, self._v[layer, head], out=out[head])
        return _merged(out)

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
            heads = _heads(new, self.n_head)
            for head in range(self.n_head):
                peak = np.maximum(heads[head].max(axis=0), -heads[head].min(axis=0))
                scale = symmetric_scale(peak)
                self._scales[index, layer, head, 0] = scale
                np.divide(heads[head], scale, out=self._head)
                self._codes[index, layer, head] = np.rint(self._head, out=self._head)

    def attend(self, layer: int, q: Float32) -> Float32:
        k_scales, v_scales = self._scales[:, layer]
        q_heads = _heads(q, self.n_head) * k_scales * np.float32(self.d_head**-0.5)
        out = np.empty((self.n_head, len(q), self.d_head), np.float32)
        for head in range(self.n_head):
            np.copyto(self._head, self._codes[0, layer, head])
            scores = q_heads[head] @ self._head.T
            softmax(scores)
            np.copyto(self._head, self._codes[1, layer, head])
            np.matmul(scores, self._head, out=out[head])
        out *= v_scales
        return _merged(out)

    @property
    def n_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes


def make_caches(policy: str, dims: ModelDimensions) -> tuple[SelfKVCache, CrossKVCache]:
    """The two caches of a policy, one of `KV_POLICIES`.

    Raises
    ------
    ValueError
        Another name.
    """
    if policy == "f32":
        return SelfKVFloat32(dims), CrossKVFloat32(dims)
    if policy == "int8":
        return SelfKVInt8(dims), CrossKVInt8(dims)
    raise ValueError(f"K/V policy is one of {', '.join(KV_POLICIES)}")


def _heads(x: Float32, n_head: int) -> Float32:
    """[n, n_state] → [n_head, n, d_head], a view."""
    return x.reshape(len(x), n_head, -1).transpose(1, 0, 2)


def _merged(heads: npt.NDArray[np.float32]) -> Float32:
    """[n_head, n, d_head] → [n, n_state], a copy."""
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)
