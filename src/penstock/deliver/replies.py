"""Answers in JSON, and the headers that every answer has."""

from collections.abc import Mapping

import orjson
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    # No 'unsafe-eval': the page lets Vega interpret its expressions instead of compiling them.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is true now and may be another a moment later."""
    return Response(
        orjson.dumps(document), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


def problem(status: int, error: str, **facts: object) -> Response:
    """What went wrong, as a sentence and as facts."""
    return reply({"error": error, **facts}, status, {"retry-after": "1"} if status == 503 else None)


async def nothing_here(request: Request, _: Exception) -> Response:
    return problem(404, f"there is nothing at {request.url.path}")


class Guarded:
    """Adds the headers that keep browsers from doing more with an answer than is meant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)
