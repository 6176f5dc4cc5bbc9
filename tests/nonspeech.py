"""Twenty clips without speech, from scratch: silence, hiss, hum, music and keyboard noise, four of each.

python -m tests.nonspeech DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000

Samples = np.ndarray


def _seconds(n: float) -> Samples:
    return np.arange(int(n * RATE)) / RATE


def _noise(seconds: float, decibels: float, slope: float, seed: int) -> Samples:
    """Noise of a root mean square `decibels` below full scale; its power falls with frequency to the `slope`."""
    n = int(seconds * RATE)
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(n))
    frequency = np.maximum(np.fft.rfftfreq(n, 1 / RATE), 20.0)
    samples = np.fft.irfft(spectrum * frequency ** (-slope / 2), n)
    return samples / np.sqrt(np.mean(samples**2)) * 10 ** (decibels / 20)


def _hum(seconds: float, hertz: float, partials: list[float], level: float) -> Samples:
    t = _seconds(seconds)
    wave = sum(a * np.sin(2 * np.pi * hertz * (k + 1) * t + k) for k, a in enumerate(partials))
    return level * wave / max(map(abs, partials))


def _notes(table: list[tuple[float, float, float]], seconds: float, voice: Callable[[float, Samples], Samples]) -> Samples:
    """Notes (start, length, hertz) played by a voice that is given a pitch and its seconds."""
    out = np.zeros(int(seconds * RATE))
    for start, length, hertz in table:
        t = _seconds(min(length, seconds - start))
        begin = int(start * RATE)
        out[begin : begin + len(t)] += voice(hertz, t)[: len(out) - begin]
    return 0.3 * out / np.abs(out).max()


def _piano(hertz: float, t: Samples) -> Samples:
    return sum(np.sin(2 * np.pi * hertz * k * t) * np.exp(-t * (2 + k)) / k for k in range(1, 7))


def _organ(hertz: float, t: Samples) -> Samples:
    vibrato = hertz * t + 0.4 * np.sin(2 * np.pi * 5.5 * t)
    return sum(np.sin(2 * np.pi * k * vibrato) / k for k in (1, 2, 3, 4, 6)) * np.minimum(1, 20 * t)


def _plucked(hertz: float, t: Samples) -> Samples:
    """Karplus and Strong 1983: a burst of noise going round in a delay line that softens it."""
    line = np.random.default_rng(int(hertz)).uniform(-1, 1, int(RATE / hertz))
    out = np.empty(len(t) + len(line))
    for begin in range(0, len(out), len(line)):
        part = line[: len(out) - begin]
        out[begin : begin + len(part)] = part
        line = 0.498 * (line + np.roll(line, 1))
    return out[: len(t)]


def _drums(seconds: float, seed: int) -> Samples:
    rng, out = np.random.default_rng(seed), np.zeros(int(seconds * RATE))
    for i in range(int(seconds * 4)):
        t = _seconds(0.2)
        kick = np.sin(2 * np.pi * (50 * t + 8 * (1 - np.exp(-30 * t)))) * np.exp(-18 * t)
        hat = rng.standard_normal(len(t)) * np.exp(-60 * t) * 0.4
        snare = rng.standard_normal(len(t)) * np.exp(-20 * t) * 0.6
        begin = i * RATE // 4
        out[begin : begin + len(t)] += (hat + (kick if i % 4 == 0 else snare if i % 4 == 2 else 0))[: len(out) - begin]
    return 0.5 * out / np.abs(out).max()


def _keys(seconds: float, per_second: float, decay: float, hertz: float, seed: int) -> Samples:
    """Clicks at random times: a burst of noise and a short ring, as a key going down and up makes."""
    rng, out = np.random.default_rng(seed), _noise(seconds, -65, 0, seed)
    at = 0.3
    while at < seconds - 0.3:
        for delay, level in ((0.0, 1.0), (0.07 + 0.03 * rng.random(), 0.4)):
            t = _seconds(0.05)
            pitch = hertz * (0.8 + 0.4 * rng.random())
            click = (rng.standard_normal(len(t)) + np.sin(2 * np.pi * pitch * t)) * np.exp(-decay * t)
            begin = int((at + delay) * RATE)
            out[begin : begin + len(t)] += 0.2 * level * (0.5 + rng.random()) * click
        at += rng.exponential(1 / per_second) + 0.05
    return np.clip(out, -1, 1)


def _melody(pitches: list[int], step: float, length: float, seconds: float) -> list[tuple[float, float, float]]:
    n = int(seconds / step)
    return [(i * step, length, 440 * 2 ** ((pitches[i % len(pitches)] - 69) / 12)) for i in range(n)]


_CHORDS = [
    (2.0 * i, 2.5, 440 * 2 ** ((p - 69) / 12)) for i in range(6) for p in ((60, 64, 67), (57, 60, 64), (62, 65, 69))[i % 3]
]

CLIPS: dict[str, Callable[[], Samples]] = {
    "silence-1s": lambda: np.zeros(19_200),
    "silence-30s": lambda: np.zeros(30 * RATE),
    "silence-dither": lambda: np.random.default_rng(1).integers(-1, 2, 10 * RATE) / 32_768,
    "silence-offset": lambda: np.full(8 * RATE, 0.02),
    "hiss-60db": lambda: _noise(10, -60, 0, 2),
    "hiss-30db": lambda: _noise(12, -30, 0, 3),
    "hiss-pink": lambda: _noise(35, -25, 1, 4),
    "hiss-brown": lambda: _noise(10, -20, 2, 5),
    "hum-50hz": lambda: _hum(10, 50, [1.0], 0.1),
    "hum-60hz-buzz": lambda: _hum(12, 60, [1, 0.5, 0.7, 0.3, 0.4, 0.2, 0.2, 0.1], 0.1) + _noise(12, -55, 0, 6),
    "hum-fan": lambda: _hum(20, 118, [1, 0.6, 0.2], 0.03) + _noise(20, -32, 1.3, 7),
    "hum-transformer": lambda: _hum(40, 100, [1, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.1, 0.1], 0.2),
    "music-piano": lambda: _notes(_CHORDS, 14, _piano),
    "music-organ": lambda: _notes(_CHORDS, 14, _organ),
    "music-guitar": lambda: _notes(_melody([52, 59, 64, 67, 71, 67, 64, 59], 0.22, 1.2, 15), 15, _plucked),
    "music-drums": lambda: _drums(12, 8),
    "keys-typing": lambda: _keys(15, 5, 120, 2500, 9),
    "keys-slow": lambda: _keys(12, 1.2, 90, 1800, 10),
    "keys-mechanical": lambda: _keys(31, 7, 60, 3200, 11),
    "keys-mouse": lambda: _keys(8, 0.7, 250, 4500, 12),
}
"""By name: makes float64 samples, 16 kHz, seeded, the same at every call."""


def write(directory: Path) -> list[Path]:
    """Write every clip as a 16-bit WAV file."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in CLIPS.items():
        paths.append(directory / f"{name}.wav")
        soundfile.write(paths[-1], make(), RATE, subtype="PCM_16")
    return paths


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
