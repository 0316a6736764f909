"""What binders have in common: errors, differences from a declaration, the encoding of a record, and a poster."""

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import groupby

from penstock.core.contracts import Sender, Topic
from penstock.core.errors import PenstockError, Refused, Unaccounted
from penstock.core.record import Headers, Record


def overtaken(channel: str, partition: int, stands: int, low: int) -> Unaccounted:
    why = (
        f"partition {partition} begins at offset {low}, and the reader is at {stands}: "
        f"retention has deleted {low - stands} offsets that it had not read"
    )
    return Unaccounted(channel, (), why)


def another(channel: str) -> Unaccounted:
    return Unaccounted(channel, (), "it was removed while it was read, and created again")


def beyond(channel: str, partition: int, stands: int, end: int) -> Unaccounted:
    why = (
        f"partition {partition} ends at offset {end}, and the reader is at {stands}: it is another channel, or it has "
        "lost records; to read it from its beginning, remove the store or ledger that reads it"
    )
    return Unaccounted(channel, (), why)


def differences(here: Topic, wanted: Topic, who: str, settings: Collection[str] = ()) -> Iterator[str]:
    """A sentence for each difference, for binders with one copy of each record; `settings` are those of the binder."""
    channel = f"channel {here.name}"
    if wanted.replicas is not None and wanted.replicas > 1:
        yield f"{channel} has 1 copy, and {wanted.replicas} replicas are declared"
    if here.partitions > wanted.partitions:
        yield f"{channel} has {here.partitions} partitions, and {wanted.partitions} are declared"
    if here.compacted != wanted.compacted:
        yield f"{channel} is {_compacted(here)}, and {_compacted(wanted)} is declared"
    if here.retention != wanted.retention:
        yield f"{channel} keeps its records {_kept(here)}, and {_kept(wanted)} is declared"
    for word in wanted.config:
        if word not in settings:
            yield f"{channel} has no {word}, which is declared: {who} knows {' and '.join(settings) or 'no settings'}"


def spelled(span: timedelta) -> str:
    """A duration in its largest whole unit."""
    for unit, size in _UNITS.items():
        if span >= size and not span % size:
            return f"{span // size} {unit}"
    return f"{span.total_seconds():f} s"


_UNITS = {
    "days": timedelta(days=1),
    "hours": timedelta(hours=1),
    "minutes": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def _compacted(topic: Topic) -> str:
    return "compacted" if topic.compacted else "not compacted"


def _kept(topic: Topic) -> str:
    return "forever" if topic.retention is None else f"for {spelled(topic.retention)}"


# --- records as bytes

_LENGTHS = struct.Struct(">iiI")  # Of the key and the value, -1 for none; the number of headers.
_HEADER = struct.Struct(">II")


def pack(record: Record, limit: int, binder: str, before: bytes = b"") -> bytes:
    """A record as lengths, key, value and headers; `before` comes first.

    Refused if it is too large, or a header is not valid text.
    """
    key, value = record.key, record.value
    try:
        headers = [(name.encode(), content or b"") for name, content in record.headers()]
    except UnicodeEncodeError as error:
        raise Refused("a record", "a header cannot be written as UTF-8") from error
    parts = [
        before,
        _LENGTHS.pack(-1 if key is None else len(key), -1 if value is None else len(value), len(headers)),
        key or b"",
        value or b"",
    ]
    for name, content in headers:
        parts += (_HEADER.pack(len(name), len(content)), name, content)
    packed = b"".join(parts)
    if len(packed) > limit:
        raise Refused("a record", f"it has {len(packed):,} bytes; the limit of {binder} is {limit:,}")
    return packed


def unpack(packed: bytes, at: int = 0) -> tuple[bytes | None, bytes | None, Headers, int]:
    """Key, value and headers of the record at this position, and the position of the next one; Refused if malformed."""
    try:
        of_key, of_value, count = _LENGTHS.unpack_from(packed, at)
        at += _LENGTHS.size
        key = value = None
        if of_key >= 0:
            key, at = packed[at : at + of_key], at + of_key
        if of_value >= 0:
            value, at = packed[at : at + of_value], at + of_value
        headers = []
        for _ in range(count):
            of_name, of_content = _HEADER.unpack_from(packed, at)
            at += _HEADER.size
            name, at = packed[at : at + of_name].decode(), at + of_name
            headers.append((name, packed[at : at + of_content]))
            at += of_content
    except struct.error as error:
        raise Refused("a record", "it is shorter than its contents") from error
    except UnicodeDecodeError as error:
        raise Refused("a record", "the name of a header is not UTF-8") from error
    if at > len(packed):
        raise Refused("a record", "it is shorter than its contents")
    if min(of_key, of_value) < -1:
        raise Refused("a record", f"it has a field of {min(of_key, of_value)} bytes")
    return key, value, tuple(headers), at


def packed_key(packed: bytes) -> bytes | None:
    """The key of a packed record."""
    of_key, _, _ = _LENGTHS.unpack_from(packed)
    return None if of_key < 0 else packed[_LENGTHS.size : _LENGTHS.size + of_key]


# --- calls that wait


def settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    """Let a call that waits return, or raise this error; a call that waits no more is ignored."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# --- figures

_MOST = 10_000
_AT_THE_END = 2.0


@contextmanager
def posting(
    sender: Callable[[], AbstractAsyncContextManager[Sender]],
) -> Iterator[Callable[[str, bytes, bytes], None]]:
    """`Channels.poster` by a sender in a thread of its own."""
    poster = _Poster(sender)
    thread = threading.Thread(target=lambda: asyncio.run(poster.run()), name="poster", daemon=True)
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
                with suppress(PenstockError):
                    await sender.send(channel, [record for _, record in group])
            if not self._posts and not self._closing.is_set():
                await self._more.wait()
