"""Intakes on their way into a channel: sent side by side, settled in order."""

import asyncio
from dataclasses import dataclass, field

from penstock.clock import Micros
from penstock.collect.bookmarks import Bookmark
from penstock.collect.sorting import Sorted
from penstock.contracts import Intake, Sender

MOST_INTAKES = 64
MOST_BYTES = 32 << 20
"""What may be on its way at a time. Beyond it the source has to wait."""


@dataclass(frozen=True)
class Names:
    """The channels that a collector writes."""

    into: str
    dead: str
    heartbeats: str
    bookmarks: str


@dataclass(eq=False)
class _Flight:
    intake: Intake
    sorted: Sorted
    heard: Micros
    size: int
    sending: asyncio.Task[None]
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Crossing:
    """Keeps `safe` true: what it says survives a crash."""

    def __init__(self, sender: Sender, names: Names, safe: Bookmark) -> None:
        self.safe = safe
        self.safe_last = 0
        """The last of the collector's own numbers that survives a crash, together with all before it."""
        self.arrivals = 0
        self._sender = sender
        self._names = names
        self._flights: asyncio.Queue[_Flight] = asyncio.Queue()
        self._latest: _Flight | None = None
        self._intakes = 0
        self._bytes = 0
        self._freed = asyncio.Event()

    async def room(self, size: int) -> None:
        """Wait until so many bytes may set out. One intake alone always may, however large it is."""
        while self._intakes >= MOST_INTAKES or (self._intakes and self._bytes + size > MOST_BYTES):
            self._freed.clear()
            await self._freed.wait()

    def launch(self, intake: Intake, found: Sorted, heard: Micros, size: int) -> None:
        """Send the parts of an intake; what is launched earlier is sent earlier."""
        self._intakes += 1
        self._bytes += size
        self.arrivals += len(found.records) + len(found.dead)
        self._latest = _Flight(intake, found, heard, size, asyncio.create_task(self._send(found)))
        self._flights.put_nowait(self._latest)

    async def _send(self, found: Sorted) -> None:
        if found.records:
            await self._sender.send(self._names.into, found.records)
        if found.dead:
            await self._sender.send(self._names.dead, found.dead)

    async def settle(self) -> None:
        """Settle what is launched, in order, forever. A failure is told to all who wait, and raised."""
        try:
            while True:
                await self._land(await self._flights.get())
        except Exception as error:
            for flight in await self._abandoned():
                await flight.intake.settle(error)
            raise
        finally:
            await self._abandoned()

    async def _abandoned(self) -> list[_Flight]:
        """What is still on its way, given up."""
        flights = []
        while not self._flights.empty():
            flights.append(self._flights.get_nowait())
            flights[-1].sending.cancel()
        await asyncio.gather(*(flight.sending for flight in flights), return_exceptions=True)
        return flights

    async def _land(self, flight: _Flight) -> None:
        found = flight.sorted
        try:
            await flight.sending
            # Only now: a heartbeat that overtakes its records would look like a loss.
            if found.notices:
                await self._sender.send(self._names.heartbeats, found.notices)
        except Exception as error:
            await flight.intake.settle(error)
            raise
        for origin in found.numbers:
            self.safe.numbers.add(origin.sender, origin.epoch, origin.seq)
        self.safe.heard = flight.heard
        self.safe_last = found.last
        await flight.intake.settle(None)
        self._intakes -= 1
        self._bytes -= flight.size
        self.arrivals -= len(found.records) + len(found.dead)
        self._freed.set()
        flight.settled.set()

    async def landed(self) -> None:
        """Wait until everything that was launched before this call is settled."""
        if self._latest is not None:
            await self._latest.settled.wait()
