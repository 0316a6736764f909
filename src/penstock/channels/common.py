"""What binders have in common: errors, differences from a declaration, records as bytes, threads, and a poster."""

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from types import MappingProxyType
from typing import Any

from penstock.core.clock import duration
from penstock.core.contracts import Sender, Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted
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


def durations(topic: Topic, settings: Mapping[str, str]) -> dict[str, timedelta]:
    """The settings of a topic that are durations; `settings` has their defaults. Raises Misconfigured."""
    found = {}
    for setting, default in settings.items():
        try:
            found[setting] = duration(topic.config.get(setting, default))
        except ValueError as error:
            raise Misconfigured(f"channel {topic.name}, {setting}", str(error)) from error
    return found


def differences(
    here: Topic, wanted: Topic, who: str, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """A sentence for each difference, for binders with one copy of each record.

    `settings`: the binder's settings of compacted channels, durations with their defaults.
    """
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
    if here.compacted and wanted.compacted:
        declared = durations(wanted, settings)
        for setting, there in durations(here, settings).items():
            if there != declared[setting]:
                value = wanted.config.get(setting, "nothing")
                yield f"{channel} has {setting}={spelled(there)}, and {value} is declared"


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


# --- calls that wait


def settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    """Let a call that waits return, or raise this error; a call that waits no more is ignored."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# --- threads


@contextmanager
def in_thread(
    name: str, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
) -> Iterator[Callable[[asyncio.Event], None]]:
    """Run `main(stop)` in a thread with its own event loop. At the end of the block, set `stop` and wait for its end.

    Yields a function that sets an event of this loop.
    """
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def set_event(event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(event.set)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main(stop))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield set_event
    finally:
        set_event(stop)
        thread.join()


# --- figures

_MOST = 10_000
_AT_THE_END = 2.0
"""Seconds to send what waits at the end; the rest is dropped."""


@contextmanager
def posting(sender: Callable[[], AbstractAsyncContextManager[Sender]]) -> Iterator[Callable[[str, bytes, bytes], None]]:
    """`Channels.poster` by a sender in a thread of its own."""
    posts: deque[tuple[str, Record]] = deque(maxlen=_MOST)  # The newest figures replace the oldest.
    more = asyncio.Event()

    async def send_posts(opened: Sender, stop: asyncio.Event) -> None:
        while posts or not stop.is_set():
            more.clear()
            some = [posts.popleft() for _ in range(len(posts))]
            for channel, group in groupby(some, lambda post: post[0]):
                with suppress(PenstockError):
                    await opened.send(channel, [record for _, record in group])
            if not posts and not stop.is_set():
                await more.wait()

    async def run(stop: asyncio.Event) -> None:
        async with sender() as opened:
            sending = asyncio.create_task(send_posts(opened, stop))
            await stop.wait()
            more.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(sending, _AT_THE_END)

    with in_thread("poster", run) as set_event:

        def post(channel: str, key: bytes, value: bytes) -> None:
            posts.append((channel, Record(value, key=key)))
            set_event(more)

        yield post
