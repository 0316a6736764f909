"""A server that is asked again and again: long polls, pages, or an address that shows something else now and then."""

import asyncio
import logging
import re
import zlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate

import httpx
import orjson

from penstock.collect.http_client import Pauses, Target, asked, check_headers, client, place, refusal, telling
from penstock.collect.polling.pages import HEADER, Answer, Page, read
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable

log = logging.getLogger(__name__)

TOGETHER = 500
"""So many records go on together."""
FIRST_BYTES = 64 << 10
"""So much is kept of an answer that cannot be read."""
_SEEN = 1_000
"""So many cursors are remembered, to notice one that comes again."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Up to where a page was taken: what the cursor of a record tells.

    `cursor` is the one by which the page was asked for. Of its records all up to `index` were taken, which have this
    `checksum` together; with a `tag`, all of it was. `once` tells apart what has the same place and is another record.
    """

    cursor: str | None = None
    index: int = -1
    checksum: int = 0
    tag: str | None = None
    once: str | None = None

    def text(self) -> str:
        told = (("cursor", self.cursor), ("etag", self.tag), ("once", self.once))
        shown: dict[str, object] = {name: value for name, value in told if value is not None}
        if self.index >= 0:
            shown |= {"index": self.index, "crc": self.checksum}
        return orjson.dumps(shown).decode()

    @classmethod
    def of(cls, text: str | None) -> "Spot":
        """The beginning, when it is not one that was written here."""
        try:
            told = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            return cls()
        match told:
            case dict():
                index, checksum = told.get("index", -1), told.get("crc", 0)
                texts = [told.get(name) for name in ("cursor", "etag")]
                if (
                    isinstance(index, int)
                    and isinstance(checksum, int)
                    and all(isinstance(one, str | None) for one in texts)
                ):
                    return cls(texts[0], index, checksum, texts[1])
        return cls()

    def left(self, sums: Sequence[int]) -> int:
        """The index of the first record that was not taken; 0 when the page is not the one that it was."""
        return self.index + 1 if 0 <= self.index < len(sums) and sums[self.index] == self.checksum else 0


@dataclass(frozen=True, slots=True)
class New:
    """What is new in a page. `last` stands for the whole page: it may go on when the others are safe."""

    spot: Spot
    items: Sequence[bytes]
    sums: Sequence[int]
    chosen: Sequence[int]
    end: Spot

    def others(self) -> Iterator[list[Arrival]]:
        """All but the last, some at a time."""
        for start in range(0, len(self.chosen) - 1, TOGETHER):
            some = self.chosen[start : min(start + TOGETHER, len(self.chosen) - 1)]
            yield [Arrival(self.items[at], cursor=self._spot(at).text()) for at in some]

    def last(self) -> list[Arrival]:
        return [Arrival(self.items[at], cursor=self.end.text()) for at in self.chosen[-1:]]

    def _spot(self, at: int) -> Spot:
        return replace(self.spot, index=at, checksum=self.sums[at], tag=None, once=self.end.once)


class Paging:
    """From page to page. `spot` tells what to ask for.

    The last record of a page has a cursor that leads on, the others have one that leads back into their page. Some
    servers give more than before for an old cursor. A record that was on its way then would come again under another
    cursor, and be taken for another one. So the last goes on when the others are safe, and the next page is asked for
    when the last is.
    """

    def __init__(self, name: str, spot: Spot) -> None:
        self.spot = spot
        self._name = name
        self._before: Counter[int] | None = None
        """The checksums of what the answer before held, where it was one for the same cursor."""
        self._refused: int | None = None
        self._seen: deque[str | None] = deque(maxlen=_SEEN)
        self._warned = False

    def new(self, page: Page, tag: str | None, once: str | None) -> New:
        sums = list(accumulate(page.items, lambda checksum, item: zlib.crc32(item, checksum), initial=0))[1:]
        if self._leads_on(page):
            end = Spot(page.next, once=once)
        else:
            end = Spot(self.spot.cursor, len(sums) - 1, sums[-1] if sums else 0, tag, once)
        return New(self.spot, page.items, sums, self._chosen(page.items, sums), end)

    def _chosen(self, items: Sequence[bytes], sums: Sequence[int]) -> Sequence[int]:
        """The indexes of what lies behind what was taken, or was not in the answer before."""
        if self._before is None:
            return range(self.spot.left(sums), len(items))
        before, found = Counter(self._before), []
        for at, item in enumerate(items):
            checksum = zlib.crc32(item)
            if before[checksum] > 0:
                before[checksum] -= 1
            else:
                found.append(at)
        return found

    def turn(self, page: Page, new: New) -> bool:
        """All of a page is safe. Whether it leads on, to where we have not been."""
        self._refused = None
        before, self.spot = self.spot.cursor, new.end
        if new.end.cursor == before:
            self._before = Counter(map(zlib.crc32, page.items))
            return False
        self._before = None
        self._seen.append(before)
        back = new.end.cursor in self._seen or _smaller(new.end.cursor, before)
        if back and not self._warned:
            self._warned = True
            log.warning("%s: its cursor goes back, from %r to %r", self._name, before, new.end.cursor)
        return not back

    def dead(self, body: bytes, reason: str) -> list[Arrival]:
        """A dead letter for an answer that cannot be read; none, if the one before was the same."""
        checksum = zlib.crc32(body)
        if checksum == self._refused:
            return []
        self._refused = checksum
        spot = replace(self.spot, once=f"refused-{checksum:08x}")
        return [Arrival(body[:FIRST_BYTES], cursor=spot.text(), refused=reason)]

    def _leads_on(self, page: Page) -> bool:
        return page.next is not None and page.next != self.spot.cursor


def _smaller(cursor: str | None, before: str | None) -> bool:
    """Whether both are numbers, and the first is smaller."""
    one, other = cursor or "", before or ""
    return one.isascii() and one.isdecimal() and other.isascii() and other.isdecimal() and int(one) < int(other)


_SOON = 1.0
"""Seconds after which who has not refused counts as connected: an answer may be held back for long."""
_LARGE = 256 << 10
"""To read an answer of so many bytes takes a while: not in the event loop."""
_TAG = re.compile(r'(W/)?"[!#-~]{0,500}"')


@dataclass(frozen=True)
class PollingSource:
    """Asks `poll+http://…` or `poll+https://…`: at once after an answer that leads on, else after a pause of `every`.

    `items` is the path to the list of records in the JSON of an answer ("data.items"). Without it the answer is a JSON
    list, or lines (application/x-ndjson), or one record. Records are the bytes that they are in the answer.
    `cursor` is where the answer tells the cursor of what follows: a path, or "header:NAME". It is sent back as the
    query `parameter`, beside the `parameters` that are always sent. Without it the same is asked for each time, and
    what the answer before did not hold is new. An answer that cannot be read, or is beyond `max_size`, becomes a dead
    letter that holds its first bytes. It has to be there `within` a time.
    """

    url: str
    name: str
    items: str | None = None
    cursor: str | None = None
    parameter: str = "cursor"
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    every: timedelta = timedelta(seconds=1)
    within: timedelta = timedelta(seconds=90)
    max_size: int = 8 << 20
    open_within: timedelta = timedelta(seconds=10)
    proxy: str | None = None
    clock: Clock = field(default_factory=SystemClock)
    _pauses: Pauses = field(default_factory=Pauses, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        place(self.url, self.name, "poll+")
        check_headers(self.name, self.headers)
        for option in ("every", "within", "open_within"):
            if getattr(self, option) <= timedelta(0):
                raise Misconfigured(f"source {self.name}, {option}", "it has to be longer than nothing")
        if self.max_size < 1:
            raise Misconfigured(f"source {self.name}, max_size", "it has to be more than nothing")
        for option, path in (("items", self.items), ("cursor", self.cursor)):
            if path is not None and not all(path.removeprefix(HEADER).split(".")):
                raise Misconfigured(
                    f"source {self.name}, {option}", f'"{path}" is no path', 'write it like "data.next"'
                )
        for parameter, value in self.parameters.items():
            if not isinstance(value, str):
                raise Misconfigured(f"source {self.name}, parameters", f"{parameter} is no text", f'write "{value}"')

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.BEST_EFFORT if self.cursor is None else Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        if self.cursor is None:
            return "what comes and goes between two answers is unknown, and after a restart some may be taken again"
        return "it goes on after the last cursor, if what the server gives for one keeps its order"

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self._pauses.over()
        to = place(self.url, self.name, "poll+")
        async with client(to, self.open_within.total_seconds(), self.within.total_seconds(), self.proxy) as asking:
            polling = _Polling(self, to, asking, Paging(self.name, Spot.of(taken.cursor)))
            first = asyncio.create_task(polling.ask())
            try:
                await asyncio.wait((first,), timeout=_SOON)
                if first.done():
                    first.result()
                async with aclosing(polling.intakes(first)) as intakes:
                    yield intakes
            except Unavailable as error:
                self._pauses.ask(error.retry_after)
                raise
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Got:
    answer: Answer
    tag: str | None
    whole: bool


class _Polling:
    """One opening of the source."""

    def __init__(self, source: PollingSource, to: Target, asking: httpx.AsyncClient, paging: Paging) -> None:
        self._source, self._to, self._asking, self._paging = source, to, asking, paging

    async def intakes(self, first: "asyncio.Task[_Got | None]") -> AsyncGenerator[Intake, None]:
        source, paging = self._source, self._paging
        got = await first
        while True:
            leads_on = False
            if got is not None:
                safe = _Safe(self._to.who)
                try:
                    page = await self._read(got)
                except Refused as refused:
                    if letter := paging.dead(got.answer.body, refused.reason):
                        yield safe.intake(letter)
                        await safe.wait()
                else:
                    # Where the server has no cursors the same may be new again: it was another thing meanwhile.
                    new = paging.new(page, got.tag, str(source.clock.now()) if source.cursor is None else None)
                    for some in new.others():
                        yield safe.intake(some)
                    await safe.wait()
                    if last := new.last():
                        yield safe.intake(last)
                        await safe.wait()
                    leads_on = paging.turn(page, new) and bool(last)
            if not leads_on:
                await asyncio.sleep(source.every.total_seconds())
            got = await self.ask()

    async def ask(self) -> _Got | None:
        """The answer; None when there is nothing new."""
        source, spot = self._source, self._paging.spot
        parameters = dict(source.parameters)
        if spot.cursor is not None:
            parameters[source.parameter] = spot.cursor
        url = self._to.url.copy_merge_params(parameters) if parameters else self._to.url
        headers = {b"if-none-match": spot.tag.encode()} if spot.tag is not None and _TAG.fullmatch(spot.tag) else {}
        within = source.within.total_seconds()
        try:
            with telling(self._to, within):
                async with (
                    asyncio.timeout(within),
                    asked(self._asking, self._to, url, source.headers, headers) as response,
                ):
                    if response.status_code in (204, 304):
                        return None
                    if response.status_code != 200:
                        raise refusal(self._to, response, source.clock)
                    return await self._got(response)
        except TimeoutError as error:
            raise Unavailable(self._to.who, f"there was no whole answer within {within:g} s") from error

    async def _got(self, response: httpx.Response) -> _Got:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        cursor, tag = self._source.cursor or "", response.headers.get("etag", "")
        told = response.headers.get(cursor.removeprefix(HEADER)) if cursor.startswith(HEADER) else None
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._source.max_size:
                return _Got(Answer(bytes(body[:FIRST_BYTES]), kind, told), None, whole=False)
        return _Got(Answer(bytes(body), kind, told), tag if _TAG.fullmatch(tag) else None, whole=True)

    async def _read(self, got: _Got) -> Page:
        source = self._source
        if not got.whole:
            raise Refused("an answer", f"it has more than the {source.max_size} bytes that an answer may have")
        if len(got.answer.body) > _LARGE:
            return await asyncio.to_thread(read, got.answer, source.items, source.cursor)
        return read(got.answer, source.items, source.cursor)


class _Safe:
    """Whether what was handed over is safe."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._waiting = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def intake(self, arrivals: Sequence[Arrival]) -> Intake:
        self._waiting += 1

        async def settle(error: Exception | None) -> None:
            self._waiting -= 1
            self._error = self._error or error
            self._changed.set()

        return Intake(arrivals, settle)

    async def wait(self) -> None:
        """Until all of it is. Unavailable when it is not: then it has to be asked for again."""
        while self._waiting and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise Unavailable(self._who, "what it gave was not taken")
