"""A recording → its transcript: the seek loop, and `Engine`, which holds what the loop needs between recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from engine.audio import read_blocks
from engine.decoding import DecodingOptions, DecodingResult, DecodingTask, Fallback, is_silence
from engine.dims import SAMPLE_RATE, Float32
from engine.errors import AudioTooLong, Cancelled
from engine.mel import LogMel
from engine.model import Whisper
from engine.segments import Segment, make_segment, split_window
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer

PROMPT_RESET_TEMPERATURE = 0.5
"""A window whose tokens were drawn at more than this is no help for the next: the text so far is forgotten (openai/whisper
transcribe.py)."""
DEFAULT_FALLBACK = Fallback()


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a recording.

    Attributes
    ----------
    text : str
        All segments' text, end to end, with the first one's leading space.
    language : str
        The code asked for, or the detected one.
    seconds : float
        The recording's length.
    n_tokens : int
        Sampled tokens.
    is_partial : bool
        The file was damaged, and what lies behind the damage is missing.
    """

    text: str
    language: str
    seconds: float
    segments: tuple[Segment, ...]
    n_tokens: int
    is_partial: bool


class Engine:
    """A loaded model, for one recording at a time.

    Parameters
    ----------
    directory : Path
        As `thimble convert` or `thimble fetch` writes it.
    kv : str
        K/V policy: `int8` or `f32`.
    residency : str
        `resident` keeps every shard mapped once it was needed, `stream` unmaps it when the next one comes.

    Raises
    ------
    ModelError
        The directory does not hold the whole, unaltered model.
    """

    def __init__(self, directory: Path, kv: str = "int8", residency: str = "resident") -> None:
        self._store = ShardStore(directory, residency)
        self._tokenizer = Tokenizer(self._store.vocabulary(), self._store.token_order)
        self._model = Whisper(self._store, kv)
        self._task = DecodingTask(self._model, self._tokenizer)
        self.model_bytes = self._store.manifest.n_bytes
        self.weights = self._store.manifest.weights
        self.kv_bytes = {"self": self._model.self_kv_bytes, "cross": self._model.cross_kv_bytes}

    def transcribe(
        self,
        path: Path,
        timings: LayerTimings,
        language: str | None = None,
        max_seconds: float = inf,
        should_stop: Callable[[], bool] = lambda: False,
        fallback: Fallback = DEFAULT_FALLBACK,
    ) -> Transcript:
        """Transcribe the recording at `path`.

        Parameters
        ----------
        timings : LayerTimings
            Filled as the work goes on, so that it also tells of work that ended in an error.
        language : str or None
            A code, a code with a region or an English name; None detects it in the first window (English-only
            weights: English).
        max_seconds : float
            A longer recording is refused, as soon as that much of it is decoded.
        should_stop : callable
            Asked before every encoder layer and every token.
        fallback : Fallback
            The temperatures to decode a window at, in turn, until its text can be trusted.

        Raises
        ------
        AudioError
            The fault is in the recording.
        UnsupportedLanguage
            The model does not have `language`.
        Cancelled
            `should_stop` said so.
        ModelError
            A shard is gone or broken, or the network's output is not finite.
        """

        def check() -> None:
            if should_stop():
                raise Cancelled("the caller asked to stop")

        is_partial = False

        def note_damage() -> None:
            nonlocal is_partial
            is_partial = True

        def blocks() -> Iterator[Float32]:
            n_samples = 0
            for block in read_blocks(path, note_damage):
                check()
                n_samples += len(block)
                if n_samples > max_seconds * SAMPLE_RATE:
                    raise AudioTooLong(f"the recording is longer than {max_seconds:g} s")
                yield block

        code = self._language(language)
        with timings.stage("audio"):
            log_mel = LogMel(blocks, self._model.dims)
        segments: list[Segment] = []
        seek = n_tokens = prompt_since = 0
        while seek < log_mel.n_frames:
            with timings.stage("mel"):
                window = log_mel.window(seek)
            self._model.begin_window(window, timings, check)
            code = code or self._task.detect_language(timings)
            # The text so far helps with the next window's names and spelling (the reference's
            # `condition_on_previous_text`).
            prompt = tuple(token for segment in segments[prompt_since:] for token in segment.tokens)
            # Seeded by the window: the same recording gives the same text, whatever was transcribed before.
            result = self._decode(DecodingOptions(code, prompt=prompt, seed=seek), fallback, timings, check)
            found, advance = self._segments(result, seek, min(self._model.dims.n_frames, log_mel.n_frames - seek))
            segments += found
            if found and result.temperature > PROMPT_RESET_TEMPERATURE:
                prompt_since = len(segments)
            n_tokens += len(result.tokens)
            seek += advance
        # Joined by tokens, not by text: a character may lie across two segments.
        text = self._tokenizer.decode(token for segment in segments for token in segment.tokens)
        return Transcript(text, code or "", log_mel.seconds, tuple(segments), n_tokens, is_partial)

    def _decode(
        self, options: DecodingOptions, fallback: Fallback, timings: LayerTimings, check: Callable[[], None]
    ) -> DecodingResult:
        """The window's tokens, at the first temperature whose text can be trusted."""

        def attempt(temperature: float) -> DecodingResult:
            timings.fallbacks += temperature != fallback.temperatures[0]
            return self._task.run(replace(options, temperature=temperature), timings, check)

        return fallback.decode(attempt)

    def _language(self, language: str | None) -> str | None:
        """The code to decode with; None where it is to be detected."""
        if language is not None:
            return self._tokenizer.language(language)
        return None if self._tokenizer.special.multilingual else "en"

    def _segments(self, result: DecodingResult, seek: int, n_frames: int) -> tuple[list[Segment], int]:
        """One window's segments, none where it is silence, and the frames to move on by."""
        if is_silence(result):
            return [], n_frames
        spans, advance = split_window(result.tokens, self._tokenizer.special.timestamp_begin, n_frames)
        confidence = result.avg_logprob, result.no_speech_prob, result.temperature, result.compression_ratio
        return [make_segment(span, self._tokenizer, seek, n_frames, confidence) for span in spans], advance

    def close(self) -> None:
        """Unmap the weights."""
        self._store.close()
