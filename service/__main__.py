"""`python -m service` (and `thimble-serve`): run the service until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from types import FrameType

import uvicorn
from pydantic import ValidationError

from service.app import create_app
from service.logs import configure_logs, logger
from service.settings import PREFIX, read_settings
from service.spool import SpoolInUse
from service.supervisor import Supervisor

STOP_SLACK_SECONDS = 2.0
"""After the drain time, for the last answers to leave."""


class _Server(uvicorn.Server):
    """Stops taking jobs at the signal, not only once the last connection is gone; a second signal ends at once.

    uvicorn's own handler would end the process by the signal instead of with 0.
    """

    def __init__(self, config: uvicorn.Config, supervisor: Supervisor) -> None:
        super().__init__(config)
        self._supervisor = supervisor
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop:  # the handler runs between any two instructions: let the loop do the work
            self._loop.call_soon_threadsafe(self._supervisor.abandon if self.should_exit else self._supervisor.drain)
        self.force_exit = self.should_exit
        self.should_exit = True


def main() -> int:
    """Run; returns 2 for a wrong setting, 1 where the service could not start."""
    configure_logs()
    try:
        settings = read_settings(os.environ)
    except ValidationError as error:
        for problem in error.errors():
            name = PREFIX + str(problem["loc"][0]).upper() if problem["loc"] else "settings"
            print(f"thimble-serve: {name}: {problem['msg']}", file=sys.stderr)
        return 2
    try:
        app = create_app(settings)
    except OSError as error:
        where = f"THIMBLE_DATA_DIR {settings.data_dir}"
        print(f"thimble-serve: {where} cannot be used by user {os.getuid()}: {error.strerror}", file=sys.stderr)
        return 1
    except SpoolInUse:
        print("thimble-serve: another service uses this THIMBLE_DATA_DIR; give this one its own", file=sys.stderr)
        return 1
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds + STOP_SLACK_SECONDS),
    )
    server = _Server(config, app.state.supervisor)
    logger.info("starting", extra={"fields": {"host": settings.host, "port": settings.port, "model": settings.model}})
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not listen; it has logged why
        return 1
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
