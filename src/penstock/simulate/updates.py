"""Numbered updates and random walks, as timed records and as documents. No I/O.

An update is `{"seq": 1, "sender": "sender-01", "time": 1700000000000000}`; its headers have the same values, and the
epoch of its producer. Each sender counts 1, 2, 3, …

The position of a random walk is a function of its seed, the sender and the number of the step.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import orjson

from penstock.core.clock import Clock, Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.simulate.documents import drawn

Sleep = Callable[[float], Awaitable[object]]
Behind = Callable[[int], None]
"""Called with the number of skipped ticks."""

BURST = 100
"""The maximum of overdue ticks that are made up for."""
_AT_ONCE = 1e-6  # The resolution of the clock.
_MOST = 100_000

STEEPEST = 0.75
"""The longest step, up or down."""

_LEVELS = 32
# The slope of a tent of each level, from a width of two steps to 2³². Their sum is below STEEPEST. From the fourth
# level they fall as in a true random walk; the narrow ones are lower, so that the direction changes slowly.
_SLOPES = (0.07, 0.1, 0.12, *(0.5 * 2 ** (-level / 2) for level in range(4, _LEVELS + 1)))


async def ticks(
    every: timedelta, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep, burst: int = BURST
) -> AsyncIterator[int]:
    """Yield 0, 1, 2, … without end, each when it is due; the first immediately.

    A slow caller gets overdue ticks immediately, but at most `burst` of them. The schedule moves by the rest, and
    `behind` is called with their number. No number is left out.
    """
    interval = every.total_seconds()
    if interval <= 0:
        raise Misconfigured("the pace", f"the interval is {interval:g} s", "set more than 0 ms")
    start, number, skipped = clock.elapsed(), 0, 0
    while True:
        wait = start + (number + skipped) * interval - clock.elapsed()
        if wait > _AT_ONCE:
            await sleep(wait)
            continue  # A sleep may end early.
        if (overdue := int(-wait / interval)) > burst:
            skipped += overdue - burst
            if behind is not None:
                behind(overdue - burst)
        yield number
        number += 1


@dataclass(frozen=True)
class Updates:
    """Each sender sends `count` updates every `every`, until it has sent `limit`.

    A single sender has the name `name`; several senders add their numbers.
    """

    every: timedelta = timedelta(milliseconds=100)
    count: int = 10
    senders: int = 1
    limit: int | None = None
    name: str = "sender"

    def __post_init__(self) -> None:
        for what, number in (("count", self.count), ("number of senders", self.senders)):
            if number < 1:
                raise Misconfigured("updates", f"the {what} is {number}", "set 1 or more")
        if self.count * self.senders > _MOST:
            problem = f"{self.senders:,} senders and {self.count:,} updates of each are too many for a tick"
            raise Misconfigured("updates", problem, f"send {_MOST:,} at most, in shorter intervals")
        if self.limit is not None and self.limit < 0:
            raise Misconfigured("updates", f"the limit is {self.limit}", "set 0 or more")
        if self.every <= timedelta(0):
            raise Misconfigured("updates", f"the interval is {self.every.total_seconds():g} s", "set more than 0 ms")

    @property
    def names(self) -> tuple[str, ...]:
        if self.senders == 1:
            return (self.name,)
        width = max(2, len(str(self.senders)))
        return tuple(f"{self.name}-{number:0{width}}" for number in range(1, self.senders + 1))


def new_epoch(clock: Clock) -> int:
    """The epoch of a producer that starts now: the time in microseconds, so that a producer needs no disk."""
    return clock.now()


async def updates(
    wanted: Updates, epoch: int, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[list[Record]]:
    """Yield a batch at each tick: the next updates of every sender, numbered from 1 in this epoch, keyed by sender.

    `behind`: as in `ticks`. Skipped ticks have no updates.
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
    """The updates of all senders as documents, each with a random value below 1,000."""

    def __init__(self, seed: int) -> None:
        self._seed = drawn(seed, 8)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """The update `number` of `sender`, at `time`."""
        value = drawn(self._seed, sender, number) % 1_000
        return orjson.dumps({"seq": number, "sender": f"sender-{sender:02d}", "time": time, "value": value})


async def walk(
    every: timedelta,
    limit: int | None,
    seed: int | None,
    key: str,
    epoch: int,
    clock: Clock,
    behind: Behind | None = None,
    sleep: Sleep = asyncio.sleep,
) -> AsyncIterator[list[Record]]:
    """Yield a batch of one record at each step: the position with 4 decimals, numbered from 1 in this epoch."""
    if limit == 0:
        return
    walkers = Walkers(random.getrandbits(32) if seed is None else seed)
    async for tick in ticks(every, clock, behind, sleep):
        position = b"%.4f" % walkers.position(0, tick + 1)
        yield [Record(position, Origin("random-walk", epoch, tick + 1, clock.now()), key.encode())]
        if tick + 1 == limit:
            return


class Walkers:
    """The walks of all senders as documents.

    A walk is the sum of triangle waves (tents). Each level has tents of twice the width of the level below, each with a
    random sign. So any position is computed in constant time, without state. After 2³² steps the walk is at 0 again.
    """

    def __init__(self, seed: int) -> None:
        self._seed = drawn(seed, 7)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """The position of `sender` after step `number`, at `time`."""
        position = self.position(sender, number)
        return orjson.dumps({"walk": f"walker-{sender:02d}", "step": number, "position": position, "at": time // 1_000})

    def position(self, sender: int, number: int) -> float:
        """The position with 4 decimals, without negative zero."""
        position = 0.0
        key = drawn(self._seed, sender)
        for level, slope in enumerate(_SLOPES, 1):
            if level % 4 == 1:
                # One draw has the bits of four levels: 1, 2, 4 and 8 tents.
                bits = drawn(key, level, number >> level + 3)
                top = level + 3
            # The bits are ordered from the widest level to the narrowest, and from left to right.
            below = top - level
            tent = (1 << below) + (number >> level & (1 << below) - 1)
            within = number & (1 << level) - 1
            height = slope * min(within, (1 << level) - within)
            position += height if bits >> tent & 1 else -height
        return round(position, 4) + 0.0
