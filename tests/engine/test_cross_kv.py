"""Cross-attention under every K/V policy against the plain formula in float64, and the rules of a window's positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine.kv_cache import KV_POLICIES, CrossKVCache, CrossProjections
from engine.quantization import Weight, quantize_blocks
from tests.caches import make_caches
from tests.random_checkpoint import DIMS

DIMS_4 = replace(DIMS, n_text_head=4, n_text_state=128, n_audio_head=4, n_audio_state=128)
N_CTX, N_STATE, N_HEAD = DIMS_4.n_audio_ctx, DIMS_4.n_text_state, DIMS_4.n_text_head
SCRATCH = np.full(32 * N_STATE, np.nan, np.float32)
"""As small as a cache may ask for: d_head · n_state elements, room for 32 of 50 positions. NaN shows what was not written."""
SCORES = np.empty(13 * N_CTX, np.float32)
EXACT = 1e-5
TOLERANCE = {"f32": EXACT, "int8": 0.03, "shared-f32": EXACT, "shared-int8": 0.05, "int8-half": 0.03}
"""Of the result, whose values are of order one."""


def normal(*shape: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def stored(matrix: np.ndarray, form: str) -> Weight:
    if form == "int8":
        return Weight(*quantize_blocks(matrix))
    return Weight(matrix.astype(np.float16 if form == "f16" else np.float32))


def projections(form: str = "f32") -> CrossProjections:
    key, value = (normal(N_STATE, N_STATE, seed=seed) / np.float32(np.sqrt(N_STATE)) for seed in (1, 2))
    return CrossProjections(stored(key, form), stored(value, form), normal(N_STATE, seed=3))


@dataclass
class Window:
    """Audio features with their log counts, and how they are projected in every layer."""

    x: np.ndarray
    log_counts: np.ndarray
    projections: CrossProjections

    def begun(self, policy: str) -> CrossKVCache:
        return self.begin(make_caches(policy, DIMS_4)[1])

    def begin(self, cache: CrossKVCache) -> CrossKVCache:
        cache.begin(self.x, self.log_counts, SCRATCH)
        for layer in cache.layers_to_fill:
            cache.fill(layer, self.x, self.projections, np.empty((2, N_CTX, N_STATE), np.float32), SCRATCH)
        return cache

    def attend(self, cache: CrossKVCache, q: np.ndarray, layer: int = 1, **arguments: object) -> np.ndarray:
        SCRATCH[:] = SCORES[:] = np.nan
        out = q.copy()
        cache.attend(layer, out, self.projections, SCRATCH, SCORES, **arguments)
        return out

    def plain(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The formula: the result [n, n_state], and the scores [n_head, n, n_positions] without log counts."""
        room = np.empty(N_STATE * N_STATE, np.float32)
        key, value = (weight.expand(room).astype(np.float64) for weight in (self.projections.key, self.projections.value))
        k, v = self.x @ key.T, self.x @ value.T + self.projections.value_bias
        out, all_scores = [], []
        for q_head, k_head, v_head in zip(*(np.split(rows, N_HEAD, axis=1) for rows in (q, k, v)), strict=True):
            scores = q_head.astype(np.float64) @ k_head.T / np.sqrt(N_STATE // N_HEAD)
            weights = np.exp(scores + self.log_counts)
            out.append(weights / weights.sum(axis=1, keepdims=True) @ v_head)
            all_scores.append(scores)
        return np.concatenate(out, axis=1), np.stack(all_scores)

    def kept(self, policy: str) -> Window:
        """What the policy keeps of it."""
        return Window(self.x[::2], self.log_counts[::2], self.projections) if policy == "int8-half" else self


def window(n_positions: int = N_CTX, form: str = "f32", seed: int = 5) -> Window:
    counts = np.random.default_rng(seed).choice([1, 1, 4], n_positions)
    return Window(normal(n_positions, N_STATE, seed=seed), np.log(counts).astype(np.float32), projections(form))


@pytest.mark.parametrize("policy", KV_POLICIES)
@pytest.mark.parametrize("form", ["f32", "f16", "int8"])
@pytest.mark.parametrize("n_positions", [N_CTX, 37, 1])
def test_equals_the_plain_formula(policy: str, form: str, n_positions: int) -> None:
    heard, q = window(n_positions, form), 2 * normal(3, N_STATE)
    difference = np.abs(heard.attend(heard.begun(policy), q) - heard.kept(policy).plain(q)[0]).max()
    assert difference < TOLERANCE[policy]
    if "int8" in policy and n_positions > 1:  # a channel of one position is exact, with a scale of its own
        assert difference > EXACT


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_a_log_count_is_as_good_as_that_many_positions(policy: str) -> None:
    """Where every second one is left out, each has to stand twice."""
    x, q, twice = normal(7, N_STATE), normal(2, N_STATE), 2 if policy == "int8-half" else 1
    log_counts = np.zeros(7, np.float32)
    log_counts[3] = np.log(4)
    counted = Window(np.repeat(x, twice, axis=0), np.repeat(log_counts, twice), projections())
    copied = Window(x[[0, 1, 2, 3, 3, 3, 3, 4, 5, 6]].repeat(twice, axis=0), np.zeros(10 * twice, np.float32), projections())
    found, expected = (one.attend(one.begun(policy), q) for one in (counted, copied))
    assert np.abs(found - expected).max() < EXACT
    plain = Window(x, np.zeros(7, np.float32), projections())
    assert np.abs(found - plain.plain(q)[0]).max() > 0.05


def test_half_of_positions_that_stand_twice_are_all_of_them() -> None:
    heard, q = window(25), normal(4, N_STATE)
    doubled = Window(heard.x.repeat(2, axis=0), heard.log_counts.repeat(2), heard.projections)
    assert np.array_equal(doubled.attend(doubled.begun("int8-half"), q), heard.attend(heard.begun("int8"), q))


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_a14_a_longer_window_leaves_nothing_behind(policy: str) -> None:
    q, short = normal(2, N_STATE), window(21, seed=8)
    used = window(N_CTX, seed=9).begun(policy)
    assert np.array_equal(short.attend(short.begin(used), q), short.attend(short.begun(policy), q))


@pytest.mark.parametrize("policy", KV_POLICIES)
@pytest.mark.parametrize("n_positions", [N_CTX, 37])
def test_an_observer_sees_every_head_and_position_once(policy: str, n_positions: int) -> None:
    """Without log counts; of a position that is left out, its neighbour's. Seeing changes no more than rounding."""
    heard, q = window(n_positions), normal(40, N_STATE)
    cache, seen = heard.begun(policy), list[tuple[int, int, np.ndarray]]()
    out = heard.attend(cache, q, layer=2, observe=lambda layer, head, scores: seen.append((layer, head, scores.copy())))
    assert np.abs(out - heard.attend(cache, q, layer=2)).max() < EXACT  # which goes by tiles of rows
    assert [(layer, head) for layer, head, _ in seen] == [(2, head) for head in range(N_HEAD)]
    scores = np.stack([scores for _, _, scores in seen])
    assert scores.shape == (N_HEAD, 40, n_positions)
    expected = heard.kept(policy).plain(q)[1]
    if policy == "int8-half":
        expected = expected.repeat(2, axis=2)[:, :, :n_positions]
    assert np.abs(scores - expected).max() < (EXACT if "f32" in policy else 0.06)


@pytest.mark.parametrize("policy", KV_POLICIES)
@pytest.mark.parametrize("n", [3, 20, 100])
def test_rows_together_equal_each_alone(policy: str, n: int) -> None:
    """Beams and prompts: all heads in one product, some of them, one."""
    heard, q = window(), normal(n, N_STATE)
    cache = heard.begun(policy)
    alone = np.concatenate([heard.attend(cache, q[i : i + 1]) for i in range(n)])
    assert np.abs(heard.attend(cache, q) - alone).max() < EXACT


@pytest.mark.parametrize("policy", ["int8", "int8-half"])
def test_one_loud_channel_does_not_coarsen_the_others(policy: str) -> None:
    """A scale per head and channel."""
    heard, q = window(), normal(3, N_STATE)
    heard.projections.key.data[5] *= 100
    q[:, 5] /= 100
    heard.projections.value.data[40] *= 100
    heard.projections.value_bias[40] *= 100
    difference = np.abs(heard.attend(heard.begun(policy), q) - heard.kept(policy).plain(q)[0])
    difference[:, 40] /= 100
    assert 0 < difference.max() < TOLERANCE[policy]


def test_one_loud_position_does_not_coarsen_the_others() -> None:
    """A scale per position. The loud one would win, but for its log count."""
    heard, q = window(), normal(3, N_STATE)
    heard.x[7] *= 100
    heard.log_counts[7] = -1e4
    assert np.abs(heard.attend(heard.begun("shared-int8"), q) - heard.plain(q)[0]).max() < TOLERANCE["shared-int8"]


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_silence_is_the_value_bias_and_no_nan(policy: str) -> None:
    silent = Window(np.zeros((N_CTX, N_STATE), np.float32), np.zeros(N_CTX, np.float32), projections())
    out = silent.attend(silent.begun(policy), normal(4, N_STATE))
    assert np.abs(out - silent.projections.value_bias).max() < EXACT


@pytest.mark.parametrize("policy", KV_POLICIES)
@pytest.mark.parametrize(("n_positions", "n_counts"), [(N_CTX + 1, N_CTX + 1), (0, 0), (9, 10), (10, 9)])
def test_positions_that_do_not_fit_are_refused(policy: str, n_positions: int, n_counts: int) -> None:
    cache = make_caches(policy, DIMS_4)[1]
    with pytest.raises(ValueError, match="expected at most 50 positions with a log count each"):
        cache.begin(np.zeros((n_positions, N_STATE), np.float32), np.zeros(n_counts, np.float32), SCRATCH)


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_a_layer_that_is_not_stored_is_not_filled(policy: str) -> None:
    """Shared features serve every layer; the others store all of theirs."""
    heard = window()
    cache = heard.begun(policy)
    if not policy.startswith("shared"):
        assert cache.layers_to_fill == range(DIMS_4.n_text_layer)
        return
    assert cache.layers_to_fill == range(0)
    with pytest.raises(ValueError, match="layer 0 has no keys and values of its own"):
        cache.fill(0, heard.x, heard.projections, np.empty((2, N_CTX, N_STATE), np.float32), SCRATCH)
