"""`python -m service` (and `thimble-serve`): run the service until SIGTERM."""

from __future__ import annotations

import os
import sys
from types import FrameType

import uvicorn
from pydantic import ValidationError

from service.app import create_app
from service.logs import configure_logs, logger
from service.settings import PREFIX, read_settings
from service.supervisor import Supervisor

STOP_SLACK_SECONDS = 2.0
"""After the drain time, for the last answers to leave."""


class _Server(uvicorn.Server):
    """Stops taking jobs at the signal, not only once the last connection is gone."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once. uvicorn's own would end the process by the signal, not with 0."""
        supervisor: Supervisor = self.config.app.state.supervisor  # type: ignore[union-attr]
        if self.should_exit:
            supervisor.abandon()
            self.force_exit = True
        else:
            supervisor.drain()
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
        print(f"thimble-serve: THIMBLE_DATA_DIR cannot be used: {error.strerror}", file=sys.stderr)
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
    server = _Server(config)
    logger.info("starting", extra={"fields": {"host": settings.host, "port": settings.port, "model": settings.model}})
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
