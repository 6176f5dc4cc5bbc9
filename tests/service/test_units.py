"""The service's small parts, each alone: settings, jobs, queue, spool, protocol, errors, rendering, logs."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.cli_plan import size
from service.errors import ENGINE_STATUS, engine_error, error_body
from service.job_options import JobOptions
from service.job_queue import JobQueue, QueueFull
from service.jobs import Job, JobState, moved
from service.logs import _JsonFormatter
from service.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    Cancel,
    Failed,
    Finished,
    Load,
    Message,
    ProtocolError,
    Ready,
    Refused,
    Transcribe,
    body_length,
    decode,
    encode,
)
from service.settings import read_settings
from service.spool import Spool, SpoolInUse, disk_error, new_job_id
from service.worker_process import worker_environment


def test_settings_have_defaults_and_read_their_variables(tmp_path: Path) -> None:
    settings = read_settings({"HOME": str(tmp_path), "OTHER": "x"})
    assert settings.data_dir == tmp_path / ".local/share/thimble"
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "tiny.en")
    named = read_settings({"THIMBLE_DATA_DIR": "/data", "THIMBLE_PORT": "9", "THIMBLE_KV": "f32"})
    assert (named.spool_dir, named.port, named.kv) == (Path("/data/spool"), 9, "f32")
    with pytest.raises(ValidationError):
        named.port = 10  # frozen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THIMBLE_PROT", "8000"),  # misspelt: an error, not a default in silence
        ("THIMBLE_PORT", "many"),
        ("THIMBLE_PORT", "70000"),
        ("THIMBLE_KV", "int4"),
        ("THIMBLE_QUEUE_CAPACITY", "0"),
        ("THIMBLE_JOB_DEADLINE_SECONDS", "-1"),
        ("THIMBLE_MODEL", ""),
        ("THIMBLE_MEMORY_BUDGET", "much"),
        ("THIMBLE_MEMORY_BUDGET", "0"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read_settings({"HOME": "/h", name: value})
    assert caught.value.errors()[0]["loc"][0] == name.removeprefix("THIMBLE_").lower()


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("90M", 90 << 20), ("1.5g", 3 << 29), ("64MiB", 64 << 20), ("8000K", 8_192_000), ("94371840", 94_371_840)],
)
def test_a_budget_is_written_as_a_size(text: str, n_bytes: int) -> None:
    assert read_settings({"HOME": "/h", "THIMBLE_MEMORY_BUDGET": text}).memory_budget == n_bytes
    assert size(text) == n_bytes  # the command line reads the same


def test_a_budget_and_a_residency_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="follows from THIMBLE_MEMORY_BUDGET"):
        read_settings({"HOME": "/h", "THIMBLE_MEMORY_BUDGET": "90M", "THIMBLE_RESIDENCY": "stream"})


@pytest.mark.parametrize("state", JobState)
def test_a_job_that_is_over_never_moves(state: JobState) -> None:
    allowed = {
        JobState.QUEUED: {JobState.RUNNING, JobState.FAILED, JobState.CANCELLED},
        JobState.RUNNING: {JobState.QUEUED, JobState.DONE, JobState.FAILED, JobState.CANCELLED},
    }.get(state, set())
    for to in JobState:
        if to in allowed:
            assert moved(state, to) is to
        else:
            with pytest.raises(ValueError, match=state.value):
                moved(state, to)


def job(name: str) -> Job:
    return Job(name, Path(name), JobOptions(), 1, 0.0, asyncio.get_running_loop().create_future())


def test_the_queue_is_first_in_first_out_and_a_job_put_back_goes_first() -> None:
    async def run() -> None:
        queue = JobQueue(3)
        a, b, c = job("a"), job("b"), job("c")
        for each in (a, b):
            with queue.place():
                queue.put(each)
        queue.put_back(c)
        assert [await queue.get() for _ in range(3)] == [c, a, b]
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.put(a)
        assert await waiting is a

    asyncio.run(run())


def test_a_place_is_held_while_an_upload_arrives_and_given_back_if_it_fails() -> None:
    async def run() -> None:
        queue = JobQueue(1)
        try:
            with queue.place():
                with pytest.raises(QueueFull), queue.place():
                    pass
                raise ConnectionError
        except ConnectionError:
            pass
        with queue.place():
            queue.put(job("a"))
        with pytest.raises(QueueFull), queue.place():
            pass
        assert len(queue) == 1

    asyncio.run(run())


def test_removing_and_draining() -> None:
    async def run() -> None:
        queue = JobQueue(5)
        a, b = job("a"), job("b")
        queue.put(a)
        queue.put(b)
        assert queue.remove(a)
        assert not queue.remove(a)
        assert queue.drain() == [b]
        assert len(queue) == 0

    asyncio.run(run())


def test_spooled_files_are_private_and_swept(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    name = new_job_id()
    with spool.open(name) as file:
        file.write(b"x")
    path = spool.commit(name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    spool.discard(name)
    spool.discard(name)  # twice is nothing
    with spool.open("left"):
        pass
    with pytest.raises(SpoolInUse):  # a second service would sweep what is the first one's
        Spool(tmp_path / "spool")
    assert len(list(spool.directory.iterdir())) == 1
    spool.close()
    swept = Spool(tmp_path / "spool")
    assert list(swept.directory.iterdir()) == []
    swept.close()
    assert len({new_job_id() for _ in range(100)}) == 100


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, 507), (errno.EFBIG, 507), (errno.EIO, 500)])
def test_a32_a_full_disk_has_its_own_answer(number: int, expected: int) -> None:
    error = disk_error(OSError(number, "text", "/secret/path"))
    assert error.status == expected
    assert "secret" not in error.message


MESSAGES: list[Message] = [
    Load("tiny.en", "/m", "int8", None, "stream", "merged", 90 << 20),
    Transcribe("a", "/p", {"temperatures": [0.0, 0.5]}, "srt", False, 9.5, 60.0),
    Cancel("a"),
    Ready(1, "int8", "reference", {"self": 2}),
    Refused("shard_corrupt", "text"),
    Finished("a", "北京 🎉\n\u2028", "zh", 1.5, 7, 0.5, "chinese", False, "", [{"start": 0.0}], {"layers": []}),
    Failed("a", "internal_error", "text", "Traceback"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_their_frame(message: Message) -> None:
    frame = encode(message)
    assert body_length(frame[: LENGTH.size]) == len(frame) - LENGTH.size
    assert decode(frame[LENGTH.size :]) == message


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"kind":"Nothing"}', b'{"kind":"Cancel"}', b'{"kind":"Cancel","job":"a","x":1}', b"\xff"],
)
def test_what_is_no_message_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


def test_a_frame_too_long_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        body_length(LENGTH.pack(MAX_FRAME_BYTES + 1))


def test_the_error_body_follows_from_status_and_code() -> None:
    kinds = {status: error_body(status, "c", "m")["error"]["type"] for status in (400, 413, 429, 500, 503)}
    assert kinds == {
        400: "invalid_request_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
    }


def test_engine_codes_that_are_not_the_requests_fault_are_ours() -> None:
    assert {engine_error(code, "m").status for code in ENGINE_STATUS} == {400, 413, 415, 504}
    assert engine_error("non_finite_logits", "m").status == 500
    assert engine_error("unsupported_language", "m").param == "language"
    assert engine_error("empty_audio", "m").param == "file"
    assert engine_error("invalid_options", "m").param is None


def test_a_log_line_is_one_json_object_whatever_is_in_it() -> None:
    record = logging.makeLogRecord({"msg": "job", "fields": {"code": 'a"\n\u2028b'}, "levelname": "INFO"})
    line = _JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["code"] == 'a"\n\u2028b'


def test_the_worker_gets_no_settings_but_its_threads() -> None:
    given = worker_environment({"PATH": "/bin", "THIMBLE_API_KEYS": "secret", "OPENBLAS_NUM_THREADS": "9"}, 2)
    assert given == {"PATH": "/bin", "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
