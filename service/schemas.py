"""Bodies of the API, for clients that read its OpenAPI page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TranscriptBody(BaseModel):
    """`response_format=json`."""

    text: str = Field(description="What was said, without a leading space; empty where nothing was")


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
                        "response_format": {"type": "string", "enum": ["json", "text"], "default": "json"},
                    },
                }
            }
        },
    }
}
"""The form that `service.upload` reads by hand, as OpenAPI tells it."""
