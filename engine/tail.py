"""Which encoder positions of a window are computed: all of the recording's, and few of the silence that fills its 30 s.

Whisper's window is always 30 s long; shorter sound is padded. To cut the padding off ruins the text, and so the tail is
merged instead: one position stands for several, and counts as many wherever it is a key (engine/DESIGN.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.dims import FRAMES_PER_POSITION, Float32

EDGE_POSITIONS = 25
"""Behind the sound's end that are kept whole: 0.5 s. There the padding's beginning is heard."""
SCHEDULE = ((300, 2), (1500, 4))
"""Behind the edge: so many positions, one kept of so many; then the next pair, to the window's end."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of one window that are computed, in order.

    Attributes
    ----------
    index : intp [n]
        Of the window's positions, which.
    log_counts : float32 [n]
        Logarithm of how many positions each stands for: 0 for itself alone.
    n_whole : int
        So many from the first on are all there.
    """

    index: npt.NDArray[np.intp]
    log_counts: Float32
    n_whole: int

    def __len__(self) -> int:
        return len(self.index)


def whole(n_frames: int, n_audio_ctx: int) -> Positions:
    """All positions of a window, whatever it holds."""
    return Positions(np.arange(n_audio_ctx), np.zeros(n_audio_ctx, np.float32), n_audio_ctx)


def merged(n_frames: int, n_audio_ctx: int) -> Positions:
    """The positions of a window of `n_frames` mel frames of sound, its tail merged."""
    n_whole = min(n_audio_ctx, -(-n_frames // FRAMES_PER_POSITION) + EDGE_POSITIONS)
    if n_whole == n_audio_ctx:
        return whole(n_frames, n_audio_ctx)
    index, counts, start = list(range(n_whole)), [1] * n_whole, n_whole
    for length, factor in SCHEDULE:
        end = min(start + length, n_audio_ctx)
        while start < end:
            count = min(factor, end - start)
            index.append(start + count // 2)  # the one in the middle stands for the others
            counts.append(count)
            start += count
    return Positions(np.array(index), np.log(np.array(counts, np.float32)), n_whole)


TAILS = {"merged": merged, "whole": whole}
"""By name, what gives a window's positions: of its mel frames of sound, and of n_audio_ctx."""
