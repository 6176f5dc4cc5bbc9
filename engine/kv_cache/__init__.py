"""Keys and values of the decoder: allocated at their full size before they are needed, float32 or INT8."""

from __future__ import annotations

from collections.abc import Callable

from engine.dims import ModelDimensions
from engine.kv_cache.cross_kv import CrossKVCache, CrossProjections, ScoreObserver
from engine.kv_cache.layer_kv import CrossKVFloat32, CrossKVInt8
from engine.kv_cache.self_kv import SelfKVCache, SelfKVFloat32, SelfKVInt8
from engine.kv_cache.shared_kv import CrossKVSharedFloat32, CrossKVSharedInt8

__all__ = ["KV_POLICIES", "CrossKVCache", "CrossProjections", "ScoreObserver", "SelfKVCache", "make_caches"]

_POLICIES: dict[str, tuple[Callable[[ModelDimensions], SelfKVCache], Callable[[ModelDimensions], CrossKVCache]]] = {
    "f32": (SelfKVFloat32, CrossKVFloat32),
    "int8": (SelfKVInt8, CrossKVInt8),
    "shared-f32": (SelfKVFloat32, CrossKVSharedFloat32),
    "shared-int8": (SelfKVInt8, CrossKVSharedInt8),
    "int8-half": (SelfKVInt8, lambda dims: CrossKVInt8(dims, every=2)),
}

KV_POLICIES = tuple(_POLICIES)
"""Names that `make_caches` takes."""


def make_caches(policy: str, dims: ModelDimensions) -> tuple[SelfKVCache, CrossKVCache]:
    """The two caches of a policy, one of `KV_POLICIES`.

    Raises
    ------
    ValueError
        Another name.
    """
    if policy not in _POLICIES:
        raise ValueError(f"K/V policy is one of {', '.join(KV_POLICIES)}")
    make_self, make_cross = _POLICIES[policy]
    return make_self(dims), make_cross(dims)
