"""The reader's end: a server in a thread of its own, which takes batches as long as there is room for them."""

import asyncio
import logging
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

from penstock.channels.tcp import frames
from penstock.channels.tcp.frames import Batch, Hello
from penstock.channels.tcp.sending import SILENCE, received
from penstock.core.clock import Clock
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Headers

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""So many senders may be connected. With the limit of a frame, this bounds the memory that strangers can take."""
_BEAT = SILENCE / 5
_HELLO, _WHOLE = 10.0, 30.0  # Seconds until a sender has told who it is; until a frame that has begun is whole.
_KNOWN = 10_000  # So many senders are remembered after they have gone.
_LAST_WORDS = 1.0

ROOM = 16 << 20
"""So many bytes lie here at most, or one batch that is larger."""
_RECORD, _HEADER = 400, 200  # What they cost in memory beside their bytes, about.


class Inbox:
    """Entries of several channels in the order in which they came. Offsets count from zero, per channel."""

    def __init__(self, channels: Iterable[str], clock: Clock, room: int = ROOM) -> None:
        self._clock = clock
        self._room = room
        self._changed = threading.Condition()
        self._batches: deque[tuple[deque[Entry], int]] = deque()
        self._held = 0
        self._end = dict.fromkeys(channels, 0)
        self._next = dict(self._end)
        self._filled: float | None = None  # Since when it has not been empty.
        self._failure: BaseException | None = None
        self.made_room: Callable[[], None] = lambda: None
        """Called by the thread that reads, when there may be room again."""

    @property
    def channels(self) -> tuple[str, ...]:
        return tuple(self._end)

    def put(self, batch: Batch) -> bool:
        """Take a batch; False when there is no room for it now."""
        cost = sum(_cost(*record) for record in batch.records)
        with self._changed:
            if self._held and self._held + cost > self._room:
                return False
            if not batch.records:
                return True
            now, start = self._clock.now(), self._end[batch.channel]
            entries = deque(
                Entry(batch.channel, 0, start + place, now, key, value, headers)
                for place, (key, value, headers) in enumerate(batch.records)
            )
            self._end[batch.channel] += len(entries)
            self._batches.append((entries, cost))
            self._held += cost
            if self._filled is None:
                self._filled = self._clock.elapsed()
            self._changed.notify_all()
        return True

    def take(self, most: int, wait: float) -> list[Entry]:
        """Up to `most` entries, as soon as there is one; none after `wait` seconds."""
        found: list[Entry] = []
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._failure, wait)
            if self._failure is not None and not self._batches:
                raise self._failure
            while self._batches and len(found) < most:
                entries, cost = self._batches[0]
                while entries and len(found) < most:
                    found.append(entries.popleft())
                if not entries:
                    self._batches.popleft()
                    self._held -= cost
            if not self._batches:
                self._filled = None
            for entry in found:
                self._next[entry.channel] = entry.offset + 1
        if found:
            self.made_room()
        return found

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more, for this reason: whoever reads is told, once all is read."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def next(self, channel: str) -> int:
        """The offset of the next entry that is taken from here."""
        with self._changed:
            return self._next[channel]

    def left(self) -> int:
        """How many entries were taken in and not taken out."""
        with self._changed:
            return sum(self._end.values()) - sum(self._next.values())

    def age(self) -> float:
        """For how many seconds there has always been something left to read."""
        with self._changed:
            return 0.0 if self._filled is None else self._clock.elapsed() - self._filled


def _cost(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    told = sum(_HEADER + len(name) + len(header) for name, header in headers)
    return _RECORD + len(key or b"") + len(value or b"") + told


class TcpReader:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        return self._inbox.take(most, wait)

    def positions(self, channel: str) -> Offsets:
        return {0: self._inbox.next(channel)} if channel in self._inbox.channels else {}

    def age(self) -> float:
        return self._inbox.age()


@contextmanager
def listening(
    host: str,
    port: int,
    where: str,
    inbox: Inbox,
    connections: int = CONNECTIONS,
    beat: float = _BEAT,
    known: int = _KNOWN,
) -> Iterator[None]:
    """Take what comes into the inbox, for as long as the body runs. Misconfigured when nobody can listen there."""
    server = _Server(_bound(host, port, where), inbox, connections, beat, known)
    thread = threading.Thread(target=server.run, name="tcp-reader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
        if left := inbox.left():
            log.warning("%s: the reader ended, and %d records that it had acknowledged were never read", where, left)


def _bound(host: str, port: int, where: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "an address has one reader, on a machine that owns it: stop the other one, or choose another address"
        raise Misconfigured(where, f"nobody can listen there: {why}", fix) from error


@dataclass
class _Peer:
    """A sender, as long as it lives: the number of its last batch that was taken."""

    taken: int = 0
    connections: int = 0


class _Server:
    def __init__(self, bound: socket.socket, inbox: Inbox, connections: int, beat: float, known: int) -> None:
        self._bound, self._inbox, self._most, self._every, self._known = bound, inbox, connections, beat, known
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._talking: dict[StreamWriter, _Peer] = {}
        self._connections = 0
        self._room = asyncio.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._inbox.fail(error)
            raise
        finally:
            self._started.set()
            self._bound.close()

    def stop(self) -> None:
        self._started.wait()
        self._tell(self._stop)

    def _tell(self, event: asyncio.Event) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                self._loop.call_soon_threadsafe(event.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox.made_room = lambda: self._tell(self._room)
        self._started.set()
        server = await asyncio.start_server(self._attend, sock=self._bound)
        beats = asyncio.create_task(self._beat())
        await self._stop.wait()
        server.close()
        beats.cancel()
        for out in self._talking:
            out.transport.abort()

    async def _beat(self) -> None:
        """Tell each sender now and then that we are here, however long the inbox is full."""
        while True:
            await asyncio.sleep(self._every)
            for out, peer in self._talking.items():
                # One that does not listen gets nothing more until it does.
                if not out.is_closing() and out.transport.get_write_buffer_size() == 0:
                    out.write(frames.taken(peer.taken))

    async def _attend(self, stream: StreamReader, out: StreamWriter) -> None:
        self._connections += 1
        try:
            # Whatever becomes of one connection, the others do not notice; it is cancelled only with the server.
            with suppress(OSError, EOFError, asyncio.CancelledError):
                await self._hear(stream, out)
        finally:
            self._connections -= 1
            self._talking.pop(out, None)
            out.transport.abort()

    async def _hear(self, stream: StreamReader, out: StreamWriter) -> None:
        _tune(out)
        try:
            if self._connections > self._most:
                raise Refused("a connection", f"{self._most} senders may be connected, and they are")
            async with self._met(stream) as peer:
                out.write(frames.welcome(peer.taken, self._inbox.channels))
                self._talking[out] = peer
                while True:
                    await self._take(peer, await received(stream, _WHOLE))
                    out.write(frames.taken(peer.taken))
                    await out.drain()
        except Refused as error:
            self._talking.pop(out, None)
            await _dismiss(stream, out, str(error))

    @asynccontextmanager
    async def _met(self, stream: StreamReader) -> AsyncIterator[_Peer]:
        """The sender that says hello. It is remembered while it is connected, and for long after that."""
        async with asyncio.timeout(_HELLO):
            hello = await received(stream, _HELLO)
        if not isinstance(hello, Hello):
            raise Refused("a connection", "it does not begin with the identity of a sender")
        peer = self._peers.setdefault(hello.identity, _Peer())
        peer.connections += 1
        try:
            yield peer
        finally:
            peer.connections -= 1
            self._peers.move_to_end(hello.identity)
            self._forget()

    def _forget(self) -> None:
        """Those who have gone longest ago, but nobody who is connected: what it sends again would be taken twice."""
        gone = (identity for identity, peer in self._peers.items() if not peer.connections)
        for identity in list(islice(gone, max(0, len(self._peers) - self._known))):
            del self._peers[identity]

    async def _take(self, peer: _Peer, frame: frames.Frame) -> None:
        """Return once a batch lies in the inbox, or is known to have lain there."""
        if not isinstance(frame, Batch):
            raise Refused("a frame", "a batch is due")
        if frame.channel not in self._inbox.channels:
            read = ", ".join(self._inbox.channels)
            raise Refused("a batch", f'nobody reads the channel "{frame.channel}" here, only {read}')
        while True:
            self._room.clear()
            # Asked again after each pause: it may have come over another connection meanwhile.
            if frame.number <= peer.taken:
                return
            if self._inbox.put(frame):
                peer.taken = frame.number
                return
            await self._room.wait()


async def _dismiss(stream: StreamReader, out: StreamWriter, description: str) -> None:
    """Say why, and go. What is still under way is read off: a reset would overtake the words."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS):
            out.write(frames.fault(description))
            await out.drain()
            out.write_eof()
            while await stream.read(1 << 16):
                pass


def _tune(out: StreamWriter) -> None:
    connection = out.get_extra_info("socket")
    # An acknowledgement leaves at once, not with the next.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    # A connection breaks whose other side has vanished without a word.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3 * SILENCE * 1000))
