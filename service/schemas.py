"""Bodies of the API, for clients that read its OpenAPI page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TranscriptBody(BaseModel):
    """`response_format=json`."""

    text: str = Field(description="What was said, without a leading space; empty where nothing was")


class SegmentBody(BaseModel):
    """A stretch of the recording; seconds from its start."""

    id: int
    seek: int = Field(description="First frame (10 ms) of the 30 s window it was heard in")
    start: float
    end: float
    text: str = Field(description="With its leading space")
    tokens: list[int] = Field(description="Timestamps included")
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordBody(BaseModel):
    """A word with its punctuation; seconds from the recording's start."""

    word: str
    start: float
    end: float


class VerboseBody(BaseModel):
    """`response_format=verbose_json`; `segments` and `words` where their granularity was asked for."""

    task: str
    language: str | None = Field(description="English name; null where it was to be detected and nothing was said")
    duration: float = Field(description="Seconds")
    text: str
    segments: list[SegmentBody] | None = None
    words: list[WordBody] | None = None


class ErrorDetail(BaseModel):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The form field at fault")
    code: str = Field(description="Stable; clients may rely on it")


class ErrorBody(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


TRANSCRIBE_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "WAV, FLAC, Ogg, Opus or MP3"},
                        "language": {
                            "type": "string",
                            "description": "Code or English name; absent, empty or auto: detected",
                        },
                        "task": {"type": "string", "enum": ["transcribe", "translate"], "default": "transcribe"},
                        "prompt": {"type": "string", "description": "Text said to have come before: names, spelling"},
                        "temperature": {
                            "type": "string",
                            "description": "From 0 to 1; 0 or absent: raised where a window's text cannot be trusted",
                        },
                        "response_format": {
                            "type": "string",
                            "enum": ["json", "text", "srt", "vtt", "verbose_json"],
                            "default": "json",
                        },
                        "timestamp_granularities[]": {
                            "type": "array",
                            "items": {"type": "string", "enum": ["segment", "word"]},
                            "description": "With verbose_json; default: segment",
                        },
                    },
                }
            }
        },
    }
}
"""The form that `service.upload` reads by hand, as OpenAPI tells it."""
