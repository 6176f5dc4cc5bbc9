"""Which language a window is in (openai/whisper decoding.py `detect_language`)."""

from __future__ import annotations

import numpy as np

from engine.kernels.reference import softmax
from engine.model import TextDecoder
from engine.timings import LayerTimings
from engine.tokenizer import SpecialTokens


def detect_language(decoder: TextDecoder, special: SpecialTokens, timings: LayerTimings) -> tuple[str, float]:
    """The likeliest language of the window that `Whisper.begin_window` got ready, and its probability among all languages.

    One step from the start token; the window is as ready as before.
    """
    codes = list(special.languages)
    with timings.stage("detect"):
        decoder.restart()
        logits = decoder.step([special.sot], [0], timings)[0]
    probabilities = np.array([logits[special.languages[code]] for code in codes], np.float32)
    softmax(probabilities)
    best = int(probabilities.argmax())
    return codes[best], float(probabilities[best])
