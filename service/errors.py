"""What a client is told when something fails: one body, a stable code, no path, no traceback, nobody's text."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

# The engine's codes that blame the request, and their HTTP status; every other code of its is our fault, a 500.
ENGINE_STATUS = {
    "empty_audio": 400,
    "audio_too_long": 413,
    "unsupported_audio": 415,
    "bad_samples": 400,
    "unsupported_language": 400,
    "invalid_options": 400,
    "deadline_exceeded": 504,
}


class ServiceError(Exception):
    """An answer other than the one asked for.

    Parameters
    ----------
    status : int
        HTTP status.
    code : str
        Stable; clients may rely on it.
    message : str
        What was expected, what was found, what to change.
    param : str or None
        The form field at fault.
    headers : mapping
        Extra response headers.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})


def engine_error(code: str, message: str) -> ServiceError:
    """The answer to a job that the engine gave up with `code`."""
    blames_file = code in ENGINE_STATUS and code not in ("invalid_options", "deadline_exceeded")
    param = "language" if code == "unsupported_language" else "file" if blames_file else None
    return ServiceError(ENGINE_STATUS.get(code, 500), code, message, param)


def shutting_down() -> ServiceError:
    """The answer to what comes, or is still waiting, when the service stops."""
    return ServiceError(503, "shutting_down", "the service is stopping; try again shortly", headers={"Retry-After": "5"})


def cancelled() -> ServiceError:
    """What a job ends with when its client went away; nobody reads it (nginx has the same status)."""
    return ServiceError(499, "cancelled", "the client went away")


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, object]:
    """The one error body; `type` follows from the status, as in OpenAI's API."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """Turn every way to fail into the one body."""

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        request.app.state.metrics.refused(error.code)
        body = error_body(error.status, error.code, error.message, error.param)
        return JSONResponse(body, error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        request.app.state.metrics.refused(code)
        body = error_body(error.status_code, code, str(error.detail))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        request.app.state.metrics.refused("internal_error")
        # Starlette raises the error again once this is sent; the server logs it with its traceback.
        return JSONResponse(error_body(500, "internal_error", "the service failed; its log says why"), 500)
