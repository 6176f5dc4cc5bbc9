"""The seek loop: window after window of one recording, each decoded, cut into segments, and moved on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.decoding import DecodingOptions, DecodingResult, DecodingTask, Fallback, detect_language
from engine.decoding.loops import without_repeats
from engine.decoding.silence import is_unsaid
from engine.errors import InvalidOptions
from engine.hallucinations import WindowTimes, without_hallucinations
from engine.mel import LogMel
from engine.model import Whisper
from engine.prompts import PromptHistory
from engine.segments import (
    SECONDS_PER_FRAME,
    Segment,
    Span,
    in_order,
    make_segment,
    says_something,
    split_window,
    without_empty,
)
from engine.speech import first_stretch, is_speechless
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer
from engine.words import WordTimer

PROMPT_RESET_TEMPERATURE = 0.5
"""A window whose tokens were drawn at more than this is no help for the next: the text so far is forgotten (openai/whisper
transcribe.py)."""


SURE_LANGUAGE = 0.5
"""A language less probable than this is looked for again in the next window that holds speech; the more probable one counts."""
MIN_ADVANCE_FRAMES = 20
"""Frames that a window goes on by at least: a text of timestamps a step apart would otherwise take an encoder pass a step."""
LOOP_SEGMENTS = 4
"""Segments before a window whose text loops, in which the same loop is looked for."""


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
        None until a window with speech was heard, where it is to be detected.
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
        if options.task != "transcribe" and not tokenizer.special.multilingual:
            raise InvalidOptions(f"task {options.task} needs multilingual weights, and these are English-only")
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._timings, self._check = timings, check
        self.seek = self.n_tokens = 0
        self.segments: list[Segment] = []
        self.language = self._language(options)
        self.language_probability = 0.0 if self.language is None else 1.0
        self._decode_text = tokenizer.stream()
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
        """Decode the window at `seek`, up to its first pause, add its segments and move on; or move on to where speech begins.

        Raises
        ------
        AudioError, Cancelled, ModelError
            As `Engine.transcribe`.
        """
        with self._timings.stage("mel"):
            window = log_mel.window(self.seek)
        if is_speechless(window):
            self._pass_over(len(window))
            return
        stretch = first_stretch(window)
        if stretch.start:  # the next call begins there
            self.seek += stretch.start
            return
        n_frames = stretch.stop
        self._model.begin_window(window[:n_frames], self._timings, self._check)
        language, probability = self._heard_language()
        result = self._decode(language)
        self.n_tokens += len(result.tokens)
        prompt = self._options.initial_prompt if self._history.tells_initial else ""
        if is_unsaid(result, self._tokenizer.decode(result.tokens), prompt, self._fallback):
            self._pass_over(n_frames)
            return
        self.language, self.language_probability = language, probability
        tokens = self._cut_loop(result)
        loops = tokens != result.tokens
        spans, advance, is_open = split_window(tokens, self._tokenizer.special.timestamp_begin, n_frames)
        if loops and is_open and (n_closed := sum(len(span.tokens) for span in spans)) < len(tokens):
            # A loop's timestamps tell nothing of where speech was, so the window is not looked at again from its last one on:
            # what stands behind that stays. The loop costs its own window, and no more.
            spans.append(Span(tokens[n_closed:], tokens[n_closed - 1] - self._tokenizer.special.timestamp_begin, None))
        confidence = result.avg_logprob, result.no_speech_prob, result.temperature, result.compression_ratio
        segments = [make_segment(span, self._tokenizer, self.seek, n_frames, confidence) for span in spans]
        end = self.seek + advance
        if self._timer is not None:
            self._check()
            segments, end = self._with_words(self._timer, segments, n_frames, end, is_open, language, log_mel.seconds)
        segments = [segment for segment in segments if says_something(segment)]
        segments = [replace(segment, text=self._decode_text(segment.tokens)) for segment in segments]
        floor = self.segments[-1].end if self.segments else 0.0
        segments, n_moved = in_order(segments, floor, log_mel.seconds)
        self._timings.repairs += n_moved
        self.segments[-1:] = without_empty([*self.segments[-1:], *segments])
        helps = result.temperature <= PROMPT_RESET_TEMPERATURE and not loops
        self._history.add((token for segment in segments for token in segment.tokens), helps)
        self.seek = self.seek + n_frames if loops else max(end, self.seek + min(MIN_ADVANCE_FRAMES, n_frames))

    def _cut_loop(self, result: DecodingResult) -> list[int]:
        """The window's tokens; fewer where they loop and no temperature helped."""
        if not self._fallback.loops(result):
            return result.tokens
        before = [token for segment in self.segments[-LOOP_SEGMENTS:] for token in segment.tokens]
        tokens = without_repeats(result.tokens, self._tokenizer.special.eot, before)
        self._timings.loops += tokens != result.tokens
        return tokens

    def finish(self) -> None:
        """No window follows: bytes that no more tokens complete are broken."""
        if left := self._decode_text(()):
            self.segments[-1] = replace(self.segments[-1], text=self.segments[-1].text + left)

    def _pass_over(self, n_frames: int) -> None:
        """Nothing was said in this window."""
        self._timings.silent_windows += 1
        self.seek += n_frames

    def _heard_language(self) -> tuple[str, float]:
        """The language to decode the window in: looked for in every window with speech until one was sure, then kept."""
        if self.language is not None and self.language_probability >= SURE_LANGUAGE:
            return self.language, self.language_probability
        self._check()
        found = detect_language(self._model.decoder, self._tokenizer.special, self._timings)
        if self.language is not None and found[1] < self.language_probability:
            return self.language, self.language_probability
        return found

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
        self,
        timer: WordTimer,
        segments: list[Segment],
        n_frames: int,
        end: int,
        is_open: bool,
        language: str,
        recording_seconds: float,
    ) -> tuple[list[Segment], int]:
        """The window's segments with their words, and the frame to go on from: the last word's end, where speech goes on."""
        before = timer.last_speech_seconds
        segments = timer.add_words(segments, n_frames, language, self._timings)
        start, spoken_until = self.seek * SECONDS_PER_FRAME, _end(segments)
        if is_open and spoken_until is not None and spoken_until > start:
            end = max(self.seek + 1, round(spoken_until / SECONDS_PER_FRAME))
        threshold = self._options.hallucination_silence_threshold
        if threshold is not None:
            window_end = start + self._model.dims.n_frames * SECONDS_PER_FRAME
            if is_open and spoken_until is not None and window_end - spoken_until <= threshold:
                end = self.seek + n_frames
            times = WindowTimes(start, window_end, start + n_frames * SECONDS_PER_FRAME, recording_seconds)
            segments, again = without_hallucinations(segments, times, before, threshold)
            if again is not None:
                end = max(self.seek + 1, round(again / SECONDS_PER_FRAME))
        spoken_until = _end(segments)
        timer.last_speech_seconds = before if spoken_until is None else spoken_until
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
