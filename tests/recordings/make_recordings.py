#!/usr/bin/env python3
"""Make the sample recordings (demo.flac, digits.flac, long.flac) with a synthetic voice.

The texts are in recordings.json beside this script, each with its speaking speed (1.0 is
the voice's own). The script writes the recordings beside it, as 16 kHz mono 16-bit FLAC,
and fills in "seconds", "voice" and "licence" in that file.

Voice: "heart", the default voice of the package hibari-tts. Package and voice model are
under Apache-2.0; the voice is distilled from Kokoro-82M (af_heart), also Apache-2.0. The
model is inside the package, so nothing is downloaded at run time.

To run it, in a fresh virtual environment (made with Python 3.11; the pins need 3.11 or later):

    pip install hibari-tts==0.2.1 numpy==2.4.6 onnxruntime==1.32.0 \\
                soundfile==0.14.0 soxr==1.1.0
    python make_recordings.py

The noise of each sentence has a fixed seed and the model runs on one thread: on one
machine the result is the same every time. Another processor or another version of
onnxruntime may change some samples slightly (not tried).
"""

import json
from pathlib import Path

import numpy as np
import soundfile
import soxr
from hibari import Hibari

VOICE = "hibari-tts 0.2.1, voice heart (distilled from Kokoro-82M af_heart)"
LICENCE = "Apache-2.0 (voice model and its teacher Kokoro-82M)"
RATE = 16000  # samples per second in the recordings
PAUSES = 0.5, 0.35, 0.6, 0.4  # seconds between sentences, used in turn
EDGE = 0.3  # seconds of silence at the start and at the end
PEAK = 0.7  # loudest sample of each recording, of 1.0 (about -3 dB)
QUIET = 0.003  # edges of a sentence below this count as silence
SEED = 20  # sentence n of a recording uses SEED + n


def silence(seconds):
    return np.zeros(round(seconds * RATE))


def trim(wave):
    """Cut what is quiet at both ends, but keep 20 ms so that no sound starts abruptly."""
    loud = np.flatnonzero(np.abs(wave) > QUIET)
    keep = round(0.02 * RATE)
    return wave[max(loud[0] - keep, 0) : loud[-1] + keep]


def speak(tts, text, speed):
    parts = [silence(EDGE)]
    for n, sentence in enumerate(tts.split_sentences(text)):
        if n:
            parts.append(silence(PAUSES[(n - 1) % len(PAUSES)]))
        wave = tts(sentence, speed=speed, seed=SEED + n)
        parts.append(trim(soxr.resample(wave.astype(float), tts.sample_rate, RATE)))
    wave = np.concatenate([*parts, silence(EDGE)])
    return wave * PEAK / np.abs(wave).max()


def main():
    here = Path(__file__).resolve().parent
    table = here / "recordings.json"
    recordings = json.loads(table.read_text(encoding="utf-8"))
    tts = Hibari(voice="heart", threads=1)
    for name, entry in recordings.items():
        wave = speak(tts, entry["text"], entry["speed"])
        pcm = np.round(wave * 32767).astype(np.int16)
        soundfile.write(here / name, pcm, RATE, subtype="PCM_16", compression_level=1.0)
        entry.update(seconds=round(len(pcm) / RATE, 2), voice=VOICE, licence=LICENCE)
        print(f"{name}: {entry['seconds']} s, {(here / name).stat().st_size} bytes")
    table.write_text(json.dumps(recordings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
