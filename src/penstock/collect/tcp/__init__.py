"""Senders that connect by TCP: a record in each line, or behind its length, and each sender hears how far it is safe.

A sender begins with `{"sender": "NAME", "epoch": N, "seq": M}`. The epoch is a number that grows with each of its
lives; records are counted within a life, and `seq` is that of the first which it still has (1 if it is not said). It
is told `{"after": 41}` and sends what follows; now and then it is told `{"safe": 45}`, and may forget what came
before. All of this is framed as the records are.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import orjson

from penstock.collect.framing import FRAMES, Found, Framing, framing
from penstock.collect.ingest import BATCH_RECORDS, STOP_TIMEOUT, IngestQueue
from penstock.collect.listen import (
    MAX_NUMBER,
    SenderStates,
    duplicate_sender,
    endpoint,
    invalid_sender,
    last_number,
    listener_guarantee,
)
from penstock.collect.tcp.connection import LAST_WORDS, Connection
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import LARGEST_JUMP, Origin

log = logging.getLogger(__name__)

TURNS = 32
"""So many connections hold what they have read while it waits for room; all others leave it to the kernel."""
UNFINISHED = 64 << 20
"""So many bytes of records that have not ended are kept for all connections together."""
_HELLO = 4 << 10
_LEAVING = 100
"""So many beyond those that may be connected are told that there are too many."""


@dataclass(frozen=True)
class TcpSource:
    """Listens at `listen+tcp://host:port`. A record beyond `max_size` becomes a dead letter with its beginning.

    `frames`: "lines", or "length" for four bytes with the length, the highest first, before each record. `named`:
    whether senders have to say who they are. Without a name, what a sender gives again is taken again. Without
    `acknowledge` nothing is ever said to a sender, and its records need no name. `largest_jump`: a sender that goes on
    further than this behind its last number is refused; 0: it is not. `shared`: whether other processes may listen at
    the same address; then what a sender gave to them is not known here, and no jump is refused.
    """

    url: str
    name: str
    frames: str = "lines"
    acknowledge: bool = True
    named: bool = True
    max_size: int = 900_000
    connections: int = 10_000
    largest_jump: int = LARGEST_JUMP
    shared: bool = False
    hello_within: timedelta = timedelta(seconds=10)
    stalled_after: timedelta = timedelta(seconds=30)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        endpoint(self.url, self.name, path=False)
        if self.frames not in FRAMES:
            fix = f"it is one of {', '.join(FRAMES)}"
            raise Misconfigured(f"source {self.name}, frames", f'"{self.frames}" is not known', fix)
        for option in ("max_size", "connections"):
            if getattr(self, option) < 1:
                raise Misconfigured(f"source {self.name}, {option}", "it is less than one")
        # Who hears nothing has no use for a name.
        object.__setattr__(self, "named", self.named and self.acknowledge)

    @property
    def numbered(self) -> str | None:
        return "by its senders" if self.named else None

    @property
    def guarantee(self) -> Guarantee:
        return listener_guarantee(self.named, self.shared)[0] if self.acknowledge else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if not self.acknowledge:
            return "senders are told nothing: what had left them and was not taken at a crash is lost"
        return listener_guarantee(self.named, self.shared)[1]

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        serving = _Serving(self, taken)
        with endpoint(self.url, self.name, path=False).listen(self.name, self.shared) as listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(serving.accept(listener))
            try:
                async with aclosing(serving.queue.intakes()) as intakes:
                    yield intakes
            finally:
                accepting.cancel()
                try:
                    # Who is told that its records are safe need not send them again.
                    await serving.queue.close()
                finally:
                    await serving.close()


_Who = tuple[str, int]
"""A life of a sender: its name and epoch."""


@dataclass(eq=False, slots=True)
class _Visit:
    """A connection: how far its records have come, are safe, and are said to be."""

    connection: Connection
    framing: Framing
    met: bool
    who: _Who | None = None
    last: int = 0
    safe: int = 0
    told: int = 0
    failed: bool = False
    held: int = 0
    first: bytes = b""
    """Its first two bytes."""
    latest: "asyncio.Future[None] | None" = None
    telling: "asyncio.Task[None] | None" = None


class _Serving:
    """The connections of one opening, and how far each sender is."""

    def __init__(self, source: TcpSource, taken: ResumeState) -> None:
        self.queue = IngestQueue(source.name)
        self._source = source
        self._senders = SenderStates(taken, 0 if source.shared else source.largest_jump)
        self._connected: dict[_Who, _Visit] = {}
        self._visits: dict[_Visit, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(TURNS)
        self._held = 0
        self._logged: set[str] = set()

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                # One that was gone before it was met, or all descriptors are in use.
                self._warn(f"a connection could not be taken: {error.strerror}")
                await asyncio.sleep(0.1)
                continue
            if len(self._visits) >= self._source.connections + _LEAVING:
                connection.close()
                continue
            visit = _Visit(Connection(connection, str(address[0])), self._framing(), met=not self._source.named)
            if len(self._visits) >= self._source.connections:
                self._warn(why := f"{self._source.connections} may be connected, and they are; come back later")
                visit.connection.leave(why)
            self._visits[visit] = asyncio.create_task(self._attend(visit))

    def _framing(self) -> Framing:
        return framing(self._source.frames, self._source.max_size)

    async def _attend(self, visit: _Visit) -> None:
        try:
            try:
                await self._receive(visit)
            except Refused as refused:
                await self._dismiss(visit, refused.reason)
            except OSError:
                await self._end(visit, "the connection broke in the middle of it")
        finally:
            try:
                if visit.telling is not None:
                    visit.telling.cancel()
                    await asyncio.wait([visit.telling])
            finally:
                visit.connection.close()
                self._held -= visit.held
                del self._visits[visit]
                if visit.who is not None and self._connected.get(visit.who) is visit:
                    del self._connected[visit.who]

    async def _receive(self, visit: _Visit) -> None:
        """Take what comes until the sender ends. Refused when it has to go, OSError when it has gone."""
        loop = asyncio.get_running_loop()
        hello_until = loop.time() + self._source.hello_within.total_seconds()
        while True:
            try:
                await visit.connection.readable(self._patience(visit, hello_until - loop.time()))
            except TimeoutError:
                why = "nothing came for too long in the middle of a record" if visit.met else _BEGIN
                raise Refused("a connection", why) from None
            if visit.connection.why is not None:
                raise Refused("a connection", visit.connection.why)
            async with self._turns:
                data = visit.connection.read()
                if data is None:
                    continue
                if not data:
                    break
                await self._take(visit, await self._found(visit, data))
            if visit.framing.broken is not None:
                raise Refused("a record", visit.framing.broken)
        await self._end(visit, None)
        if self._source.acknowledge:
            await self._landed(visit)
            if visit.connection.why is not None:
                raise Refused("a connection", visit.connection.why)

    def _patience(self, visit: _Visit, hello: float) -> float | None:
        if not visit.met:
            return max(0.0, hello)
        return self._source.stalled_after.total_seconds() if visit.framing.midway else None

    async def _found(self, visit: _Visit, data: bytes) -> list[Found]:
        """The records that have ended with these bytes; the first of them may tell who sends."""
        if len(visit.first) < 2:
            visit.first += data[: 2 - len(visit.first)]
            if visit.first == b"\x16\x03":
                self._warn(f"{visit.connection.peer} speaks TLS, and this port does not")
                visit.connection.leave("this port does not speak TLS")
                return []
        found = visit.framing.push(data)
        self._weigh(visit)
        if not visit.met and found:
            await self._meet(visit, *_who(found.pop(0), self._source.name))
        if not visit.met and visit.framing.held > _HELLO:
            raise Refused("a connection", _BEGIN)
        return found

    def _weigh(self, visit: _Visit) -> None:
        """Whoever holds most has to go when there is too much: those with small records do not notice."""
        self._held += visit.framing.held - visit.held
        visit.held = visit.framing.held
        if self._held > UNFINISHED:
            largest = max(self._visits, key=lambda one: one.held if one.connection.why is None else -1)
            self._warn(why := "there are too many records here that do not end; come back later")
            largest.connection.leave(why)

    async def _meet(self, visit: _Visit, who: _Who, has: int) -> None:
        after = self._senders.resume_after(*who, has)
        if (before := self._connected.get(who)) is not None:
            # It lost that connection, and came back before we noticed.
            before.connection.leave("there is another connection of this sender")
            self._warn(duplicate_sender(*who))
        self._connected[who] = visit
        visit.who, visit.met = who, True
        visit.last = visit.safe = visit.told = after
        await visit.connection.say(self._framed({"after": visit.last}))

    async def _take(self, visit: _Visit, found: Sequence[Found]) -> None:
        now = self._source.clock.now()
        last_number(visit.last, len(found))
        for at in range(0, len(found), BATCH_RECORDS):
            some, last = found[at : at + BATCH_RECORDS], visit.last
            if visit.connection.why is not None and self._source.acknowledge:
                raise Refused("a connection", visit.connection.why)
            if visit.who is None:
                arrivals = [Arrival(value, refused=why) for value, _, why in some]
            else:
                sender, epoch = visit.who
                arrivals = [
                    Arrival(value, Origin(sender, epoch, seq, now), refused=why)
                    for seq, (value, _, why) in enumerate(some, last + 1)
                ]
            visit.last += len(some)
            try:
                visit.latest = await self.queue.put(arrivals)
            except Unavailable as error:
                raise Refused("records", error.reason) from error
            if self._source.acknowledge:
                visit.latest.add_done_callback(partial(self._settled, visit, visit.last))

    async def _end(self, visit: _Visit, broken: str | None) -> None:
        """Nothing follows. Who keeps its records sends the unfinished one again; of all others, it is taken."""
        if not self._source.acknowledge:
            with suppress(Refused):
                await self._take(visit, [(value, at, why or broken) for value, at, why in visit.framing.end()])

    def _settled(self, visit: _Visit, last: int, safe: "asyncio.Future[None]") -> None:
        if visit.failed or safe.cancelled() or safe.exception() is not None:
            # It has to send this again, and all that follows, whatever became of that.
            visit.failed = True
            visit.connection.leave("the records were not taken")
            return
        first, visit.safe = visit.safe + 1, last
        if (who := visit.who) is not None:
            self._senders.acknowledge(*who, first, last)
        if visit.telling is None and visit in self._visits:
            visit.telling = asyncio.create_task(self._tell(visit))

    async def _tell(self, visit: _Visit) -> None:
        """Tell a sender how far it is safe. What becomes safe meanwhile is told together."""
        try:
            with suppress(OSError):
                while visit.told < visit.safe:
                    visit.told = visit.safe
                    await visit.connection.say(self._framed({"safe": visit.told}))
        finally:
            visit.telling = None

    async def _landed(self, visit: _Visit) -> None:
        """Return once all that it sent is safe, or not, and it was told."""
        if visit.latest is not None:
            await asyncio.wait([visit.latest])
        if visit.telling is not None:
            await asyncio.wait([visit.telling])

    async def _dismiss(self, visit: _Visit, description: str) -> None:
        """Let it know what is safe, and why it has to go."""
        await self._end(visit, description)
        visit.framing = self._framing()
        self._weigh(visit)
        if not self._source.acknowledge:
            if visit.connection.why is None:
                self._warn(description)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._landed(visit)
        # There are no words for one that does not even take what it is told of its records.
        if visit.telling is None:
            await visit.connection.dismiss(self._framed({"error": description}))

    def _framed(self, said: dict[str, object]) -> bytes:
        text = orjson.dumps(said)
        return text + b"\n" if self._source.frames == "lines" else len(text).to_bytes(4, "big") + text

    def _warn(self, description: str) -> None:
        """Once for each kind of trouble: any visitor could fill the log."""
        if description not in self._logged and len(self._logged) < 100:
            self._logged.add(description)
            log.warning("%s: %s", self._source.name, description)

    async def close(self) -> None:
        """Let all know that it is over, those who can be told."""
        for visit in self._visits:
            visit.connection.leave("this source is being closed")
        if tasks := list(self._visits.values()):
            try:
                await asyncio.wait(tasks, timeout=2 * LAST_WORDS)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


_BEGIN = 'begin with who sends, and in which life, a number that grows: {"sender": "NAME", "epoch": 1700000000}'


def _who(hello: Found, source: str) -> tuple[_Who, int]:
    """Who connects, and the first number that it still has; Refused when it does not say enough."""
    value, _, why = hello
    try:
        said = {} if why else orjson.loads(value)
    except orjson.JSONDecodeError:
        said = {}
    match {"seq": 1, **said} if isinstance(said, dict) else said:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(has), **more} if not more:
            if (wrong := invalid_sender(sender, source)) is not None:
                raise Refused("a connection", wrong)
            if 0 <= epoch <= MAX_NUMBER and 1 <= has <= MAX_NUMBER and not {type(epoch), type(has)} & {bool}:
                return (sender, epoch), has
    raise Refused("a connection", _BEGIN)
