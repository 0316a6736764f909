"""Senders that connect by WebSocket: each message is a record, and each sender is acknowledged which ones are durable.

A sender connects to `…?sender=NAME&epoch=N&seq=M`. The epoch is a number that grows with each restart of the sender. It
numbers its messages from 1 in each epoch; `seq` is the first one that it still first (default 1). It receives
`{"after": 41}` and sends what follows. Now and then it receives `{"safe": 45}`, and can delete the messages up to 45.
A sender without a name receives `{"after": 0}`; its messages are numbered from 1 in each connection.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.exceptions import PayloadTooBig
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from penstock.collect.listen import AcknowledgingSource, SourceServer, allowed_origins, endpoint
from penstock.core.contracts import Intake, ResumeState
from penstock.core.errors import Refused
from penstock.core.framing import Found, Framing, SenderKey
from penstock.core.record import MAX_NUMBER
from penstock.core.tcp import FAREWELL, SETTLE_TIMEOUT, Session
from penstock.web.requests import OriginCheck

_HANDSHAKE_WITHIN = 10.0
_MAX_HEAD = 64 << 10
_MAX_PONGS = 1_000
"""Responses to pings that wait because the sender does not read."""
_MAX_REASON = 120
"""Bytes of a reason in a close frame."""
_QUIET = logging.getLogger(f"{__name__}.connections")
_QUIET.setLevel(logging.CRITICAL)
"""The library logs each failed handshake: any client could fill the log."""


@dataclass(frozen=True)
class WebSocketServer(AcknowledgingSource):
    """Listens at `listen+ws://host:port/path`. A message beyond `max_size` becomes a dead letter without its payload.

    `named`: senders must have a name. Without one, repeated messages are stored twice.
    `largest_jump`: a sender is refused if its numbers continue further than this after its last one; 0: never, and not
    if the source is `shared` with other processes.
    `origins`: sites whose pages may send here; behind a proxy, also the host name that it forwards.
    """

    max_size: int = 1 << 20
    connections: int = 20_000
    origins: Sequence[str] | str = ()
    ping_every: timedelta = timedelta(seconds=20)
    pong_within: timedelta = timedelta(seconds=20)

    def __post_init__(self) -> None:
        endpoint(self.url, self.name)
        object.__setattr__(self, "origins", allowed_origins(self.origins))

    @property
    def numbered(self) -> str:
        # Also if they need no name: those with one number their messages.
        return "by its senders"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        with at.listen(self.name, self.shared) as listener:
            origin_check = OriginCheck(listener, at.host, origins=self.origins)
            async with _Server(self, resume, at.path, origin_check).serve(listener) as intakes:
                yield intakes


class _Messages:
    """The messages of a connection, as a framing. The protocol is that of the websockets library, without its I/O."""

    def __init__(self, max_size: int) -> None:
        self.protocol = ServerProtocol(max_size=max_size, logger=_QUIET)
        self.request: Request | None = None
        """The handshake, until it is answered."""
        self.pinged = False
        """Whether a ping was sent, and nothing was received since."""
        self.broken: str | None = None
        self._max_size = max_size
        self._head = 0
        self._message = bytearray()

    @property
    def held(self) -> int:
        return self._head + len(self._message) + len(self.protocol.reader.buffer)

    @property
    def midway(self) -> bool:
        return self.held > 0

    def push(self, data: bytes) -> list[Found]:
        found: list[Found] = []
        protocol, self.pinged = self.protocol, False
        protocol.receive_data(data)
        if protocol.state is State.CONNECTING:
            self._head += len(data)
        for event in protocol.events_received():
            if isinstance(event, Request):
                self.request, self._head = event, 0
            elif isinstance(event, Frame) and event.opcode in DATA_OPCODES:
                self._message += event.data
                if event.fin:
                    found.append((bytes(self._message), 0, None))
                    self._message.clear()
        if isinstance(protocol.parser_exc, PayloadTooBig):
            # The sender would repeat it: it becomes a dead letter, and the sender continues after it.
            found.append((b"", 0, f"it is larger than the {self._max_size} bytes that a message may have"))
        if protocol.eof_sent:
            self.broken = "the connection was closed"
        elif self._head > _MAX_HEAD:
            self.broken = "the handshake is too long"
        elif len(protocol.writes) > _MAX_PONGS:
            self.broken = "pings without end"
        return found

    def end(self) -> list[Found]:
        return []


class _Server(SourceServer):
    """The connections of an open source."""

    def __init__(self, source: WebSocketServer, resume: ResumeState, path: str, origin_check: OriginCheck) -> None:
        ping_every, pong_within = source.ping_every.total_seconds(), source.pong_within.total_seconds()
        super().__init__(source, resume, hello_within=_HANDSHAKE_WITHIN, stalled_after=ping_every)
        self._path, self._origin_check, self._pong_within = path, origin_check, pong_within

    def _framing(self) -> Framing:
        return _Messages(self._max_size)

    def _read_timeout(self, session: Session, hello: float) -> float | None:
        messages = _messages_of(session)
        if messages.protocol.state is State.CONNECTING:
            return max(0.0, hello)
        return self._pong_within if messages.pinged else self._stalled_after

    def _timed_out(self, session: Session) -> None:
        messages = _messages_of(session)
        if messages.protocol.state is State.CONNECTING:
            raise Refused("a connection", "the handshake did not arrive")
        if messages.pinged:
            raise Refused("a connection", "no response to a ping")
        messages.pinged = True
        messages.protocol.send_ping(b"")
        self.report(session)

    async def _parse(self, session: Session, data: bytes) -> list[Found]:
        messages = _messages_of(session)
        found = messages.push(data)
        self._limit_unfinished(session)
        if messages.request is not None:
            request, messages.request = messages.request, None
            await self._answer(session, messages.protocol, request)
        if messages.protocol.writes:
            self.report(session)
        return found

    async def _answer(self, session: Session, protocol: ServerProtocol, request: Request) -> None:
        refusal = self.refusal(request)
        protocol.send_response(protocol.accept(request) if refusal is None else protocol.reject(*refusal))
        if protocol.state is not State.OPEN:
            raise Refused("a connection", "the handshake was rejected")
        if (sender := _named(urlsplit(request.path).query)) is None:
            await self._send(session, after=0)
        else:
            await self._identify(session, *sender)

    def refusal(self, request: Request) -> tuple[HTTPStatus, str] | None:
        """Check a handshake: the status and the reason if it is rejected."""
        try:
            parts = urlsplit(request.path)
        except ValueError:
            return HTTPStatus.BAD_REQUEST, "Invalid address.\n"
        if parts.path != self._path:
            return HTTPStatus.NOT_FOUND, f"Unknown path; use {self._path}.\n"
        wrong = self._origin_check.refusal(request.headers.get_all("Host"), request.headers.get_all("Origin"))
        if wrong is not None:
            return HTTPStatus.FORBIDDEN, f"{wrong.location.capitalize()}: {wrong.error}.\n"
        try:
            if (sender := _named(parts.query)) is not None:
                self.resume_after(*sender)
            elif self._named:
                return HTTPStatus.BAD_REQUEST, f"Name the sender: {self._path}?sender=NAME&epoch=N.\n"
        except Refused as refused:
            return HTTPStatus.BAD_REQUEST, f"{refused.reason[0].upper()}{refused.reason[1:]}.\n"
        return None

    async def _send(self, session: Session, **message: object) -> None:
        protocol = _messages_of(session).protocol
        if protocol.state is State.OPEN:
            protocol.send_text(orjson.dumps(message))

    async def _report(self, session: Session) -> None:
        """Send what the protocol has to send. One task: a sender that does not read holds up only itself."""
        protocol = _messages_of(session).protocol
        try:
            with suppress(OSError):
                while True:
                    if session.reported < session.safe:
                        session.reported = session.safe
                        await self._send(session, safe=session.reported)
                    if not (data := b"".join(protocol.data_to_send())):
                        return
                    await session.connection.send(data)
        finally:
            session.reporting = None

    async def _reject(self, session: Session, why: str) -> None:
        protocol = _messages_of(session).protocol
        if protocol.state is State.OPEN:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_TIMEOUT):
                    await self._wait_until_safe(session)
            replaced = session.sender_key is not None and self.connected.get(session.sender_key) is not session
            temporary = session.connection.why is not None and not replaced
            code = CloseCode.TRY_AGAIN_LATER if temporary else CloseCode.POLICY_VIOLATION
            protocol.fail(code, why.encode()[:_MAX_REASON].decode(errors="ignore"))
        elif not protocol.eof_sent:
            status = HTTPStatus.REQUEST_TIMEOUT if session.connection.why is None else HTTPStatus.SERVICE_UNAVAILABLE
            protocol.send_response(protocol.reject(status, f"{why}\n"))
        if session.reporting is not None:
            await asyncio.wait([session.reporting], timeout=FAREWELL)
        if session.reporting is None:
            await session.connection.reject(b"".join(protocol.data_to_send()))


def _messages_of(session: Session) -> _Messages:
    assert isinstance(session.framing, _Messages)
    return session.framing


def _named(query: str) -> tuple[SenderKey, int] | None:
    """The sender, and the first number that it still has; None without a name. Raises Refused if they are invalid."""
    parameters = parse_qs(query, keep_blank_values=True)
    for parameter in parameters:
        if parameter not in ("sender", "epoch", "seq") or len(parameters[parameter]) > 1:
            raise Refused("a connection", "the address can have sender, epoch and seq, each once")
    if "sender" not in parameters:
        return None
    epoch, first = (_integer(parameters.get(name, [default])[0]) for name, default in (("epoch", ""), ("seq", "1")))
    if epoch is None:
        raise Refused("a connection", "the epoch is missing, a number that grows with each restart: …&epoch=1700000000")
    if not first:
        raise Refused("a connection", "messages are numbered from 1: …&seq=1")
    return (parameters["sender"][0], epoch), first


def _integer(text: str) -> int | None:
    usual = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if usual and int(text) <= MAX_NUMBER else None
