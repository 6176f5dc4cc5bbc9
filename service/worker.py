"""The worker process: reads jobs from standard input, answers on standard output. No sockets, no HTTP.

Started as `python -m service.worker` by the supervisor. It ends when its input ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from engine.decoding import DecodingOptions
from engine.errors import Cancelled, EngineError, ManifestInvalid, ModelOutdated
from engine.languages import LANGUAGES
from engine.published import MODELS, find_model
from engine.timings import LayerTimings
from engine.transcribe import Engine
from engine.writers import WRITERS
from service.protocol import (
    LENGTH,
    Cancel,
    Failed,
    Finished,
    Load,
    Message,
    Ready,
    Refused,
    Transcribe,
    body_length,
    decode,
    encode,
)

OTHERS_BYTES = 16 << 20
"""For a front end that takes in an upload, pages of the recording, and what the kernel needs for both (service/DESIGN.md)."""
PROTOCOL_DESCRIPTORS = 3, 4
"""Where the pipes are kept, so that nothing that prints or reads can touch them."""


class _Inbox:
    """Messages from the supervisor, read by a thread so that a cancellation is seen in the middle of a job."""

    def __init__(self, stream: BinaryIO) -> None:
        self.messages: queue.SimpleQueue[Load | Transcribe] = queue.SimpleQueue()
        self.cancelled = ""
        self._stream = stream
        threading.Thread(target=self._read, daemon=True, name="inbox").start()

    def _read(self) -> None:
        while len(prefix := self._stream.read(LENGTH.size)) == LENGTH.size:
            message = decode(self._stream.read(body_length(prefix)))
            if isinstance(message, Cancel):
                self.cancelled = message.job
            elif isinstance(message, Load | Transcribe):
                self.messages.put(message)
        # The supervisor closed the pipe, or is dead: nobody wants what is being computed.
        os._exit(0)


class _Outbox:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def send(self, message: Message) -> None:
        self._stream.write(encode(message))
        self._stream.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off standard input and output: a library that prints must not garble it."""
    read, write = PROTOCOL_DESCRIPTORS
    os.dup2(0, read, inheritable=False)
    os.dup2(1, write, inheritable=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return os.fdopen(read, "rb"), os.fdopen(write, "wb")


def _load(request: Load) -> Engine:
    directory = find_model(Path(request.models_dir), request.model, request.weights)
    if request.residency is None and request.budget_bytes is None:
        return Engine.within_what_is_left(directory, request.kv, request.tail, OTHERS_BYTES)
    return Engine(directory, request.kv, request.residency or "resident", request.tail, request.budget_bytes)


def _options(decoding: dict[str, Any]) -> DecodingOptions:
    """JSON's lists as the tuples they were.

    Raises
    ------
    InvalidOptions
    """
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in decoding.items()}
    return DecodingOptions(**given)


def _transcribe(engine: Engine, job: Transcribe, inbox: _Inbox) -> Finished | Failed:
    timings = LayerTimings()
    started = time.perf_counter()
    is_late = False

    def should_stop() -> bool:
        nonlocal is_late
        is_late = time.perf_counter() - started > job.deadline_seconds
        return is_late or inbox.cancelled == job.job

    try:
        transcript = engine.transcribe(Path(job.path), timings, _options(job.decoding), job.max_seconds, should_stop)
    except EngineError as error:
        if isinstance(error, Cancelled) and is_late:
            message = f"the job took longer than {job.deadline_seconds:g} s"
            return Failed(job.job, "deadline_exceeded", message, timings=timings.to_json())
        return Failed(job.job, error.code, str(error), timings=timings.to_json())
    except Exception as error:  # the worker's boundary: one job's fault must not end the worker
        cause = "".join(traceback.format_exception(error))
        return Failed(job.job, "internal_error", "the engine failed; the log says why", cause, timings.to_json())
    return Finished(
        job=job.job,
        text=transcript.text,
        language=transcript.language,
        seconds=transcript.seconds,
        n_tokens=transcript.n_tokens,
        processing_seconds=time.perf_counter() - started,
        language_name=LANGUAGES.get(transcript.language) if transcript.language else None,
        is_partial=transcript.is_partial,
        subtitles=WRITERS[job.subtitles](transcript.segments) if job.subtitles else "",
        segments=[asdict(segment) for segment in transcript.segments] if job.segments else [],
        timings=timings.to_json(),
    )


def main() -> int:
    """Serve until the input ends; exit status 1 where the model cannot be used."""
    # A terminal's Ctrl-C and systemd's SIGTERM reach the whole group; the supervisor decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reading, writing = _take_pipes()
    inbox, outbox = _Inbox(reading), _Outbox(writing)
    request = inbox.messages.get()
    if not isinstance(request, Load):
        raise RuntimeError(f"expected Load first, found {type(request).__name__}")
    try:
        engine = _load(request)
    except EngineError as error:
        # Only a published model can be fetched again.
        mendable = error.code != ModelOutdated.code or request.model in MODELS
        outbox.send(Refused(error.code if mendable else ManifestInvalid.code, str(error)))
        return 1
    peak_bytes = engine.plan.peak_bytes if engine.plan is not None else None
    outbox.send(Ready(engine.model_bytes, engine.weights, "reference", engine.kv_bytes, peak_bytes))
    while True:
        job = inbox.messages.get()
        if isinstance(job, Transcribe):
            outbox.send(_transcribe(engine, job, inbox))


if __name__ == "__main__":
    sys.exit(main())
