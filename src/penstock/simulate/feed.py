"""The simulated feed, without I/O: which records are due, what a client gets after a resume, and the messages.

Record n (from 0) is due at start + n/rate. It belongs to sender n % senders, which numbers its records 1, 2, 3, …
A message is generated when a client is ready for it, so a slow client needs no memory.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import SenderNumbers
from penstock.core.errors import Misconfigured, Refused
from penstock.simulate.documents import Documents

PATH = "/rsvps"
END = b'{"end":true}'
SECOND = 1_000_000
RESUME_WITHIN = 10.0
BURST = 200  # records between two checks of the clock, so that heartbeats are sent during a long catch-up


@dataclass(frozen=True)
class Feed:
    """A feed of documents from several senders at a rate.

    The epoch is the start of the feed, in seconds since 1970. Restarted with the same epoch, a feed continues.
    """

    documents: Documents
    rate: float
    senders: int
    epoch: int
    count: int | None = None
    numbered: bool = True
    sender: str = "meetup"
    """The name of its senders, to which their number is added."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= SECOND:
            fix = "give more than 0, at most 1,000,000 a second"
            raise Misconfigured("the feed", f"its rate is {self.rate:g}", fix)
        if not 1 <= self.senders <= 10_000:
            raise Misconfigured("the feed", f"it has {self.senders} senders", "give 1 to 10,000")
        if self.count is not None and self.count < 0:
            raise Misconfigured("the feed", f"its count is {self.count}", "give 0 or more")

    def name(self, sender: int) -> str:
        return f"{self.sender}-{sender:02d}"

    def time_of(self, n: int) -> Micros:
        """When record n is due."""
        return self.epoch * SECOND + int(n * SECOND / self.rate)

    def due(self, now: Micros) -> int:
        """The number of records that are due."""
        n = max(0, int((now - self.epoch * SECOND) * self.rate / SECOND))
        # Rounding errors: `time_of` decides.
        while self.time_of(n) <= now:
            n += 1
        while n and self.time_of(n - 1) > now:
            n -= 1
        return n if self.count is None else min(n, self.count)

    def message(self, n: int) -> bytes:
        sender, number, time = n % self.senders, n // self.senders + 1, self.time_of(n)
        document = self.documents(sender, number, time)
        if not self.numbered:
            return document
        return b'%b%b"feed":{"sender":"%b","epoch":%d,"seq":%d,"time":%d}}' % (
            document[:-1],
            b"" if document == b"{}" else b",",
            self.name(sender).encode(),
            self.epoch,
            number,
            time,
        )

    def _numbers(self, n: int) -> list[int]:
        """The last number of each sender before record n."""
        rounds, rest = divmod(n, self.senders)
        return [rounds + (sender < rest) for sender in range(self.senders)]

    def heartbeats(self, n: int, now: Micros) -> bytes:
        """A message with the last number of each sender before record n."""
        beats = [
            {"sender": self.name(sender), "epoch": self.epoch, "seq": seq, "time": now}
            for sender, seq in enumerate(self._numbers(n))
        ]
        return orjson.dumps({"heartbeats": beats})

    def after(self, numbers: SenderNumbers, now: Micros) -> "Cursor":
        """A cursor for a client that has the records up to these numbers.

        Numbers of another epoch are ignored. A number that was not sent yet counts as the last one that was sent.
        """
        last = []
        for sender, sent in enumerate(self._numbers(self.due(now))):
            epoch, seq = numbers.get(self.name(sender), (self.epoch, 0))
            last.append(min(seq, sent) if epoch == self.epoch else 0)
        return Cursor(self, last)

    def from_now(self, now: Micros) -> "Cursor":
        """A cursor for a client that reads only new records."""
        return Cursor(self, [0] * self.senders, self.due(now))


class Cursor:
    """The position of a client: `n` is its next record. Records that it has already are skipped."""

    def __init__(self, feed: Feed, last: list[int], n: int | None = None) -> None:
        self._feed = feed
        self._last = last
        self.n = min(seq * feed.senders + sender for sender, seq in enumerate(last)) if n is None else n

    def take(self, now: Micros, most: int) -> Iterator[bytes]:
        """The next messages that are due, at most `most` records further."""
        until = min(self._feed.due(now), self.n + most)
        while self.n < until:
            n, self.n = self.n, self.n + 1
            if n // self._feed.senders >= self._last[n % self._feed.senders]:
                yield self._feed.message(n)

    @property
    def ended(self) -> bool:
        return self._feed.count is not None and self.n >= self._feed.count


def parse_resume(message: bytes) -> SenderNumbers:
    """Parse the first message of a client: `{"after": {"meetup-07": [epoch, number]}}`; Refused if it is invalid."""
    try:
        document = orjson.loads(message)
    except orjson.JSONDecodeError as error:
        raise Refused("a resume", "it is not JSON") from error
    after = document.get("after") if isinstance(document, Mapping) else None
    if not isinstance(after, Mapping):
        raise Refused("a resume", 'it has to be {"after": {sender: [epoch, number]}}')
    return {sender: _number(number) for sender, number in after.items()}


def _number(number: object) -> tuple[int, int]:
    match number:
        case [int(epoch), int(seq)] if seq >= 0 and not isinstance(epoch, bool) and not isinstance(seq, bool):
            return epoch, seq
    raise Refused("a resume", "the value of a sender has to be [epoch, number]")


@dataclass
class Serving:
    """A running feed: its address, the number of sent records, and its clients."""

    feed: Feed
    clock: Clock
    url: str = ""
    sent: int = 0
    clients: set[ServerConnection] = field(default_factory=set)

    async def handle(self, client: ServerConnection) -> None:
        self.clients.add(client)
        try:
            with suppress(ConnectionClosed):
                if (cursor := await self._start(client)) is not None:
                    await self._send(client, cursor)
        finally:
            self.clients.discard(client)

    async def _start(self, client: ServerConnection) -> Cursor | None:
        """Where the client starts; None if its resume message is invalid, and the connection is closed."""
        query = parse_qs(urlsplit(client.request.path).query, True) if client.request else {}
        if not self.feed.numbered or "resume" not in query:
            return self.feed.from_now(self.clock.now())
        try:
            async with asyncio.timeout(RESUME_WITHIN):
                numbers = parse_resume(await client.recv(decode=False))
            return self.feed.after(numbers, self.clock.now())
        except TimeoutError:
            reason = f"no resume within {RESUME_WITHIN:g} s"
        except Refused as refused:
            reason = str(refused)
        await client.close(CloseCode.POLICY_VIOLATION, reason)
        return None

    async def _send(self, client: ServerConnection, cursor: Cursor) -> None:
        """Send what is due, until the client closes the connection."""
        feed, beat = self.feed, self.clock.now()
        gone = asyncio.ensure_future(client.wait_closed())
        try:
            while not gone.done():
                now = self.clock.now()
                for message in cursor.take(now, BURST):
                    await client.send(message, text=True)
                    self.sent += 1
                # Heartbeats and the end are only sent with numbers.
                if cursor.ended or now >= beat + SECOND:
                    beat = now
                    if feed.numbered:
                        await client.send(feed.heartbeats(cursor.n, now), text=True)
                if cursor.ended:
                    if feed.numbered:
                        await client.send(END, text=True)
                    await gone
                else:
                    await asyncio.wait([gone], timeout=_pause(feed, cursor, beat, self.clock.now()))
        finally:
            gone.cancel()


def _pause(feed: Feed, cursor: Cursor, beat: Micros, now: Micros) -> float:
    """Seconds until the next message to this client; 0 while it catches up."""
    if cursor.n < feed.due(now):
        return 0
    wake = min(feed.time_of(cursor.n), beat + SECOND)
    # At least a millisecond: a timer for each record would be too expensive.
    return max(0.001, (wake - now) / SECOND)


@asynccontextmanager
async def serve(
    feed: Feed, host: str, port: int, clock: Clock | None = None, path: str = PATH
) -> AsyncIterator[Serving]:
    """Serve the feed at this path until the context is left; port 0 takes a free one."""
    serving = Serving(feed, clock or SystemClock())

    def answer(client: ServerConnection, request: Request) -> Response | None:
        requested = urlsplit(request.path).path
        if requested == "/":
            return client.respond(HTTPStatus.OK, f"A simulated feed. Connect by WebSocket to {path}.\n")
        return None if requested == path else client.respond(HTTPStatus.NOT_FOUND, f"There is only {path} here.\n")

    try:
        server = await listen(
            serving.handle, host, port, process_request=answer, compression=None, close_timeout=2, server_header=None
        )
    except OSError as error:
        problem = f"it cannot listen on {host}:{port}: {error.strerror}"
        raise Misconfigured("the feed", problem, "choose another port, or 0 for a free one") from error
    async with server:
        bound = server.sockets[0].getsockname()[1]
        serving.url = f"ws://{f'[{host}]' if ':' in host else host}:{bound}{path}"
        yield serving
