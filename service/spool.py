"""Recordings on disk between upload and the end of their job: private files with random names."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import BinaryIO

from service.errors import ServiceError
from service.logs import logger

PARTIAL_SUFFIX = ".part"
"""Of a recording still arriving; it takes its final name once whole."""


class SpoolInUse(Exception):
    """Another service has this spool."""


class Spool:
    """A directory of recordings, of one service alone.

    Raises
    ------
    OSError
        It cannot be made or written.
    SpoolInUse
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Held until the process ends, however it ends: a second service must not sweep what is this one's.
        self._lock = os.open(directory.with_name(f"{directory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SpoolInUse from None
        # The queue does not outlive the service, so whatever is here belongs to nobody.
        for left in directory.iterdir():
            if not left.is_dir():
                left.unlink()

    def open(self, job_id: str) -> BinaryIO:
        """A new file, mode 0600, for a recording that arrives."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.fdopen(os.open(self._partial(job_id), flags, 0o600), "wb", buffering=0)

    def commit(self, job_id: str) -> Path:
        """Give a whole recording its final name."""
        path = self.directory / job_id
        self._partial(job_id).rename(path)
        return path

    def discard(self, job_id: str) -> None:
        """Remove a recording, whole or not; nothing where it is gone already.

        A disk that does not let go of it is logged: whoever waits for the job has nothing to do with that.
        """
        try:
            self._partial(job_id).unlink(missing_ok=True)
            (self.directory / job_id).unlink(missing_ok=True)
        except OSError as error:
            disk_error(error)

    def close(self) -> None:
        """Let another service have the spool."""
        os.close(self._lock)

    def is_writable(self) -> bool:
        return os.access(self.directory, os.W_OK)

    def _partial(self, job_id: str) -> Path:
        return self.directory / (job_id + PARTIAL_SUFFIX)


def new_job_id() -> str:
    return secrets.token_hex(12)


def disk_error(error: OSError) -> ServiceError:
    """The answer to a write that failed; the log gets what the client must not see."""
    fields = {"errno": error.errno, "reason": error.strerror, "path": error.filename}
    logger.error("spool failed", extra={"fields": fields})
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ServiceError(507, "no_temp_space", "the disk has no room for the recording; try a smaller one, or later")
    return ServiceError(500, "spool_failed", "the recording could not be stored; the log says why")
