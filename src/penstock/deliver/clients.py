"""Clients of a feed: a document, server-sent events or a WebSocket at one address."""

import asyncio
import math
from collections.abc import Awaitable

import orjson
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from penstock.core.clock import Clock
from penstock.core.errors import Refused
from penstock.deliver.delivery import Delivery
from penstock.deliver.feed import Follower
from penstock.deliver.outlet import Outlet
from penstock.deliver.settings import DeliverSettings
from penstock.web.responses import problem
from penstock.web.sse import ServerSentEvents, Write, event, retry, run_until_first_ends, wait_for

LONGEST = 4_096
"""Bytes of a message from a client."""
_KEEP_ALIVE = 15.0
_VIOLATION, _GOING_AWAY = 1008, 1001
_START_UP = 20.0


class FeedEndpoint:
    """Accepts clients of feeds."""

    def __init__(self, delivery: Delivery, settings: DeliverSettings, clock: Clock) -> None:
        self._delivery, self._settings, self._clock = delivery, settings, clock
        self._patience = settings.patience.total_seconds()

    async def http(self, request: Request) -> Response:
        wants_events = "text/event-stream" in request.headers.get("accept", "")
        outlet = await self._open(request, follows=wants_events)
        if isinstance(outlet, Response):
            return outlet
        if wants_events:
            token = request.headers.get("last-event-id") or _after(request)
            return EventStream(self._delivery, outlet, token, self._patience)
        message = outlet.feed.join(_after(request))
        return Response(message.text, headers={"cache-control": "no-store"}, media_type="application/json")

    async def websocket(self, socket: WebSocket) -> None:
        outlet = await self._open(socket, follows=True)
        if isinstance(outlet, Response):
            await socket.send_denial_response(outlet)
            return
        await socket.accept()
        await WebSocketClient(socket, self._delivery, outlet, self._clock, self._patience).follow(_after(socket))

    async def _open(self, connection: HTTPConnection, follows: bool) -> Outlet | Response:
        """The requested feed, or the response that rejects the client."""
        name = connection.path_params["name"]
        outlet = self._delivery.outlets.get(name)
        if outlet is None:
            return problem(404, f'there is no feed "{name}"', {"feeds": sorted(self._delivery.outlets)})
        if follows and self._delivery.clients >= self._settings.clients:
            return problem(503, f"{self._settings.clients} clients follow already; come back later")
        try:
            # A table that is still being read would look as if rows had vanished.
            async with asyncio.timeout(_START_UP):
                await self._delivery.ready.wait()
        except TimeoutError:
            return problem(503, "the tables are still being read; come back later")
        return outlet


def _after(connection: HTTPConnection) -> str | None:
    return connection.query_params.get("after")


class RateLimit:
    """Messages that a client may send: some at once, and some per second."""

    def __init__(self, clock: Clock, burst: float = 40, per_second: float = 10) -> None:
        self._clock = clock
        self._burst, self._per_second = burst, per_second
        self._left, self._at = burst, clock.elapsed()

    def spend(self) -> bool:
        """Whether one more message is within it."""
        now = self._clock.elapsed()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second) - 1
        self._at = now
        return self._left >= 0


class WebSocketClient:
    """One WebSocket client. It receives messages of the feed, and may send `{"ping": x}` and `{"latency": [ms, …]}`."""

    def __init__(self, socket: WebSocket, delivery: Delivery, outlet: Outlet, clock: Clock, patience: float) -> None:
        self._socket = socket
        self._delivery, self._outlet = delivery, outlet
        self._clock, self._patience = clock, patience
        self._pongs: list[float] = []

    async def follow(self, token: str | None) -> None:
        """Return when the client is gone, was dropped, or the delivery closes."""
        with self._outlet.following() as waker:
            await run_until_first_ends(
                self._send(Follower(self._outlet.feed, token), waker),
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
        await self._in_time(self._socket.close(_GOING_AWAY, "the delivery stops; come back with your position"))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._patience):
            await sending

    async def _receive(self, waker: asyncio.Event) -> None:
        rate_limit = RateLimit(self._clock)
        while (said := await self._socket.receive())["type"] != "websocket.disconnect":
            try:
                if not rate_limit.spend():
                    raise Refused("the message", "rate limit exceeded")
                self._handle(said.get("text"))
            except Refused as refused:
                await self._in_time(self._socket.close(_VIOLATION, str(refused)))
                return
            if self._pongs:
                waker.set()

    def _handle(self, text: str | None) -> None:
        try:
            said = orjson.loads(text or "")
        except orjson.JSONDecodeError as error:
            raise Refused("the message", "it is not JSON") from error
        match said:
            case {"ping": int() | float() as sent} if _finite(sent):
                self._pongs.append(sent)
            case {"latency": list(took)} if all(_finite(ms) for ms in took):
                for ms in took:
                    self._outlet.to_the_browser.add(ms)
            case _:
                raise Refused("the message", 'send {"ping": number} or {"latency": [milliseconds, …]}')


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class EventStream(ServerSentEvents):
    """One client of server-sent events; the id of each event is the position that the client reaches by it."""

    def __init__(self, delivery: Delivery, outlet: Outlet, token: str | None, patience: float) -> None:
        super().__init__(patience)
        self._delivery, self._outlet, self._token = delivery, outlet, token

    async def stream(self, write: Write) -> None:
        with self._outlet.following() as waker:
            follower = Follower(self._outlet.feed, self._token)
            text = retry(1_000)
            while not self._delivery.closing.is_set():
                waker.clear()
                if message := follower.take():
                    text += event(message.text.encode(), message.position)
                if text:
                    await write(text)
                text = await wait_for(waker, _KEEP_ALIVE)
