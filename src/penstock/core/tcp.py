"""A TCP server to which senders connect; sources and channels listen with it. The protocol is that of `framing`.

A subclass decides from where a sender resumes, and what becomes of its records.
"""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.core.errors import Refused
from penstock.core.framing import HELLO_EXPECTED, Found, Framing, SenderKey, framed_message, framing, parse_hello

log = logging.getLogger(__name__)

SEND_TIMEOUT = 30.0
"""Seconds after which the kernel drops a peer that does not read what is sent to it."""
MAX_UNFINISHED = 64 << 20
"""Bytes of unfinished records, of all connections together."""
CHUNK = 64 << 10
"""Bytes of one read: many records, and little memory."""
FAREWELL = 1.0
"""Seconds for the other side to read the reason at the end."""
SETTLE_TIMEOUT = 3.0
"""Seconds for the records of a rejected connection to become safe."""
_HELLO = 4 << 10
_LEAVING = 100
"""Connections above the limit that still get the reason."""


class Connection:
    """A TCP connection. Data stays in the kernel until there is room for it."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self.why: str | None = None
        """The reason to end it."""
        self._socket = connected
        self._ready: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        connected.setblocking(False)
        with suppress(OSError):
            # Send acknowledgements at once.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Break the connection if the other side vanishes: while it is idle, and while it does not read.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SEND_TIMEOUT))
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SEND_TIMEOUT / 3))
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT * 1_000))

    def leave(self, why: str) -> None:
        """End the connection with a reason; wakes `readable`."""
        self.why = self.why or why
        self._wake()

    def require(self) -> None:
        """Raise Refused if there is a reason to end it."""
        if self.why is not None:
            raise Refused("a connection", self.why)

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

    async def send(self, message: bytes) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._socket, message)

    async def reject(self, message: bytes) -> None:
        """Send the reason. The rest is read: a reset could overtake the reason."""
        # A timeout is an OSError, too.
        with suppress(OSError):
            async with asyncio.timeout(FAREWELL):
                await self.send(message)
                self._socket.shutdown(socket.SHUT_WR)
                while await asyncio.get_running_loop().sock_recv(self._socket, CHUNK):
                    pass

    def close(self) -> None:
        self._socket.close()


@dataclass(eq=False, slots=True)
class Session:
    """A connection, and the numbers of its last record that is received, safe, and reported as safe."""

    connection: Connection
    framing: Framing
    sender_key: SenderKey | None = None
    last: int = 0
    safe: int = 0
    reported: int = 0
    failed: bool = False
    """Whether a record of it was not stored; then no later one is safe."""
    held: int = 0
    first: bytes = b""
    """Its first two bytes."""
    latest: "asyncio.Future[None] | None" = None
    """Done when all its records are safe or have failed; None if each is safe once it was ingested."""
    reporting: "asyncio.Task[None] | None" = None


class TcpServer(ABC):
    """Receives the records of many senders, and reports what is safe.

    `named`: senders have to identify themselves. `acknowledge`: if False, nothing is sent to senders. `reading`:
    connections that hold data in memory while it waits for room; that of the others stays in the kernel.
    `answer_fields`: more fields of the answer to a sender that identified itself.
    """

    def __init__(
        self,
        name: str,
        *,
        max_size: int,
        connections: int,
        reading: int,
        hello_within: float,
        stalled_after: float,
        frames: str = "length",
        named: bool = True,
        acknowledge: bool = True,
        answer_fields: Mapping[str, object] | None = None,
    ) -> None:
        self._name, self._frames, self._max_size, self._most = name, frames, max_size, connections
        self._hello_within, self._stalled_after = hello_within, stalled_after
        self._named, self._acknowledge, self._answer_fields = named, acknowledge, answer_fields or {}
        self.connected: dict[SenderKey, Session] = {}
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(reading)
        self._held = 0
        self._logged: set[str] = set()

    @abstractmethod
    def resume_after(self, sender_key: SenderKey, first: int) -> int:
        """The number after which a sender resumes; `first` is the first one that it still has. May raise Refused.

        An older connection of this sender is ended after that: it must not ingest anything more.
        """

    @abstractmethod
    async def ingest(self, session: Session, found: Sequence[Found]) -> None:
        """Take records, with the numbers after `session.last`, and wait for room. Refused ends the connection."""

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                # The connection has ended already, or all file descriptors are in use.
                self.warn(f"a connection could not be accepted: {error.strerror}")
                await asyncio.sleep(0.1)
                continue
            if len(self._sessions) >= self._most + _LEAVING:
                connection.close()
                continue
            session = Session(Connection(connection, str(address[0])), self._framing())
            if len(self._sessions) >= self._most:
                self.warn(why := f"the limit of {self._most} connections is reached; try again later")
                session.connection.leave(why)
            self._sessions[session] = asyncio.create_task(self._serve(session))

    def report(self, session: Session) -> None:
        """Acknowledge the records up to `session.safe`. Those that become safe meanwhile are acknowledged together."""
        if session.reporting is None and session in self._sessions:
            session.reporting = asyncio.create_task(self._report(session))

    def report_again(self) -> None:
        """Repeat the last acknowledgement to each sender that reads: so it can tell that this side is alive."""
        for session in self.connected.values():
            if session.reporting is None:
                session.reported = -1
                self.report(session)

    async def close(self, why: str | None) -> None:
        """End all connections, with a reason if there is one."""
        tasks = list(self._sessions.values())
        if not tasks:
            return
        try:
            if why is not None:
                for session in self._sessions:
                    session.connection.leave(why)
                await asyncio.wait(tasks, timeout=2 * FAREWELL)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def warn(self, description: str) -> None:
        """Log each message once: otherwise any peer could fill the log."""
        if description not in self._logged and len(self._logged) < 100:
            self._logged.add(description)
            log.warning("%s: %s", self._name, description)

    def _framing(self) -> Framing:
        return framing(self._frames, self._max_size)

    async def _send(self, session: Session, **message: object) -> None:
        await session.connection.send(framed_message(self._frames, message))

    async def _serve(self, session: Session) -> None:
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
                if session.sender_key is not None and self.connected.get(session.sender_key) is session:
                    del self.connected[session.sender_key]

    async def _receive(self, session: Session) -> None:
        """Ingest records until the sender ends. Raises Refused to end the connection, OSError if it broke."""
        loop = asyncio.get_running_loop()
        hello_until = loop.time() + self._hello_within
        while True:
            try:
                await session.connection.readable(self._read_timeout(session, hello_until - loop.time()))
            except TimeoutError:
                self._timed_out(session)
                continue
            session.connection.require()
            async with self._turns:
                data = session.connection.read()
                if data is None:
                    continue
                if not data:
                    break
                await self.ingest(session, await self._parse(session, data))
            if session.framing.broken is not None:
                raise Refused("a record", session.framing.broken)
        await self._end(session, None)
        if self._acknowledge:
            await self._wait_until_safe(session)
            session.connection.require()

    def _expects_hello(self, session: Session) -> bool:
        return self._named and session.sender_key is None

    def _read_timeout(self, session: Session, hello: float) -> float | None:
        if self._expects_hello(session):
            return max(0.0, hello)
        return self._stalled_after if session.framing.midway else None

    def _timed_out(self, session: Session) -> None:
        """Nothing arrived within `_read_timeout`."""
        why = HELLO_EXPECTED if self._expects_hello(session) else "timeout in the middle of a record"
        raise Refused("a connection", why)

    async def _parse(self, session: Session, data: bytes) -> list[Found]:
        """The records that end in these bytes, without the first one, which identifies the sender."""
        if len(session.first) < 2:
            session.first += data[: 2 - len(session.first)]
            if session.first == b"\x16\x03":
                self.warn(f"{session.connection.peer} uses TLS, and this port does not")
                session.connection.leave("this port does not use TLS")
                return []
        found = session.framing.push(data)
        self._limit_unfinished(session)
        if self._expects_hello(session) and found:
            await self._identify(session, *parse_hello(found.pop(0)))
        if self._expects_hello(session) and session.framing.held > _HELLO:
            raise Refused("a connection", HELLO_EXPECTED)
        return found

    def _limit_unfinished(self, session: Session) -> None:
        """End the connection with the largest unfinished record when there is too much of them."""
        self._held += session.framing.held - session.held
        session.held = session.framing.held
        if self._held > MAX_UNFINISHED:
            largest = max(self._sessions, key=lambda one: one.held if one.connection.why is None else -1)
            self.warn(why := "too many unfinished records; try again later")
            largest.connection.leave(why)

    async def _identify(self, session: Session, sender_key: SenderKey, first: int) -> None:
        after = self.resume_after(sender_key, first)
        if (before := self.connected.get(sender_key)) is not None:
            # The sender lost that connection, and connected again.
            before.connection.leave("there is another connection of this sender")
        self.connected[sender_key] = session
        session.sender_key = sender_key
        session.last = session.safe = session.reported = after
        await self._send(session, after=after, **self._answer_fields)

    async def _end(self, session: Session, broken: str | None) -> None:
        """Ingest the unfinished record, unless the sender waits for acknowledgements and sends it again."""
        if not self._acknowledge:
            with suppress(Refused):
                await self.ingest(session, [(value, at, why or broken) for value, at, why in session.framing.end()])

    async def _report(self, session: Session) -> None:
        try:
            with suppress(OSError):
                while session.reported < session.safe:
                    session.reported = session.safe
                    await self._send(session, safe=session.reported)
        finally:
            session.reporting = None

    async def _wait_until_safe(self, session: Session) -> None:
        """Wait until all records of the connection are safe or have failed, and the sender knows it."""
        if session.latest is not None:
            await asyncio.wait([session.latest])
        if session.reporting is not None:
            await asyncio.wait([session.reporting])

    async def _reject(self, session: Session, why: str) -> None:
        """Acknowledge what is safe, send the reason, and end the connection."""
        await self._end(session, why)
        session.framing = self._framing()
        self._limit_unfinished(session)
        if not self._acknowledge:
            if session.connection.why is None:
                self.warn(why)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_TIMEOUT):
                await self._wait_until_safe(session)
        # A sender that does not read acknowledgements gets no reason.
        if session.reporting is None:
            await session.connection.reject(framed_message(self._frames, {"error": why}))
