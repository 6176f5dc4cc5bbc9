"""The application: its parts, put together once, and the routes over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.control_group import find_memory_group
from service.errors import install_error_handlers
from service.job_queue import JobQueue
from service.metrics import Metrics, Sources
from service.routes import health, metrics, transcribe
from service.settings import Settings
from service.spool import Spool
from service.supervisor import Supervisor


def create_app(settings: Settings) -> FastAPI:
    """The service for `settings`; its worker starts with the application's lifespan.

    Raises
    ------
    OSError
        The spool's directory cannot be made.
    SpoolInUse
        Another service has it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.supervisor.start()
        yield
        await app.state.supervisor.stop()
        app.state.spool.close()

    # The pages for people that FastAPI offers load their scripts from the internet; a board may have none.
    app = FastAPI(title="Thimble", version=version("thimble-stt"), lifespan=lifespan, docs_url=None, redoc_url=None)
    state = app.state
    state.settings = settings
    state.spool = Spool(settings.spool_dir)
    state.queue = JobQueue(settings.queue_capacity)
    sources = Sources(
        queue_depth=lambda: len(state.queue),
        is_ready=lambda: state.supervisor.obstacle() is None and state.spool.is_writable(),
        worker_pid=lambda: state.supervisor.worker_pid,
        group=find_memory_group(),
    )
    state.metrics = Metrics(sources, settings.queue_capacity)
    state.supervisor = Supervisor(settings, state.queue, state.spool, state.metrics)
    install_error_handlers(app)
    for routes in (transcribe, health, metrics):
        app.include_router(routes.router)
    return app
