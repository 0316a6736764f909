"""A random walk: a number that wanders, step by step. No I/O.

There are two: one that goes on from where it is, and one of which any position is found by its number.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta

import orjson

from penstock.core.clock import Clock, Micros
from penstock.core.record import Origin, Record
from penstock.simulate.draws import drawn
from penstock.simulate.pace import Behind, Sleep, ticks

STEEPEST = 0.75
"""No step is longer, up or down."""
_SPREAD = 0.25

_LEVELS = 32
# By how much a tent of each level, from two steps wide to 2³², raises or lowers a step. All together they stay below
# the steepest. Above the third they fall as those of a true random walk do; the narrow ones are lower, so that a
# direction is near the last one.
_SLOPES = (0.07, 0.1, 0.12, *(0.5 * 2 ** (-level / 2) for level in range(4, _LEVELS + 1)))


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


class Walkers:
    """The walks of all senders, as documents.

    A walk is the sum of tents: at each level they stand side by side, twice as wide as on the level below, each upright
    or upside down by chance. So a position takes as long wherever it is, and nothing is kept. After 2³² steps it
    is back at 0, and goes elsewhere from there.
    """

    def __init__(self, seed: int) -> None:
        self._seed = drawn(seed, 7)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """Where `sender` is after the step `number`, at `time`."""
        position = round(self._position(sender, number), 4) + 0.0
        name = f"walker-{sender:02d}"
        return orjson.dumps({"walk": name, "step": number, "position": position, "at": time // 1_000})

    def _position(self, sender: int, number: int) -> float:
        position = 0.0
        key = drawn(self._seed, sender)
        for level, slope in enumerate(_SLOPES, 1):
            if level % 4 == 1:
                # One draw is enough for the tents of four levels that stand above each other: 1, 2, 4 and 8 of them.
                bits = drawn(key, level, number >> level + 3)
                top = level + 3
            # Their bits are numbered from the widest down, and from left to right.
            below = top - level
            tent = (1 << below) + (number >> level & (1 << below) - 1)
            within = number & (1 << level) - 1
            height = slope * min(within, (1 << level) - within)
            position += height if bits >> tent & 1 else -height
        return position
