"""A recording → its transcript: `Engine` holds what the seek loop needs between recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from engine.audio import read_blocks
from engine.decoding import DecodingOptions
from engine.dims import SAMPLE_RATE, Float32
from engine.errors import AudioTooLong, Cancelled, MemoryBudgetExceeded
from engine.mel import LogMel
from engine.memory import available_budget, resident_bytes
from engine.model import Whisper
from engine.plan import KV_CHOICES, make_plan
from engine.seek import SeekLoop
from engine.segments import SECONDS_PER_FRAME, Segment
from engine.shards.manifest import read_manifest
from engine.shards.residency import Residency
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer

DEFAULT_OPTIONS = DecodingOptions()
SLACK_BYTES = 1 << 20
"""A process grows a little between two looks at what its least would be."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a recording.

    Attributes
    ----------
    text : str
        All segments' text, end to end, with the first one's leading space.
    language : str or None
        The code asked for, or the detected one; None where it was to be detected and nothing was said.
    language_probability : float
        Of the detected one among all languages; 1 where it was asked for or is the only one, 0 where there is none.
    seconds : float
        The recording's length.
    n_tokens : int
        Sampled tokens.
    is_partial : bool
        The file was damaged, and what lies behind the damage is missing.
    """

    text: str
    language: str | None
    language_probability: float
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
        K/V policy, one of `engine.kv_cache.KV_POLICIES`.
    residency : Residency, or one of `RESIDENCIES`
        Which weights stay mapped, and how the others come and go.

    tail : str
        `merged` computes little of the silence that fills a window of less than 30 s of sound; `whole` all of it, as
        openai/whisper does.

    budget_bytes : int or None
        Resident memory that the process may have in all, with what it has already: residency follows from it, and the K/V
        policy where none is asked for.

    Attributes
    ----------
    plan : Plan or None
        What was made of the budget.

    Raises
    ------
    MemoryBudgetExceeded
        The model cannot run in so little.
    ModelError
        The directory does not hold the whole, unaltered model.
    """

    def __init__(
        self,
        directory: Path,
        kv: str | None = None,
        residency: Residency | str = "resident",
        tail: str = "merged",
        budget_bytes: int | None = None,
    ) -> None:
        plan = None
        if budget_bytes is not None:
            plan = make_plan(read_manifest(directory), budget_bytes, resident_bytes(), KV_CHOICES if kv is None else (kv,))
        self.plan = plan
        self._store = ShardStore(directory, residency if plan is None else plan.residency)
        self._tokenizer = Tokenizer(self._store.vocabulary(), self._store.token_order)
        self._model = Whisper(self._store, plan.kv if plan is not None else kv or KV_CHOICES[0], tail)
        self.model_bytes = self._store.manifest.n_bytes
        self.weights = self._store.manifest.weights
        self.kv_bytes = {"self": self._model.self_kv_bytes, "cross": self._model.cross_kv_bytes}

    @classmethod
    def within_what_is_left(cls, directory: Path, kv: str | None = None, tail: str = "merged", others_bytes: int = 0) -> Engine:
        """The model as the memory allows that the control group and the machine have left.

        Where that is too little it runs as small as it goes, since nobody asked for so little; where nothing says how much
        there is, all of it stays mapped.

        Errors and parameters are the class's, and `others_bytes` those of `available_budget`.
        """
        budget = available_budget(others_bytes)
        try:
            return cls(directory, kv, tail=tail, budget_bytes=budget)
        except MemoryBudgetExceeded as error:
            return cls(directory, kv, tail=tail, budget_bytes=error.least_bytes + SLACK_BYTES)

    def transcribe(
        self,
        path: Path,
        timings: LayerTimings,
        options: DecodingOptions = DEFAULT_OPTIONS,
        max_seconds: float = inf,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[float, float], None] = lambda done, total: None,
    ) -> Transcript:
        """Transcribe the recording at `path`.

        Parameters
        ----------
        timings : LayerTimings
            Filled as the work goes on, so that it also tells of work that ended in an error.
        max_seconds : float
            A longer recording is refused, as soon as that much of it is decoded.
        should_stop : callable
            Asked before every encoder layer and every token.
        on_progress : callable
            Told after every window how many seconds are done, and of how many.

        Raises
        ------
        AudioError
            The fault is in the recording.
        RequestError
            The model does not have what `options` ask for.
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

        loop = SeekLoop(self._model, self._tokenizer, self._store.manifest.alignment_heads, options, timings, check)
        with timings.stage("audio"):
            log_mel = LogMel(blocks, self._model.log_mel)
        try:
            while loop.seek < log_mel.n_frames:
                loop.transcribe_window(log_mel)
                done = loop.seek * SECONDS_PER_FRAME if loop.seek < log_mel.n_frames else log_mel.seconds
                on_progress(done, log_mel.seconds)
        finally:
            self._model.decoder.reserve(1)
            self._store.evict()
        loop.finish()
        text = "".join(segment.text for segment in loop.segments)
        language = loop.language, loop.language_probability
        return Transcript(text, *language, log_mel.seconds, tuple(loop.segments), loop.n_tokens, is_partial)

    def close(self) -> None:
        """Unmap the weights."""
        self._store.close()
