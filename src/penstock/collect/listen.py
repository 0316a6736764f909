"""What sources that listen have in common: the endpoint, the ingest queue, and the state of each sender."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from uvicorn.config import Config

from penstock.collect.ingest import ARRIVAL_OVERHEAD, BATCH_BYTES, BATCH_RECORDS, STOP_TIMEOUT
from penstock.collect.numbers import SENDERS, Numbers
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.framing import Found, SenderKey
from penstock.core.record import LARGEST_JUMP, LONGEST_SENDER, MAX_NUMBER, Origin
from penstock.core.tcp import SEND_TIMEOUT, Session, TcpServer
from penstock.web.requests import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import Problem, SecurityHeaders, handlers
from penstock.web.server import authority, http_config, listen

QUEUE_BYTES = 16 << 20
"""The default limit of an ingest queue, beside the in-flight window."""

READING = 32
"""Connections that hold data in memory while it waits for room; that of the others stays in the kernel."""

_HTTP_STOP_TIMEOUT = 2
"""Seconds at a stop in which clients can read their responses."""


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        return authority(self.host, self.port)

    @contextmanager
    def listen(self, name: str, shared: bool = False) -> Iterator[socket.socket]:
        """A listening socket. Raises Misconfigured if the address cannot be used.

        `shared`: other processes can listen at the same address; each connection goes to one of them.
        """
        with listen(f"source {name},", self.host, self.port, SEND_TIMEOUT, shared) as listener:
            yield listener


def endpoint(address: str, name: str, path: bool = True) -> Endpoint:
    """Parse `listen+tcp://host:port/path`. `path`: whether it may have a path."""
    fix = f"write {address.partition('://')[0]}://host:port{'/path' if path else ''}, such as 127.0.0.1:8700"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Misconfigured(f"source {name}", str(error), fix) from error
    if not host or not port:
        raise Misconfigured(f"source {name}", f"the address has no {'port' if host else 'host'}", fix)
    if parts.username is not None or parts.query or parts.fragment or (parts.path.strip("/") and not path):
        raise Misconfigured(f"source {name}", "the address has more parts than host and port", fix)
    return Endpoint(host, port, parts.path or "/")


def http_server(
    routes: Sequence[Route],
    origin_check: OriginCheck,
    connections: int,
    idle_timeout: timedelta,
    origins: Sequence[str] = (),
) -> Config:
    """The server of a source. `origins`: sites whose pages may send and read the response."""
    middleware = [Middleware(SecurityHeaders)]
    if origins:
        exposed = ["location", "retry-after"]
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"], expose_headers=exposed)
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=handlers("the source", "use the address of the source"),
    )
    app.router.redirect_slashes = False
    checked = OriginCheckMiddleware(app, origin_check)
    return http_config(checked, connections, idle_timeout.total_seconds(), _HTTP_STOP_TIMEOUT)


def allowed_origins(option: Sequence[str] | str) -> tuple[str, ...]:
    """Sites whose pages may send: a list, or a text separated by commas or spaces."""
    return tuple(option.replace(",", " ").split() if isinstance(option, str) else option)


def invalid_sender(sender: str, source: str) -> str | None:
    """Why a sender name is invalid; None if it is valid."""
    if not 0 < len(sender) <= LONGEST_SENDER:
        return f"a sender name has 1 to {LONGEST_SENDER} characters"
    if not sender.isprintable():
        return "a sender name has only printable characters"
    if sender == source:
        return f'"{source}" is the name of this source'
    return None


@dataclass(eq=False, slots=True)
class _Queued:
    arrivals: Sequence[Arrival]
    size: int
    durable: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class IngestQueue:
    """The ingest queue of a source that listens: its connections put arrivals, the ingest loop takes intakes.

    Bounded: when it holds more than `max_bytes`, `put` waits, and so does the sender.
    """

    def __init__(self, name: str, max_bytes: int = QUEUE_BYTES) -> None:
        self._name, self._max_bytes = name, max_bytes
        self._waiting: deque[_Queued] = deque()
        self._bytes = 0
        self._in_flight: set[_Queued] = set()
        self._filled, self._freed = asyncio.Event(), asyncio.Condition()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether `put` would wait. A source that can reject requests does so instead."""
        return self._bytes >= self._max_bytes

    async def put(self, arrivals: Sequence[Arrival]) -> "asyncio.Future[None]":
        """Wait for space, then add the arrivals, in the order of the calls.

        The future is done once all of them are durable. It holds an Unavailable if they may not be.
        """
        queued = _Queued(arrivals, sum(len(one.value) + ARRIVAL_OVERHEAD for one in arrivals))
        if self.full:
            async with self._freed:
                await self._freed.wait_for(lambda: not self.full or self._closed)
        if self._closed:
            raise self._unavailable()
        self._waiting.append(queued)
        self._bytes += queued.size
        self._filled.set()
        # The caller may not await the future: mark its exception as retrieved.
        queued.durable.add_done_callback(lambda done: done.cancelled() or done.exception())
        return queued.durable

    async def intakes(self) -> AsyncGenerator[Intake, None]:
        while True:
            await self._filled.wait()
            some, count, size = [], 0, 0
            # No await between the first `popleft` and `yield`: a cancellation there would lose what was taken.
            async with self._freed:
                while self._waiting and count < BATCH_RECORDS and size < BATCH_BYTES:
                    some.append(self._waiting.popleft())
                    count, size = count + len(some[-1].arrivals), size + some[-1].size
                if not self._waiting:
                    self._filled.clear()
                self._bytes -= size
                self._freed.notify_all()
            if some:
                yield self._intake(some)

    def _intake(self, some: Sequence[_Queued]) -> Intake:
        self._in_flight.update(some)

        async def settle(error: Exception | None) -> None:
            for queued in some:
                self._in_flight.discard(queued)
                if queued.durable.done():
                    continue
                if error is None:
                    queued.durable.set_result(None)
                else:
                    queued.durable.set_exception(self._unavailable(error))

        return Intake([arrival for queued in some for arrival in queued.arrivals], settle)

    async def close(self) -> None:
        """Accept nothing more, and fail what was not taken. Arrivals in flight have some seconds to become durable."""
        self._closed = True
        async with self._freed:
            self._freed.notify_all()
        waiting, self._waiting = self._waiting, deque()
        for queued in waiting:
            if not queued.durable.done():
                queued.durable.set_exception(self._unavailable())
        if self._in_flight:
            await asyncio.wait([queued.durable for queued in self._in_flight], timeout=STOP_TIMEOUT)
            for queued in self._in_flight:
                if not queued.durable.done():
                    queued.durable.set_exception(self._unavailable())

    def _unavailable(self, error: Exception | None = None) -> Unavailable:
        return Unavailable(f"source {self._name}", str(error) if error else "it is closing")


class SenderStates:
    """How far each sender is durable. Beyond `SENDERS`, the one that was inactive for longest is forgotten.

    `largest_jump`: a sender is refused if its numbers continue further than this after its last known one; 0: never.
    """

    def __init__(self, resume: ResumeState, largest_jump: int = LARGEST_JUMP) -> None:
        self._largest_jump = largest_jump
        self._durable = Numbers()
        for sender, (epoch, last) in resume.numbers.items():
            if last:
                self._durable.add(sender, epoch, 1, last)
        self._highest = dict(resume.highest)

    def admit(self, sender: str, epoch: int, first: int, last: int) -> None:
        """Check the numbers of a sender. Raises Refused if they jump. The first number of an epoch can be any."""
        highest = self._highest.get(sender)
        if highest is not None and highest[0] == epoch and 0 < self._largest_jump < first - highest[1] - 1:
            reason = (
                f"number {first} of the sender {sender} is more than {self._largest_jump:,} after {highest[1]}, its "
                f"last one in epoch {epoch}; start another epoch, or set largest_jump of the source"
            )
            raise Refused("records", reason)
        self._note(sender, epoch, last)

    def resume_after(self, sender: str, epoch: int, first: int) -> int:
        """The number after which a sender resumes, if the first record that it still has is number `first`.

        Raises Refused if the numbers jump. The sender may have deleted records that were acknowledged, perhaps by
        another collector. So `first` can be any number, and it continues after those from there on that are durable
        without a gap.
        """
        self.admit(sender, epoch, first, first - 1)
        return self._durable.last_from(sender, epoch, first)

    def acknowledge(self, sender: str, epoch: int, first: int, last: int) -> None:
        """Note that first–last are durable."""
        self._durable.add(sender, epoch, first, last)
        self._note(sender, epoch, last)

    def _note(self, sender: str, epoch: int, last: int) -> None:
        if self._highest.get(sender, (epoch, last)) <= (epoch, last):
            self._highest.pop(sender, None)
            self._highest[sender] = (epoch, last)
            if len(self._highest) > SENDERS:
                del self._highest[next(iter(self._highest))]


@dataclass(frozen=True)
class AcknowledgingSource:
    """Base class: senders number their records and keep them until they are acknowledged."""

    url: str
    name: str
    named: bool = True
    max_size: int = 900_000
    connections: int = 10_000
    largest_jump: int = LARGEST_JUMP
    shared: bool = False
    clock: Clock = field(default_factory=SystemClock)

    @property
    def numbered(self) -> str | None:
        return "by its senders" if self.named else None

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.named and not self.shared else Guarantee.AT_LEAST_ONCE

    @property
    def description(self) -> str:
        keeps = "senders keep records until they are acknowledged"
        if not self.named:
            return f"{keeps}; a sender without a name repeats some after a reconnect"
        if self.shared:
            reconnected = "after a reconnect to another process at this port"
            return f"{keeps}; {reconnected}, a sender repeats some, with the same numbers"
        return f"{keeps}, and resume after the last durable one"


class SourceServer(TcpServer):
    """The connections of an open source, its queue, and the state of each sender."""

    def __init__(
        self,
        source: AcknowledgingSource,
        resume: ResumeState,
        *,
        hello_within: float,
        stalled_after: float,
        acknowledge: bool = True,
        frames: str = "lines",
    ) -> None:
        super().__init__(
            source.name,
            frames=frames,
            max_size=source.max_size,
            connections=source.connections,
            reading=READING,
            hello_within=hello_within,
            stalled_after=stalled_after,
            named=source.named,
            acknowledge=acknowledge,
        )
        self.queue = IngestQueue(source.name)
        self._source, self._acknowledging = source, acknowledge
        self._senders = SenderStates(resume, 0 if source.shared else source.largest_jump)

    @asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[AsyncIterator[Intake]]:
        accepting = asyncio.create_task(self.accept(listener))
        try:
            async with aclosing(self.queue.intakes()) as intakes:
                yield intakes
        finally:
            accepting.cancel()
            try:
                # Acknowledged records are not sent again.
                await self.queue.close()
            finally:
                await self.close("this source is being closed")

    def resume_after(self, sender_key: SenderKey, first: int) -> int:
        if (wrong := invalid_sender(sender_key[0], self._source.name)) is not None:
            raise Refused("a connection", wrong)
        after = self._senders.resume_after(*sender_key, first)
        if sender_key in self.connected:
            self.warn(
                f"the sender {sender_key[0]}, epoch {sender_key[1]}, connected twice: the first connection was closed. "
                "This is normal after a lost connection. Two senders must have different names: otherwise records of "
                "one are dropped as duplicates of the other"
            )
        return after

    async def ingest(self, session: Session, found: Sequence[Found]) -> None:
        now = self._source.clock.now()
        if session.last + len(found) > MAX_NUMBER:
            raise Refused("records", "their numbers are beyond 64 bits; start another epoch")
        for at in range(0, len(found), BATCH_RECORDS):
            some, last = found[at : at + BATCH_RECORDS], session.last
            if self._acknowledging:
                session.connection.require()
            if session.sender_key is None:
                arrivals = [Arrival(value, refused=why) for value, _, why in some]
            else:
                sender, epoch = session.sender_key
                arrivals = [
                    Arrival(value, Origin(sender, epoch, seq, now), refused=why)
                    for seq, (value, _, why) in enumerate(some, last + 1)
                ]
            session.last += len(some)
            try:
                session.latest = await self.queue.put(arrivals)
            except Unavailable as error:
                session.connection.leave(error.reason)
                raise Refused("records", error.reason) from error
            if self._acknowledging:
                session.latest.add_done_callback(partial(self._settled, session, session.last))

    def _settled(self, session: Session, last: int, safe: "asyncio.Future[None]") -> None:
        if session.failed or safe.cancelled() or safe.exception() is not None:
            # The sender has to send these records and all later ones again.
            session.failed = True
            session.connection.leave("the records were not stored")
            return
        first, session.safe = session.safe + 1, last
        if session.sender_key is not None:
            self._senders.acknowledge(*session.sender_key, first, last)
        self.report(session)


def split_lines(body: bytes, max_size: int, max_count: int) -> list[bytes]:
    """The records of a body with one record per line. Raises Problem if one is too large, or there are too many."""
    found: list[bytes] = []
    start, number = 0, 0
    # Not split(): a body of line feeds would become millions of objects.
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end].removesuffix(b"\r")
        start, number = end + 1, number + 1
        if len(line) > max_size:
            raise too_large(f"line {number}", max_size)
        if line:
            found.append(line)
        if len(found) > max_count:
            reason = f"there are more than {max_count} records; none was taken"
            raise Problem(413, f"line {number}", reason, "send fewer records per request")
    if not found:
        raise Problem(400, "the body", "it is empty", "send one record per line")
    return found


def too_large(location: str, max_size: int, lines: bool = False) -> Problem:
    """The response to a record beyond `max_size`. `lines`: whether a body may have one record per line."""
    fix = "to allow it, set max_size= of the source, and on Kafka max.message.bytes of its channel"
    if lines:
        fix = f"if it has one record per line, post it to ?lines; {fix}"
    reason = f"it is larger than {max_size:,} bytes, the limit of a record; nothing was taken"
    return Problem(413, location, reason, fix, {"limit": max_size, "option": "max_size"})
