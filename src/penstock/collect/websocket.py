"""Records over a WebSocket, one in each message."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from penstock.contracts import Arrival, Guarantee, Intake, Taken
from penstock.errors import Misconfigured, Unavailable
from penstock.record import Heartbeat, Origin

MOST_MESSAGES = 500
MOST_BYTES = 1 << 20
"""An intake is closed by whichever of the two it reaches first."""
LONGEST_NAME = 200
LARGEST = 1 << 63


@dataclass(frozen=True)
class WebSocketSource:
    """A feed that is heard over a WebSocket.

    `numbered` is the field of a message that holds `{"sender", "epoch", "seq", "time"}` where the feed numbers its
    messages. Whatever cannot be read there is taken without an origin. Such a feed may also say `{"heartbeats": […]}`
    and `{"end": true}`, as docs/simulate.md describes. With `resume` the feed is told where to go on.
    """

    url: str
    name: str
    numbered: str | None = "feed"
    resume: bool = False
    max_size: int = 1 << 24
    open_within: timedelta = timedelta(seconds=10)
    ping_every: timedelta = timedelta(seconds=5)
    pong_within: timedelta = timedelta(seconds=10)
    proxy: str | None = None

    def __post_init__(self) -> None:
        if self.resume and self.numbered is None:
            raise Misconfigured(
                f"the source {self.name}",
                "it cannot resume without numbers",
                'say in which field they are: numbered="feed"',
            )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.resume else Guarantee.BEST_EFFORT

    @asynccontextmanager
    async def open(self, taken: Taken) -> AsyncIterator[AsyncIterator[Intake]]:
        connection = await self._connect()
        try:
            if self.resume:
                await connection.send(orjson.dumps({"after": taken}), text=True)
            async with aclosing(self._intakes(connection)) as intakes:
                yield intakes
        except ConnectionClosed as closed:
            raise self._lost(closed) from closed
        finally:
            await connection.close()

    async def _connect(self) -> ClientConnection:
        url = self.url
        if self.resume:
            url += ("&" if "?" in url else "?") + "resume"
        try:
            return await connect(
                url,
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
            raise Unavailable(self.url, str(error) or type(error).__name__) from error

    async def _intakes(self, connection: ClientConnection) -> AsyncGenerator[Intake, None]:
        while True:
            messages, closed = await _waiting(connection)
            arrivals: list[Arrival | Heartbeat] = []
            ended = False
            for message in messages:
                said = read(message, self.numbered)
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
            return Unavailable(self.url, f"it closed the connection: {closed.rcvd or 'without a reason'}")
        return Unavailable(self.url, f"the connection was given up: {closed.sent}")


async def _settled(error: Exception | None) -> None:
    """A WebSocket has no acknowledgement: what was not settled is asked for again at the next resume."""


async def _waiting(connection: ClientConnection) -> tuple[list[bytes], ConnectionClosed | None]:
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


class _End(tuple[Arrival | Heartbeat, ...]):
    """The feed's word that nothing follows."""


END = _End()


def read(message: bytes, numbered: str | None) -> Sequence[Arrival | Heartbeat]:
    """What a message is: an arrival, with its origin if that can be read; some heartbeats; or END. It never raises."""
    if numbered is None:
        return (Arrival(message),)
    try:
        document = orjson.loads(message)
    except orjson.JSONDecodeError:
        return (Arrival(message),)
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
            if 0 < len(sender) <= LONGEST_NAME and sender.isprintable():
                return sender, epoch, seq, time
    return None
