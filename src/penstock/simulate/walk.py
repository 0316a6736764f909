"""A random walk: a number that wanders, step by step. No I/O."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta

from penstock.clock import Clock
from penstock.record import Origin, Record
from penstock.simulate.pace import Behind, Sleep, ticks

STEEPEST = 0.75
"""No step is longer, up or down."""
_SPREAD = 0.25


def positions(seed: int | None = None) -> Iterator[float]:
    """Where the walk is after each step, without end; the same for the same seed.

    The direction of a step is a normal draw around the last one, held within ±0.75.
    """
    draw = random.Random(seed)
    position = direction = 0.0
    while True:
        direction = max(-STEEPEST, min(STEEPEST, draw.gauss(direction, _SPREAD)))
        position += direction
        yield position


@dataclass(frozen=True)
class Walk:
    """A step every so often; `limit` steps in all, or on and on."""

    every: timedelta = timedelta(seconds=1)
    limit: int | None = None
    seed: int | None = None
    key: str = "walk"
    sender: str = "random-walk"


async def walk(
    wanted: Walk, epoch: int, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[list[Record]]:
    """A batch of one record at each step: the position with 4 decimals, numbered from 1 within this `epoch`."""
    if wanted.limit is not None and wanted.limit < 1:
        return
    path = positions(wanted.seed)
    async for tick in ticks(wanted.every, clock, behind, sleep):
        origin = Origin(wanted.sender, epoch, tick + 1, clock.now())
        yield [Record(_written(next(path)), origin, wanted.key.encode())]
        if tick + 1 == wanted.limit:
            return


def _written(position: float) -> bytes:
    # Zero has no sign, from whichever side it was rounded.
    return b"%.4f" % (round(position, 4) + 0.0)
