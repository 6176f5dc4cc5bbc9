"""Files → samples: what libsndfile reads, at any rate, and what is refused by name."""

from __future__ import annotations

import shutil
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.audio import read_blocks
from engine.dims import SAMPLE_RATE
from engine.errors import AudioError, BadSamples, EmptyAudio, UnsupportedAudio
from engine.resample import Resampler, UnsupportedRate


def tone(rate: int, seconds: float = 1.5, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def samples(path: Path) -> np.ndarray:
    blocks = list(read_blocks(path))
    assert all(block.dtype == np.float32 and block.ndim == 1 and len(block) for block in blocks)
    return np.concatenate(blocks)


@pytest.mark.parametrize(
    ("subtype", "tolerance"), [("PCM_16", 4e-5), ("PCM_24", 1e-6), ("PCM_32", 1e-6), ("PCM_U8", 1.2e-2), ("FLOAT", 0.0)]
)
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_a03_wav_of_any_depth_plain_and_extensible(container: str, subtype: str, tolerance: float, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, tone(SAMPLE_RATE), SAMPLE_RATE, subtype=subtype, format=container)
    assert np.allclose(samples(path), tone(SAMPLE_RATE), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)])
def test_a27_compressed_forms_are_known_by_their_bytes(kind: str, subtype: str | None, tmp_path: Path) -> None:
    for name in ("right", "x.wav", "x.raw", "x.txt"):
        path = tmp_path / name
        soundfile.write(path, tone(SAMPLE_RATE), SAMPLE_RATE, subtype=subtype, format=kind)
        found = samples(path)
        start = len(found) // 2  # encoders add silence in front: look at the middle, at the tone's power
        assert np.sqrt(np.mean(found[start : start + 4000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(SAMPLE_RATE), tone(SAMPLE_RATE, hertz=900.0)
    soundfile.write(tmp_path / "x.wav", np.stack([left, right], 1), SAMPLE_RATE, subtype="FLOAT")
    assert np.allclose(samples(tmp_path / "x.wav"), (left + right) / 2, atol=1e-7)


@pytest.mark.parametrize("n_bytes", [0, 44])
def test_a04_no_samples_is_empty_audio(n_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, np.zeros(0, np.float32), SAMPLE_RATE)
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(EmptyAudio):
        samples(path)


@pytest.mark.parametrize("content", [b"hello, this is no sound\n" * 50, bytes(range(256)) * 40, b"RIFF", b"fLaC" + b"\0" * 500])
def test_what_is_no_audio_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.flac"
    path.write_bytes(content)
    with pytest.raises(UnsupportedAudio, match="libsndfile"):
        samples(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a12_samples_that_are_no_number_are_refused(value: float, tmp_path: Path) -> None:
    spoiled = tone(SAMPLE_RATE)
    spoiled[len(spoiled) // 2] = value
    soundfile.write(tmp_path / "x.wav", spoiled, SAMPLE_RATE, subtype="FLOAT")
    with pytest.raises(BadSamples):
        samples(tmp_path / "x.wav")


def test_a06_a_damaged_end_costs_only_what_lies_behind_it(tmp_path: Path) -> None:
    """A FLAC whose last frame is broken: libsndfile reports an error after everything before it was decoded."""
    noise = (0.1 * np.random.default_rng(0).standard_normal(5 * SAMPLE_RATE)).astype(np.float32)
    soundfile.write(tmp_path / "x.flac", noise, SAMPLE_RATE)
    data = bytearray((tmp_path / "x.flac").read_bytes())
    data[len(data) * 6 // 10 :] = bytes(len(data) - len(data) * 6 // 10)
    (tmp_path / "x.flac").write_bytes(data)
    told: list[int] = []
    found = np.concatenate(list(read_blocks(tmp_path / "x.flac", lambda: told.append(1))))
    assert told == [1]
    assert 2.5 * SAMPLE_RATE < len(found) < 3.2 * SAMPLE_RATE
    assert np.abs(found[: 2 * SAMPLE_RATE] - noise[: 2 * SAMPLE_RATE]).max() < 1e-4


def test_a_whole_file_is_not_called_damaged(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.flac", tone(SAMPLE_RATE), SAMPLE_RATE)
    told: list[int] = []
    assert list(read_blocks(tmp_path / "x.flac", lambda: told.append(1)))
    assert not told


@pytest.mark.parametrize(
    ("rate", "channels"), [(1, 1), (3999, 1), (768_001, 1), (1_600_000_000, 1), (16000, 65), (192_000, 1024)]
)
def test_a_header_that_would_take_gigabytes_is_refused_by_name(rate: int, channels: int, tmp_path: Path) -> None:
    """Rate and channels are the header's word alone: a few kilobytes could claim days of sound or seconds of a gigabyte."""
    soundfile.write(tmp_path / "x.wav", np.zeros((50, channels), np.int16), rate)
    with pytest.raises(UnsupportedAudio, match=f"{rate} Hz" if channels == 1 else f"{channels} channels"):
        samples(tmp_path / "x.wav")


@pytest.mark.parametrize(("rate", "channels"), [(768_000, 1), (192_000, 64), (4000, 2)])
def test_memory_holds_at_the_limits_of_rate_and_channels(rate: int, channels: int, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", np.zeros((rate * 2, channels), np.int16), rate)
    tracemalloc.start()
    try:
        count = sum(len(block) for block in read_blocks(tmp_path / "x.wav"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 2 * SAMPLE_RATE
    assert peak < 32 << 20


def test_positions_do_not_overflow_where_numpy_counts_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On arm/v7 `arange` gives int32: six minutes at 44.1 kHz pass 2**31 in output samples times 441."""
    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda *a, **k: arange(*a, **({"dtype": np.int32} | k)))
    resampler = Resampler(44_100)
    made = sum(len(resampler.push(np.zeros(44_100, np.float32))) for _ in range(360)) + len(resampler.finish())
    assert made == 360 * SAMPLE_RATE


@pytest.mark.parametrize("scale", [1e7, 1e20, 3e38])
def test_a12_samples_far_beyond_full_scale_are_refused(scale: float, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", (tone(SAMPLE_RATE) * 2 * scale).astype(np.float32), SAMPLE_RATE, subtype="FLOAT")
    with pytest.raises(BadSamples):
        samples(tmp_path / "x.wav")


def test_a_file_is_closed_after_every_end(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    soundfile.write(good, tone(8000), 8000, format="WAV")
    bad.write_bytes(b"no sound")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        samples(good)
        next(read_blocks(good))
        with pytest.raises(AudioError):
            samples(bad)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


RATES = [8000, 11025, 16001, 22050, 24000, 44100, 48000, 96000, 192000]


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_keeps_its_pitch_phase_and_length_at_any_rate(rate: int, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", tone(rate), rate, subtype="FLOAT")
    found = samples(tmp_path / "x.wav")
    assert len(found) == -(-int(rate * 1.5) * SAMPLE_RATE // rate)
    expected = tone(SAMPLE_RATE)
    middle = slice(200, len(expected) - 200)
    assert np.abs(found[middle] - expected[middle]).max() < 2e-4


@pytest.mark.parametrize("rate", RATES)
def test_blocks_of_any_size_give_what_one_block_gives(rate: int) -> None:
    rng = np.random.default_rng(rate)
    noise = rng.standard_normal(rate + 77).astype(np.float32)
    whole = Resampler(rate)
    expected = np.concatenate([whole.push(noise), whole.finish()])
    split, out, position = Resampler(rate), [], 0
    while position < len(noise):
        size = int(rng.choice([1, 7, rate // 3]))
        out.append(split.push(noise[position : position + size]))
        position += size
    assert np.array_equal(np.concatenate([*out, split.finish()]), expected)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_the_filter_is_ffmpegs(rate: int, tmp_path: Path) -> None:
    """The reference resamples with FFmpeg; equal samples are what makes equal text. Within 8 of 32,768 steps."""
    if not shutil.which("ffmpeg"):
        pytest.skip("no ffmpeg here to compare with")
    rng = np.random.default_rng(0)
    pcm = (np.cumsum(rng.standard_normal(rate * 2)) % 200 * 50 - 5000).astype(np.int16)
    soundfile.write(tmp_path / "x.wav", pcm, rate)
    command = ["ffmpeg", "-v", "quiet", "-i", tmp_path / "x.wav", "-f", "s16le", "-ar", str(SAMPLE_RATE), "-"]
    theirs = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, "<i2")
    ours = samples(tmp_path / "x.wav") * 32768
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs)[100:-100].max() < 8


def test_a_rate_whose_filter_would_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRate, match="655357 Hz"):
        Resampler(655_357)
    soundfile.write(tmp_path / "x.wav", np.zeros(100, np.float32), 655_357)
    with pytest.raises(UnsupportedAudio, match="655357 Hz fits"):
        samples(tmp_path / "x.wav")


def test_a37_memory_does_not_grow_with_the_recording(tmp_path: Path) -> None:
    """Ten minutes at 44.1 kHz in stereo would be 200 MB as floats."""
    path = tmp_path / "x.flac"
    with soundfile.SoundFile(path, "w", 44100, 2) as file:
        for _ in range(120):
            file.write(np.stack([tone(44100, 5.0)] * 2, 1))
    peaks = []
    for seconds in (20, 600):
        tracemalloc.start()
        count = 0
        for block in read_blocks(path):
            count += len(block)
            if count >= seconds * SAMPLE_RATE:
                break
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (4 << 20)
