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
from penstock.gateway.decode import Decoder
from penstock.gateway.sessions import Sessions
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.writer import ChannelWriter
from penstock.web.bodies import BodyReader
from penstock.web.responses import Problem

Answer = TypeVar("Answer")

_ASKING = 16
_ASKING_PATIENCE = 5.0
_KNOWN_FOR = 5.0
"""A channel that was there is believed to be there for so many seconds."""
_MOST_WRITERS = 1_000
_FREE_FOR = 60.0
"""A channel that no query wrote may be written to for so many seconds before it is looked up again."""
LEAVING = 5.0
"""How long the middleware may take to let members go, at the end."""


class Gateway:
    """Lives while `running()`; everything is within its bounds."""

    def __init__(self, channels: Channels, settings: GatewaySettings | None = None, clock: Clock | None = None) -> None:
        self.channels, self.settings, self.clock = channels, settings or GatewaySettings(), clock or SystemClock()
        self.decoder = Decoder(self.settings, self.clock.now)
        self.bodies = BodyReader(
            "the gateway", self.settings.body, self.settings.memory, self.settings.upload, allow_empty=True
        )
        self.sessions = Sessions(channels, self.settings, self.clock)
        self.closing = threading.Event()
        """Long polls end when this is set."""
        self._asking = _Threads(_ASKING, "questions", _ASKING_PATIENCE)
        self._polling = _Threads(self.settings.polls, "long polls", 0.0)
        self._sender: Sender | None = None
        self._writers: dict[str, ChannelWriter] = {}
        self._free: dict[str, float] = {}
        self._names: frozenset[str] = frozenset()
        self._named = -_KNOWN_FOR

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send while the body runs; at its end, what is on its way arrives, and members leave their groups."""
        acknowledged = self.settings.acknowledged.total_seconds()
        async with self.channels.sender() as sender:
            self._sender = sender
            try:
                yield
            finally:
                self.closing.set()
                await asyncio.gather(
                    self.sessions.close(LEAVING), *(writer.close(acknowledged) for writer in self._writers.values())
                )
                self._asking.close()
                self._polling.close()

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        return await self._asking.run(question)

    async def wait(self, question: Callable[[], Answer]) -> Answer:
        """As `ask`, for what may take long on purpose."""
        return await self._polling.run(question)

    async def names(self) -> Sequence[str]:
        names = await self.ask(self.channels.names)
        self._names, self._named = frozenset(names), self.clock.elapsed()
        return names

    async def known(self, channel: str) -> None:
        """Return if there is such a channel; not found, with those that are spelled alike, otherwise."""
        if not self.channels.promise.replay:
            return  # Nothing is kept, so nothing is listed: whoever listens is there.
        if channel in self._names and self.clock.elapsed() - self._named < _KNOWN_FOR:
            return
        if channel not in (names := await self.names()):
            fix = did_you_mean(channel, names, "GET /channels tells which there are")
            raise Problem(404, f"channel {channel}", "there is none of that name", fix)

    async def readable(self, channel: str) -> None:
        """Conflict where to read is to take away: what this answer has no room for would be lost to everybody."""
        if not self.channels.promise.replay:
            why = f"{self.channels.where} gives each record once, to one reader: it cannot be read by positions"
            raise Problem(409, f"channel {channel}", why, "read it with penstock consume, or use another binder")
        await self.known(channel)

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """Return once the channel has acknowledged them all."""
        if sum(writer.held for writer in self._writers.values()) > self.settings.memory:
            raise Unavailable("the gateway", "more waits to be acknowledged than it holds; these records were not sent")
        await self._writer(channel).write(records)

    async def writable(self, channel: str) -> None:
        """Return if clients may write to this channel: not to results, dead letters and internal channels."""
        looked = self._free.get(channel)
        if looked is None or self.clock.elapsed() - looked > _FREE_FOR:
            self._free.pop(channel, None)
            if (refusal := await self.ask(partial(protected, channel, self.channels))) is not None:
                raise Problem(403, f"channel {channel}", *refusal)
            if len(self._free) >= _MOST_WRITERS:
                self._free.clear()
            self._free[channel] = self.clock.elapsed()
        await self.known(channel)

    def _writer(self, channel: str) -> ChannelWriter:
        if channel not in self._writers:
            assert self._sender is not None, "the gateway does not run"
            if len(self._writers) >= _MOST_WRITERS:
                self._writers = {name: writer for name, writer in self._writers.items() if not writer.idle}
            patience, again = self.settings.acknowledged.total_seconds(), self.channels.promise.replay
            self._writers[channel] = ChannelWriter(
                channel, self._sender, self.settings.sender, self.clock, patience, again
            )
        return self._writers[channel]


class _Threads:
    """Threads for blocking calls, at most so many. A call waits `patience` seconds for a free one."""

    def __init__(self, most: int, name: str, patience: float) -> None:
        self._most, self._name, self._patience = most, name, patience
        self._pool = ThreadPoolExecutor(most, f"gateway-{name}")
        self._free = asyncio.Semaphore(most)

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """The result of the call; Unavailable when no thread is free in time."""
        try:
            if self._free.locked() and not self._patience:
                raise TimeoutError
            async with asyncio.timeout(self._patience or None):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("the gateway", f"{self._most} {self._name} are under way already", 1.0) from None
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        # Free when the thread is done, also when the request is gone.
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
