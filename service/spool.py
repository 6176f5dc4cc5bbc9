"""Recordings on disk between upload and the end of their job: private files with random names."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import BinaryIO

from service.errors import ServiceError

PARTIAL_SUFFIX = ".part"
"""Of a recording still arriving; it takes its final name once whole."""


class Spool:
    """A directory of recordings.

    Raises
    ------
    OSError
        It cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The queue does not outlive the service, so whatever is here belongs to nobody.
        for left in directory.iterdir():
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
        """Remove a recording, whole or not; nothing where it is gone already."""
        self._partial(job_id).unlink(missing_ok=True)
        (self.directory / job_id).unlink(missing_ok=True)

    def is_writable(self) -> bool:
        return os.access(self.directory, os.W_OK)

    def _partial(self, job_id: str) -> Path:
        return self.directory / (job_id + PARTIAL_SUFFIX)


def new_job_id() -> str:
    return secrets.token_hex(12)


def disk_error(error: OSError) -> ServiceError:
    """The answer to a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ServiceError(507, "no_temp_space", "the disk has no room for the recording; try a smaller one, or later")
    return ServiceError(500, "spool_failed", "the recording could not be stored; the log says why")
