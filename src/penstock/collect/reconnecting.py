"""Reconnecting: a source that was lost is opened again, after what is durable by then."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Unavailable
from penstock.core.record import OutageInterval

SHORTEST = 0.1
LONGEST = 5.0


def backoff() -> Iterator[float]:
    """Seconds to wait before each attempt. They double, with jitter so that many clients do not return together."""
    delay = SHORTEST
    while True:
        yield delay * random.uniform(0.5, 1)
        delay = min(2 * delay, LONGEST)


async def reconnecting(
    source: Source,
    resume: Callable[[], ResumeState],
    clock: Clock,
    last_received: Micros | None = None,
    watch: Callable[[Unavailable | None], None] = lambda error: None,
    delays: Callable[[], Iterator[float]] = backoff,
) -> AsyncGenerator[Intake, None]:
    """The intakes of the source, over all its connections. It ends when the source is exhausted.

    `resume` gives the resume state for each connection. `last_received`: when the last record arrived in an earlier
    generation of the collector. `watch` is called with None at each connection, with the reason at each loss.

    A source that cannot resume yields an `OutageInterval` after each reconnect. So does one that promises to resume but
    sent records without a number or a cursor.
    """
    state = resume()
    # Whether the last connection gave records after which the source can resume.
    resumable = last_received is None or bool(state.numbers) or state.cursor is not None
    waits = delays()
    while True:
        try:
            async with source.open(resume()) as intakes:
                watch(None)
                now = clock.now()
                if last_received is not None and (source.guarantee is Guarantee.BEST_EFFORT or not resumable):
                    yield Intake([OutageInterval(source.name, last_received, now)], no_acknowledgement)
                last_received = now
                arrivals = resumable_arrivals = 0
                async for intake in intakes:
                    last_received = clock.now()
                    waits = delays()
                    for one in intake.arrivals:
                        if isinstance(one, Arrival):
                            arrivals += 1
                            resumable_arrivals += one.origin is not None or one.cursor is not None
                    resumable = resumable_arrivals > 0 or arrivals == 0
                    yield intake
            return
        except Unavailable as error:
            delay = max(next(waits), error.retry_after or 0.0)
            watch(Unavailable(error.service, error.reason, round(delay, 1)))
            if last_received is None:
                last_received = clock.now()
            await asyncio.sleep(delay)


async def no_acknowledgement(error: Exception | None) -> None:
    """The `settle` of an intake whose sender expects no acknowledgement."""
