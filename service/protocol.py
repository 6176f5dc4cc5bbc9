"""Messages between supervisor and worker: JSON objects, each behind its length.

A frame is a 32-bit big-endian length and that many bytes of UTF-8. Both ends are this package at one version, so a
message that does not parse is a fault, not a case.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
"""Text of a day of speech with its segments is about 5 MB; a longer frame is no message of ours."""


@dataclass(frozen=True, slots=True)
class Load:
    """To the worker, first: which model to load. `models_dir` is where a named model lives."""

    model: str
    models_dir: str
    weights: str
    kv: str | None
    residency: str | None
    tail: str
    budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class Transcribe:
    """To the worker: one job.

    Attributes
    ----------
    decoding : dict
        Fields of `engine.decoding.DecodingOptions`.
    subtitles : str
        `srt`, `vtt`, or empty for none.
    segments : bool
        Whether the answer is to hold them; those of hours are megabytes.
    deadline_seconds : float
        The worker gives up at the first token after so many.
    """

    job: str
    path: str
    decoding: dict[str, Any]
    subtitles: str
    segments: bool
    max_seconds: float
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the worker: give up `job` at the next check; nothing where it is not running."""

    job: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: the model is loaded and verified.

    Attributes
    ----------
    planned_peak_bytes : int or None
        What the worker foresees to have resident at most; None where the operator said how to run.
    """

    model_bytes: int
    weights: str
    kernels: str
    kv_bytes: dict[str, int]
    planned_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """From the worker: the model cannot be used; it exits."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """From the worker: a job's transcript.

    Attributes
    ----------
    language_name : str or None
        The language's English name.
    is_partial : bool
        The recording was damaged; the text is of what could be decoded.
    subtitles : str
        In the form asked for.
    segments : list of dict
        `engine.segments.Segment`'s fields; empty unless they were asked for.
    timings : dict
        `engine.timings.LayerTimings.to_json`.
    """

    job: str
    text: str
    language: str | None
    seconds: float
    n_tokens: int
    processing_seconds: float
    language_name: str | None = None
    is_partial: bool = False
    subtitles: str = ""
    segments: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """From the worker: a job it gave up, with the engine's code; `cause` is for the log alone."""

    job: str
    code: str
    message: str
    cause: str = ""
    timings: dict[str, Any] = field(default_factory=dict)


Message = Load | Transcribe | Cancel | Ready | Refused | Finished | Failed

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Load, Transcribe, Cancel, Ready, Refused, Finished, Failed)
}


class ProtocolError(Exception):
    """A frame that is no message."""


def encode(message: Message) -> bytes:
    """The message as a frame."""
    body = json.dumps({"kind": type(message).__name__} | asdict(message), separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """Bytes that follow a frame's 4-byte prefix.

    Raises
    ------
    ProtocolError
        More than `MAX_FRAME_BYTES`.
    """
    (length,) = LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is no message")
    return int(length)


def decode(body: bytes) -> Message:
    """The message in a frame's body.

    Raises
    ------
    ProtocolError
        It is none.
    """
    try:
        value = json.loads(body)
        return _KINDS[value.pop("kind")](**value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError("a frame holds no message") from error
