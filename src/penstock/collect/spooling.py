"""The spool: while a channel is away, its records wait in a log on disk, and go on into it in their order.

A record is safe as soon as that log holds it, synced; so the outside is acknowledged, and need not wait for the
channel. What was on its way when the channel fell silent lies in both, perhaps. So it is not sent again before it is
known what became of it; and another life is told what the channel holds. Only where a channel fails without a word on
what it took, a record comes twice: readers know an origin that they have seen.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, ParamSpec, Protocol, TypeVar
from uuid import uuid4

from penstock.collect.reconnecting import backoff
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Offsets, Sender, Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin, Record
from penstock.core.scan import scan

log = logging.getLogger(__name__)

P = ParamSpec("P")
Answer = TypeVar("Answer")

PATIENCE = 2.5
"""Seconds that a channel may take for records before these go to disk. Not less: a broker on a busy machine pauses for
one. Not more: whoever stops a pump waits for three."""
MOST_BYTES = 1 << 30
LEFT_FREE = 64 << 20
_LOOK_AGAIN = 0.5
_BATCH = 2_000
_LOOK = 0.05
_GROUP = "spool"
_FOR = "penstock-for"
"""The header that tells which channel an entry is for."""
_FLIGHT = "penstock-flight"
"""The header of an entry whose record was on its way into the channel already: in which life, and which call it was."""
_FRAME = 64
"""About what a record takes on disk beside its key and its value."""


There = Callable[[str, Origin], bool]
"""Whether a channel holds a record of this origin, as far as that is known."""


def _nothing(channel: str, origin: Origin) -> bool:
    return False


class Disk(Channels, Protocol):
    """Channels that can forget what was read, and that one can have for oneself."""

    def forget(self, channel: str, before: Offsets) -> None:
        """What lies before these positions need not stay."""

    def hold(self, channel: str) -> AbstractContextManager[None]:
        """Have a channel for oneself; Misconfigured when another has it."""


@dataclass(frozen=True)
class Spool:
    """Where the records of one collector wait. While it is open, nobody else can open it.

    Two would each bring the records of both into the channel, and forget what the other has yet to bring.
    """

    disk: Disk
    name: str
    most_bytes: int = MOST_BYTES
    patience: float = PATIENCE
    free: Callable[[], int] | None = None
    """How many bytes its disk has left. Some are left free: a disk without any would hold up all who share it."""

    def waiting(self) -> Iterator[tuple[str, Record]]:
        """The records that wait, each with the channel that it is for. It blocks."""
        if self.name in self.disk.names():
            for entry in scan(self.disk, self.name, self.drained()):
                waits = _unpacked(entry)
                yield waits.channel, waits.record

    def began(self) -> Micros | None:
        """When the first of the records that wait came here. It blocks."""
        waits = scan(self.disk, self.name, self.drained()) if self.name in self.disk.names() else iter(())
        return next((entry.appended for entry in waits), None)

    @asynccontextmanager
    async def over(self, sender: Sender, there: There = _nothing) -> AsyncIterator["Spooling"]:
        """The sender, with this spool behind it. What waited from an earlier life goes first, but for what is `there`.

        Misconfigured when another has it open.
        """
        await asyncio.to_thread(self.disk.ensure, [Topic(self.name)])
        with self.disk.hold(self.name):
            async with self._open(sender, there) as spooling:
                yield spooling

    @asynccontextmanager
    async def _open(self, sender: Sender, there: There) -> AsyncIterator["Spooling"]:
        async with self.disk.sender() as disk:
            spooling = Spooling(sender, self, disk, await asyncio.to_thread(self._depth), there)
            draining = asyncio.create_task(spooling.drain())
            try:
                yield spooling
            finally:
                spooling.close()
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)

    def _depth(self) -> "Depth":
        depth = Depth()
        for _, record in self.waiting():
            depth.add([record])
        return depth

    def drained(self) -> Offsets:
        """Up to where the records that lay here are in their channels."""
        if _GROUP not in self.disk.groups():
            return {}
        return {part: at for (name, part), at in self.disk.group(_GROUP).committed.items() if name == self.name}

    def done(self, positions: Offsets) -> None:
        self.disk.move(_GROUP, {self.name: positions})
        self.disk.forget(self.name, positions)


@dataclass
class Depth:
    """How much waits."""

    records: int = 0
    bytes: int = 0

    def add(self, records: Sequence[Record]) -> None:
        self.records += len(records)
        self.bytes += _size(records)

    def take(self, records: Sequence[Record]) -> None:
        self.records -= len(records)
        self.bytes -= _size(records)


@dataclass(eq=False)
class _Flight:
    """Records on their way, and who waits for them."""

    channel: str
    records: Sequence[Record]
    safe: "asyncio.Future[None]"
    began: float
    straight: "asyncio.Task[None] | None" = None
    """The call to the channel."""
    storing: "asyncio.Task[None] | None" = None
    landed: bool = False
    """Whether the channel has said that it holds them."""


class Spooling:
    """Has the shape of a sender: straight into the channel while that takes records, to disk from when it does not.

    From then on all goes to disk, behind what lies there, until all of it is in the channel. When the disk is full,
    `send` waits, as it would for the channel.
    """

    def __init__(self, sender: Sender, spool: Spool, disk: Sender, waits: Depth, there: There) -> None:
        self.depth = waits
        """What waits on disk, or for room there."""
        self._sender, self._spool, self._disk, self._there = sender, spool, disk, there
        self._stored = waits.bytes
        self._flights: dict[_Flight, None] = {}
        self._kept: dict[bytes, _Flight] = {}
        """Those that go to disk and are still on their way into the channel, by what their entries say."""
        self._life = uuid4().hex
        self._diverted = bool(waits.records)
        self._freed, self._filled, self._through = asyncio.Event(), asyncio.Event(), asyncio.Event()
        (self._filled if self._diverted else self._through).set()
        self._line = asyncio.Lock()
        self._broken: Exception | None = None
        self._moved = -math.inf
        """When the channel last took something."""
        self._watching: asyncio.TimerHandle | None = None

    @property
    def away(self) -> bool:
        """Whether records go to disk."""
        return self._diverted

    @property
    def full(self) -> bool:
        free = self._spool.free
        return self._stored >= self._spool.most_bytes or (free is not None and free() < LEFT_FREE)

    async def through(self) -> None:
        """Wait until nothing waits on disk; raises what keeps it there for good."""
        await self._through.wait()
        if self._broken:
            raise self._broken

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if self._broken:
            raise self._broken
        loop = asyncio.get_running_loop()
        flight = _Flight(channel, records, loop.create_future(), loop.time())
        self._flights[flight] = None
        if self._diverted:
            self._to_disk(flight)
        else:
            flight.straight = asyncio.create_task(self._straight(flight))
            if self._watching is None:
                self._watching = loop.call_later(self._spool.patience, self._watch)
        try:
            await flight.safe
        finally:
            self._flights.pop(flight, None)
            # A call to the channel goes on where it is kept: whoever empties the disk wants to know what became of it.
            ending = flight.straight if flight.storing is None else flight.storing
            if ending is not None:
                ending.cancel()

    async def _straight(self, flight: _Flight) -> None:
        try:
            await self._sender.send(flight.channel, flight.records)
        except Unavailable as error:
            # Nothing may overtake it now.
            for other in (*self._flights, *self._kept.values()):
                if other is not flight and other.channel == flight.channel and other.straight is not None:
                    other.straight.cancel()
            self._divert_from(flight.channel, str(error))
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            _told(flight, error)
        else:
            flight.landed = True
            self._moved = asyncio.get_running_loop().time()
            _told(flight, None)

    def _watch(self) -> None:
        """Look again and again whether the channel still takes something, as long as anything is on its way there.

        One that is slow and takes record after record is not away: to go by the disk would only make it slower.
        """
        self._watching = None
        oldest = next((flight for flight in self._flights if not flight.safe.done()), None)
        if oldest is None or self._diverted:
            return
        loop = asyncio.get_running_loop()
        due = max(oldest.began, self._moved) + self._spool.patience
        if loop.time() >= due:
            self._divert_from(oldest.channel, f"it took none for {self._spool.patience:g} s")
        else:
            self._watching = loop.call_at(due, self._watch)

    def _divert_from(self, channel: str, why: str) -> None:
        if not self._diverted:
            log.warning("%s does not take records (%s): they wait on disk", channel, why)
            self._divert()

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for flight in self._kept.values():
            if flight.straight is not None:
                flight.straight.cancel()

    def _divert(self) -> None:
        """All that is on its way goes to disk, in its order, and all that follows goes behind it."""
        self._diverted = True
        self._through.clear()
        self._filled.set()
        for number, flight in enumerate(self._flights):
            if not flight.safe.done():
                tag = f"{self._life}.{number}".encode()
                self._kept[tag] = flight
                self._to_disk(flight, tag)

    def _to_disk(self, flight: _Flight, tag: bytes | None = None) -> None:
        # From this moment on it waits: until it is in the channel, nothing may go there straight.
        self.depth.add(flight.records)
        flight.storing = asyncio.create_task(self._store(flight, tag))

    async def _store(self, flight: _Flight, tag: bytes | None) -> None:
        storing = None
        try:
            # In the order in which they came, also those that wait for room.
            async with self._line:
                while self.full:
                    self._freed.clear()
                    with suppress(TimeoutError):
                        # Others may make room on the disk, and nobody tells.
                        await asyncio.wait_for(self._freed.wait(), _LOOK_AGAIN)
                self._stored += _size(flight.records)
                packed = [_packed(flight.channel, record, tag) for record in flight.records]
                storing = asyncio.ensure_future(self._disk.send(self._spool.name, packed))
                storing.add_done_callback(lambda done: self._written(flight, done))
                # Now it is in line there.
                await asyncio.sleep(0)
            # Whoever gives up does not take it out again.
            await asyncio.shield(storing)
        except BaseException as error:
            if storing is None:
                self.depth.take(flight.records)
                if flight.straight is not None:
                    # Nobody would hear what becomes of it.
                    flight.straight.cancel()
            if not isinstance(error, Exception):
                raise
            _told(flight, error)
        else:
            _told(flight, None)

    def _written(self, flight: _Flight, storing: "asyncio.Future[None]") -> None:
        """Also when nobody waits for it any more: what is not on disk does not wait there."""
        if not storing.cancelled() and storing.exception() is not None:
            self.depth.take(flight.records)
            self._stored -= _size(flight.records)

    async def drain(self) -> None:
        """Bring what waits into the channel, whenever something does, for ever."""
        try:
            while True:
                await self._filled.wait()
                await self._drain()
        except Exception as error:
            # Whatever it is: to fill a disk that nobody empties would look like success.
            self._broken = error
            self._through.set()
            for flight in self._flights:
                _told(flight, error)
            raise

    async def _drain(self) -> None:
        spool = self._spool
        start = await asyncio.to_thread(spool.drained)
        with spool.disk.reader({spool.name: start}) as reader:
            while self.depth.records:
                entries = await _to_its_end(reader.read, _BATCH, _LOOK)
                for (channel, tag), some in groupby(map(_unpacked, entries), key=lambda one: (one.channel, one.tag)):
                    records = [waits.record for waits in some]
                    if not await self._landed(tag):
                        await self._bring(
                            channel, [record for record in records if not self._is_there(channel, record)]
                        )
                    self.depth.take(records)
                    self._stored -= _size(records)
                    self._freed.set()
                if entries:
                    await _to_its_end(spool.done, reader.positions(spool.name))
        # Nothing is awaited between the last look and this: nobody can have put something in line.
        self._filled.clear()
        self._kept.clear()
        self._diverted = False
        self._through.set()
        log.info("%s: nothing waits on disk", spool.name)

    async def _landed(self, tag: bytes | None) -> bool:
        """Whether the call that these records were in has brought them into the channel."""
        if tag is None or (flight := self._kept.get(tag)) is None:
            return False
        if flight.straight is not None:
            # While the channel is away it takes as long as any other would.
            await asyncio.wait([flight.straight])
        return flight.landed

    def _is_there(self, channel: str, record: Record) -> bool:
        return record.origin is not None and self._there(channel, record.origin)

    async def _bring(self, channel: str, records: Sequence[Record]) -> None:
        delays = backoff()
        while True:
            try:
                await self._sender.send(channel, records)
                break
            except Unavailable:
                await asyncio.sleep(next(delays))


async def _to_its_end(work: Callable[P, Answer], *args: P.args, **named: P.kwargs) -> Answer:
    """In a thread, to which whoever is cancelled listens to the end: nothing is closed while it uses it."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **named))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _told(flight: _Flight, error: Exception | None) -> None:
    if not flight.safe.done():
        if error is None:
            flight.safe.set_result(None)
        else:
            flight.safe.set_exception(error)


class _Waits(NamedTuple):
    channel: str
    record: Record
    tag: bytes | None


def _packed(channel: str, record: Record, tag: bytes | None) -> Record:
    told = [(_FOR, channel.encode()), *([(_FLIGHT, tag)] if tag is not None else [])]
    return Record(record.value, record.origin, record.key, [*record.extra, *told])


def _unpacked(entry: Entry) -> _Waits:
    told = {name: value for name, value in entry.headers if name in (_FOR, _FLIGHT)}
    headers = [(name, value) for name, value in entry.headers if name not in told]
    origin = Origin.read(headers)
    extra = [one for one in headers if one not in origin.headers()] if origin else headers
    return _Waits(told[_FOR].decode(), Record(entry.value, origin, entry.key, extra), told.get(_FLIGHT))


def _size(records: Sequence[Record]) -> int:
    return sum(len(record.value or b"") + len(record.key or b"") + _FRAME for record in records)
