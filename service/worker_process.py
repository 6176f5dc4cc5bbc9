"""The worker as the supervisor sees it: a child process that answers messages, or dies of a nameable cause."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from service.child import ChildWatch
from service.logs import logger
from service.protocol import LENGTH, Message, ProtocolError, Transcribe, body_length, decode, encode
from service.settings import PREFIX, Settings

MAX_WORDS = 50
MAX_WORD_CHARACTERS = 500
"""Lines, and characters of each, that one job may put into the log."""
STOP_SECONDS = 5.0
"""A worker whose input has ended has this long to be gone, then it is killed."""


class WorkerDied(Exception):
    """The worker is gone.

    Attributes
    ----------
    cause : str
        For the log and the client, such as `killed by SIGKILL`.
    reason : str
        For the metric: `out_of_memory`, `killed` (a signal) or `crashed` (it ended by itself).
    code : str
        Of the error that a job ends with.
    """

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause)
        self.cause, self.reason = cause, reason
        self.code = "out_of_memory" if reason == "out_of_memory" else "worker_died"


class WorkerProcess:
    """One worker; see `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout
        self._watch = ChildWatch(process.pid)
        self._words_left = MAX_WORDS
        self._words = asyncio.create_task(self._log_words(stderr), name="worker's words")

    @classmethod
    async def start(cls, settings: Settings) -> WorkerProcess:
        """Start a worker; it loads no model until it is told to."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(os.environ, settings.threads),
        )
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("asyncio gave a child without the pipes that were asked for")
        return cls(process, process.stdin, process.stdout, process.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send without waiting; to a worker that is gone it goes nowhere, and `receive` tells."""
        if isinstance(message, Transcribe):
            self._words_left = MAX_WORDS
            self._watch.look()
        self._stdin.write(encode(message))

    async def receive(self) -> Message:
        """The worker's next message.

        Raises
        ------
        WorkerDied
            It ended, or sent what is no message and was killed for it.
        """
        try:
            prefix = await self._stdout.readexactly(LENGTH.size)
            return decode(await self._stdout.readexactly(body_length(prefix)))
        except asyncio.IncompleteReadError:
            raise await self._death() from None
        except ProtocolError:
            self._kill()
            raise await self._death() from None

    async def died(self) -> WorkerDied:
        """Wait until the worker is gone, and say how."""
        return await self._death()

    async def kill(self) -> None:
        """End the worker now."""
        self._kill()
        await self._process.wait()

    async def stop(self) -> None:
        """End the worker: close its input, and kill it where that is not enough."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            await self.kill()

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _death(self) -> WorkerDied:
        return WorkerDied(*self._watch.cause(await self._process.wait()))

    async def _log_words(self, stderr: asyncio.StreamReader) -> None:
        """What the worker and its C libraries print, as log lines; one damaged recording can bring thousands."""
        while True:
            try:
                line = await stderr.readline()
            except ValueError:  # longer than the reader's limit: 64 KiB
                continue
            if not line:
                return
            self._words_left -= 1
            text = line.decode("utf-8", errors="replace").strip()[:MAX_WORD_CHARACTERS]
            if self._words_left >= 0:
                logger.warning("worker says", extra={"fields": {"pid": self.pid, "text": text}})
            elif self._words_left == -1:
                logger.warning("worker says more", extra={"fields": {"pid": self.pid}})


def worker_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The front end's environment without its settings, and with the BLAS's threads."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    return kept | {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
