"""Replay: sends a range of a channel into another channel, optionally at the original speed.

A replayed record keeps key, payload and headers, and so identity and event time. Two headers are added: `replay`, the
id of the replay, and `from`, the original channel, partition and offset.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Entry, Reader, Sender
from penstock.core.errors import Misconfigured, PenstockError
from penstock.core.record import Record
from penstock.core.scan import incomplete_read

REPLAY, FROM = "replay", "from"

Ranges = Mapping[int, tuple[int, int]]
"""Per partition: the first offset, and the one after the last."""

_SENT_AT_ONCE = 500
_SOON = 0.02
"""Records due within this many seconds are sent together: sending each alone would take longer."""


@dataclass
class Replayed:
    """The progress of a replay."""

    due: int
    sent: int = 0
    last: Micros | None = None
    """When the last sent record was originally appended: a later replay can start at this time."""
    failure: PenstockError | None = None
    """The error that ended it."""


def stretch(channels: Channels, channel: str, since: Micros | None, until: Micros | None) -> dict[int, tuple[int, int]]:
    """Return the offsets of a channel from one time up to another; None means without limit."""
    if not channels.promise.replay:
        problem = f"{channels.where} keeps no records"
        raise Misconfigured(f"channel {channel}", problem, "use kafka://, redis:// or file://")
    bounds = channels.bounds(channel)
    starts = {partition: low for partition, (low, _) in bounds.items()}
    ends = {partition: end for partition, (_, end) in bounds.items()}
    if since is not None:
        starts |= channels.since(channel, since)
    if until is not None:
        ends |= channels.since(channel, until)
    return {partition: (start, ends[partition]) for partition, start in starts.items() if start < ends[partition]}


class Replay:
    """Replays one channel into another. `speed` is a factor of the original speed; None: as fast as possible."""

    def __init__(
        self, source: Channels, channel: str, target: Channels, into: str, speed: float | None, clock: Clock
    ) -> None:
        self._source, self._channel, self._target, self._into = source, channel, target, into
        self._speed, self._clock = speed, clock
        self._mark = b"%d" % clock.now()

    async def run(self, ranges: Ranges, stop: Event, report: Callable[[Replayed], None]) -> Replayed:
        """Send the ranges in their original order, until all is sent, `stop` is set, or an error occurs."""
        done = Replayed(sum(end - start for start, end in ranges.values()))
        try:
            with Merged(self._source, self._channel, ranges) as entries:
                async with self._target.sender() as sender:
                    await self._sent(entries, sender, done, stop, report)
        except PenstockError as error:
            done.failure = error
        return done

    async def _sent(
        self, entries: Iterator[Entry], sender: Sender, done: Replayed, stop: Event, report: Callable[[Replayed], None]
    ) -> None:
        first, began = None, self._clock.elapsed()
        waiting = await asyncio.to_thread(next, entries, None)
        while waiting is not None and not stop.is_set():
            first = waiting.appended if first is None else first
            late = self._clock.elapsed() - began
            due = (waiting.appended - first) / 1e6 / self._speed if self._speed else 0.0
            if due - late > _SOON:
                await asyncio.sleep(min(due - late, 0.2))
                continue
            batch, waiting = await asyncio.to_thread(self._due, waiting, entries, first, late + _SOON)
            await self._send(sender, batch, done)
            report(done)

    def _due(
        self, waiting: Entry, entries: Iterator[Entry], first: Micros, late: float
    ) -> tuple[list[Entry], Entry | None]:
        """Return the entries that are due, and the next one."""
        batch = [waiting]
        while (entry := next(entries, None)) is not None:
            if len(batch) == _SENT_AT_ONCE or (self._speed and (entry.appended - first) / 1e6 / self._speed > late):
                return batch, entry
            batch.append(entry)
        return batch, None

    async def _send(self, sender: Sender, batch: list[Entry], done: Replayed) -> None:
        await sender.send(self._into, [self._marked(entry) for entry in batch])
        done.sent += len(batch)
        done.last = batch[-1].appended

    def _marked(self, entry: Entry) -> Record:
        headers = [header for header in entry.headers if header[0] not in (REPLAY, FROM)]
        position = f"{entry.channel}:{entry.partition}:{entry.offset}".encode()
        return Record(entry.value, None, entry.key, (*headers, (REPLAY, self._mark), (FROM, position)))


_MOST, _WAIT = 1_000, 1.0
_QUIET_READS = 30
_SHARE = 2 << 20
"""Maximum buffered bytes of a partition while others lag: more than a broker returns of one at once."""
_ENTRY = 500
"""Bytes of an entry beside its content."""


class Merged:
    """The entries of several partitions, merged by their time of arrival; each partition keeps its order.

    An entry is returned when every partition that is not at its end has one, because that can be older. Until then the
    entries of the others are buffered: of each partition `share` bytes, and one read. A partition with more is not read
    while others lag.
    """

    def __init__(self, channels: Channels, channel: str, ranges: Ranges, share: int = _SHARE) -> None:
        self._channels, self._channel, self._share = channels, channel, share
        self._next = {partition: start for partition, (start, _) in ranges.items()}
        self._ends = {partition: end for partition, (_, end) in ranges.items()}
        self._held: dict[int, deque[Entry]] = {partition: deque() for partition in ranges}
        self._bytes = dict.fromkeys(ranges, 0)
        self._open = ExitStack()
        self._reader: Reader | None = None
        self._read: set[int] = set()
        self._quiet = 0

    def __enter__(self) -> Iterator[Entry]:
        return self._entries()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _entries(self) -> Iterator[Entry]:
        heads: list[tuple[Micros, int]] = []
        lagging = set(self._held)
        while True:
            while lagging:
                self._read_on(lagging)
                for partition in [one for one in lagging if self._held[one]]:
                    heapq.heappush(heads, (self._held[partition][0].appended, partition))
                lagging = {one for one in lagging if not self._held[one] and not self._ended(one)}
            if not heads:
                return
            _, partition = heapq.heappop(heads)
            held = self._held[partition]
            entry = held.popleft()
            self._bytes[partition] -= _size(entry)
            yield entry
            if held:
                heapq.heappush(heads, (held[0].appended, partition))
            elif not self._ended(partition):
                lagging.add(partition)

    def _read_on(self, lagging: set[int]) -> None:
        reader = self._fitting(lagging)
        for entry in reader.read(_MOST, _WAIT):
            if entry.offset < self._ends[entry.partition]:
                self._held[entry.partition].append(entry)
                self._bytes[entry.partition] += _size(entry)
        reached = reader.positions(self._channel)
        moved = any(reached[one] > self._next[one] for one in self._read if not self._ended(one))
        self._next |= {one: reached[one] for one in self._read}
        self._quiet = 0 if moved else self._quiet + 1
        if self._quiet:
            self._channels.bounds(self._channel)  # Raises if the channel does not answer.
        if self._quiet > _QUIET_READS:
            raise incomplete_read(self._channel)

    def _fitting(self, lagging: set[int]) -> Reader:
        """Return a reader of all lagging partitions, without those above their share; the open one if it fits."""
        crowded = any(self._bytes[one] > self._share for one in self._read)
        if self._reader is None or crowded or not lagging <= self._read:
            self._open.close()
            self._read = {one for one, size in self._bytes.items() if size <= self._share and not self._ended(one)}
            start = {self._channel: {one: self._next[one] for one in self._read}}
            only = {(self._channel, one) for one in self._read}
            self._reader = self._open.enter_context(self._channels.reader(start, only=only))
        return self._reader

    def _ended(self, partition: int) -> bool:
        return self._next[partition] >= self._ends[partition]


def _size(entry: Entry) -> int:
    content = len(entry.key or b"") + len(entry.value or b"")
    return _ENTRY + content + sum(len(name) + len(value) for name, value in entry.headers)
