"""Servers that are asked again and again: good ones, those that repeat themselves, and those that are away."""

import asyncio
import logging
import os
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from tests.collect.scripted import Server, head, listening, serving

from penstock.channels.memory import MemoryChannels
from penstock.collect.polling import PollingSource
from penstock.collect.registry import source_at
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.testing.killing import CrashContract
from penstock.testing.sources import Running, SourceContract, arrivals, plain, until

QUICK = timedelta(milliseconds=5)
NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"


def answer(body: object, kind: str = "application/json", headers: Mapping[str, str] | None = None) -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    told = {"Content-Type": kind, "Content-Length": str(len(raw)), "Connection": "close", **(headers or {})}
    return b"HTTP/1.1 200 OK\r\n" + "".join(f"{n}: {v}\r\n" for n, v in told.items()).encode() + b"\r\n" + raw


def paged(server: Server, **options: Any) -> PollingSource:
    options = {"items": "data.items", "cursor": "next", "every": QUICK, **options}
    return PollingSource(f"poll+{server.url}", "pages", **options)


def page(items: Sequence[object], following: object) -> bytes:
    return answer({"data": {"items": items}, "next": following})


def asked(server: Server) -> list[str]:
    """The queries so far."""
    return [urlsplit(one[""].split()[1]).query for one in server.heads]


@asynccontextmanager
async def taking(source: PollingSource, taken: ResumeState | None = None) -> AsyncIterator["list[Arrival]"]:
    """What comes, each settled, while the body runs."""
    found: list[Arrival] = []

    async def take(intakes: AsyncIterator[Intake]) -> None:
        async for intake in intakes:
            found.extend(arrivals(intake))
            await intake.settle(None)

    async with source.open(taken or ResumeState()) as intakes:
        task = asyncio.create_task(take(intakes))
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pages_are_followed_by_their_cursors_and_records_are_cut_out_as_they_are() -> None:
    items = b'{"a": 1e400, "a":12345678901234567890123} , "\xff\\ud800",null\n,[ ] '
    body = b'{"next":7,"data" : {"items": [' + items + b']}, "x":[1]}'
    async with (
        serving(answer(body), page([5], "a b&c"), page([], "end"), page([], None)) as server,
        taking(paged(server)) as found,
    ):
        await until(lambda: len(server.heads) == 6)
    assert [one.value for one in found] == [
        b'{"a": 1e400, "a":12345678901234567890123}',
        b'"\xff\\ud800"',
        b"null",
        b"[ ]",
        b"5",
    ]
    assert [parse_qs(query).get("cursor") for query in asked(server)] == [None, ["7"], ["a b&c"], *[["end"]] * 3]


async def test_each_record_has_a_cursor_behind_which_the_source_goes_on() -> None:
    async with (
        serving(page(["a", "b", "c"], "2"), page(["d"], "3"), page([], "3")) as server,
        taking(paged(server)) as found,
    ):
        await until(lambda: len(found) == 4)
    for at, one in enumerate(found):
        again = [page(["a", "b", "c"], "2"), page(["d"], "3"), page([], "3")][0 if at < 2 else 1 if at == 2 else 2 :]
        async with serving(*again) as server, taking(paged(server), ResumeState(cursor=one.cursor)) as rest:
            await until(lambda: len(server.heads) > len(again))  # noqa: B023 - it is over then
        assert [other.value for other in rest] == [other.value for other in found[at + 1 :]]
        assert asked(server)[0] == ["", "", "cursor=2", "cursor=3"][at]


async def test_a_page_that_is_another_one_now_is_given_as_a_whole() -> None:
    async with serving(page(["a", "b"], "2"), NOTHING) as server, taking(paged(server)) as found:
        await until(lambda: len(found) == 2)
    async with (
        serving(page(["x", "b"], "2"), NOTHING) as server,
        taking(paged(server), ResumeState(cursor=found[0].cursor)) as rest,
    ):
        await until(lambda: len(rest) == 2)


@pytest.mark.parametrize(
    "foreign", ["41#0", "", "[]", "{", '{"index":"x"}', '{"cursor":5}', '{"etag":"\\u000a","index":3}']
)
async def test_a_cursor_of_another_source_is_the_beginning(foreign: str) -> None:
    async with (
        serving(page(["a"], "2"), NOTHING) as server,
        taking(paged(server), ResumeState(cursor=foreign)) as found,
    ):
        await until(lambda: len(found) == 1)
    assert asked(server)[0] == ""


async def test_the_next_page_is_asked_for_when_this_one_is_safe() -> None:
    async with (
        serving(page(["a", "b"], "2"), page(["c"], "3"), NOTHING) as server,
        paged(server).open(ResumeState()) as intakes,
    ):
        first = await anext(intakes)
        coming = asyncio.ensure_future(anext(intakes))
        await asyncio.sleep(0.05)
        assert not coming.done()
        await first.settle(None)
        second = await coming
        assert [one.value for one in arrivals(second)] == [b'"b"']
        assert len(server.heads) == 1
        await second.settle(Unavailable("the channel", "it is away"))
        with pytest.raises(Unavailable, match="not stored"):
            await anext(intakes)


@pytest.mark.parametrize("following", ["same", None, "", 5])
async def test_the_same_page_for_ever_is_given_once_and_without_haste(following: object) -> None:
    source_page = page(["a", "b", "a"], following)
    async with serving(source_page) as server:
        source = paged(server, every=timedelta(milliseconds=50), parameters={"cursor": "same"})
        async with Running(source, MemoryChannels()) as running:
            before = monotonic()
            await running.until(lambda: len(server.heads) == 6)
            assert monotonic() - before > 0.18
        assert running.count() == (3 if following in (None, "") else 6)


async def test_a_page_that_grows_gives_what_is_new() -> None:
    async with (
        serving(page([1, 1], None), page([1, 1], None), page([1, 1, 1, 2], None), page([], None)) as server,
        taking(paged(server)) as found,
    ):
        await until(lambda: len(server.heads) == 5)
    assert [one.value for one in found] == [b"1", b"1", b"1", b"2"]


async def test_a_cursor_that_goes_back_is_followed_without_haste_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = [page(["a"], "9"), *[page(["b"], "8"), page(["c"], "9")] * 20]
    async with serving(*pages) as server, Running(paged(server), MemoryChannels()) as running:
        await running.until(lambda: len(server.heads) == 12)
    assert sorted(running.values().elements()) == [b'"a"', b'"b"', b'"c"']
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("moves back" in warning for warning in warnings) == 1


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"<html>", "text/html", "it is not JSON"),
        (b'{"data":{"items":[1]}', "application/json", "it is not JSON"),
        (b'{"data":{"items":[1]}} x', "application/json", "something follows"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
        (b'{"data":{"items":[' + b"[" * 100_000, "application/json", "nested too deeply"),
        (b'{"data":[]}', "application/json", 'nothing at "data.items"'),
        (b"[]", "application/json", 'nothing at "data.items"'),
        (b'{"data":{"items":{}}}', "application/json", "is not a list"),
        (b'{"data":{"items":[]},"next":{}}', "application/json", "neither a string nor a number"),
        (b'{"data":{"items":[]},"next":true}', "application/json", "neither a string nor a number"),
        (b'{"data":{"items":[]},"next":"\\ud800"}', "application/json", "its cursor is not a string"),
        (b'{"data":{"items":[]},"next":"' + b"x" * 3_000 + b'"}', "application/json", "its cursor is not a string"),
        (b'{"data":{"items":[' + b"1," * 100_000 + b"1]}}", "application/json", "100001 records, more than"),
        (b'{"data":{"items":["' + b"x" * 300_000 + b'"]}}', "application/json", "more than 250000 bytes"),
    ],
    ids=range(14),
)
async def test_an_answer_that_cannot_be_read_is_one_dead_letter_and_polling_goes_on(
    body: bytes, kind: str, said: str
) -> None:
    async with (
        serving(*[answer(body, kind)] * 4, page(["good"], "2"), NOTHING) as server,
        Running(paged(server, max_size=250_000), channels := MemoryChannels()) as running,
    ):
        await running.until(lambda: running.count() == 1)
    (letter,) = channels.entries("into.dead")
    assert said in dict(letter.headers)["reason"].decode()
    assert letter.value == body[: 64 << 10]


async def test_a_body_may_have_exactly_the_limit() -> None:
    body = page([1], "2")
    size = len(body.partition(b"\r\n\r\n")[2])
    async with serving(body, NOTHING) as server, taking(paged(server, max_size=size)) as found:
        await until(lambda: found)
    assert found[0].refused is None


@pytest.mark.parametrize(
    ("body", "kind", "records"),
    [
        (b"[1, 2]", "application/json", [b"1", b"2"]),
        (b"\xef\xbb\xbf [1]\n", "", [b"1"]),
        (b"[1", "text/plain", [b"[1"]),
        (b'{"a":1}\n', "application/json", [b'{"a":1}\n']),
        (b'{"a":1}\r\n\nnot JSON\n[1,2]', "application/x-ndjson", [b'{"a":1}', b"not JSON", b"[1,2]"]),
        (b"\x00\xff", "application/octet-stream", [b"\x00\xff"]),
    ],
)
async def test_without_a_path_the_body_is_a_list_or_lines_or_one_record(
    body: bytes, kind: str, records: list[bytes]
) -> None:
    async with serving(answer(body, kind)) as server, taking(paged(server, items=None, cursor=None)) as found:
        await until(lambda: len(server.heads) == 4)
    assert [one.value for one in found] == records


async def test_empty_answers_are_nothing_new() -> None:
    empty = [answer(b""), answer(b" \n"), NOTHING, b"HTTP/1.1 304 Not Modified\r\n\r\n"]
    async with serving(*empty, page([1], "2"), NOTHING) as server, taking(paged(server)) as found:
        await until(lambda: found)
    assert [one.value for one in found] == [b"1"]


async def test_the_cursor_may_be_in_a_header_or_beside_a_record() -> None:
    pages = [answer(b"[1]", headers={"X-Next": "5"}), answer(b"a\nb", "application/x-ndjson", {"X-Next": "6"}), NOTHING]
    async with (
        serving(*pages) as server,
        taking(paged(server, items=None, cursor="header:x-next", parameter="after")) as found,
    ):
        await until(lambda: len(server.heads) == 4)
    assert [one.value for one in found] == [b"1", b"a", b"b"]
    assert asked(server) == ["", "after=5", "after=6", "after=6"]
    async with (
        serving(answer(b'{"n":1,"next":2}'), NOTHING) as server,
        taking(paged(server, items=None, parameters={"timeout": "30"})) as found,
    ):
        await until(lambda: len(server.heads) == 2)
    assert [one.value for one in found] == [b'{"n":1,"next":2}']
    assert asked(server) == ["timeout=30", "timeout=30&cursor=2"]


async def test_a_document_is_taken_whenever_it_is_another_one_and_its_tag_is_sent_back() -> None:
    def shown(text: bytes) -> bytes:
        return answer(text, "text/plain", {"ETag": f'"{zlib.crc32(text)}"'})

    async with serving(shown(b"on"), shown(b"on"), shown(b"off"), shown(b"on"), NOTHING) as server:
        source = paged(server, items=None, cursor=None)
        async with Running(source, channels := MemoryChannels()) as running:
            await running.until(lambda: len(server.heads) == 5)
        assert [entry.value for entry in channels.entries("into")] == [b"on", b"off", b"on"]
        tags = [one.get("if-none-match") for one in server.heads]
        assert tags == [None, *(f'"{zlib.crc32(text)}"' for text in (b"on", b"on", b"off", b"on"))]
        async with Running(source, channels) as running:
            await running.until(lambda: len(server.heads) == 7)
        assert server.heads[6]["if-none-match"] == tags[-1]
    assert source.guarantee is Guarantee.BEST_EFFORT


async def test_after_a_restart_a_list_without_cursors_is_not_taken_again_unless_it_is_another_one() -> None:
    channels = MemoryChannels()
    async with serving(answer([1, 2])) as server, Running(paged(server, items=None, cursor=None), channels) as running:
        await running.until(lambda: len(server.heads) == 3)
    async with (
        serving(answer([1, 2]), answer([3, 1, 2])) as server,
        Running(paged(server, items=None, cursor=None), channels) as running,
    ):
        await running.until(lambda: len(server.heads) == 4)
    assert [entry.value for entry in channels.entries("into")] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("kind", ["seconds", "date"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_says_when_to_come_back_and_is_heard(status: int, kind: str) -> None:
    later = datetime.now(UTC) + timedelta(seconds=1.4)
    after = "1" if kind == "seconds" else format_datetime(later, usegmt=True)
    busy = f"HTTP/1.1 {status} Busy\r\nRetry-After: {after}\r\n\r\n".encode()
    async with (
        serving(busy, page(["a"], "2"), NOTHING) as server,
        Running(paged(server), MemoryChannels()) as running,
    ):
        before = monotonic()
        await running.until(lambda: running.count() == 1)
        assert 0.2 < monotonic() - before < 5
        assert len(server.heads) >= 2


@pytest.mark.parametrize("after", ["-5", "soon", "9" * 400, "Thu, 01 Jan 9999 00:00:00 GMT", "\u0663"])
async def test_a_pause_that_is_none_or_endless_is_bounded(after: str) -> None:
    async with serving(f"HTTP/1.1 429 Busy\r\nRetry-After: {after}\r\n\r\n".encode()) as server:
        with pytest.raises(Unavailable) as error:
            async with paged(server).open(ResumeState()):
                pass
    assert (error.value.retry_after or 0.0) <= 300


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 404"),
        (b"HTTP/1.1 408 Slow\r\n\r\n", "status 408"),
        (answer(b"x", headers={"Content-Encoding": "gzip"}), "compressed"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", "more than 5 times"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", "peer closed"),
        (b"nonsense\r\n\r\n", "illegal"),
    ],
)
async def test_an_answer_that_is_none_is_unavailable_with_its_reason(said: bytes, why: str) -> None:
    async with serving(said) as server:
        with pytest.raises(Unavailable, match=why):
            async with paged(server).open(ResumeState()) as intakes:
                await anext(intakes)


async def test_an_answer_that_never_ends_is_given_up() -> None:
    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with listening(attend) as port:
        source = PollingSource(f"poll+http://127.0.0.1:{port}/", "x", within=timedelta(milliseconds=200))
        with pytest.raises(Unavailable, match=r"no complete response within 0\.2 s"):
            async with source.open(ResumeState()) as intakes:
                await anext(intakes)


async def test_an_answer_that_is_held_back_does_not_hold_up_the_opening() -> None:
    async with serving(b"", stays=True) as server:
        before = asyncio.all_tasks()
        async with asyncio.timeout(10), paged(server).open(ResumeState()):
            assert len(server.heads) == 1
        await until(lambda: asyncio.all_tasks() <= before)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("poll+ws://host/", {}, "not an HTTP"),
        ("poll+http://host/", {"items": "a..b"}, "items"),
        ("poll+http://host/", {"cursor": "header:"}, "header:"),
        ("poll+http://host/", {"every": timedelta(0)}, "every"),
        ("poll+http://host/", {"parameters": {"timeout": 30}}, 'write "30"'),
        ("poll+http://host/", {"headers": {"": ""}}, "headers"),
        ("poll+http://host/", {"max_size": 0}, "max_size"),
    ],
)
def test_what_cannot_be_asked_for_is_misconfigured(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        PollingSource(url, "x", **options)


def test_its_address_leads_to_it() -> None:
    source = source_at("poll+https://host/x", "x", {"every": "5 s", "cursor": "next"})
    assert isinstance(source, PollingSource)
    assert source.guarantee is Guarantee.EXACTLY_ONCE
    assert source.every == timedelta(seconds=5)


PAGE = 500 if os.environ.get("PENSTOCK_SOAK") else 7


class Outside:
    """A server that gives what lies behind a number, a few at a time: also more than before for an old number."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self.source = PollingSource("poll+http://127.0.0.1:1/", "pages")

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.kept += payloads

    async def disconnect(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    def acknowledged(self) -> None:
        return None

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            asked_for = parse_qs(urlsplit((await head(reader))[""].split()[1]).query)
            after = int(asked_for.get("after", ["0"])[0])
            some = self.kept[after : after + PAGE]
            writer.write(answer(b'{"items":[%b],"next":%d}' % (b",".join(some), after + len(some))))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Outside]:
    outside = Outside()
    async with listening(outside.attend) as port:
        outside.source = PollingSource(
            f"poll+http://127.0.0.1:{port}/", "pages", items="items", cursor="next", parameter="after", every=QUICK
        )
        yield outside
        await until(lambda: not outside.writers)


class TestContract(SourceContract):
    pass


class TestKilled(CrashContract):
    pass
