"""The form reader on scripted bodies, cut at every byte."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from fastapi import Request

from service import upload
from service.errors import ServiceError
from service.upload import Form, receive_form

RECORDING = b"--b is not the boundary\r\n-- \x00\xff" * 3
BODY = (
    b'--b\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\nContent-Type: audio/wav\r\n\r\n'
    + RECORDING
    + b'\r\n--b\r\ncontent-disposition: form-data; name="response_format"\r\n\r\ntext\r\n--b--\r\n'
)


def request(blocks: list[bytes], pause: float = 0.0) -> Request:
    async def messages() -> AsyncIterator[dict[str, object]]:
        for block in blocks:
            await asyncio.sleep(pause)
            yield {"type": "http.request", "body": block, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    source = messages()
    headers = [(b"content-type", b'multipart/form-data; boundary="b"')]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive=lambda: anext(source))


def receive(blocks: list[bytes], limit: int = 1000, pause: float = 0.0) -> tuple[Form, bytes]:
    file = io.BytesIO()
    form = asyncio.run(
        receive_form(request(blocks, pause), file, frozenset({"language", "response_format"}), frozenset(), limit)
    )
    return form, file.getvalue()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_blocks_of_any_size_give_the_same_form(size: int) -> None:
    form, recording = receive([BODY[i : i + size] for i in range(0, len(BODY), size)])
    assert form.fields == {"language": "en", "response_format": "text"}
    assert (form.n_file_bytes, recording) == (len(RECORDING), RECORDING)


def test_a_body_cut_anywhere_is_refused() -> None:
    end = BODY.rindex(b"--b--") + 5  # what follows the closing boundary is an epilogue
    for length in range(end):
        with pytest.raises(ServiceError) as caught:
            receive([BODY[:length]])
        assert caught.value.code == "invalid_multipart"
    assert receive([BODY[:end]])[1] == RECORDING


def test_the_limit_holds_at_the_byte() -> None:
    assert receive([BODY], limit=len(RECORDING))[1] == RECORDING
    with pytest.raises(ServiceError) as caught:
        receive([BODY], limit=len(RECORDING) - 1)
    assert (caught.value.status, caught.value.code) == (413, "upload_too_large")


def test_a_body_that_never_ends_is_refused_at_the_limit_and_its_slack() -> None:
    sent = 0

    def endless() -> bytes:
        nonlocal sent
        sent += 1000
        return b"p" * 1000

    with pytest.raises(ServiceError) as caught:
        receive([b'--b\r\nContent-Disposition: form-data; name="language"\r\n\r\n', *(endless() for _ in range(200))])
    assert caught.value.code in ("field_too_large", "upload_too_large")


def test_an_upload_that_stalls_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STALL_SECONDS", 0.05)
    with pytest.raises(ServiceError) as caught:
        receive([BODY[:50], BODY[50:]], pause=1.0)
    assert (caught.value.status, caught.value.code) == (408, "upload_stalled")
    assert receive([BODY[:50], BODY[50:]], pause=0.01)[1] == RECORDING
