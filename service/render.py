"""A transcript → the body that was asked for."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response

from service.job_options import JobOptions
from service.protocol import Finished
from service.schemas import SegmentBody, TranscriptBody

WARNING_HEADER = "X-Thimble-Warning"
"""Says `partial_audio` where the recording was damaged: the text is of what could be decoded."""
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip; charset=utf-8", "vtt": "text/vtt"}


def render(finished: Finished, options: JobOptions) -> Response:
    """The response in the format of `options`. Subtitles were written by the worker, which knows how."""
    headers = {WARNING_HEADER: "partial_audio"} if finished.is_partial else {}
    text = finished.text.strip()
    if options.response_format in MEDIA_TYPES:
        body = text + "\n" if options.response_format == "text" else finished.subtitles
        return PlainTextResponse(body, headers=headers, media_type=MEDIA_TYPES[options.response_format])
    if options.response_format == "verbose_json":
        # Granularities that were not asked for are left out, as the hosted API leaves them out.
        return JSONResponse(_verbose(finished, options, text), headers=headers)
    return JSONResponse(TranscriptBody(text=text).model_dump(), headers=headers)


def _verbose(finished: Finished, options: JobOptions, text: str) -> dict[str, Any]:
    """`VerboseBody`'s fields, as plain as they came: hours of segments as models would be 50 MB for a moment."""
    task = options.decoding.get("task", "transcribe")
    body: dict[str, Any] = {
        "task": task,
        "language": "english" if task == "translate" else finished.language_name,
        "duration": finished.seconds,
        "text": text,
    }
    if "segment" in options.granularities:
        names = [name for name in SegmentBody.model_fields if name != "id"]
        body["segments"] = [
            {"id": number} | {name: segment[name] for name in names} for number, segment in enumerate(finished.segments)
        ]
    if "word" in options.granularities:
        words = (word for segment in finished.segments for word in segment["words"])
        body["words"] = [{"word": word["word"].strip(), "start": word["start"], "end": word["end"]} for word in words]
    return body
