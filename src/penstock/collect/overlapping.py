"""Several connections to a feed that gives nothing again: where one breaks, the others have heard what it missed."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.collect.dedup import key_of
from penstock.collect.reconnecting import backoff
from penstock.collect.registry import SourceWrapper
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import OutageInterval

MOST_CONNECTIONS = 10
WAITING = 2
"""So many intakes of each connection may wait to be taken; then it waits, and the feed with it."""


def overlapping(source: Source, by: str | Sequence[str] | None = None, connections: int = 2) -> "Overlapping":
    """The source, heard over so many connections at once, each record handed on once.

    `by` tells records apart: a path into their JSON ("trade_id"), or several. Where there is none, or nothing lies
    there, the whole payload does: then a payload that the feed really sends twice is taken once, as long as it is
    remembered. Whether that is right, only who knows the feed can say.
    """
    return Overlapping(source, by, connections)


@dataclass(frozen=True)
class Overlapping(SourceWrapper):
    """A wrapper; it has the shape of a source. The last `remember` records are known when they come once more."""

    by: str | Sequence[str] | None = None
    connections: int = 2
    remember: int = 100_000
    clock: Clock = field(default_factory=SystemClock)
    delays: Callable[[], Iterator[float]] = backoff

    def __post_init__(self) -> None:
        place = f"source {self.name}, overlap"
        if self.source.guarantee is not Guarantee.BEST_EFFORT:
            raise Misconfigured(place, "the source can resume", "it needs no second connection: leave overlap away")
        if not 2 <= self.connections <= MOST_CONNECTIONS:
            raise Misconfigured(place, f"it is {self.connections}", f"say 2 to {MOST_CONNECTIONS} connections")
        if self.remember < 1:
            raise Misconfigured(place, "nothing is remembered", "then each record would be taken from each connection")

    @property
    def description(self) -> str:
        same = "records that tell the same" if self.by else "payloads that are the same"
        return f"{self.connections} connections hear it at once; what none of them heard is unknown; {same} are one"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        """Once one connection is made. Unavailable when none can be made, and again once all are lost."""
        news: asyncio.Queue[_News] = asyncio.Queue(WAITING * self.connections)
        holding = [asyncio.create_task(self._hold(line, taken, news)) for line in range(self.connections)]
        try:
            lines = Lines(self.name)
            failed: set[int] = set()
            while not lines.up:
                one = await news.get()
                if isinstance(one, Up):
                    lines.add(one)
                elif isinstance(one, Down):
                    failed.add(one.line)
                    if one.why is not None and len(failed) == self.connections:
                        raise one.why
                elif isinstance(one, Exception):
                    raise one
            async with aclosing(self._intakes(news, lines)) as intakes:
                yield intakes
        finally:
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
            while not news.empty():
                if isinstance(one := news.get_nowait(), Intake):
                    await one.settle(Unavailable(self.name, "it is being closed"))

    async def _hold(self, line: int, taken: ResumeState, news: "asyncio.Queue[_News]") -> None:
        """Keep one connection, and tell all that happens to it, in order."""
        delays = self.delays()
        while True:
            heard = self.clock.now()
            try:
                async with self.source.open(taken) as intakes:
                    heard = self.clock.now()
                    await news.put(Up(line, heard))
                    async for intake in intakes:
                        heard, delays = self.clock.now(), self.delays()
                        try:
                            await news.put(intake)
                        except asyncio.CancelledError:
                            await intake.settle(Unavailable(self.name, "it is being closed"))
                            raise
                await news.put(Down(line, heard, None))
                return
            except Unavailable as error:
                await news.put(Down(line, heard, error))
                await asyncio.sleep(next(delays))
            except Exception as error:  # noqa: BLE001 - it is raised where the records are taken
                await news.put(error)
                return

    async def _intakes(self, news: "asyncio.Queue[_News]", lines: "Lines") -> AsyncGenerator[Intake, None]:
        known = Known(self.by, self.remember)
        while True:
            one = await news.get()
            if isinstance(one, Intake):
                # One that brings only copies is handed on empty: so it is settled after those of which it has copies.
                yield Intake(
                    [some for some in one.arrivals if not isinstance(some, Arrival) or known.add(some)], one.settle
                )
            elif isinstance(one, Up):
                lines.add(one)
            elif isinstance(one, Down):
                if (blind := lines.remove(one)) is not None:
                    yield Intake([blind], _nothing)
                if not lines.up and (lines.ended or one.why is None):
                    return
                if not lines.up and one.why is not None:
                    raise one.why
            else:
                raise one


@dataclass(frozen=True)
class Up:
    line: int
    at: Micros


@dataclass(frozen=True)
class Down:
    line: int
    heard: Micros
    """The last moment at which this connection was known to live."""
    why: Unavailable | None
    """None: the feed has said that it is done."""


_News = Up | Down | Intake | Exception


class Lines:
    """Which connections there are, and whether they have left a gap. No I/O."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.up: dict[int, Micros] = {}
        """Since when each of them listens."""
        self.ended = False

    def add(self, up: Up) -> None:
        self.up[up.line] = up.at

    def remove(self, down: Down) -> OutageInterval | None:
        """A blind time, if none of the others listened when this one was last heard: it may have been half open."""
        self.ended = self.ended or down.why is None
        if self.up.pop(down.line, None) is None or not self.up or self.ended:
            return None
        back = min(self.up.values())
        return OutageInterval(self._name, down.heard, back) if back > down.heard else None


class Known:
    """The last records that were handed on, by 128 bits of each."""

    def __init__(self, by: str | Sequence[str] | None, most: int) -> None:
        self._by, self._most = by, most
        self._known: set[bytes] = set()
        self._order: deque[bytes] = deque()

    def add(self, arrival: Arrival) -> bool:
        """Whether it is new."""
        told = key_of(arrival.value, self._by)
        mark = blake2b(arrival.value if told is None else told, digest_size=16, person=b"" if told is None else b"by")
        if (digest := mark.digest()) in self._known:
            return False
        self._known.add(digest)
        self._order.append(digest)
        if len(self._order) > self._most:
            self._known.discard(self._order.popleft())
        return True


async def _nothing(error: Exception | None) -> None:
    """A blind time has nobody who waits for its acknowledgement."""
