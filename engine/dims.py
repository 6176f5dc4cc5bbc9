"""Whisper's dimensions, under OpenAI's names, and the constants of its audio front end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from engine.errors import ManifestInvalid

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]

# Source of these: openai/whisper audio.py.
SAMPLE_RATE = 16_000
"""Samples per second of every waveform in the engine (mono)."""
N_FFT = 400
"""Samples per short-time Fourier transform."""
HOP_LENGTH = 160
"""Samples from one frame to the next: a frame is 10 ms."""
CONV_WIDTH = 3
"""Kernel width of both convolutions (openai/whisper model.py)."""
FRAMES_PER_POSITION = 2
"""Mel frames per encoder position (the stride of the second convolution)."""
SECONDS_PER_POSITION = FRAMES_PER_POSITION * HOP_LENGTH / SAMPLE_RATE
"""Seconds per encoder position, and so per timestamp token: 0.02."""

BLOCK = 64
"""Weights along the input dimension that share one INT8 scale; divides every width of Whisper."""

TILE_ROWS = 1024
"""Rows of a matrix that are expanded and multiplied at a time, where there is room for them. A streamed block of the embedding
is a whole number of these tiles, so that every plan multiplies the same tiles and gets the same bits."""

MULTILINGUAL_N_VOCAB = 51_865
"""Vocabularies of this size and above are multilingual (openai/whisper model.py `is_multilingual`)."""


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """The ten numbers that fix the model's shape (openai/whisper model.py `ModelDimensions`)."""

    n_mels: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int

    @property
    def n_frames(self) -> int:
        """Mel frames in one window: 3000 for every published model."""
        return self.n_audio_ctx * FRAMES_PER_POSITION

    @property
    def n_window_samples(self) -> int:
        """Samples in one window: 480,000 (30 s) for every published model."""
        return self.n_frames * HOP_LENGTH

    @property
    def is_multilingual(self) -> bool:
        return self.n_vocab >= MULTILINGUAL_N_VOCAB

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> ModelDimensions:
        """Read and check dimensions.

        Raises
        ------
        ManifestInvalid
            A name is missing or unknown, a value is no positive integer, a width is no multiple of
            `BLOCK`, or the heads do not divide a width.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ManifestInvalid(f"dims must hold exactly {', '.join(sorted(names))}")
        if any(type(number) is not int or not 0 < number < 2**31 for number in value.values()):
            raise ManifestInvalid("dims: every dimension must be a positive whole number")
        dims = cls(**value)
        for width, heads in ((dims.n_audio_state, dims.n_audio_head), (dims.n_text_state, dims.n_text_head)):
            if width % BLOCK or width % heads:
                raise ManifestInvalid(f"dims: width {width} must be a multiple of {BLOCK} and of its {heads} heads")
        if dims.n_audio_state != dims.n_text_state:
            raise ManifestInvalid("dims: n_audio_state and n_text_state must be equal")
        return dims
