"""Rows of all heads side by side → rows by head."""

from __future__ import annotations

from engine.dims import Float32


def split_heads(x: Float32, n_head: int) -> Float32:
    """[n, n_state] → [n_head, n, d_head], a view."""
    return x.reshape(len(x), n_head, -1).transpose(1, 0, 2)
