"""A TCP listener: a record per line, or behind its length; acknowledgements tell each sender what is safe.

A sender begins with `{"sender": "NAME", "epoch": N, "seq": M}`. The epoch grows with each start of the sender. Records
are numbered within an epoch, and `seq` is the first one that the sender still has (default: 1). The answer
`{"after": 41}` means: send the records after 41. `{"safe": 45}` means: the records up to 45 are safe. These messages
have the same framing as the records.
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
    SEND_TIMEOUT,
    SenderStates,
    duplicate_sender,
    endpoint,
    invalid_sender,
    last_number,
    listener_guarantee,
)
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import LARGEST_JUMP, Origin

log = logging.getLogger(__name__)

READING = 32
"""Connections that hold data in memory while it waits for room; that of the others stays in the kernel."""
MAX_UNFINISHED = 64 << 20
"""Bytes of unfinished records, of all connections together."""
CHUNK = 64 << 10
"""Bytes of one read: many records, and little memory."""
FAREWELL = 1.0
"""Seconds for the other side to read the reason at the end."""
_HELLO = 4 << 10
_LEAVING = 100
"""Connections above the limit that still get the reason."""


@dataclass(frozen=True)
class TcpSource:
    """Listens at `listen+tcp://host:port`. A record beyond `max_size` becomes a dead letter with its beginning.

    `frames`: "lines", or "length" for a 4-byte big-endian length before each record. `named`: whether senders must
    identify themselves; without names, repeated records are duplicates. `acknowledge`: if False, nothing is sent to
    the sender, and it needs no name. `largest_jump`: a sender that skips more numbers than this is refused; 0: no
    limit. `shared`: other processes listen at the same address; their records are not known here, so no jump is
    refused.
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
        # A sender without acknowledgements needs no name.
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
            return "without acknowledgements, records that are in flight at a crash are lost"
        return listener_guarantee(self.named, self.shared)[1]

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        serving = _Serving(self, resume)
        with endpoint(self.url, self.name, path=False).listen(self.name, self.shared) as listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(serving.accept(listener))
            try:
                async with aclosing(serving.queue.intakes()) as intakes:
                    yield intakes
            finally:
                accepting.cancel()
                try:
                    # Acknowledged records are not sent again.
                    await serving.queue.close()
                finally:
                    await serving.close()


_SenderKey = tuple[str, int]
"""The name and the epoch of a sender."""


@dataclass(eq=False, slots=True)
class _Session:
    """A connection, and the numbers of its last record that is received, safe, and reported as safe."""

    connection: "Connection"
    framing: Framing
    identified: bool
    sender_key: _SenderKey | None = None
    last: int = 0
    safe: int = 0
    reported: int = 0
    failed: bool = False
    held: int = 0
    first: bytes = b""
    """Its first two bytes."""
    latest: "asyncio.Future[None] | None" = None
    reporting: "asyncio.Task[None] | None" = None


class _Serving:
    """The connections of an open source, and the state of each sender."""

    def __init__(self, source: TcpSource, resume: ResumeState) -> None:
        self.queue = IngestQueue(source.name)
        self._source = source
        self._senders = SenderStates(resume, 0 if source.shared else source.largest_jump)
        self._connected: dict[_SenderKey, _Session] = {}
        self._sessions: dict[_Session, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(READING)
        self._held = 0
        self._logged: set[str] = set()

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                # The connection has ended already, or all file descriptors are in use.
                self._warn(f"a connection could not be accepted: {error.strerror}")
                await asyncio.sleep(0.1)
                continue
            if len(self._sessions) >= self._source.connections + _LEAVING:
                connection.close()
                continue
            session = _Session(
                Connection(connection, str(address[0])), self._framing(), identified=not self._source.named
            )
            if len(self._sessions) >= self._source.connections:
                self._warn(why := f"the limit of {self._source.connections} connections is reached; try again later")
                session.connection.leave(why)
            self._sessions[session] = asyncio.create_task(self._serve(session))

    def _framing(self) -> Framing:
        return framing(self._source.frames, self._source.max_size)

    async def _serve(self, session: _Session) -> None:
        try:
            try:
                await self._receive(session)
            except Refused as refused:
                await self._reject(session, refused.reason)
            except OSError:
                await self._end(session, "the connection broke in the middle of the record")
        finally:
            try:
                if session.reporting is not None:
                    session.reporting.cancel()
                    await asyncio.wait([session.reporting])
            finally:
                session.connection.close()
                self._held -= session.held
                del self._sessions[session]
                if session.sender_key is not None and self._connected.get(session.sender_key) is session:
                    del self._connected[session.sender_key]

    async def _receive(self, session: _Session) -> None:
        """Ingest records until the sender ends. Raises Refused to end the connection, OSError if it broke."""
        loop = asyncio.get_running_loop()
        hello_until = loop.time() + self._source.hello_within.total_seconds()
        while True:
            try:
                await session.connection.readable(self._read_timeout(session, hello_until - loop.time()))
            except TimeoutError:
                why = "timeout in the middle of a record" if session.identified else _HELLO_EXPECTED
                raise Refused("a connection", why) from None
            if session.connection.why is not None:
                raise Refused("a connection", session.connection.why)
            async with self._turns:
                data = session.connection.read()
                if data is None:
                    continue
                if not data:
                    break
                await self._ingest(session, await self._parse(session, data))
            if session.framing.broken is not None:
                raise Refused("a record", session.framing.broken)
        await self._end(session, None)
        if self._source.acknowledge:
            await self._wait_until_safe(session)
            if session.connection.why is not None:
                raise Refused("a connection", session.connection.why)

    def _read_timeout(self, session: _Session, hello: float) -> float | None:
        if not session.identified:
            return max(0.0, hello)
        return self._source.stalled_after.total_seconds() if session.framing.midway else None

    async def _parse(self, session: _Session, data: bytes) -> list[Found]:
        """The records that end in these bytes, without the first one, which identifies the sender."""
        if len(session.first) < 2:
            session.first += data[: 2 - len(session.first)]
            if session.first == b"\x16\x03":
                self._warn(f"{session.connection.peer} uses TLS, and this port does not")
                session.connection.leave("this port does not use TLS")
                return []
        found = session.framing.push(data)
        self._limit_unfinished(session)
        if not session.identified and found:
            await self._identify(session, *_parse_hello(found.pop(0), self._source.name))
        if not session.identified and session.framing.held > _HELLO:
            raise Refused("a connection", _HELLO_EXPECTED)
        return found

    def _limit_unfinished(self, session: _Session) -> None:
        """End the connection with the largest unfinished record when there is too much of them."""
        self._held += session.framing.held - session.held
        session.held = session.framing.held
        if self._held > MAX_UNFINISHED:
            largest = max(self._sessions, key=lambda one: one.held if one.connection.why is None else -1)
            self._warn(why := "too many unfinished records; try again later")
            largest.connection.leave(why)

    async def _identify(self, session: _Session, sender_key: _SenderKey, first: int) -> None:
        after = self._senders.resume_after(*sender_key, first)
        if (before := self._connected.get(sender_key)) is not None:
            # The sender lost that connection, and connected again.
            before.connection.leave("there is another connection of this sender")
            self._warn(duplicate_sender(*sender_key))
        self._connected[sender_key] = session
        session.sender_key, session.identified = sender_key, True
        session.last = session.safe = session.reported = after
        await session.connection.send(self._framed({"after": session.last}))

    async def _ingest(self, session: _Session, found: Sequence[Found]) -> None:
        now = self._source.clock.now()
        last_number(session.last, len(found))
        for at in range(0, len(found), BATCH_RECORDS):
            some, last = found[at : at + BATCH_RECORDS], session.last
            if session.connection.why is not None and self._source.acknowledge:
                raise Refused("a connection", session.connection.why)
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
                raise Refused("records", error.reason) from error
            if self._source.acknowledge:
                session.latest.add_done_callback(partial(self._settled, session, session.last))

    async def _end(self, session: _Session, broken: str | None) -> None:
        """Ingest the unfinished record, unless the sender waits for acknowledgements and sends it again."""
        if not self._source.acknowledge:
            with suppress(Refused):
                await self._ingest(session, [(value, at, why or broken) for value, at, why in session.framing.end()])

    def _settled(self, session: _Session, last: int, safe: "asyncio.Future[None]") -> None:
        if session.failed or safe.cancelled() or safe.exception() is not None:
            # The sender has to send these records and all later ones again.
            session.failed = True
            session.connection.leave("the records were not stored")
            return
        first, session.safe = session.safe + 1, last
        if (sender_key := session.sender_key) is not None:
            self._senders.acknowledge(*sender_key, first, last)
        if session.reporting is None and session in self._sessions:
            session.reporting = asyncio.create_task(self._report(session))

    async def _report(self, session: _Session) -> None:
        """Acknowledge records. Those that become safe meanwhile are acknowledged together."""
        try:
            with suppress(OSError):
                while session.reported < session.safe:
                    session.reported = session.safe
                    await session.connection.send(self._framed({"safe": session.reported}))
        finally:
            session.reporting = None

    async def _wait_until_safe(self, session: _Session) -> None:
        """Wait until all records of the connection are safe or have failed, and the sender knows it."""
        if session.latest is not None:
            await asyncio.wait([session.latest])
        if session.reporting is not None:
            await asyncio.wait([session.reporting])

    async def _reject(self, session: _Session, description: str) -> None:
        """Acknowledge what is safe, send the reason, and end the connection."""
        await self._end(session, description)
        session.framing = self._framing()
        self._limit_unfinished(session)
        if not self._source.acknowledge:
            if session.connection.why is None:
                self._warn(description)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._wait_until_safe(session)
        # A sender that does not read acknowledgements gets no reason.
        if session.reporting is None:
            await session.connection.reject(self._framed({"error": description}))

    def _framed(self, message: dict[str, object]) -> bytes:
        text = orjson.dumps(message)
        return text + b"\n" if self._source.frames == "lines" else len(text).to_bytes(4, "big") + text

    def _warn(self, description: str) -> None:
        """Log each message once: otherwise any peer could fill the log."""
        if description not in self._logged and len(self._logged) < 100:
            self._logged.add(description)
            log.warning("%s: %s", self._source.name, description)

    async def close(self) -> None:
        """End all connections with a reason."""
        for session in self._sessions:
            session.connection.leave("this source is being closed")
        if tasks := list(self._sessions.values()):
            try:
                await asyncio.wait(tasks, timeout=2 * FAREWELL)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


_HELLO_EXPECTED = 'begin with the sender, and an epoch that grows with each start: {"sender": "NAME", "epoch": 1}'


def _parse_hello(hello: Found, source: str) -> tuple[_SenderKey, int]:
    """The sender, and the first number that it still has; Refused if the message is not valid."""
    value, _, why = hello
    try:
        message = {} if why else orjson.loads(value)
    except orjson.JSONDecodeError:
        message = {}
    match {"seq": 1, **message} if isinstance(message, dict) else message:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(first), **more} if not more:
            if (wrong := invalid_sender(sender, source)) is not None:
                raise Refused("a connection", wrong)
            if 0 <= epoch <= MAX_NUMBER and 1 <= first <= MAX_NUMBER and not {type(epoch), type(first)} & {bool}:
                return (sender, epoch), first
    raise Refused("a connection", _HELLO_EXPECTED)


class Connection:
    """A TCP connection. Data stays in the kernel until there is room for it."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self.why: str | None = None
        """The reason to end it."""
        self._socket = connected
        self._ready: asyncio.Future[None] | None = None
        connected.setblocking(False)
        # Break an idle connection if the other side vanishes.
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SEND_TIMEOUT))
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SEND_TIMEOUT / 3))

    def leave(self, why: str) -> None:
        """End the connection with a reason; wakes `readable`."""
        self.why = self.why or why
        self._wake()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    async def readable(self, within: float | None) -> None:
        """Wait until there is data or a reason to end; raises TimeoutError."""
        if self.why is not None:
            return
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._socket, self._wake)
        try:
            async with asyncio.timeout(within):
                await self._ready
        finally:
            loop.remove_reader(self._socket)

    def read(self) -> bytes | None:
        """The available bytes; None if there are none, empty at the end of the stream."""
        try:
            return self._socket.recv(CHUNK)
        except BlockingIOError:
            return None

    async def send(self, description: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, description)

    async def reject(self, description: bytes) -> None:
        """Send the reason. The rest is read: a reset could overtake the reason."""
        # A timeout is an OSError, too.
        with suppress(OSError):
            async with asyncio.timeout(FAREWELL):
                await self.send(description)
                self._socket.shutdown(socket.SHUT_WR)
                while await asyncio.get_running_loop().sock_recv(self._socket, CHUNK):
                    pass

    def close(self) -> None:
        self._socket.close()
