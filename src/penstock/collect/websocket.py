"""Records over a WebSocket, one in each message."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from urllib.parse import quote, unquote_plus

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import LONGEST_SENDER, Heartbeat, Origin
from penstock.core.text import redact_address

LARGEST = 1 << 63
LONGEST_PLACE = 1_000
"""So many characters may the text have by which a message tells its place."""
EXACT = 1 << 53
"""Beyond it, a number with a fraction may stand for its neighbours, too."""

Read = Callable[[bytes], Sequence[Arrival | Heartbeat]]


class _End(tuple[Arrival | Heartbeat, ...]):
    """The feed's word that nothing follows."""


END = _End()


def read(message: bytes, numbered: str | None) -> Sequence[Arrival | Heartbeat]:
    """What a message is: an arrival, with its origin if that can be read; some heartbeats; or END. It never raises."""
    if numbered is None:
        return (Arrival(message),)
    return _numbered(message, _loaded(message), numbered)


class Reading:
    """As `read`, for a feed whose messages tell their places, or of which not all are records. It never raises."""

    def __init__(
        self, numbered: str | None, cursor: str | None, after: str | None, only: Sequence[str], ignore: Sequence[str]
    ) -> None:
        self._numbered = numbered
        self._places = None if cursor is None else MessageCursors(cursor, after)
        self._only, self._ignore = ([_condition(one) for one in some] for some in (only, ignore))

    def __call__(self, message: bytes) -> Sequence[Arrival | Heartbeat]:
        document = _loaded(message)
        said: Sequence[Arrival | Heartbeat] = (Arrival(message),)
        if self._numbered is not None:
            said = _numbered(message, document, self._numbered)
        # What cannot be read may be a record: it is never passed over.
        if isinstance(document, dict) and not self._wanted(document) and said and isinstance(said[0], Arrival):
            return ()
        return said if self._places is None else (Arrival(message, cursor=self._places.cursor(document)),)

    def _wanted(self, document: object) -> bool:
        if self._only and not any(_told(document, steps) == value for steps, value in self._only):
            return False
        return not any(_told(document, steps) == value for steps, value in self._ignore)


class MessageCursors:
    """Makes cursors: the place that a message tells, and which of those it is that tell the same in a row.

    `1725911162329308/0`, `…/1`. A message that tells none is found behind the one before it: `…/1+1`.
    """

    def __init__(self, path: str, after: str | None) -> None:
        self._steps = path.split(".")
        # The feed begins with the first message of the place, or even before it.
        self._place, self._index, self._beside = place_of(after), -1, 0

    def cursor(self, document: object) -> str:
        place = _told(document, self._steps)
        if not place or len(place) > LONGEST_PLACE:
            self._beside += 1
            return f"{self._place}/{self._index}+{self._beside}"
        self._index = self._index + 1 if place == self._place else 0
        self._place, self._beside = place, 0
        return f"{place}/{self._index}"


def place_of(cursor: str | None) -> str:
    """What the feed is told to go on at; empty where there is nothing to tell."""
    return (cursor or "").rpartition("/")[0]


def _condition(text: str) -> tuple[list[str], str]:
    path, _, value = text.partition("=")
    return path.strip().split("."), value.strip()


def _loaded(message: bytes) -> object:
    try:
        return orjson.loads(message)
    except orjson.JSONDecodeError:
        return None


def _told(document: object, steps: Sequence[str]) -> str | None:
    """The text, number or boolean at a path, as text; None for all else, and for numbers that are not exact."""
    for step in steps:
        if not isinstance(document, dict):
            return None
        document = document.get(step)
    if isinstance(document, str):
        return document
    if isinstance(document, float) and not -EXACT < document < EXACT:
        return None
    return orjson.dumps(document).decode() if isinstance(document, int | float) else None


def _numbered(message: bytes, document: object, numbered: str) -> Sequence[Arrival | Heartbeat]:
    if not isinstance(document, dict):
        return (Arrival(message),)
    if (said := document.get(numbered)) is not None:
        place = _place(said)
        return (Arrival(message, Origin(*place) if place else None),)
    if len(document) > 1:
        return (Arrival(message),)
    if document.get("end") is True:
        return END
    beats = document.get("heartbeats", [document.get("heartbeat")])
    if isinstance(beats, list):
        places = [_place(beat) for beat in beats]
        if places and None not in places:
            return tuple(Heartbeat(*place) for place in places if place)
    return (Arrival(message),)


def _place(said: object) -> tuple[str, int, int, int] | None:
    """Sender, epoch, number and time, if they are sane: the name printable, the numbers neither negative nor absurd."""
    match said:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(seq), "time": int(time)}:
            numbers = (epoch, seq, time)
            if any(isinstance(number, bool) or not 0 <= number < LARGEST for number in numbers):
                return None
            if 0 < len(sender) <= LONGEST_SENDER and sender.isprintable():
                return sender, epoch, seq, time
    return None


MOST_MESSAGES = 500
MOST_BYTES = 1 << 20
"""An intake is closed by whichever of the two it reaches first."""
FEED = "feed"


@dataclass(frozen=True)
class WebSocketSource:
    """A feed that is heard over a WebSocket.

    `numbered` is the field of a message that holds `{"sender", "epoch", "seq", "time"}` where the feed numbers its
    messages. Whatever cannot be read there is taken without an origin. Such a feed may also say `{"heartbeats": […]}`
    and `{"end": true}`, as docs/simulate.md describes. With `resume` the feed is told where to go on.

    `cursor` is the field ("time_us", "meta.place") by which a message tells its place, where the feed does not number
    but can go on at a place: it is told in `parameter` of the address. Where messages share a place, the feed has to
    begin with the first of them; what comes again is passed over.

    `first` is what the feed has to be told at each connection, such as subscriptions. Of the messages that are JSON
    objects, those that match `ignore` ("type=subscriptions") are no records; with `only` ("type=match"), those that do
    not match it. Where there are several, one that matches is enough.
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
            said = getattr(self, option)
            object.__setattr__(self, option, (said,) if isinstance(said, str) else tuple(said))
        if self.cursor is not None:
            self._check_cursor(self.cursor)
            object.__setattr__(self, "numbered", None)
        for one in (*self.only, *self.ignore):
            if not one.partition("=")[0].strip() or "=" not in one:
                self._misconfigured(
                    "only, ignore", f'"{one}" tells no field and no value', 'write it like "type=match"'
                )
        for name, value in self.headers.items():
            if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or not re.fullmatch(r"[\t\x20-\x7e]*", value):
                self._misconfigured("headers", f"{name!r} cannot be sent", "a header is one line of ASCII")
        # Without numbers or places there is nothing to go on after.
        object.__setattr__(self, "resume", self.resume and (self.numbered, self.cursor) != (None, None))

    def _check_cursor(self, cursor: str) -> None:
        if self.numbered not in (FEED, None):
            fix = "say numbered where the feed numbers its messages, cursor where it does not"
            self._misconfigured("cursor", f'it is numbered by "{self.numbered}" already', fix)
        if not all(cursor.split(".")):
            self._misconfigured("cursor", f'"{cursor}" is no field', 'write it like "time_us" or "meta.place"')
        if not self.parameter:
            self._misconfigured("parameter", "it has no name", 'write the name that the feed knows, such as "cursor"')

    def _misconfigured(self, option: str, problem: str, fix: str) -> None:
        raise Misconfigured(f"source {self.name}, {option}", problem, fix)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.resume else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if self.resume and self.cursor is not None:
            return "it resumes at the last place that the channel holds, as far back as the feed keeps"
        if self.resume:
            return "it resumes after the last number that the channel holds"
        return "what it sends while nobody listens is unknown"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        connection = await self._connect(taken)
        try:
            if self.resume and self.cursor is None:
                await connection.send(orjson.dumps({"after": taken.numbers}), text=True)
            for message in self.first:
                await connection.send(message, text=True)
            async with aclosing(self._intakes(connection, self._reading(taken))) as intakes:
                yield intakes
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed
        finally:
            await connection.close()

    async def _connect(self, taken: ResumeState) -> ClientConnection:
        try:
            return await connect(
                self._address(taken),
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
            raise Misconfigured(f"the source {self.name}", str(error), 'write it like "ws://host:port/path"') from error
        except (OSError, InvalidHandshake) as error:
            raise Unavailable(self._who, str(error) or type(error).__name__) from error

    def _address(self, taken: ResumeState) -> str:
        if not self.resume:
            return self.url
        if self.cursor is None:
            return self.url + ("&" if "?" in self.url else "?") + "resume"
        place = place_of(taken.cursor)
        return with_parameter(self.url, self.parameter, place) if place else self.url

    def _reading(self, taken: ResumeState) -> Read:
        if self.cursor is None and not self.only and not self.ignore:
            return partial(read, numbered=self.numbered)
        return Reading(self.numbered, self.cursor, taken.cursor, self.only, self.ignore)

    async def _intakes(self, connection: ClientConnection, said_by: Read) -> AsyncGenerator[Intake, None]:
        while True:
            messages, closed = await received(connection)
            arrivals: list[Arrival | Heartbeat] = []
            ended = False
            for message in messages:
                said = said_by(message)
                if said is END:
                    ended = True
                    break
                arrivals += said
            if arrivals:
                yield Intake(arrivals, _settled)
            if ended:
                return
            if closed is not None:
                raise self._lost(closed)

    def _lost(self, closed: ConnectionClosed) -> Unavailable:
        """The reason, in the words of the side that closed: 1009, for instance, is ours for what is beyond max_size."""
        if closed.rcvd_then_sent or closed.sent is None:
            return Unavailable(self._who, f"it closed the connection: {closed.rcvd or 'without a reason'}")
        return Unavailable(self._who, f"the connection was given up: {closed.sent}")

    @property
    def _who(self) -> str:
        return redact_address(self.url)


async def _settled(error: Exception | None) -> None:
    """A WebSocket has no acknowledgement: what was not settled is asked for again at the next resume."""


async def received(connection: Connection) -> tuple[list[bytes], ConnectionClosed | None]:
    """Wait for a message; it and all others that are there already. With them, the error that ended the connection."""
    messages: list[bytes] = []
    try:
        messages.append(await connection.recv(decode=False))
        size = len(messages[0])
        # A message that is there is received without a pause, so this timeout strikes when the next has to be awaited.
        async with asyncio.timeout(0):
            while len(messages) < MOST_MESSAGES and size < MOST_BYTES:
                messages.append(await connection.recv(decode=False))
                size += len(messages[-1])
    except TimeoutError:
        pass
    except ConnectionClosed as closed:
        return messages, closed
    return messages, None


def with_parameter(url: str, name: str, value: str) -> str:
    """The address with this parameter, in the place of one of its name."""
    address, _, query = url.partition("?")
    others = [one for one in query.split("&") if one and unquote_plus(one.partition("=")[0]) != name]
    told = quote(value, safe="", errors="surrogatepass")
    return address + "?" + "&".join([*others, f"{quote(name, safe='')}={told}"])
