"""multipart/form-data → the spool, every limit enforced as the bytes arrive (RFC 7578, RFC 2046).

FastAPI's own form handling stores the whole body before the handler runs; here the handler asks for it, and a body
that is too large is refused at the byte that makes it so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import BinaryIO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.errors import ServiceError
from service.spool import disk_error

FORM_SLACK_BYTES = 64 << 10
"""Beyond the recording's own limit, for the other fields, part headers and boundaries."""
MAX_FIELD_BYTES = 16 << 10
MAX_PARTS = 16
MAX_HEADER_BYTES = 8 << 10
"""Of one part's headers together; a name of a few hundred characters fits."""
STALL_SECONDS = 30.0
"""An upload holds a place in the queue; one that sends nothing for this long gives it back."""
MAX_UPLOAD_SECONDS = 1800.0
"""And one that takes longer than this: 100 MiB at 60 kB/s."""
MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""
FILE_FIELD = "file"


@dataclass(slots=True)
class Form:
    """What arrived: the other fields' text, and how many bytes of recording."""

    fields: dict[str, str] = field(default_factory=dict)
    n_file_bytes: int | None = None


class _FormReader:
    """The parser's callbacks: keeps small fields, hands on the recording's bytes, counts everything."""

    def __init__(self, allowed: frozenset[str], repeatable: frozenset[str], max_file_bytes: int) -> None:
        self.form = Form()
        self.file_bytes: list[bytes] = []  # of the recording, since they were last taken
        self.complete = False
        self._allowed, self._repeatable, self._max_file_bytes = allowed, repeatable, max_file_bytes
        self._parts = 0
        self._name = ""
        self._value = bytearray()
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._header_bytes = 0
        self._headers: dict[str, bytes] = {}

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._part_begin,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value_data,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ServiceError(400, "too_many_fields", f"the form has more than {MAX_PARTS} parts")
        self._headers.clear()
        self._header_bytes = 0

    def _count_header(self, n_bytes: int) -> None:
        self._header_bytes += n_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ServiceError(400, "invalid_multipart", f"a part's headers have more than {MAX_HEADER_BYTES} bytes")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_name += data[start:end]

    def _header_value_data(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", errors="replace")
        if self._name != FILE_FIELD and self._name not in self._allowed:
            known = ", ".join(sorted(self._allowed | {FILE_FIELD}))
            raise ServiceError(400, "unknown_parameter", f"the form has a field that is not one of {known}")
        is_repeated = self._name in self.form.fields and self._name not in self._repeatable
        if is_repeated or (self._name == FILE_FIELD and self.form.n_file_bytes is not None):
            raise ServiceError(400, "repeated_parameter", f"the field {self._name} stands twice", self._name)
        if self._name == FILE_FIELD:
            self.form.n_file_bytes = 0
        self._value.clear()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self.form.n_file_bytes is not None and self._name == FILE_FIELD:
            self.form.n_file_bytes += end - start
            if self.form.n_file_bytes > self._max_file_bytes:
                raise upload_too_large(self._max_file_bytes)
            self.file_bytes.append(data[start:end])
        elif len(self._value) + end - start > MAX_FIELD_BYTES:
            raise ServiceError(400, "field_too_large", f"{self._name} has more than {MAX_FIELD_BYTES} bytes", self._name)
        else:
            self._value += data[start:end]

    def _part_end(self) -> None:
        if self._name != FILE_FIELD:
            value = self._value.decode("utf-8", errors="replace")
            before = self.form.fields.get(self._name)
            self.form.fields[self._name] = value if before is None else f"{before},{value}"

    def _end(self) -> None:
        self.complete = True


async def receive_form(
    request: Request, file: BinaryIO, allowed: frozenset[str], repeatable: frozenset[str], max_file_bytes: int
) -> Form:
    """Read the request's form, writing the part called `file` to `file` off the event loop.

    Parameters
    ----------
    allowed : names of the other fields
    repeatable : those of them that may stand several times; their values are joined by commas

    Raises
    ------
    ServiceError
        The body is no whole form, a limit is passed, a field is unknown, repeated or missing, or the disk is full.
    starlette.requests.ClientDisconnect
        The client went away.
    """
    reader = _FormReader(allowed, repeatable, max_file_bytes)
    parser = MultipartParser(_boundary(request), reader.callbacks())  # type: ignore[arg-type]
    async for block in _limited(request, max_file_bytes):
        try:
            parser.write(block)
        except FormParserError as error:
            raise ServiceError(400, "invalid_multipart", "the body is no valid multipart form") from error
        if reader.file_bytes:
            data, reader.file_bytes = b"".join(reader.file_bytes), []
            try:
                await asyncio.to_thread(_write_all, file, data)
            except OSError as error:
                raise disk_error(error) from error
    if not reader.complete:
        raise ServiceError(400, "invalid_multipart", "the body ends before its form does")
    if reader.form.n_file_bytes is None:
        raise ServiceError(400, "missing_file", "the form has no field called file", FILE_FIELD)
    return reader.form


def upload_too_large(max_file_bytes: int) -> ServiceError:
    return ServiceError(413, "upload_too_large", f"the recording has more than {max_file_bytes} bytes", FILE_FIELD)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise ServiceError(400, "invalid_multipart", "expected a body of multipart/form-data with a field called file")
    return boundary


async def _limited(request: Request, max_file_bytes: int) -> AsyncIterator[bytes]:
    """The body's blocks, up to the limit, whatever Content-Length claims."""
    limit = max_file_bytes + FORM_SLACK_BYTES
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise upload_too_large(max_file_bytes)
    seen, ends = 0, time.monotonic() + MAX_UPLOAD_SECONDS
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(min(STALL_SECONDS, ends - time.monotonic())):
                block = await anext(stream, None)
        except TimeoutError:
            message = f"nothing arrived for {STALL_SECONDS:g} s, or the upload took over {MAX_UPLOAD_SECONDS:g} s"
            raise ServiceError(408, "upload_stalled", message) from None
        if block is None:
            return
        seen += len(block)
        if seen > limit:
            raise upload_too_large(max_file_bytes)
        yield block


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
