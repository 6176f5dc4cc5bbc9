"""The policies by name and bytes; self-attention under each: INT8 caches against float32 ones, and the cache's own rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.kv_cache import KV_POLICIES, SelfKVCache
from tests.caches import make_caches
from tests.random_checkpoint import DIMS

RNG = np.random.default_rng(11)
SCRATCH = np.empty(2 * DIMS.n_text_ctx * DIMS.n_text_state, np.float32)
SCORES = np.empty(3 * DIMS.n_text_head * DIMS.n_text_ctx, np.float32)
"""As many as a cache may ask for, three times: a prompt's rows come three at a time, or a few more."""
TINY_LAYERS, TINY_WINDOW = 4, 1500 * 384
TINY_SELF = 2 * TINY_LAYERS * 448 * 384
TINY_SELF_SCALES = 2 * TINY_LAYERS * 448 * 6


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def append(cache: SelfKVCache, layer: int, k: np.ndarray, v: np.ndarray, first: int = 0) -> None:
    cache.append(layer, k.copy(), v.copy(), first)


def attend(cache: SelfKVCache, layer: int, q: np.ndarray) -> np.ndarray:
    out = q.copy()
    cache.attend(layer, out, SCRATCH, SCORES)
    return out


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_prefill_equals_one_token_at_a_time(policy: str) -> None:
    """Causality: a token of a prompt sees what it would have seen alone."""
    q, k, v = (normal(6, DIMS.n_text_state) for _ in range(3))
    together, alone = make_caches(policy, DIMS)[0], make_caches(policy, DIMS)[0]
    append(together, 0, k[:2], v[:2])
    together.advance(2)
    append(together, 0, k[2:], v[2:])
    expected = attend(together, 0, q[2:])
    for i in range(6):
        append(alone, 0, k[i : i + 1], v[i : i + 1])
        out = attend(alone, 0, q[i : i + 1])
        alone.advance(1)
        if i >= 2:
            assert np.abs(out - expected[i - 2]).max() < 1e-5


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_a_prompt_appended_in_parts_is_the_same_prompt(policy: str) -> None:
    """Longer than the rows of scores that exist at a time; all keys and values are there before the first token looks."""
    q, k, v = (normal(20, DIMS.n_text_state) for _ in range(3))
    whole, parts, alone = (make_caches(policy, DIMS)[0] for _ in range(3))
    append(whole, 1, k, v)
    for first in range(0, 20, 7):
        append(parts, 1, k[first : first + 7], v[first : first + 7], first)
    assert np.array_equal(attend(whole, 1, q), attend(parts, 1, q))
    for i, row in enumerate(attend(whole, 1, q)):
        append(alone, 1, k[i : i + 1], v[i : i + 1])
        assert np.abs(attend(alone, 1, q[i : i + 1])[0] - row).max() < 1e-5
        alone.advance(1)
    with pytest.raises(ValueError, match="n_text_ctx 32"):
        append(parts, 1, k[:5], v[:5], 28)


def test_int8_self_attention_is_near_float32() -> None:
    q, k, v = (normal(20, DIMS.n_text_state) for _ in range(3))
    outs = []
    for policy in ("f32", "int8"):
        cache = make_caches(policy, DIMS)[0]
        append(cache, 1, k, v)
        outs.append(attend(cache, 1, q))
    assert 0 < np.abs(outs[0] - outs[1]).max() < 0.03


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_silent_keys_and_values_give_no_nan(policy: str) -> None:
    cache = make_caches(policy, DIMS)[0]
    zeros = np.zeros((4, 64), np.float32)
    append(cache, 0, zeros, zeros)
    assert not attend(cache, 0, normal(4, 64)).any()


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_nothing_grows_and_too_many_tokens_are_refused(policy: str) -> None:
    cache, _ = make_caches(policy, DIMS)
    before = cache.n_bytes
    for _ in range(DIMS.n_text_ctx):
        append(cache, 0, normal(1, 64), normal(1, 64))
        cache.advance(1)
    assert cache.n_bytes == before
    with pytest.raises(ValueError, match="n_text_ctx 32"):
        append(cache, 0, normal(1, 64), normal(1, 64))
    cache.reset()
    append(cache, 0, normal(1, 64), normal(1, 64))


@pytest.mark.parametrize(
    ("policy", "self_bytes", "cross_bytes"),
    [
        ("f32", 4 * TINY_SELF, 4 * 2 * TINY_LAYERS * TINY_WINDOW),
        ("int8", TINY_SELF + 4 * TINY_SELF_SCALES, 2 * TINY_LAYERS * (TINY_WINDOW + 4 * 384)),
        ("shared-f32", 4 * TINY_SELF, 4 * TINY_WINDOW),
        ("shared-int8", TINY_SELF + 4 * TINY_SELF_SCALES, TINY_WINDOW + 4 * 1500),
        ("int8-half", TINY_SELF + 4 * TINY_SELF_SCALES, 2 * TINY_LAYERS * (TINY_WINDOW // 2 + 4 * 384)),
    ],
)
def test_bytes_of_tiny_and_nothing_beside_them(policy: str, self_bytes: int, cross_bytes: int) -> None:
    """No policy keeps a float copy of what it quantised: what a cache asks of an arena is what it counts."""
    dims = replace(DIMS, n_audio_ctx=1500, n_audio_state=384, n_text_ctx=448, n_text_state=384, n_text_head=6, n_text_layer=4)
    caches = make_caches(policy, dims)
    assert tuple(cache.n_bytes for cache in caches) == (self_bytes, cross_bytes)
    for cache in caches:
        asked = sum(room.n_bytes for room in cache.rooms())
        assert cache.n_bytes <= asked < cache.n_bytes + 64 * len(cache.rooms())
        assert [name for name, value in vars(cache).items() if isinstance(value, np.ndarray) and value.size] == []


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="f32, int8, shared-f32, shared-int8, int8-half"):
        make_caches("int4", DIMS)


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_sequences_side_by_side_equal_each_alone(policy: str) -> None:
    """Four beams that fork, end and change places against four caches that only ever held their own tokens."""
    side = make_caches(policy, DIMS)[0]
    side.reserve(4)
    rng = np.random.default_rng(4)
    alone = [make_caches(policy, DIMS)[0]]
    k, v = normal(3, DIMS.n_text_state), normal(3, DIMS.n_text_state)
    for cache in (side, *alone):
        append(cache, 0, k, v)
        cache.advance(3)
    told = [[(k, v)]]  # what each sequence was fed
    for sources in ([0, 0, 0], [2, 0, 0, 1], [3, 3, 1, 0], [1], [0, 0], [1, 0]):
        side.reorder(sources)
        told = [list(told[source]) for source in sources]
        n = len(sources)
        q, k, v = (rng.standard_normal((n, DIMS.n_text_state)).astype(np.float32) for _ in range(3))
        append(side, 0, k, v)
        found = attend(side, 0, q)
        side.advance(n)
        for i in range(n):
            own = make_caches(policy, DIMS)[0]
            for before in told[i]:
                append(own, 0, *before)
                own.advance(len(before[0]))
            append(own, 0, k[i : i + 1], v[i : i + 1])
            assert np.allclose(attend(own, 0, q[i : i + 1]), found[i], atol=1e-5)
            told[i].append((k[i : i + 1], v[i : i + 1]))


@pytest.mark.parametrize("n_sequences", [1, 2, 5])
@pytest.mark.parametrize("policy", KV_POLICIES)
def test_only_the_places_reserved_are_there_and_they_are_given_back(policy: str, n_sequences: int) -> None:
    """Whether they fit the arena or have memory of their own."""
    cache = make_caches(policy, DIMS, n_sequences)[0]
    one = cache.n_bytes
    with pytest.raises(ValueError, match="do not fit the 1 places"):
        cache.reorder([0, 0])
    cache.reserve(3)
    assert cache.n_bytes == 3 * one
    cache.reorder([0, 0, 0])
    with pytest.raises(ValueError, match="2 tokens for 3 sequences"):
        append(cache, 0, normal(2, 64), normal(2, 64))
    cache.reserve(1)
    assert cache.n_bytes == one
    assert cache.length == 0
