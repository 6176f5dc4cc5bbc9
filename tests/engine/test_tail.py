"""Which positions of a window are kept, and how many each stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.tail import EDGE_POSITIONS, SCHEDULE, TAILS, merged, whole
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording

N_CTX = 1500


@pytest.mark.parametrize("n_frames", [1, 2, 3, 550, 1160, 2333, 2948, 2950, 2951, 3000])
def test_every_position_of_the_window_is_counted_once(n_frames: int) -> None:
    positions = merged(n_frames, N_CTX)
    counts = np.rint(np.exp(positions.log_counts)).astype(int)
    assert counts.sum() == N_CTX
    ends = np.cumsum(counts)
    # Each stands among those that it stands for.
    assert (ends - counts <= positions.index).all()
    assert (positions.index < ends).all()
    assert len(positions) == len(positions.index) == len(counts)


@pytest.mark.parametrize("n_frames", [1, 550, 2333])
def test_the_recording_and_half_a_second_more_are_whole(n_frames: int) -> None:
    positions = merged(n_frames, N_CTX)
    assert positions.n_whole == -(-n_frames // 2) + EDGE_POSITIONS
    assert positions.index[: positions.n_whole].tolist() == list(range(positions.n_whole))
    assert not positions.log_counts[: positions.n_whole].any()
    assert np.allclose(positions.log_counts[positions.n_whole], np.log(SCHEDULE[0][1]))


@pytest.mark.parametrize("positions", [merged(3000, N_CTX), merged(2950, N_CTX), whole(100, N_CTX)])
def test_a_window_full_of_sound_is_whole(positions: object) -> None:
    assert len(positions) == N_CTX  # type: ignore[arg-type]


def test_short_sound_costs_a_fraction_and_says_the_same(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    """Of 12 s of speech a third of the window is not computed, nor held as cross K/V; the text stays."""
    texts = {}
    for tail in TAILS:
        engine = Engine(tiny_en, tail=tail)
        texts[tail] = engine.transcribe(recordings["demo"].path, LayerTimings()).text
        assert engine._model.decoder._cross_kv._n_positions == (N_CTX if tail == "whole" else len(merged(1160, N_CTX)))
    assert len(merged(1160, N_CTX)) < 0.65 * N_CTX
    assert texts["merged"] == texts["whole"]
