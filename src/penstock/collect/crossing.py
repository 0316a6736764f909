"""Intakes on their way into a channel: sent side by side, settled in order."""

import asyncio
from dataclasses import dataclass, field

from penstock.collect.bookmarks import Bookmark
from penstock.collect.cursors import KNOWN
from penstock.collect.sorting import Sorted
from penstock.core.clock import Micros
from penstock.core.contracts import Intake, Sender
from penstock.core.errors import Unavailable

MOST_INTAKES = 64
MOST_BYTES = 32 << 20
MOST_MARKS = KNOWN // 2
"""What may be on its way at a time. Beyond it the source has to wait: if it is lost it gives all of this again, and
what has a cursor has to be known by it then."""


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
        self.arrivals = 0
        self._sender = sender
        self._names = names
        self._flights: asyncio.Queue[_Flight] = asyncio.Queue()
        self._latest: _Flight | None = None
        self._intakes = self._bytes = self._marks = 0
        self._failed: Exception | None = None
        self._freed = asyncio.Event()

    async def room(self, size: int) -> None:
        """Wait until so many bytes may set out. One intake alone always may, however large it is.

        Raises what has failed: from then on nothing may, for nobody would wait for it.
        """
        while self._failed is None and self._full(size):
            self._freed.clear()
            await self._freed.wait()
        if self._failed is not None:
            raise self._failed

    def _full(self, size: int) -> bool:
        if self._intakes >= MOST_INTAKES or self._marks >= MOST_MARKS:
            return True
        return self._intakes > 0 and self._bytes + size > MOST_BYTES

    def launch(self, intake: Intake, found: Sorted, heard: Micros, size: int) -> None:
        """Send the parts of an intake; what is launched earlier is sent earlier."""
        self._intakes += 1
        self._bytes += size
        self._marks += len(found.cursors)
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
        except BaseException as error:
            self._failed = self._why(error)
            self._freed.set()
            for flight in await self._abandoned():
                await flight.intake.settle(self._failed)
            raise

    def _why(self, error: BaseException) -> Exception:
        # Who was cancelled does not know what has arrived either.
        return error if isinstance(error, Exception) else Unavailable(self._names.into, "the pump was cut off")

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
        except BaseException as error:
            await flight.intake.settle(self._why(error))
            raise
        for run in found.numbers:
            self.safe.numbers.add(*run)
        self.safe.heard = flight.heard
        self.safe.last = found.last
        self.safe.trail.add(found.cursors)
        await flight.intake.settle(None)
        self._intakes -= 1
        self._bytes -= flight.size
        self._marks -= len(found.cursors)
        self.arrivals -= len(found.records) + len(found.dead)
        self._freed.set()
        flight.settled.set()

    async def landed(self) -> None:
        """Wait until everything that was launched before this call is settled."""
        if self._latest is not None:
            await self._latest.settled.wait()
