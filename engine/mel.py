"""Log-mel windows of a recording of any length, in the memory of one window.

The reference (openai/whisper audio.py, transcribe.py) pads the whole file with a window of zeros, takes its
log-mel and clips it at 8 below the file's maximum. Here a first pass finds that maximum and the number of
samples; windows are then computed as they are needed, from a second pass. The frames are the same. What is not in memory
as a frame is read again by nobody, so that of the sound itself no more than a few seconds are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from engine.dims import HOP_LENGTH, N_FFT, SAMPLE_RATE, Float32

LOG_FLOOR = 1e-10
"""Power below this counts as this (openai/whisper audio.py)."""
DYNAMIC_RANGE = 8.0
"""log10 units kept below the file's maximum (openai/whisper audio.py)."""
TILE_FRAMES = 20
"""Frames transformed at a time: 0.2 s. The transform makes arrays of float64, which are below 64 KiB so."""

HALF_FFT = N_FFT // 2


def mel_filters(n_mels: int) -> Float32:
    """Slaney's mel filter bank, float32 [n_mels, N_FFT // 2 + 1].

    The scale of Slaney's Auditory Toolbox (linear to 1 kHz, logarithmic above; area-normalised triangles), which
    openai/whisper ships as mel_filters.npz.
    """
    hz_per_mel, break_hz, break_mel, log_step = 200.0 / 3, 1000.0, 15.0, np.log(6.4) / 27.0
    top_mel = break_mel + np.log(SAMPLE_RATE / 2 / break_hz) / log_step
    mels = np.linspace(0.0, top_mel, n_mels + 2)
    hz = np.where(mels < break_mel, mels * hz_per_mel, break_hz * np.exp(log_step * (mels - break_mel)))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, HALF_FFT + 1)
    ramps = hz[:, None] - bins
    widths = np.diff(hz)
    rising, falling = -ramps[:-2] / widths[:-1, None], ramps[2:] / widths[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (hz[2:] - hz[:-2]))[:, None]
    return filters.astype(np.float32)


@cache
def _filters_by_bin(n_mels: int) -> Float32:
    """The same, [N_FFT // 2 + 1, n_mels], made once for all recordings."""
    filters: Float32 = np.ascontiguousarray(mel_filters(n_mels).T)
    filters.flags.writeable = False
    return filters


class _SampleReader:
    """Samples by position from a stream that only moves forward, kept until they are let go."""

    def __init__(self, blocks: Iterator[Float32]) -> None:
        self._blocks = blocks
        self._held = deque[Float32]()
        self._origin = 0  # position of the first held sample
        self.n_samples = 0  # seen so far; the recording's length once `ended`
        self.ended = False

    def let_go(self, before: int) -> None:
        """Forget the samples before position `before`, which nobody will take again, read or not."""
        while self._origin < before and (self._held or self._read()):
            passed = min(before - self._origin, len(self._held[0]))
            self._origin += passed
            if passed < len(self._held[0]):
                self._held[0] = self._held[0][passed:]
            else:
                self._held.popleft()

    def take(self, start: int, stop: int) -> Float32:
        """Samples `[start, stop)`, none of them let go. Mirrored before 0 (torch's reflect), zero past the end."""
        first = max(start, 0)
        samples: Float32 = np.zeros(max(stop, 1 - start) - first, np.float32)
        while self.n_samples < first + len(samples) and self._read():
            pass
        at = self._origin - first
        for block in self._held:  # copied from where they are: joined, they would be allocated anew at every step
            inside = block[max(-at, 0) : len(samples) - at]
            samples[max(at, 0) :][: len(inside)] = inside
            at += len(block)
            if at >= len(samples):
                break
        if start < 0:  # sample -i is sample i
            return np.concatenate([samples[-start:0:-1], samples[:stop]])
        return samples

    def _read(self) -> bool:
        """Hold one more block; False where there is none."""
        block = None if self.ended else next(self._blocks, None)
        self.ended = block is None
        if block is not None:
            self._held.append(block)
            self.n_samples += len(block)
        return block is not None


class LogMel:
    """The log-mel of one recording.

    Parameters
    ----------
    open_blocks : callable giving an iterator of float32 [n] blocks, mono, 16 kHz
        Called twice; both passes must give the same samples.
    window : float32 [n_frames, n_mels]
        Where windows are put: its shape is theirs.

    Attributes
    ----------
    n_samples : int
    n_frames : int
        Whole frames of content, 10 ms each.

    Raises
    ------
    AudioError
        From `open_blocks`, on either pass.
    """

    def __init__(self, open_blocks: Callable[[], Iterator[Float32]], window: Float32) -> None:
        self._filters = _filters_by_bin(window.shape[1])
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
        self._hann = hann.astype(np.float32)
        self._peak, self.n_samples = self._scan(_SampleReader(open_blocks()))
        self.n_frames = self.n_samples // HOP_LENGTH
        self._reader = _SampleReader(open_blocks())
        self._window = window
        self._held = range(0)  # frames that the window's first rows are

    @property
    def seconds(self) -> float:
        return self.n_samples / SAMPLE_RATE

    def window(self, seek: int) -> Float32:
        """The window that starts at frame `seek`, which never falls from call to call.

        Returns
        -------
        log_mel : float32 [n, n_mels], time first
            Normalised as the reference does; n_frames of them, or those up to the recording's end: a view of the buffer,
            which the next call overwrites.
        """
        begin, end = seek, min(seek + len(self._window), self.n_frames)
        if seek in self._held:  # frames of the window before that are in this one too are neither read nor made again
            begin = self._held.stop
            first = seek - self._held.start
            for row in range(0, begin - seek, TILE_FRAMES):
                rows = self._window[row : min(row + TILE_FRAMES, begin - seek)]
                rows[:] = self._window[first + row :][: len(rows)]
        for start in range(begin, end, TILE_FRAMES):
            stop = min(start + TILE_FRAMES, end)
            self._reader.let_go(start * HOP_LENGTH - HALF_FFT)
            log_mel = self._frames(self._reader, start, stop)
            np.maximum(log_mel, self._peak - DYNAMIC_RANGE, out=log_mel)
            np.multiply(np.add(log_mel, 4.0, out=log_mel), 0.25, out=self._window[start - seek : stop - seek])
        self._held = range(seek, end)
        return self._window[: end - seek]

    def _scan(self, reader: _SampleReader) -> tuple[np.float32, int]:
        peak = np.float32(np.log10(LOG_FLOOR))  # the zeros that follow the file in the reference
        frame = 0
        # The last frame to hold a sample starts less than half a transform after the end.
        while not reader.ended or frame * HOP_LENGTH - HALF_FFT < reader.n_samples:
            peak = max(peak, self._frames(reader, frame, frame + TILE_FRAMES).max())
            frame += TILE_FRAMES
            reader.let_go(frame * HOP_LENGTH - HALF_FFT)
        return peak, reader.n_samples

    def _frames(self, reader: _SampleReader, start: int, stop: int) -> Float32:
        """log10 of the mel power of frames `[start, stop)`, float32 [stop - start, n_mels]."""
        samples = reader.take(start * HOP_LENGTH - HALF_FFT, (stop - 1) * HOP_LENGTH + HALF_FFT)
        framed = np.lib.stride_tricks.sliding_window_view(samples, N_FFT)[::HOP_LENGTH]
        spectrum = np.fft.rfft(framed * self._hann)
        power = np.square(spectrum.real) + np.square(spectrum.imag)
        mel = power.astype(np.float32, copy=False) @ self._filters
        log_mel: Float32 = np.log10(np.maximum(mel, LOG_FLOOR, out=mel), out=mel)
        return log_mel
