"""Records by HTTP."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.collect.outside import Poster, taken, trying
from tests.ports import later_port

from penstock.collect.http import HttpSource
from penstock.collect.registry import source_at
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.testing.killing import CrashContract
from penstock.testing.sources import SourceContract, anything


def source_in(folder: Path, **options: Any) -> HttpSource:
    return HttpSource(f"listen+http://127.0.0.1:{later_port()}/in", "door", folder=folder, **options)


class Till(Poster):
    """With numbers, or without."""

    async def post(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        url = self.source.url.removeprefix("listen+")
        identity = f"?sender=poster&epoch=1&seq={number + 1}" if self.source.named else ""
        return await client.post(url + identity, content=self.kept[number])


@pytest.fixture(params=[True, False], ids=["named", "nameless"])
async def upstream(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Till]:
    async with trying(Till(source_in(tmp_path, named=request.param))) as till:
        yield till


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return anything(payload)


class TestKilled(CrashContract):
    pass


class Door:
    """A source that is open, and a client of it."""

    def __init__(self, source: HttpSource, client: httpx.AsyncClient, intakes: AsyncIterator[Intake]) -> None:
        self.source, self.client, self.intakes = source, client, intakes

    async def taken(self, count: int) -> list[Arrival]:
        return await taken(self.intakes, count)

    async def posted(self, body: bytes, path: str = "/in", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, content=body, headers=named)

    async def figures(self) -> dict[str, Any]:
        return dict((await self.client.get("/in")).json())

    async def raw(self, said: bytes) -> bytes:
        """What is answered to these bytes."""
        port = int(self.source.url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(said)
            async with asyncio.timeout(20):
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()


@asynccontextmanager
async def opened(source: HttpSource, taken: ResumeState | None = None) -> AsyncIterator[Door]:
    async with (
        source.open(taken or ResumeState()) as intakes,
        httpx.AsyncClient(base_url=source.url.removeprefix("listen+").removesuffix("/in"), timeout=30) as client,
    ):
        yield Door(source, client, intakes)


async def test_a_body_is_a_record_and_is_answered_once_it_is_safe(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = asyncio.create_task(door.posted(b"\xff\x00 anything", content_type="image/png"))
        intake = await anext(door.intakes)
        (arrival,) = intake.arrivals
        assert isinstance(arrival, Arrival)
        assert arrival.value == b"\xff\x00 anything"
        assert not posting.done()
        await intake.settle(None)
        answer = await posting
        assert answer.status_code == 202
        assert answer.json()["receipts"] == 1
        assert answer.headers["location"] == f"/receipts/{answer.json()['receipt']}"


async def test_numbers_have_no_gap_whatever_is_refused_between_them(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, max_size=10)) as door:
        bodies = (b"1", b"x" * 11, b"2", b"", b"3\n4\n" + b"x" * 11, b"3\r\n\n4")
        posting = [asyncio.create_task(door.posted(body, "/in?lines")) for body in bodies]
        found = await door.taken(4)
        statuses = [(await one).status_code for one in posting]
    assert statuses == [202, 413, 202, 400, 413, 202]
    assert sorted(one.value for one in found) == [b"1", b"2", b"3", b"4"]
    assert [one.origin and one.origin.seq for one in found] == [1, 2, 3, 4]
    assert {one.origin and one.origin.sender for one in found} == {"door.http"}


async def test_each_opening_numbers_anew_in_a_later_epoch(tmp_path: Path) -> None:
    source, epochs = source_in(tmp_path), []
    for locations in ({}, {"door.http": (2**62, 5)}):
        async with opened(source, ResumeState(locations)) as door:
            posting = asyncio.create_task(door.posted(b"x"))
            (found,) = await door.taken(1)
            await posting
            assert found.origin is not None
            assert found.origin.seq == 1
            epochs.append(found.origin.epoch)
    assert epochs[0] < 2**62 < epochs[1]


async def test_who_says_who_it_is_keeps_its_numbers(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = [
            asyncio.create_task(door.posted(b"a\nb", "/in?lines&sender=k%2F1&epoch=7&seq=41")),
            asyncio.create_task(door.posted(b"c", idempotency_key='"k/1/7/43"')),
        ]
        found = await door.taken(3)
        assert {(await one).status_code for one in posting} == {202}
    told = [one.origin and (one.origin.sender, one.origin.epoch, one.origin.seq) for one in found]
    assert sorted(told, key=str) == [("k/1", 7, 41), ("k/1", 7, 42), ("k/1", 7, 43)]


@pytest.mark.parametrize(
    ("path", "body", "limit", "option"),
    [
        ("/in", b"x" * 5_000_000, 900_000, "max_size"),
        ("/in?lines", b"x\n" * 4_200_000, 8 << 20, "body"),
        ("/in?lines", b"x\n" + b"x" * 900_001, 900_000, "max_size"),
    ],
)
async def test_who_sends_too_much_learns_the_limit_and_the_option_that_raises_it(
    tmp_path: Path, path: str, body: bytes, limit: int, option: str
) -> None:
    async with opened(source_in(tmp_path)) as door:
        answer = await door.posted(body, path)
    assert (answer.status_code, answer.json()["limit"], answer.json()["option"]) == (413, limit, option)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "location", "said"),
    [
        ("/in", b"", {}, 400, "the body", "it is empty"),
        ("/in?lines", b"\n\r\n", {}, 400, "the body", "it is empty"),
        ("/in", b"x" * 1_001, {}, 413, "the body", "1,000 bytes"),
        ("/in", b"x" * 5_001, {}, 413, "the body", "1,000 bytes"),
        ("/in?lines", b"x\n" * 2_501, {}, 413, "the body", "more than 5,000 bytes"),
        ("/in?lines", b"a\n" + b"x" * 1_001, {}, 413, "line 2", "nothing was taken"),
        ("/in?lines", b"x\n" * 11, {}, 413, "line 11", "more than 10 records"),
        ("/in?lines=1", b"x", {}, 400, "?lines", "takes no value"),
        ("/in?anwser=1s", b"x", {}, 400, "?anwser", "unknown parameter"),
        ("/in?answer=1s", b"x", {}, 400, "?answer", "has no answers"),
        ("/in?answer=soon", b"x", {}, 400, "?answer", "not a duration"),
        ("/in?answer=2h", b"x", {}, 400, "?answer", "too long"),
        ("/in?answer=1s&oneway", b"x", {}, 400, "?answer", "no answer"),
        ("/in?sender=a", b"x", {}, 400, "?sender", "missing: epoch and seq"),
        ("/in?sender=a&epoch=1&seq=-1", b"x", {}, 400, "?seq", "not a valid integer"),
        ("/in?sender=a&epoch=1&seq=9223372036854775808", b"x", {}, 400, "?seq", "not a valid integer"),
        ("/in?lines&sender=a&epoch=1&seq=9223372036854775807", b"x\ny", {}, 400, "?seq", "beyond 64 bits"),
        ("/in?sender=a&epoch=1e3&seq=1", b"x", {}, 400, "?epoch", "not a valid integer"),
        ("/in?sender=a%0Ab&epoch=1&seq=1", b"x", {}, 400, "?sender", "printable"),
        ("/in?sender=door&epoch=1&seq=1", b"x", {}, 400, "?sender", "this source"),
        ("/in?sender=door.http&epoch=1&seq=1", b"x", {}, 400, "?sender", "this source"),
        ("/in?sender=a&sender=b&epoch=1&seq=1", b"x", {}, 400, "?sender", "twice"),
        (
            "/in",
            b"x",
            {"idempotency-key": "8e03978e-40d5-43e8-bc93-6894a57f9324"},
            400,
            "idempotency",
            "SENDER/EPOCH/SEQ",
        ),
        ("/in?sender=a&epoch=1&seq=1", b"x", {"idempotency-key": "a/1/2"}, 400, "idempotency", "another identity"),
        ("/in", b"x", {"content-encoding": "br"}, 415, "content-encoding", "not supported"),
        ("/in", b"x", {"content-encoding": "gzip"}, 400, "the body", "not valid gzip"),
        (
            "/in",
            gzip.compress(b"x" * 100, mtime=0)[:-4],
            {"content-encoding": "gzip"},
            400,
            "the body",
            "ends early",
        ),
        ("/in", gzip.compress(b"", mtime=0), {"content-encoding": "gzip"}, 400, "the body", "it is empty"),
        (
            "/in",
            gzip.compress(b"", mtime=0) * 101,
            {"content-encoding": "gzip"},
            400,
            "the body",
            "more than 100",
        ),
        (
            "/in",
            gzip.compress(b"x", mtime=0) + b"tail",
            {"content-encoding": "gzip"},
            400,
            "the body",
            "not valid gzip",
        ),
        (
            "/in",
            gzip.compress(bytes(4 << 20), mtime=0),
            {"content-encoding": "gzip"},
            413,
            "the body",
            "1,000 bytes",
        ),
        ("/in", b"x", {"origin": "https://elsewhere.example"}, 403, "the header origin", "cross-site"),
        ("/in", b"x", {"host": "elsewhere.example"}, 403, "the header host", "not a name"),
        ("/in/", b"x", {}, 404, "POST /in/", "unknown address"),
        ("/in/..%2Fin", b"x", {}, 404, "POST", "unknown address"),
    ],
)
async def test_what_a_client_does_wrong_is_told_with_its_place_and_nothing_is_taken(
    tmp_path: Path, path: str, body: bytes, headers: dict[str, str], status: int, location: str, said: str
) -> None:
    source = source_in(tmp_path, max_size=1_000, body=5_000, records=10)
    async with opened(source) as door:
        answer = await door.client.post(path, content=body, headers=headers)
        assert answer.status_code == status
        assert location in answer.json()["place"]
        assert said in answer.json()["error"]
        assert "fix" in answer.json()
        posting = asyncio.create_task(door.posted(b"good"))
        assert [one.value for one in await door.taken(1)] == [b"good"]
        await posting


@pytest.mark.parametrize("how", ["address", "header"])
async def test_a_jump_is_refused_and_nothing_is_taken(tmp_path: Path, how: str) -> None:
    async with opened(source_in(tmp_path), ResumeState({"a": (5, 41)}, highest={"a": (5, 41)})) as door:
        asked = f"?sender=a&epoch=5&seq={2**62}" if how == "address" else ""
        headers = {} if asked else {"idempotency-key": f"a/5/{2**62}"}
        answer = await door.client.post(f"/in{asked}", content=b"x", headers=headers)
        assert (answer.status_code, answer.json()["place"]) == (400, "?seq")
        posting = asyncio.create_task(door.client.post("/in?sender=a&epoch=5&seq=42", content=b"good"))
        assert [one.value for one in await door.taken(1)] == [b"good"]
        assert (await posting).status_code == 202


async def test_a_name_is_asked_for_where_it_is_needed(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, named=True)) as door:
        answer = await door.posted(b"x")
        assert answer.status_code == 400
        assert answer.json()["fix"] == "add ?sender=NAME&epoch=N&seq=N"


async def test_what_is_packed_is_unpacked_also_in_parts(tmp_path: Path) -> None:
    values = [b"%d" % number * 10_000 for number in range(3)]
    packed = b"".join(gzip.compress(value + b"\n") for value in values)
    async with opened(source_in(tmp_path)) as door:
        posting = asyncio.create_task(door.posted(packed, content_encoding="gzip", content_type="application/x-ndjson"))
        assert [one.value for one in await door.taken(3)] == values
        assert (await posting).json()["receipts"] == 3


async def test_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, max_size=1_000, body=1_000, records=3)) as door:
        for body, path, count in ((b"x" * 1_000, "/in", 1), (b"x\ny\nz\n", "/in?lines", 3)):
            posting = asyncio.create_task(door.posted(body, path))
            await door.taken(count)
            assert (await posting).status_code == 202


async def test_one_way_is_answered_before_it_is_safe_and_dropped_when_there_is_no_room(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        answer = await door.posted(b"x" * 900_000, "/in?oneway")
        assert answer.status_code == 202
        while (await door.posted(b"x" * 900_000, "/in?oneway")).status_code == 202:
            pass
        full = await door.posted(b"x")
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert "queue is full" in full.json()["error"]
        figures = await door.figures()
        assert figures["dropped"] == 1
        assert 16 <= figures["in_flight"] < 25
        assert len(await door.taken(figures["in_flight"])) == figures["in_flight"]
        assert (await door.figures())["in_flight"] == 0


async def test_what_is_not_safe_in_time_may_be_there_and_its_receipt_tells(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, within=timedelta(milliseconds=50))) as door:
        answer = await door.posted(b"x")
        assert answer.status_code == 503
        assert "not durable yet" in answer.json()["error"]
        where = f"/receipts/{answer.json()['receipt']}"
        assert (await door.client.get(where)).json()["state"] == "in flight"
        await door.taken(1)
        assert (await door.client.get(where)).json()["state"] == "safe"


async def test_what_was_not_taken_is_told(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = asyncio.create_task(door.posted(b"x"))
        await (await anext(door.intakes)).settle(Unavailable("the channel", "it is away"))
        answer = await posting
        assert answer.status_code == 503
        assert "the channel is unavailable" in answer.json()["error"]


async def test_who_waits_when_the_source_is_closed_hears_what_became_of_its_record(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    async with httpx.AsyncClient() as client:
        async with source.open(ResumeState()) as intakes:
            posting = asyncio.create_task(client.post(source.url.removeprefix("listen+"), content=b"x"))
            intake = await anext(intakes)
            settling = asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(intake.settle(None)))
        assert (await posting).status_code == 202
        settling.cancel()


async def test_a_client_that_goes_away_right_after_the_body_has_its_record_taken(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        port = int(door.source.url.rpartition(":")[2].partition("/")[0])
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc")
            await writer.drain()
            writer.transport.abort()
        assert [one.value for one in await door.taken(3)] == [b"abc"] * 3


async def test_heads_and_bodies_a_byte_at_a_time_are_taken_and_neighbours_do_not_notice(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        port = int(door.source.url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in b"POST /in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n0123456789":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert [one.value for one in await door.taken(1)] == [b"0123456789"]
        assert b"202 Accepted" in await reader.readline()
        writer.close()


async def test_a_body_that_does_not_come_is_given_up_and_so_is_a_head(tmp_path: Path) -> None:
    source = source_in(tmp_path, upload=timedelta(milliseconds=100), idle_timeout=timedelta(seconds=1))
    async with opened(source) as door:
        head = await door.raw(b"POST /in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab")
        assert b"408" in head.splitlines()[0]
        with pytest.raises(asyncio.IncompleteReadError):
            await door.raw(b"POST /in HTTP/1.1\r\nHost: loc")
        announced = await door.raw(b"POST /in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert b"413" in announced.splitlines()[0]


async def test_a_client_that_expects_to_be_asked_for_its_body_is(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        said = b"POST /in HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
        assert b"100" in (await door.raw(said)).splitlines()[0]


async def test_what_a_foreigner_says_on_the_port_hurts_nobody(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        for said in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"\x00" * 5_000, b"GET /" + b"a" * 100_000):
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                assert b"400" in (await door.raw(said)).splitlines()[0]
        posting = asyncio.create_task(door.posted(b"good"))
        await door.taken(1)
        assert (await posting).status_code == 202


async def test_pages_that_may_are_let_in(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, origins="https://a.example, https://b.example")) as door:
        asked = {"origin": "https://b.example", "access-control-request-method": "POST"}
        before = await door.client.options("/in", headers=asked)
        assert before.headers["access-control-allow-origin"] == "https://b.example"
        posting = asyncio.create_task(door.posted(b"x", origin="https://b.example"))
        await door.taken(1)
        assert (await posting).headers["access-control-allow-origin"] == "https://b.example"
        assert (await door.posted(b"x", origin="https://c.example")).status_code == 403


async def test_bodies_together_are_bounded(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, memory=1_000)) as door:
        answer = await door.posted(b"x" * 1_001)
        assert answer.status_code == 503
        assert "memory" in answer.json()["error"]


async def test_many_at_once_are_each_answered(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = [asyncio.create_task(door.posted(b"%d" % number)) for number in range(100)]
        found = await door.taken(100)
        assert {(await one).status_code for one in posting} == {202}
    assert sorted(one.value for one in found) == sorted(b"%d" % number for number in range(100))
    assert [one.origin and one.origin.seq for one in found] == list(range(1, 101))


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("listen+http://127.0.0.1/in", {}, "no port"),
        ("listen+http://127.0.0.1:80/receipts/x", {}, '"/receipts/x"'),
        ("listen+http://127.0.0.1:80/{id}", {}, "{id}"),
        ("listen+http://127.0.0.1:80/in", {"max_size": 0}, "max_size: 0"),
        ("listen+http://127.0.0.1:80/in", {"records": "many"}, "records: 'many'"),
    ],
)
def test_what_cannot_be_is_misconfigured(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(said)):
        HttpSource(url, "door", **options)


async def test_a_folder_that_cannot_be_is_misconfigured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = replace(source_in(tmp_path), folder=tmp_path / "file" / "folder")
    with pytest.raises(Misconfigured, match="choose another folder"):
        async with source.open(ResumeState()):
            pass


async def test_answers_need_channels(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="answers"):
        async with source_in(tmp_path, answers="results").open(ResumeState()):
            pass


def test_its_address_makes_it() -> None:
    source = source_at("listen+http://127.0.0.1:8700/in", "door", {"within": "2 s", "named": True})
    assert isinstance(source, HttpSource)
    assert source.within == timedelta(seconds=2)
    assert source.guarantee is Guarantee.EXACTLY_ONCE


def test_processes_that_share_a_port_do_not_know_of_each_other() -> None:
    source = HttpSource("listen+http://127.0.0.1:8700/in", "door", named=True, shared=True)
    assert source.guarantee is Guarantee.AT_LEAST_ONCE
    assert "another process" in source.description
