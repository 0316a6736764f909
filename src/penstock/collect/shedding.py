"""Load shedding: what is dropped on purpose when there is too much, where a pipeline declares it. Each one is counted.

How full things are is one number, the level: 1 when there is room, 0 when there is none. Above one half all records
pass. Below it fewer and fewer do, so that what passes settles at what there is room for.
"""

import asyncio
import random
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.collect.dedup import key_of
from penstock.collect.ingest import ARRIVAL_OVERHEAD
from penstock.collect.registry import SourceWrapper
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Intake, ResumeState, Source
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Heartbeat, OutageInterval

MOST_BYTES = 64 << 20
"""So much may wait here; beyond it the source has to, and nothing is dropped for that."""
_HALF = 0.5


class By(StrEnum):
    """Which records are dropped first."""

    RANDOM = "random"
    PRIORITY = "priority"
    """Those of the least important class, by the value of a field."""
    KEY = "key"
    """All of some keys, by the hash of a field: what remains is whole for the keys that remain."""
    OLDEST = "oldest"
    """Those that have waited for longest: what passes is fresh."""


@dataclass(frozen=True)
class Shed:
    """When to drop, and what: above `rate` records per second, or when more than `lag` are behind.

    `lag` counts what has come and is not safe yet, or what the slowest query has not read, whichever is more.
    `field`: the path into the JSON, for "priority" and "key". `order`: its values, the most important first; what has
    another value comes last.
    """

    by: str = By.RANDOM
    rate: float | None = None
    lag: int | None = None
    field: str | None = None
    order: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        place = "shed="
        if self.by not in list(By):
            raise Misconfigured(place, f'by is "{self.by}"', f"the choices are {', '.join(By)}")
        if self.rate is None and self.lag is None:
            raise Misconfigured(place, "it does not say when", "say it: rate=, in records per second, or lag=")
        if (self.rate is not None and self.rate <= 0) or (self.lag is not None and self.lag < 1):
            raise Misconfigured(place, "nothing would pass", "give more than 0")
        if self.by in (By.PRIORITY, By.KEY) and self.field is None:
            raise Misconfigured(place, f'by "{self.by}" needs a field', 'name it: field="level"')
        if self.by == By.PRIORITY and not self.order:
            raise Misconfigured(place, "nothing tells what is important", 'say it: order=("error", "warning")')
        if self.by == By.OLDEST and self.lag is None:
            raise Misconfigured(place, "the oldest are those that wait, and nothing says how many may", "say it: lag=")


class Deciding:
    """Which of the records that come are dropped. No I/O."""

    def __init__(self, shed: Shed, clock: Clock) -> None:
        self._shed, self._clock = shed, clock
        self._draw = random.Random(shed.seed)
        self._tokens = shed.rate or 0.0
        self._at = clock.elapsed()
        self._classes = {value: n for n, value in enumerate(shed.order)}

    def decide(
        self, arrivals: Sequence[Arrival | Heartbeat | OutageInterval], lag: int
    ) -> list[Arrival | Heartbeat | OutageInterval]:
        """The same, in the same order; those that are dropped are marked, and have lost their payload."""
        return [
            self._decided(one, lag) if isinstance(one, Arrival) and one.refused is None else one for one in arrivals
        ]

    def _decided(self, arrival: Arrival, lag: int) -> Arrival:
        level = self._level(lag)
        if self._shed.by != By.OLDEST and not self._passes(arrival, level):
            return dropped(arrival)
        if self._shed.rate is not None:
            self._tokens -= 1
        return arrival

    def _level(self, lag: int) -> float:
        level = 1.0
        if (rate := self._shed.rate) is not None:
            now = self._clock.elapsed()
            # No more than a second's worth is saved up.
            self._tokens = min(rate, self._tokens + (now - self._at) * rate)
            self._at = now
            level = self._tokens / rate if self._tokens >= 1 else 0.0
        if (most := self._shed.lag) is not None:
            level = min(level, 1 - lag / (2 * most))
        return level

    def _passes(self, arrival: Arrival, level: float) -> bool:
        if level >= _HALF:
            return True
        if level <= 0:
            return False
        share = level / _HALF
        match self._shed.by:
            case By.PRIORITY:
                found = self._classes.get(_text(arrival, self._shed.field), len(self._classes))
                # The most important pass as long as there is any room.
                return share > found / (len(self._classes) + 1)
            case By.KEY:
                key = key_of(arrival.value, self._shed.field) or b""
                return zlib.crc32(key) / 2**32 < share
        return self._draw.random() < share


def dropped(arrival: Arrival) -> Arrival:
    return replace(arrival, value=b"", shed=True)


def _text(arrival: Arrival, field: str | None) -> str:
    return (key_of(arrival.value, field) or b"").decode(errors="replace")


def shedding(
    source: Source, shed: Shed, behind: Callable[[], int] = lambda: 0, clock: Clock | None = None
) -> "Shedding":
    """The source, of which records are dropped when there are too many. `behind` tells the lag of those who read."""
    return Shedding(source, shed, behind, clock or SystemClock())


@dataclass(eq=False)
class _Held:
    intake: Intake
    arrivals: list[Arrival | Heartbeat | OutageInterval]
    count: int
    size: int


@dataclass(frozen=True)
class Shedding(SourceWrapper):
    shed: Shed
    behind: Callable[[], int]
    clock: Clock

    @property
    def description(self) -> str:
        return f"{self.source.description}; when there is too much, some are dropped and counted ({self.shed.by})"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with self.source.open(taken) as intakes:
            waiting = _Waiting(self)
            reading = asyncio.create_task(waiting.read(intakes))
            try:
                async with aclosing(waiting.intakes(reading)) as kept:
                    yield kept
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await reading
                await waiting.give_up(Unavailable(self.name, "it is being closed"))


class _Waiting:
    """What has come and was not handed on. The source is read ahead of the pump: otherwise nothing would ever wait."""

    def __init__(self, shedding: Shedding) -> None:
        self._shed, self._behind = shedding.shed, shedding.behind
        self._deciding = Deciding(shedding.shed, shedding.clock)
        self._held: deque[_Held] = deque()
        self._count = self._under_way = self._bytes = 0
        self._came, self._left = asyncio.Event(), asyncio.Event()

    async def read(self, intakes: AsyncIterator[Intake]) -> None:
        async for intake in intakes:
            lag = max(self._count + self._under_way, self._behind())
            arrivals = self._deciding.decide(intake.arrivals, lag)
            count, size = _measured(arrivals)
            self._held.append(_Held(intake, arrivals, count, size))
            self._count, self._bytes = self._count + count, self._bytes + size
            if self._shed.by == By.OLDEST:
                self._drop_oldest()
            self._came.set()
            while self._bytes >= MOST_BYTES and len(self._held) > 1:
                self._left.clear()
                await self._left.wait()

    def _drop_oldest(self) -> None:
        # What is under way is in the channel's hands already.
        excess = max(self._count + self._under_way, self._behind()) - (self._shed.lag or 0)
        for held in self._held:
            if excess <= 0:
                return
            for n, arrival in enumerate(held.arrivals):
                if excess > 0 and isinstance(arrival, Arrival) and not arrival.shed and arrival.refused is None:
                    self._bytes -= len(arrival.value)
                    held.size -= len(arrival.value)
                    held.arrivals[n] = dropped(arrival)
                    held.count, self._count, excess = held.count - 1, self._count - 1, excess - 1

    async def intakes(self, reading: "asyncio.Task[None]") -> AsyncGenerator[Intake, None]:
        reading.add_done_callback(lambda _: self._came.set())
        while self._held or not reading.done():
            if not self._held:
                self._came.clear()
                await self._came.wait()
                continue
            held = self._held.popleft()
            self._count, self._bytes = self._count - held.count, self._bytes - held.size
            self._under_way += held.count
            self._left.set()
            yield self._intake(held)
        await reading

    async def give_up(self, why: Exception) -> None:
        """Nobody takes what is held here: those who brought it need not wait for it."""
        while self._held:
            await self._held.popleft().intake.settle(why)

    def _intake(self, held: _Held) -> Intake:
        async def settle(error: Exception | None) -> None:
            self._under_way -= held.count
            await held.intake.settle(error)

        return Intake(held.arrivals, settle)


def _measured(arrivals: Sequence[Arrival | Heartbeat | OutageInterval]) -> tuple[int, int]:
    """How many pass, and how many bytes all of them take: one that is dropped is still to be counted, and waits."""
    size = sum(len(one.value) if isinstance(one, Arrival) else 0 for one in arrivals)
    kept = sum(isinstance(one, Arrival) and not one.shed for one in arrivals)
    return kept, size + (len(arrivals) + 1) * ARRIVAL_OVERHEAD
