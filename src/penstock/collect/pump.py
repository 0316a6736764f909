"""The pump: brings what a source yields into a channel, each record once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta

from penstock.collect.bookmarks import Bookmark, recover
from penstock.collect.crossing import Crossing, Names
from penstock.collect.numbering import Numbering, nobody
from penstock.collect.reconnecting import backoff, reconnecting
from penstock.collect.sorting import Sorting, notice
from penstock.collect.sought import Sought
from penstock.collect.spooling import Spool, Spooling
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Channels, Intake, Offsets, ResumeState, Sender, Source
from penstock.core.errors import Unavailable
from penstock.core.metrics import Rate
from penstock.core.record import Heartbeat, Record

log = logging.getLogger(__name__)

USUAL_BYTES = 900_000
"""Of a record with its key: so many every channel takes that was not told otherwise, with room for the headers."""
_LOOK_AGAIN = 0.5
LAND_WITHIN = 3.0
"""Seconds that records on their way have to arrive, when the pump is stopped."""


class Pump:
    """From a source into a channel.

    A record is settled once the channel holds it, or the spool, where there is one: then a channel that is away is
    none of the source's business. Otherwise, when a send fails the pump fails, too: started again, it reads what the
    channel holds and goes on with exactly the rest. A source that goes away is opened again by the pump itself.

    `limit_bytes`: so many may a record have, with its key; `mark_bytes`: so many a bookmark. Neither may be more than
    its channel takes: what that refuses, it would refuse in each life again. `others`: which names of senders belong
    to other collectors; who comes by one of them is numbered here. `lacking`: what this machine has too little of, such
    as room on its disk; while it says something, nothing is taken, and so nothing acknowledged.
    """

    def __init__(
        self,
        source: Source,
        into: str,
        channels: Channels,
        *,
        heartbeats: str,
        bookmarks: str,
        dead: str | None = None,
        key: str | Sequence[str] | None = None,
        limit_bytes: int = USUAL_BYTES,
        mark_bytes: int = USUAL_BYTES,
        clock: Clock | None = None,
        mark_every: timedelta = timedelta(seconds=1),
        delays: Callable[[], Iterator[float]] = backoff,
        spool: Spool | None = None,
        others: Callable[[str], bool] = nobody,
        lacking: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._source = source
        self._names = Names(into, dead or f"{into}.dead", heartbeats, bookmarks)
        self._channels = channels
        self._key = key
        self._limit, self._most_marked = limit_bytes, mark_bytes
        self._clock = clock or SystemClock()
        self._mark_every = mark_every.total_seconds()
        self._delays = delays
        self._spool, self._others, self._lacking = spool, others, lacking
        self._paused: str | None = None
        self._spooling: Spooling | None = None
        self._rate = Rate(self._clock)
        self._duplicates = self._refused = self._shed = self._connections = 0
        self._trouble: Unavailable | None = Unavailable(source.name, "it was not opened yet")
        self.tried = False
        """Whether the source was opened, or could not be."""
        self._done = False
        self._crossing: Crossing | None = None
        self._marked: tuple[bytes | None, int] = (None, 0)
        self._life = 0

    def figures(self) -> dict[str, object]:
        """What this life of the collector has done so far, for the status page."""
        crossing = self._crossing
        return {
            "count": self._rate.count,
            "rate": self._rate.per_second(),
            "duplicates": self._duplicates,
            "refused": self._refused,
            "shed": self._shed,
            "connected": None if self._done else self._trouble is None,
            "trouble": None if self._trouble is None or self._done else str(self._trouble),
            "done": self._done,
            "in_flight": crossing.arrivals if crossing else 0,
            "paused": self._paused,
            "reconnects": max(0, self._connections - 1),
            "heard": crossing.safe.heard if crossing else None,
            **self._spooled(),
        }

    def _spooled(self) -> dict[str, object]:
        if (spooling := self._spooling) is None:
            return {}
        return {"spooled": spooling.depth.records, "spooled_bytes": spooling.depth.bytes, "away": spooling.away}

    @property
    def doubled(self) -> int:
        """How many arrivals were in the channel already, in all lives of this collector."""
        return self._crossing.safe.duplicates if self._crossing else 0

    async def run(self, stop: asyncio.Event) -> None:
        """Pump until `stop` is set or the source is done; what is on its way by then still arrives.

        To cancel it is to crash it: nothing is finished, and the next run finds out.
        """
        safe, sought = await asyncio.to_thread(self._recover)
        self._marked, self._done = (None, 0), False
        numbering = Numbering(self._source.name, safe.incarnation)
        seen, known = safe.numbers.copy(), safe.trail.known()
        sorting = Sorting(self._names.into, numbering, seen, self._key, self._limit, known, self._others)
        source = reconnecting(self._source, self._clock, safe.heard, self._watch, self._delays)
        taken = ResumeState(safe.numbers.places(), safe.trail.cursor, safe.numbers.highest())
        async with self._sender(sought) as sender, source.open(taken) as intakes:
            crossing = self._crossing = Crossing(sender, self._names, safe)
            try:
                async with asyncio.TaskGroup() as tasks:
                    finished = asyncio.Event()
                    tasks.create_task(self._mark_until(finished, sender, crossing))
                    settling = tasks.create_task(crossing.settle())
                    stopping = tasks.create_task(stop.wait())
                    taking = tasks.create_task(self._take(intakes, sorting, crossing))
                    await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
                    self._done = taking.done() and taking.exception() is None
                    taking.cancel()
                    await asyncio.wait((taking,))
                    try:
                        await asyncio.wait_for(crossing.landed(), LAND_WITHIN)
                    except TimeoutError:
                        # A broker that is away would hold us up for ever; the next life finds out what has landed.
                        raise Unavailable(self._names.into, "it did not take what was on its way") from None
                    if self._spooling is not None:
                        # The source is done: nobody else would bring what is on disk into the channel.
                        through = tasks.create_task(self._spooling.through())
                        await asyncio.wait((through, stopping), return_when=asyncio.FIRST_COMPLETED)
                        through.cancel()
                    stopping.cancel()
                    settling.cancel()
                    finished.set()
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from failures
            finally:
                self._trouble = self._trouble or Unavailable(self._source.name, "the pump does not run")

    @asynccontextmanager
    async def _sender(self, sought: Sought) -> AsyncIterator[Sender]:
        async with AsyncExitStack() as stack:
            sender: Sender = await stack.enter_async_context(self._channels.sender())
            if self._spool is not None:
                sender = self._spooling = await stack.enter_async_context(self._spool.over(sender, sought.found))
            yield sender

    def _recover(self) -> tuple[Bookmark, Sought]:
        names, watched = self._names, (self._names.into, self._names.dead)
        waiting = self._spool.waiting if self._spool is not None else list[tuple[str, Record]]
        sought = Sought(waiting())
        safe = recover(self._channels, names.bookmarks, self._source.name, watched, waiting(), names.heartbeats, sought)
        # Seconds, so that a life's number tells when it began; one more, so that no two lives share it. What a former
        # run of this very pump has sent may not be there yet.
        self._life = max(safe.incarnation + 1, self._life + 1, self._clock.now() // 1_000_000)
        safe.incarnation, safe.last = self._life, 0
        return safe, sought

    def _watch(self, trouble: Unavailable | None) -> None:
        self._trouble = trouble
        self.tried = True
        if trouble is None:
            self._connections += 1
            log.info("%s is connected", self._source.name)
        else:
            log.warning("%s: %s", self._source.name, trouble)

    async def _take(self, intakes: AsyncIterator[Intake], sorting: Sorting, crossing: Crossing) -> None:
        async for intake in intakes:
            heard = self._clock.now()
            size = sum(len(arrival.value) for arrival in intake.arrivals if isinstance(arrival, Arrival))
            try:
                await self._unpaused()
                await crossing.room(size)
            except BaseException as error:
                stopped = Unavailable(self._source.name, "its pump was stopped")
                await intake.settle(error if isinstance(error, Exception) else stopped)
                raise
            found = sorting.sort(intake, heard)
            self._rate.add(len(found.records))
            self._duplicates += found.duplicates
            crossing.safe.duplicates += found.duplicates
            self._refused += len(found.dead)
            self._shed += len(found.shed)
            crossing.launch(intake, found, heard, size)

    async def _unpaused(self) -> None:
        """Wait while this machine lacks something."""
        while (lacking := self._lacking()) is not None:
            if self._paused is None:
                log.warning("%s waits: %s", self._source.name, lacking)
            self._paused = lacking
            await asyncio.sleep(_LOOK_AGAIN)
        if self._paused is not None:
            log.warning("%s goes on", self._source.name)
            self._paused = None

    async def _mark_until(self, finished: asyncio.Event, sender: Sender, crossing: Crossing) -> None:
        while True:
            last = finished.is_set()
            try:
                # Where records go to disk nobody knows what the channel holds; the last bookmark stays.
                if self._spooling is None or not self._spooling.away:
                    await self._mark(sender, crossing)
            except Unavailable:
                if self._spooling is None:
                    raise
            if last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(finished.wait(), self._mark_every)

    async def _mark(self, sender: Sender, crossing: Crossing) -> None:
        """Write a bookmark, and say the last number that was given here.

        The ends of the channels are looked up first, and then all that was launched until then is awaited: so whatever
        lies before these ends is among the safe numbers. That these hold more by now does no harm.
        """
        safe = crossing.safe
        ends = await asyncio.to_thread(self._ends)
        await crossing.landed()
        if self._spooling is not None and self._spooling.away:
            # What lies before these ends may wait on disk, too; whoever comes next looks for it behind a bookmark.
            return
        before, said = self._marked
        # Others write to the heartbeats, too. That alone is no news.
        safe.positions = {**ends, self._names.heartbeats: safe.positions.get(self._names.heartbeats, {})}
        record = safe.record(self._source.name)
        if record.value != before:
            safe.positions = ends
            record = safe.record(self._source.name)
            if len(record.value or b"") <= self._most_marked:
                await sender.send(self._names.bookmarks, [record])
            else:
                log.warning("the bookmark of %s is too large to be written; the last one stays", self._source.name)
        if safe.last > said:
            beat = Heartbeat(self._source.name, safe.incarnation, safe.last, self._clock.now())
            await sender.send(self._names.heartbeats, [notice(self._names.into, beat)])
        self._marked = (record.value, safe.last)

    def _ends(self) -> Mapping[str, Offsets]:
        watched = (self._names.into, self._names.dead, self._names.heartbeats)
        return {
            channel: {partition: end for partition, (_, end) in self._channels.bounds(channel).items()}
            for channel in watched
        }
