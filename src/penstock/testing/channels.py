"""A binder that lives in memory: the shape of a real one, for tests of whatever stands on a channel."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from zlib import crc32

from penstock.clock import Clock, SystemClock
from penstock.contracts import Entry, Positions
from penstock.record import Headers, Record


class MemoryChannels:
    """Channels with a fixed number of partitions, kept in lists."""

    def __init__(self, partitions: int = 1, clock: Clock | None = None) -> None:
        self._partitions = partitions
        self._clock = clock or SystemClock()
        self._logs: dict[str, list[list[Entry]]] = defaultdict(lambda: [[] for _ in range(partitions)])
        self._changed = threading.Condition()

    def append(self, channel: str, value: bytes | None, key: bytes | None = None, headers: Headers = ()) -> Entry:
        partition = crc32(key or b"") % self._partitions
        with self._changed:
            log = self._logs[channel][partition]
            entry = Entry(channel, partition, len(log), self._clock.now(), key, value, tuple(headers))
            log.append(entry)
            self._changed.notify_all()
        return entry

    def entries(self, channel: str) -> list[Entry]:
        """All that a channel holds, partition by partition."""
        with self._changed:
            return [entry for log in self._logs[channel] for entry in log]

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["_Sender"]:
        yield _Sender(self)

    @contextmanager
    def reader(self, start: Mapping[str, Positions], linger: float = 0.0) -> Iterator["_Reader"]:
        yield _Reader(self, start)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with self._changed:
            return {partition: (0, len(log)) for partition, log in enumerate(self._logs[channel])}


class _Sender:
    def __init__(self, channels: MemoryChannels) -> None:
        self._channels = channels

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        for record in records:
            self._channels.append(channel, record.value, record.key, record.headers())


class _Reader:
    def __init__(self, channels: MemoryChannels, start: Mapping[str, Positions]) -> None:
        self._channels = channels
        self._next = {
            channel: {partition: positions.get(partition, 0) for partition in range(channels._partitions)}
            for channel, positions in start.items()
        }

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        with self._channels._changed:
            while not (found := self._take(most)) and (left := until - time.monotonic()) > 0:
                self._channels._changed.wait(left)
        return found

    def _take(self, most: int) -> list[Entry]:
        found: list[Entry] = []
        for channel, positions in self._next.items():
            for partition, offset in positions.items():
                some = self._channels._logs[channel][partition][offset : offset + most - len(found)]
                positions[partition] += len(some)
                found += some
        return found

    def positions(self, channel: str) -> Positions:
        return dict(self._next[channel])

    def age(self) -> float:
        left = any(
            offset < len(self._channels._logs[channel][partition])
            for channel, positions in self._next.items()
            for partition, offset in positions.items()
        )
        return math.inf if left else 0.0
