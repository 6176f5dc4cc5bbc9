"""Keys and values of the decoder: allocated at their full size before they are needed, float32 or INT8."""

from __future__ import annotations

from engine.dims import ModelDimensions
from engine.kv_cache.cross_kv import CrossKVCache, CrossKVFloat32, CrossKVInt8, ScoreObserver
from engine.kv_cache.self_kv import SelfKVCache, SelfKVFloat32, SelfKVInt8

__all__ = ["KV_POLICIES", "CrossKVCache", "ScoreObserver", "SelfKVCache", "make_caches"]

KV_POLICIES = ("f32", "int8")
"""Names that `make_caches` takes."""


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
