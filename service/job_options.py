"""The form's fields → what a job asks for; wrong ones are refused before the recording is queued."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.errors import ServiceError

RESPONSE_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
SUBTITLES = ("srt", "vtt")
"""Of these, what the worker writes."""
TASKS = ("transcribe", "translate")
GRANULARITIES = ("segment", "word")
DETECT = ("", "auto")
"""Values of `language` that mean: find out."""
GRANULARITY_FIELDS = ("timestamp_granularities[]", "timestamp_granularities")
"""The hosted API's name carries the brackets; some clients leave them out."""
FIELDS = frozenset({"language", "task", "prompt", "temperature", "response_format", *GRANULARITY_FIELDS})
REPEATABLE = frozenset({"temperature", *GRANULARITY_FIELDS})
"""Fields that may stand several times; `Form.fields` holds their values with commas between."""
MAX_TEMPERATURES = 6


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a client asks for, checked.

    Attributes
    ----------
    response_format : str
        One of `RESPONSE_FORMATS`.
    granularities : frozenset of str
        What `verbose_json` tells the times of: some of `GRANULARITIES`.
    decoding : dict
        Fields of `engine.decoding.DecodingOptions`, JSON-ready; what is not named is at its default.
    """

    response_format: str = "json"
    granularities: frozenset[str] = frozenset({"segment"})
    decoding: dict[str, Any] = field(default_factory=dict)


def read_options(fields: Mapping[str, str]) -> JobOptions:
    """Check a form's fields; an empty one is as good as absent.

    Raises
    ------
    ServiceError
        Naming the field, and what it may be.
    """
    response_format = _one_of(fields, "response_format", RESPONSE_FORMATS, "unsupported_response_format")
    granularities = _granularities(fields, response_format)
    decoding: dict[str, Any] = {}
    language = fields.get("language", "").strip()
    if language.lower() not in DETECT:
        decoding["language"] = language
    if fields.get("task", "").strip():
        decoding["task"] = _one_of(fields, "task", TASKS, "unsupported_task")
    if fields.get("prompt", "").strip():
        decoding["initial_prompt"] = fields["prompt"]
    temperatures = _temperatures(fields.get("temperature", ""))
    if temperatures:
        decoding["temperatures"] = temperatures
    if "word" in granularities:
        decoding["word_timestamps"] = True
    return JobOptions(response_format, granularities, decoding)


def _one_of(fields: Mapping[str, str], name: str, known: tuple[str, ...], code: str) -> str:
    value = fields.get(name, "").strip() or known[0]
    if value not in known:
        raise ServiceError(400, code, f"{name} is one of {', '.join(known)}", name)
    return value


def _granularities(fields: Mapping[str, str], response_format: str) -> frozenset[str]:
    given = {part.strip() for name in GRANULARITY_FIELDS for part in fields.get(name, "").split(",") if part.strip()}
    if not given <= set(GRANULARITIES):
        message = f"timestamp_granularities[] is one of {', '.join(GRANULARITIES)}, or both"
        raise ServiceError(400, "unsupported_granularity", message, GRANULARITY_FIELDS[0])
    if given and response_format != "verbose_json":
        message = "timestamp_granularities[] needs response_format verbose_json"
        raise ServiceError(400, "unsupported_granularity", message, GRANULARITY_FIELDS[0])
    return frozenset(given or {"segment"})


def _temperatures(text: str) -> list[float]:
    """The temperatures to try in turn; none where they are left to the engine.

    0 alone is what clients send who have no opinion: to the hosted API it means the same as nothing, and to take it at its
    word would switch off the second look at windows that went wrong.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = [math.nan]
    if len(values) > MAX_TEMPERATURES or any(not 0.0 <= value <= 1.0 for value in values):
        message = f"temperature is a number from 0 to 1, or up to {MAX_TEMPERATURES} of them with commas between"
        raise ServiceError(400, "invalid_options", message, "temperature")
    return [] if values == [0.0] else values
