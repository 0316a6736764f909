"""The events that a push proxy stores for its device, and the last one that the device has acknowledged."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.registry import SourceWrapper
from penstock.core.contracts import Arrival, Entry, Intake, ResumeState, Topic

CHANNEL = "events"
DEAD = "events.dead"
HEARTBEATS = "heartbeats"
BOOKMARKS = "bookmarks"
TOPICS = (
    Topic(CHANNEL),
    Topic(DEAD, retention=timedelta(days=7)),
    Topic(HEARTBEATS, retention=timedelta(days=1)),
    Topic(BOOKMARKS, compacted=True),
)
_DEVICE = "device"
"""The group whose committed offset the device has acknowledged."""
_SOME, _SOME_BYTES = 20, 1 << 20
_DEAD_LETTERS = 1_000
"""Dead letters that are kept, about."""


class DeviceQueue:
    """Bounded: when more than `most` bytes are on disk, the upstream waits until the device acknowledges some.

    Positions are offsets of the channel. `sent` is the position up to which this process has sent events.
    """

    def __init__(self, disk: SqliteChannels, most: int) -> None:
        self.disk, self.most = disk, most
        self.generation = ""
        self.acknowledged = self.sent = self.end = 0
        self.bytes = 0
        self.session: object | None = None
        """The connection of the device."""
        self.left = time.monotonic()
        """When the device disconnected."""
        self.closing = False
        self.changed = asyncio.Event()
        """Set, and replaced by a new one, when the state changes."""
        self.in_flight = 0
        """Bytes that are being stored."""
        self._disk_alone = asyncio.Lock()

    @property
    def connected(self) -> bool:
        return self.session is not None

    @property
    def waiting(self) -> int:
        """The number of unacknowledged events."""
        return self.end - self.acknowledged

    def prepare(self) -> None:
        self.disk.ensure(TOPICS)
        # After the folder was created again, a device has positions of another channel.
        self.generation = self.disk.topic_id(CHANNEL)[:8]
        first, self.end = self.disk.bounds(CHANNEL)[0]
        committed = 0
        if _DEVICE in self.disk.groups():
            committed = self.disk.group(_DEVICE).committed.get((CHANNEL, 0), 0)
        self.acknowledged = self.sent = min(max(first, committed), self.end)
        self._measure()

    def _measure(self) -> None:
        self.bytes = self.disk.size(CHANNEL)

    def position(self, token: str | None) -> int | None:
        """The position behind the event with this id; None if the id is of another channel."""
        match = re.fullmatch(r"(\w+)-(\d{1,18})", token or "", re.ASCII)
        if match is None or match[1] != self.generation or int(match[2]) >= self.end:
            return None
        return int(match[2]) + 1

    def token(self, offset: int) -> str:
        return f"{self.generation}-{offset}"

    async def acknowledge(self, position: int) -> None:
        """Delete the events before this position: the device has them."""
        if position > self.acknowledged:
            self.acknowledged = position
            self.sent = max(self.sent, position)
            async with self._disk_alone:
                await asyncio.to_thread(self._forget, position)
            self.notify()

    def _forget(self, position: int) -> None:
        self.disk.move(_DEVICE, {CHANNEL: {0: position}})
        self.disk.forget(CHANNEL, {0: position})
        self._measure()

    async def stored(self, size: int) -> None:
        """Count bytes that are stored now."""
        async with self._disk_alone:
            await asyncio.to_thread(self._look)
        self.in_flight -= size
        self.notify()

    def _look(self) -> None:
        _, self.end = self.disk.bounds(CHANNEL)[0]
        _, dead_letters = self.disk.bounds(DEAD)[0]
        if dead_letters > _DEAD_LETTERS:
            self.disk.forget(DEAD, {0: dead_letters - _DEAD_LETTERS})
        self._measure()

    async def wait_for_room(self) -> None:
        while self.bytes + self.in_flight >= self.most:
            await self.changed.wait()

    async def since(self, position: int) -> Sequence[Entry]:
        """Some events from a position on, or from the first one that is kept."""
        return await asyncio.to_thread(self._since, position)

    def _since(self, position: int) -> Sequence[Entry]:
        first, _ = self.disk.bounds(CHANNEL)[0]
        found: list[Entry] = []
        with self.disk.reader({CHANNEL: {0: max(first, position)}}) as reader:
            while sum(len(entry.value or b"") for entry in found) < _SOME_BYTES and (some := reader.read(_SOME, 0)):
                found += some
                if len(found) >= 10 * _SOME:
                    break
        return found

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(frozen=True)
class QueuedSource(SourceWrapper):
    """A source that waits while the queue is full."""

    queue: DeviceQueue

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self.queue.wait_for_room()
        async with self.source.open(resume) as intakes, aclosing(self._intakes(intakes)) as counted:
            yield counted

    async def _intakes(self, intakes: AsyncIterator[Intake]) -> AsyncGenerator[Intake, None]:
        async for intake in intakes:
            yield self._counting(intake)
            await self.queue.wait_for_room()

    def _counting(self, intake: Intake) -> Intake:
        size = sum(len(arrival.value) for arrival in intake.arrivals if isinstance(arrival, Arrival))
        self.queue.in_flight += size

        async def settle(error: Exception | None) -> None:
            await intake.settle(error)
            await self.queue.stored(size)

        return Intake(intake.arrivals, settle)
