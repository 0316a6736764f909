"""The sender of tcp://: it sends unacknowledged records again over the next connection."""

import asyncio
import struct
import uuid
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from penstock.channels.common import pack, settle, unpack
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.core.framing import Lengths, framed, framed_message, parse_message
from penstock.core.record import Headers, Record

LIMIT = 4 << 20
"""Bytes of one record with its channel."""
SILENCE = 10.0
"""Seconds without a message after which a receiver counts as down; it sends one every few seconds."""
_WINDOW = 4 << 20  # Unacknowledged bytes; then `send` waits.
_PART = 256 << 10  # Larger calls are split.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_CHUNK = 64 << 10
_NAME = struct.Struct(">I")  # The length of the channel's name.
_NOTHING = framed("length", b"")
"""The number of a record that is not sent any more."""


def encode(channel: str, record: Record) -> bytes:
    """A record and its channel, behind their length; Refused if it is too large."""
    try:
        name = channel.encode()
    except UnicodeEncodeError as error:
        raise Refused("a record", "the name of its channel cannot be written as UTF-8") from error
    return framed("length", pack(record, LIMIT, "tcp://", before=_NAME.pack(len(name)) + name))


def decode(data: bytes) -> tuple[str, bytes | None, bytes | None, Headers]:
    """The channel, key, value and headers of a record; Refused if it is malformed."""
    if len(data) < _NAME.size:
        raise Refused("a record", "it is shorter than its contents")
    stop = _NAME.size + _NAME.unpack_from(data)[0]
    try:
        channel = data[_NAME.size : stop].decode()
    except UnicodeDecodeError as error:
        raise Refused("a record", "its channel is not UTF-8") from error
    key, value, headers, end = unpack(data, stop)
    if end != len(data):
        raise Refused("a record", f"{len(data) - end:,} bytes follow its contents")
    return channel, key, value, headers


@dataclass(slots=True)
class Part:
    """Some records of a call to `send`."""

    channel: str
    frames: list[bytes]
    """Those that are not acknowledged."""
    size: int
    done: "asyncio.Future[None]"
    last: bool = False
    """Whether `done` is set when these are acknowledged."""
    numbered: bool = False
    """Whether it was sent: then its records keep their numbers, also if the call has failed."""


def _parts(channel: str, records: Sequence[Record], done: "asyncio.Future[None]") -> Iterator[Part]:
    frames: list[bytes] = []
    size = 0
    for record in records:
        frame = encode(channel, record)
        if frames and size + len(frame) > _PART:
            yield Part(channel, frames, size, done)
            frames, size = [], 0
        frames.append(frame)
        size += len(frame)
    if frames:
        yield Part(channel, frames, size, done)


class Window:
    """The unacknowledged records, in order: those that were sent over this connection, and those that wait."""

    def __init__(self) -> None:
        self._sent: deque[Part] = deque()
        self._waiting: deque[Part] = deque()
        self._bytes = 0
        self._closed: PenstockError | None = None
        self.acknowledged = 0
        """The number of the last acknowledged record."""
        self.filled = asyncio.Event()
        self._emptied = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._sent and not self._waiting

    async def room(self, done: "asyncio.Future[None]") -> None:
        """Wait until there is room, or the call is done."""
        while self._bytes >= _WINDOW and not done.done():
            self._emptied.clear()
            await self._emptied.wait()

    def add(self, part: Part) -> None:
        if self._closed is not None:
            settle(part.done, self._closed)
            return
        self._waiting.append(part)
        self._bytes += part.size
        self.filled.set()

    def resume(self, number: int) -> None:
        """Begin a connection whose receiver has all records up to this one."""
        if number < self.acknowledged:
            raise Refused("an answer", f"it asks for record {number + 1}, which was acknowledged")
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self.acknowledge(number)

    def next(self, channels: Collection[str], where: str) -> bytes | None:
        """The next records to send; None if there are none. Those for other channels fail."""
        while self._waiting:
            part = self._waiting.popleft()
            if part.channel not in channels:
                read = ", ".join(channels)
                self._fail(part, Unavailable(where, f'channel "{part.channel}" is not read there, only {read}'))
                if not part.numbered:
                    continue
                part.frames = [_NOTHING] * len(part.frames)
            part.numbered = True
            self._sent.append(part)
            return b"".join(part.frames)
        return None

    def acknowledge(self, number: int) -> None:
        """Acknowledge all records up to this one; Refused if it was not sent."""
        while self.acknowledged < number:
            parts = self._sent or self._waiting
            if not parts or not parts[0].numbered:
                raise Refused("an answer", f"it acknowledges record {number}, which was not sent")
            part = parts[0]
            count = min(len(part.frames), number - self.acknowledged)
            del part.frames[:count]
            self.acknowledged += count
            if not part.frames:
                self._release(parts.popleft())
                if part.last:
                    settle(part.done, None)

    def give_up(self, why: PenstockError) -> None:
        """Fail all records. The numbers of those that were sent are not used again."""
        for part in (*self._sent, *self._waiting):
            self._fail(part, why)
            self.acknowledged += len(part.frames) if part.numbered else 0
        self._sent.clear()
        self._waiting.clear()

    def close(self, why: PenstockError) -> None:
        """Fail all records, and accept no more."""
        self._closed = why
        self.give_up(why)

    def _fail(self, part: Part, why: PenstockError) -> None:
        self._release(part)
        settle(part.done, why)

    def _release(self, part: Part) -> None:
        self._bytes -= part.size
        part.size = 0
        self._emptied.set()


class TcpSender:
    """Connects when it has something to send, and again when the connection breaks."""

    def __init__(
        self, host: str, port: int, where: str, timeout: float, clock: Clock, silence: float = SILENCE
    ) -> None:
        self._host, self._port, self._where = host, port, where
        self._timeout, self._clock, self._silence = timeout, clock, silence
        self._identity = uuid.uuid4().hex
        self._order = asyncio.Lock()
        self.window = Window()

    async def __aenter__(self) -> "TcpSender":
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._fail_waiting_calls)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    def _fail_waiting_calls(self, ended: "asyncio.Task[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        why = "its sender was closed" if error is None else f"its sender has failed: {error!r}"
        self.window.close(Unavailable(self._where, why))

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """As `Sender.send`. If a record is too large, none is sent."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts = list(_parts(channel, records, done))
        if not parts:
            return
        parts[-1].last = True
        # Otherwise, two calls that wait for room could overtake each other.
        try:
            async with self._order:
                for part in parts:
                    await self.window.room(done)
                    if done.done():
                        break
                    self.window.add(part)
            await done
        finally:
            done.cancel()  # A result that comes later is ignored.

    async def _run(self) -> None:
        """Send until this is cancelled."""
        pause, since = _FIRST_PAUSE, None
        while True:
            while self.window.empty:
                self.window.filled.clear()
                await self.window.filled.wait()
            since = self._clock.elapsed() if since is None else since
            try:
                async with self._connected() as (stream, out):
                    answers = self._answers(stream)
                    channels = await self._greet(answers, out)
                    pause, since = _FIRST_PAUSE, None
                    await self._exchange(answers, out, channels)
            except (OSError, EOFError, Refused) as error:
                lost = self._clock.elapsed()
                since = lost if since is None else since
                if lost - since >= self._timeout:
                    why = f"no reader for {self._timeout:g} s: {_reason(error)}"
                    self.window.give_up(Unavailable(self._where, why))
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

    async def _greet(self, answers: AsyncIterator[dict[str, object]], out: StreamWriter) -> list[str]:
        """The channels of the reader."""
        hello = {"sender": self._identity, "epoch": 1, "seq": self.window.acknowledged + 1}
        out.write(framed_message("length", hello))
        match await anext(answers):
            case {"after": int(after), "channels": list(channels)}:
                self.window.resume(after)
                return [str(channel) for channel in channels]
        raise Refused("an answer", "it is not that of a reader of channels")

    async def _exchange(
        self, answers: AsyncIterator[dict[str, object]], out: StreamWriter, channels: Collection[str]
    ) -> None:
        """Send records and read acknowledgements until the connection breaks."""
        tasks = {
            asyncio.create_task(self._send_all(out, channels)),
            asyncio.create_task(self._read_acknowledgements(answers)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _send_all(self, out: StreamWriter, channels: Collection[str]) -> None:
        while True:
            while (data := self.window.next(channels, self._where)) is not None:
                out.write(data)
                await out.drain()
            self.window.filled.clear()
            await self.window.filled.wait()

    async def _read_acknowledgements(self, answers: AsyncIterator[dict[str, object]]) -> None:
        async for answer in answers:
            match answer:
                case {"safe": int(number)}:
                    self.window.acknowledge(number)
                case _:
                    raise Refused("an answer", "it is not an acknowledgement")

    async def _answers(self, stream: StreamReader) -> AsyncIterator[dict[str, object]]:
        """The messages of the reader. Raises TimeoutError if there is none for too long, Unavailable for an error."""
        framing = Lengths(LIMIT)
        while True:
            async with asyncio.timeout(self._silence):
                while not (found := framing.push(await _read(stream))):
                    pass
            for one in found:
                answer = parse_message(one)
                if answer is None:
                    raise Refused("an answer", "it is not a message: this is another protocol")
                if "error" in answer:
                    raise Unavailable(self._where, str(answer["error"]))
                yield answer


async def _read(stream: StreamReader) -> bytes:
    if not (data := await stream.read(_CHUNK)):
        raise EOFError
    return data


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
