"""Errors of requests, answered as JSON: error, place, fix."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.web.responses import problem

log = logging.getLogger(__name__)

Handler = Callable[[Request, Exception], Awaitable[Response]]


class Problem(PenstockError):
    """Raised when a request is rejected: the status, the place, the problem, the fix."""

    def __init__(
        self, status: int, place: str, error: str, fix: str = "", facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(status, place, error, fix, facts)
        self.status, self.place, self.error, self.fix, self.facts = status, place, error, fix, facts or {}

    def __str__(self) -> str:
        return f"{self.place}: {self.error}" + (f"; {self.fix}" if self.fix else "")


def handlers(server: str, not_found: str) -> Mapping[type[Exception], Handler]:
    """Exception handlers for an app.

    `server`: its name in the answer to an internal error. `not_found`: the fix for an unknown address.
    """

    async def on_error(_: Request, error: Exception) -> Response:
        """Errors that Penstock raises on purpose."""
        assert isinstance(error, PenstockError)
        found = error if isinstance(error, Problem) else _translated(error, server)
        if isinstance(error, Unavailable) and error.retry_after is not None:
            return _response(found, {"retry-after": str(max(1, math.ceil(error.retry_after)))})
        return _response(found)

    async def on_http(request: Request, error: Exception) -> Response:
        """Unknown addresses and methods."""
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return _response(Problem(405, place, "this is not offered", f"offered here: {allowed}"), error.headers)
        if error.status_code == 404:
            return _response(Problem(404, place, "there is nothing at this address", not_found))
        return _response(Problem(error.status_code, place, error.detail), error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        """An internal error: the trace goes to the log, not to the client."""
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _response(Problem(500, f"{request.method} {request.url.path}", f"{server} has a fault of its own"))

    return {
        PenstockError: on_error,
        HTTPException: on_http,
        ClientDisconnect: _on_disconnect,
        Exception: on_fault,
    }


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Not sent: the client disconnected before its body was complete."""
    return Response(status_code=400)


def _translated(error: PenstockError, server: str) -> Problem:
    match error:
        case Unavailable():
            return Problem(503, error.service, error.reason, "ask again later")
        case Unaccounted():
            return Problem(410, error.channel, str(error), "go on from what is kept, and account for what is gone")
        case Refused():
            return Problem(400, error.what, error.reason)
        case Misconfigured():
            return Problem(409, error.place, error.problem, error.fix)
    return Problem(500, server, str(error))


def _response(error: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return problem(error.status, error.error, {"place": error.place, "fix": error.fix, **error.facts}, headers)
