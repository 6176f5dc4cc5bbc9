"""A job: one recording on its way to text."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from pathlib import Path

from service.job_options import JobOptions
from service.protocol import Finished

MAX_ATTEMPTS = 2
"""A job whose worker died is tried once more, then failed."""


class JobState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_NEXT = {
    JobState.QUEUED: {JobState.RUNNING, JobState.FAILED, JobState.CANCELLED},
    JobState.RUNNING: {JobState.QUEUED, JobState.DONE, JobState.FAILED, JobState.CANCELLED},
}


def moved(state: JobState, to: JobState) -> JobState:
    """The state after a move.

    Raises
    ------
    ValueError
        No job may move that way.
    """
    if to not in _NEXT.get(state, set()):
        raise ValueError(f"a job that is {state.value} cannot become {to.value}")
    return to


@dataclass(slots=True, eq=False)
class Job:
    """One accepted recording.

    Attributes
    ----------
    id : str
        Random, hexadecimal.
    path : Path
        The recording in the spool; removed when the job ends.
    options : JobOptions
        What the client asked for.
    n_bytes, upload_seconds : int, float
        Of the recording and its way here.
    result : Future
        What the client waits for: `Finished`, or `ServiceError` as its exception.
    attempts : int
        Workers that were given the job.
    is_unwanted : bool
        Its client went away: it is not to be started, nor tried again.
    """

    id: str
    path: Path
    options: JobOptions
    n_bytes: int
    upload_seconds: float
    result: asyncio.Future[Finished]
    state: JobState = JobState.QUEUED
    attempts: int = 0
    is_unwanted: bool = False
    queued_at: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """It is done, failed or cancelled; it does not move again."""
        return self.state not in _NEXT

    def move(self, to: JobState) -> None:
        """Change the state; see `moved`. Time spent waiting is added up."""
        was, self.state = self.state, moved(self.state, to)
        if was is JobState.QUEUED:
            self.queue_seconds += time.monotonic() - self.queued_at
        if to is JobState.QUEUED:
            self.queued_at = time.monotonic()
        if to is JobState.RUNNING:
            self.attempts += 1
