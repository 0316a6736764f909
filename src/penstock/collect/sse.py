"""Server-sent events from a server elsewhere, one record in each event."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import quote, unquote_to_bytes

import httpx

from penstock.collect.http_client import Pauses, asked, check_headers, client, place, refusal, telling
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable

MESSAGE = "message"
"""The type of an event that tells none."""
LONGEST_ID = 1_024
LONGEST_RETRY = 1 << 31
"""Milliseconds."""
FIRST_BYTES = 64 << 10
"""So much is kept of data that are too large."""

_BOM = b"\xef\xbb\xbf"
_NAME = 16
"""Bytes of a line beside its value: no field that means something has a longer name."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Event:
    """`id` is the last one that was set, None before any was; `index` is 0 for the event that set it, then it counts.

    `size` is that of the data. Where it is beyond the limit, `data` are only their first bytes.
    """

    data: bytes
    type: str
    id: bytes | None
    index: int
    size: int


class EventStream:
    """The events of one connection. `last_id` is the id after which the other side was asked to go on.

    Nothing that comes makes it hold more than about `max_size` bytes, beside what is fed at once.
    """

    def __init__(self, max_size: int, last_id: bytes | None = None) -> None:
        self.retry: int | None = None
        """Milliseconds that the other side wants us to wait before we connect again."""
        self._max = max_size
        self._id, self._index = last_id, 0
        self._told_id: bytes | None = None
        self._head: bytes | None = b""
        self._after_return = False
        self._line = bytearray()
        self._beyond = 0
        self._reset()

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that are whole now."""
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
        # A line ends at a carriage return; whether a line feed belongs to it is seen later, maybe in the next chunk.
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
        """`beyond`: so many bytes of the line were not kept."""
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
                    self._told_id = value
            case b"retry" if beyond == 0 and value.isdigit():
                self.retry = min(int(value.lstrip(b"0")[:20] or b"0"), LONGEST_RETRY)

    def _dispatch(self) -> Event | None:
        said, self._told_id = self._told_id, None
        data, size, kind = self._data, self._size - 1, self._type
        self._reset()
        sets = said is not None and (said or None) != self._id
        if sets:
            self._id, self._index = said or None, 0
        if size < 0:
            return None
        if not sets:
            self._index += 1
        # The last line feed ends the data; it is none of them.
        del data[size if size <= self._max else FIRST_BYTES :]
        type_ = kind.decode(errors="replace") if kind else MESSAGE
        return Event(bytes(data), type_, self._id, self._index, size)

    def _reset(self) -> None:
        self._data, self._size, self._type = bytearray(), 0, b""


_STREAM = "text/event-stream"


@dataclass(frozen=True)
class SseSource:
    """Listens to `sse+http://…` or `sse+https://…`. The value of a record is the data of its event, as they came.

    `events` are the types to take; all, if it is empty. An event beyond `max_size` becomes a dead letter that holds its
    first bytes. With `resume` the server is asked to go on after the last id, as far as it gives ids; what it then
    gives again is known by the count behind that id, after a crash for the last hundred events. When nothing came for
    `silent_after`, not even a comment, the connection counts as lost.
    """

    url: str
    name: str
    events: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    resume: bool = True
    max_size: int = 1 << 20
    open_within: timedelta = timedelta(seconds=10)
    silent_after: timedelta = timedelta(seconds=60)
    proxy: str | None = None
    clock: Clock = field(default_factory=SystemClock)
    _pauses: Pauses = field(default_factory=Pauses, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        place(self.url, self.name, "sse+")
        check_headers(self.name, self.headers)
        if isinstance(self.events, str):
            raise Misconfigured(f"source {self.name}, events", "it is one text", f'write ["{self.events}"]')
        # A list, as it may be written in a file, does as well.
        object.__setattr__(self, "events", tuple(self.events))
        for option in ("open_within", "silent_after"):
            if getattr(self, option) <= timedelta(0):
                raise Misconfigured(f"source {self.name}, {option}", "it has to be longer than nothing")
        if self.max_size < 1:
            raise Misconfigured(f"source {self.name}, max_size", "it has to be more than nothing")

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE if self.resume else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if self.resume:
            return "it resumes after the last id, if the server gives ids and keeps what follows them"
        return "what it sends while nobody listens is unknown"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self._pauses.over()
        to = place(self.url, self.name, "sse+")
        silent_for = self.silent_after.total_seconds()
        after = last_id(taken.cursor) if self.resume else None
        headers = {b"accept": _STREAM.encode(), b"cache-control": b"no-store"}
        if after is not None:
            headers[b"last-event-id"] = after
        stream = EventStream(self.max_size, after)
        try:
            with telling(to, silent_for):
                async with (
                    client(to, self.open_within.total_seconds(), silent_for, self.proxy) as asking,
                    asked(asking, to, to.url, self.headers, headers) as response,
                ):
                    if (status := response.status_code) not in (200, 204):
                        raise refusal(to, response, self.clock)
                    if status == 200 and _kind(response) != _STREAM:
                        raise Unavailable(to.who, f"it answers with {_kind(response)!r}, not with {_STREAM}")
                    chunks = response.aiter_raw() if status == 200 else None
                    async with aclosing(self._intakes(to.who, chunks, stream)) as intakes:
                        yield intakes
        except Unavailable as error:
            if stream.retry is not None:
                self._pauses.usual = stream.retry / 1_000
            self._pauses.ask(error.retry_after)
            raise

    async def _intakes(
        self, who: str, chunks: AsyncIterator[bytes] | None, stream: EventStream
    ) -> AsyncGenerator[Intake, None]:
        if chunks is None:
            # The server has nothing more, and does not want to be asked again.
            return
        async for chunk in chunks:
            events = stream.feed(chunk)
            if arrivals := [self._arrival(event) for event in events if not self.events or event.type in self.events]:
                yield Intake(arrivals, _settled)
        raise Unavailable(who, "it closed the connection")

    def _arrival(self, event: Event) -> Arrival:
        cursor = cursor_of(event) if self.resume else None
        refused = None
        if event.size > self.max_size:
            refused = f"it has {event.size} bytes, more than the {self.max_size} that an event may have"
        return Arrival(event.data, cursor=cursor, refused=refused)


async def _settled(error: Exception | None) -> None:
    """Nobody is told: what was not settled is asked for again at the next resume."""


def cursor_of(event: Event) -> str | None:
    """The last id and how many events came since, for several may share one: `41#0`, `41#1`.

    None where no id was ever set. To number such events all the same would take the first of each connection for the
    same one.
    """
    return None if event.id is None else f"{quote(event.id, safe='/:;,=+@ ')}#{event.index}"


def last_id(cursor: str | None) -> bytes | None:
    """The id in a cursor. Behind it the count begins anew: what is given again has the same cursors as before."""
    quoted, mark, count = (cursor or "").rpartition("#")
    # What cannot be an id was written by another source.
    if not mark or not count.isdecimal() or not quoted.isascii():
        return None
    found = unquote_to_bytes(quoted)
    return found if 0 < len(found) <= LONGEST_ID and min(found) >= 0x20 and found == found.strip() else None


def _kind(response: httpx.Response) -> str:
    kind: str = response.headers.get("content-type", "")
    return kind[:100].partition(";")[0].strip().lower()
