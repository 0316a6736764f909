"""The ingest loop: from a source into a channel, each record once.

A record passes `IngestLoop._receive`, `Dedup.process` and `InFlight.send`; then `InFlight.settle` updates the bookmark
and acknowledges the intake.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from penstock.collect.bookmarks import Bookmark, ends_of, recover
from penstock.collect.dedup import Dedup, DedupResult, heartbeat_record
from penstock.collect.numbers import Numbering, no_collectors
from penstock.collect.spool import Spool, SpoolDedup, SpoolWriter
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Arrival, Channels, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Unavailable, backoff
from penstock.core.metrics import Rate
from penstock.core.record import Heartbeat, OutageInterval, Record

log = logging.getLogger(__name__)

DEFAULT_RECORD_BYTES = 900_000
"""Of a record with its key. Every channel accepts this by default, with space for the headers."""
STOP_TIMEOUT = 3.0
"""Seconds that records in flight have to become durable at a stop."""
_RETRY = 0.5

MAX_INTAKES = 64
MAX_BYTES = 32 << 20
"""Limits of the in-flight window."""

BATCH_RECORDS = 2_000
BATCH_BYTES = 1 << 20
"""An intake is closed when it reaches one of the two."""
ARRIVAL_OVERHEAD = 200
"""Approximate bytes of memory of an arrival beside its payload."""

Submit = Callable[[str, Sequence[Record]], "asyncio.Future[None]"]
"""Start to write records to a channel. The future is done once they are durable."""


@dataclass(frozen=True)
class ChannelNames:
    """The channels that a collector writes."""

    into: str
    dead: str
    heartbeats: str
    bookmarks: str


@dataclass(eq=False)
class _Batch:
    intake: Intake
    result: DedupResult
    received: Micros
    size: int
    writes: "Sequence[asyncio.Future[None]]"
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class InFlight:
    """The in-flight window: batches are written concurrently and settled in order.

    `bookmark` holds what is durable. It is updated before an intake is acknowledged.
    """

    def __init__(self, submit: Submit, names: ChannelNames, bookmark: Bookmark) -> None:
        self.bookmark = bookmark
        self.arrivals = 0
        self._submit = submit
        self._names = names
        self._batches: asyncio.Queue[_Batch] = asyncio.Queue()
        self._latest: _Batch | None = None
        self._intakes = self._bytes = 0
        self._failure: Exception | None = None
        self._freed = asyncio.Event()

    async def wait_for_space(self, size: int) -> None:
        """Wait until the window has space. A single intake always has, however large it is.

        Raises the error of a failed write: from then on, nothing may be sent.
        """
        while self._failure is None and (
            self._intakes >= MAX_INTAKES or (self._intakes > 0 and self._bytes + size > MAX_BYTES)
        ):
            self._freed.clear()
            await self._freed.wait()
        if self._failure is not None:
            raise self._failure

    def send(self, intake: Intake, result: DedupResult, received: Micros, size: int) -> None:
        """Start to write the records of an intake, after those of earlier intakes."""
        self._intakes += 1
        self._bytes += size
        self.arrivals += len(result.records) + len(result.dead)
        parts = ((self._names.into, result.records), (self._names.dead, result.dead))
        writes = [self._submit(channel, records) for channel, records in parts if records]
        self._latest = _Batch(intake, result, received, size, writes)
        self._batches.put_nowait(self._latest)

    async def settle(self) -> None:
        """Settle batches in order, until it is cancelled. After a failure, settle all with the error and raise it."""
        batch: _Batch | None = None
        try:
            while True:
                batch = await self._batches.get()
                await self._write_finished(batch)
                written, batch = batch, None
                await self._acknowledge(written)
        except BaseException as error:
            # After a cancellation it is unknown, too, what the channel holds.
            cancelled = Unavailable(self._names.into, "the ingest loop was cancelled")
            self._failure = error if isinstance(error, Exception) else cancelled
            self._freed.set()
            abandoned = [] if batch is None else [batch]
            while not self._batches.empty():
                abandoned.append(self._batches.get_nowait())
            writes = [write for one in abandoned for write in one.writes]
            for write in writes:
                write.cancel()
            await asyncio.gather(*writes, return_exceptions=True)
            for one in abandoned:
                await one.intake.settle(self._failure)
            raise

    async def _write_finished(self, batch: _Batch) -> None:
        for write in batch.writes:
            await write
        # A heartbeat before its records would look like a loss.
        if batch.result.notices:
            await self._submit(self._names.heartbeats, batch.result.notices)

    async def _acknowledge(self, batch: _Batch) -> None:
        result, bookmark = batch.result, self.bookmark
        for run in result.runs:
            bookmark.numbers.add(*run)
        bookmark.last_received = batch.received
        bookmark.last = result.last
        bookmark.cursors.add(result.ids)
        await batch.intake.settle(None)
        self._intakes -= 1
        self._bytes -= batch.size
        self.arrivals -= len(result.records) + len(result.dead)
        self._freed.set()
        batch.settled.set()

    async def settled(self) -> None:
        """Wait until all intakes that were sent before this call are settled."""
        if self._latest is not None:
            await self._latest.settled.wait()


async def reconnecting(
    source: Source,
    resume: Callable[[], Awaitable[ResumeState]],
    clock: Clock,
    last_received: Micros | None = None,
    watch: Callable[[Unavailable | None], None] = lambda error: None,
    delays: Callable[[], Iterator[float]] = backoff,
) -> AsyncGenerator[Intake, None]:
    """The intakes of the source, over all its connections. It ends when the source is exhausted.

    `resume` gives the resume state for each connection, once the intakes of the last one are settled. `last_received`:
    when the last record arrived in an earlier generation of the collector. `watch` is called with None at each
    connection, with the reason at each loss.

    A source that cannot resume yields an `OutageInterval` after each reconnect. So does one that promises to resume but
    sent records without a number or a cursor.
    """
    state = await resume()
    # Whether the last connection gave records after which the source can resume.
    resumable = last_received is None or bool(state.numbers) or state.cursor is not None
    waits = delays()
    while True:
        try:
            async with source.open(await resume()) as intakes:
                watch(None)
                now = clock.now()
                if last_received is not None and (source.guarantee is Guarantee.BEST_EFFORT or not resumable):
                    yield Intake([OutageInterval(source.name, last_received, now)])
                last_received = now
                arrivals = resumable_arrivals = 0
                async for intake in intakes:
                    last_received = clock.now()
                    waits = delays()
                    for one in intake.arrivals:
                        if isinstance(one, Arrival):
                            arrivals += 1
                            resumable_arrivals += one.origin is not None or one.cursor is not None
                    resumable = resumable_arrivals > 0 or arrivals == 0
                    yield intake
            return
        except Unavailable as error:
            delay = max(next(waits), error.retry_after or 0.0)
            watch(Unavailable(error.service, error.reason, round(delay, 1)))
            if last_received is None:
                last_received = clock.now()
            await asyncio.sleep(delay)


class IngestLoop:
    """From a source into a channel. It opens a source that was lost again.

    A record is settled once it is durable: in the channel, or in the spool if there is one. Without a spool, a failed
    write fails the loop; started again, it reads what the channel holds and continues from there.

    `max_record_bytes`: of a record with its key; `max_bookmark_bytes`: of a bookmark. Not more than the channel
    accepts: a larger one would fail again after each restart. `is_other_collector`: whether a sender name belongs to
    another collector; records in its name are numbered here. `pause_reason`: why nothing can be received now, such as a
    full disk; None if all is well.
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
        max_record_bytes: int = DEFAULT_RECORD_BYTES,
        max_bookmark_bytes: int = DEFAULT_RECORD_BYTES,
        clock: Clock | None = None,
        bookmark_every: timedelta = timedelta(seconds=1),
        delays: Callable[[], Iterator[float]] = backoff,
        spool: Spool | None = None,
        is_other_collector: Callable[[str], bool] = no_collectors,
        pause_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._source = source
        self._names = ChannelNames(into, dead or f"{into}.dead", heartbeats, bookmarks)
        self._channels = channels
        self._key = key
        self._max_record_bytes, self._max_bookmark_bytes = max_record_bytes, max_bookmark_bytes
        self._clock = clock or SystemClock()
        self._bookmark_every = bookmark_every.total_seconds()
        self._delays = delays
        self._spool, self._is_other_collector, self._pause_reason = spool, is_other_collector, pause_reason
        self._paused: str | None = None
        self._spool_writer: SpoolWriter | None = None
        self._rate = Rate(self._clock)
        self._duplicates = self._refused = self._shed = self._connections = 0
        self._error: Unavailable | None = Unavailable(source.name, "not opened yet")
        self.attempted = False
        """Whether the source was opened, or an attempt has failed."""
        self._done = False
        self._in_flight: InFlight | None = None
        self._written: tuple[bytes | None, int] = (None, 0)
        """The last bookmark, and the last number in a heartbeat."""
        self._generation = 0

    def figures(self) -> dict[str, object]:
        """The state and the counts of this process, for the status page."""
        window = self._in_flight
        figures: dict[str, object] = {
            "count": self._rate.count,
            "rate": self._rate.per_second(),
            "duplicates": self._duplicates,
            "refused": self._refused,
            "shed": self._shed,
            "connected": None if self._done else self._error is None,
            "trouble": None if self._error is None or self._done else str(self._error),
            "done": self._done,
            "in_flight": window.arrivals if window else 0,
            "paused": self._paused,
            "reconnects": max(0, self._connections - 1),
            "heard": window.bookmark.last_received if window else None,
        }
        if (writer := self._spool_writer) is not None:
            figures |= {"spooled": writer.depth.records, "spooled_bytes": writer.depth.bytes, "away": writer.spooling}
        return figures

    @property
    def total_duplicates(self) -> int:
        """How many arrivals were dropped as duplicates, in all generations of this collector."""
        return self._in_flight.bookmark.duplicates if self._in_flight else 0

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or the source is exhausted. Records in flight then still become durable.

        To cancel it is like a crash: nothing is finished, and the next run recovers.
        """
        bookmark, spool_dedup = await asyncio.to_thread(self._recover)
        self._written, self._done = (None, 0), False
        dedup = Dedup(
            self._names.into,
            Numbering(self._source.name, bookmark.generation),
            bookmark.numbers.copy(),
            self._key,
            self._max_record_bytes,
            bookmark.cursors.recent_records(),
            self._is_other_collector,
        )
        intakes = reconnecting(
            self._source, self._resume_state, self._clock, bookmark.last_received, self._watch, self._delays
        )
        async with self._writer(spool_dedup) as submit, aclosing(intakes):
            window = self._in_flight = InFlight(submit, self._names, bookmark)
            try:
                async with asyncio.TaskGroup() as tasks:
                    finished = asyncio.Event()
                    tasks.create_task(self._write_bookmarks(finished, submit, window))
                    settling = tasks.create_task(window.settle())
                    stopping = tasks.create_task(stop.wait())
                    receiving = tasks.create_task(self._receive(intakes, dedup, window))
                    await asyncio.wait((receiving, stopping), return_when=asyncio.FIRST_COMPLETED)
                    self._done = receiving.done() and receiving.exception() is None
                    receiving.cancel()
                    await asyncio.wait((receiving,))
                    try:
                        await asyncio.wait_for(window.settled(), STOP_TIMEOUT)
                    except TimeoutError:
                        # Do not wait longer for a broker that is not available; the next run recovers.
                        raise Unavailable(self._names.into, "records in flight were not acknowledged") from None
                    if self._spool_writer is not None:
                        # If the source is exhausted, no later run would forward the spooled records.
                        forwarding = tasks.create_task(self._spool_writer.forwarded())
                        await asyncio.wait((forwarding, stopping), return_when=asyncio.FIRST_COMPLETED)
                        forwarding.cancel()
                    stopping.cancel()
                    settling.cancel()
                    finished.set()
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from failures
            finally:
                self._error = self._error or Unavailable(self._source.name, "the ingest loop is not running")

    @asynccontextmanager
    async def _writer(self, dedup: SpoolDedup) -> AsyncIterator[Submit]:
        async with AsyncExitStack() as stack:
            sender = await stack.enter_async_context(self._channels.sender())
            if self._spool is not None:
                self._spool_writer = await stack.enter_async_context(self._spool.open(sender, dedup))
                yield self._spool_writer.submit
            else:
                yield lambda channel, records: asyncio.ensure_future(sender.send(channel, records))

    def _recover(self) -> tuple[Bookmark, SpoolDedup]:
        names, watched = self._names, (self._names.into, self._names.dead)
        spooled = self._spool.records if self._spool is not None else list[tuple[str, Record]]
        dedup = SpoolDedup(spooled())
        source = self._source.name
        bookmark = recover(self._channels, names.bookmarks, source, watched, names.heartbeats, spooled(), dedup)
        # The generation is a time in seconds, and larger than any before. Records of a former run of this very object
        # may not be in the channel yet.
        self._generation = max(bookmark.generation + 1, self._generation + 1, self._clock.now() // 1_000_000)
        bookmark.generation, bookmark.last = self._generation, 0
        return bookmark, dedup

    async def _resume_state(self) -> ResumeState:
        """Wait for what is in flight: the source could repeat it after newer records, with older cursors."""
        assert self._in_flight is not None
        await self._in_flight.settled()
        return self._in_flight.bookmark.resume_state()

    def _watch(self, error: Unavailable | None) -> None:
        self._error = error
        self.attempted = True
        if error is None:
            self._connections += 1
            log.info("%s is connected", self._source.name)
        else:
            log.warning("%s: %s", self._source.name, error)

    async def _receive(self, intakes: AsyncIterator[Intake], dedup: Dedup, window: InFlight) -> None:
        async for intake in intakes:
            received = self._clock.now()
            size = sum(len(arrival.value) for arrival in intake.arrivals if isinstance(arrival, Arrival))
            try:
                await self._pause()
                await window.wait_for_space(size)
            except BaseException as error:
                stopped = Unavailable(self._source.name, "the ingest loop was stopped")
                await intake.settle(error if isinstance(error, Exception) else stopped)
                raise
            result = dedup.process(intake, received)
            self._rate.add(len(result.records))
            self._duplicates += result.duplicates
            window.bookmark.duplicates += result.duplicates
            self._refused += len(result.dead)
            self._shed += len(result.shed)
            window.send(intake, result, received, size)

    async def _pause(self) -> None:
        """Wait while there is a reason to pause."""
        while (reason := self._pause_reason()) is not None:
            if self._paused is None:
                log.warning("%s is paused: %s", self._source.name, reason)
            self._paused = reason
            await asyncio.sleep(_RETRY)
        if self._paused is not None:
            log.warning("%s continues", self._source.name)
            self._paused = None

    async def _write_bookmarks(self, finished: asyncio.Event, submit: Submit, window: InFlight) -> None:
        while True:
            last = finished.is_set()
            try:
                # While records are spooled, the end of the channel is unknown; the last bookmark stays.
                if not self._spooling:
                    await self._write_bookmark(submit, window)
            except Unavailable:
                if self._spool_writer is None:
                    raise
            if last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(finished.wait(), self._bookmark_every)

    @property
    def _spooling(self) -> bool:
        return self._spool_writer is not None and self._spool_writer.spooling

    async def _write_bookmark(self, submit: Submit, window: InFlight) -> None:
        """Write a bookmark, and a heartbeat with the last number that the collector gave.

        First read the ends of the channels, then wait for all that was sent until then. So the bookmark contains every
        record before these ends. It may contain more.
        """
        bookmark, names = window.bookmark, self._names
        watched = (names.into, names.dead, names.heartbeats)
        bounds = await asyncio.to_thread(lambda: {channel: self._channels.bounds(channel) for channel in watched})
        ends = {channel: ends_of(partitions) for channel, partitions in bounds.items()}
        await window.settled()
        if self._spooling:
            # Records before these ends may be in the spool, too: the next process looks for them after a bookmark.
            return
        written, reported = self._written
        # Other processes write to the heartbeats, too. That alone is no reason for a bookmark.
        bookmark.offsets = {**ends, names.heartbeats: bookmark.offsets.get(names.heartbeats, {})}
        record = bookmark.record(self._source.name)
        if record.value != written:
            bookmark.offsets = ends
            record = bookmark.record(self._source.name)
            if len(record.value or b"") <= self._max_bookmark_bytes:
                await submit(names.bookmarks, [record])
            else:
                log.warning("the bookmark of %s is too large to be written; the last one stays", self._source.name)
        if bookmark.last > reported:
            beat = Heartbeat(self._source.name, bookmark.generation, bookmark.last, self._clock.now())
            await submit(names.heartbeats, [heartbeat_record(names.into, beat)])
        self._written = (record.value, bookmark.last)
