"""Server-sent events from servers that are good, bad and away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import repeat
from time import monotonic
from typing import Any

import pytest
from tests.collect.scripted import STREAM as HEAD
from tests.collect.scripted import Events, head, listening, serving

from penstock.channels.memory import MemoryChannels
from penstock.collect.ingest import reconnecting
from penstock.collect.registry import source_at
from penstock.collect.sse import SseSource, last_id
from penstock.core.clock import SystemClock
from penstock.core.contracts import Arrival, Guarantee, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import OutageInterval
from penstock.testing.killing import CrashContract
from penstock.testing.sources import Running, SourceContract, arrivals, plain, until


async def heard(source: SseSource, most: int = 1_000, taken: ResumeState | None = None) -> list[Arrival]:
    """The first arrivals; all, if the server hangs up before."""
    found: list[Arrival] = []
    try:
        async with asyncio.timeout(20), source.open(taken or ResumeState()) as intakes:
            async for intake in intakes:
                found += arrivals(intake)
                if len(found) >= most:
                    break
    except Unavailable as error:
        if "closed the connection" not in str(error):
            raise
    return found


async def test_each_event_is_a_record_with_a_cursor_of_its_own() -> None:
    said = b"id: 1\ndata: a\n\ndata: \xff\ndata: b\n\nid: 2\nevent: x\ndata:\n\nid: 3\ndata: never ended\n"
    async with serving(HEAD + said) as server:
        found = await heard(SseSource(f"sse+{server.url}", "events"))
    assert found == [Arrival(b"a", cursor="1#0"), Arrival(b"\xff\nb", cursor="1#1"), Arrival(b"", cursor="2#0")]
    assert server.heads[0]["accept"] == "text/event-stream"
    assert "last-event-id" not in server.heads[0]


async def test_it_goes_on_behind_the_last_id_also_after_two_reconnections_in_a_row() -> None:
    answers = [HEAD + b"retry: 0\nid: 7\ndata: a\n\n", HEAD, b"", HEAD + b"data: b\n\nid: 8\ndata: c\n\n"]
    async with (
        serving(*answers, stays=False) as server,
        Running(SseSource(f"sse+{server.url}", "x"), MemoryChannels()) as running,
    ):
        await running.until(lambda: len(server.heads) >= 5)
    assert [one.get("last-event-id") for one in server.heads[:5]] == [None, "7", "7", "7", "8"]
    assert set(running.values()) == {b"a", b"b", b"c"}


async def test_what_comes_again_after_an_id_is_dropped() -> None:
    first = HEAD + b"id: 7\ndata: a\n\ndata: b\n\ndata: c\n\n"
    async with (
        serving(first, HEAD + b"data: b\n\ndata: c\n\ndata: d\n\n") as server,
        Running(SseSource(f"sse+{server.url}", "x"), MemoryChannels()) as running,
    ):
        await running.until(lambda: len(server.heads) >= 6)
    assert sorted(running.values().elements()) == [b"a", b"b", b"c", b"d"]


async def test_any_id_can_be_in_a_cursor_and_is_sent_back_as_it_was() -> None:
    for id_ in (b"41", b"a b", b"#", b"%41", "ü/№".encode(), b"\xff\xfe", b"0#0", b"..", b"x" * 1_024):
        async with serving(HEAD + b"id: " + id_ + b"\ndata: a\n\n") as server:
            (found,) = await heard(SseSource(f"sse+{server.url}", "x"))
            assert found.cursor is not None
            assert found.cursor.isascii()
            await heard(SseSource(f"sse+{server.url}", "x"), taken=ResumeState(cursor=found.cursor))
        assert server.heads[1]["last-event-id"].encode("latin-1") == id_


def test_a_cursor_of_another_source_is_none_of_ours() -> None:
    for foreign in ('{"cursor":"5"}', "", "#1", "5#x", "5", "a%00b#1", "%20#1", "a%0Ab#1", "x" * 1_025 + "#1"):
        assert last_id(foreign) is None


async def test_without_ids_and_without_resume_there_are_no_cursors() -> None:
    async with serving(HEAD + b"data: a\n\nid: 5\ndata: b\n\nid\ndata: c\n\n") as server:
        assert [one.cursor for one in await heard(SseSource(f"sse+{server.url}", "x"))] == [None, "5#0", None]
        source = SseSource(f"sse+{server.url}", "x", resume=False)
        assert [one.cursor for one in await heard(source, taken=ResumeState(cursor="5#0"))] == [None] * 3
    assert "last-event-id" not in server.heads[1]
    assert source.guarantee is Guarantee.BEST_EFFORT


async def test_what_a_server_without_ids_said_meanwhile_is_reported_as_unknown() -> None:
    async def resume() -> ResumeState:
        return ResumeState()

    async with serving(HEAD + b"data: same\n\n") as server:
        source = reconnecting(SseSource(f"sse+{server.url}", "x"), resume, SystemClock(), delays=lambda: repeat(0.001))
        found: list[object] = []
        async with aclosing(source) as intakes:
            async for intake in intakes:
                found += intake.arrivals
                if len(found) == 5:
                    break
    assert [type(one) for one in found] == [Arrival, OutageInterval, Arrival, OutageInterval, Arrival]


async def test_only_the_types_that_are_wanted_are_taken_and_the_count_goes_on() -> None:
    said = b"id: 1\ndata: a\n\nevent: x\ndata: b\n\nevent: y\ndata: c\n\nevent: x\ndata: d\n\n"
    async with serving(HEAD + said) as server:
        found = await heard(SseSource(f"sse+{server.url}", "x", events=("x",)))
        assert [(one.value, one.cursor) for one in found] == [(b"b", "1#1"), (b"d", "1#3")]
        found = await heard(SseSource(f"sse+{server.url}", "x", events=("message", "y")))
        assert [one.value for one in found] == [b"a", b"c"]


async def test_an_event_beyond_the_limit_is_a_dead_letter_and_the_stream_goes_on() -> None:
    said = b"id: 1\ndata: " + b"x" * 100 + b"\n\ndata: " + b"y" * 101 + b"\n\ndata: z\n\n"
    async with serving(HEAD + said) as server:
        found = await heard(SseSource(f"sse+{server.url}", "x", max_size=100))
    assert [(one.value[:1], one.cursor, one.refused) for one in found] == [
        (b"x", "1#0", None),
        (b"y", "1#1", "it has 101 bytes, more than the 100 that an event may have"),
        (b"z", "1#2", None),
    ]


async def test_204_ends_the_source_for_ever() -> None:
    async with serving(HEAD + b"id: 1\ndata: a\n\n", b"HTTP/1.1 204 No Content\r\n\r\n") as server:
        running = Running(SseSource(f"sse+{server.url}", "x"), MemoryChannels())
        async with running, asyncio.timeout(20):
            assert running._task is not None
            await running._task
    assert list(running.values()) == [b"a"]
    assert len(server.heads) == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "status 401"),
        (b"HTTP/1.1 500 \x1b[2J\r\n\r\n", "status 500"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "status 304"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "status 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=x\r\n\r\n<", "'text/html'"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "content type is ''"),
        (HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n", "compressed"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "not (an )?HTTP|is not HTTP"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[::\r\n\r\n", "Invalid URL"),
        (b"HTTP/1.1 307 Again\r\nLocation: /events\r\n\r\n", "more than 5 times"),
        (b"\x16\x03\x01\x02\x00\x01", "illegal"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "illegal status line"),
        (b"", "disconnected without sending a response"),
        (HEAD[:-2] + b"X: " + b"x" * 200_000, "too long|max buffer|disconnected"),
        (HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk"),
        (HEAD[:-2] + b"Content-Length: 50\r\n\r\ndata", "peer closed"),
    ],
)
async def test_an_answer_that_is_none_is_unavailable_with_its_reason(answer: bytes, why: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(Unavailable, match=why) as error:
            await heard(SseSource(f"sse+{server.url}?token=hush", "x"))
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()
    assert "hush" not in str(error.value)


async def test_nobody_there_and_nobody_who_speaks_are_unavailable() -> None:
    async with serving(b"", stays=True) as server:
        with pytest.raises(Unavailable, match=r"no data for 0\.05 s"):
            await heard(SseSource(f"sse+{server.url}", "x", silent_after=timedelta(milliseconds=50)))
    async with serving(HEAD + b": hello\n\n", stays=True) as server:
        with pytest.raises(Unavailable, match=r"no data for 0\.05 s"):
            await heard(SseSource(f"sse+{server.url}", "x", silent_after=timedelta(milliseconds=50)))
    with pytest.raises(Unavailable, match=rf"http://127\.0\.0\.1:{server.port}/events is unavailable"):
        await heard(SseSource(f"sse+{server.url}", "x"))


async def test_a_comment_now_and_then_keeps_a_connection() -> None:
    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(HEAD)
        for _ in range(20):
            writer.write(b":\n")
            await asyncio.sleep(0.02)
        writer.write(b"data: a\n\n")
        writer.close()

    async with listening(attend) as port:
        source = SseSource(f"sse+http://127.0.0.1:{port}/", "x", silent_after=timedelta(milliseconds=200))
        assert [one.value for one in await heard(source)] == [b"a"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed_and_secrets_stay_at_home(status: int) -> None:
    async with serving(HEAD + b"id: 2\ndata: a\n\n") as other:
        there = other.url
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: "
        async with serving(f"{moved}/here\r\n\r\n".encode(), f"{moved}{there}\r\n\r\n".encode()) as server:
            source = SseSource(f"sse+{server.url}", "x", headers={"Authorization": "Bearer hush", "X-Key": "hush"})
            assert len(await heard(source, taken=ResumeState(cursor="1#0"))) == 1
    assert [one["x-key"] for one in server.heads] == ["hush", "hush"]
    assert [one[""] for one in server.heads] == ["GET /events HTTP/1.1", "GET /here HTTP/1.1"]
    assert "hush" not in str(other.heads)
    assert other.heads[0]["last-event-id"] == "1"


@pytest.mark.parametrize("kind", ["seconds", "date", "retry"])
async def test_a_server_says_when_to_come_back_and_is_heard(kind: str) -> None:
    said = HEAD + b"retry: 400\n\n"
    if kind != "retry":
        later = datetime.now(UTC) + timedelta(seconds=1.4)
        after = "1" if kind == "seconds" else format_datetime(later, usegmt=True)
        said = f"HTTP/1.1 503 Busy\r\nRetry-After: {after}\r\n\r\n".encode()
    async with serving(said, HEAD + b"data: a\n\n") as server:
        source = SseSource(f"sse+{server.url}", "x")
        with pytest.raises(Unavailable):
            async with source.open(ResumeState()) as intakes:
                await anext(intakes)
        before = monotonic()
        assert len(await heard(source)) == 1
        assert 0.3 < monotonic() - before < 5


async def test_a_server_that_wants_no_pause_is_not_asked_without_one() -> None:
    """The pause of whoever connects again holds all the same."""
    async with (
        serving(HEAD + b"retry: 0\ndata: a\n\n") as server,
        Running(SseSource(f"sse+{server.url}", "x"), MemoryChannels()) as running,
    ):
        before = monotonic()
        await running.until(lambda: len(server.heads) >= 6)
        assert monotonic() - before >= 0.04


async def test_a_slow_pump_makes_the_server_wait() -> None:
    sent = 0

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head(reader)
        writer.write(HEAD)
        try:
            while True:
                writer.write(b"data: " + b"x" * 100_000 + b"\n\n")
                await writer.drain()
                sent += 1
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with (
        listening(attend) as port,
        SseSource(f"sse+http://127.0.0.1:{port}/", "x").open(ResumeState()) as intakes,
    ):
        await anext(intakes)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 200
        more = sent
        while sent <= more:
            await anext(intakes)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("sse+ftp://host/", {}, "not (an )?HTTP|is not HTTP"),
        ("sse+http:///path", {}, "not (an )?HTTP|is not HTTP"),
        ("sse+http://host:99999/", {}, "99999"),
        ("sse+http://ho\nst/", {}, "source x"),
        ("sse+http://host/", {"headers": {"a b": "c"}}, "'a b'"),
        ("sse+http://host/", {"headers": {"a": "hush\r\nc"}}, "'a'"),
        ("sse+http://host/", {"events": "x"}, r'write \["x"\]'),
        ("sse+http://host/", {"silent_after": timedelta(0)}, "silent_after"),
        ("sse+http://host/", {"max_size": 0}, "max_size"),
    ],
)
def test_what_cannot_be_asked_for_is_misconfigured(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said) as error:
        SseSource(url, "x", **options)
    assert "hush" not in str(error.value)


def test_its_address_leads_to_it_with_options_as_they_are_written() -> None:
    source = source_at("sse+https://host/x", "x", {"silent_after": "5 s", "events": ["a"], "headers": {"A": "b"}})
    assert isinstance(source, SseSource)
    assert (source.silent_after, source.events, source.headers) == (timedelta(seconds=5), ("a",), {"A": "b"})


class Outside(Events):
    def __init__(self) -> None:
        super().__init__()
        self.source = SseSource("sse+http://127.0.0.1:1/", "events")

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    def acknowledged(self) -> None:
        return None


@pytest.fixture
async def upstream() -> AsyncIterator[Outside]:
    outside = Outside()
    async with listening(outside.attend) as port:
        outside.source = SseSource(f"sse+http://127.0.0.1:{port}/", "events")
        yield outside
        await outside.disconnect()
        await until(lambda: not outside.writers)


class TestContract(SourceContract):
    pass


class TestKilled(CrashContract):
    pass
