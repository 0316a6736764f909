"""What is wrong with a request, as a sentence with its place and the way out; answered as JSON."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.serve.replies import problem

log = logging.getLogger(__name__)

Handler = Callable[[Request, Exception], Awaitable[Response]]


class Problem(PenstockError):
    """Raised when a request cannot be answered as it was asked: the status, the place, what is wrong, the way out."""

    def __init__(
        self, status: int, place: str, error: str, way_out: str = "", facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(status, place, error, way_out, facts)
        self.status, self.place, self.error, self.way_out, self.facts = status, place, error, way_out, facts or {}

    def __str__(self) -> str:
        return f"{self.place}: {self.error}" + (f"; {self.way_out}" if self.way_out else "")


def handlers(whose: str, nowhere: str) -> Mapping[type[Exception], Handler]:
    """For an app: whatever its routes raise is answered by these.

    `whose`: who has a fault where we have made it. `nowhere`: the way out for an address that there is not.
    """

    async def on_error(_: Request, error: Exception) -> Response:
        """What Penstock raises on purpose, by what the client can do about it."""
        assert isinstance(error, PenstockError)
        found = error if isinstance(error, Problem) else _translated(error, whose)
        if isinstance(error, Unavailable) and error.retry_after is not None:
            return _told(found, {"retry-after": str(max(1, math.ceil(error.retry_after)))})
        return _told(found)

    async def on_http(request: Request, error: Exception) -> Response:
        """Addresses and methods that there are not."""
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return _told(Problem(405, place, "this is not offered", f"offered here: {allowed}"), error.headers)
        if error.status_code == 404:
            return _told(Problem(404, place, "there is nothing at this address", nowhere))
        return _told(Problem(error.status_code, place, error.detail), error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        """An error of our own: the trace is for the log, not for the client."""
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _told(Problem(500, f"{request.method} {request.url.path}", f"{whose} has a fault of its own"))

    return {
        PenstockError: on_error,
        HTTPException: on_http,
        ClientDisconnect: _on_disconnect,
        Exception: on_fault,
    }


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Nobody hears this: the client went away before its body was whole."""
    return Response(status_code=400)


def _translated(error: PenstockError, whose: str) -> Problem:
    match error:
        case Unavailable():
            return Problem(503, error.who, f"it is unavailable: {error.why}", "ask again later")
        case Unaccounted():
            return Problem(410, error.channel, str(error), "go on from what is kept, and account for what is gone")
        case Refused():
            return Problem(400, error.what, error.reason)
        case Misconfigured():
            return Problem(409, error.place, error.problem, error.way_out)
    return Problem(500, whose, str(error))


def _told(error: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return problem(error.status, error.error, {"place": error.place, "way_out": error.way_out, **error.facts}, headers)
