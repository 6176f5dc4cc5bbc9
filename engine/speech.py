"""Where a window can hold speech at all: two cheap rules on its log-mel, so that silence costs no encoder pass.

What changes neither in level nor in colour is no speech, however loud: hiss, hum, a fan. Music and clatter are left to the
model's own no-speech probability. engine/DESIGN.md has what was measured.
"""

from __future__ import annotations

import numpy as np

from engine.dims import Float32

QUIET = -7.0
"""log10 of mel power, absolute: digital silence has -10, the last bit of 16 going to and fro -7.7, speech as it is recorded
from -2 up."""
STEADY_DECIBELS = 3.0
"""Between the loudest and the quietest block. Speech of a second has 7 and more, in white noise 5 dB above it still 5."""
BLOCK_FRAMES = 10
"""Frames that are one block: 0.1 s, a syllable."""
MIN_FRAMES = 200
"""Frames below which nothing is called steady: one vowel is."""
SPEECH_BINS = 0.1, 0.75
"""Of the mel bins: about 300 to 4000 Hz."""
PAUSE_BLOCKS = 50
"""Blocks of quiet or steady sound that are a pause between two stretches of speech: 5 s."""
MARGIN_BLOCKS = 5
"""Blocks of a pause that a stretch of speech keeps at either end: a soft sound may be as faint as the pause."""


def is_speechless(log_mel: Float32) -> bool:
    """Whether what a window holds is too quiet, or too steady, to be speech.

    Parameters
    ----------
    log_mel : float32 [n, n_mels], as `LogMel.window` gives it, content frames alone
    """
    if len(log_mel) == 0 or _power(log_mel.max()) < QUIET:
        return True
    if len(log_mel) < MIN_FRAMES:
        return False
    inner = _levels(log_mel)[1:-1]  # a tone that breaks off splashes over all bins
    return bool(inner.max() - inner.min() < STEADY_DECIBELS)


def first_stretch(log_mel: Float32) -> slice:
    """The frames up to the first pause; where the window begins with one, those from its end to the next.

    Parameters
    ----------
    log_mel : float32 [n, n_mels], as for `is_speechless`, which has found that it is not all pause

    Returns
    -------
    frames : slice
        With `MARGIN_BLOCKS` of the pauses at both ends. All n frames where there is no pause.
    """
    if len(log_mel) < PAUSE_BLOCKS * BLOCK_FRAMES:
        return slice(0, len(log_mel))
    levels = _levels(log_mel)
    runs = np.lib.stride_tricks.sliding_window_view(np.maximum(levels, 10.0 * QUIET), PAUSE_BLOCKS)
    steady = runs.max(axis=1) - runs.min(axis=1) < STEADY_DECIBELS
    is_pause = np.convolve(steady, np.ones(PAUSE_BLOCKS, np.int64)) > 0
    begin = 0 if is_pause.all() else int(np.argmin(is_pause))
    end = begin + int(np.argmax(is_pause[begin:])) + MARGIN_BLOCKS if is_pause[begin:].any() else len(levels)
    stop = len(log_mel) if end >= len(levels) else end * BLOCK_FRAMES
    return slice(max(0, begin - MARGIN_BLOCKS) * BLOCK_FRAMES, stop)


def _levels(log_mel: Float32) -> Float32:
    """Decibels of every block, float32 [n // BLOCK_FRAMES]."""
    low, high = (round(share * log_mel.shape[1]) for share in SPEECH_BINS)
    blocks = log_mel[: len(log_mel) // BLOCK_FRAMES * BLOCK_FRAMES].reshape(-1, BLOCK_FRAMES, log_mel.shape[1])
    levels: Float32 = 10.0 * _power(blocks[:, :, low:high].mean(axis=(1, 2)))
    return levels


def _power(log_mel: Float32) -> Float32:
    """log10 of mel power, which `LogMel` has normalised."""
    return log_mel * np.float32(4.0) - np.float32(4.0)
