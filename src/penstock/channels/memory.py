"""Channels in the memory of one process, for tests."""

import threading
import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar
from zlib import crc32

from penstock.channels.common import beyond, differences, overtaken
from penstock.channels.leases import LEASE, GroupState, LeasedGroups
from penstock.channels.log_reader import LogReader
from penstock.core.clock import Clock, Micros, SystemClock, micros
from penstock.core.contracts import ChannelPartition, EnsureResult, Entry, Offsets, Promise, Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Headers, Record
from penstock.core.scan import Bounds

Answer = TypeVar("Answer")

_COMPACTED_AFTER = timedelta(hours=1)
"""A replaced record stays for this long."""


def at(address: str, _: object = None) -> "MemoryChannels":
    """`memory://NAME`: the same channels for the same name, within one process."""
    return _CONFIG.setdefault(address, MemoryChannels(None, name=address.partition("://")[2]))


_CONFIG: dict[str, "MemoryChannels"] = {}


class MemoryChannels(LeasedGroups):
    """Channels in lists.

    `partitions`: of channels that were not declared; None: these do not exist. `lease`: after how long a silent member
    of a group loses its partitions.
    """

    promise = Promise(durable=False, replay=True, description="records are lost when the process ends")

    def __init__(
        self, partitions: int | None = 1, clock: Clock | None = None, lease: timedelta = LEASE, name: str = ""
    ) -> None:
        self._partitions, self.lease, self.where = partitions, lease, f"memory://{name}"
        self._clock = clock or SystemClock()
        self._channels: dict[str, _Channel] = {}
        self._groups: dict[str, GroupState] = {}
        self._changed = threading.Condition()

    def append(self, channel: str, value: bytes | None, key: bytes | None = None, headers: Headers = ()) -> Entry:
        with self._changed:
            found, now = self.channel_of(channel), self._clock.now()
            partition = crc32(key or b"") % len(found.logs)
            log = found.logs[partition]
            entry = Entry(channel, partition, log.end, now, key, value, tuple(headers))
            log.append(entry)
            log.tidy(found.topic, now)
            self._changed.notify_all()
        return entry

    def entries(self, channel: str) -> list[Entry]:
        """All entries of a channel, partition by partition."""
        with self._changed:
            return [entry for log in self.channel_of(channel).logs for entry in log.entries]

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        made, extended = list[str](), list[str]()
        different: list[str] = []
        with self._changed:
            for topic in topics:
                if topic.name not in self._channels:
                    self._channels[topic.name] = _Channel(topic)
                    made.append(topic.name)
                found = self._channels[topic.name]
                if found.extend(topic.partitions):
                    extended.append(topic.name)
                different += differences(found.topic, topic, "memory://")
            self._changed.notify_all()
        return EnsureResult(tuple(made), tuple(extended), tuple(different))

    def names(self) -> list[str]:
        with self._changed:
            return sorted(self._channels)

    def topic(self, channel: str) -> Topic:
        with self._changed:
            return self.channel_of(channel).topic

    def topic_id(self, channel: str) -> str:
        with self._changed:
            return self.channel_of(channel).id

    def remove(self, channel: str) -> None:
        with self._changed:
            self.channel_of(channel)
            del self._channels[channel]
            for state in self._groups.values():
                state.forget(channel)

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["_Sender"]:
        yield _Sender(self)

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator[LogReader]:
        yield LogReader(_MemoryLog(self, self._changed), start, only)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with self._changed:
            return {partition: (log.first, log.end) for partition, log in enumerate(self.channel_of(channel).logs)}

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        with self._changed:
            return {
                partition: next((entry.offset for entry in log.entries if entry.appended >= timestamp), log.end)
                for partition, log in enumerate(self.channel_of(channel).logs)
            }

    def elapsed(self) -> float:
        return self._clock.elapsed()

    def group_states(self) -> tuple[Mapping[str, GroupState], Micros]:
        with self._changed:
            return deepcopy(self._groups), self._clock.now()

    def change(self, group: str, change: Callable[[GroupState, Micros], Answer]) -> Answer:
        with self._changed:
            return change(self._groups.setdefault(group, GroupState()), self._clock.now())

    def channel_of(self, channel: str) -> "_Channel":
        if channel not in self._channels:
            if self._partitions is None:
                raise Unavailable(f"channel {channel}", f"there is no such channel in {self.where}")
            self._channels[channel] = _Channel(Topic(channel, self._partitions))
        return self._channels[channel]


class _Channel:
    def __init__(self, topic: Topic) -> None:
        self.topic = replace(topic, replicas=1, config={})
        self.id = uuid.uuid4().hex
        self.logs = [_Log() for _ in range(topic.partitions)]

    def extend(self, partitions: int) -> bool:
        more = partitions - len(self.logs)
        self.logs += [_Log() for _ in range(more)]
        self.topic = replace(self.topic, partitions=len(self.logs))
        return more > 0


@dataclass
class _Log:
    first: int = 0
    end: int = 0
    entries: list[Entry] = field(default_factory=list)

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.end = entry.offset + 1

    def tidy(self, topic: Topic, now: Micros) -> None:
        """Apply retention and compaction."""
        if topic.retention is not None:
            oldest = now - micros(topic.retention)
            stay = next((turn for turn, entry in enumerate(self.entries) if entry.appended > oldest), len(self.entries))
            if stay:
                del self.entries[:stay]
                self.first = self.entries[0].offset if self.entries else self.end
        if topic.compacted and self.entries and self.entries[0].appended <= now - micros(_COMPACTED_AFTER):
            last = {entry.key: entry.offset for entry in self.entries}
            young = now - micros(_COMPACTED_AFTER)
            self.entries = [
                entry for entry in self.entries if entry.appended > young or last[entry.key] == entry.offset
            ]

    def after(self, offset: int, most: int) -> list[Entry]:
        """Up to `most` entries from an offset on."""
        begin = bisect_left(self.entries, offset, key=lambda entry: entry.offset)
        return self.entries[begin : begin + most]


class _Sender:
    def __init__(self, channels: MemoryChannels) -> None:
        self._channels = channels

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        for record in records:
            self._channels.append(channel, record.value, record.key, record.headers())


class _MemoryLog:
    def __init__(self, channels: MemoryChannels, changed: threading.Condition) -> None:
        self._channels, self._changed = channels, changed

    def state(self, channel: str) -> tuple[str, Bounds]:
        with self._changed:
            return self._channels.topic_id(channel), self._channels.bounds(channel)

    def read(self, channel: str, partition: int, offset: int | None, most: int) -> tuple[str, Sequence[Entry], int]:
        with self._changed:
            found = self._channels.channel_of(channel)
            log = found.logs[partition] if partition < len(found.logs) else _Log()
            offset = log.first if offset is None else offset
            if offset < log.first:
                raise overtaken(channel, partition, offset, log.first)
            if offset > log.end:
                raise beyond(channel, partition, offset, log.end)
            entries = log.after(offset, most)
            return found.id, entries, entries[-1].offset + 1 if len(entries) == most else log.end

    def wait(self, positions: Mapping[ChannelPartition, int], seconds: float) -> None:
        def more() -> bool:
            return any(
                self._channels.bounds(channel).get(partition, (0, 0))[1] != offset
                for (channel, partition), offset in positions.items()
            )

        with self._changed:
            self._changed.wait_for(more, min(seconds, 0.1))  # Partitions can be added.
