"""Load shedding: drops records on purpose under overload, where a pipeline declares it. Each one is counted.

The level is 1 without load and 0 at the limit. At one half and above, all records pass. Below, fewer and fewer do.
"""

import asyncio
import random
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.collect.dedup import key_of
from penstock.collect.ingest import ARRIVAL_OVERHEAD
from penstock.collect.registry import SourceWrapper
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Heartbeat, OutageInterval

MAX_BYTES = 64 << 20
"""The limit of the buffer. Above it the source waits; nothing is dropped for that."""
_HALF = 0.5


class By(StrEnum):
    """Which records are dropped first."""

    RANDOM = "random"
    PRIORITY = "priority"
    """The least important ones, by the value of a field."""
    KEY = "key"
    """All records of some keys, by the hash of a field: the other keys stay complete."""
    OLDEST = "oldest"
    """The oldest ones in the buffer."""


@dataclass(frozen=True)
class Shed:
    """When to drop, and what: above `rate` records per second, or when the lag is above `lag` records.

    The lag is the number of records that are received and not durable, or the lag of the slowest query, whichever is
    more. `field`: the path in the JSON, for "priority" and "key". `order`: its values, the most important first; other
    values come last.
    """

    by: str = By.RANDOM
    rate: float | None = None
    lag: int | None = None
    field: str | None = None
    order: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        location = "shed="
        if self.by not in list(By):
            raise Misconfigured(location, f'by is "{self.by}"', f"the choices are {', '.join(By)}")
        if self.rate is None and self.lag is None:
            raise Misconfigured(location, "the limit is missing", "set rate=, in records per second, or lag=")
        if (self.rate is not None and self.rate <= 0) or (self.lag is not None and self.lag < 1):
            raise Misconfigured(location, "rate and lag must be more than 0", "set a larger value")
        if self.by in (By.PRIORITY, By.KEY) and self.field is None:
            raise Misconfigured(location, f'by "{self.by}" needs a field', 'set it: field="level"')
        if self.by == By.PRIORITY and not self.order:
            raise Misconfigured(location, "the order is missing", 'set it: order=("error", "warning")')
        if self.by == By.OLDEST and self.lag is None:
            raise Misconfigured(location, 'by "oldest" needs a lag', "set lag=")


class ShedPolicy:
    """Decides which records are dropped. No I/O."""

    def __init__(self, shed: Shed, clock: Clock) -> None:
        self._shed, self._clock = shed, clock
        self._draw = random.Random(shed.seed)
        self._tokens = shed.rate or 0.0
        self._at = clock.elapsed()
        self._classes = {value: n for n, value in enumerate(shed.order)}

    def decide(
        self, arrivals: Sequence[Arrival | Heartbeat | OutageInterval], lag: int
    ) -> list[Arrival | Heartbeat | OutageInterval]:
        """The same arrivals in the same order; dropped ones are marked and have no payload."""
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
            # Save up at most one second.
            self._tokens = min(rate, self._tokens + (now - self._at) * rate)
            self._at = now
            level = self._tokens / rate if self._tokens >= 1 else 0.0
        if (max_lag := self._shed.lag) is not None:
            level = min(level, 1 - lag / (2 * max_lag))
        return level

    def _passes(self, arrival: Arrival, level: float) -> bool:
        if level >= _HALF:
            return True
        if level <= 0:
            return False
        share = level / _HALF
        match self._shed.by:
            case By.PRIORITY:
                value = (key_of(arrival.value, self._shed.field) or b"").decode(errors="replace")
                found = self._classes.get(value, len(self._classes))
                # The most important ones pass above level 0.
                return share > found / (len(self._classes) + 1)
            case By.KEY:
                key = key_of(arrival.value, self._shed.field) or b""
                return zlib.crc32(key) / 2**32 < share
        return self._draw.random() < share


def dropped(arrival: Arrival) -> Arrival:
    return replace(arrival, value=b"", shed=True)


@dataclass(eq=False)
class _Buffered:
    intake: Intake
    arrivals: list[Arrival | Heartbeat | OutageInterval]
    count: int
    """Of arrivals that were not dropped."""
    size: int


@dataclass(frozen=True)
class Shedding(SourceWrapper):
    """The source with load shedding. `behind`: the lag of the slowest query."""

    shed: Shed
    behind: Callable[[], int] = lambda: 0
    clock: Clock = field(default_factory=SystemClock)

    @property
    def description(self) -> str:
        return f"{self.source.description}; under overload, some records are dropped and counted ({self.shed.by})"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with self.source.open(resume) as intakes:
            waiting = _Buffer(self)
            reading = asyncio.create_task(waiting.read(intakes))
            try:
                async with aclosing(waiting.intakes(reading)) as kept:
                    yield kept
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await reading
                await waiting.give_up(Unavailable(self.name, "it is closing"))


class _Buffer:
    """The records that were received and not yielded yet. It reads the source ahead of the ingest loop.

    `_lag`: how many were received and are not durable.
    """

    def __init__(self, shedding: Shedding) -> None:
        self._shed, self._behind = shedding.shed, shedding.behind
        self._policy = ShedPolicy(shedding.shed, shedding.clock)
        self._buffer: deque[_Buffered] = deque()
        self._lag = self._bytes = 0
        self._filled, self._freed = asyncio.Event(), asyncio.Event()

    async def read(self, intakes: AsyncIterator[Intake]) -> None:
        async for intake in intakes:
            arrivals = self._policy.decide(intake.arrivals, max(self._lag, self._behind()))
            count, size = _measured(arrivals)
            self._buffer.append(_Buffered(intake, arrivals, count, size))
            self._lag += count
            self._bytes += size
            if self._shed.by == By.OLDEST:
                self._drop_oldest()
            self._filled.set()
            while self._bytes >= MAX_BYTES and len(self._buffer) > 1:
                self._freed.clear()
                await self._freed.wait()

    def _drop_oldest(self) -> None:
        # Records in flight cannot be dropped any more.
        excess = max(self._lag, self._behind()) - (self._shed.lag or 0)
        for buffered in self._buffer:
            if excess <= 0:
                return
            for n, arrival in enumerate(buffered.arrivals):
                if excess > 0 and isinstance(arrival, Arrival) and not arrival.shed and arrival.refused is None:
                    self._bytes -= len(arrival.value)
                    buffered.size -= len(arrival.value)
                    buffered.arrivals[n] = dropped(arrival)
                    buffered.count, self._lag, excess = buffered.count - 1, self._lag - 1, excess - 1

    async def intakes(self, reading: "asyncio.Task[None]") -> AsyncGenerator[Intake, None]:
        reading.add_done_callback(lambda _: self._filled.set())
        while self._buffer or not reading.done():
            if not self._buffer:
                self._filled.clear()
                await self._filled.wait()
                continue
            buffered = self._buffer.popleft()
            self._bytes -= buffered.size
            self._freed.set()
            yield self._intake(buffered)
        await reading

    async def give_up(self, why: Exception) -> None:
        """Settle what is in the buffer with an error."""
        while self._buffer:
            await self._buffer.popleft().intake.settle(why)

    def _intake(self, buffered: _Buffered) -> Intake:
        async def settle(error: Exception | None) -> None:
            self._lag -= buffered.count
            await buffered.intake.settle(error)

        return Intake(buffered.arrivals, settle)


def _measured(arrivals: Sequence[Arrival | Heartbeat | OutageInterval]) -> tuple[int, int]:
    """How many pass, and the bytes of all of them. A dropped one stays in the buffer until it is counted."""
    size = sum(len(one.value) if isinstance(one, Arrival) else 0 for one in arrivals)
    kept = sum(isinstance(one, Arrival) and not one.shed for one in arrivals)
    return kept, size + (len(arrivals) + 1) * ARRIVAL_OVERHEAD
