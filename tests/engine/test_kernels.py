"""The kernels against their plainest form, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.dims import BLOCK
from engine.kernels import reference as kernels
from engine.quantization import Weight, quantize_blocks

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("stored", ["float32", "float16", "int8"])
@pytest.mark.parametrize("scratch_size", [2 * BLOCK, 5 * 2 * BLOCK + 3, 100 * 2 * BLOCK])
@pytest.mark.parametrize("n", [1, 9])
def test_linear_tiled_equals_whole(stored: str, scratch_size: int, n: int) -> None:
    matrix, bias, x = normal(33, 2 * BLOCK), normal(33), normal(n, 2 * BLOCK)
    weight = Weight(*quantize_blocks(matrix)) if stored == "int8" else Weight(matrix.astype(stored))
    expanded = weight.expand(np.empty(matrix.size, np.float32)).astype(np.float64)
    out = np.full((n, 33), np.nan, np.float32)
    kernels.linear(x, weight, bias, out, np.full(scratch_size, np.nan, np.float32))
    assert np.abs(out - (x @ expanded.T + bias)).max() < 1e-4


def test_linear_writes_into_a_column_slice() -> None:
    matrix, x = normal(8, BLOCK), normal(4, BLOCK)
    wide = np.zeros((4, 20), np.float32)
    kernels.linear(x, Weight(matrix.astype(np.float16)), None, wide[:, 5:13], np.empty(3 * BLOCK, np.float32))
    assert np.abs(wide[:, 5:13] - x @ matrix.T).max() < 2e-2
    assert not wide[:, :5].any()
    assert not wide[:, 13:].any()


def test_gelu_is_the_exact_one() -> None:
    x = np.concatenate([np.linspace(-12, 12, 60_001), [0.0, -0.0, 1e-30, 300.0, -300.0]]).astype(np.float32)
    expected = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(np.float64)])
    out = x.copy().reshape(2, -1)
    kernels.gelu(out)
    assert np.abs(out.reshape(-1) - expected).max() < 2e-6


def test_layer_norm_in_place_and_apart() -> None:
    x, weight, bias = 5 + 3 * normal(6, 40), normal(40), normal(40)
    wide = x.astype(np.float64)
    variance = wide.var(axis=1, keepdims=True)
    expected = (wide - wide.mean(axis=1, keepdims=True)) / np.sqrt(variance + 1e-5) * weight + bias
    out = np.empty_like(x)
    kernels.layer_norm(x, weight, bias, out)
    assert np.abs(out - expected).max() < 1e-5
    kernels.layer_norm(x, weight, bias, x)
    assert np.array_equal(x, out)


def test_softmax_does_not_overflow_and_takes_minus_infinity() -> None:
    scores = np.array([[1000.0, 1000.0, -np.inf], [0.0, -1000.0, 1.0]], np.float32)
    kernels.softmax(scores)
    assert np.allclose(scores[0], [0.5, 0.5, 0.0])
    assert np.allclose(scores.sum(axis=1), 1.0)


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_attention_by_tiles_equals_all_at_once(tile: int) -> None:
    q, k, v = normal(50, 64), normal(50, 64), normal(50, 64)
    expected = np.empty((50, 64))
    for head in range(2):
        columns = slice(32 * head, 32 * head + 32)
        scores = q[:, columns].astype(np.float64) @ k[:, columns].T / math.sqrt(32)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected[:, columns] = weights / weights.sum(axis=1, keepdims=True) @ v[:, columns]
    kernels.attention(q, k, v, 2, np.empty(tile * 50, np.float32), np.zeros(50, np.float32))
    assert np.abs(q - expected).max() < 1e-5


def test_a_key_that_counts_for_four_is_as_good_as_four() -> None:
    counts = np.array([1, 1, 4, 1, 3, 1])
    q, k, v = normal(sum(counts), 64), normal(6, 64), normal(6, 64)
    repeated, out = q.copy(), np.zeros_like(q)
    kernels.attention(repeated, k.repeat(counts, 0), v.repeat(counts, 0), 2, out.reshape(-1), np.zeros(11, np.float32))
    first = q[:6].copy()
    kernels.attention(first, k, v, 2, np.empty(12, np.float32), np.log(counts.astype(np.float32)))
    assert np.abs(first - repeated[:6]).max() < 1e-6


def test_log_sum_exp_does_not_overflow_and_of_nothing_is_nothing() -> None:
    scores = normal(50)
    assert kernels.log_sum_exp(scores) == pytest.approx(math.log(np.exp(scores.astype(np.float64)).sum()), rel=1e-6)
    assert kernels.log_sum_exp(scores + np.float32(1e4)) == pytest.approx(1e4 + kernels.log_sum_exp(scores), rel=1e-6)
    assert kernels.log_sum_exp(np.full(3, -np.inf, np.float32)) == -np.inf


@pytest.mark.parametrize("n_scratch", [64, 640, 100_000])
@pytest.mark.parametrize("n_block", [301, 100])
def test_probabilities_are_those_of_the_whole_product(n_block: int, n_scratch: int) -> None:
    """Whatever the tile: 1, 10 or all rows of the vocabulary at a time; whatever the block that it is given in."""
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((7, 64)).astype(np.float32), rng.standard_normal((301, 64)).astype(np.float32)
    chosen = rng.integers(0, 301, 7)
    scores = x @ weight.T
    expected = np.exp(scores - scores.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    codes, scale = quantize_blocks(weight)
    for stored, tolerance in ((Weight(weight), 1e-5), (Weight(codes, scale), 0.05)):
        probabilities = kernels.ChosenProbabilities(x, chosen, np.zeros(n_scratch, np.float32))
        for start in range(0, 301, n_block):
            probabilities.add(start, stored.rows(start, min(start + n_block, 301)))
        found = probabilities.result()
        assert np.abs(found - expected[np.arange(7), chosen]).max() < tolerance
