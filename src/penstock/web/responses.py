"""Responses: JSON, errors as JSON (error, place, fix), server-sent events, and security headers."""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable

log = logging.getLogger(__name__)

Handler = Callable[[Request, Exception], Awaitable[Response]]


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that must not be cached."""
    return Response(
        orjson.dumps(document), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


def error_response(
    status: int, error: str, facts: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response with `error`, a sentence, and further facts."""
    retry = {"retry-after": "1"} if status == 503 else {}
    return reply({"error": error, **(facts or {})}, status, {**retry, **(headers or {})})


class Problem(PenstockError):
    """Raised when a request is rejected: the status, the place, the problem, the fix."""

    def __init__(
        self, status: int, location: str, error: str, fix: str = "", facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(status, location, error, fix, facts)
        self.status, self.location, self.error, self.fix, self.facts = status, location, error, fix, facts or {}

    def __str__(self) -> str:
        return f"{self.location}: {self.error}" + (f"; {self.fix}" if self.fix else "")


def handlers(server: str, not_found: str) -> Mapping[type[Exception], Handler]:
    """Exception handlers for an app.

    `server`: the server's name, for internal errors. `not_found`: the fix for an unknown address.
    """

    async def on_error(_: Request, error: Exception) -> Response:
        """Errors that Penstock raises on purpose."""
        assert isinstance(error, PenstockError)
        found = error if isinstance(error, Problem) else _as_problem(error, server)
        if isinstance(error, Unavailable) and error.retry_after is not None:
            return problem_response(found, {"retry-after": str(max(1, math.ceil(error.retry_after)))})
        return problem_response(found)

    async def on_http(request: Request, error: Exception) -> Response:
        """Unknown addresses and methods."""
        assert isinstance(error, HTTPException)
        location = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return problem_response(Problem(405, location, "method not allowed", f"use {allowed}"), error.headers)
        if error.status_code == 404:
            return problem_response(Problem(404, location, "unknown address", not_found))
        return problem_response(Problem(error.status_code, location, error.detail), error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        """An internal error: the traceback goes to the log, not to the client."""
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        fix = "the log of the server shows the cause"
        return problem_response(
            Problem(500, f"{request.method} {request.url.path}", f"internal error in {server}", fix)
        )

    return {
        PenstockError: on_error,
        HTTPException: on_http,
        ClientDisconnect: _on_disconnect,
        Exception: on_fault,
    }


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Not sent: the client disconnected before its body was complete."""
    return Response(status_code=400)


def _as_problem(error: PenstockError, server: str) -> Problem:
    match error:
        case Unavailable():
            return Problem(503, error.service, error.reason, "try again later")
        case Unaccounted():
            return Problem(410, error.channel, str(error), "continue at the oldest offset that is kept")
        case Refused():
            return Problem(400, error.what, error.reason)
        case Misconfigured():
            return Problem(409, error.location, error.problem, error.fix)
    return Problem(500, server, str(error))


def problem_response(error: Problem, headers: Mapping[str, str] | None = None) -> Response:
    facts = {"place": error.location, "fix": error.fix, **error.facts}
    return error_response(error.status, error.error, facts, headers)


class SecurityHeaders:
    """Middleware that adds the security headers for browsers."""

    def __init__(self, app: ASGIApp, policy: str = "default-src 'none'; frame-ancestors 'none'") -> None:
        self._app = app
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


Write = Callable[[bytes], Awaitable[None]]
_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes, id: str) -> bytes:
    lines = b"".join(b"data: %b\n" % line for line in _LINE_END.split(data))
    return b"id: %b\n%b\n" % (id.encode(), lines)


async def wait_for(changed: asyncio.Event, heartbeat: float) -> bytes:
    """Wait for a change. Without one in `heartbeat` seconds, return a comment that keeps the connection alive."""
    try:
        async with asyncio.timeout(heartbeat):
            await changed.wait()
    except TimeoutError:
        return b":\n\n"
    return b""


async def run_until_first_ends(
    sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None], expected: tuple[type[Exception], ...]
) -> None:
    """Run both until one ends; cancel the other. `expected`: errors that are ignored, such as a disconnect."""
    tasks = [asyncio.create_task(sending), asyncio.create_task(receiving)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, expected):
            raise end


class ServerSentEvents(Response):
    """The response to one client. A client that does not read for `timeout` seconds is disconnected.

    `stream` writes the events. It is cancelled when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: Callable[[Write], Awaitable[None]], timeout: float) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._timeout = stream, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await run_until_first_ends(self._send_all(send), disconnected(receive), (TimeoutError, OSError))

    async def _send_all(self, send: Send) -> None:
        async def write(text: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._timeout):
                await send({"type": "http.response.body", "body": text, "more_body": more})

        await self._stream(write)
        await write(b"", more=False)


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
