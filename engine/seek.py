"""The seek loop: window after window of one recording, each decoded, cut into segments, and moved on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.decoding import DecodingOptions, DecodingResult, DecodingTask, Fallback, detect_language
from engine.hallucinations import WindowTimes, without_hallucinations
from engine.mel import LogMel
from engine.model import Whisper
from engine.prompts import PromptHistory
from engine.segments import SECONDS_PER_FRAME, Segment, emptied, make_segment, split_window
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer
from engine.words import WordTimer

PROMPT_RESET_TEMPERATURE = 0.5
"""A window whose tokens were drawn at more than this is no help for the next: the text so far is forgotten (openai/whisper
transcribe.py)."""


class SeekLoop:
    """One recording on its way through the model.

    Parameters
    ----------
    heads : the checkpoint's alignment heads
    check : called before every encoder layer and every token; what it raises ends the work

    Attributes
    ----------
    seek : int
        First frame of the next window.
    segments : list of Segment
        Of the windows so far.
    language, language_probability : str or None, float
        None until a window was heard.
    n_tokens : int
        Sampled so far.

    Raises
    ------
    RequestError
        The model does not have what `options` ask for.
    """

    def __init__(
        self,
        model: Whisper,
        tokenizer: Tokenizer,
        heads: Sequence[tuple[int, int]],
        options: DecodingOptions,
        timings: LayerTimings,
        check: Callable[[], None],
    ) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._timings, self._check = timings, check
        self.seek = self.n_tokens = 0
        self.segments: list[Segment] = []
        self.language = self._language(options)
        self.language_probability = 1.0
        self._task = DecodingTask(model, tokenizer, options, self._encoded(options.prefix))
        self._fallback = Fallback(options)
        self._history = PromptHistory(
            self._encoded(options.initial_prompt),
            options.carry_initial_prompt,
            options.condition_on_previous_text,
            model.dims.n_text_ctx // 2 - 1,
        )
        self._timer = WordTimer(model, tokenizer, heads, options.task) if options.word_timestamps else None
        model.decoder.reserve(options.n_sequences)

    def transcribe_window(self, log_mel: LogMel) -> None:
        """Decode the window at `seek`, add its segments and move on.

        Raises
        ------
        AudioError, Cancelled, ModelError
            As `Engine.transcribe`.
        """
        n_frames = min(self._model.dims.n_frames, log_mel.n_frames - self.seek)
        with self._timings.stage("mel"):
            window = log_mel.window(self.seek)
        self._model.begin_window(window, self._timings, self._check)
        if self.language is None:
            found = detect_language(self._model.decoder, self._tokenizer.special, self._timings)
            self.language, self.language_probability = found
        result = self._decode(self.language)
        self.n_tokens += len(result.tokens)
        if self._fallback.is_silence(result):
            self.seek += n_frames
            return
        spans, advance, is_open = split_window(result.tokens, self._tokenizer.special.timestamp_begin, n_frames)
        confidence = result.avg_logprob, result.no_speech_prob, result.temperature, result.compression_ratio
        segments = [make_segment(span, self._tokenizer, self.seek, n_frames, confidence) for span in spans]
        end = self.seek + advance
        if self._timer is not None:
            segments, end = self._with_words(self._timer, segments, n_frames, end, is_open, log_mel)
        segments = [emptied(segment) for segment in segments]
        self.segments += segments
        self._history.add(
            (token for segment in segments for token in segment.tokens), result.temperature <= PROMPT_RESET_TEMPERATURE
        )
        self.seek = end

    def _decode(self, language: str) -> DecodingResult:
        """The window's tokens, at the first temperature whose text can be trusted."""
        prompt = self._history.prompt()
        # Seeded by the window: the same recording gives the same text, whatever was transcribed before.
        seed = self._options.seed + self.seek

        def attempt(temperature: float) -> DecodingResult:
            self._timings.fallbacks += temperature != self._options.temperatures[0]
            return self._task.run(language, prompt, temperature, seed, self._timings, self._check)

        return self._fallback.decode(attempt)

    def _with_words(
        self, timer: WordTimer, segments: list[Segment], n_frames: int, end: int, is_open: bool, log_mel: LogMel
    ) -> tuple[list[Segment], int]:
        """The window's segments with their words, and the frame to go on from: the last word's end, where speech goes on."""
        before = timer.last_speech_seconds
        segments = timer.add_words(segments, n_frames, self.language or "", self._timings)
        start, spoken_until = self.seek * SECONDS_PER_FRAME, _end(segments)
        if is_open and spoken_until is not None and spoken_until > start:
            end = max(self.seek + 1, round(spoken_until / SECONDS_PER_FRAME))
        threshold = self._options.hallucination_silence_threshold
        if threshold is not None:
            window_end = start + self._model.dims.n_frames * SECONDS_PER_FRAME
            if is_open and spoken_until is not None and window_end - spoken_until <= threshold:
                end = self.seek + n_frames
            times = WindowTimes(start, window_end, start + n_frames * SECONDS_PER_FRAME, log_mel.seconds)
            segments, again = without_hallucinations(segments, times, before, threshold)
            if again is not None:
                end = max(self.seek + 1, round(again / SECONDS_PER_FRAME))
        spoken_until = _end(segments)
        if spoken_until is not None:
            timer.last_speech_seconds = spoken_until
        return segments, end

    def _language(self, options: DecodingOptions) -> str | None:
        """The code to decode with; None where it is to be detected."""
        if options.language is not None:
            return self._tokenizer.language(options.language)
        return None if self._tokenizer.special.multilingual else "en"

    def _encoded(self, text: str) -> list[int]:
        """Ids of a prompt or prefix, which begin with a space (openai/whisper decoding.py)."""
        return self._tokenizer.encode(" " + text.strip()) if text.strip() else []


def _end(segments: Sequence[Segment]) -> float | None:
    """Where the last word ends, or the last segment where there are none (openai/whisper transcribe.py `get_end`)."""
    ends = [segment.words[-1].end for segment in segments if segment.words]
    return ends[-1] if ends else segments[-1].end if segments else None
