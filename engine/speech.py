"""Whether a window can hold speech at all: two cheap rules on its log-mel, so that silence costs no encoder pass.

What changes neither in level nor in colour is no speech, however loud: hiss, hum, a fan. Music and clatter are left to the
model's own no-speech probability. engine/DESIGN.md has what was measured.
"""

from __future__ import annotations

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


def is_speechless(log_mel: Float32) -> bool:
    """Whether what a window holds is too quiet, or too steady, to be speech.

    Parameters
    ----------
    log_mel : float32 [n, n_mels], as `LogMel.window` gives it, content frames alone
    """
    power = log_mel * 4.0 - 4.0  # back to log10 of mel power
    if len(power) == 0 or power.max() < QUIET:
        return True
    if len(power) < MIN_FRAMES:
        return False
    low, high = (round(share * power.shape[1]) for share in SPEECH_BINS)
    n_blocks = len(power) // BLOCK_FRAMES
    levels = 10.0 * power[: n_blocks * BLOCK_FRAMES, low:high].reshape(n_blocks, -1).mean(axis=1)
    inner = levels[1:-1]  # a tone that breaks off splashes over all bins
    return bool(inner.max() - inner.min() < STEADY_DECIBELS)
