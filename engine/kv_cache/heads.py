"""Rows of all heads side by side ↔ rows by head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.dims import Float32


def split_heads(x: Float32, n_head: int) -> Float32:
    """[n, n_state] → [n_head, n, d_head], a view."""
    return x.reshape(len(x), n_head, -1).transpose(1, 0, 2)


def merged_heads(heads: npt.NDArray[np.float32]) -> Float32:
    """[n_head, n, d_head] → [n, n_state], a copy."""
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)
