"""Senders that connect by WebSocket: each message is a record, and each sender is acknowledged which ones are durable.

A sender connects to `…?sender=NAME&epoch=N&seq=M`. The epoch is a number that grows with each restart of the sender. It
numbers its messages from 1 in each epoch; `seq` is the first one that it still first (default 1). It receives
`{"after": 41}` and sends what follows. Now and then it receives `{"safe": 45}`, and can delete the messages up to 45.
A sender without a name receives `{"after": 0}`; its messages are numbered from 1 in each connection.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from penstock.collect.listen import (
    Endpoint,
    IngestQueue,
    SenderStates,
    allowed_origins,
    duplicate_sender,
    endpoint,
    invalid_sender,
    last_number,
    listener_guarantee,
)
from penstock.collect.read_budget import BudgetedConnection, ReadBudget
from penstock.collect.websocket import received
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import LARGEST_JUMP, MAX_NUMBER, Origin
from penstock.web.requests import OriginCheck

log = logging.getLogger(__name__)

_STOP_TIMEOUT = 1.0
"""Seconds at a stop to send the last acknowledgements."""
_REJECTED = 100
"""How many connections above the limit are answered with 503. Others are closed at once."""
_QUIET = logging.getLogger(f"{__name__}.connections")
_QUIET.setLevel(logging.CRITICAL)
"""The library logs each failed handshake: any client could fill the log."""


@dataclass(frozen=True)
class WebSocketServer:
    """Listens at `listen+ws://host:port/path`. A message beyond `max_size` becomes a dead letter without its payload.

    `named`: senders must have a name. Without one, repeated messages are stored twice.
    `largest_jump`: a sender is refused if its numbers continue further than this after its last one; 0: never, and not
    if the source is `shared` with other processes.
    `origins`: sites whose pages may send here; behind a proxy, also the host name that it forwards.
    """

    url: str
    name: str
    named: bool = True
    origins: Sequence[str] | str = ()
    max_size: int = 1 << 20
    connections: int = 20_000
    largest_jump: int = LARGEST_JUMP
    shared: bool = False
    ping_every: timedelta = timedelta(seconds=20)
    pong_within: timedelta = timedelta(seconds=20)
    clock: Clock = field(default_factory=SystemClock)

    numbered: ClassVar[str] = "by its senders"

    def __post_init__(self) -> None:
        endpoint(self.url, self.name)
        object.__setattr__(self, "origins", allowed_origins(self.origins))

    @property
    def guarantee(self) -> Guarantee:
        return listener_guarantee(self.named, self.shared)[0]

    @property
    def description(self) -> str:
        return listener_guarantee(self.named, self.shared)[1]

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        with at.listen(self.name, self.shared) as listener:
            handler = _Server(self, at, resume, OriginCheck(listener, at.host, origins=self.origins))
            server = await serve(
                handler.attend,
                sock=listener,
                process_request=handler.answer,
                compression=None,
                max_size=self.max_size,
                # The read budget limits what connections hold.
                create_connection=handler.connection,  # type: ignore[arg-type]  # a factory
                max_queue=16,
                ping_interval=self.ping_every.total_seconds(),
                ping_timeout=self.pong_within.total_seconds(),
                close_timeout=1,
                server_header=None,
                logger=_QUIET,
            )
            try:
                async with aclosing(handler.queue.intakes()) as intakes:
                    yield intakes
            finally:
                try:
                    # Acknowledge what is durable, so that senders need not repeat it.
                    await handler.queue.close()
                    await handler.acknowledged()
                finally:
                    server.close()
                    await server.wait_closed()


@dataclass(frozen=True)
class _SenderEpoch:
    """An epoch of a sender."""

    sender: str
    epoch: int
    first: int = field(default=1, compare=False)
    """The first number that it still first."""


@dataclass(eq=False, slots=True)
class _Session:
    """A connection, and the last number that was received, is durable, and was acknowledged."""

    client: BudgetedConnection
    sender_epoch: _SenderEpoch | None
    last: int
    durable: int
    acknowledged: int
    acknowledging: "asyncio.Task[None] | None" = None
    failed: bool = False
    """A message was not stored: the sender must repeat it and all that follow."""


class _Server:
    """The connections of one opening, and the state of each sender."""

    def __init__(self, source: WebSocketServer, at: Endpoint, resume: ResumeState, origin_check: OriginCheck) -> None:
        self.queue = IngestQueue(source.name)
        self._source, self._endpoint, self._origin_check = source, at, origin_check
        self._senders = SenderStates(resume, 0 if source.shared else source.largest_jump)
        self._holding = ReadBudget(source.connections + _REJECTED)
        self._connected: dict[_SenderEpoch, _Session] = {}
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()

    def connection(self, *of_the_library: Any, **options: Any) -> BudgetedConnection:
        return BudgetedConnection(self._holding, *of_the_library, **options)

    def answer(self, client: ServerConnection, request: Request) -> Response | None:
        """Check the handshake. None accepts it."""
        try:
            parts = urlsplit(request.path)
        except ValueError:
            return client.respond(HTTPStatus.BAD_REQUEST, "Invalid address.\n")
        if parts.path != self._endpoint.path:
            return client.respond(HTTPStatus.NOT_FOUND, f"Unknown path; use {self._endpoint.path}.\n")
        refusal = self._origin_check.refusal(request.headers.get_all("Host"), request.headers.get_all("Origin"))
        if refusal is not None:
            return client.respond(HTTPStatus.FORBIDDEN, f"The header {refusal.header}: {refusal.why}.\n")
        if self._open >= self._source.connections:
            return client.respond(HTTPStatus.SERVICE_UNAVAILABLE, "Too many connections; try again later.\n")
        try:
            sender_epoch = _named(parts.query, self._source.name)
            self._after(sender_epoch)
        except Refused as refused:
            return client.respond(HTTPStatus.BAD_REQUEST, f"{refused.reason}.\n")
        if sender_epoch is None and self._source.named:
            return client.respond(
                HTTPStatus.BAD_REQUEST, f"Name the sender: {self._endpoint.path}?sender=NAME&epoch=N.\n"
            )
        return None

    async def attend(self, client: ServerConnection) -> None:
        assert isinstance(client, BudgetedConnection)
        assert client.request is not None
        sender_epoch = _named(urlsplit(client.request.path).query, self._source.name)
        after = self._after(sender_epoch)
        session = _Session(client, sender_epoch, after, after, after)
        self._open += 1
        client.accept()
        try:
            if sender_epoch is not None:
                if (before := self._connected.get(sender_epoch)) is not None:
                    # The sender reconnected before the lost connection was noticed.
                    before.client.reject(CloseCode.POLICY_VIOLATION, "the sender has another connection")
                    self._warn(duplicate_sender(sender_epoch.sender, sender_epoch.epoch))
                self._connected[sender_epoch] = session
            with suppress(ConnectionClosed):
                await client.send(orjson.dumps({"after": after}), text=True)
                await self._receive(session)
        finally:
            client.finish()
            self._open -= 1
            if sender_epoch is not None and self._connected.get(sender_epoch) is session:
                del self._connected[sender_epoch]

    def _warn(self, description: str) -> None:
        """Log each warning once: any client could fill the log."""
        if description not in self._logged and len(self._logged) < 100:
            self._logged.add(description)
            log.warning("%s: %s", self._source.name, description)

    def _after(self, sender_epoch: _SenderEpoch | None) -> int:
        if sender_epoch is None:
            return 0
        return self._senders.resume_after(sender_epoch.sender, sender_epoch.epoch, sender_epoch.first)

    async def _receive(self, session: _Session) -> None:
        while True:
            messages, closed = await received(session.client)
            if session.sender_epoch is not None and self._connected.get(session.sender_epoch) is not session:
                return
            too_large = None
            if closed is not None and closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
                # The sender would repeat it: it becomes a dead letter, and the sender continues after it.
                too_large = f"it is larger than the {self._source.max_size} bytes that a message may have"
            if messages or too_large:
                try:
                    safe = await self.queue.put(self._arrivals(session, messages, too_large))
                except Refused as refused:
                    session.client.reject(CloseCode.POLICY_VIOLATION, refused.reason)
                    return
                except Unavailable as error:
                    session.client.reject(CloseCode.TRY_AGAIN_LATER, error.reason)
                    return
                safe.add_done_callback(partial(self._settled, session, session.last))
                session.client.release(len(messages))
            if closed is not None:
                return

    def _arrivals(self, session: _Session, messages: Sequence[bytes], too_large: str | None) -> list[Arrival]:
        """The messages with their numbers, then one that is too large. Raises Refused beyond 64 bits."""
        first, session.last = session.last + 1, last_number(session.last, len(messages) + bool(too_large))
        if (sender_epoch := session.sender_epoch) is None:
            arrivals = [Arrival(message) for message in messages]
            return [*arrivals, Arrival(b"", refused=too_large)] if too_large else arrivals
        sender, epoch, now = sender_epoch.sender, sender_epoch.epoch, self._source.clock.now()
        arrivals = [Arrival(message, Origin(sender, epoch, seq, now)) for seq, message in enumerate(messages, first)]
        if too_large:
            arrivals.append(Arrival(b"", Origin(sender, epoch, session.last, now), refused=too_large))
        return arrivals

    def _settled(self, session: _Session, last: int, safe: "asyncio.Future[None]") -> None:
        if safe.cancelled() or safe.exception() is not None:
            session.failed = True
            session.client.reject(CloseCode.TRY_AGAIN_LATER, "the records were not stored")
            return
        if session.failed:
            return
        first, session.durable = session.durable + 1, last
        if (sender_epoch := session.sender_epoch) is not None:
            self._senders.acknowledge(sender_epoch.sender, sender_epoch.epoch, first, last)
        if session.acknowledging is None:
            session.acknowledging = asyncio.create_task(self._acknowledge(session))
            self._tasks.add(session.acknowledging)
            session.acknowledging.add_done_callback(self._tasks.discard)

    async def _acknowledge(self, session: _Session) -> None:
        """Send the last durable number. Records that become durable meanwhile are acknowledged together."""
        try:
            with suppress(ConnectionClosed):
                while session.acknowledged < session.durable:
                    session.acknowledged = session.durable
                    await session.client.send(orjson.dumps({"safe": session.acknowledged}), text=True)
        finally:
            session.acknowledging = None

    async def acknowledged(self) -> None:
        """Wait until those sender_epoch can be acknowledged have been, for a moment."""
        # What first become safe just now is about to be acknowledged.
        await asyncio.sleep(0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT)


def _named(query: str, source: str) -> _SenderEpoch | None:
    """The sender and its epoch; None without a name. Raises Refused if they are invalid."""
    parameters = parse_qs(query, keep_blank_values=True)
    for parameter in parameters:
        if parameter not in ("sender", "epoch", "seq") or len(parameters[parameter]) > 1:
            raise Refused("a connection", "The address can have sender, epoch and seq, each once")
    if "sender" not in parameters:
        return None
    sender = parameters["sender"][0]
    if (why := invalid_sender(sender, source)) is not None:
        raise Refused("a connection", why[0].upper() + why[1:])
    epoch, first = (_integer(parameters.get(name, [default])[0]) for name, default in (("epoch", ""), ("seq", "1")))
    if epoch is None:
        raise Refused("a connection", "The epoch is missing, a number that grows with each restart: …&epoch=1700000000")
    if not first:
        raise Refused("a connection", "Messages are numbered from 1: …&seq=1")
    return _SenderEpoch(sender, epoch, first)


def _integer(text: str) -> int | None:
    usual = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if usual and int(text) <= MAX_NUMBER else None
