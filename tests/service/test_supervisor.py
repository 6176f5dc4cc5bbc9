"""The supervisor with a scripted worker: what real processes do too rarely to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import pytest

from service import supervisor as module
from service.errors import ServiceError
from service.job_options import JobOptions
from service.job_queue import JobQueue
from service.jobs import Job, JobState
from service.metrics import Metrics, Sources
from service.protocol import Cancel, Failed, Finished, Message, Ready, Refused, Transcribe
from service.settings import Settings
from service.spool import Spool
from service.supervisor import Supervisor
from service.worker_process import WorkerDied

DEATH = WorkerDied("killed by SIGKILL", "killed")


class ScriptedWorker:
    """Answers each Transcribe by the next step of `script`; a step may return a message, None (silence), or raise."""

    script: ClassVar[list[Callable[[ScriptedWorker, Transcribe], Message | None]]] = []
    started: ClassVar[list[ScriptedWorker]] = []
    start_errors: ClassVar[list[Exception]] = []
    load_deaths: ClassVar[list[WorkerDied]] = []

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.dead: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.answers.put_nowait(self.load_deaths.pop() if self.load_deaths else Ready(1, "int8", "reference", {}))
        self.pid = 1

    @classmethod
    async def start(cls, settings: Settings) -> ScriptedWorker:
        if cls.start_errors:
            raise cls.start_errors.pop(0)
        cls.started.append(cls())
        return cls.started[-1]

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, Transcribe):
            try:
                answer: Message | Exception | None = (
                    self.script.pop(0)(self, message) if self.script else finished(self, message)
                )
            except WorkerDied as death:
                answer = death
            if answer is not None:
                self.answers.put_nowait(answer)
        elif isinstance(message, Cancel):
            self.answers.put_nowait(Failed(message.job, "cancelled", "the caller asked to stop"))

    async def receive(self) -> Message:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def died(self) -> WorkerDied:
        return await asyncio.shield(self.dead)

    async def kill(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def finished(worker: ScriptedWorker, message: Transcribe) -> Message:
    return Finished(message.job, " text", "en", 1.0, 3, 0.5)


def silent(worker: ScriptedWorker, message: Transcribe) -> None:
    return None


def dies(worker: ScriptedWorker, message: Transcribe) -> Message:
    raise DEATH


Scene = Callable[[Supervisor, JobQueue, Callable[[str], Job]], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scene], Metrics]:
    monkeypatch.setattr(module, "WorkerProcess", ScriptedWorker)
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.02))
    for scripted in (ScriptedWorker.script, ScriptedWorker.started, ScriptedWorker.start_errors, ScriptedWorker.load_deaths):
        scripted.clear()

    def run(scene: Scene, **settings: object) -> Metrics:
        async def main() -> Metrics:
            configured = Settings(data_dir=tmp_path, **settings)
            queue, spool = JobQueue(8), Spool(configured.spool_dir)
            metrics = Metrics(Sources(lambda: len(queue), lambda: True, lambda: None, None), 8)
            supervisor = Supervisor(configured, queue, spool, metrics)

            def job(name: str) -> Job:
                with spool.open(name) as file:
                    file.write(b"x")
                made = Job(name, spool.commit(name), JobOptions(), 1, 0.0, asyncio.get_running_loop().create_future())
                queue.put(made)
                return made

            supervisor.start()
            async with asyncio.timeout(5):
                await scene(supervisor, queue, job)
            await supervisor.stop()
            assert list(spool.directory.iterdir()) == []
            spool.close()
            return metrics

        return asyncio.run(main())

    return run


async def outcome(job: Job) -> str:
    try:
        return (await asyncio.shield(job.result)).text
    except ServiceError as error:
        return error.code


def restarts(metrics: Metrics, reason: str) -> float:
    return metrics.registry.get_sample_value("thimble_worker_restarts_total", {"reason": reason}) or 0.0


def test_a_job_is_tried_on_a_second_worker_and_no_third(play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [dies, finished, dies, dies]
        assert await outcome(job("a")) == " text"
        assert await outcome(job("b")) == "worker_died"
        assert await outcome(job("c")) == " text"

    assert restarts(play(scene), "killed") == 3
    assert len(ScriptedWorker.started) == 4


def test_the_kernels_kill_is_named_to_the_client_and_the_metric(play: Callable[[Scene], Metrics]) -> None:
    def out_of_memory(worker: ScriptedWorker, message: Transcribe) -> Message:
        raise WorkerDied("killed by the kernel: the memory limit of 70 MiB is used up", "out_of_memory")

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [out_of_memory, finished, out_of_memory, out_of_memory]
        assert await outcome(job("a")) == " text"
        failed = job("b")
        assert await outcome(failed) == "out_of_memory"
        assert "the memory limit of 70 MiB" in str(failed.result.exception())

    assert restarts(play(scene), "out_of_memory") == 3


@pytest.mark.parametrize(("code", "n_workers"), [("shard_corrupt", 2), ("shard_missing", 2), ("bad_samples", 1)])
def test_a_worker_whose_shards_broke_is_replaced(play: Callable[[Scene], Metrics], code: str, n_workers: int) -> None:
    """What it has open is not what is there; a recording's own fault costs no worker."""

    def breaks(worker: ScriptedWorker, message: Transcribe) -> Message:
        return Failed(message.job, code, "decoder-02-04.safetensors ends early")

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [breaks, finished]
        assert await outcome(job("a")) == code
        assert await outcome(job("b")) == " text"

    assert restarts(play(scene), "model") == n_workers - 1
    assert len(ScriptedWorker.started) == n_workers


@pytest.mark.parametrize("reason", ["out_of_memory", "killed"])
def test_one_kill_while_loading_costs_no_waiting_job(play: Callable[[Scene], Metrics], reason: str) -> None:
    """What may pass: another program held the memory a moment ago."""

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.load_deaths = [WorkerDied("gone", reason)]
        assert await outcome(job("a")) == " text"

    assert restarts(play(scene), reason) == 1
    assert len(ScriptedWorker.started) == 2


def test_a_job_whose_client_left_is_not_tried_again(play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [silent]
        first = job("a")
        while first.state is not JobState.RUNNING:
            await asyncio.sleep(0)
        worker = ScriptedWorker.started[-1]
        worker.send = lambda message: worker.sent.append(message)  # type: ignore[method-assign] - it never reads the Cancel
        supervisor.cancel(first)
        worker.answers.put_nowait(DEATH)
        assert await outcome(first) == "cancelled"
        assert await outcome(job("b")) == " text"
        assert first.attempts == 1

    play(scene)


@pytest.mark.parametrize("ticks", range(8))
def test_a_cancel_at_any_moment_is_never_lost(ticks: int, play: Callable[[Scene], Metrics]) -> None:
    """Between the queue and the worker a job is in neither; a cancel that falls there must still count."""

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [silent]
        while not supervisor.is_ready:
            await asyncio.sleep(0)
        first = job("a")
        for _ in range(ticks):
            await asyncio.sleep(0)
        supervisor.cancel(first)
        assert await outcome(first) == "cancelled"
        ScriptedWorker.script = []
        assert await outcome(job("b")) == " text"

    play(scene)


@pytest.mark.parametrize("ticks", range(8))
def test_abandoning_at_any_moment_answers_every_job(ticks: int, play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [silent] * 3
        while not supervisor.is_ready:
            await asyncio.sleep(0)
        jobs = [job(name) for name in "abc"]
        for _ in range(ticks):
            await asyncio.sleep(0)
        supervisor.abandon()
        assert [await outcome(each) for each in jobs] == ["shutting_down"] * 3

    play(scene)


def test_no_memory_for_a_worker_is_survived(play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.start_errors = [OSError(12, "Cannot allocate memory"), BlockingIOError(11, "try again")]
        waiting = job("a")
        assert await outcome(waiting) == "worker_unavailable"  # the second failure in a row
        while not supervisor.is_ready:
            await asyncio.sleep(0.005)
        assert supervisor.fault is None
        assert await outcome(job("b")) == " text"

    play(scene)


def read_only(path: Path, missing_ok: bool = False) -> None:
    raise OSError(30, "Read-only file system", str(path))


@pytest.mark.parametrize("missing", ["model_not_found", "model_outdated"])
def test_a_failed_fetch_is_not_repeated_at_once(
    missing: str, play: Callable[[Scene], Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may download 70 MB: a worker that still lacks its model is no reason for another."""
    fetches: list[Settings] = []

    async def fetch_model(settings: Settings) -> bool:
        fetches.append(settings)
        return False

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        monkeypatch.setattr(module, "fetch_model", fetch_model)
        monkeypatch.setattr(ScriptedWorker, "receive", lambda self: asyncio.sleep(0, Refused(missing, "none")))
        while len(ScriptedWorker.started) < 5:
            await asyncio.sleep(0.005)
        assert len(fetches) == 1
        assert supervisor.fault.code == "fetch_failed"

    play(scene)


def test_a_spool_that_cannot_be_cleaned_still_answers(
    play: Callable[[Scene], Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        first = job("a")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", read_only)
            assert await outcome(first) == " text"
        first.path.unlink()
        assert await outcome(job("b")) == " text"

    play(scene)


def test_one_worker_that_dies_while_loading_costs_no_job(
    play: Callable[[Scene], Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = ScriptedWorker.receive
    deaths = [DEATH]

    async def receive(self: ScriptedWorker) -> Message:
        if deaths:
            raise deaths.pop()
        return await received(self)

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        monkeypatch.setattr(ScriptedWorker, "receive", receive)
        waiting = job("a")
        assert await outcome(waiting) == " text"

    play(scene)


def test_a_fetch_that_cannot_be_started_is_survived(play: Callable[[Scene], Metrics], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch_model(settings: Settings) -> bool:
        raise OSError(12, "Cannot allocate memory")

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(module, "fetch_model", fetch_model)
            patched.setattr(ScriptedWorker, "receive", lambda self: asyncio.sleep(0, Refused("model_not_found", "none")))
            while supervisor.fault is None or supervisor.fault.code != "worker_unavailable":
                await asyncio.sleep(0.005)
        while not supervisor.is_ready:
            await asyncio.sleep(0.005)
        assert await outcome(job("a")) == " text"

    play(scene)


def test_a_job_whose_client_left_is_cancelled_whatever_the_worker_says(play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        def fails(worker: ScriptedWorker, message: Transcribe) -> Message:
            first.is_unwanted = True
            return Failed(message.job, "internal_error", "text", "Traceback")

        ScriptedWorker.script = [fails]
        first = job("a")
        assert await outcome(first) == "cancelled"

    play(scene)


def test_a_worker_that_never_loads_is_given_up(play: Callable[[Scene], Metrics], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.05)

    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        monkeypatch.setattr(ScriptedWorker, "receive", lambda self: asyncio.sleep(60))
        while supervisor.fault is None:
            await asyncio.sleep(0.005)
        assert supervisor.fault.code == "load_timeout"
        assert not supervisor.is_ready

    play(scene)


def test_queue_seconds_of_a_job_that_never_ran_are_counted(play: Callable[[Scene], Metrics]) -> None:
    async def scene(supervisor: Supervisor, queue: JobQueue, job: Callable[[str], Job]) -> None:
        ScriptedWorker.script = [silent]
        job("a")
        waiting = job("b")
        await asyncio.sleep(0.1)
        supervisor.cancel(waiting)
        assert waiting.queue_seconds > 0.05

    play(scene)
