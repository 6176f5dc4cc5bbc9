"""`POST /transcribe`: a recording in, its text out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from service.errors import ServiceError, shutting_down
from service.job_options import FIELDS, REPEATABLE, read_options
from service.job_queue import QueueFull
from service.jobs import Job
from service.protocol import Finished
from service.render import render
from service.schemas import TRANSCRIBE_FORM, ErrorBody, TranscriptBody, VerboseBody
from service.spool import disk_error, new_job_id
from service.supervisor import Supervisor
from service.upload import receive_form

router = APIRouter()

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; nginx's status for the same."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 408, 413, 415, 429, 500, 503, 504, 507)
}


@router.post(
    "/transcribe",
    response_model=TranscriptBody | VerboseBody,
    responses=_ERRORS,
    openapi_extra=TRANSCRIBE_FORM,
)
async def transcribe(request: Request) -> Response:
    """Transcribe one recording, waiting for the text."""
    state = request.app.state
    supervisor, queue, spool = state.supervisor, state.queue, state.spool
    if supervisor.draining:
        raise shutting_down()
    if supervisor.fault:
        raise supervisor.fault
    job_id = new_job_id()
    accepted = False
    try:
        with queue.place():
            job = await _unless_abandoned(_receive(request, job_id), supervisor)
            if supervisor.abandoned.is_set():
                raise shutting_down()
            queue.put(job)
            accepted = True
        finished = await _wait(request, job)
    except QueueFull:
        retry_after = {"Retry-After": str(supervisor.retry_after_seconds())}
        message = f"{queue.capacity} jobs are waiting already; try again later"
        raise ServiceError(429, "queue_full", message, headers=retry_after) from None
    except ClientDisconnect:
        state.metrics.refused("client_went_away")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        # From a job's acceptance on, its recording is the supervisor's: the worker may be about to open it.
        if not accepted:
            spool.discard(job_id)
    return render(finished, job.options)


async def _unless_abandoned(receiving: Coroutine[Any, Any, Job], supervisor: Supervisor) -> Job:
    """What the upload gives; an upload that the service will not wait for is answered, not cut off."""
    upload, abandoned = asyncio.create_task(receiving), asyncio.create_task(supervisor.abandoned.wait())
    waited: set[asyncio.Task[Any]] = {upload, abandoned}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if abandoned.done():
            raise shutting_down()
        return upload.result()
    finally:
        abandoned.cancel()
        if not upload.done():
            upload.cancel()
            await asyncio.wait({upload})
        if not upload.cancelled():
            upload.exception()  # asked for, so that nobody calls it forgotten


async def _receive(request: Request, job_id: str) -> Job:
    """The upload as a job."""
    state = request.app.state
    started = time.monotonic()
    try:
        with state.spool.open(job_id) as file:
            form = await receive_form(request, file, FIELDS, REPEATABLE, state.settings.max_upload_bytes)
        options = read_options(form.fields)
        path = state.spool.commit(job_id)
    except OSError as error:
        raise disk_error(error) from error
    return Job(
        id=job_id,
        path=path,
        options=options,
        n_bytes=form.n_file_bytes or 0,
        upload_seconds=time.monotonic() - started,
        result=asyncio.get_running_loop().create_future(),
    )


async def _wait(request: Request, job: Job) -> Finished:
    """The job's result; a client that goes away cancels it.

    Raises
    ------
    ServiceError
        The job failed.
    ClientDisconnect
    """
    gone = asyncio.create_task(_disconnected(request))
    waited: set[asyncio.Future[Any]] = {job.result, gone}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not job.result.done():
            raise ClientDisconnect
        return job.result.result()
    finally:
        gone.cancel()
        if not job.result.done():
            request.app.state.supervisor.cancel(job)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
