"""Records from a server that sends server-sent events, one per event.

`EventStream` parses as the HTML standard defines it, with two exceptions: data stay bytes, and an id that a header
cannot carry is ignored. Events after it are counted from the id before.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from urllib.parse import quote, unquote_to_bytes

import httpx

from penstock.collect.http_client import HttpClientSource, get, http_errors, refusal
from penstock.collect.registry import check_positive
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable

MESSAGE = "message"
"""The default event type."""
LONGEST_ID = 1_024
LONGEST_RETRY = 1 << 31
"""Milliseconds."""
FIRST_BYTES = 64 << 10
"""How much is kept of data that are too large."""

_BOM = b"\xef\xbb\xbf"
_NAME = 16
"""Bytes of a line beside its value: the known fields have shorter names."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Event:
    """`id`: the last one that was set; None before any. `index`: 0 for the event that set it, then counting.

    `size`: of the data. Beyond the limit, `data` are only the first bytes.
    """

    data: bytes
    type: str
    id: bytes | None
    index: int
    size: int


class EventStream:
    """The events of one connection. `last_id`: the id after which the server was get to resume.

    It holds about `max_size` bytes at most, beside the chunk that is fed.
    """

    def __init__(self, max_size: int, last_id: bytes | None = None) -> None:
        self.retry: int | None = None
        """Milliseconds to wait before the next connection, as the server requests."""
        self._max = max_size
        self._id, self._index = last_id, 0
        self._new_id: bytes | None = None
        self._head: bytes | None = b""
        self._after_return = False
        self._line = bytearray()
        self._beyond = 0
        self._reset()

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that are now complete."""
        if self._head is not None:
            chunk = self._head + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._head = chunk
                return []
            chunk, self._head = chunk.removeprefix(_BOM), None
        if not chunk:
            return []
        if self._after_return and chunk[0] == 0x0A:
            chunk = chunk[1:]
        # A line ends at a carriage return. A line feed after it, perhaps in the next chunk, belongs to it.
        self._after_return = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        found = []
        for part in ended:
            self._keep(part)
            line, beyond = bytes(self._line), self._beyond
            self._line.clear()
            self._beyond = 0
            if line:
                self._field(line, beyond)
            elif (event := self._dispatch()) is not None:
                found.append(event)
        self._keep(rest)
        return found

    def _keep(self, part: bytes) -> None:
        room = max(self._max, 2 * LONGEST_ID) + _NAME - len(self._line)
        self._line += part[:room]
        self._beyond += max(0, len(part) - room)

    def _field(self, line: bytes, beyond: int) -> None:
        """`beyond`: how many bytes of the line were not kept."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                room = self._max - self._size
                self._data += (value + b"\n")[: max(0, room + 1)]
                self._size += len(value) + beyond + 1
            case b"event":
                self._type = value
            case b"id" if beyond == 0:
                value = value.strip(b" \t")
                if len(value) <= LONGEST_ID and not _CONTROL.search(value):
                    self._new_id = value
            case b"retry" if beyond == 0 and value.isdigit():
                self.retry = min(int(value.lstrip(b"0")[:20] or b"0"), LONGEST_RETRY)

    def _dispatch(self) -> Event | None:
        new_id, self._new_id = self._new_id, None
        data, size, kind = self._data, self._size - 1, self._type
        self._reset()
        sets = new_id is not None and (new_id or None) != self._id
        if sets:
            self._id, self._index = new_id or None, 0
        if size < 0:
            return None
        if not sets:
            self._index += 1
        # The last line feed ends the data and does not belong to them.
        del data[size if size <= self._max else FIRST_BYTES :]
        type_ = kind.decode(errors="replace") if kind else MESSAGE
        return Event(bytes(data), type_, self._id, self._index, size)

    def _reset(self) -> None:
        self._data, self._size, self._type = bytearray(), 0, b""


_STREAM = "text/event-stream"


@dataclass(frozen=True)
class SseSource(HttpClientSource):
    """Reads `sse+http://…` or `sse+https://…`. The value of a record is the data of its event.

    `events`: the event types to accept; empty: all. An event beyond `max_size` becomes a dead letter with its first
    bytes. `resume`: ask the server to resume after the last id. Repeated events are recognized by the id and their
    count after it; after a crash, the last hundred. After `silent_after` without data or a comment, the connection
    counts as lost.
    """

    prefix: ClassVar[str] = "sse+"

    events: tuple[str, ...] = ()
    resume: bool = True
    silent_after: timedelta = timedelta(seconds=60)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "silent_after")
        if isinstance(self.events, str):
            raise Misconfigured(f"source {self.name}, events", "it is a string", f'write ["{self.events}"]')
        object.__setattr__(self, "events", tuple(self.events))

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.resume else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if self.resume:
            return "it resumes after the last id, if the server sends ids and still has the events after it"
        return "events that it sends while the collector is not connected are lost"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self._pauses.wait()
        to = self._target()
        silent_for = self.silent_after.total_seconds()
        after = last_id(resume.cursor) if self.resume else None
        headers = {b"accept": _STREAM.encode(), b"cache-control": b"no-store"}
        if after is not None:
            headers[b"last-event-id"] = after
        stream = EventStream(self.max_size, after)
        try:
            with http_errors(to, silent_for):
                async with (
                    self._client(silent_for) as client,
                    get(client, to, to.url, self.headers, headers) as response,
                ):
                    if (status := response.status_code) not in (200, 204):
                        raise refusal(to, response, self.clock)
                    if status == 200 and _content_type(response) != _STREAM:
                        raise Unavailable(to.display, f"the content type is {_content_type(response)!r}, not {_STREAM}")
                    chunks = response.aiter_raw() if status == 200 else None
                    async with aclosing(self._intakes(to.display, chunks, stream)) as intakes:
                        yield intakes
        except Unavailable as error:
            if stream.retry is not None:
                self._pauses.usual = stream.retry / 1_000
            self._pauses.request(error.retry_after)
            raise

    async def _intakes(
        self, who: str, chunks: AsyncIterator[bytes] | None, stream: EventStream
    ) -> AsyncGenerator[Intake, None]:
        if chunks is None:
            # 204: the stream has ended, and the client must not reconnect.
            return
        async for chunk in chunks:
            events = stream.feed(chunk)
            if arrivals := [self._arrival(event) for event in events if not self.events or event.type in self.events]:
                yield Intake(arrivals)
        raise Unavailable(who, "it closed the connection")

    def _arrival(self, event: Event) -> Arrival:
        cursor = cursor_of(event) if self.resume else None
        refused = None
        if event.size > self.max_size:
            refused = f"it has {event.size} bytes, more than the {self.max_size} that an event may have"
        return Arrival(event.data, cursor=cursor, refused=refused)


def cursor_of(event: Event) -> str | None:
    """The last id and the number of events since, because several can share one: `41#0`, `41#1`. None before any id.

    Numbers without an id would identify the first event of each connection with the others.
    """
    return None if event.id is None else f"{quote(event.id, safe='/:;,=+@ ')}#{event.index}"


def last_id(cursor: str | None) -> bytes | None:
    """The id in a cursor. After it the count starts again, so repeated events have the same cursors."""
    quoted, mark, count = (cursor or "").rpartition("#")
    # A cursor without a valid id is from another source.
    if not mark or not count.isdecimal() or not quoted.isascii():
        return None
    found = unquote_to_bytes(quoted)
    return found if 0 < len(found) <= LONGEST_ID and min(found) >= 0x20 and found == found.strip() else None


def _content_type(response: httpx.Response) -> str:
    kind: str = response.headers.get("content-type", "")
    return kind[:100].partition(";")[0].strip().lower()
