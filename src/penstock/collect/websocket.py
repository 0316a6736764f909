"""Records from a WebSocket server, one per message."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import quote, unquote_plus

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from penstock.collect.dedup import scalar_at
from penstock.collect.registry import check_headers
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import LONGEST_SENDER, Heartbeat, Origin
from penstock.core.text import redact_address

MAX_NUMBER = 1 << 63
MAX_POSITION = 1_000
"""Characters of the position of a message."""
EXACT = 1 << 53
"""A larger float can stand for several integers."""

Notices = Sequence[Arrival | Heartbeat]


class _End(tuple[Arrival | Heartbeat, ...]):
    """The feed has ended."""


END = _End()


class MessageParser:
    """What a message of a feed is: an arrival, some heartbeats, nothing, or END. No I/O. It never raises."""

    def __init__(
        self,
        numbered: str | None,
        cursor: str | None = None,
        after: str | None = None,
        only: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> None:
        self._numbered = numbered
        self._cursors = None if cursor is None else MessageCursors(cursor, after)
        self._only, self._ignore = ([_condition(one) for one in some] for some in (only, ignore))
        self._opaque = numbered is None and cursor is None and not only and not ignore

    def __call__(self, message: bytes) -> Notices:
        if self._opaque:
            return (Arrival(message),)
        document = _parse(message)
        parsed: Notices = (Arrival(message),)
        if self._numbered is not None:
            parsed = _numbered(message, document, self._numbered)
        # A message that is not JSON may be a record: it is not filtered.
        if isinstance(document, dict) and not self._matches(document) and parsed and isinstance(parsed[0], Arrival):
            return ()
        return parsed if self._cursors is None else (Arrival(message, cursor=self._cursors.cursor(document)),)

    def _matches(self, document: object) -> bool:
        if self._only and not any(_text_at(document, steps) == value for steps, value in self._only):
            return False
        return not any(_text_at(document, steps) == value for steps, value in self._ignore)


class MessageCursors:
    """Makes cursors from the position in a message, and an index of the messages in a row with the same position.

    `1725911162329308/0`, `…/1`. A message without a position is counted after the one before it: `…/1+1`.
    """

    def __init__(self, path: str, after: str | None) -> None:
        self._steps = path.split(".")
        # The feed resumes with the first message of the position, or before it.
        self._position, self._index, self._extra = position_of(after), -1, 0

    def cursor(self, document: object) -> str:
        position = _text_at(document, self._steps)
        if not position or len(position) > MAX_POSITION:
            self._extra += 1
            return f"{self._position}/{self._index}+{self._extra}"
        self._index = self._index + 1 if position == self._position else 0
        self._position, self._extra = position, 0
        return f"{position}/{self._index}"


def position_of(cursor: str | None) -> str:
    """The position in a cursor; empty if it has none."""
    return (cursor or "").rpartition("/")[0]


def _condition(text: str) -> tuple[list[str], str]:
    path, _, value = text.partition("=")
    return path.strip().split("."), value.strip()


def _parse(message: bytes) -> object:
    try:
        return orjson.loads(message)
    except orjson.JSONDecodeError:
        return None


def _text_at(document: object, steps: Sequence[str]) -> str | None:
    """The string, number or boolean at a path, as text. None for other values, and for inexact numbers."""
    found = scalar_at(document, steps)
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, float) and not -EXACT < found < EXACT:
        return None
    return orjson.dumps(found).decode()


def _numbered(message: bytes, document: object, numbered: str) -> Notices:
    if not isinstance(document, dict):
        return (Arrival(message),)
    if (field := document.get(numbered)) is not None:
        numbers = _numbers(field)
        return (Arrival(message, Origin(*numbers) if numbers else None),)
    if len(document) > 1:
        return (Arrival(message),)
    if document.get("end") is True:
        return END
    beats = document.get("heartbeats", [document.get("heartbeat")])
    if isinstance(beats, list):
        parsed = [_numbers(beat) for beat in beats]
        if parsed and None not in parsed:
            return tuple(Heartbeat(*one) for one in parsed if one)
    return (Arrival(message),)


def _numbers(document: object) -> tuple[str, int, int, int] | None:
    """Sender, epoch, number and time; None if the name is not printable or a number is out of range."""
    match document:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(seq), "time": int(time)}:
            numbers = (epoch, seq, time)
            if any(isinstance(number, bool) or not 0 <= number < MAX_NUMBER for number in numbers):
                return None
            if 0 < len(sender) <= LONGEST_SENDER and sender.isprintable():
                return sender, epoch, seq, time
    return None


MAX_MESSAGES = 500
MAX_BYTES = 1 << 20
"""An intake is closed when it reaches one of the two."""
FEED = "feed"


@dataclass(frozen=True)
class WebSocketSource:
    """A feed that is read over a WebSocket.

    `numbered`: the field of a message with `{"sender", "epoch", "seq", "time"}`, where the feed numbers its messages. A
    message with an invalid field has no origin. Such a feed can also send `{"heartbeats": […]}` and `{"end": true}`, as
    docs/simulate.md describes. `resume`: ask the feed to resume after the last number.

    `cursor`: the field ("time_us", "meta.offset") with the position of a message, where the feed does not number but
    can resume from a position. The position is sent in `parameter` of the address. Where messages share a position, the
    feed must resume with the first of them; repeated ones are dropped.

    `first`: messages to send at each connection, such as subscriptions. `ignore` ("type=subscriptions"): JSON objects
    that match are not records; `only` ("type=match"): those that do not match are not. One match of several is enough.
    """

    url: str
    name: str
    numbered: str | None = FEED
    resume: bool = True
    cursor: str | None = None
    parameter: str = "cursor"
    first: str | Sequence[str] = ()
    only: str | Sequence[str] = ()
    ignore: str | Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    max_size: int = 1 << 24
    open_within: timedelta = timedelta(seconds=10)
    ping_every: timedelta = timedelta(seconds=5)
    pong_within: timedelta = timedelta(seconds=10)
    proxy: str | None = None

    def __post_init__(self) -> None:
        for option in ("first", "only", "ignore"):
            value = getattr(self, option)
            object.__setattr__(self, option, (value,) if isinstance(value, str) else tuple(value))
        if self.cursor is not None:
            self._check_cursor(self.cursor)
            object.__setattr__(self, "numbered", None)
        for one in (*self.only, *self.ignore):
            if not one.partition("=")[0].strip() or "=" not in one:
                self._misconfigured("only, ignore", f'"{one}" is not a condition', 'write it like "type=match"')
        check_headers(self.name, self.headers)
        # Without numbers or positions the feed cannot resume.
        object.__setattr__(self, "resume", self.resume and (self.numbered, self.cursor) != (None, None))

    def _check_cursor(self, cursor: str) -> None:
        if self.numbered not in (FEED, None):
            fix = "set numbered= if the feed numbers its messages, cursor= if it does not"
            self._misconfigured("cursor", f'it cannot be combined with numbered="{self.numbered}"', fix)
        if not all(cursor.split(".")):
            self._misconfigured("cursor", f'"{cursor}" is not a field', 'write it like "time_us" or "meta.offset"')
        if not self.parameter:
            self._misconfigured("parameter", "it is empty", 'set the name of the query parameter, such as "cursor"')

    def _misconfigured(self, option: str, problem: str, fix: str) -> None:
        raise Misconfigured(f"source {self.name}, {option}", problem, fix)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.resume else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if self.resume and self.cursor is not None:
            return "it resumes from the position of the last durable record, if the feed still has it"
        if self.resume:
            return "it resumes after the last durable number"
        return "records that it sends while the collector is not connected are lost"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        connection = await self._connect(resume)
        try:
            if self.resume and self.cursor is None:
                await connection.send(orjson.dumps({"after": resume.numbers}), text=True)
            for message in self.first:
                await connection.send(message, text=True)
            parser = MessageParser(self.numbered, self.cursor, resume.cursor, self.only, self.ignore)
            async with aclosing(self._intakes(connection, parser)) as intakes:
                yield intakes
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed
        finally:
            await connection.close()

    async def _connect(self, resume: ResumeState) -> ClientConnection:
        try:
            return await connect(
                self._address(resume),
                additional_headers=self.headers,
                compression=None,
                max_size=self.max_size,
                max_queue=64,
                open_timeout=self.open_within.total_seconds(),
                ping_interval=self.ping_every.total_seconds(),
                ping_timeout=self.pong_within.total_seconds(),
                close_timeout=0.5,
                proxy=self.proxy,
            )
        except (InvalidURI, UnicodeError) as error:
            raise Misconfigured(f"source {self.name}", str(error), 'write it like "ws://host:port/path"') from error
        except (OSError, InvalidHandshake) as error:
            raise Unavailable(self._service, str(error) or type(error).__name__) from error

    def _address(self, resume: ResumeState) -> str:
        if not self.resume:
            return self.url
        if self.cursor is None:
            return self.url + ("&" if "?" in self.url else "?") + "resume"
        position = position_of(resume.cursor)
        return with_parameter(self.url, self.parameter, position) if position else self.url

    async def _intakes(self, connection: ClientConnection, parse: MessageParser) -> AsyncGenerator[Intake, None]:
        while True:
            messages, closed = await received(connection)
            arrivals: list[Arrival | Heartbeat] = []
            ended = False
            for message in messages:
                parsed = parse(message)
                if parsed is END:
                    ended = True
                    break
                arrivals += parsed
            if arrivals:
                yield Intake(arrivals)
            if ended:
                return
            if closed is not None:
                raise self._lost(closed)

    def _lost(self, closed: ConnectionClosed) -> Unavailable:
        """The error, with the reason of the side that closed first. 1009 from our side: beyond max_size."""
        if closed.rcvd_then_sent or closed.sent is None:
            return Unavailable(self._service, f"it closed the connection: {closed.rcvd or 'no reason'}")
        return Unavailable(self._service, f"the connection was closed here: {closed.sent}")

    @property
    def _service(self) -> str:
        return redact_address(self.url)


async def received(connection: Connection) -> tuple[list[bytes], ConnectionClosed | None]:
    """Wait for a message. Return all that have arrived, and the error if the connection was closed."""
    messages: list[bytes] = []
    try:
        messages.append(await connection.recv(decode=False))
        size = len(messages[0])
        # A message that has arrived is received without a pause: the timeout expires only when none is left.
        async with asyncio.timeout(0):
            while len(messages) < MAX_MESSAGES and size < MAX_BYTES:
                messages.append(await connection.recv(decode=False))
                size += len(messages[-1])
    except TimeoutError:
        pass
    except ConnectionClosed as closed:
        return messages, closed
    return messages, None


def with_parameter(url: str, name: str, value: str) -> str:
    """The address with this query parameter set."""
    address, _, query = url.partition("?")
    others = [one for one in query.split("&") if one and unquote_plus(one.partition("=")[0]) != name]
    encoded = quote(value, safe="", errors="surrogatepass")
    return address + "?" + "&".join([*others, f"{quote(name, safe='')}={encoded}"])
