"""The device's side of a push proxy: what is kept for it, as server-sent events."""

import asyncio
import hmac
import time

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.push.shelf import Shelf
from penstock.web.responses import SecurityHeaders, error_response, reply
from penstock.web.sse import ServerSentEvents, Write, event, retry, wait_for

PATIENCE = 30.0
"""Seconds after which a device that takes nothing is dropped."""


def build(shelf: Shelf, token: str, heartbeat: float) -> Starlette:
    """`token`: what a device has to know, if it is not empty."""
    visits = _Visits(shelf, token, heartbeat)
    return Starlette(
        routes=[Route("/", visits.overview), Route("/events", visits.events)],
        middleware=[Middleware(SecurityHeaders)],
    )


class _Visits:
    """One device at a time: when it comes back before we noticed that it was gone, the old connection ends."""

    def __init__(self, shelf: Shelf, token: str, heartbeat: float) -> None:
        self._shelf, self._token, self._heartbeat = shelf, token.encode(), heartbeat
        self.last: _Visit | None = None

    async def overview(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        shelf = self._shelf
        return reply({"waiting": shelf.waiting, "bytes": shelf.bytes, "connected": shelf.connected})

    async def events(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        shelf = self._shelf
        if shelf.closing:
            return error_response(503, "the proxy stops; come back later")
        if (position := shelf.position(request.headers.get("last-event-id"))) is not None:
            await shelf.acknowledge(position)
        return _Visit(self, shelf, shelf.acknowledged if position is None else position, self._heartbeat)

    def _refused(self, request: Request) -> Response | None:
        said = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not self._token or hmac.compare_digest(said, b"Bearer " + self._token):
            return None
        facts = {"place": "the header authorization", "fix": "send Bearer and the token of this proxy"}
        return error_response(401, "who asks here has to say the token", facts, {"www-authenticate": "Bearer"})


class _Visit(ServerSentEvents):
    """One connection. It ends after a while of sending, so that the device comes back and says what it has."""

    def __init__(self, visits: _Visits, shelf: Shelf, position: int, heartbeat: float) -> None:
        super().__init__(PATIENCE)
        self._visits, self._shelf, self._position, self._heartbeat = visits, shelf, position, heartbeat

    async def stream(self, write: Write) -> None:
        shelf, changed = self._shelf, asyncio.Event()
        self._visits.last, shelf.connected = self, True
        shelf.heard.add(changed)
        shelf.tell()
        try:
            await self._pass_on(write, changed)
        finally:
            shelf.heard.discard(changed)
            if self._visits.last is self:
                shelf.connected, shelf.left = False, time.monotonic()
                shelf.tell()

    async def _pass_on(self, write: Write, changed: asyncio.Event) -> None:
        shelf, sent = self._shelf, 0
        text = retry(500)
        while not shelf.closing and self._visits.last is self and sent < shelf.most // 4:
            changed.clear()
            entries = await shelf.since(self._position) if self._position < shelf.end else ()
            text += b"".join(event(entry.value or b"", shelf.token(entry.offset)) for entry in entries)
            if text:
                await write(text)
                sent += len(text)
                text = b""
            if entries:
                self._position = entries[-1].offset + 1
                shelf.sent = max(shelf.sent, self._position)
                continue
            text = await wait_for(changed, self._heartbeat)
