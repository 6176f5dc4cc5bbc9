"""The whole path, with real processes and real weights: upload, spool, queue, worker, engine, metrics."""

from __future__ import annotations

import concurrent.futures
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from service.control_group import find_memory_group
from tests.conftest import Recording
from tests.integration.running import Service, environment_without_settings, running
from tests.words import words


@pytest.fixture(scope="session")
def half_minute(recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The first seven sentences of the long recording: one window's work, long enough to interrupt."""
    path = tmp_path_factory.mktemp("half") / "half.flac"
    seconds = 27.2
    samples, rate = soundfile.read(recordings["long"].path, dtype="int16", frames=int(16000 * seconds))
    soundfile.write(path, samples, rate)
    return Recording(path, ". ".join(recordings["long"].text.split(". ")[:7]), seconds)


@pytest.fixture(scope="module")
def service(tiny_en: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests that only ask it things."""
    with running(tmp_path_factory.mktemp("service"), MODEL=str(tiny_en)) as started:
        yield started


def said(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return words(response.json()["text"])


def code(response: httpx.Response) -> str:
    """The error's code, once its body has exactly the documented form."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "/" not in body["error"]["message"].replace("multipart/form-data", "")
    assert "Traceback" not in body["error"]["message"]
    return str(body["error"]["code"])


def test_the_metrics_page_knows_its_control_group_and_whether_it_is_ready(service: Service, tmp_path: Path) -> None:
    assert service.metric("thimble_ready") == 1
    assert (service.metric('thimble_memory_used_bytes{kind="anonymous"}') > 0) == (find_memory_group() is not None)
    with running(tmp_path, ready=False, MODEL=str(tmp_path / "absent")) as without_model:
        assert without_model.wait_for("/readyz", 503).status_code == 503
        assert without_model.metric("thimble_ready") == 0


def test_a_recording_becomes_its_text(service: Service, recordings: dict[str, Recording]) -> None:
    demo = recordings["demo"]
    assert said(service.post(demo.path)) == words(demo.text)
    text = service.post(demo.path, response_format="text", language="en-US")
    assert text.headers["content-type"].startswith("text/plain")
    assert words(text.text) == words(demo.text)
    assert service.spooled() == []


BAD = {
    "empty file": (b"", 400, "empty_audio"),
    "text file": (b"This is no sound.\n" * 20, 415, "unsupported_audio"),
    "random bytes": (np.random.default_rng(0).bytes(20_000), 415, "unsupported_audio"),
    "truncated header": (b"RIFF\x00", 415, "unsupported_audio"),
}


def wav(samples: np.ndarray, path: Path) -> bytes:
    soundfile.write(path, samples, 16000, format="WAV", subtype="FLOAT")
    return path.read_bytes()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_recording_is_refused_and_the_next_is_right(
    name: str, service: Service, recordings: dict[str, Recording]
) -> None:
    content, status, expected = BAD[name]
    response = service.post(content)
    assert (response.status_code, code(response)) == (status, expected)
    assert said(service.post(recordings["digits"].path))
    assert service.spooled() == []


def test_zero_frames_and_samples_that_are_no_number_are_refused(service: Service, tmp_path: Path) -> None:
    silent = service.post(wav(np.zeros(0, np.float32), tmp_path / "x"))
    assert (silent.status_code, code(silent)) == (400, "empty_audio")
    nan = service.post(wav(np.full(800, np.nan, np.float32), tmp_path / "x"))
    assert (nan.status_code, code(nan)) == (400, "bad_samples")
    assert service.spooled() == []


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
HEAD = "POST /transcribe HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"", {}, "invalid_multipart"),
        (b"", FORM, "invalid_multipart"),
        (b"{}", {"Content-Type": "application/json"}, "invalid_multipart"),
        (b"x", {"Content-Type": "multipart/form-data"}, "invalid_multipart"),
        (b"x", {"Content-Type": "multipart/form-data; boundary=" + "b" * 71}, "invalid_multipart"),
        (b"no boundary here", FORM, "invalid_multipart"),
        (PART % b"file" + b"cut off", FORM, "invalid_multipart"),
        (PART % b"language" + b"en\r\n--b--\r\n", FORM, "missing_file"),
        (PART % b"file" + b"\r\n--b--\r\n", FORM, "empty_audio"),
        (PART % b"timbre" + b"1\r\n--b--\r\n", FORM, "unknown_parameter"),
        (PART % b"file" + b"a\r\n" + PART % b"file" + b"b\r\n--b--\r\n", FORM, "repeated_parameter"),
        (PART % b"language" + b"x" * 20_000 + b"\r\n--b--\r\n", FORM, "field_too_large"),
        (PART % (b"n" * 9000) + b"x\r\n--b--\r\n", FORM, "invalid_multipart"),
        ((PART % b"file" + b"x\r\n" + PART % b"response_format" + b"docx\r\n--b--\r\n"), FORM, "unsupported_response_format"),
    ],
)
def test_a_bad_form_is_refused(body: bytes, headers: dict[str, str], expected: str, service: Service) -> None:
    response = service.client.post("/transcribe", content=body, headers=headers)
    assert (response.status_code, code(response)) == (400, expected)
    assert service.spooled() == []


@pytest.mark.parametrize("language", ["xx", "fr", "en\n", "e" * 300, "日本"])
def test_a25_a_language_that_english_only_weights_lack_is_refused(
    language: str, service: Service, recordings: dict[str, Recording]
) -> None:
    response = service.post(recordings["digits"].path, language=language)
    if language.strip() == "en":
        assert response.status_code == 200
    else:
        assert (response.status_code, code(response)) == (400, "unsupported_language")


@pytest.mark.parametrize("language", ["", "auto", "EN", "English", "en_us"])
def test_a25_spellings_that_mean_english(language: str, service: Service, recordings: dict[str, Recording]) -> None:
    assert said(service.post(recordings["digits"].path, language=language))


@pytest.mark.parametrize(
    "name", ["会议 – übung 🎉.wav", "../../tmp/x.wav", "-rf", 'a"b', "a\r\nb", "n" * 300, "x.txt", ""], ids=range(8)
)
def test_a26_the_name_of_the_file_is_of_no_account(name: str, service: Service, recordings: dict[str, Recording]) -> None:
    response = service.client.post("/transcribe", files={"file": (name, recordings["digits"].path.read_bytes())})
    assert said(response)
    if len(name) > 4:
        assert name[:5] not in service.log.read_text()


def test_other_paths_and_methods_have_the_same_error_body(service: Service) -> None:
    assert code(service.client.get("/nothing")) == "not_found"
    assert code(service.client.get("/transcribe")) == "method_not_allowed"


def test_transcripts_never_enter_the_log(service: Service, recordings: dict[str, Recording]) -> None:
    service.post(recordings["demo"].path)
    log = service.log.read_text().lower()
    assert "thimble runs" not in log
    assert "leaves the room" not in log


def test_one_line_a_job_tells_sizes_seconds_and_outcome(service: Service, recordings: dict[str, Recording]) -> None:
    service.post(recordings["demo"].path)
    line = [line for line in service.lines() if line["event"] == "job"][-1]
    assert line["outcome"] == "done"
    assert line["bytes"] == recordings["demo"].path.stat().st_size
    assert set(line["stages"]) == {"audio", "mel", "encode", "decode"}
    assert line["audio_seconds"] == pytest.approx(recordings["demo"].seconds, abs=0.01)


def test_metrics_show_load_and_compute_of_every_layer(service: Service, recordings: dict[str, Recording]) -> None:
    service.post(recordings["demo"].path)
    page = service.metrics()
    for stack in ("encoder", "decoder"):
        for layer in range(4):
            for kind in ("load", "compute"):
                assert service.metric(f'thimble_layer_{kind}_seconds_sum{{layer="{layer}",stack="{stack}"}}') > 0
    layers = sum(float(v) for v in re.findall(r"^thimble_layer_(?:load|compute)_seconds_sum\{.*\} (\S+)$", page, re.MULTILINE))
    stages = sum(service.metric(f'thimble_stage_seconds_sum{{stage="{stage}"}}') for stage in ("encode", "decode"))
    assert 0.9 * stages <= layers <= stages
    assert service.metric('thimble_worker_resident_bytes{kind="anonymous"}') > 1 << 20
    assert service.metric('thimble_kv_cache_bytes{cache="cross"}') > 1 << 20


def test_the_demos_table_shows_every_layer(service: Service, recordings: dict[str, Recording]) -> None:
    """It once broke on a layer's new name while every other test passed."""
    service.post(recordings["digits"].path)
    module = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "demo.py"))
    rows = [line.split()[:2] for line in module["layer_table"](service.metrics()).splitlines()[1:]]
    encoder, decoder = (["stem", "0", "1", "2", "3", "ln_post"], ["0", "1", "2", "3", "ln", "embedding"])
    assert rows == [["encoder", layer] for layer in encoder] + [["decoder", layer] for layer in decoder]


def test_promtool_finds_no_fault_in_the_page(service: Service, recordings: dict[str, Recording]) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not here (Debian's prometheus package)")
    service.post(recordings["digits"].path)
    checked = subprocess.run([promtool, "check", "metrics"], input=service.metrics(), capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_front_end_has_neither_numpy_nor_the_engine_in_memory(service: Service) -> None:
    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    assert "numpy" not in maps
    assert "sndfile" not in maps
    worker = Path(f"/proc/{service.worker_pid()}/maps").read_text()
    assert "numpy" in worker


def test_a28_health_and_metrics_answer_while_the_worker_is_busy(
    service: Service, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        job = pool.submit(service.post, half_minute.path)
        slowest, asked = 0.0, 0
        while not job.done():
            for path in ("/healthz", "/metrics"):
                started = time.monotonic()
                with httpx.Client(base_url=service.url, timeout=30) as client:
                    assert client.get(path).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
                asked += 1
            time.sleep(0.05)
        assert said(job.result())
    assert asked > 20
    assert slowest < 5  # the field's limit is 1 s; a shared machine may stall longer than the service ever does


def test_kill_9_in_the_middle_of_a_job_loses_nothing(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        job = pool.submit(service.post, half_minute.path)
        time.sleep(1.5)
        assert not job.done()
        os.kill(service.worker_pid(), signal.SIGKILL)
        while not job.done():
            assert service.client.get("/healthz").status_code == 200
            time.sleep(0.05)
        assert len(said(job.result())) > 80
        service.wait_for_metric('thimble_worker_restarts_total{reason="killed"}', 1)
        service.wait_for_metric('thimble_jobs_total{outcome="done"}', 1)
        assert [line["cause"] for line in service.lines() if line["event"] == "worker died"] == ["killed by SIGKILL"]
        assert [line["attempts"] for line in service.lines() if line["event"] == "job"] == [2]
        assert service.spooled() == []


def test_a_job_that_costs_two_workers_fails_with_its_cause(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        job = pool.submit(service.post, half_minute.path)
        killed: set[int] = set()
        while len(killed) < 2:
            time.sleep(0.8)
            pid = service.worker_pid()
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        response = job.result()
        assert (response.status_code, code(response)) == (500, "worker_died")
        assert "SIGKILL" in response.json()["error"]["message"]
        service.wait_for_metric('thimble_worker_restarts_total{reason="killed"}', 2)
        assert said(service.post(recordings["digits"].path))
        assert service.spooled() == []


def test_an_idle_worker_that_dies_is_replaced(tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service:
        first = service.worker_pid()
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while service.worker_pid() == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert service.worker_pid() != first
        assert said(service.post(recordings["digits"].path))


def test_the_worker_is_replaced_after_its_share_of_jobs(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    with running(tmp_path, MODEL=str(tiny_en), WORKER_MAX_JOBS="2") as service:
        texts = [said(service.post(recordings["digits"].path)) for _ in range(5)]
        assert len(texts[0]) == 10
        assert texts == [texts[0]] * 5
        service.wait_for_metric('thimble_worker_restarts_total{reason="max_jobs"}', 2)
        assert len({line["pid"] for line in service.lines() if line["event"] == "worker ready"}) == 3


def test_every_format_of_one_recording(service: Service, recordings: dict[str, Recording]) -> None:
    digits = recordings["digits"]
    text = service.post(digits.path).json()["text"]
    assert service.post(digits.path, response_format="text").text == text + "\n"
    srt = service.post(digits.path, response_format="srt")
    assert srt.text.startswith("1\n00:00:00,000 --> 00:00:0")
    assert srt.text.endswith(f"\n{text}\n\n")
    vtt = service.post(digits.path, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:0")
    verbose = service.client.post(
        "/transcribe",
        files={"file": ("x", digits.path.read_bytes())},
        data={"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]},
    ).json()
    assert (verbose["task"], verbose["language"], verbose["text"]) == ("transcribe", "english", text)
    assert verbose["duration"] == pytest.approx(digits.seconds, abs=0.01)
    assert "".join(word["word"] for word in verbose["words"]) == text.replace(" ", "")
    assert "".join(segment["text"] for segment in verbose["segments"]).strip() == text
    times = [time for word in verbose["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert times[-1] <= verbose["duration"]


@pytest.mark.parametrize(
    "prompt",
    [
        "春风" * 2000,
        "prompt " * 1400,
        pytest.param(" w" * 223, marks=pytest.mark.slow),  # they make the text a guess, and every temperature is tried
        " w" * 224,
        pytest.param(" w" * 225, marks=pytest.mark.slow),
        "🎉" * 300,
        "\x00\n",
    ],
    ids=["ideographs", "words", "w223", "w224", "w225", "pictures", "controls"],
)
def test_a17_a_prompt_of_any_length_is_no_error(prompt: str, service: Service, recordings: dict[str, Recording]) -> None:
    response = service.post(recordings["digits"].path, prompt=prompt)
    assert response.status_code == 200
    assert isinstance(response.json()["text"], str)


def test_a13_silence_is_an_answer(service: Service, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "zero.wav", np.zeros(19_200), 16_000)
    body = service.post(tmp_path / "zero.wav", response_format="verbose_json", prompt="Glossary: Zanzibar").json()
    assert (body["text"], body["segments"], body["duration"]) == ("", [], 1.2)
    assert service.post(tmp_path / "zero.wav", response_format="srt").text == ""


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"task": "translate"}, "invalid_options"),  # English-only weights
        ({"task": "summarise"}, "unsupported_task"),
        ({"temperature": "2"}, "invalid_options"),
        ({"response_format": "docx"}, "unsupported_response_format"),
        ({"timestamp_granularities[]": "word"}, "unsupported_granularity"),
    ],
)
def test_options_that_cannot_be_are_refused(
    fields: dict[str, str], error: str, service: Service, recordings: dict[str, Recording]
) -> None:
    response = service.post(recordings["digits"].path, **fields)
    assert (response.status_code, code(response)) == (400, error)
    assert service.spooled() == []


def test_a_job_past_its_deadline_is_ended_and_the_next_is_right(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    """By the worker itself, which goes on; one that is stuck is replaced."""
    with running(tmp_path, MODEL=str(tiny_en), JOB_DEADLINE_SECONDS="6") as service:
        rng = np.random.default_rng(0)
        samples, rate = soundfile.read(half_minute.path, dtype="float32")
        samples = np.tile(samples, 20) + 1e-4 * rng.standard_normal(20 * len(samples)).astype(np.float32)
        soundfile.write(tmp_path / "x.flac", samples, rate)
        worker = service.worker_pid()
        response = service.post(tmp_path / "x.flac")
        assert (response.status_code, code(response)) == (504, "deadline_exceeded")
        assert said(service.post(recordings["digits"].path))
        assert service.worker_pid() == worker
        os.kill(worker, signal.SIGSTOP)
        response = service.post(recordings["digits"].path)
        assert (response.status_code, code(response)) == (504, "deadline_exceeded")
        service.wait_for_metric('thimble_worker_restarts_total{reason="deadline"}', 1)
        assert said(service.post(recordings["digits"].path))


def test_a29_a_client_that_goes_away_cancels_its_job(
    service: Service, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    before = service.metric('thimble_jobs_total{outcome="cancelled"}')
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=service.url, timeout=1.0) as hasty:
        hasty.post("/transcribe", files={"file": ("x", half_minute.path.read_bytes())})
    service.wait_for_metric('thimble_jobs_total{outcome="cancelled"}', before + 1)
    assert said(service.post(recordings["digits"].path))
    assert service.spooled() == []


def test_a29_a_client_that_leaves_in_its_upload_leaves_nothing(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(f"{HEAD}Content-Length: 100000\r\n\r\n".encode() + PART % b"file" + b"x" * 5000)
        time.sleep(0.3)
        assert len(service.spooled()) == 1
    deadline = time.monotonic() + 10
    while service.spooled() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.spooled() == []
    service.wait_for_metric("thimble_queue_depth", 0)


def test_a30_a_full_queue_refuses_before_the_body_and_the_rest_finish(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en), QUEUE_CAPACITY="2") as service:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running_job = pool.submit(service.post, half_minute.path)
            time.sleep(1.0)
            waiting = [pool.submit(service.post, recordings["digits"].path) for _ in range(2)]
            time.sleep(0.5)
            service.wait_for_metric("thimble_queue_depth", 2)
            started = time.monotonic()
            with socket.create_connection(("127.0.0.1", service.port)) as connection:
                # 90 MB are announced and not one byte of them sent: the answer does not wait for them
                connection.sendall(f"{HEAD}Content-Length: 90000000\r\n\r\n".encode())
                answer = connection.recv(4096).decode()
            assert answer.startswith("HTTP/1.1 429")
            assert re.search(r"retry-after: [1-9]", answer.lower())
            assert time.monotonic() - started < 5
            assert said(running_job.result())
            assert all(said(job.result()) for job in waiting)
        service.wait_for_metric('thimble_refusals_total{code="queue_full"}', 1)
        assert service.spooled() == []


def test_a33_an_upload_past_the_limit_is_refused_as_it_arrives(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    limit = 300_000
    with running(tmp_path, MODEL=str(tiny_en), MAX_UPLOAD_BYTES=str(limit)) as service:
        declared = service.client.post("/transcribe", files={"file": ("x", bytes(limit + 100_000))})
        assert (declared.status_code, code(declared)) == (413, "upload_too_large")

        def chunks() -> Iterator[bytes]:  # no Content-Length
            yield PART % b"file"
            for _ in range(1000):
                yield bytes(65_536)

        stream = service.client.stream("POST", "/transcribe", content=chunks(), headers=FORM)
        try:
            with stream as response:
                assert response.status_code == 413
        except httpx.WriteError:  # the connection was closed on the rest of the body, which is as good
            pass
        service.wait_for_metric('thimble_refusals_total{code="upload_too_large"}', 2)
        assert service.spooled() == []
        assert said(service.post(recordings["digits"].path))


def test_a34_a_second_signal_exits_at_once(tiny_en: Path, tmp_path: Path, half_minute: Recording) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        job = pool.submit(service.post, half_minute.path)
        time.sleep(1.0)
        for _ in range(2):
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert service.process.wait(5) == 0
        try:
            answer = job.result()
        except httpx.TransportError:  # the connection broke, which is an answer too
            return
        assert (answer.status_code, code(answer)) == (503, "shutting_down")


def test_sigterm_lets_accepted_jobs_finish(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(service.post, recording.path) for recording in (half_minute, recordings["digits"])]
        time.sleep(1.0)
        service.process.send_signal(signal.SIGTERM)
        assert all(said(job.result()) for job in jobs)
        assert service.process.wait(30) == 0
        assert service.spooled() == []


def test_a34_past_the_drain_time_every_client_gets_an_answer(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en), DRAIN_SECONDS="1") as service:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [pool.submit(service.post, half_minute.path) for _ in range(3)]
            time.sleep(1.0)
            started = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            responses = [job.result() for job in jobs]
        assert {(r.status_code, code(r)) for r in responses} == {(503, "shutting_down")}
        assert service.process.wait(30) == 0
        assert time.monotonic() - started < 15
        assert service.spooled() == []


def test_an_upload_under_way_at_the_end_of_the_drain_is_answered(tiny_en: Path, tmp_path: Path) -> None:
    with running(tmp_path, MODEL=str(tiny_en), DRAIN_SECONDS="1") as service:
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(f"{HEAD}Content-Length: 100000\r\n\r\n".encode() + PART % b"file" + b"x" * 5000)
            time.sleep(0.3)
            service.process.send_signal(signal.SIGTERM)
            answer = ""
            while block := connection.recv(4096):
                answer += block.decode()
        assert answer.startswith("HTTP/1.1 503")
        assert '"code":"shutting_down"' in answer
        assert service.process.wait(30) == 0
        assert "Traceback" not in service.log.read_text()
        assert service.spooled() == []


def test_a31_a_second_service_on_the_same_data_leaves_the_first_ones_alone(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(service.post, path) for path in (half_minute.path, recordings["digits"].path)]
        time.sleep(0.5)
        environment = environment_without_settings() | {"THIMBLE_DATA_DIR": str(tmp_path), "THIMBLE_PORT": "0"}
        second = subprocess.run([sys.executable, "-m", "service"], env=environment, capture_output=True, text=True)
        assert second.returncode == 1
        assert second.stderr == "thimble-serve: another service uses this THIMBLE_DATA_DIR; give this one its own\n"
        assert all(said(job.result()) for job in jobs)


def test_a_port_that_is_taken_ends_with_one_and_its_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = environment_without_settings() | {
            "THIMBLE_DATA_DIR": str(tmp_path),
            "THIMBLE_PORT": str(taken.getsockname()[1]),
        }
        ended = subprocess.run([sys.executable, "-m", "service"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "address already in use" in ended.stderr


def test_a_wrong_setting_ends_with_two_and_one_line(tmp_path: Path) -> None:
    environment = environment_without_settings() | {
        "THIMBLE_DATA_DIR": str(tmp_path),
        "THIMBLE_PROT": "1",
        "THIMBLE_KV": "int4",
    }
    ended = subprocess.run([sys.executable, "-m", "service"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert sorted(line.split(":")[1].strip() for line in ended.stderr.splitlines()) == ["THIMBLE_KV", "THIMBLE_PROT"]


def test_a_model_that_is_no_model_is_not_fetched(tmp_path: Path) -> None:
    with running(tmp_path, ready=False, MODEL="huge") as service:
        deadline = time.monotonic() + 30
        while code(response := service.wait_for("/readyz", 503)) == "starting" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert code(response) == "unknown_model"
        assert "fetching" not in service.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGRTMIN + 1])
def test_a_worker_killed_by_any_signal_is_replaced(
    number: int, tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    """Real-time signals have no name; a supervisor that asks for one must not die of it."""
    with running(tmp_path, MODEL=str(tiny_en)) as service:
        os.kill(service.worker_pid(), number)
        service.wait_for_metric('thimble_worker_restarts_total{reason="killed"}', 1)
        assert said(service.post(recordings["digits"].path))


def test_no_worker_outlives_a_service_that_is_killed(tiny_en: Path, tmp_path: Path) -> None:
    with running(tmp_path, MODEL=str(tiny_en)) as service:
        worker = service.worker_pid()
        service.process.kill()
        service.process.wait()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{worker}").exists()


def test_a31_recordings_left_by_a_killed_service_are_swept(tiny_en: Path, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "abc.part").write_bytes(b"x")
    (spool / "def").write_bytes(b"x")
    with running(tmp_path, MODEL=str(tiny_en)) as service:
        assert service.spooled() == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [("flip", "shard_corrupt"), ("remove", "shard_missing"), ("manifest", "shard_corrupt"), ("garbage", "manifest_invalid")],
)
def test_a_damaged_model_is_never_ready_and_a_mended_one_is(
    damage: str, expected: str, tiny_en: Path, random_checkpoint: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    from engine.checkpoints import open_checkpoint
    from engine.convert import convert

    model = Path(shutil.copytree(tiny_en, tmp_path / "model"))
    shard = model / "decoder-02-04.safetensors"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        convert(open_checkpoint(random_checkpoint), tmp_path / "other")
        shutil.copy(tmp_path / "other" / "manifest.json", model)
    else:
        (model / "manifest.json").write_text("{")
    with running(tmp_path, ready=False, MODEL=str(model)) as service:
        deadline = time.monotonic() + 30
        while code(response := service.wait_for("/readyz", 503)) == "starting" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert code(response) == expected
        refused = service.post(recordings["digits"].path)
        assert (refused.status_code, code(refused)) == (503, code(response))
        assert service.client.get("/healthz").status_code == 200
        shutil.rmtree(model)
        shutil.copytree(tiny_en, model)
        service.wait_for("/readyz", 200)
        assert said(service.post(recordings["digits"].path))
        assert service.spooled() == []


def test_a_shard_cut_short_in_the_middle_of_a_job_is_named(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording], half_minute: Recording
) -> None:
    """Its mapping has no pages any more: the worker dies of SIGBUS, and the next one finds which shard it was. Or the worker
    was just about to read it: it says so itself, and is replaced for that."""
    model = Path(shutil.copytree(tiny_en, tmp_path / "model"))
    with running(tmp_path, MODEL=str(model)) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        worker = service.worker_pid()
        job = pool.submit(service.post, half_minute.path)
        while "decoder-02-04.safetensors" not in Path(f"/proc/{worker}/maps").read_text():
            assert not job.done()
            time.sleep(0.02)
        os.truncate(model / "decoder-02-04.safetensors", 4096)
        while not job.done():
            assert service.client.get("/healthz").status_code == 200
            time.sleep(0.05)
        refused = job.result()
        causes = [line["cause"] for line in service.lines() if line["event"] == "worker died"]
        assert (refused.status_code, code(refused), causes) in [
            (503, "shard_corrupt", ["killed by SIGBUS"]),
            (500, "shard_corrupt", []),
        ]
        assert "decoder-02-04.safetensors" in refused.json()["error"]["message"]
        service.wait_for_metric(f'thimble_worker_restarts_total{{reason="{"killed" if causes else "model"}"}}', 1)
        service.wait_for("/readyz", 503)
        shutil.copy(tiny_en / "decoder-02-04.safetensors", model)
        service.wait_for("/readyz", 200)
        assert service.worker_pid() != worker
        assert said(service.post(recordings["digits"].path))
        assert service.spooled() == []


def test_a36_descriptors_and_threads_stay_flat(service: Service, recordings: dict[str, Recording]) -> None:
    def counts() -> list[int]:
        pids = (service.process.pid, service.worker_pid())
        return [len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for pid in pids for kind in ("fd", "task")]

    service.post(recordings["digits"].path)
    service.post(b"no sound")
    before = counts()
    for _ in range(5):
        service.post(recordings["digits"].path)
        for _ in range(4):
            service.post(b"no sound")
    after = counts()
    assert all(b <= a + 2 for a, b in zip(before, after, strict=True)), (before, after)


def test_uploads_at_once_each_get_their_own_text(service: Service, recordings: dict[str, Recording]) -> None:
    names = ["demo", "digits"] * 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda name: said(service.post(recordings[name].path)), names))
    assert texts == texts[:2] * 3
    assert texts[0] == words(recordings["demo"].text)
    assert len(texts[1]) == 10
