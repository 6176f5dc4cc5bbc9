"""The kernels in NumPy: plain, and the specification of every faster form.

All arrays are float32 and C-contiguous unless said otherwise; outputs go to arrays that the caller owns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.dims import TILE_ROWS, Float32
from engine.quantization import Weight

LAYER_NORM_EPSILON = 1e-5
"""torch.nn.LayerNorm's default, which openai/whisper keeps."""

GELU_TILE = 16_384
"""Elements of GELU in one go: its four temporaries stay in a small core's second-level cache."""

SUM_TILE = 16_384
"""Terms of a long sum that exist at a time, 64 KiB: a vocabulary's worth would be allocated anew for every token."""

# erfc(z) = t (A1 + t (A2 + …)) exp(-z²), t = 1 / (1 + P z), z ≥ 0, error below 1.5e-7
# (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
ERF_P = 0.3275911
ERF_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def linear(x: Float32, weight: Weight, bias: Float32 | None, out: Float32, scratch: Float32) -> None:
    """out = x · weightᵀ + bias, expanding `weight` a tile of `TILE_ROWS` rows at a time.

    Parameters
    ----------
    x : [n, cols]
    weight : [rows, cols], any stored dtype
    bias : [rows] or None
    out : [n, rows]; may be a column slice of a wider array
    scratch : flat, at least `cols` elements; with less than `TILE_ROWS` rows of them, tiles are smaller
    """
    rows, cols = weight.data.shape
    tile = min(TILE_ROWS, scratch.size // cols)
    for start in range(0, rows, tile):
        stop = min(start + tile, rows)
        np.matmul(x, weight.rows(start, stop).expand(scratch).T, out=out[:, start:stop])
    if bias is not None:
        out += bias


def layer_norm(x: Float32, weight: Float32, bias: Float32, out: Float32) -> None:
    """Normalise each row of x [n, state] into `out` [n, state], then scale by `weight` and shift by `bias` [state]."""
    np.subtract(x, x.mean(axis=1, keepdims=True), out=out)
    variance = np.einsum("ij,ij->i", out, out)[:, None] / np.float32(x.shape[1])
    out /= np.sqrt(variance + np.float32(LAYER_NORM_EPSILON))
    out *= weight
    out += bias


def gelu(x: Float32) -> None:
    """x · Φ(x) in place, Φ the normal distribution's integral (the exact GELU, not the tanh form)."""
    flat = x.reshape(-1)
    for start in range(0, flat.size, GELU_TILE):
        tile = flat[start : start + GELU_TILE]
        magnitude = np.abs(tile)
        t = 1.0 / (1.0 + np.float32(ERF_P / np.sqrt(2.0)) * magnitude)
        tail = np.float32(ERF_A[4]) * t
        for coefficient in ERF_A[3::-1]:
            tail += np.float32(coefficient)
            tail *= t
        np.multiply(tile, tile, out=t)
        t *= np.float32(-0.5)
        tail *= np.exp(t, out=t)
        tail *= magnitude
        tail *= np.float32(0.5)
        # x Φ(x) = max(x, 0) - |x| · erfc(|x| / √2) / 2
        np.maximum(tile, 0.0, out=tile)
        tile -= tail


def softmax(scores: Float32) -> None:
    """Softmax along the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


class ChosenProbabilities:
    """softmax(x · weightᵀ)[i, chosen[i]] for every row i, without the whole product, the weight given in blocks of rows.

    Parameters
    ----------
    x : [n, cols]
    chosen : [n], row numbers of the weight
    scratch : flat, at least `cols` elements; with less than `TILE_ROWS` rows of them, tiles are smaller
    """

    def __init__(self, x: Float32, chosen: npt.NDArray[np.intp], scratch: Float32) -> None:
        self._x, self._chosen, self._scratch = x, chosen, scratch
        self._peak: Float32 = np.full(len(x), -np.inf, np.float32)
        self._total: Float32 = np.zeros(len(x), np.float32)
        self._own: Float32 = np.empty(len(x), np.float32)

    def add(self, first: int, block: Weight) -> None:
        """Take rows `first` and following: `block` [rows, cols], any stored dtype."""
        rows, cols = block.data.shape
        tile = min(TILE_ROWS, self._scratch.size // cols)
        for start in range(0, rows, tile):
            stop = min(start + tile, rows)
            scores = self._x @ block.rows(start, stop).expand(self._scratch).T
            place = self._chosen - (first + start)
            inside = np.flatnonzero((place >= 0) & (place < stop - start))
            self._own[inside] = scores[inside, place[inside]]
            higher = np.maximum(self._peak, scores.max(axis=1))
            self._total *= np.exp(self._peak - higher)
            scores -= higher[:, None]
            self._total += np.exp(scores, out=scores).sum(axis=1)
            self._peak = higher

    def result(self) -> Float32:
        """[n], over all rows given."""
        out: Float32 = np.exp(self._own - self._peak) / self._total
        return out


def log_sum_exp(scores: Float32) -> np.float32:
    """log of the sum of exp(scores), one axis; -inf where all of them are."""
    peak = np.float32(scores.max())
    if peak == -np.inf:
        return peak
    tiles = (scores[start : start + SUM_TILE] for start in range(0, len(scores), SUM_TILE))
    total = np.float32(sum(np.exp(tile - peak).sum() for tile in tiles))
    return np.float32(peak + np.log(total))


def attention(q: Float32, k: Float32, v: Float32, n_head: int, scores: Float32, log_counts: Float32) -> None:
    """Multi-head attention of every position to every other, a head and a tile of rows at a time; q becomes the result.

    Parameters
    ----------
    q : [n, n_state], overwritten: row i holds what position i attended to
    k, v : [n, n_state]
    scores : flat, at least n elements, scratch: a tile of rows of scores, so that those of all heads never exist together
    log_counts : [n]
        Logarithm of how many keys each key stands for, added to its scores: 0 for itself alone.
    """
    n, n_state = q.shape
    d_head = n_state // n_head
    n_rows, is_counted = scores.size // n, log_counts.any()
    q *= np.float32(d_head**-0.5)
    for head in range(n_head):
        columns = slice(head * d_head, (head + 1) * d_head)
        k_head, v_head = k[:, columns], v[:, columns]
        for start in range(0, n, n_rows):
            rows = slice(start, min(start + n_rows, n))
            tile = scores[: (rows.stop - rows.start) * n].reshape(-1, n)
            np.matmul(q[rows, columns], k_head.T, out=tile)
            if is_counted:
                tile += log_counts
            softmax(tile)
            np.matmul(tile, v_head, out=q[rows, columns])
