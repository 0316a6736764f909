"""Serves the stored events to the device, as server-sent events."""

import asyncio
import hmac
import time

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.push.device_queue import DeviceQueue
from penstock.web.responses import SecurityHeaders, error_response, reply
from penstock.web.sse import ServerSentEvents, Write, event, retry, wait_for

TIMEOUT = 30.0
"""Seconds after which a device that does not read is disconnected."""


def build(queue: DeviceQueue, token: str, heartbeat: float) -> Starlette:
    """`token`: the bearer token of the device; empty: none is required."""
    sessions = _Sessions(queue, token, heartbeat)
    return Starlette(
        routes=[Route("/", sessions.overview), Route("/events", sessions.events)],
        middleware=[Middleware(SecurityHeaders)],
    )


class _Sessions:
    """One device at a time: a new connection ends the one before."""

    def __init__(self, queue: DeviceQueue, token: str, heartbeat: float) -> None:
        self._queue, self._token, self._heartbeat = queue, token.encode(), heartbeat
        self.last: _Session | None = None

    async def overview(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        queue = self._queue
        return reply({"waiting": queue.waiting, "bytes": queue.bytes, "connected": queue.connected})

    async def events(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        queue = self._queue
        if queue.closing:
            return error_response(503, "the proxy is stopping; try again later")
        if (position := queue.position(request.headers.get("last-event-id"))) is not None:
            await queue.acknowledge(position)
        return _Session(self, queue, queue.acknowledged if position is None else position, self._heartbeat)

    def _refused(self, request: Request) -> Response | None:
        header = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not self._token or hmac.compare_digest(header, b"Bearer " + self._token):
            return None
        facts = {"place": "the header authorization", "fix": "send the token of this proxy as a bearer token"}
        return error_response(401, "the bearer token is missing or wrong", facts, {"www-authenticate": "Bearer"})


class _Session(ServerSentEvents):
    """One connection. It ends after some megabytes, so that the device connects again and acknowledges them."""

    def __init__(self, sessions: _Sessions, queue: DeviceQueue, position: int, heartbeat: float) -> None:
        super().__init__(TIMEOUT)
        self._sessions, self._queue, self._position, self._heartbeat = sessions, queue, position, heartbeat

    async def stream(self, write: Write) -> None:
        queue, changed = self._queue, asyncio.Event()
        self._sessions.last, queue.connected = self, True
        queue.listeners.add(changed)
        queue.notify()
        try:
            await self._send_events(write, changed)
        finally:
            queue.listeners.discard(changed)
            if self._sessions.last is self:
                queue.connected, queue.left = False, time.monotonic()
                queue.notify()

    async def _send_events(self, write: Write, changed: asyncio.Event) -> None:
        queue, sent = self._queue, 0
        text = retry(500)
        while not queue.closing and self._sessions.last is self and sent < queue.most // 4:
            changed.clear()
            entries = await queue.since(self._position) if self._position < queue.end else ()
            text += b"".join(event(entry.value or b"", queue.token(entry.offset)) for entry in entries)
            if text:
                await write(text)
                sent += len(text)
                text = b""
            if entries:
                self._position = entries[-1].offset + 1
                queue.sent = max(queue.sent, self._position)
                continue
            text = await wait_for(changed, self._heartbeat)
