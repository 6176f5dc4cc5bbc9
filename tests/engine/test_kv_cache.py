"""The policies by name and bytes; self-attention under each: INT8 caches against float32 ones, and the cache's own rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.kv_cache import KV_POLICIES
from tests.caches import make_caches
from tests.random_checkpoint import DIMS

RNG = np.random.default_rng(11)
SCRATCH = np.empty(DIMS.n_text_ctx * DIMS.n_text_state, np.float32)
TINY_LAYERS, TINY_WINDOW = 4, 1500 * 384
TINY_SELF = 2 * TINY_LAYERS * 448 * 384
TINY_SELF_SCALES = 2 * TINY_LAYERS * 448 * 6


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_prefill_equals_one_token_at_a_time(policy: str) -> None:
    """Causality: a token of a prompt sees what it would have seen alone."""
    q, k, v = (normal(6, DIMS.n_text_state) for _ in range(3))
    together, alone = make_caches(policy, DIMS)[0], make_caches(policy, DIMS)[0]
    together.append(0, k[:2], v[:2])
    together.advance(2)
    together.append(0, k[2:], v[2:])
    expected = together.attend(0, q[2:], SCRATCH)
    for i in range(6):
        alone.append(0, k[i : i + 1], v[i : i + 1])
        out = alone.attend(0, q[i : i + 1], SCRATCH)
        alone.advance(1)
        if i >= 2:
            assert np.abs(out - expected[i - 2]).max() < 1e-5


def test_int8_self_attention_is_near_float32() -> None:
    q, k, v = (normal(20, DIMS.n_text_state) for _ in range(3))
    outs = []
    for policy in ("f32", "int8"):
        cache = make_caches(policy, DIMS)[0]
        cache.append(1, k, v)
        outs.append(cache.attend(1, q, SCRATCH))
    assert 0 < np.abs(outs[0] - outs[1]).max() < 0.03


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_silent_keys_and_values_give_no_nan(policy: str) -> None:
    cache = make_caches(policy, DIMS)[0]
    zeros = np.zeros((4, 64), np.float32)
    cache.append(0, zeros, zeros)
    assert not cache.attend(0, normal(4, 64), SCRATCH).any()


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_nothing_grows_and_too_many_tokens_are_refused(policy: str) -> None:
    cache, _ = make_caches(policy, DIMS)
    before = cache.n_bytes
    for _ in range(DIMS.n_text_ctx):
        cache.append(0, normal(1, 64), normal(1, 64))
        cache.advance(1)
    assert cache.n_bytes == before
    with pytest.raises(ValueError, match="n_text_ctx 32"):
        cache.append(0, normal(1, 64), normal(1, 64))
    cache.reset()
    cache.append(0, normal(1, 64), normal(1, 64))


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
        cache.append(0, k, v)
        cache.advance(3)
    told = [[(k, v)]]  # what each sequence was fed
    for sources in ([0, 0, 0], [2, 0, 0, 1], [3, 3, 1, 0], [1], [0, 0], [1, 0]):
        side.reorder(sources)
        told = [list(told[source]) for source in sources]
        n = len(sources)
        q, k, v = (rng.standard_normal((n, DIMS.n_text_state)).astype(np.float32) for _ in range(3))
        side.append(0, k, v)
        found = side.attend(0, q, SCRATCH)
        side.advance(n)
        for i in range(n):
            own = make_caches(policy, DIMS)[0]
            for before in told[i]:
                own.append(0, *before)
                own.advance(len(before[0]))
            own.append(0, k[i : i + 1], v[i : i + 1])
            assert np.allclose(own.attend(0, q[i : i + 1], SCRATCH), found[i], atol=1e-5)
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
        cache.append(0, normal(2, 64), normal(2, 64))
    cache.reserve(1)
    assert cache.n_bytes == one
    assert cache.length == 0
