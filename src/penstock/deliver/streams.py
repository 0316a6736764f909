"""A client that follows a feed, over WebSocket and over server-sent events: thin shells around a follower."""

import asyncio
import math
from collections.abc import Awaitable

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from penstock.core.clock import Clock
from penstock.core.errors import Refused
from penstock.deliver.delivery import Delivery
from penstock.deliver.feed import Follower
from penstock.deliver.outlet import Outlet
from penstock.web.sse import ServerSentEvents, Write, event, retry, run_until_first_ends, wait_for

LONGEST = 4_096
"""Bytes of a message from a client."""

_KEEP_ALIVE = 15.0
_VIOLATION, _GOING_AWAY = 1008, 1001


class Allowance:
    """How much a client may say: some messages at once, and some per second."""

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


class Socket:
    """One WebSocket client. It gets messages of the feed, and may say `{"ping": x}` and `{"latency": [ms, …]}`."""

    def __init__(self, socket: WebSocket, delivery: Delivery, outlet: Outlet, clock: Clock, patience: float) -> None:
        self._socket = socket
        self._delivery, self._outlet = delivery, outlet
        self._clock, self._patience = clock, patience
        self._pongs: list[float] = []

    async def follow(self, token: str | None) -> None:
        """Return when the client is gone, was dropped, or the delivery closes."""
        with self._outlet.following() as waker:
            await run_until_first_ends(
                self._talk(Follower(self._outlet.feed, token), waker),
                self._listen(waker),
                (WebSocketDisconnect, WebSocketDisconnected, TimeoutError),
            )

    async def _talk(self, follower: Follower, waker: asyncio.Event) -> None:
        while not self._delivery.closing.is_set():
            waker.clear()
            while self._pongs:
                pong = orjson.dumps({"pong": self._pongs.pop(0), "now": self._clock.now()}).decode()
                await self._within_patience(self._socket.send_text(pong))
            if message := follower.take():
                await self._within_patience(self._socket.send_text(message.text))
            await waker.wait()
        await self._within_patience(self._socket.close(_GOING_AWAY, "the delivery stops; come back with your position"))

    async def _within_patience(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._patience):
            await sending

    async def _listen(self, waker: asyncio.Event) -> None:
        allowance = Allowance(self._clock)
        while (said := await self._socket.receive())["type"] != "websocket.disconnect":
            try:
                if not allowance.spend():
                    raise Refused("what you say", "it is too much")
                self._hear(said.get("text"))
            except Refused as refused:
                await self._within_patience(self._socket.close(_VIOLATION, str(refused)))
                return
            if self._pongs:
                waker.set()

    def _hear(self, text: str | None) -> None:
        try:
            said = orjson.loads(text or "")
        except orjson.JSONDecodeError as error:
            raise Refused("what you say", "it is not JSON") from error
        match said:
            case {"ping": int() | float() as sent} if _finite(sent):
                self._pongs.append(sent)
            case {"latency": list(took)} if all(_finite(ms) for ms in took):
                for ms in took:
                    self._outlet.to_the_browser.add(ms)
            case _:
                raise Refused("what you say", 'say {"ping": number} or {"latency": [milliseconds, …]}')


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
