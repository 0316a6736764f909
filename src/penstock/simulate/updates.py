"""Numbered updates and a random walk, as records at a pace and as documents. No I/O.

An update is `{"seq": 1, "sender": "sender-01", "time": 1700000000000000}`; its headers tell the same, and the epoch of
its producer. Each sender counts 1, 2, 3, …

There are two random walks: one that goes on from where it is, and one of which any position is found by its number.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import orjson

from penstock.core.clock import Clock, Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.simulate.documents import drawn

Sleep = Callable[[float], Awaitable[object]]
Behind = Callable[[int], None]
"""Told how many ticks were given up, each time that some were."""

BURST = 100
"""So many ticks at most are made up for at once, by who has fallen behind."""
_AT_ONCE = 1e-6  # No clock is finer: what is due as soon as this is due now.
_MOST = 100_000

STEEPEST = 0.75
"""No step is longer, up or down."""
_SPREAD = 0.25

_LEVELS = 32
# By how much a tent of each level, from two steps wide to 2³², raises or lowers a step. All together they stay below
# the steepest. Above the third they fall as those of a true random walk do; the narrow ones are lower, so that a
# direction is near the last one.
_SLOPES = (0.07, 0.1, 0.12, *(0.5 * 2 ** (-level / 2) for level in range(4, _LEVELS + 1)))


async def ticks(
    every: timedelta, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep, burst: int = BURST
) -> AsyncIterator[int]:
    """0, 1, 2, … without end, each when it is due; the first at once.

    Who takes them too slowly gets those that are overdue one right after the other, but `burst` of them at most: the
    rest is given up, `behind` is told how many that were, and the schedule goes on from there. No number is left out.
    """
    interval = every.total_seconds()
    if interval <= 0:
        raise Misconfigured("the pace", f"a tick every {interval:g} s has no end", "give more than 0 ms")
    start, number, given_up = clock.elapsed(), 0, 0
    while True:
        wait = start + (number + given_up) * interval - clock.elapsed()
        if wait > _AT_ONCE:
            await sleep(wait)
            continue  # A sleep may be short; the clock decides.
        if (overdue := int(-wait / interval)) > burst:
            given_up += overdue - burst
            if behind is not None:
                behind(overdue - burst)
        yield number
        number += 1


@dataclass(frozen=True)
class Updates:
    """Every so often, each sender sends `count` updates; `limit` of them in all, or on and on.

    A single sender is called `name`; of several, each adds its number to it.
    """

    every: timedelta = timedelta(milliseconds=100)
    count: int = 10
    senders: int = 1
    limit: int | None = None
    name: str = "sender"

    def __post_init__(self) -> None:
        for what, number in (("count", self.count), ("number of senders", self.senders)):
            if number < 1:
                raise Misconfigured("updates", f"the {what} is {number}", "give 1 or more")
        if self.count * self.senders > _MOST:
            problem = f"{self.senders:,} senders and {self.count:,} updates of each make too many for a tick"
            raise Misconfigured("updates", problem, f"give {_MOST:,} together at most, and tick more often")
        if self.limit is not None and self.limit < 0:
            raise Misconfigured("updates", f"the limit is {self.limit}", "give 0 or more")
        if self.every <= timedelta(0):
            raise Misconfigured("updates", f"a tick every {self.every.total_seconds():g} s", "give more than 0 ms")

    @property
    def names(self) -> tuple[str, ...]:
        if self.senders == 1:
            return (self.name,)
        width = max(2, len(str(self.senders)))
        return tuple(f"{self.name}-{number:0{width}}" for number in range(1, self.senders + 1))


def new_epoch(clock: Clock) -> int:
    """A number for the life of a producer that begins now, in microseconds.

    It is written nowhere, so that a producer needs no disk: two lives of a sender have the same only if they begin in
    the same microsecond.
    """
    return clock.now()


async def updates(
    wanted: Updates, epoch: int, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[list[Record]]:
    """A batch at each tick: the next updates of every sender, numbered from 1 within this `epoch`, keyed by sender.

    Asked for too slowly, it makes up for what is overdue as `ticks` does, and tells `behind` how many ticks it
    gave up; their updates are not lost, they were never made.
    """
    if wanted.limit == 0:
        return
    async for tick in ticks(wanted.every, clock, behind, sleep):
        first = tick * wanted.count + 1
        last = first + wanted.count - 1
        if wanted.limit is not None:
            last = min(last, wanted.limit)
        time = clock.now()
        yield [_update(name, epoch, seq, time) for name in wanted.names for seq in range(first, last + 1)]
        if last == wanted.limit:
            return


def _update(sender: str, epoch: int, seq: int, time: Micros) -> Record:
    payload = orjson.dumps({"seq": seq, "sender": sender, "time": time})
    return Record(payload, Origin(sender, epoch, seq, time), sender.encode())


class Counters:
    """The updates of all senders, as documents, each with a value below 1,000 that the seed makes."""

    def __init__(self, seed: int) -> None:
        self._seed = drawn(seed, 8)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """The update `number` of `sender`, at `time`."""
        value = drawn(self._seed, sender, number) % 1_000
        return orjson.dumps({"seq": number, "sender": f"sender-{sender:02d}", "time": time, "value": value})


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
