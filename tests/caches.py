"""K/V caches with an arena of their own, for what tries them without a model."""

from __future__ import annotations

from engine import kv_cache
from engine.arena import Arena
from engine.dims import ModelDimensions
from engine.kv_cache import CrossKVCache, SelfKVCache


def make_caches(policy: str, dims: ModelDimensions, n_sequences: int = 1) -> tuple[SelfKVCache, CrossKVCache]:
    """As `engine.kv_cache.make_caches`, in an arena with room for so many sequences."""
    self_kv, cross_kv = kv_cache.make_caches(policy, dims)
    arena = Arena([*self_kv.rooms(n_sequences), *cross_kv.rooms()])
    self_kv.bind(arena)
    cross_kv.bind(arena)
    return self_kv, cross_kv
