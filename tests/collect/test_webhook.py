"""Webhooks from a provider that signs, and repeats until it is answered."""

import asyncio
import re
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.collect.outside import Poster, taken, trying
from tests.collect.waiting import until
from tests.ports import later_port

from penstock.channels.memory import MemoryChannels
from penstock.collect.registry import source_at
from penstock.collect.webhook import Deliveries, Delivery, WebhookSource
from penstock.core.contracts import Arrival, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.signatures import new_secret, parse_secrets, sign
from penstock.testing import ManualClock
from penstock.testing.killing import CrashContract
from penstock.testing.sources import Running, SourceContract, anything

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = parse_secrets("", SECRET)[0]


def source_in(folder: Path, **options: Any) -> WebhookSource:
    options = {"secret": SECRET, **options}
    return WebhookSource(f"listen+webhook://127.0.0.1:{later_port()}/hook", "shop", folder=folder, **options)


def address(source: WebhookSource) -> str:
    return "http" + source.url.removeprefix("listen+webhook")


class Provider(Poster):
    """It signs each message anew, and keeps its id."""

    async def post(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        body = self.kept[number]
        headers = sign(KEY, f"msg_{number}", int(time.time()), body)
        return await client.post(address(self.source), content=body, headers=headers)


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[Provider]:
    async with trying(Provider(source_in(tmp_path))) as provider:
        yield provider


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return anything(payload)


class TestKilled(CrashContract):
    pass


class Door:
    """A source that is open, and a provider that does what a test says."""

    def __init__(self, source: WebhookSource, client: httpx.AsyncClient, intakes: AsyncIterator[Intake]) -> None:
        self.source, self.client, self.intakes = source, client, intakes

    async def taken(self, count: int) -> list[Arrival]:
        return await taken(self.intakes, count)

    async def posted(self, body: bytes, message: str = "msg_1", **other: str | None) -> httpx.Response:
        """A signed message; `other` are headers in the place of the right ones."""
        headers = dict(sign(KEY, message, self.source.clock.now() // 1_000_000, body))
        for name, value in other.items():
            del headers[name.replace("_", "-")]
            if value is not None:
                headers[name.replace("_", "-")] = value
        return await self.client.post(address(self.source), content=body, headers=headers)

    def posting(self, body: bytes, message: str = "msg_1", **other: str | None) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.posted(body, message, **other))


@asynccontextmanager
async def opened(source: WebhookSource) -> AsyncIterator[Door]:
    async with source.open(ResumeState()) as intakes, httpx.AsyncClient(timeout=30) as client:
        yield Door(source, client, intakes)


async def test_a_message_is_answered_once_it_is_safe_and_numbered_by_its_id(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = door.posting(b"a")
        intake = await anext(door.intakes)
        assert not posting.done()
        await intake.settle(None)
        answer = await posting
        assert (answer.status_code, answer.json()) == (202, {"id": "msg_1"})
        again = await door.posted(b"a")
        assert again.status_code == 202
        posting = door.posting(b"b", "msg_2")
        (found,) = await door.taken(1)
        await posting
        assert found.origin is not None
        assert (found.value, found.origin.sender, found.origin.seq) == (b"b", "shop.webhook", 2)


def test_a_signature_is_that_of_the_standard() -> None:
    """The example that the standard itself gives."""
    body = b'{"test": 2432232314}'
    headers = sign(KEY, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_any_of_several_signatures_by_any_of_several_secrets_is_enough(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, secret=(new_secret(), "any text"))) as door:
        now = door.source.clock.now() // 1_000_000
        good = sign(b"any text", "msg_1", now, b"x")["webhook-signature"]
        posting = door.posting(b"x", webhook_signature=f"v1a,abc v1,AAAA {good}")
        await door.taken(1)
        assert (await posting).status_code == 202
        assert (await door.posted(b"x")).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status", "location", "said"),
    [
        ({"webhook_signature": None}, 401, "webhook-signature", "missing"),
        ({"webhook_signature": ""}, 401, "webhook-signature", "does not match"),
        ({"webhook_signature": "v1,"}, 401, "webhook-signature", "does not match"),
        ({"webhook_signature": "v1," + "A" * 44}, 401, "webhook-signature", "does not match"),
        ({"webhook_signature": "v1,é"}, 401, "webhook-signature", "does not match"),
        ({"webhook_signature": "v2,abc " * 1_000}, 401, "webhook-signature", "does not match"),
        ({"webhook_timestamp": "1"}, 401, "webhook-signature", "does not match"),
        ({"webhook_timestamp": None}, 400, "webhook-timestamp", "missing"),
        ({"webhook_timestamp": "now"}, 400, "webhook-timestamp", "not a number"),
        ({"webhook_timestamp": "-1"}, 400, "webhook-timestamp", "not a number"),
        ({"webhook_timestamp": "9" * 5_000}, 400, "webhook-timestamp", "not a number"),
        ({"webhook_id": None}, 400, "webhook-id", "missing"),
        ({"webhook_id": ""}, 400, "webhook-id", "1 to 256"),
        ({"webhook_id": "m" * 257}, 400, "webhook-id", "1 to 256"),
        ({"webhook_id": "m\x1b[2J"}, 400, "webhook-id", "1 to 256"),
        ({"webhook_id": "another"}, 401, "webhook-signature", "does not match"),
    ],
)
async def test_what_is_not_signed_as_it_has_to_be_is_turned_away(
    tmp_path: Path, headers: dict[str, str | None], status: int, location: str, said: str
) -> None:
    async with opened(source_in(tmp_path)) as door:
        try:
            answer = await door.posted(b"x", "msg_1", **headers)
        except (UnicodeEncodeError, httpx.LocalProtocolError):
            answer = await raw_post(door, headers)
        assert answer.status_code == status
        if answer.content[:1] == b"{":
            assert location in answer.json()["place"]
            assert said in answer.json()["error"]
        posting = door.posting(b"good")
        assert [one.value for one in await door.taken(1)] == [b"good"]
        assert (await posting).status_code == 202


async def raw_post(door: Door, headers: dict[str, str | None]) -> httpx.Response:
    """What a client library would not send."""
    told = dict(sign(KEY, "msg_1", door.source.clock.now() // 1_000_000, b"x"))
    told |= {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    port = int(door.source.url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"POST /hook HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n{head}\r\nx".encode("latin-1"))
        async with asyncio.timeout(20):
            return httpx.Response(int((await reader.readline()).split()[1]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("header", "status"), [("webhook-signature", 401), ("webhook-id", 400), ("webhook-timestamp", 400)]
)
async def test_a_header_that_is_there_twice_is_turned_away(tmp_path: Path, header: str, status: int) -> None:
    async with opened(source_in(tmp_path)) as door:
        told = list(sign(KEY, "msg_1", door.source.clock.now() // 1_000_000, b"x").items())
        told += [(name, value) for name, value in told if name == header]
        answer = await door.client.post(address(door.source), content=b"x", headers=told)
        assert (answer.status_code, answer.json()["error"]) == (status, "it is set twice")


async def test_what_was_signed_too_long_ago_or_too_far_ahead_is_turned_away(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(source_in(tmp_path, clock=clock)) as door:
        now = clock.now() // 1_000_000
        for seconds, status in ((-301, 401), (-300, 202), (300, 202), (301, 401)):
            headers = sign(KEY, f"msg_{seconds}", now + seconds, b"x")
            posting = asyncio.create_task(door.client.post(address(door.source), content=b"x", headers=headers))
            if status == 202:
                await door.taken(1)
            answer = await posting
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["place"] == "the header webhook-timestamp"


async def test_a_copy_of_a_message_is_never_taken_within_the_window_or_after(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(source_in(tmp_path, clock=clock)) as door:
        headers = sign(KEY, "msg_1", clock.now() // 1_000_000, b"x")
        copies = [asyncio.create_task(door.client.post(address(door.source), content=b"x", headers=headers))]
        await door.taken(1)
        clock.move(290)
        copies += [asyncio.create_task(door.client.post(address(door.source), content=b"x", headers=headers))]
        assert [(await one).status_code for one in copies] == [202, 202]
        clock.move(20)
        assert (await door.client.post(address(door.source), content=b"x", headers=headers)).status_code == 401
        posting = door.posting(b"next", "msg_2")
        assert [one.value for one in await door.taken(1)] == [b"next"]
        await posting


async def test_the_same_id_with_another_body_is_refused_with_one_letter(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = door.posting(b"a")
        await door.taken(1)
        await posting
        posting = door.posting(b"b")
        (letter,) = await door.taken(1)
        assert (letter.value, letter.origin) == (b"b", None)
        assert letter.refused == "the webhook-id msg_1 was used with another body"
        answer = await posting
        assert (answer.status_code, answer.json()["place"]) == (409, "the header webhook-id")
        assert (await door.posted(b"b")).status_code == 409
        posting = door.posting(b"c", "msg_2")
        (found,) = await door.taken(1)
        assert found.origin is not None
        assert (found.value, found.origin.seq) == (b"c", 2)
        await posting


async def test_a_crash_between_the_record_and_the_answer_makes_no_second_record(tmp_path: Path) -> None:
    source, channels = source_in(tmp_path), MemoryChannels(2)
    async with Running(source, channels) as running, httpx.AsyncClient(timeout=30) as client:
        await running.until(lambda: running.loop.figures()["connected"])
        headers = sign(KEY, "msg_1", int(time.time()), b"x")
        posting = asyncio.create_task(client.post(address(source), content=b"x", headers=headers))
        await running.until(lambda: running.count() == 1)
        posting.cancel()
    async with Running(source, channels) as running, httpx.AsyncClient(timeout=30) as client:
        await running.until(lambda: running.loop.figures()["connected"])
        for message in ("msg_1", "msg_2", "msg_1"):
            headers = sign(KEY, message, int(time.time()), b"x")
            assert (await client.post(address(source), content=b"x", headers=headers)).status_code == 202
    told = [Origin.read(entry.headers) for entry in channels.entries("into")]
    assert sorted(one.seq for one in told if one is not None) == [1, 2]


async def test_ids_from_a_backup_cost_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their numbers are in use: what came by one of them would be taken for what has it already."""
    folder, backup, channels = tmp_path / "ids", tmp_path / "backup", MemoryChannels(2)
    source = source_in(folder)

    async def generation(*messages: str) -> None:
        async with Running(source, channels) as running, httpx.AsyncClient(timeout=30) as client:
            await running.until(lambda: running.loop.figures()["connected"])
            for message in messages:
                headers = sign(KEY, message, int(time.time()), message.encode())
                answer = await client.post(address(source), content=message.encode(), headers=headers)
                assert answer.status_code == 202
            await running.stop()

    await generation("one")
    shutil.copytree(folder, backup)
    await generation("two", "three")
    for _ in range(2):
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        await generation("one")
        await generation("four")
    found = [entry.value for entry in channels.entries("into")]
    # The backup does not know of the fourth either, the second time.
    assert sorted(one.decode() for one in found if one) == ["four", "four", "one", "three", "two"]
    origins = [Origin.read(entry.headers) for entry in channels.entries("into")]
    assert len({(one.epoch, one.seq) for one in origins if one}) == 5
    assert "is older than the channel" in caplog.text


async def test_what_was_written_down_and_not_taken_is_given_again_by_itself(tmp_path: Path) -> None:
    """Its provider may never repeat it: then its number would be missing for ever."""
    source = source_in(tmp_path)
    async with opened(source) as door:
        posting = [door.posting(b"%d" % number, f"msg_{number}") for number in range(3)]
        await (await anext(door.intakes)).settle(Unavailable("the channel", "it is away"))
        await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
    assert {(await one).status_code for one in posting} <= {503}
    async with opened(source) as door:
        found = await door.taken(3)
        assert [one.origin and one.origin.seq for one in found] == [1, 2, 3]
        answer = await door.posted(found[0].value, f"msg_{found[0].value.decode()}")
        assert answer.status_code == 202
    async with opened(source) as door:
        posting = [door.posting(b"new", "msg_new")]
        assert [one.value for one in await door.taken(1)] == [b"new"]
        await posting[0]


async def test_repeats_while_it_is_on_its_way_wait_for_the_one(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = [door.posting(b"x") for _ in range(10)]
        assert len(await door.taken(1)) == 1
        assert {(await one).status_code for one in posting} == {202}


async def test_what_is_not_safe_in_time_is_to_be_repeated(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, within=timedelta(milliseconds=50))) as door:
        answer = await door.posted(b"x")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await door.taken(1)
        assert (await door.posted(b"x")).status_code == 202


async def test_a_slow_pump_turns_providers_away_and_memory_stays_bounded(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, within=timedelta(seconds=1))) as door:
        posting = [door.posting(b"x" * 900_000, f"msg_{number}") for number in range(30)]
        answers = await asyncio.gather(*posting)
        assert {answer.status_code for answer in answers} == {503}
        # Those that were not durable in time are written all the same; then the queue is full.
        while True:
            answer = await door.posted(b"y", "msg_next")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            if "queue is full" in answer.json()["error"]:
                break
        await door.taken(16)
        posting = [door.posting(b"x", "msg_more")]
        while (await door.taken(1))[0].value != b"x":
            pass
        assert (await posting[0]).status_code == 202


async def test_ids_are_forgotten_after_their_time_and_numbers_go_on(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(source_in(tmp_path, clock=clock)) as door:
        posting = door.posting(b"x")
        (first,) = await door.taken(1)
        await posting
        clock.move(75 * 3600)
        assert (await door.posted(b"x")).status_code == 202
        clock.move(3600 + 120)
        posting = door.posting(b"y", "msg_2")
        await door.taken(1)
        await posting
        posting = door.posting(b"x")
        (again,) = await door.taken(1)
        await posting
        assert first.origin is not None
        assert again.origin is not None
        assert (first.origin.seq, again.origin.seq) == (1, 3)
        assert first.origin.epoch == again.origin.epoch


async def test_a_disk_that_refuses_is_told_and_it_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(source_in(tmp_path)) as door:

        def full(self: Deliveries, one: Delivery) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(Deliveries, "_row", full)
            answer = await door.posted(b"x")
            assert answer.status_code == 503
            assert "disk is full" in answer.json()["error"]
        posting = door.posting(b"x")
        (found,) = await door.taken(1)
        assert found.origin is not None
        assert found.origin.seq == 1
        assert (await posting).status_code == 202


async def test_a_body_that_was_damaged_on_disk_is_named(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    file = Deliveries(tmp_path, "shop", 1)
    file.write([Delivery("msg_1", b"x", 1)], [], None)
    file.close()
    with sqlite3.connect(tmp_path / "shop.sqlite") as damaging:
        damaging.execute("update deliveries set body = x'79'")
    damaging.close()
    async with opened(source) as door:
        (found,) = await door.taken(1)
        assert found.refused == "its body in shop.sqlite is damaged"


async def test_a_file_that_is_damaged_is_misconfigured_and_one_in_use_is_unavailable(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    async with opened(source):
        with pytest.raises(Unavailable, match="locked"):
            Deliveries(tmp_path, "shop", 1)
    (tmp_path / "shop.sqlite").write_bytes(b"no database" * 1_000)
    with pytest.raises(Misconfigured, match=r"the file is damaged.*move it away"):
        async with opened(source):
            pass


async def test_a_challenge_is_given_back_as_text_and_nothing_else(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, challenge="hub.challenge")) as door:
        url = address(door.source)
        answer = await door.client.get(url, params={"hub.mode": "subscribe", "hub.challenge": "<script>1</script>"})
        assert (answer.status_code, answer.text) == (200, "<script>1</script>")
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.headers["x-content-type-options"] == "nosniff"
        for wrong in ({}, {"hub.challenge": ""}, {"hub.challenge": "x" * 1_001}):
            assert (await door.client.get(url, params=wrong)).status_code == 400
    async with opened(source_in(tmp_path)) as door:
        answer = await door.client.get(address(door.source))
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_bodies_have_their_bounds(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, max_size=10)) as door:
        assert (await door.posted(b"")).status_code == 400
        assert (await door.posted(b"x" * 11)).status_code == 413
        packed = await door.client.post(
            address(door.source), content=b"x", headers={"webhook-id": "1", "content-encoding": "gzip"}
        )
        assert packed.status_code == 415
        posting = door.posting(b"x" * 10)
        await door.taken(1)
        assert (await posting).status_code == 202


async def test_without_signatures_an_id_is_enough(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path, secret="", unsigned=True)) as door:
        for _ in range(2):
            headers = {"webhook-id": "1"}
            posting = asyncio.create_task(door.client.post(address(door.source), content=b"x", headers=headers))
            if _ == 0:
                await door.taken(1)
            assert (await posting).status_code == 202


async def test_a_provider_that_goes_away_right_after_the_body_has_its_message_taken(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        headers = sign(KEY, "msg_1", door.source.clock.now() // 1_000_000, b"abc")
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        _, writer = await asyncio.open_connection("127.0.0.1", int(re.findall(r":(\d+)/", door.source.url)[0]))
        for byte in f"POST /hook HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n{head}\r\nabc".encode():
            writer.write(bytes([byte]))
            await writer.drain()
        writer.transport.abort()
        assert [one.value for one in await door.taken(1)] == [b"abc"]


async def test_what_is_remembered_is_small(tmp_path: Path) -> None:
    async with opened(source_in(tmp_path)) as door:
        posting = [door.posting(b"x" * 50_000, f"msg_{number}") for number in range(20)]
        await door.taken(20)
        await asyncio.gather(*posting)
    file = Deliveries(tmp_path, "shop", 1)
    await until(lambda: not file.pending(0, file.last, 1))
    assert file._file.execute("select count(*) from deliveries").fetchone() == (20,)
    file.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"secret": ""}, "secret"),
        ({"secret": "whsec_!"}, "whsec_ is not base64"),
        ({"unsigned": True}, "unsigned"),
        ({"remember": timedelta(minutes=9)}, "remember"),
    ],
)
def test_what_cannot_be_is_misconfigured(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        source_in(tmp_path, **options)


def test_its_address_makes_it_and_its_secret_is_not_shown() -> None:
    source = source_at("listen+webhook://127.0.0.1:8700/hook", "shop", {"secret": SECRET, "remember": "4 days"})
    assert isinstance(source, WebhookSource)
    assert source.remember == timedelta(days=4)
    assert SECRET not in repr(source)
