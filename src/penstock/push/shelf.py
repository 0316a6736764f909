"""What a push proxy keeps for its device: a log on disk, and how far the device has acknowledged it."""

import asyncio
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
"""The group that has committed what the device has acknowledged."""
_SOME, _SOME_BYTES = 20, 1 << 20
_LETTERS = 1_000
"""So many dead letters stay, about."""


class Shelf:
    """Bounded: when more than `most` bytes lie on disk, the upstream waits until the device acknowledges some.

    Positions are offsets in the log. `sent` is up to where the device was sent something in this life of ours.
    """

    def __init__(self, disk: SqliteChannels, most: int) -> None:
        self.disk, self.most = disk, most
        self.generation = ""
        self.acknowledged = self.sent = self.end = 0
        self.bytes = 0
        self.connected = False
        self.left = time.monotonic()
        """When the device was last seen."""
        self.closing = False
        self.heard: set[asyncio.Event] = set()
        """Those are set when something has changed."""
        self._coming = 0
        self._freed, self._disk_alone = asyncio.Event(), asyncio.Lock()

    @property
    def waiting(self) -> int:
        """How many records the device has not acknowledged."""
        return self.end - self.acknowledged

    async def prepare(self) -> None:
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        self.disk.ensure(TOPICS)
        # Who comes back after the folder was made anew has positions of another log.
        self.generation = self.disk.topic_id(CHANNEL)[:8]
        first, self.end = self.disk.bounds(CHANNEL)[0]
        committed = 0
        if _DEVICE in self.disk.groups():
            committed = self.disk.group(_DEVICE).committed.get((CHANNEL, 0), 0)
        self.acknowledged = self.sent = min(max(first, committed), self.end)
        self._weigh()

    def _weigh(self) -> None:
        self.bytes = self.disk.size(CHANNEL)

    def position(self, token: str | None) -> int | None:
        """Behind the event with this id; None when it is none of ours."""
        generation, mark, offset = (token or "").partition("-")
        if (
            generation != self.generation
            or not mark
            or not (offset.isascii() and offset.isdecimal())
            or len(offset) > 18
        ):
            return None
        return int(offset) + 1 if int(offset) < self.end else None

    def token(self, offset: int) -> str:
        return f"{self.generation}-{offset}"

    async def acknowledge(self, position: int) -> None:
        """The device has all that lies before. It need not stay."""
        if position > self.acknowledged:
            self.acknowledged = position
            self.sent = max(self.sent, position)
            async with self._disk_alone:
                await asyncio.to_thread(self._forget, position)
            self._freed.set()
            self.tell()

    def _forget(self, position: int) -> None:
        self.disk.move(_DEVICE, {CHANNEL: {0: position}})
        self.disk.forget(CHANNEL, {0: position})
        self._weigh()

    def expect(self, size: int) -> None:
        """So much is on its way."""
        self._coming += size

    async def arrived(self, size: int) -> None:
        """So much is safe, of what was on its way."""
        async with self._disk_alone:
            await asyncio.to_thread(self._look)
        self._coming -= size
        self._freed.set()
        self.tell()

    def _look(self) -> None:
        _, self.end = self.disk.bounds(CHANNEL)[0]
        _, letters = self.disk.bounds(DEAD)[0]
        if letters > _LETTERS:
            self.disk.forget(DEAD, {0: letters - _LETTERS})
        self._weigh()

    async def room(self) -> None:
        while self.bytes + self._coming >= self.most:
            self._freed.clear()
            await self._freed.wait()

    async def since(self, position: int) -> Sequence[Entry]:
        """Some of what lies there from a position on; it begins later where that is no longer kept."""
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

    def tell(self) -> None:
        for event in self.heard:
            event.set()


@dataclass(frozen=True)
class Shelved(SourceWrapper):
    """A source that waits while a shelf is full, and tells it when something is safe there."""

    shelf: Shelf

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self.shelf.room()
        async with self.source.open(taken) as intakes, aclosing(self._intakes(intakes)) as noted:
            yield noted

    async def _intakes(self, intakes: AsyncIterator[Intake]) -> AsyncGenerator[Intake, None]:
        async for intake in intakes:
            yield self._noting(intake)
            await self.shelf.room()

    def _noting(self, intake: Intake) -> Intake:
        size = sum(len(arrival.value) for arrival in intake.arrivals if isinstance(arrival, Arrival))
        self.shelf.expect(size)

        async def settle(error: Exception | None) -> None:
            await intake.settle(error)
            await self.shelf.arrived(size)

        return Intake(intake.arrivals, settle)
