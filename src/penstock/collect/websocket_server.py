"""Senders that connect by WebSocket: each message is a record, and each sender hears how far it is safe.

A sender connects to `…?sender=NAME&epoch=N&seq=M`. The epoch is a number that grows with each of its lives; messages
are counted within a life, and `seq` is that of the first which it still has (1 if it is not said). It is told
`{"after": 41}` and sends what follows; now and then it is told `{"safe": 45}`, and may forget what came before. A
sender without a name is told `{"after": 0}`, and its messages are counted anew in each connection.
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

from penstock.collect.ingest import IngestQueue
from penstock.collect.listen import (
    MAX_NUMBER,
    Endpoint,
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
from penstock.core.record import LARGEST_JUMP, Origin
from penstock.web.origin_check import OriginCheck

log = logging.getLogger(__name__)

_LAST_WORDS = 1.0
"""Seconds that senders have at the end to hear that their records are safe."""
_LEAVING = 100
"""So many beyond those that may be connected are told that there are too many."""
_QUIET = logging.getLogger(f"{__name__}.connections")
_QUIET.setLevel(logging.CRITICAL)
"""The library tells of each handshake that fails, which any visitor can make happen."""


@dataclass(frozen=True)
class WebSocketServer:
    """Listens at `listen+ws://host:port/path`. A message beyond `max_size` becomes a dead letter without its payload.

    `named`: whether senders have to say who they are. Without a name, what a sender gives again is taken again.
    `largest_jump`: a sender that goes on further than this behind its last number is refused; 0: it is not, nor where
    the source is `shared` with other processes.
    `origins`: sites whose pages may send here; behind a proxy, also the name that it passes on.
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
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        with at.listen(self.name, self.shared) as listener:
            serving = _Serving(self, at, taken, OriginCheck(listener, at.host, origins=self.origins))
            server = await serve(
                serving.attend,
                sock=listener,
                process_request=serving.answer,
                compression=None,
                max_size=self.max_size,
                # What each holds is bounded by its weight, and for all of them together.
                create_connection=serving.connection,  # type: ignore[arg-type]  # whatever makes one will do
                max_queue=16,
                ping_interval=self.ping_every.total_seconds(),
                ping_timeout=self.pong_within.total_seconds(),
                close_timeout=1,
                server_header=None,
                logger=_QUIET,
            )
            try:
                async with aclosing(serving.queue.intakes()) as intakes:
                    yield intakes
            finally:
                try:
                    # Who is told that its records are safe need not send them again.
                    await serving.queue.close()
                    await serving.told()
                finally:
                    server.close()
                    await server.wait_closed()


@dataclass(frozen=True)
class _Who:
    """A life of a sender."""

    sender: str
    epoch: int
    has: int = field(default=1, compare=False)
    """The first number that it still has."""


@dataclass(eq=False, slots=True)
class _Visit:
    """A connection: how far its messages have come, are safe, and are said to be."""

    client: BudgetedConnection
    who: _Who | None
    last: int
    safe: int
    told: int
    telling: "asyncio.Task[None] | None" = None
    failed: bool = False
    """Something was not taken: what comes after it is not safe, either, and the sender has to give both again."""


class _Serving:
    """The connections of one opening, and how far each sender is."""

    def __init__(self, source: WebSocketServer, at: Endpoint, taken: ResumeState, origin_check: OriginCheck) -> None:
        self.queue = IngestQueue(source.name)
        self._source, self._door, self._origin_check = source, at, origin_check
        self._senders = SenderStates(taken, 0 if source.shared else source.largest_jump)
        self._holding = ReadBudget(source.connections + _LEAVING)
        self._connected: dict[_Who, _Visit] = {}
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()

    def connection(self, *of_the_library: Any, **options: Any) -> BudgetedConnection:
        return BudgetedConnection(self._holding, *of_the_library, **options)

    def answer(self, client: ServerConnection, request: Request) -> Response | None:
        """Before a connection becomes a WebSocket: None lets it."""
        try:
            parts = urlsplit(request.path)
        except ValueError:
            return client.respond(HTTPStatus.BAD_REQUEST, "This is no address.\n")
        if parts.path != self._door.path:
            return client.respond(HTTPStatus.NOT_FOUND, f"There is only {self._door.path} here.\n")
        refusal = self._origin_check.refusal(request.headers.get_all("Host"), request.headers.get_all("Origin"))
        if refusal is not None:
            return client.respond(HTTPStatus.FORBIDDEN, f"The header {refusal.header}: {refusal.why}.\n")
        if self._open >= self._source.connections:
            return client.respond(HTTPStatus.SERVICE_UNAVAILABLE, "There are too many connections; come back later.\n")
        try:
            who = _named(parts.query, self._source.name)
            self._after(who)
        except Refused as refused:
            return client.respond(HTTPStatus.BAD_REQUEST, f"{refused.reason}.\n")
        if who is None and self._source.named:
            return client.respond(HTTPStatus.BAD_REQUEST, f"Say who sends: {self._door.path}?sender=NAME&epoch=N.\n")
        return None

    async def attend(self, client: ServerConnection) -> None:
        assert isinstance(client, BudgetedConnection)
        assert client.request is not None
        who = _named(urlsplit(client.request.path).query, self._source.name)
        after = self._after(who)
        visit = _Visit(client, who, after, after, after)
        self._open += 1
        client.accept()
        try:
            if who is not None:
                if (before := self._connected.get(who)) is not None:
                    # It lost that connection, and came back before we noticed.
                    before.client.reject(CloseCode.POLICY_VIOLATION, "another connection of this sender")
                    self._warn(duplicate_sender(who.sender, who.epoch))
                self._connected[who] = visit
            with suppress(ConnectionClosed):
                await client.send(orjson.dumps({"after": after}), text=True)
                await self._receive(visit)
        finally:
            client.finish()
            self._open -= 1
            if who is not None and self._connected.get(who) is visit:
                del self._connected[who]

    def _warn(self, description: str) -> None:
        """Once for each kind of trouble: any visitor could fill the log."""
        if description not in self._logged and len(self._logged) < 100:
            self._logged.add(description)
            log.warning("%s: %s", self._source.name, description)

    def _after(self, who: _Who | None) -> int:
        if who is None:
            return 0
        return self._senders.resume_after(who.sender, who.epoch, who.has)

    async def _receive(self, visit: _Visit) -> None:
        while True:
            messages, closed = await received(visit.client)
            if visit.who is not None and self._connected.get(visit.who) is not visit:
                return
            too_large = None
            if closed is not None and closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
                # It would come again and again: its dead letter stands for it, and the sender goes on behind it.
                too_large = f"it is larger than the {self._source.max_size} bytes that a message may have"
            if messages or too_large:
                try:
                    safe = await self.queue.put(self._arrivals(visit, messages, too_large))
                except Refused as refused:
                    visit.client.reject(CloseCode.POLICY_VIOLATION, refused.reason)
                    return
                except Unavailable as error:
                    visit.client.reject(CloseCode.TRY_AGAIN_LATER, error.reason)
                    return
                safe.add_done_callback(partial(self._settled, visit, visit.last))
                visit.client.release(len(messages))
            if closed is not None:
                return

    def _arrivals(self, visit: _Visit, messages: Sequence[bytes], too_large: str | None) -> list[Arrival]:
        """Messages under their numbers, and the receipt of one behind them; Refused when they have no numbers."""
        first, visit.last = visit.last + 1, last_number(visit.last, len(messages) + bool(too_large))
        if (who := visit.who) is None:
            arrivals = [Arrival(message) for message in messages]
            return [*arrivals, Arrival(b"", refused=too_large)] if too_large else arrivals
        sender, epoch, now = who.sender, who.epoch, self._source.clock.now()
        arrivals = [Arrival(message, Origin(sender, epoch, seq, now)) for seq, message in enumerate(messages, first)]
        if too_large:
            arrivals.append(Arrival(b"", Origin(sender, epoch, visit.last, now), refused=too_large))
        return arrivals

    def _settled(self, visit: _Visit, last: int, safe: "asyncio.Future[None]") -> None:
        if safe.cancelled() or safe.exception() is not None:
            visit.failed = True
            visit.client.reject(CloseCode.TRY_AGAIN_LATER, "the records were not taken")
            return
        if visit.failed:
            return
        first, visit.safe = visit.safe + 1, last
        if (who := visit.who) is not None:
            self._senders.acknowledge(who.sender, who.epoch, first, last)
        if visit.telling is None:
            visit.telling = asyncio.create_task(self._tell(visit))
            self._tasks.add(visit.telling)
            visit.telling.add_done_callback(self._tasks.discard)

    async def _tell(self, visit: _Visit) -> None:
        """Tell a sender how far it is safe. What becomes safe meanwhile is told together."""
        try:
            with suppress(ConnectionClosed):
                while visit.told < visit.safe:
                    visit.told = visit.safe
                    await visit.client.send(orjson.dumps({"safe": visit.told}), text=True)
        finally:
            visit.telling = None

    async def told(self) -> None:
        """Wait until those who can be told have been, for a moment."""
        # What has become safe just now is about to be told.
        await asyncio.sleep(0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_WORDS)


def _named(query: str, source: str) -> _Who | None:
    """Who connects; None where it does not say. Refused when it does not say enough."""
    given = parse_qs(query, keep_blank_values=True)
    for parameter in given:
        if parameter not in ("sender", "epoch", "seq") or len(given[parameter]) > 1:
            raise Refused("a connection", "The address may tell sender, epoch and seq, each once")
    if "sender" not in given:
        return None
    sender = given["sender"][0]
    if (why := invalid_sender(sender, source)) is not None:
        raise Refused("a connection", why[0].upper() + why[1:])
    epoch, has = (_whole(given.get(name, [default])[0]) for name, default in (("epoch", ""), ("seq", "1")))
    if epoch is None:
        why = "Say in which life the sender is, by a number that grows: …&epoch=1700000000"
        raise Refused("a connection", why)
    if not has:
        raise Refused("a connection", "Messages are counted from 1: …&seq=1")
    return _Who(sender, epoch, has)


def _whole(text: str) -> int | None:
    usual = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if usual and int(text) <= MAX_NUMBER else None
