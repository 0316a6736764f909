"""Replay: sends a range of a channel into another channel, optionally at the original speed.

A replayed record keeps key, payload and headers, and so identity and event time. Two headers are added: `replay`, the
id of the replay, and `from`, the original channel, partition and offset.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Entry, Sender
from penstock.core.errors import Misconfigured, PenstockError
from penstock.core.record import Record
from penstock.core.scan import scan_batches

REPLAY, FROM = "replay", "from"

Ranges = Mapping[int, tuple[int, int]]
"""Per partition: the first offset, and the one after the last."""

_HELD = 50_000
"""Maximum entries in memory."""
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
            async with self._target.sender() as sender:
                await self._sent(merged(self._source, self._channel, ranges), sender, done, stop, report)
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
            await sender.send(self._into, [self._marked(entry) for entry in batch])
            done.sent += len(batch)
            done.last = batch[-1].appended
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

    def _marked(self, entry: Entry) -> Record:
        headers = [header for header in entry.headers if header[0] not in (REPLAY, FROM)]
        position = f"{entry.channel}:{entry.partition}:{entry.offset}".encode()
        return Record(entry.value, None, entry.key, (*headers, (REPLAY, self._mark), (FROM, position)))


def merged(channels: Channels, channel: str, ranges: Ranges, held: int = _HELD) -> Iterator[Entry]:
    """Yield the entries of several partitions by their time of arrival; each partition keeps its order.

    At most `held` entries are in memory, an equal share of each partition. One reader is open at a time.
    """
    share = max(1, held // max(1, len(ranges)))
    parts = (_entries(channels, channel, partition, *both, share) for partition, both in ranges.items())
    return heapq.merge(*parts, key=lambda entry: entry.appended)


def _entries(channels: Channels, channel: str, partition: int, start: int, end: int, share: int) -> Iterator[Entry]:
    for first in range(start, end, share):
        found: list[Entry] = []
        failure = None
        # All of them at once: their reader is closed before the next one is opened.
        try:
            for batch in scan_batches(
                channels, channel, bounds={partition: (first, min(first + share, end))}, most=share
            ):
                found += batch
        except PenstockError as error:
            failure = error
        yield from found
        if failure is not None:
            raise failure
