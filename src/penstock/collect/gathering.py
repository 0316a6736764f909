"""Many senders at one door: what they bring goes on together, and each hears what became of its own.

A source that listens is made of two halves. Whoever serves a sender puts what it brought here, and answers it once
that is safe; the pump takes what has gathered.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from penstock.core.contracts import Arrival, Intake
from penstock.core.errors import Unavailable

MOST_BYTES = 16 << 20
"""So much may wait to be taken, beside what is on its way already."""
TOGETHER = 2_000
TOGETHER_BYTES = 1 << 20
"""An intake is closed by whichever of the two it reaches first."""
OVERHEAD = 200
"""About what an arrival takes in memory beside its payload."""
LAND_WITHIN = 3.0


@dataclass(eq=False, slots=True)
class _Brought:
    arrivals: Sequence[Arrival]
    size: int
    safe: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gathering:
    """Bounded: when more waits than `most_bytes`, `put` waits, and so does its sender."""

    def __init__(self, name: str, most_bytes: int = MOST_BYTES) -> None:
        self._name, self._most = name, most_bytes
        self._waiting: deque[_Brought] = deque()
        self._bytes = 0
        self._under_way: set[_Brought] = set()
        self._came, self._room = asyncio.Event(), asyncio.Condition()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether `put` would wait: a door that can say so turns its senders away instead."""
        return self._bytes >= self._most

    async def put(self, arrivals: Sequence[Arrival]) -> "asyncio.Future[None]":
        """Wait for room; then, in the order of these calls, they are on their way.

        The future is done once all of them are safe; it holds an Unavailable when they may not be.
        """
        brought = _Brought(arrivals, sum(len(one.value) + OVERHEAD for one in arrivals))
        if self.full:
            async with self._room:
                await self._room.wait_for(lambda: not self.full or self._closed)
        if self._closed:
            raise self._away()
        self._waiting.append(brought)
        self._bytes += brought.size
        self._came.set()
        # Who no longer waits for it need not be told.
        brought.safe.add_done_callback(lambda safe: safe.cancelled() or safe.exception())
        return brought.safe

    async def take(self, arrivals: Sequence[Arrival]) -> None:
        """Return once all of them are safe; Unavailable when they may not be."""
        await (await self.put(arrivals))

    async def intakes(self) -> AsyncGenerator[Intake, None]:
        """What has gathered, for ever."""
        while True:
            await self._came.wait()
            some, count, size = [], 0, 0
            # Nothing is awaited while some are in hand: who is cancelled then would hold what nobody is told of.
            async with self._room:
                while self._waiting and count < TOGETHER and size < TOGETHER_BYTES:
                    some.append(self._waiting.popleft())
                    count, size = count + len(some[-1].arrivals), size + some[-1].size
                if not self._waiting:
                    self._came.clear()
                self._bytes -= size
                self._room.notify_all()
            if some:
                yield self._intake(some)

    def _intake(self, some: Sequence[_Brought]) -> Intake:
        self._under_way.update(some)

        async def settle(error: Exception | None) -> None:
            for brought in some:
                self._under_way.discard(brought)
                if brought.safe.done():
                    continue
                if error is None:
                    brought.safe.set_result(None)
                else:
                    brought.safe.set_exception(self._away(error))

        return Intake([arrival for brought in some for arrival in brought.arrivals], settle)

    async def close(self) -> None:
        """Take nothing more. What is on its way may still arrive, for a while; all others are told that it does not."""
        self._closed = True
        async with self._room:
            self._room.notify_all()
        waiting, self._waiting = self._waiting, deque()
        for brought in waiting:
            if not brought.safe.done():
                brought.safe.set_exception(self._away())
        if self._under_way:
            await asyncio.wait([brought.safe for brought in self._under_way], timeout=LAND_WITHIN)
            for brought in self._under_way:
                if not brought.safe.done():
                    brought.safe.set_exception(self._away())

    def _away(self, error: Exception | None = None) -> Unavailable:
        return Unavailable(f"the source {self._name}", str(error) if error else "it is being closed")
