"""Which sound each token came from: the path through the alignment heads' cross-attention (openai/whisper timing.py)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.dims import Float32
from engine.kernels.reference import softmax

MEDIAN_WIDTH = 7
"""Positions that the median filter sees (openai/whisper timing.py `medfilt_width`)."""
MEDIAN_ROWS = 16
"""Tokens filtered at a time: their windows take 0.7 MB."""

DIAGONAL, TOKEN, TIME = 0, 1, 2
"""Steps of the path: to the next token and position, to the next token, to the next position."""


class AttentionMatrix:
    """The mean of the alignment heads, gathered while the decoder runs; the heads never exist together.

    Parameters
    ----------
    heads : the checkpoint's alignment heads, (layer, head)
    n_positions : int
        Encoder positions that hold sound, at least 1.
    """

    def __init__(self, heads: Iterable[tuple[int, int]], n_positions: int) -> None:
        self._heads = set(heads)
        self._n_positions = n_positions
        self._sum: Float32 | None = None

    def observe(self, layer: int, head: int, scores: Float32) -> None:
        """Take a head's scores [n_tokens, n_audio_ctx], before their softmax, if it is one of the heads."""
        if (layer, head) not in self._heads:
            return
        weights = scores[:, : self._n_positions].copy()
        softmax(weights)
        weights -= weights.mean(axis=0)
        deviation = np.sqrt(np.square(weights).mean(axis=0))
        weights /= np.where(deviation > 0, deviation, np.float32(1.0))
        median_filter(weights)
        self._sum = weights if self._sum is None else np.add(self._sum, weights, out=self._sum)

    def mean(self) -> Float32:
        """float32 [n_tokens, n_positions].

        Raises
        ------
        ValueError
            No alignment head was observed.
        """
        if self._sum is None:
            raise ValueError("no alignment head was observed")
        return self._sum / np.float32(len(self._heads))


def median_filter(rows: Float32) -> None:
    """Each value becomes the median of the `MEDIAN_WIDTH` around it, mirrored at the ends; in place, along the last axis.

    Rows too short to be mirrored stay as they are.
    """
    half = MEDIAN_WIDTH // 2
    if rows.shape[1] <= half:
        return
    for start in range(0, len(rows), MEDIAN_ROWS):
        tile = rows[start : start + MEDIAN_ROWS]
        padded = np.pad(tile, ((0, 0), (half, half)), mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_WIDTH, axis=1)
        tile[:] = np.partition(windows, half, axis=2)[..., half]


def cheapest_path(cost: Float32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Dynamic time warping: the path from the first token and position to the last with the least sum of `cost`.

    Parameters
    ----------
    cost : float32 [n_tokens, n_positions]

    Returns
    -------
    tokens, positions : int64 [n], of every step of the path; neither ever falls
        Where several ways cost the same, it goes on in time, as the reference does.
    """
    n_tokens, n_positions = cost.shape
    steps = np.full((n_tokens + 1, n_positions + 1), TIME, np.int8)
    steps[:, 0] = TOKEN
    # Cells whose indices sum to the same depend on the two diagonals before alone: one operation computes them all.
    # Indexed by token: [i] of the diagonal d is cell (i, d - i).
    before: Float32 = np.full(n_tokens + 1, np.inf, np.float32)
    before[0] = 0.0
    last: Float32 = np.full(n_tokens + 1, np.inf, np.float32)
    for diagonal in range(2, n_tokens + n_positions + 1):
        first, end = max(1, diagonal - n_positions), min(n_tokens, diagonal - 1) + 1
        i = np.arange(first, end)
        both, token, time = before[first - 1 : end - 1], last[first - 1 : end - 1], last[first:end]
        step = np.where((both < token) & (both < time), DIAGONAL, np.where((token < both) & (token < time), TOKEN, TIME))
        steps[i, diagonal - i] = step
        total = np.choose(step, (both, token, time)) + cost[i - 1, diagonal - i - 1]
        before, last = last, np.full(n_tokens + 1, np.inf, np.float32)
        last[first:end] = total
    return _walk_back(steps)


def _walk_back(steps: npt.NDArray[np.int8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    i, j = steps.shape[0] - 1, steps.shape[1] - 1
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = steps[i, j]
        i -= step in (DIAGONAL, TOKEN)
        j -= step in (DIAGONAL, TIME)
    tokens, positions = np.array(path[::-1], np.int64).T
    return tokens, positions
