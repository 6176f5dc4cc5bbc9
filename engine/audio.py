"""Any file that libsndfile reads → mono 16 kHz blocks, in bounded memory.

What the file is, its bytes decide; its name is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile

from engine.dims import SAMPLE_RATE, Float32
from engine.errors import BadSamples, EmptyAudio, UnsupportedAudio
from engine.resample import Resampler, UnsupportedRate

BLOCK_SECONDS = 1.0
"""Seconds decoded at a time."""
MAX_BLOCK_SAMPLES = 1 << 20
"""Of all channels together in one block: 4 MB, whatever rate and channels a header claims."""
MIN_RATE, MAX_RATE = 4_000, 768_000
"""Samples per second. Telephones have 8,000, studios up to 192,000; a header beyond these limits lies, and would
multiply a small file into hours of sound or gigabytes of filter."""
MAX_CHANNELS = 64
CANCELLED = 0.01
"""Of the loudest channel's energy: the mean of a block's channels has less only where they are opposed (20 dB)."""
MAX_AMPLITUDE = 1e6
"""Full scale is 1; some programs write 16-bit numbers as floats. Beyond this, float32 overflows on the way."""


def read_blocks(path: Path, on_damage: Callable[[], None] = lambda: None) -> Iterator[Float32]:
    """Decode `path` from its start, up to its end or to where it is damaged.

    Parameters
    ----------
    on_damage : callable
        Called once where the data break off after something was decoded: what follows is missing.

    Yields
    ------
    samples : float32 [n], mono, 16 kHz, n > 0
        Channels are averaged; where that cancels them out, the loudest is taken.

    Raises
    ------
    EmptyAudio
        Zero bytes or zero frames.
    UnsupportedAudio
        libsndfile does not know the form, the rate or the number of channels is beyond the limits above, or the data are
        damaged with nothing decoded.
    BadSamples
        A sample is NaN, infinite, or beyond `MAX_AMPLITUDE`.
    """
    if path.stat().st_size == 0:
        raise EmptyAudio("the file has no bytes")
    with path.open("rb") as file:
        try:
            # By descriptor: given a path, soundfile would judge the file by its name.
            sound = soundfile.SoundFile(file.fileno(), closefd=False)
        except soundfile.LibsndfileError as error:
            raise UnsupportedAudio(f"libsndfile cannot read the file: {error.error_string}") from error
        with sound:
            _check_form(sound)
            mono = _mono(sound, on_damage)
            n_samples = 0
            for samples in mono if sound.samplerate == SAMPLE_RATE else _resampled(mono, sound.samplerate):
                n_samples += len(samples)
                if len(samples):
                    yield samples
            if n_samples == 0:
                raise EmptyAudio("the file holds no samples")


def _mixed(block: Float32) -> Float32:
    """The mean of all channels [n, channels]; the loudest alone where they cancel out: one was wired the other way round."""
    mean: Float32 = block.mean(axis=1, dtype=np.float32)
    if block.shape[1] > 1:
        energies = np.einsum("ij,ij->j", block, block)
        if float(np.dot(mean, mean)) < CANCELLED * float(energies.max()):
            return np.ascontiguousarray(block[:, energies.argmax()])
    return mean


def _check_form(sound: soundfile.SoundFile) -> None:
    if not MIN_RATE <= sound.samplerate <= MAX_RATE:
        raise UnsupportedAudio(f"{sound.format} at {sound.samplerate} Hz; rates from {MIN_RATE} to {MAX_RATE} Hz are taken")
    if sound.channels > MAX_CHANNELS:
        raise UnsupportedAudio(f"{sound.format} of {sound.channels} channels; up to {MAX_CHANNELS} are taken")


def _resampled(blocks: Iterator[Float32], rate: int) -> Iterator[Float32]:
    try:
        resampler = Resampler(rate)
    except UnsupportedRate as error:
        raise UnsupportedAudio(str(error)) from error
    for block in blocks:
        yield resampler.push(block)
    yield resampler.finish()


def _mono(sound: soundfile.SoundFile, on_damage: Callable[[], None]) -> Iterator[Float32]:
    n_frames = min(int(sound.samplerate * BLOCK_SECONDS), MAX_BLOCK_SAMPLES // sound.channels)
    block = np.empty((n_frames, sound.channels), np.float32)
    n_decoded = 0
    while True:
        damage = None
        try:
            n = len(sound.read(out=block))
        except soundfile.LibsndfileError as error:
            damage = error
            n = max(0, min(sound.tell() - n_decoded, len(block)))  # decoded before it failed, and in `block`
        n_decoded += n
        if not (np.abs(block[:n]) <= MAX_AMPLITUDE).all():  # false for NaN too
            raise BadSamples(f"the file holds samples that are no finite number, or beyond {MAX_AMPLITUDE:g}")
        if n:
            yield _mixed(block[:n])
        if damage is not None:
            if n_decoded == 0:
                raise UnsupportedAudio(f"libsndfile cannot decode the data: {damage.error_string}") from damage
            on_damage()
        if damage is not None or n == 0:
            return
