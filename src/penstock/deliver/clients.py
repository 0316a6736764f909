"""Clients of a feed: JSON, server-sent events or a WebSocket, at one address."""

import asyncio
import math
from collections.abc import Awaitable
from functools import partial

import orjson
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from penstock.core.clock import Clock
from penstock.core.errors import Refused
from penstock.deliver.delivery import DeliverSettings, Delivery, LiveFeed
from penstock.deliver.feed import Follower
from penstock.web.responses import ServerSentEvents, Write, error_response, event, run_until_first_ends, wait_for

MAX_MESSAGE = 4_096
"""Bytes of a message from a client."""
_HEARTBEAT = 15.0
_VIOLATION, _GOING_AWAY = 1008, 1001
_START_TIMEOUT = 20.0


class FeedEndpoint:
    """Accepts clients of feeds."""

    def __init__(self, delivery: Delivery, settings: DeliverSettings, clock: Clock) -> None:
        self._delivery, self._settings, self._clock = delivery, settings, clock
        self._timeout = settings.idle_timeout.total_seconds()

    async def http(self, request: Request) -> Response:
        wants_events = "text/event-stream" in request.headers.get("accept", "")
        live = await self._open(request, follow=wants_events)
        if isinstance(live, Response):
            return live
        if wants_events:
            token = request.headers.get("last-event-id") or _after(request)
            return ServerSentEvents(partial(self._stream, live, token), self._timeout)
        message = live.feed.join(_after(request))
        return Response(message.text, headers={"cache-control": "no-store"}, media_type="application/json")

    async def _stream(self, live: LiveFeed, token: str | None, write: Write) -> None:
        """Write server-sent events. The id of each event is the position after it."""
        with live.following() as waker:
            follower = Follower(live.feed, token)
            text = b"retry: 1000\n\n"
            while not self._delivery.closing.is_set():
                waker.clear()
                if message := follower.take():
                    text += event(message.text.encode(), message.position)
                if text:
                    await write(text)
                text = await wait_for(waker, _HEARTBEAT)

    async def websocket(self, socket: WebSocket) -> None:
        live = await self._open(socket, follow=True)
        if isinstance(live, Response):
            await socket.send_denial_response(live)
            return
        await socket.accept()
        await WebSocketClient(socket, self._delivery, live, self._clock, self._timeout).follow(_after(socket))

    async def _open(self, connection: HTTPConnection, follow: bool) -> LiveFeed | Response:
        """The requested feed, or the response that rejects the client."""
        name = connection.path_params["name"]
        live = self._delivery.feeds.get(name)
        if live is None:
            return error_response(404, f'unknown feed "{name}"', {"feeds": sorted(self._delivery.feeds)})
        if follow and self._delivery.clients >= self._settings.clients:
            return error_response(503, f"too many clients: the limit is {self._settings.clients}")
        try:
            # Without waiting, an incomplete table would look as if rows had been deleted.
            async with asyncio.timeout(_START_TIMEOUT):
                await self._delivery.ready.wait()
        except TimeoutError:
            return error_response(503, "the tables are still being read; try again later")
        return live


def _after(connection: HTTPConnection) -> str | None:
    return connection.query_params.get("after")


class RateLimit:
    """A limit of messages from a client: a burst, and a rate per second."""

    def __init__(self, clock: Clock, burst: float = 40, per_second: float = 10) -> None:
        self._clock = clock
        self._burst, self._per_second = burst, per_second
        self._left, self._at = burst, clock.elapsed()

    def spend(self) -> bool:
        """Whether one more message is within the limit."""
        now = self._clock.elapsed()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second) - 1
        self._at = now
        return self._left >= 0


class WebSocketClient:
    """One WebSocket client. It gets the messages of the feed, and may send `{"ping": x}` and `{"latency": [ms, …]}`."""

    def __init__(self, socket: WebSocket, delivery: Delivery, live: LiveFeed, clock: Clock, timeout: float) -> None:
        self._socket = socket
        self._delivery, self._live = delivery, live
        self._clock, self._timeout = clock, timeout
        self._pongs: list[float] = []

    async def follow(self, token: str | None) -> None:
        """Send until the client disconnects, is dropped, or the delivery closes."""
        with self._live.following() as waker:
            await run_until_first_ends(
                self._send(Follower(self._live.feed, token), waker),
                self._receive(waker),
                (WebSocketDisconnect, WebSocketDisconnected, TimeoutError),
            )

    async def _send(self, follower: Follower, waker: asyncio.Event) -> None:
        while not self._delivery.closing.is_set():
            waker.clear()
            while self._pongs:
                pong = orjson.dumps({"pong": self._pongs.pop(0), "now": self._clock.now()}).decode()
                await self._in_time(self._socket.send_text(pong))
            if message := follower.take():
                await self._in_time(self._socket.send_text(message.text))
            await waker.wait()
        await self._in_time(self._socket.close(_GOING_AWAY, "the server stops; reconnect with your position"))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._timeout):
            await sending

    async def _receive(self, waker: asyncio.Event) -> None:
        rate_limit = RateLimit(self._clock)
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            try:
                if not rate_limit.spend():
                    raise Refused("the message", "rate limit exceeded")
                self._handle(message.get("text"))
            except Refused as refused:
                await self._in_time(self._socket.close(_VIOLATION, str(refused)))
                return
            if self._pongs:
                waker.set()

    def _handle(self, text: str | None) -> None:
        try:
            message = orjson.loads(text or "")
        except orjson.JSONDecodeError as error:
            raise Refused("the message", "it is not JSON") from error
        match message:
            case {"ping": int() | float() as sent} if _finite(sent):
                self._pongs.append(sent)
            case {"latency": list(values)} if all(_finite(ms) for ms in values):
                for ms in values:
                    self._live.latency_to_browser.add(ms)
            case _:
                raise Refused("the message", 'send {"ping": number} or {"latency": [milliseconds, …]}')


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
