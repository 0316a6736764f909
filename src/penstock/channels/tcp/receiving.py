"""The reader of tcp://: a server in its own thread, and a bounded queue that the reader empties."""

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
"""Connected senders. With the limit of a frame, this limits the memory that unknown peers can use."""
_BEAT = SILENCE / 5
_HELLO, _WHOLE = 10.0, 30.0  # Seconds for the first frame of a sender, and for the rest of a frame.
_REMEMBERED = 10_000  # Senders that are remembered after they have disconnected.
_FAREWELL = 1.0

ROOM = 16 << 20
"""Bytes in the queue at most, or one larger batch."""
_RECORD, _HEADER = 400, 200  # Their overhead in memory, about.


class Inbox:
    """The accepted entries of several channels, in order: one thread fills it, another one empties it. No I/O."""

    def __init__(self, channels: Iterable[str], clock: Clock, room: int = ROOM) -> None:
        self._clock = clock
        self._room = room
        self._changed = threading.Condition()
        self._batches: deque[tuple[deque[Entry], int]] = deque()
        self._held = 0
        self._end = dict.fromkeys(channels, 0)
        self._next = dict(self._end)
        self._filled: float | None = None  # Since then it has not been empty.
        self._failure: BaseException | None = None
        self.on_room: Callable[[], None] = lambda: None
        """Called by the reading thread when there may be room again."""

    @property
    def channels(self) -> tuple[str, ...]:
        return tuple(self._end)

    def put(self, batch: Batch) -> bool:
        """Add a batch; False if there is no room for it now."""
        cost = sum(_cost(*record) for record in batch.records)
        with self._changed:
            if self._held and self._held + cost > self._room:
                return False
            if not batch.records:
                return True
            now, start = self._clock.now(), self._end[batch.channel]
            entries = deque(
                Entry(batch.channel, 0, start + location, now, key, value, headers)
                for location, (key, value, headers) in enumerate(batch.records)
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
            self.on_room()
        return found

    def fail(self, error: BaseException) -> None:
        """Make `take` raise this error once the queue is empty."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def next(self, channel: str) -> int:
        """The offset of the next entry."""
        with self._changed:
            return self._next[channel]

    def left(self) -> int:
        """The number of entries in the queue."""
        with self._changed:
            return sum(self._end.values()) - sum(self._next.values())

    def age(self) -> float:
        """For how many seconds the queue has not been empty."""
        with self._changed:
            return 0.0 if self._filled is None else self._clock.elapsed() - self._filled


def _cost(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    overhead = sum(_HEADER + len(name) + len(header) for name, header in headers)
    return _RECORD + len(key or b"") + len(value or b"") + overhead


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
    remembered: int = _REMEMBERED,
) -> Iterator[None]:
    """Fill the inbox while the block runs. Misconfigured if the address cannot be used."""
    server = _Server(_bound(host, port, where), inbox, connections, beat, remembered)
    thread = threading.Thread(target=server.run, name="tcp-reader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
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


@dataclass
class _Peer:
    """A sender, and the number of its last accepted batch."""

    acknowledged: int = 0
    connections: int = 0


class _Server:
    def __init__(self, bound: socket.socket, inbox: Inbox, connections: int, beat: float, remembered: int) -> None:
        self._bound, self._inbox, self._most, self._every, self._known = bound, inbox, connections, beat, remembered
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._writers: dict[StreamWriter, _Peer] = {}
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
        self._set(self._stop)

    def _set(self, event: asyncio.Event) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(event.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox.on_room = lambda: self._set(self._room)
        self._started.set()
        server = await asyncio.start_server(self._serve, sock=self._bound)
        beats = asyncio.create_task(self._beat())
        await self._stop.wait()
        server.close()
        beats.cancel()
        for out in self._writers:
            out.transport.abort()

    async def _beat(self) -> None:
        """Repeat the acknowledgement to each sender, so that it does not count us as dead while the inbox is full."""
        while True:
            await asyncio.sleep(self._every)
            for out, peer in self._writers.items():
                # Not to a sender that does not read.
                if not out.is_closing() and out.transport.get_write_buffer_size() == 0:
                    out.write(frames.acknowledged(peer.acknowledged))

    async def _serve(self, stream: StreamReader, out: StreamWriter) -> None:
        self._connections += 1
        try:
            # An error ends only this connection; it is cancelled with the server.
            with suppress(OSError, EOFError, asyncio.CancelledError):
                await self._receive(stream, out)
        finally:
            self._connections -= 1
            self._writers.pop(out, None)
            out.transport.abort()

    async def _receive(self, stream: StreamReader, out: StreamWriter) -> None:
        _tune(out)
        try:
            if self._connections > self._most:
                raise Refused("a connection", f"the limit of {self._most} connected senders is reached")
            async with self._identified(stream) as peer:
                out.write(frames.hello_reply(peer.acknowledged, self._inbox.channels))
                self._writers[out] = peer
                while True:
                    await self._take(peer, await received(stream, _WHOLE))
                    out.write(frames.acknowledged(peer.acknowledged))
                    await out.drain()
        except Refused as error:
            self._writers.pop(out, None)
            await _dismiss(stream, out, str(error))

    @asynccontextmanager
    async def _identified(self, stream: StreamReader) -> AsyncIterator[_Peer]:
        """Identify the sender. It is remembered while it is connected, and long after that."""
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
        """Forget the senders that disconnected first: the batches of a connected one would be accepted twice."""
        gone = (identity for identity, peer in self._peers.items() if not peer.connections)
        for identity in list(islice(gone, max(0, len(self._peers) - self._known))):
            del self._peers[identity]

    async def _take(self, peer: _Peer, frame: frames.Frame) -> None:
        """Return once a batch is in the inbox, or was before."""
        if not isinstance(frame, Batch):
            raise Refused("a frame", "a batch was expected")
        if frame.channel not in self._inbox.channels:
            read = ", ".join(self._inbox.channels)
            raise Refused("a batch", f'channel "{frame.channel}" is not read here, only {read}')
        while True:
            self._room.clear()
            # Checked after each pause: it may have arrived over another connection.
            if frame.number <= peer.acknowledged:
                return
            if self._inbox.put(frame):
                peer.acknowledged = frame.number
                return
            await self._room.wait()


async def _dismiss(stream: StreamReader, out: StreamWriter, description: str) -> None:
    """Send the reason, and end. The rest is read: a reset could overtake the reason."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL):
            out.write(frames.fault(description))
            await out.drain()
            out.write_eof()
            while await stream.read(1 << 16):
                pass


def _tune(out: StreamWriter) -> None:
    connection = out.get_extra_info("socket")
    # Send acknowledgements at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    # Break the connection if the other side vanishes.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3 * SILENCE * 1000))
