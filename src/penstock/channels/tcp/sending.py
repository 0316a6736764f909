"""The sender of tcp://: it sends unacknowledged batches again over the next connection."""

import asyncio
import threading
import uuid
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby

from penstock.channels.tcp import frames
from penstock.channels.tcp.frames import Acknowledged, Fault, Frame, HelloReply
from penstock.core.clock import Clock
from penstock.core.contracts import Sender
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.core.record import Record

SILENCE = 10.0
"""Seconds without a frame after which a receiver counts as down; it sends one every few seconds."""
_WINDOW = 4 << 20  # Unacknowledged bytes; then `send` waits.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


async def received(stream: StreamReader, within: float) -> Frame:
    """The next frame; its body within so many seconds. Refused if it is malformed."""
    kind, length = frames.head(await stream.readexactly(frames.HEAD))
    async with asyncio.timeout(within):
        body = await stream.readexactly(length)
    return frames.read(kind, body)


@asynccontextmanager
async def sending(
    host: str, port: int, where: str, give_up_after: float, clock: Clock, silence: float = SILENCE
) -> AsyncIterator["TcpSender"]:
    """A sender that connects when it has something to send, and again when the connection breaks."""
    sender = TcpSender()
    connector = _Connector(host, port, where, give_up_after, silence, clock, sender.window)
    running = asyncio.create_task(_run_to_end(connector))
    try:
        yield sender
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        # A task that never started has not closed the window.
        sender.window.close(Unavailable(where, "its sender was closed"))


async def _run_to_end(connector: "_Connector") -> None:
    """Run the connection; at its end, fail all waiting calls."""
    why = "its sender was closed"
    try:
        await connector.run()
    except Exception as error:
        why = f"its sender has failed: {error!r}"
        raise
    finally:
        connector.window.close(Unavailable(connector.where, why))


class TcpSender:
    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self.window = Window()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """As `Sender.send`. If a record is too large, none is sent."""
        bodies = list(frames.packed(channel, records))
        if not bodies:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Otherwise, two calls that wait for room could overtake each other.
        try:
            async with self._order:
                for body in bodies:
                    await self.window.room(done)
                    if done.done():
                        break
                    self.window.add(channel, body, done, last=body is bodies[-1])
            await done
        finally:
            done.cancel()  # A result that comes later is ignored.


@dataclass(frozen=True, slots=True)
class _Waiting:
    channel: str
    frame: bytes
    done: "asyncio.Future[None]"
    last: bool


class Window:
    """The unacknowledged batches by their numbers, from `first` up to `next`; some may have been dropped."""

    def __init__(self) -> None:
        self._batches: dict[int, _Waiting] = {}
        self._bytes = 0
        self._closed: PenstockError | None = None
        self.first = self.next = 1
        self.filled = asyncio.Event()
        self._emptied = asyncio.Event()

    def add(self, channel: str, body: bytes, done: "asyncio.Future[None]", last: bool) -> None:
        """Add a batch; `done` is set when the last batch of its call is acknowledged."""
        if self._closed is not None:
            done.set_exception(self._closed)
            return
        frame = frames.batch(self.next, body)
        self._batches[self.next] = _Waiting(channel, frame, done, last)
        self._bytes += len(frame)
        self.next += 1
        self.filled.set()

    async def room(self, done: "asyncio.Future[None]") -> None:
        """Wait until there is room, or the call is done."""
        while self._bytes >= _WINDOW and not done.done():
            self._emptied.clear()
            await self._emptied.wait()

    def get(self, number: int) -> _Waiting | None:
        return self._batches.get(number)

    @property
    def empty(self) -> bool:
        return not self._batches

    def acknowledged(self, number: int) -> None:
        """Acknowledge all batches up to this one."""
        while self.first <= number and self.first < self.next:
            if self.first in self._batches:
                one = self._pop(self.first)
                if one.last and not one.done.done():
                    one.done.set_result(None)
            self.first += 1

    def drop(self, number: int, why: PenstockError) -> None:
        """Fail a batch."""
        one = self._pop(number)
        if not one.done.done():
            one.done.set_exception(why)

    def give_up(self, why: PenstockError) -> None:
        """Fail all batches."""
        for number in list(self._batches):
            self.drop(number, why)

    def close(self, why: PenstockError) -> None:
        """Fail all batches, and accept no more."""
        self._closed = self._closed or why
        self.give_up(self._closed)

    def _pop(self, number: int) -> _Waiting:
        one = self._batches.pop(number)
        self._bytes -= len(one.frame)
        self._emptied.set()
        return one


class _Connector:
    """Connects again and again while there is something to send."""

    def __init__(
        self, host: str, port: int, where: str, timeout: float, silence: float, clock: Clock, window: Window
    ) -> None:
        self._host, self._port, self.where = host, port, where
        self._timeout, self._silence, self._clock, self.window = timeout, silence, clock, window
        self._identity = uuid.uuid4().bytes

    async def run(self) -> None:
        pause, since = _FIRST_PAUSE, None
        while True:
            while self.window.empty:
                self.window.filled.clear()
                await self.window.filled.wait()
            since = self._clock.elapsed() if since is None else since
            try:
                async with self._connected() as (stream, out):
                    hello_reply = await self._greet(stream, out)
                    pause, since = _FIRST_PAUSE, None
                    await self._exchange(stream, out, hello_reply)
            except (OSError, EOFError, Refused) as error:
                lost = self._clock.elapsed()
                since = lost if since is None else since
                if lost - since >= self._timeout:
                    why = f"no reader for {self._timeout:g} s: {_reason(error)}"
                    self.window.give_up(Unavailable(self.where, why))
                    pause, since = _FIRST_PAUSE, None
                    continue
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except Unavailable as error:
                self.window.give_up(error)
                since = None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
        async with asyncio.timeout(self._silence):
            stream, out = await asyncio.open_connection(self._host, self._port)
        try:
            yield stream, out
        finally:
            out.transport.abort()

    async def _greet(self, stream: StreamReader, out: StreamWriter) -> HelloReply:
        out.write(frames.hello(self._identity))
        answer = await self._answer(stream)
        if not isinstance(answer, HelloReply):
            raise Refused("an answer", "it is not a welcome")
        self.window.acknowledged(answer.acknowledged)
        return answer

    async def _exchange(self, stream: StreamReader, out: StreamWriter, hello_reply: HelloReply) -> None:
        """Send batches and read acknowledgements until the connection breaks."""
        tasks = {
            asyncio.create_task(self._send_batches(out, hello_reply)),
            asyncio.create_task(self._read_answers(stream)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _send_batches(self, out: StreamWriter, hello_reply: HelloReply) -> None:
        number = self.window.first
        while True:
            while number < self.window.next:
                batch = self.window.get(number)
                if batch is not None and batch.channel in hello_reply.channels:
                    out.write(batch.frame)
                    await out.drain()
                elif batch is not None:
                    read = ", ".join(hello_reply.channels)
                    why = f'channel "{batch.channel}" is not read there, only {read}'
                    self.window.drop(number, Unavailable(self.where, why))
                number += 1
            self.window.filled.clear()
            await self.window.filled.wait()

    async def _read_answers(self, stream: StreamReader) -> None:
        while True:
            answer = await self._answer(stream)
            if not isinstance(answer, Acknowledged):
                raise Refused("an answer", "it is not an acknowledgement")
            self.window.acknowledged(answer.number)

    async def _answer(self, stream: StreamReader) -> Frame:
        async with asyncio.timeout(self._silence):
            answer = await received(stream, self._silence)
        if isinstance(answer, Fault):
            raise Unavailable(self.where, answer.description)
        return answer


def _reason(error: Exception) -> str:
    match error:
        case Refused():
            return error.reason
        case TimeoutError():
            return "it does not answer"
        case ConnectionRefusedError():
            return "connection refused"
        case EOFError():
            return "it closed the connection"
        case _:
            return getattr(error, "strerror", None) or str(error)


# --- figures

_MOST = 10_000
_AT_THE_END = 2.0


@contextmanager
def posting(
    sender: Callable[[], AbstractAsyncContextManager[Sender]],
) -> Iterator[Callable[[str, bytes, bytes], None]]:
    poster = _Poster(sender)
    thread = threading.Thread(target=lambda: asyncio.run(poster.run()), name="tcp-poster", daemon=True)
    thread.start()
    poster.started.wait()
    try:
        yield poster.post
    finally:
        poster.close()
        thread.join()


class _Poster:
    def __init__(self, sender: Callable[[], AbstractAsyncContextManager[Sender]]) -> None:
        self._sender = sender
        self._posts: deque[tuple[str, Record]] = deque(maxlen=_MOST)  # The newest figures replace the oldest.
        self._more, self._closing = asyncio.Event(), asyncio.Event()
        self.started = threading.Event()

    def post(self, channel: str, key: bytes, value: bytes) -> None:
        self._posts.append((channel, Record(value, key=key)))
        self._loop.call_soon_threadsafe(self._more.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.started.set()
        async with self._sender() as sender:
            sending_task = asyncio.create_task(self._go(sender))
            await self._closing.wait()
            self._more.set()
            # The rest is cancelled.
            with suppress(TimeoutError):
                await asyncio.wait_for(sending_task, _AT_THE_END)

    async def _go(self, sender: Sender) -> None:
        while self._posts or not self._closing.is_set():
            self._more.clear()
            some = [self._posts.popleft() for _ in range(len(self._posts))]
            for channel, group in groupby(some, lambda post: post[0]):
                with suppress(Unavailable, Refused):
                    await sender.send(channel, [record for _, record in group])
            if not self._posts and not self._closing.is_set():
                await self._more.wait()
