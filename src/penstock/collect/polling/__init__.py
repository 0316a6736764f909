"""A server that is asked again and again: long polls, pages, or an address that shows something else now and then."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import httpx

from penstock.collect.http_client import Pauses, Target, asked, check_headers, client, place, refusal, telling
from penstock.collect.polling.pages import HEADER, Answer, Page, read
from penstock.collect.polling.paging import FIRST_BYTES, Paging, Spot
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable

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
