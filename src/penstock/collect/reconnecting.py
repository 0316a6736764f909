"""A source that comes back: whatever wraps a source here has the shape of a source."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from penstock.collect.numbers import Numbers, in_runs
from penstock.collect.wrapping import Wrapping
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Unavailable
from penstock.core.record import OutageInterval

SHORTEST = 0.1
LONGEST = 5.0


def backoff() -> Iterator[float]:
    """Seconds to wait before each next attempt: doubling, with jitter so that many clients do not come back as one."""
    delay = SHORTEST
    while True:
        yield delay * random.uniform(0.5, 1)
        delay = min(2 * delay, LONGEST)


def reconnecting(
    source: Source,
    clock: Clock,
    heard: Micros | None = None,
    watch: Callable[[Unavailable | None], None] = lambda error: None,
    delays: Callable[[], Iterator[float]] = backoff,
) -> "Reconnecting":
    """The source, opened again whenever it is lost, and always after what was settled.

    A source that cannot resume is blind while it is away, and that is said: a `Blind` from when it was last heard until
    it is back. One that promises to resume, and then numbers nothing that it sends, cannot either. `heard` is when an
    earlier life of the collector heard it. `watch` is told None at each connection, and the reason at each loss.
    """
    return Reconnecting(source, clock, heard, watch, delays)


@dataclass(frozen=True)
class Reconnecting(Wrapping):
    clock: Clock
    heard: Micros | None
    watch: Callable[[Unavailable | None], None]
    delays: Callable[[], Iterator[float]]

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with aclosing(self._intakes(taken)) as intakes:
            yield intakes

    async def _intakes(self, taken: ResumeState) -> AsyncGenerator[Intake, None]:
        settled = _Settled(taken)
        heard = self.heard
        # Whether its last connection gave numbers after which it can be asked to go on.
        numbered = heard is None or bool(taken.numbers) or taken.cursor is not None
        delays = self.delays()
        while True:
            try:
                async with self.source.open(settled.taken()) as intakes:
                    self.watch(None)
                    now = self.clock.now()
                    if heard is not None and (self.guarantee is Guarantee.BEST_EFFORT or not numbered):
                        yield Intake([OutageInterval(self.name, heard, now)], _nothing)
                    heard = now
                    arrivals = origins = 0
                    async for intake in intakes:
                        heard = self.clock.now()
                        delays = self.delays()
                        some = [arrival for arrival in intake.arrivals if isinstance(arrival, Arrival)]
                        arrivals, origins = arrivals + len(some), origins + sum(map(_can_be_found, some))
                        numbered = origins > 0 or arrivals == 0
                        yield settled.noting(intake)
                return
            except Unavailable as error:
                # Who tells when to come back knows best.
                delay = max(next(delays), error.retry_after or 0.0)
                self.watch(Unavailable(error.service, error.reason, round(delay, 1)))
                if heard is None:
                    heard = self.clock.now()
                await asyncio.sleep(delay)


class _Settled:
    """What was safe when the source was opened, and what became safe since."""

    def __init__(self, taken: ResumeState) -> None:
        self._numbers = Numbers()
        for sender, (epoch, seq) in taken.numbers.items():
            self._numbers.add(sender, epoch, 0, seq)
        for sender, (epoch, seq) in taken.highest.items():
            self._numbers.add(sender, epoch, seq)
        self._cursor = taken.cursor

    def taken(self) -> ResumeState:
        return ResumeState(self._numbers.places(), self._cursor, self._numbers.highest())

    def noting(self, intake: Intake) -> Intake:
        async def settle(error: Exception | None) -> None:
            await intake.settle(error)
            if error is None:
                for run in in_runs(intake.arrivals):
                    self._numbers.add(*run)
                for arrival in reversed(intake.arrivals):
                    if isinstance(arrival, Arrival) and arrival.cursor is not None:
                        self._cursor = arrival.cursor
                        break

        return Intake(intake.arrivals, settle)


def _can_be_found(arrival: Arrival) -> bool:
    """Whether the source can be asked to go on after it."""
    return arrival.origin is not None or arrival.cursor is not None


async def _nothing(error: Exception | None) -> None:
    """A blind interval has nobody who waits for its acknowledgement."""
