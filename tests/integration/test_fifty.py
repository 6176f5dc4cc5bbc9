"""A14: fifty requests in random order on one worker, and the same fifty on a fresh worker each; and ten times fifty on one."""

from __future__ import annotations

import io
import random
import resource
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from tests.conftest import Recording
from tests.integration.running import Service, running

RATE = 16_000

Request = tuple[bytes, dict[str, str]]


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV", subtype="PCM_16")
    return out.getvalue()


def requests(recordings: dict[str, Recording]) -> list[Request]:
    """Fifty of ten sounds in five ways, in an order that is random and the same at every run."""
    digits, demo = (soundfile.read(recordings[name].path, dtype="float32")[0] for name in ("digits", "demo"))
    noise = np.random.default_rng(0)
    sounds = [digits, demo, digits[: 2 * RATE], demo[5 * RATE :], demo[: 7 * RATE], digits[::-1].copy(), np.zeros(19_200)]
    sounds += [1e-3 * noise.standard_normal(5 * RATE), np.tile(digits[: RATE // 2], 12), np.concatenate([demo, digits])]
    ways = [
        {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        {"response_format": "verbose_json", "prompt": "Glossary: Zanzibar, Quetzalcoatl"},
        {"response_format": "srt", "temperature": "0.6"},
        {"response_format": "verbose_json", "temperature": "0,1"},
        {"response_format": "text"},
    ]
    made = [(wav(sound), way) for sound in sounds for way in ways]
    random.Random(14).shuffle(made)  # noqa: S311 - an order is no secret
    return made


def answer(service: Service, request: Request) -> tuple[int, str]:
    response = service.post(request[0], **request[1])
    return response.status_code, response.text


def disturb(service: Service, number: int, long: bytes) -> None:
    """Between requests: one that is refused, one whose client goes away."""
    if number % 7 == 3:
        assert service.post(b"no sound").status_code == 415
    if number % 11 == 5:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{service.url}/transcribe", files={"file": ("x", long)}, timeout=0.5)


@pytest.mark.slow
def test_a14_fifty_requests_on_one_worker_equal_fifty_fresh_workers(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    asked = requests(recordings)
    assert len(asked) == 50
    for name in ("one", "fresh"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "one", MODEL=str(tiny_en), WORKER_MAX_JOBS="1000") as service:
        worker = service.worker_pid()
        together = []
        for number, request in enumerate(asked):
            disturb(service, number, recordings["long"].path.read_bytes())
            together.append(answer(service, request))
        assert service.worker_pid() == worker
    with running(tmp_path / "fresh", MODEL=str(tiny_en), WORKER_MAX_JOBS="1") as service:
        alone = [answer(service, request) for request in reversed(asked)][::-1]
        service.wait_for_metric('thimble_worker_restarts_total{reason="max_jobs"}', 50)
    assert [status for status, _ in together] == [200] * 50
    assert together == alone
    assert len({text for _, text in together}) > 25


def resident_bytes(pid: int) -> int:
    """Of a process, now (proc(5), statm)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_five_hundred_jobs_without_a_restart_take_no_more_than_twenty(
    tiny_en: Path, tmp_path: Path, recordings: dict[str, Recording]
) -> None:
    """Resident memory at job 500 within 2 % of that at job 20, and the same answers to the end."""
    asked = requests(recordings)
    with running(tmp_path, MODEL=str(tiny_en), WORKER_MAX_JOBS="1000") as service:
        worker = service.worker_pid()
        resident, answers = [], []
        for number in range(500):
            answers.append(answer(service, asked[number % 50]))
            resident.append(resident_bytes(worker))
        assert service.worker_pid() == worker
    print([resident[number - 1] >> 10 for number in (1, 10, 20, 50, 100, 200, 300, 400, 500)])
    assert answers[:50] * 10 == answers
    assert resident[499] <= 1.02 * resident[19]
