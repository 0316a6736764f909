"""Answers in JSON, and the headers that every answer has."""

from collections.abc import Mapping

import orjson
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is true now and may be another a moment later."""
    return Response(
        orjson.dumps(document), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


def problem(
    status: int, error: str, facts: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """What went wrong, as a sentence and as facts."""
    soon = {"retry-after": "1"} if status == 503 else {}
    return reply({"error": error, **(facts or {})}, status, {**soon, **(headers or {})})


class Guarded:
    """Adds the headers that keep browsers from doing more with an answer than is meant."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)
