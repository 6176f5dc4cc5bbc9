"""Log-mel windows against a plain whole-file twin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine import mel
from engine.dims import HOP_LENGTH, N_FFT, ModelDimensions
from engine.mel import LogMel, mel_filters
from tests.random_checkpoint import DIMS

WINDOW = DIMS.n_window_samples  # one second for the small model


def room(dims: ModelDimensions) -> np.ndarray:
    """For a window; NaN shows what was not written."""
    return np.full((dims.n_frames, dims.n_mels), np.nan, np.float32)


def whole_file_log_mel(samples: np.ndarray) -> np.ndarray:
    """openai/whisper's way, plainly: pad the file with a window of zeros, transform all of it in float64. [n_frames, n_mels]"""
    padded = np.concatenate([samples.astype(np.float64), np.zeros(WINDOW)])
    reflected = np.pad(padded, N_FFT // 2, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
    n_frames = len(padded) // HOP_LENGTH
    frames = np.stack([reflected[i * HOP_LENGTH : i * HOP_LENGTH + N_FFT] * hann for i in range(n_frames)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    log = np.log10(np.maximum(power @ mel_filters(DIMS.n_mels).T.astype(np.float64), 1e-10))
    log = np.maximum(log, log.max() - 8.0)
    return ((log + 4.0) / 4.0)[: len(samples) // HOP_LENGTH]


def blocks(samples: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def speechlike(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    loudness = np.interp(np.arange(n), np.linspace(0, max(n, 1), 9), rng.random(9) ** 3)
    return (loudness * rng.standard_normal(n) * 0.3).astype(np.float32)


@pytest.mark.parametrize("n", [1, 199, 200, 399, 400, 8000, 15999, 16000, 16001, 40123])
@pytest.mark.parametrize("size", [160, 16000, 100_000])
@pytest.mark.parametrize("tile", [30, 250])  # a window is 100 frames: several tiles, and less than one
def test_windows_equal_the_whole_files_frames(n: int, size: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mel, "TILE_FRAMES", tile)
    samples = speechlike(n)
    expected = whole_file_log_mel(samples)
    log_mel = LogMel(lambda: blocks(samples, size), room(DIMS))
    assert (log_mel.n_samples, log_mel.n_frames) == (n, n // HOP_LENGTH)
    for seek in range(0, log_mel.n_frames, 37):  # overlapping, as after a cut-off segment
        window = log_mel.window(seek)
        content = expected[seek : seek + DIMS.n_frames]
        assert window.shape == content.shape
        assert np.abs(window - content).max() < 2e-5


def test_digital_silence_is_the_floor() -> None:
    log_mel = LogMel(lambda: blocks(np.zeros(16000, np.float32), 4000), room(DIMS))
    assert np.allclose(log_mel.window(0), (-10.0 + 4.0) / 4.0)


def test_the_maximum_is_the_whole_files() -> None:
    """A loud end raises the floor of the quiet beginning."""
    quiet, loud = 1e-4 * speechlike(16000), speechlike(16000)
    alone = LogMel(lambda: blocks(quiet, 16000), room(DIMS)).window(0).min()
    together = LogMel(lambda: blocks(np.concatenate([quiet, loud]), 16000), room(DIMS)).window(0).min()
    assert together > alone + 0.4


def test_filters_are_slaneys() -> None:
    """Corner frequencies and peaks by the scale's definition; openai/whisper's table agrees through test_golden."""
    filters = mel_filters(80)
    assert filters.shape == (80, N_FFT // 2 + 1)
    assert filters.dtype == np.float32
    assert np.all(filters.sum(axis=1) > 0)
    centres = filters.argmax(axis=1) * 40.0  # hertz
    assert np.all(np.diff(centres) >= 0)
    assert centres[0] == 40.0
    assert mel_filters(128).shape == (128, 201)


def test_a_long_recording_holds_no_more_than_its_window() -> None:
    total = 40 * WINDOW

    def stream() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for _ in range(40):
            yield (0.1 * rng.standard_normal(WINDOW)).astype(np.float32)

    log_mel = LogMel(stream, room(DIMS))
    assert log_mel.n_samples == total
    for seek in range(0, log_mel.n_frames, DIMS.n_frames):
        log_mel.window(seek)
        held = len(log_mel._reader._held)
        assert held <= 3 * WINDOW


def test_a_window_far_ahead_is_reached_in_the_same_memory() -> None:
    samples = speechlike(20 * WINDOW)
    log_mel = LogMel(lambda: blocks(samples, 1000), room(DIMS))
    log_mel.window(0)
    content = whole_file_log_mel(samples)[1234 : 1234 + DIMS.n_frames]
    assert np.abs(log_mel.window(1234) - content).max() < 2e-5
    assert len(log_mel._reader._held) <= 3 * WINDOW


def test_128_bins() -> None:
    dims = replace(DIMS, n_mels=128)
    assert LogMel(lambda: blocks(speechlike(8000), 1000), room(dims)).window(0).shape == (50, 128)
