"""Any sample rate → 16 kHz, block by block: a polyphase windowed-sinc filter with FFmpeg's defaults.

openai/whisper resamples with FFmpeg, and its text depends on it: with the same filter, transcripts of recordings at other
rates equal the reference's where a better filter's do not (engine/DESIGN.md has the figures). The parameters are those of
FFmpeg's documentation (ffmpeg-resampler: filter_size, cutoff, kaiser_beta).
"""

from __future__ import annotations

from math import ceil, gcd

import numpy as np

from engine.dims import SAMPLE_RATE, Float32

FILTER_SIZE = 32
"""Taps at the lower of the two rates."""
CUTOFF = 0.97
"""Of the lower rate's Nyquist frequency."""
KAISER_BETA = 9.0
MAX_FILTER_TAPS = 4_000_000
"""All phases together: 16 MB. Rates in everyday use need under 20,000; only a high rate with no common divisor passes this."""
PHASE_TILE = 256
"""Phases whose taps are computed at a time, in float64."""
MAX_WINDOW_SAMPLES = 1 << 18
"""Of all input windows of the samples made at a time: 1 MB."""


class UnsupportedRate(ValueError):
    """The filter for this rate would not fit in memory."""


class Resampler:
    """Converts one recording; blocks in, blocks out.

    Parameters
    ----------
    rate : int
        Samples per second of what comes in.

    Raises
    ------
    UnsupportedRate
    """

    def __init__(self, rate: int) -> None:
        divisor = gcd(rate, SAMPLE_RATE)
        self._up, self._down = SAMPLE_RATE // divisor, rate // divisor  # out samples per in samples, in lowest terms
        factor = min(CUTOFF * SAMPLE_RATE / rate, 1.0)
        self._n_taps = ceil(FILTER_SIZE / factor)
        if self._n_taps * self._up > MAX_FILTER_TAPS:
            raise UnsupportedRate(f"no filter for {rate} Hz fits in memory; use a common rate such as 16, 44.1 or 48 kHz")
        self._before = (self._n_taps - 1) // 2  # taps before the sample being made
        self._filters = _filters(self._up, self._n_taps, self._before, factor)
        # Input still needed, from position `_origin` on; silence lies before the start.
        self._held: Float32 = np.zeros(self._before, np.float32)
        self._origin = -self._before
        self._made = 0

    def push(self, block: Float32) -> Float32:
        """What can be made once `block` [n] has come: float32 [m], m possibly 0."""
        self._held = np.concatenate([self._held, block])
        end = self._origin + len(self._held)
        # Sample i needs input up to i · down // up + taps after it.
        last_start = end - (self._n_taps - self._before)
        return self._make((last_start * self._up + self._up - 1) // self._down + 1)

    def finish(self) -> Float32:
        """The rest, as if silence followed: n samples in give ceil(n · up / down) in all."""
        n_in = self._origin + len(self._held)
        self._held = np.concatenate([self._held, np.zeros(self._n_taps, np.float32)])
        return self._make(-(-n_in * self._up // self._down))

    def _make(self, end: int) -> Float32:
        """Samples from `_made` up to `end`."""
        out: Float32 = np.empty(max(0, end - self._made), np.float32)
        tile = max(1, MAX_WINDOW_SAMPLES // self._n_taps)
        for start in range(0, len(out), tile):
            # 64 bits, also where NumPy's default has 32: samples × ratio passes 2**31 after five minutes at 44.1 kHz.
            at = np.arange(self._made + start, min(self._made + start + tile, end), dtype=np.int64) * self._down
            starts = at // self._up - self._before - self._origin
            # Of this tile's input alone: all windows at once pass 2**31 bytes above 384 kHz, if only as a view, and a 32-bit
            # NumPy refuses that.
            held = self._held[starts[0] : starts[-1] + self._n_taps]
            windows = np.lib.stride_tricks.sliding_window_view(held, self._n_taps)[starts - starts[0]]
            np.einsum("ij,ij->i", windows, self._filters[at % self._up], out=out[start : start + len(at)])
        self._made = max(self._made, end)
        spent = self._made * self._down // self._up - self._before - self._origin
        if spent > 0:
            self._held = self._held[spent:]
            self._origin += spent
        return out


def _filters(n_phases: int, n_taps: int, before: int, factor: float) -> Float32:
    """Taps per phase [n_phases, n_taps]: sinc under a Kaiser window, each phase summing to 1."""
    taps = np.arange(n_taps) - before
    filters: Float32 = np.empty((n_phases, n_taps), np.float32)
    for start in range(0, n_phases, PHASE_TILE):
        phases = np.arange(start, min(start + PHASE_TILE, n_phases))
        offset = (taps - phases[:, None] / n_phases) * factor
        window = np.i0(KAISER_BETA * np.sqrt(np.maximum(1.0 - np.square(2.0 * offset / (factor * n_taps)), 0.0)))
        rows = np.sinc(offset) * window
        filters[phases] = rows / rows.sum(axis=1, keepdims=True)
    return filters
