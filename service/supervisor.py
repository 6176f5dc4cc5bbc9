"""The worker's life: start it, give it jobs one at a time, replace it, and lose no accepted job on the way."""

from __future__ import annotations

import asyncio
import time

from service.errors import ServiceError, cancelled, engine_error, shutting_down
from service.job_log import log_job
from service.job_options import SUBTITLES
from service.job_queue import JobQueue
from service.jobs import MAX_ATTEMPTS, Job, JobState
from service.logs import logger
from service.metrics import Metrics
from service.model_fetch import fetch_model
from service.protocol import Cancel, Failed, Finished, Load, Ready, Refused, Transcribe
from service.settings import Settings
from service.spool import Spool
from service.worker_process import WorkerDied, WorkerProcess

RETRY_SECONDS = 1.0, 30.0
"""Pauses between attempts to start a worker that cannot load its model: the first, doubled up to the second."""
FETCH_RETRY_SECONDS = 60.0, 3600.0
"""The same for fetching a model, each attempt of which may download 70 MB or more."""
LOAD_SECONDS = 300.0
"""Of a worker, to read and verify its model from slow flash; the largest has 1.6 GB."""
DEADLINE_GRACE_SECONDS = 10.0
"""A worker stops at a job's deadline by itself, at the next token or layer; one that has not after so long is stuck."""
PASSING_FAULTS = ("worker_died", "out_of_memory", "worker_unavailable")
"""A worker killed while loading, or no memory to start one: the next may well serve."""
FETCHED_FOR = ("model_not_found", "model_outdated")
"""Faults that a fetch mends, where the model is a published one."""
BROKEN_SHARDS = ("shard_corrupt", "shard_missing")
"""A job's end that makes its worker's open files useless: the next worker verifies what is there now."""
RECENT_WEIGHT = 0.2
"""Of the newest job in the running mean of seconds per job."""


class Supervisor:
    """Owns the worker process and the running job.

    Attributes
    ----------
    fault : ServiceError or None
        Why no worker can serve now, such as a damaged model.
    is_ready : bool
        A worker has its model loaded, or is being replaced after one had.
    draining : bool
        No new job is taken.
    abandoned : Event
        Nothing is waited for any more: uploads under way have no use.
    """

    def __init__(self, settings: Settings, queue: JobQueue, spool: Spool, metrics: Metrics) -> None:
        self._settings, self._queue, self._spool, self._metrics = settings, queue, spool, metrics
        self._worker: WorkerProcess | None = None
        self._running: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._mean_seconds = 0.0
        self._failures = 0  # workers in a row that did not load their model
        self._next_fetch, self._fetch_pause = 0.0, FETCH_RETRY_SECONDS[0]
        self.fault: ServiceError | None = None
        self.is_ready = False
        self.draining = False
        self.abandoned = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    def obstacle(self) -> ServiceError | None:
        """What keeps a recording sent now from being transcribed soon; None where nothing does."""
        if self.draining:
            return shutting_down()
        if self.fault or self.is_ready:
            return self.fault
        return ServiceError(503, "starting", "the worker is loading its model")

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="supervisor")

    def cancel(self, job: Job) -> None:
        """Give up a job that nobody waits for: a queued one never starts, a running one stops at its next check."""
        job.is_unwanted = True
        if self._queue.remove(job):
            self._end(job, JobState.CANCELLED, cancelled())
        elif job is self._running and self._worker:
            self._worker.send(Cancel(job.id))

    def retry_after_seconds(self) -> int:
        """How long until a place in the queue is likely free: the seconds that recent jobs took."""
        return max(1, round(self._mean_seconds))

    def drain(self) -> None:
        """Take no new job; those accepted have the drain time to finish, then they fail."""
        if not self.draining:
            self.draining = True
            asyncio.get_running_loop().call_later(self._settings.drain_seconds, self.abandon)

    async def stop(self) -> None:
        """End the worker; jobs still there fail as `shutting_down`."""
        self.abandon()
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.abandon()  # what was on its way to the worker is back in the queue

    def abandon(self) -> None:
        """Fail every job that is still there as `shutting_down`, so that its client hears of it, and every later one."""
        self.abandoned.set()
        jobs = self._queue.drain() + ([self._running] if self._running else [])
        for job in jobs:
            self._end(job, JobState.FAILED, shutting_down())

    async def _run(self) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            try:
                reason = await self._worker_or_model()
            except ServiceError as error:
                self._set_fault(error)
            # The loop's boundary: it must outlive whatever happens to one worker, such as no memory for the next.
            except Exception:
                logger.exception("supervisor failed")
                self._set_fault(ServiceError(503, "worker_unavailable", "no worker can be started; the log says why"))
            else:
                if reason:
                    self._metrics.worker_restarted(reason)
                pause = RETRY_SECONDS[0]
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    async def _worker_or_model(self) -> str | None:
        """One worker's life, and why it ended; None where it lacked its model, which has been fetched now.

        Raises
        ------
        ServiceError
            It could not load its model, or that could not be fetched.
        """
        try:
            return await self._one_worker()
        except ServiceError as fault:
            if fault.code not in FETCHED_FOR:
                raise
            if await self._fetch():
                return None
            raise ServiceError(503, "fetch_failed", "the model could not be fetched; the log says why") from fault

    async def _one_worker(self) -> str:
        """Start, load, use and end one worker; returns why it ended.

        Raises
        ------
        ServiceError
            It could not load its model.
        """
        self._worker = worker = await WorkerProcess.start(self._settings)
        loaded = False
        try:
            await self._load(worker)
            loaded = True
            return await self._serve(worker)
        except WorkerDied as death:
            logger.error("worker died", extra={"fields": {"cause": death.cause, "pid": worker.pid}})
            if loaded:
                return death.reason
            self._metrics.worker_restarted(death.reason)
            raise ServiceError(503, death.code, f"the worker, while loading the model: {death.cause}") from death
        finally:
            self._worker = None
            await worker.stop()

    async def _load(self, worker: WorkerProcess) -> None:
        settings = self._settings
        how = settings.kv, settings.residency, settings.tail, settings.memory_budget
        worker.send(Load(settings.model, str(settings.models_dir), settings.weights, *how))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                answer = await worker.receive()
        except TimeoutError:
            await worker.kill()
            raise ServiceError(503, "load_timeout", f"the worker took over {LOAD_SECONDS:g} s to load the model") from None
        if isinstance(answer, Refused):
            raise ServiceError(503, answer.code, answer.message)
        if not isinstance(answer, Ready):
            raise RuntimeError(f"expected Ready or Refused from the worker, found {type(answer).__name__}")
        self.fault, self.is_ready, self._failures = None, True, 0
        self._metrics.worker_ready(answer)
        fields = {"pid": worker.pid, "model": settings.model, "planned_peak_bytes": answer.planned_peak_bytes}
        logger.info("worker ready", extra={"fields": fields})

    def _set_fault(self, fault: ServiceError) -> None:
        """Say so, and fail the jobs that wait for a worker which may never come; the first of what may pass costs none."""
        if self.fault is None or self.fault.code != fault.code:
            logger.error("no worker", extra={"fields": {"code": fault.code, "message": fault.message}})
        self.fault, self.is_ready = fault, False
        self._failures += 1
        if fault.code in PASSING_FAULTS and self._failures == 1:
            return
        for job in self._queue.drain():
            self._end(job, JobState.FAILED, fault)

    async def _fetch(self) -> bool:
        """Have the published model fetched; False where it could not be, or could not not long ago."""
        if time.monotonic() < self._next_fetch:
            return False
        self.fault = ServiceError(503, "fetching_model", "the model is being fetched; try again shortly")
        if await fetch_model(self._settings):
            return True
        self._next_fetch = time.monotonic() + self._fetch_pause
        self._fetch_pause = min(2 * self._fetch_pause, FETCH_RETRY_SECONDS[1])
        return False

    async def _serve(self, worker: WorkerProcess) -> str:
        """Give the worker jobs until it has had its share; returns the reason for replacing it.

        Raises
        ------
        WorkerDied
        """
        for _ in range(self._settings.worker_max_jobs):
            self._running = job = await self._next_job(worker)
            if job.is_over:
                continue
            job.move(JobState.RUNNING)
            try:
                async with asyncio.timeout(self._settings.job_deadline_seconds + DEADLINE_GRACE_SECONDS):
                    answer = await self._answer(worker, job)
                self._settle(job, answer)
                if isinstance(answer, Failed) and answer.code in BROKEN_SHARDS:
                    return "model"
            except TimeoutError:
                seconds = self._settings.job_deadline_seconds
                error = ServiceError(504, "deadline_exceeded", f"the job took longer than {seconds:g} s")
                self._end(job, JobState.FAILED, error)
                await worker.kill()
                return "deadline"
            except WorkerDied as death:
                self._lost_worker(job, death)
                raise
            finally:
                self._running = None
        return "max_jobs"

    async def _next_job(self, worker: WorkerProcess) -> Job:
        """The next job, while watching that the idle worker lives."""
        get, death = asyncio.create_task(self._queue.get()), asyncio.create_task(worker.died())
        try:
            await asyncio.wait({get, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and not get.done():
                raise death.result()
            job = get.result()
            # Whoever left, or whatever ended, between the queue and here, found the job in neither place.
            if job.is_unwanted:
                self._end(job, JobState.CANCELLED, cancelled())
            elif self.abandoned.is_set():
                self._end(job, JobState.FAILED, shutting_down())
            return job
        except asyncio.CancelledError:
            if get.done() and not get.cancelled():
                self._queue.put_back(get.result())
            raise
        finally:
            get.cancel()
            death.cancel()

    async def _answer(self, worker: WorkerProcess, job: Job) -> Finished | Failed:
        form = job.options.response_format
        written = form if form in SUBTITLES else "", form == "verbose_json"
        limits = self._settings.max_audio_seconds, self._settings.job_deadline_seconds
        worker.send(Transcribe(job.id, str(job.path), job.options.decoding, *written, *limits))
        while True:
            answer = await worker.receive()
            if isinstance(answer, Finished | Failed) and answer.job == job.id:
                return answer

    def _settle(self, job: Job, answer: Finished | Failed) -> None:
        self._metrics.timings(answer.timings)
        if isinstance(answer, Finished):
            seconds = answer.processing_seconds
            self._mean_seconds += RECENT_WEIGHT * (seconds - self._mean_seconds) if self._mean_seconds else seconds
            self._end(job, JobState.DONE, answer)
        elif answer.code == "cancelled" or job.is_unwanted:
            self._end(job, JobState.CANCELLED, cancelled())
        else:
            self._end(job, JobState.FAILED, engine_error(answer.code, answer.message), answer)

    def _lost_worker(self, job: Job, death: WorkerDied) -> None:
        """Put the job back in front, or fail it with the cause where it has lost its second worker."""
        if job.is_over:
            return
        if job.is_unwanted:
            self._end(job, JobState.CANCELLED, cancelled())
        elif job.attempts < MAX_ATTEMPTS:
            job.move(JobState.QUEUED)
            self._queue.put_back(job)
        else:
            message = f"the worker was lost {job.attempts} times over this recording: {death.cause}"
            self._end(job, JobState.FAILED, ServiceError(500, death.code, message))

    def _end(self, job: Job, state: JobState, outcome: Finished | ServiceError, answer: Failed | None = None) -> None:
        """Tell the client, remove the recording, count and log. A job ends once; a later end is ignored."""
        if job.is_over:
            return
        job.move(state)
        if isinstance(outcome, Finished):
            job.result.set_result(outcome)
        else:
            job.result.set_exception(outcome)
            job.result.exception()  # a client that went away does not ask for it
        self._spool.discard(job.id)
        self._metrics.job_ended(job, outcome)
        log_job(job, outcome, answer)
