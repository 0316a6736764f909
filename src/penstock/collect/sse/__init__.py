"""Server-sent events from a server elsewhere, one record in each event."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import quote, unquote_to_bytes

import httpx

from penstock.collect.http_client import Pauses, asked, check_headers, client, place, refusal, telling
from penstock.collect.sse.event_stream import LONGEST_ID, Event, EventStream
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable

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
