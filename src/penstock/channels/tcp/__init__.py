"""Channels over TCP without a server: the reader listens at the address, and senders connect to it.

Such a channel keeps nothing. It has one reader at a time and one partition, whose offsets begin with each reader at 0.
While both processes run, each record arrives once and in order, even if connections break.
"""

import asyncio
import logging
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import NoReturn
from urllib.parse import urlsplit

from penstock.channels.common import in_thread, posting
from penstock.channels.tcp.sender import LIMIT, SILENCE, TcpSender, decode
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import (
    ChannelPartition,
    EnsureResult,
    Entry,
    Group,
    Member,
    Offsets,
    Promise,
    RebalanceListener,
    Topic,
)
from penstock.core.errors import Misconfigured, Refused
from penstock.core.framing import Found, SenderKey
from penstock.core.record import LONGEST_SENDER, Headers
from penstock.core.tcp import Session, TcpServer

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""Connected senders. With the limit of a record, this limits the memory that unknown peers can use."""
_BEAT = SILENCE / 5
_HELLO, _WHOLE = 10.0, 30.0  # Seconds for the first message of a sender, and without a byte of an unfinished record.
_REMEMBERED = 10_000  # Senders that are remembered after they have disconnected.

ROOM = 16 << 20
"""Bytes in the queue at most, or one larger record."""
_RECORD, _HEADER = 400, 200  # Their overhead in memory, about.

Decoded = tuple[str, bytes | None, bytes | None, Headers]
"""Channel, key, value, headers."""
_NOTHING_KEPT = timedelta(0)
_OTHERS = "use kafka://, redis:// or file://"


def at(address: str, _: object = None) -> "Tcp":
    """`tcp://host:port`; an IPv6 address in brackets."""
    fix = "write tcp://host:port, with a port from 1 to 65535"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # Raises for a name that cannot be looked up.
    except ValueError as error:
        raise Misconfigured(f"channels at {address}", str(error), fix) from error
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise Misconfigured(f"channels at tcp://{host}", "it has more than a host and a port", fix)
    if not host or not port:
        raise Misconfigured(f"channels at {address}", f"it has no {'port' if host else 'host'}", fix)
    return Tcp(host, port)


@dataclass(frozen=True, slots=True)
class Tcp:
    """A sender that reaches no reader for `timeout` seconds fails."""

    promise = Promise(
        durable=False,
        replay=False,
        description="a record is acknowledged once the reading process has it in memory; that process reads it once, "
        "and records that it has not handled when it ends are lost",
    )

    host: str
    port: int
    timeout: float = 30.0

    @property
    def where(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    # --- topics

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        return EnsureResult(differences=tuple(sentence for topic in topics for sentence in _differences(topic)))

    def names(self) -> list[str]:
        """None: only its reader and its senders know a channel."""
        return []

    def topic(self, channel: str) -> Topic:
        return Topic(channel, partitions=1, replicas=1, retention=_NOTHING_KEPT)

    def topic_id(self, channel: str) -> str:
        self._cannot(channel, "a channel has no identity")

    def remove(self, channel: str) -> None:
        self._cannot(channel, "there is nothing to remove")

    # --- in

    def sender(self) -> AbstractAsyncContextManager[TcpSender]:
        """A sender. `send` waits for a reader, and raises Unavailable if none appears."""
        return TcpSender(self.host, self.port, self.where, self.timeout, SystemClock())

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        return posting(self.sender)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator["Inbox"]:
        """Listen, and read what arrives from now on. Misconfigured if the address is in use."""
        for channel, positions in start.items():
            if any(positions.values()):
                self._cannot(channel, f"reading cannot begin at offset {max(positions.values())}, only at the end")
        inbox = Inbox((name for name in start if only is None or (name, 0) in only), SystemClock())
        with listening(self.host, self.port, self.where, inbox):
            yield inbox

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Nothing is kept, and each reader begins at offset 0."""
        return {0: (0, 0)}

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        self._cannot(channel, "reading cannot begin in the past, only at the end")

    # --- groups

    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> AbstractContextManager[Member]:
        self._cannot(", ".join(channels), f"it has one partition and one reader, and no groups ({group})")

    def groups(self) -> list[str]:
        self._cannot("groups", "there are none")

    def group(self, name: str) -> Group:
        self._cannot(f"group {name}", "there are no groups")

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self._cannot(f"group {group}", "there are no groups and no offsets to commit")

    def _cannot(self, what: str, why: str) -> NoReturn:
        raise Misconfigured(f"{what} at {self.where}", f"tcp:// keeps nothing: {why}", _OTHERS)


def _differences(topic: Topic) -> Iterator[str]:
    if topic.partitions > 1:
        yield f"channel {topic.name} has one partition over tcp://, and {topic.partitions} are declared"
    if topic.replicas is not None and topic.replicas > 1:
        yield f"channel {topic.name} has no replicas over tcp://, and {topic.replicas} are declared"
    if topic.retention is not None:
        yield f"channel {topic.name} keeps nothing over tcp://, and {topic.retention} is declared"
    if topic.compacted:
        yield f"channel {topic.name} keeps nothing over tcp://, and the last record of each key is declared to stay"
    if topic.config:
        yield f"channel {topic.name} has no settings over tcp://, and {', '.join(sorted(topic.config))} is declared"


# --- reading


class Inbox:
    """A reader of entries that were accepted, in order: one thread fills it, another one empties it. No I/O."""

    def __init__(self, channels: Iterable[str], clock: Clock, room: int = ROOM) -> None:
        self._clock = clock
        self._room = room
        self._changed = threading.Condition()
        self._entries: deque[tuple[Entry, int]] = deque()
        self._held = 0
        self._end = dict.fromkeys(channels, 0)
        self._next = dict(self._end)
        self.channels = tuple(self._end)
        self._filled: float | None = None  # Since then it has not been empty.
        self._failure: BaseException | None = None
        self.on_room: Callable[[], None] = lambda: None
        """Called by the reading thread when there may be room again."""

    def put(self, records: "deque[Decoded | None]") -> int:
        """Move records into the queue while there is room; how many. None stands for a record that was given up."""
        count = 0
        with self._changed:
            now = self._clock.now()
            while records:
                record = records[0]
                if record is not None:
                    channel, key, value, headers = record
                    cost = _cost(key, value, headers)
                    if self._held and self._held + cost > self._room:
                        break
                    self._entries.append((Entry(channel, 0, self._end[channel], now, key, value, headers), cost))
                    self._end[channel] += 1
                    self._held += cost
                records.popleft()
                count += 1
            if self._entries:
                if self._filled is None:
                    self._filled = self._clock.elapsed()
                self._changed.notify_all()
        return count

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        found: list[Entry] = []
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._failure, wait)
            if self._failure is not None and not self._entries:
                raise self._failure
            while self._entries and len(found) < most:
                entry, cost = self._entries.popleft()
                found.append(entry)
                self._held -= cost
                self._next[entry.channel] = entry.offset + 1
            if not self._entries:
                self._filled = None
        if found:
            self.on_room()
        return found

    def fail(self, error: BaseException) -> None:
        """Make `read` raise this error once the queue is empty."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def positions(self, channel: str) -> Offsets:
        with self._changed:
            return {0: self._next[channel]} if channel in self._next else {}

    def left(self) -> int:
        """The number of entries in the queue."""
        with self._changed:
            return len(self._entries)

    def age(self) -> float:
        """For how many seconds the queue has not been empty."""
        with self._changed:
            return 0.0 if self._filled is None else self._clock.elapsed() - self._filled


def _cost(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    overhead = sum(_HEADER + len(name) + len(header) for name, header in headers)
    return _RECORD + len(key or b"") + len(value or b"") + overhead


@contextmanager
def listening(
    host: str,
    port: int,
    where: str,
    inbox: Inbox,
    connections: int = CONNECTIONS,
    beat: float = _BEAT,
    remembered: int = _REMEMBERED,
) -> Iterator[None]:
    """Fill the inbox while the block runs. Misconfigured if the address cannot be used."""
    server = _Server(where, inbox, connections, beat, remembered)
    try:
        with (
            closing(_bound(host, port, where)) as bound,
            in_thread("tcp-reader", partial(server.run, bound)) as set_event,
        ):
            inbox.on_room = partial(set_event, server.room)
            yield
    finally:
        if left := inbox.left():
            log.warning("%s: the reader ended before it had read %d acknowledged records", where, left)


def _bound(host: str, port: int, where: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "stop the other reader, or use another address of this machine"
        raise Misconfigured(where, f"cannot listen there: {why}", fix) from error


class _Server(TcpServer):
    """The connections of a reader, and how far each sender is in the inbox. It runs in a thread of its own."""

    def __init__(self, where: str, inbox: Inbox, most: int, beat: float, remembered: int) -> None:
        super().__init__(
            where,
            max_size=LIMIT,
            connections=most,
            reading=most,
            hello_within=_HELLO,
            stalled_after=_WHOLE,
            answer_fields={"channels": inbox.channels},
        )
        self._inbox, self._beat, self._remembered = inbox, beat, remembered
        self._last: OrderedDict[SenderKey, int] = OrderedDict()
        """The number of the last record of each sender; the sender whose last record is oldest comes first."""
        self.room = asyncio.Event()

    async def run(self, bound: socket.socket, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.accept(bound)), tasks.create_task(self._repeat())]
                await stop.wait()
                for task in running:
                    task.cancel()
            # Without a reason: the senders wait for the next reader.
            await self.close(None)
        except BaseException as error:
            self._inbox.fail(error)
            raise

    async def _repeat(self) -> None:
        """Repeat acknowledgements, so that senders do not count this side as dead while the inbox is full."""
        while True:
            await asyncio.sleep(self._beat)
            self.report_again()

    def resume_after(self, sender_key: SenderKey, first: int) -> int:
        if not 0 < len(sender_key[0]) <= LONGEST_SENDER:
            raise Refused("a connection", f"the name of a sender has 1 to {LONGEST_SENDER} characters")
        last = self._last[sender_key] = max(self._last.get(sender_key, 0), first - 1)
        # The records of a connected sender would be accepted twice.
        gone = (one for one in self._last if one != sender_key and one not in self.connected)
        for one in list(islice(gone, max(0, len(self._last) - self._remembered))):
            del self._last[one]
        return last

    async def ingest(self, session: Session, found: Sequence[Found]) -> None:
        """Return once the records are in the inbox."""
        records: deque[Decoded | None] = deque()
        refused: Refused | None = None
        for value, _, why in found:
            try:
                records.append(self._decode(value, why))
            except Refused as error:
                refused = error
                break
        while records:
            self.room.clear()
            # Checked after each pause: another connection of this sender may have sent these records again.
            session.connection.require()
            if not (count := self._inbox.put(records)):
                await self.room.wait()
                continue
            session.last += count
            session.safe = session.last
            assert session.sender_key is not None  # Every sender identifies itself.
            self._last[session.sender_key] = session.last
            self._last.move_to_end(session.sender_key)
            self.report(session)
        if refused is not None:
            raise refused

    def _decode(self, value: bytes, why: str | None) -> "Decoded | None":
        if why is not None:
            raise Refused("a record", why)
        if not value:
            return None
        decoded = decode(value)
        if decoded[0] not in self._inbox.channels:
            read = ", ".join(self._inbox.channels)
            raise Refused("a record", f'channel "{decoded[0]}" is not read here, only {read}')
        return decoded
