"""Several connections to a feed that cannot resume: when one breaks, the others receive what it misses."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.collect.dedup import key_of
from penstock.collect.registry import SourceWrapper
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable, backoff
from penstock.core.record import OutageInterval

MAX_CONNECTIONS = 10
QUEUED = 2
"""Intakes in the queue per connection; then the connection waits."""


@dataclass(frozen=True)
class Overlapping(SourceWrapper):
    """The source over several connections at once, each record yielded once.

    `by`: the JSON path, or paths, that identify a record ("trade_id"). Without it, or without a value there, the whole
    payload does: then a payload that the feed sends twice on purpose is stored once. The last `remember` records are
    remembered.
    """

    by: str | Sequence[str] | None = None
    connections: int = 2
    remember: int = 100_000
    clock: Clock = field(default_factory=SystemClock)
    delays: Callable[[], Iterator[float]] = backoff

    def __post_init__(self) -> None:
        location = f"source {self.name}, overlap"
        if self.source.guarantee is not Guarantee.BEST_EFFORT:
            raise Misconfigured(location, "the source can resume, so it needs one connection", "remove overlap")
        if not 2 <= self.connections <= MAX_CONNECTIONS:
            raise Misconfigured(location, f"it is {self.connections}", f"set 2 to {MAX_CONNECTIONS} connections")
        if self.remember < 1:
            raise Misconfigured(location, "remember is less than 1", "set it to 1 or more")

    @property
    def description(self) -> str:
        same = "records with the same key" if self.by else "equal payloads"
        return f"{self.connections} connections at once; what all of them miss is lost; {same} are stored once"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        """Return after the first connection. Raises Unavailable if all attempts failed, and later if all are lost."""
        events: asyncio.Queue[_Event] = asyncio.Queue(QUEUED * self.connections)
        tasks = [
            asyncio.create_task(self._connect(connection, resume, events)) for connection in range(self.connections)
        ]
        try:
            connected = Connections(self.name)
            failed: set[int] = set()
            while not connected.up:
                event = await events.get()
                if isinstance(event, Connected):
                    connected.add(event)
                elif isinstance(event, Disconnected):
                    failed.add(event.connection)
                    if event.reason is not None and len(failed) == self.connections:
                        raise event.reason
                elif isinstance(event, Exception):
                    raise event
            async with aclosing(self._intakes(events, connected)) as intakes:
                yield intakes
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not events.empty():
                if isinstance(event := events.get_nowait(), Intake):
                    await event.settle(Unavailable(self.name, "it is closing"))

    async def _connect(self, connection: int, resume: ResumeState, events: "asyncio.Queue[_Event]") -> None:
        """Keep one connection open, and report its events in order."""
        delays = self.delays()
        while True:
            last_received = self.clock.now()
            try:
                async with self.source.open(resume) as intakes:
                    last_received = self.clock.now()
                    await events.put(Connected(connection, last_received))
                    async for intake in intakes:
                        last_received, delays = self.clock.now(), self.delays()
                        try:
                            await events.put(intake)
                        except asyncio.CancelledError:
                            await intake.settle(Unavailable(self.name, "it is closing"))
                            raise
                await events.put(Disconnected(connection, last_received, None))
                return
            except Unavailable as error:
                await events.put(Disconnected(connection, last_received, error))
                await asyncio.sleep(next(delays))
            except Exception as error:  # noqa: BLE001 - it is raised in _intakes
                await events.put(error)
                return

    async def _intakes(self, events: "asyncio.Queue[_Event]", connected: "Connections") -> AsyncGenerator[Intake, None]:
        recent = RecentPayloads(self.by, self.remember)
        while True:
            event = await events.get()
            if isinstance(event, Intake):
                # An intake of duplicates is yielded empty, so that it is settled after the originals.
                yield Intake(
                    [some for some in event.arrivals if not isinstance(some, Arrival) or recent.add(some)], event.settle
                )
            elif isinstance(event, Connected):
                connected.add(event)
            elif isinstance(event, Disconnected):
                if (outage := connected.remove(event)) is not None:
                    yield Intake([outage])
                if not connected.up and (connected.ended or event.reason is None):
                    return
                if not connected.up and event.reason is not None:
                    raise event.reason
            else:
                raise event


@dataclass(frozen=True)
class Connected:
    connection: int
    at: Micros


@dataclass(frozen=True)
class Disconnected:
    connection: int
    last_received: Micros
    """When this connection was last known to be open."""
    reason: Unavailable | None
    """None: the feed has ended."""


_Event = Connected | Disconnected | Intake | Exception


class Connections:
    """The open connections, and the outage intervals between them. No I/O."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.up: dict[int, Micros] = {}
        """By connection: since when it is open."""
        self.ended = False

    def add(self, up: Connected) -> None:
        self.up[up.connection] = up.at

    def remove(self, down: Disconnected) -> OutageInterval | None:
        """The outage interval, if no other connection was open when this one last received something."""
        self.ended = self.ended or down.reason is None
        if self.up.pop(down.connection, None) is None or not self.up or self.ended:
            return None
        back = min(self.up.values())
        return OutageInterval(self._name, down.last_received, back) if back > down.last_received else None


class RecentPayloads:
    """The last records that were yielded, as 128-bit digests."""

    def __init__(self, by: str | Sequence[str] | None, max_size: int) -> None:
        self._by, self._max_size = by, max_size
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, arrival: Arrival) -> bool:
        """Whether it is new."""
        key = key_of(arrival.value, self._by)
        hashed = blake2b(arrival.value if key is None else key, digest_size=16, person=b"" if key is None else b"by")
        if (digest := hashed.digest()) in self._digests:
            return False
        self._digests[digest] = None
        if len(self._digests) > self._max_size:
            self._digests.popitem(last=False)
        return True
