"""`/healthz`: the event loop runs. `/readyz`: a recording sent now would be transcribed."""

from __future__ import annotations

from fastapi import APIRouter, Request

from service.errors import ServiceError
from service.schemas import ErrorBody

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Always `ok`; restarting a service that only lacks its model would not help it."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": ErrorBody}})
async def readyz(request: Request) -> dict[str, str]:
    """`ready`, or 503 with the code of what is in the way."""
    state = request.app.state
    if obstacle := state.supervisor.obstacle():
        raise obstacle
    if not state.spool.is_writable():
        raise ServiceError(503, "spool_failed", "the spool cannot be written")
    return {"status": "ready"}
