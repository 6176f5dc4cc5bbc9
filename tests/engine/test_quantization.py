"""INT8 in blocks of 64."""

from __future__ import annotations

import numpy as np
import pytest

from engine.dims import BLOCK
from engine.quantization import Weight, quantize_blocks


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((20, 3 * BLOCK)).astype(np.float32)


def expanded(weight: Weight) -> np.ndarray:
    return weight.expand(np.full(weight.data.size + 5, np.nan, np.float32))


def test_every_weight_is_within_half_a_step_of_its_own_block(matrix: np.ndarray) -> None:
    codes, scale = quantize_blocks(matrix)
    error = np.abs(expanded(Weight(codes, scale)) - matrix).reshape(20, 3, BLOCK)
    assert np.all(error <= scale[:, :, None] / 2 * (1 + 1e-5))


def test_codes_are_symmetric_and_the_peak_is_kept(matrix: np.ndarray) -> None:
    codes, scale = quantize_blocks(matrix)
    assert codes.min() >= -127
    assert np.all(np.abs(codes).reshape(20, 3, BLOCK).max(axis=2) == 127)
    assert np.allclose(scale * 127, np.abs(matrix).reshape(20, 3, BLOCK).max(axis=2))


@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_a_block_too_small_for_a_scale_gets_scale_one(value: float) -> None:
    """llama2.c divided 0 by 0 here."""
    codes, scale = quantize_blocks(np.full((2, BLOCK), value, np.float32))
    assert np.all(scale == 1.0)
    assert not codes.any()


def test_a_loud_block_does_not_coarsen_its_neighbour(matrix: np.ndarray) -> None:
    alone, _ = quantize_blocks(matrix)
    matrix[:, :BLOCK] *= 1e4
    beside, _ = quantize_blocks(matrix)
    assert np.array_equal(alone[:, BLOCK:], beside[:, BLOCK:])


def test_rows_and_columns_are_views_with_their_scales(matrix: np.ndarray) -> None:
    weight = Weight(*quantize_blocks(matrix))
    whole = expanded(weight).copy()
    assert np.array_equal(expanded(weight.rows(3, 9)), whole[3:9])
    assert np.array_equal(expanded(weight.columns(BLOCK, 3 * BLOCK)), whole[:, BLOCK:])
    assert np.shares_memory(weight.rows(3, 9).data, weight.data)


def test_float_weights_expand_exactly(matrix: np.ndarray) -> None:
    assert expanded(Weight(matrix)) is matrix  # no copy
    half = matrix.astype(np.float16)
    assert np.array_equal(expanded(Weight(half)), half.astype(np.float32))
