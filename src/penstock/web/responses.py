"""JSON responses, and the headers of every response."""

from collections.abc import Mapping

import orjson
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response that is not to be cached."""
    return Response(
        orjson.dumps(document), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


def problem(
    status: int, error: str, facts: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error response: a sentence and facts."""
    retry = {"retry-after": "1"} if status == 503 else {}
    return reply({"error": error, **(facts or {})}, status, {**retry, **(headers or {})})


_NO_CONTENT = "default-src 'none'; frame-ancestors 'none'"


class SecurityHeaders:
    """Middleware that adds the security headers for browsers."""

    def __init__(self, app: ASGIApp, policy: str = _NO_CONTENT) -> None:
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
