"""Any file that libsndfile reads → mono 16 kHz blocks, in bounded memory.

What the file is, its bytes decide; its name is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from engine.dims import SAMPLE_RATE, Float32
from engine.errors import BadSamples, EmptyAudio, UnsupportedAudio
from engine.resample import Resampler, UnsupportedRate

BLOCK_SECONDS = 1.0
"""Seconds decoded at a time."""


def read_blocks(path: Path) -> Iterator[Float32]:
    """Decode `path` from its start.

    Yields
    ------
    samples : float32 [n], mono, 16 kHz, n > 0
        Channels are averaged.

    Raises
    ------
    EmptyAudio
        Zero bytes or zero frames.
    UnsupportedAudio
        libsndfile does not know the form, or the data break off with nothing decoded.
    BadSamples
        A sample is NaN or infinite.
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
            yield from _resampled(sound)


def _resampled(sound: soundfile.SoundFile) -> Iterator[Float32]:
    n_samples = 0
    for samples in _mono(sound) if sound.samplerate == SAMPLE_RATE else _converted(sound):
        n_samples += len(samples)
        if len(samples):
            yield samples
    if n_samples == 0:
        raise EmptyAudio("the file holds no samples")


def _converted(sound: soundfile.SoundFile) -> Iterator[Float32]:
    try:
        resampler = Resampler(sound.samplerate)
    except UnsupportedRate as error:
        raise UnsupportedAudio(str(error)) from error
    for block in _mono(sound):
        yield resampler.push(block)
    yield resampler.finish()


def _mono(sound: soundfile.SoundFile) -> Iterator[Float32]:
    block_frames = max(1, int(sound.samplerate * BLOCK_SECONDS))
    while True:
        try:
            block = sound.read(block_frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise UnsupportedAudio(f"libsndfile stopped in the data: {error.error_string}") from error
        if not len(block):
            return
        if not np.isfinite(block).all():
            raise BadSamples("the file holds samples that are no finite number")
        yield np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))
