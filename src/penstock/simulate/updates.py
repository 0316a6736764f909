"""Numbered updates without end: the load by which a way is verified. No I/O.

An update is `{"seq": 1, "sender": "sender-01", "time": 1700000000000000}`; its headers tell the same, and the epoch of
its producer. Each sender counts 1, 2, 3, …
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import orjson

from penstock.core.clock import Clock, Micros
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.simulate.draws import drawn
from penstock.simulate.pace import Behind, Sleep, ticks

_MOST = 100_000


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

    Asked for too slowly, it makes up for what is overdue as `pace.ticks` does, and tells `behind` how many ticks it
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
