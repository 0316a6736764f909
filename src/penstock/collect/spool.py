"""The spool: while a channel is not available, records are appended to a log on disk, and forwarded in order later.

A record is durable once the log is synced, so its sender is acknowledged without waiting for the channel. Records in
flight when the channel stopped answering are then on disk and perhaps in the channel, too. They are not forwarded
before the result of their first call is known; another process reads the channel. `SpoolDedup` knows the result. A
record arrives twice only if the channel fails without an acknowledgement although it appended the record. The copy has
the same origin.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ParamSpec, Protocol, TypeVar

from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Offsets, Sender, Topic
from penstock.core.errors import Unavailable, backoff
from penstock.core.record import Origin, Record
from penstock.core.runs import Runs
from penstock.core.scan import scan

log = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

TIMEOUT = 2.5
"""Seconds without progress before records go to disk. A busy broker pauses for one; a stop waits for three."""
MAX_BYTES = 1 << 30
MIN_FREE = 64 << 20
"""Bytes of disk that stay free for the other users of the disk."""
_RETRY = 0.5
_BATCH = 2_000
_READ_WAIT = 0.05
_FRAME = 64
"""Approximate bytes of a record on disk beside its key and value."""

# The names below are stored on disk.
_GROUP = "spool"
_CHANNEL = "penstock-for"
"""Header: the channel of a spooled record."""


class SpoolDedup:
    """Which spooled records their channel already holds: they were in flight, and the channel then accepted them."""

    def __init__(self, spooled: Iterable[tuple[str, Record]] = ()) -> None:
        self._spooled: dict[tuple[str, str, int], Runs] = {}
        self._in_channel: dict[tuple[str, str, int], Runs] = {}
        for channel, record in spooled:
            self.add(channel, record)

    def add(self, channel: str, record: Record) -> None:
        """Note that a record is spooled."""
        if record.origin is not None:
            _add(self._spooled, channel, record.origin)

    def observe(self, channel: str, origin: Origin) -> None:
        """Note that the channel holds a record with this origin."""
        if _contains(self._spooled, channel, origin):
            _add(self._in_channel, channel, origin)

    def in_channel(self, channel: str, origin: Origin) -> bool:
        return _contains(self._in_channel, channel, origin)


def _add(numbers: dict[tuple[str, str, int], Runs], channel: str, origin: Origin) -> None:
    numbers.setdefault((channel, origin.sender, origin.epoch), Runs()).add(origin.seq)


def _contains(numbers: dict[tuple[str, str, int], Runs], channel: str, origin: Origin) -> bool:
    runs = numbers.get((channel, origin.sender, origin.epoch))
    return runs is not None and origin.seq in runs


class Disk(Channels, Protocol):
    """Channels that support exclusive use and deleting what was read."""

    def forget(self, channel: str, before: Offsets) -> None:
        """Records before these offsets are no longer needed."""

    def hold(self, channel: str) -> AbstractContextManager[None]:
        """Lock a channel. Raises Misconfigured if another process holds it."""


@dataclass(frozen=True)
class Spool:
    """The spool of one collector. Only one process can have it open: two would each forward the records of both."""

    disk: Disk
    name: str
    max_bytes: int = MAX_BYTES
    timeout: float = TIMEOUT
    free: Callable[[], int] | None = None
    """The free bytes of the disk."""

    def records(self) -> Iterator[tuple[str, Record]]:
        """The spooled records, each with its channel. Blocks."""
        if self.name in self.disk.names():
            for entry in scan(self.disk, self.name, self.committed()):
                yield _unpack(entry)

    def oldest(self) -> Micros | None:
        """When the first spooled record was appended. Blocks."""
        entries = scan(self.disk, self.name, self.committed()) if self.name in self.disk.names() else iter(())
        return next((entry.appended for entry in entries), None)

    @asynccontextmanager
    async def open(self, sender: Sender, dedup: SpoolDedup | None = None) -> AsyncIterator["SpoolWriter"]:
        """A sender with this spool behind it. It first forwards what an earlier process spooled.

        `dedup`: which of those records their channel already holds.

        Raises Misconfigured if another process has it open.
        """
        await asyncio.to_thread(self.disk.ensure, [Topic(self.name)])
        with self.disk.hold(self.name):
            async with self.disk.sender() as disk:
                writer = SpoolWriter(sender, self, disk, await asyncio.to_thread(self._depth), dedup or SpoolDedup())
                forwarding = asyncio.create_task(writer.forward())
                try:
                    yield writer
                finally:
                    writer.close()
                    forwarding.cancel()
                    await asyncio.gather(forwarding, return_exceptions=True)

    def _depth(self) -> "Depth":
        depth = Depth()
        for _, record in self.records():
            depth.add([record])
        return depth

    def committed(self) -> Offsets:
        """The offsets up to which records were forwarded."""
        if _GROUP not in self.disk.groups():
            return {}
        return {part: at for (name, part), at in self.disk.group(_GROUP).committed.items() if name == self.name}

    def commit(self, offsets: Offsets) -> None:
        self.disk.move(_GROUP, {self.name: offsets})
        self.disk.forget(self.name, offsets)


@dataclass
class Depth:
    """How much is spooled."""

    records: int = 0
    bytes: int = 0

    def add(self, records: Sequence[Record]) -> None:
        self.records += len(records)
        self.bytes += _size(records)

    def remove(self, records: Sequence[Record]) -> None:
        self.records -= len(records)
        self.bytes -= _size(records)


@dataclass(eq=False)
class _Write:
    """Records in flight to a channel or to disk."""

    channel: str
    records: Sequence[Record]
    durable: "asyncio.Future[None]"
    started: float
    sending: "asyncio.Task[None] | None" = None
    """The call to the channel."""
    storing: "asyncio.Task[None] | None" = None


class SpoolWriter:
    """A sender: to the channel while it accepts records, otherwise to disk.

    Once a record is on disk, all that follow go to disk, too, until all of them were forwarded. When the disk is full,
    writes wait, as they would for the channel.
    """

    def __init__(self, sender: Sender, spool: Spool, disk: Sender, depth: Depth, dedup: SpoolDedup) -> None:
        self.depth = depth
        """What is on disk, or waits for free space there."""
        self._sender, self._spool, self._disk, self._dedup = sender, spool, disk, dedup
        self._stored = depth.bytes
        self._writes: dict[_Write, None] = {}
        self._calls: dict[asyncio.Task[None], str] = {}
        """Unfinished calls, each with its channel. Their records may be on disk, too."""
        self._spooling = bool(depth.records)
        self._freed, self._filled, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        (self._filled if self._spooling else self._empty).set()
        self._order = asyncio.Lock()
        self._failure: Exception | None = None
        self._progress = -math.inf
        """When the channel last acknowledged records."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def spooling(self) -> bool:
        """Whether records go to disk."""
        return self._spooling

    @property
    def full(self) -> bool:
        free = self._spool.free
        return self._stored >= self._spool.max_bytes or (free is not None and free() < MIN_FREE)

    async def forwarded(self) -> None:
        """Wait until the spool is empty. Raises the error that keeps records there for good."""
        await self._empty.wait()
        if self._failure:
            raise self._failure

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        await self.submit(channel, records)

    def submit(self, channel: str, records: Sequence[Record]) -> "asyncio.Future[None]":
        """Start to write. The future is done once the records are durable; to cancel it gives them up."""
        loop = asyncio.get_running_loop()
        write = _Write(channel, records, loop.create_future(), loop.time())
        if self._failure:
            write.durable.set_exception(self._failure)
            return write.durable
        self._writes[write] = None
        write.durable.add_done_callback(lambda _: self._finished(write))
        if self._spooling:
            self._to_disk(write)
        else:
            write.sending = asyncio.create_task(self._to_channel(write))
            self._calls[write.sending] = channel
            write.sending.add_done_callback(self._calls.pop)
            if self._timer is None:
                self._timer = loop.call_later(self._spool.timeout, self._check_progress)
        return write.durable

    def _finished(self, write: _Write) -> None:
        self._writes.pop(write, None)
        # If the records are on disk, the call to the channel continues: its result decides whether to forward them.
        pending = write.sending if write.storing is None else write.storing
        if pending is not None:
            pending.cancel()

    async def _to_channel(self, write: _Write) -> None:
        try:
            await self._sender.send(write.channel, write.records)
        except Unavailable as error:
            # No later write may overtake this one.
            for call, channel in self._calls.items():
                if call is not write.sending and channel == write.channel:
                    call.cancel()
            self._divert_from(write.channel, str(error))
        except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
            _finish(write, error)
        else:
            for record in write.records:
                if record.origin is not None:
                    self._dedup.observe(write.channel, record.origin)
            self._progress = asyncio.get_running_loop().time()
            _finish(write, None)

    def _check_progress(self) -> None:
        """Divert to disk if the channel has acknowledged nothing for `timeout`. A slow channel is still available."""
        self._timer = None
        oldest = next((write for write in self._writes if not write.durable.done()), None)
        if oldest is None or self._spooling:
            return
        loop = asyncio.get_running_loop()
        due = max(oldest.started, self._progress) + self._spool.timeout
        if loop.time() >= due:
            self._divert_from(oldest.channel, f"no acknowledgement for {self._spool.timeout:g} s")
        else:
            self._timer = loop.call_at(due, self._check_progress)

    def _divert_from(self, channel: str, reason: str) -> None:
        """Write all records in flight to disk, in order."""
        if self._spooling:
            return
        log.warning("%s is not available (%s): its records are spooled to disk", channel, reason)
        self._spooling = True
        self._empty.clear()
        self._filled.set()
        for write in self._writes:
            if not write.durable.done():
                for record in write.records:
                    self._dedup.add(write.channel, record)
                self._to_disk(write)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()

    def _to_disk(self, write: _Write) -> None:
        # From now on nothing may go to the channel directly.
        self.depth.add(write.records)
        write.storing = asyncio.create_task(self._store(write))

    async def _store(self, write: _Write) -> None:
        storing = None
        try:
            # The lock keeps the order of the writes, also of those that wait for free space.
            async with self._order:
                while self.full:
                    self._freed.clear()
                    with suppress(TimeoutError):
                        # Other users of the disk may free space, without an event.
                        await asyncio.wait_for(self._freed.wait(), _RETRY)
                self._stored += _size(write.records)
                packed = [_pack(write.channel, record) for record in write.records]
                storing = asyncio.ensure_future(self._disk.send(self._spool.name, packed))
                storing.add_done_callback(lambda done: self._stored_or_failed(write, done))
                # Let the call start: then its place in the log is fixed.
                await asyncio.sleep(0)
            # To cancel the write does not cancel the call.
            await asyncio.shield(storing)
        except BaseException as error:
            if storing is None:
                self.depth.remove(write.records)
                if write.sending is not None:
                    write.sending.cancel()
            if not isinstance(error, Exception):
                raise
            _finish(write, error)
        else:
            _finish(write, None)

    def _stored_or_failed(self, write: _Write, storing: "asyncio.Future[None]") -> None:
        """Correct the depth if the disk has failed, even if the write was given up."""
        if not storing.cancelled() and storing.exception() is not None:
            self.depth.remove(write.records)
            self._stored -= _size(write.records)

    async def forward(self) -> None:
        """Forward spooled records to their channels. Runs until it is cancelled."""
        try:
            while True:
                await self._filled.wait()
                await self._forward_all()
        except Exception as error:
            # Fail all writes: otherwise the disk would fill up unnoticed.
            self._failure = error
            self._empty.set()
            for write in self._writes:
                _finish(write, error)
            raise

    async def _forward_all(self) -> None:
        spool = self._spool
        start = await asyncio.to_thread(spool.committed)
        if self._calls:
            await asyncio.wait(self._calls)
        with spool.disk.reader({spool.name: start}) as reader:
            while self.depth.records:
                entries = await in_thread(reader.read, _BATCH, _READ_WAIT)
                for channel, some in groupby(map(_unpack, entries), itemgetter(0)):
                    records = [record for _, record in some]
                    await self._forward(channel, [one for one in records if not self._was_sent(channel, one)])
                    self.depth.remove(records)
                    self._stored -= _size(records)
                    self._freed.set()
                if entries:
                    await in_thread(spool.commit, reader.positions(spool.name))
        # No await since the last check of the depth: nothing was added.
        self._filled.clear()
        self._dedup = SpoolDedup()
        self._spooling = False
        self._empty.set()
        log.info("%s: all spooled records were forwarded", spool.name)

    def _was_sent(self, channel: str, record: Record) -> bool:
        return record.origin is not None and self._dedup.in_channel(channel, record.origin)

    async def _forward(self, channel: str, records: Sequence[Record]) -> None:
        delays = backoff()
        while records:
            try:
                await self._sender.send(channel, records)
                break
            except Unavailable:
                await asyncio.sleep(next(delays))


async def in_thread(work: Callable[P, Result], *args: P.args, **named: P.kwargs) -> Result:
    """Run in a thread. A cancelled caller waits for its end, so that nothing is closed while it is used."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **named))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _finish(write: _Write, error: Exception | None) -> None:
    if not write.durable.done():
        if error is None:
            write.durable.set_result(None)
        else:
            write.durable.set_exception(error)


def _pack(channel: str, record: Record) -> Record:
    return Record(record.value, record.origin, record.key, [*record.extra, (_CHANNEL, channel.encode())])


def _unpack(entry: Entry) -> tuple[str, Record]:
    """A spooled record, with its channel before it."""
    headers = [(name, value) for name, value in entry.headers if name != _CHANNEL]
    channel = dict(entry.headers)[_CHANNEL].decode()
    origin = Origin.read(headers)
    extra = [one for one in headers if one not in origin.headers()] if origin else headers
    return channel, Record(entry.value, origin, entry.key, extra)


def _size(records: Sequence[Record]) -> int:
    return sum(len(record.value or b"") + len(record.key or b"") + _FRAME for record in records)
