"""What the routes share: channels, writers, consumer sessions, threads, limits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from penstock.audit.writers import protected
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Sender
from penstock.core.errors import Unavailable
from penstock.core.record import Record
from penstock.core.text import did_you_mean
from penstock.gateway.records import Decoder
from penstock.gateway.sessions import Sessions
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.writer import ChannelWriter
from penstock.web.requests import BodyReader
from penstock.web.responses import Problem

Result = TypeVar("Result")

_CALLS = 16
_CALL_WAIT = 5.0
_NAMES_TTL = 5.0
"""Seconds for which the names of channels are cached."""
_MAX_WRITERS = 1_000
_WRITABLE_TTL = 60.0
"""Seconds for which it is cached that a channel is not the result of a query."""


class Gateway:
    """Serves requests while `running()`."""

    def __init__(self, channels: Channels, settings: GatewaySettings | None = None, clock: Clock | None = None) -> None:
        self.channels, self.settings, self.clock = channels, settings or GatewaySettings(), clock or SystemClock()
        self.decoder = Decoder(self.settings, self.clock.now)
        self.bodies = BodyReader(
            "the gateway", self.settings.body, self.settings.memory, self.settings.upload, allow_empty=True
        )
        self.sessions = Sessions(channels, self.settings, self.clock)
        self.closing = threading.Event()
        """Set at shutdown: long polls end."""
        self.calls = _Threads(_CALLS, "calls", _CALL_WAIT)
        self.polls = _Threads(self.settings.polls, "long polls", 0.0)
        self._sender: Sender | None = None
        self._writers: dict[str, ChannelWriter] = {}
        self._writable: dict[str, float] = {}
        """When each of these channels was found to be writable."""
        self._names: frozenset[str] = frozenset()
        self._names_read = -_NAMES_TTL

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the sender. At the end, wait for what is in flight, and let consumer sessions leave their groups."""
        async with self.channels.sender() as sender:
            self._sender = sender
            try:
                yield
            finally:
                self.closing.set()
                timeout = self.settings.send_timeout.total_seconds()
                writers = self._writers.values()
                await asyncio.gather(self.sessions.leave(), *(writer.close(timeout) for writer in writers))
                self.calls.close()
                self.polls.close()

    async def names(self) -> Sequence[str]:
        names = await self.calls.run(self.channels.names)
        self._names, self._names_read = frozenset(names), self.clock.elapsed()
        return names

    async def require(self, channel: str) -> None:
        """Problem 404, with a similar name, unless the channel exists."""
        if not self.channels.promise.replay:
            return  # This binder lists no channels.
        if channel in self._names and self.clock.elapsed() - self._names_read < _NAMES_TTL:
            return
        if channel not in (names := await self.names()):
            raise not_found("channel", channel, names, "GET /channels lists all channels")

    async def require_readable(self, channel: str) -> None:
        """Problem 409 where reading removes records: what exceeds the limits of a response would be lost."""
        if not self.channels.promise.replay:
            why = f"{self.channels.where} delivers each record once, to one reader: it cannot be read by offsets"
            raise Problem(409, f"channel {channel}", why, "read it with penstock consume, or use another binder")
        await self.require(channel)

    async def require_writable(self, channel: str) -> None:
        """Problem 403 for results, dead letters and internal channels."""
        checked = self._writable.get(channel)
        if checked is None or self.clock.elapsed() - checked > _WRITABLE_TTL:
            self._writable.pop(channel, None)
            if (refusal := await self.calls.run(partial(protected, channel, self.channels))) is not None:
                raise Problem(403, f"channel {channel}", *refusal)
            if len(self._writable) >= _MAX_WRITERS:
                self._writable.clear()
            self._writable[channel] = self.clock.elapsed()
        await self.require(channel)

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """Return once the channel has acknowledged all of them."""
        if sum(writer.in_flight_bytes for writer in self._writers.values()) > self.settings.memory:
            raise Unavailable("the gateway", "too many bytes wait for acknowledgement; these records were not sent")
        await self._writer(channel).write(records)

    def _writer(self, channel: str) -> ChannelWriter:
        if channel not in self._writers:
            assert self._sender is not None, "the gateway is not running"
            if len(self._writers) >= _MAX_WRITERS:
                self._writers = {name: writer for name, writer in self._writers.items() if not writer.idle}
            timeout, retry = self.settings.send_timeout.total_seconds(), self.channels.promise.replay
            self._writers[channel] = ChannelWriter(
                channel, self._sender, self.settings.sender, self.clock, timeout, retry
            )
        return self._writers[channel]


def not_found(kind: str, name: str, names: Sequence[str], otherwise: str) -> Problem:
    return Problem(404, f"{kind} {name}", f"{kind} not found", did_you_mean(name, names, otherwise))


class _Threads:
    """A thread pool that rejects calls when all threads are busy for `wait` seconds."""

    def __init__(self, size: int, name: str, wait: float) -> None:
        self._size, self._name, self._wait = size, name, wait
        self._pool = ThreadPoolExecutor(size, f"gateway-{name}")
        self._free = asyncio.Semaphore(size)

    async def run(self, function: Callable[[], Result]) -> Result:
        """The result of the call; Unavailable when no thread is free in time."""
        try:
            async with asyncio.timeout(self._wait):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("the gateway", f"{self._size} {self._name} are running already", 1.0) from None
        running = asyncio.get_running_loop().run_in_executor(self._pool, function)
        # Released when the thread is done, also when the request is cancelled.
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
