"""The bounded queue: a place is taken before a body is read, so a full queue costs nobody an upload."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from service.jobs import Job


class QueueFull(Exception):
    """Every place is taken."""


class JobQueue:
    """First in, first out, in memory.

    Parameters
    ----------
    capacity : int
        Jobs that may wait, those still being uploaded included; the running job has left the queue.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._waiting: deque[Job] = deque()
        self._uploading = 0
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Jobs waiting, complete."""
        return len(self._waiting)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one place while an upload arrives; `put` inside the block turns it into a job.

        Raises
        ------
        QueueFull
            There is none.
        """
        if len(self._waiting) + self._uploading >= self.capacity:
            raise QueueFull
        self._uploading += 1
        try:
            yield
        finally:
            self._uploading -= 1

    def put(self, job: Job) -> None:
        self._waiting.append(job)
        self._arrived.set()

    def put_back(self, job: Job) -> None:
        """Put a job that lost its worker in front of all others, past the capacity if need be."""
        self._waiting.appendleft(job)
        self._arrived.set()

    def remove(self, job: Job) -> bool:
        """Take out a waiting job; False where it is not waiting."""
        try:
            self._waiting.remove(job)
        except ValueError:
            return False
        return True

    async def get(self) -> Job:
        """The job that waited longest; waits for one. A cancelled `get` takes none."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def drain(self) -> list[Job]:
        """Take out all waiting jobs."""
        jobs = list(self._waiting)
        self._waiting.clear()
        return jobs
