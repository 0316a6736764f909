"""Records from an HTTP server that is polled: long polls, pages, or a document that changes.

`Paging` (no I/O) keeps how far the server was read.
"""

import asyncio
import json
import logging
import re
import zlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import ClassVar

import httpx
import orjson

from penstock.collect.http_client import HttpClientSource, Target, get, http_errors, refusal
from penstock.collect.registry import check_positive
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable

log = logging.getLogger(__name__)

MAX_ITEMS = 100_000
"""The limit of records in a page."""
MAX_CURSOR = 2_048
HEADER = "header:"
"""The prefix of a cursor in a header."""
TOGETHER = 500
"""Records in an intake."""
FIRST_BYTES = 64 << 10
"""How much of an invalid response is kept."""
_SEEN = 1_000
"""How many cursors are remembered, to notice a repeated one."""
_SOON = 1.0
"""Seconds after which the source counts as connected: the response to a long poll can take long."""
_LARGE = 256 << 10
"""A response of this size is parsed in a thread."""
_TAG = re.compile(r'(W/)?"[!#-~]{0,500}"')
_BOM = b"\xef\xbb\xbf"
_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_BLANK = b" \t\r\n"
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `kind`: the content type; `cursor`: the header with the next cursor."""

    body: bytes
    kind: str = ""
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    items: list[bytes]
    next: str | None
    """The cursor of the next page; None if there is none."""


def read(answer: Answer, items: str | None, cursor: str | None) -> Page:
    """`items` and `cursor` are paths in the JSON. Without `items`, the body is a list, lines, or one record.

    Raises Refused if the body does not match.
    """
    body = answer.body.removeprefix(_BOM)
    inside = cursor is not None and not cursor.startswith(HEADER)
    following = answer.cursor if not inside else None
    found: list[bytes]
    if not body.strip(_BLANK):
        found = []
    elif answer.kind in _LINES and items is None and not inside:
        found = [stripped for line in body.split(b"\n") if (stripped := line.removesuffix(b"\r"))]
    elif items is None and not inside and body.lstrip(_BLANK)[:1] != b"[":
        # One record of any format.
        found = [answer.body]
    else:
        try:
            document = _Document(body)
            found = document.listed(items)
            if inside and cursor is not None:
                following = document.text(cursor)
        except (ValueError, RecursionError) as error:
            if items is None and not inside and "json" not in answer.kind:
                found = [answer.body]
            else:
                why = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is not JSON: {error}"
                raise Refused("an answer", why) from error
    if len(found) > MAX_ITEMS:
        raise Refused("an answer", f"it has {len(found)} records, more than {MAX_ITEMS}")
    # Half of a surrogate pair cannot be sent.
    if following is not None and (len(following) > MAX_CURSOR or re.search(r"[\ud800-\udfff]", following)):
        raise Refused("an answer", f"its cursor is not a string of up to {MAX_CURSOR} characters")
    return Page(found, following or None)


class _Document:
    """Finds the positions of values in a JSON document. Bytes that are not UTF-8 stay unchanged."""

    def __init__(self, body: bytes) -> None:
        self._text = body.decode(errors="surrogateescape")
        # Keep numbers as text.
        self._decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
        self._start = self._skip(0)
        _, end = self._decoder.raw_decode(self._text, self._start)
        if self._skip(end) != len(self._text):
            raise ValueError(f"something follows at character {end}")

    def listed(self, path: str | None) -> list[bytes]:
        """The elements of the list at the path, or the whole document if there is neither a path nor a list."""
        start = self._start if path is None else self._find(path)
        if start is None:
            raise Refused("an answer", f'there is nothing at "{path}"')
        if self._text[start] != "[":
            if path is not None:
                raise Refused("an answer", f'the value at "{path}" is not a list')
            return [self._text.encode(errors="surrogateescape")]
        return [self._text[first:last].encode(errors="surrogateescape") for _, first, last in self._children(start)]

    def text(self, path: str) -> str | None:
        """The string or number at the path; None if it is missing or null."""
        if self._text[self._start] != "{":
            raise Refused("an answer", f'it is not an object with "{path}"')
        if (start := self._find(path)) is None:
            return None
        value, _ = self._decoder.raw_decode(self._text, start)
        if value is not None and not isinstance(value, str):
            raise Refused("an answer", f'the value at "{path}" is neither a string nor a number')
        return value

    def _find(self, path: str) -> int | None:
        """The position of the value at the path."""
        start: int | None = self._start
        for step in path.split("."):
            if start is None or self._text[start] != "{":
                return None
            # Of repeated keys the last one counts.
            start = {name: first for name, first, _ in self._children(start)}.get(step)
        return start

    def _children(self, start: int) -> Iterator[tuple[str, int, int]]:
        """The values in the list or object at a position: the name, empty in a list, and from where to where."""
        named = self._text[start] == "{"
        name, at = "", self._skip(start + 1)
        while self._text[at] not in "]}":
            if named:
                name, at = self._decoder.raw_decode(self._text, at)
                at = self._skip(self._skip(at) + 1)
            _, end = self._decoder.raw_decode(self._text, at)
            yield name, at, end
            at = self._skip(end)
            if self._text[at] == ",":
                at = self._skip(at + 1)

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at


@dataclass(frozen=True, slots=True)
class Spot:
    """How far a page was read: the content of the cursor of a record.

    `cursor`: of the page. All its records up to `index` were read, with this `checksum` over them; with a `tag`, the
    whole page was. `once` distinguishes records with the same position.
    """

    cursor: str | None = None
    index: int = -1
    checksum: int = 0
    tag: str | None = None
    once: str | None = None

    def text(self) -> str:
        pairs = (("cursor", self.cursor), ("etag", self.tag), ("once", self.once))
        document: dict[str, object] = {name: value for name, value in pairs if value is not None}
        if self.index >= 0:
            document |= {"index": self.index, "crc": self.checksum}
        return orjson.dumps(document).decode()

    @classmethod
    def of(cls, text: str | None) -> "Spot":
        """Parse a cursor; the beginning if it is invalid."""
        try:
            document = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            return cls()
        if not isinstance(document, dict):
            return cls()
        match {"index": -1, "crc": 0, "cursor": None, "etag": None, **document}:
            case {"index": int(index), "crc": int(crc), "cursor": str() | None as cursor, "etag": str() | None as tag}:
                return cls(cursor, index, crc, tag)
        return cls()

    def left(self, sums: Sequence[int]) -> int:
        """The index of the first unread record; 0 if the page has changed."""
        return self.index + 1 if 0 <= self.index < len(sums) and sums[self.index] == self.checksum else 0


@dataclass(frozen=True, slots=True)
class New:
    """The new records of a page. The cursor of the last one leads to the next page."""

    spot: Spot
    items: Sequence[bytes]
    sums: Sequence[int]
    selected: Sequence[int]
    end: Spot

    def all_but_last(self) -> Iterator[list[Arrival]]:
        """All but the last, in several intakes."""
        for start in range(0, len(self.selected) - 1, TOGETHER):
            some = self.selected[start : min(start + TOGETHER, len(self.selected) - 1)]
            yield [Arrival(self.items[at], cursor=self._spot(at).text()) for at in some]

    def last(self) -> list[Arrival]:
        return [Arrival(self.items[at], cursor=self.end.text()) for at in self.selected[-1:]]

    def _spot(self, at: int) -> Spot:
        return replace(self.spot, index=at, checksum=self.sums[at], tag=None, once=self.end.once)


class Paging:
    """From page to page. `spot` is what to request.

    The last record of a page has a cursor that leads to the next page; the others have one that leads back into their
    page. Some servers return more records than before for an old cursor. A record in flight would then come again with
    another cursor, and be stored twice. So the last record is sent after the others are settled, and the next page is
    requested after the last one is settled.
    """

    def __init__(self, name: str, spot: Spot) -> None:
        self.spot = spot
        self._name = name
        self._before: Counter[int] | None = None
        """The checksums of the records in the last response, if it had the same cursor."""
        self._refused: int | None = None
        self._seen: deque[str | None] = deque(maxlen=_SEEN)
        self._warned = False

    def new(self, page: Page, tag: str | None, once: str | None) -> New:
        sums = list(accumulate(page.items, lambda checksum, item: zlib.crc32(item, checksum), initial=0))[1:]
        if page.next is not None and page.next != self.spot.cursor:
            end = Spot(page.next, once=once)
        else:
            end = Spot(self.spot.cursor, len(sums) - 1, sums[-1] if sums else 0, tag, once)
        return New(self.spot, page.items, sums, self._selected(page.items, sums), end)

    def _selected(self, items: Sequence[bytes], sums: Sequence[int]) -> Sequence[int]:
        """The indexes of the records that were not read, or were not in the last response."""
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

    def finish_page(self, page: Page, new: New) -> bool:
        """All records of a page are settled. Return whether it leads to a page that was not read yet."""
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
            log.warning("%s: the cursor moves back, from %r to %r", self._name, before, new.end.cursor)
        return not back

    def dead(self, body: bytes, reason: str) -> list[Arrival]:
        """A dead letter for an invalid response; none if the last one was the same."""
        checksum = zlib.crc32(body)
        if checksum == self._refused:
            return []
        self._refused = checksum
        spot = replace(self.spot, once=f"refused-{checksum:08x}")
        return [Arrival(body[:FIRST_BYTES], cursor=spot.text(), refused=reason)]


def _smaller(cursor: str | None, before: str | None) -> bool:
    """Whether both are numbers and the first is smaller."""
    one, other = cursor or "", before or ""
    return one.isascii() and one.isdecimal() and other.isascii() and other.isdecimal() and int(one) < int(other)


@dataclass(frozen=True)
class PollingSource(HttpClientSource):
    """Polls `poll+http://…` or `poll+https://…`: at once after a page that leads on, otherwise after `every`.

    `items`: the path of the list of records in the JSON of a response ("data.items"). Without it, the response is a
    JSON list, lines (application/x-ndjson), or one record. Records are the unchanged bytes of the response.
    `cursor`: where the response has the cursor of the next page: a path, or "header:NAME". It is sent as the query
    parameter `parameter`, beside `parameters`. Without it, each request is the same, and records that the last response
    did not have are new. An invalid response, or one beyond `max_size`, becomes a dead letter with its first bytes.
    `within`: the timeout of a response.
    """

    prefix: ClassVar[str] = "poll+"

    max_size: int = 8 << 20
    items: str | None = None
    cursor: str | None = None
    parameter: str = "cursor"
    parameters: Mapping[str, str] = field(default_factory=dict)
    every: timedelta = timedelta(seconds=1)
    within: timedelta = timedelta(seconds=90)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "every", "within")
        for option, path in (("items", self.items), ("cursor", self.cursor)):
            if path is not None and not all(path.removeprefix(HEADER).split(".")):
                raise Misconfigured(
                    f"source {self.name}, {option}", f'"{path}" is not a path', 'write it like "data.next"'
                )
        for parameter, value in self.parameters.items():
            if not isinstance(value, str):
                raise Misconfigured(
                    f"source {self.name}, parameters", f"{parameter} is not a string", f'write "{value}"'
                )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.BEST_EFFORT if self.cursor is None else Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        if self.cursor is None:
            return "records that appear and disappear between requests are lost; some are repeated after a restart"
        return "it resumes after the last cursor, if the server returns the records of a page in the same order"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        await self._pauses.wait()
        to = self._target()
        async with self._client(self.within.total_seconds()) as client:
            poller = _Poller(self, to, client, Paging(self.name, Spot.of(resume.cursor)))
            first = asyncio.create_task(poller.ask())
            try:
                await asyncio.wait((first,), timeout=_SOON)
                if first.done():
                    first.result()
                async with aclosing(poller.intakes(first)) as intakes:
                    yield intakes
            except Unavailable as error:
                self._pauses.request(error.retry_after)
                raise
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Body:
    answer: Answer
    tag: str | None
    whole: bool


class _Poller:
    """One opening of the source."""

    def __init__(self, source: PollingSource, to: Target, client: httpx.AsyncClient, paging: Paging) -> None:
        self._source, self._to, self._client, self._paging = source, to, client, paging
        self._in_flight: list[asyncio.Future[Exception | None]] = []

    async def intakes(self, first: "asyncio.Task[_Body | None]") -> AsyncGenerator[Intake, None]:
        source, paging = self._source, self._paging
        body = await first
        while True:
            leads_on = False
            if body is not None:
                try:
                    page = await self._read(body)
                except Refused as refused:
                    if letter := paging.dead(body.answer.body, refused.reason):
                        yield self._intake(letter)
                        await self._settled()
                else:
                    # Without cursors, a record that disappears and appears again is a new one.
                    new = paging.new(page, body.tag, str(source.clock.now()) if source.cursor is None else None)
                    for some in new.all_but_last():
                        yield self._intake(some)
                    await self._settled()
                    if last := new.last():
                        yield self._intake(last)
                        await self._settled()
                    leads_on = paging.finish_page(page, new) and bool(last)
            if not leads_on:
                await asyncio.sleep(source.every.total_seconds())
            body = await self.ask()

    def _intake(self, arrivals: Sequence[Arrival]) -> Intake:
        settled = asyncio.get_running_loop().create_future()
        self._in_flight.append(settled)

        async def settle(error: Exception | None) -> None:
            if not settled.done():  # It is cancelled with the polling that waits for it.
                settled.set_result(error)

        return Intake(arrivals, settle)

    async def _settled(self) -> None:
        """Wait until all intakes are settled. Raises Unavailable if one was not stored: ask for the page again."""
        while self._in_flight:
            if await self._in_flight.pop(0) is not None:
                raise Unavailable(self._to.display, "its records were not stored")

    async def ask(self) -> _Body | None:
        """The response; None if there is nothing new."""
        source, spot = self._source, self._paging.spot
        parameters = dict(source.parameters)
        if spot.cursor is not None:
            parameters[source.parameter] = spot.cursor
        url = self._to.url.copy_merge_params(parameters) if parameters else self._to.url
        headers = {b"if-none-match": spot.tag.encode()} if spot.tag is not None and _TAG.fullmatch(spot.tag) else {}
        within = source.within.total_seconds()
        try:
            with http_errors(self._to, within):
                async with (
                    asyncio.timeout(within),
                    get(self._client, self._to, url, source.headers, headers) as response,
                ):
                    if response.status_code in (204, 304):
                        return None
                    if response.status_code != 200:
                        raise refusal(self._to, response, source.clock)
                    return await self._read_body(response)
        except TimeoutError as error:
            raise Unavailable(self._to.display, f"no complete response within {within:g} s") from error

    async def _read_body(self, response: httpx.Response) -> _Body:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        cursor, tag = self._source.cursor or "", response.headers.get("etag", "")
        header = response.headers.get(cursor.removeprefix(HEADER)) if cursor.startswith(HEADER) else None
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._source.max_size:
                return _Body(Answer(bytes(body[:FIRST_BYTES]), kind, header), None, whole=False)
        return _Body(Answer(bytes(body), kind, header), tag if _TAG.fullmatch(tag) else None, whole=True)

    async def _read(self, body: _Body) -> Page:
        source = self._source
        if not body.whole:
            raise Refused("an answer", f"it has more than {source.max_size} bytes, the limit of max_size")
        if len(body.answer.body) > _LARGE:
            return await asyncio.to_thread(read, body.answer, source.items, source.cursor)
        return read(body.answer, source.items, source.cursor)
