"""The path through cross-attention, against its plainest forms."""

from __future__ import annotations

import numpy as np
import pytest

from engine.alignment import MEDIAN_WIDTH, AttentionMatrix, cheapest_path, median_filter

RNG = np.random.default_rng(21)


def plain_path(cost: np.ndarray) -> list[tuple[int, int]]:
    """Dynamic time warping a cell at a time."""
    n, m = cost.shape
    total = np.full((n + 1, m + 1), np.inf, np.float32)
    step = np.zeros((n + 1, m + 1), int)
    total[0, 0] = 0
    for j in range(1, m + 1):
        for i in range(1, n + 1):
            both, token, time = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if both < token and both < time:
                best, step[i, j] = both, 0
            elif token < both and token < time:
                best, step[i, j] = token, 1
            else:
                best, step[i, j] = time, 2
            total[i, j] = cost[i - 1, j - 1] + best
    path, i, j = [], n, m
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        way = 2 if i == 0 else 1 if j == 0 else step[i, j]
        i, j = i - (way != 2), j - (way != 1)
    return path[::-1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (4, 30), (30, 4), (17, 17), (40, 150)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_path_is_the_plain_ones(shape: tuple[int, int], ties: bool) -> None:
    cost = RNG.standard_normal(shape).astype(np.float32)
    if ties:  # whole numbers: many ways cost the same
        cost = np.round(cost)
    tokens, positions = cheapest_path(cost)
    assert list(zip(tokens, positions, strict=True)) == plain_path(cost)
    assert np.all(np.diff(tokens) >= 0)
    assert np.all(np.diff(positions) >= 0)


@pytest.mark.parametrize("width", [1, 3, 4, 5, 50])
def test_median_of_seven_mirrored_at_the_ends(width: int) -> None:
    rows = RNG.standard_normal((20, width)).astype(np.float32)
    expected = rows.copy()
    half = MEDIAN_WIDTH // 2
    if width > half:
        for i in range(width):
            around = [abs(j) if j < width else 2 * (width - 1) - j for j in range(i - half, i + half + 1)]
            expected[:, i] = np.median(rows[:, around], axis=1)
    median_filter(rows)
    assert np.array_equal(rows, expected)


def test_heads_are_gathered_one_by_one_as_all_at_once() -> None:
    heads = ((0, 1), (2, 0), (2, 1))
    scores = RNG.standard_normal((3, 2, 12, 40)).astype(np.float32)
    matrix = AttentionMatrix(heads, 25)
    for layer in range(3):
        for head in range(2):
            kept = scores[layer, head].copy()
            matrix.observe(layer, head, scores[layer, head])
            assert np.array_equal(kept, scores[layer, head])
    chosen = np.stack([scores[layer, head, :, :25] for layer, head in heads]).astype(np.float64)
    weights = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    padded = np.pad(weights, ((0, 0), (0, 0), (3, 3)), mode="reflect")
    filtered = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=2), axis=3)
    assert np.abs(matrix.mean() - filtered.mean(0)).max() < 1e-5


def test_attention_that_is_the_same_for_all_tokens_is_no_division_by_zero() -> None:
    matrix = AttentionMatrix([(0, 0)], 10)
    matrix.observe(0, 0, np.zeros((4, 10), np.float32))
    assert np.array_equal(matrix.mean(), np.zeros((4, 10)))


def test_no_head_is_a_fault_said_so() -> None:
    matrix = AttentionMatrix([(1, 0)], 10)
    matrix.observe(0, 0, np.zeros((4, 10), np.float32))
    with pytest.raises(ValueError, match="no alignment head"):
        matrix.mean()
