"""A transcript → the body that was asked for."""

from __future__ import annotations

from fastapi.responses import JSONResponse, PlainTextResponse, Response

from service.errors import ServiceError
from service.protocol import Finished
from service.schemas import TranscriptBody

RESPONSE_FORMATS = ("json", "text")
WARNING_HEADER = "X-Thimble-Warning"
"""Says `partial_audio` where the recording was damaged: the text is of what could be decoded."""


def check_format(name: str) -> str:
    """`name`, or the default where it is empty.

    Raises
    ------
    ServiceError
        It is not one of `RESPONSE_FORMATS`.
    """
    if name and name not in RESPONSE_FORMATS:
        message = f"response_format is one of {', '.join(RESPONSE_FORMATS)}"
        raise ServiceError(400, "unsupported_response_format", message, "response_format")
    return name or RESPONSE_FORMATS[0]


def render(finished: Finished, response_format: str) -> Response:
    """The response in a format that `check_format` let through."""
    text = finished.text.strip()
    headers = {WARNING_HEADER: "partial_audio"} if finished.is_partial else {}
    if response_format == "text":
        return PlainTextResponse(text + "\n", headers=headers)
    return JSONResponse(TranscriptBody(text=text).model_dump(), headers=headers)
