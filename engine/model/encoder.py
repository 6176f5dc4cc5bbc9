"""`AudioEncoder`: a log-mel window → audio features, layer by layer, in five fixed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from engine.arena import ENCODE, FILL, Arena, Room
from engine.dims import CONV_WIDTH, FRAMES_PER_POSITION, Float32, ModelDimensions
from engine.kernels import reference as kernels
from engine.quantization import Weight
from engine.shards.store import ShardStore
from engine.tail import Positions
from engine.timings import LayerTimings

SCORE_ROWS = 128
"""Rows of attention scores that exist at a time: 0.8 MB for 1500 positions."""
CONV_ROWS = 128
"""Positions of a convolution computed at a time."""


class AudioEncoder:
    """The encoder of openai/whisper model.py.

    Parameters
    ----------
    store : ShardStore
    arena : Arena
        With its `rooms`, and `scratch`: float32, flat, where weights are expanded; n_mels or n_state columns of 3 · n_state
        at least.
    """

    def __init__(self, store: ShardStore, arena: Arena) -> None:
        self._store = store
        self._dims = store.dims
        self._scratch: Float32 = arena["scratch"]
        self._x: Float32 = arena["audio_features"]
        self._buffers: Float32 = arena["encoder"]
        self._scores: Float32 = arena["encoder_scores"]
        self._patches: Float32 = arena["encoder_patches"]

    @staticmethod
    def rooms(dims: ModelDimensions) -> list[Room]:
        """What it needs of an arena, beside `scratch`."""
        shape, encode = (dims.n_audio_ctx, dims.n_audio_state), frozenset({ENCODE})
        n_scores = min(SCORE_ROWS, dims.n_audio_ctx) * dims.n_audio_ctx
        n_patches = CONV_ROWS * CONV_WIDTH * max(dims.n_mels, dims.n_audio_state)
        return [
            Room("audio_features", shape, np.float32, frozenset({ENCODE, FILL})),
            Room("encoder", (4, *shape), np.float32, encode),
            Room("encoder_scores", (n_scores,), np.float32, encode),
            Room("encoder_patches", (n_patches,), np.float32, encode),
        ]

    def encode(self, log_mel: Float32, positions: Positions, timings: LayerTimings, check: Callable[[], None]) -> Float32:
        """Audio features of one window.

        Parameters
        ----------
        log_mel : float32 [n, n_mels], time first
            The window's first n frames; those up to its end are zero.
        positions : Positions
            Which to compute. Behind the whole ones is padding alone.
        check : callable
            Called before every layer; what it raises ends the work.

        Returns
        -------
        audio_features : float32 [len(positions), n_audio_state]
            A buffer of the encoder, overwritten by the next call.
        """
        x, buffers = self._x[: len(positions)], self._buffers[:, : len(positions)]
        with self._store.layer("encoder", "stem", timings) as weights:
            self._stem(log_mel, positions, weights)
        for layer in range(self._dims.n_audio_layer):
            check()
            with self._store.layer("encoder", str(layer), timings) as weights:
                self._block(x, buffers, positions.log_counts, weights)
        with self._store.layer("encoder", "ln_post", timings) as weights:
            _norm(weights, "ln_post", x, x)
        return x

    def _stem(self, log_mel: Float32, positions: Positions, weights: dict[str, Weight]) -> None:
        """Two convolutions, GELU after each, then the position encodings."""
        n_state, n_whole, n = self._dims.n_audio_state, positions.n_whole, len(positions)
        hidden = self._buffers[:2].reshape(-1, n_state)[: n_whole * FRAMES_PER_POSITION]
        self._convolve(log_mel, weights["conv1.weight"], weights["conv1.bias"], 1, hidden)
        self._convolve(hidden, weights["conv2.weight"], weights["conv2.bias"], FRAMES_PER_POSITION, self._x[:n_whole])
        self._x[n_whole:n] = self._x[n_whole - 1]  # padding, all of it alike
        encodings = weights["positional_embedding"].expand(self._buffers[2].reshape(-1))
        self._x[:n_whole] += encodings[:n_whole]
        kept = self._buffers[3, : n - n_whole]
        np.take(encodings, positions.index[n_whole:], axis=0, out=kept, mode="clip")  # "raise" would go through a copy
        self._x[n_whole:n] += kept

    def _convolve(self, x: Float32, weight: Weight, bias: Weight, stride: int, out: Float32) -> None:
        """out [n // stride, n_state] = GELU of the width-3 convolution of x [n, channels], padded by one."""
        n_state, channels, width = weight.data.shape
        # [n_state, channels, 3] → [n_state, 3 · channels], so that three rows of x, end to end, are one row of input
        kernel = self._scratch[: weight.data.size].reshape(n_state, width * channels)
        np.copyto(kernel.reshape(n_state, width, channels), weight.data.transpose(0, 2, 1))
        patches = self._patches[: CONV_ROWS * width * channels].reshape(CONV_ROWS, width * channels)
        for start in range(0, len(out), CONV_ROWS):
            rows = min(CONV_ROWS, len(out) - start)
            for tap in range(width):
                columns = slice(tap * channels, (tap + 1) * channels)
                first = start * stride + tap - 1
                before = 1 if first < 0 else 0  # the row before the first is padding, and so is the one after the last
                taken = x[first + before * stride : first + (rows - 1) * stride + 1 : stride]
                patches[:before, columns] = 0.0
                patches[before : before + len(taken), columns] = taken
                patches[before + len(taken) : rows, columns] = 0.0
            tile = out[start : start + rows]
            np.matmul(patches[:rows], kernel.T, out=tile)
            tile += cast(Float32, bias.data)
            kernels.gelu(tile)

    def _block(self, x: Float32, buffers: Float32, log_counts: Float32, weights: dict[str, Weight]) -> None:
        """One residual block: self-attention, then the two-layer network, its hidden width a part at a time."""
        scratch = self._scratch
        y, q, k, v = buffers
        _norm(weights, "attn_ln", x, y)
        kernels.linear(y, weights["attn.query.weight"], vector(weights, "attn.query.bias"), q, scratch)
        kernels.linear(y, weights["attn.key.weight"], None, k, scratch)
        kernels.linear(y, weights["attn.value.weight"], vector(weights, "attn.value.bias"), v, scratch)
        kernels.attention(q, k, v, self._dims.n_audio_head, self._scores, log_counts)
        kernels.linear(q, weights["attn.out.weight"], vector(weights, "attn.out.bias"), y, scratch)
        x += y
        _norm(weights, "mlp_ln", x, y)
        up, down = weights["mlp.0.weight"], weights["mlp.2.weight"]
        up_bias = vector(weights, "mlp.0.bias")
        n_state = self._dims.n_audio_state
        for start in range(0, len(up.data), n_state):
            stop = start + n_state
            kernels.linear(y, up.rows(start, stop), up_bias[start:stop], k, scratch)
            kernels.gelu(k)
            kernels.linear(k, down.columns(start, stop), None, v, scratch)
            x += v
        x += vector(weights, "mlp.2.bias")


def _norm(weights: dict[str, Weight], name: str, x: Float32, out: Float32) -> None:
    kernels.layer_norm(x, vector(weights, f"{name}.weight"), vector(weights, f"{name}.bias"), out)


def vector(weights: dict[str, Weight], name: str) -> Float32:
    """A bias or a norm's row, which is float32 in every shard."""
    return cast(Float32, weights[name].data)
