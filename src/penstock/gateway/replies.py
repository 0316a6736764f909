"""What is wrong with a request, as a sentence with its place and the way out."""

import difflib
import logging
import math
from collections.abc import Iterable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.serve.replies import problem

log = logging.getLogger(__name__)


class Problem(PenstockError):
    """Raised when a request cannot be answered as it was asked: the status, the place, what is wrong, the way out."""

    def __init__(
        self, status: int, place: str, error: str, way_out: str = "", facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(status, place, error, way_out, facts)
        self.status, self.place, self.error, self.way_out, self.facts = status, place, error, way_out, facts or {}

    def __str__(self) -> str:
        return f"{self.place}: {self.error}" + (f"; {self.way_out}" if self.way_out else "")


def _told(error: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return problem(error.status, error.error, {"place": error.place, "way_out": error.way_out, **error.facts}, headers)


async def on_error(_: Request, error: Exception) -> Response:
    """What Penstock raises on purpose, by what the client can do about it."""
    assert isinstance(error, PenstockError)
    found = error if isinstance(error, Problem) else _translated(error)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        return _told(found, {"retry-after": str(max(1, math.ceil(error.retry_after)))})
    return _told(found)


def _translated(error: PenstockError) -> Problem:
    match error:
        case Unavailable():
            return Problem(503, error.who, f"it is unavailable: {error.why}", "ask again later")
        case Unaccounted():
            return Problem(410, error.channel, str(error), "go on from what is kept, and account for what is gone")
        case Refused():
            return Problem(400, error.what, error.reason)
        case Misconfigured():
            return Problem(409, error.place, error.problem, error.way_out)
    return Problem(500, "the gateway", str(error))


async def on_http(request: Request, error: Exception) -> Response:
    """Addresses and methods that there are not."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _told(Problem(405, place, "this is not offered", f"offered here: {allowed}"), error.headers)
    if error.status_code == 404:
        return _told(Problem(404, place, "there is nothing at this address", "GET / tells what there is"))
    return _told(Problem(error.status_code, place, error.detail), error.headers)


async def on_fault(request: Request, error: Exception) -> Response:
    """An error of our own: the trace is for the log, not for the client."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _told(Problem(500, f"{request.method} {request.url.path}", "the gateway has a fault of its own"))


def close_to(given: str, known: Iterable[str], otherwise: str) -> str:
    """The way out for a name that there is not."""
    close = [f'"{name}"' for name in difflib.get_close_matches(given, list(known), n=3)]
    return f"did you mean {' or '.join(close)}?" if close else otherwise
