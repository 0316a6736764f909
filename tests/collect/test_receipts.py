"""Receipts: where records are now, and the answers to them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.collect.test_http import source_in
from tests.collect.waiting import until

from penstock.audit.account import Account, Outcome, Share
from penstock.channels.memory import MemoryChannels
from penstock.collect import receipts
from penstock.collect.http import HttpSource
from penstock.collect.receipts import Receipt, ReceiptSigner, receipt_signer
from penstock.core.contracts import ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.testing.sources import Running

ONE = Receipt("door.http", 5, 17, 1, 1_700_000_000_000_000, 5)


@asynccontextmanager
async def running(source: HttpSource, channels: MemoryChannels) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a source whose records go into channels."""
    url = source.url.removeprefix("listen+").removesuffix("/in")
    bound = source.with_context(SourceContext(channels, "into", "into.dead", "bookmarks", Path(source.folder)))
    async with httpx.AsyncClient(base_url=url, timeout=30) as client, Running(bound, channels) as pumping:
        await pumping.until(lambda: pumping.loop.figures()["connected"])
        yield client


async def state(client: httpx.AsyncClient, posted: httpx.Response) -> dict[str, Any]:
    return dict((await client.get(posted.headers["location"])).json())


def test_a_receipt_is_a_text_and_back() -> None:
    sealing = ReceiptSigner(b"k" * 32)
    for receipt in (ONE, replace(ONE, sender="käse\U0001f9c0" * 40, epoch=2**63 - 1, count=10_000)):
        assert sealing.decode(sealing.encode(receipt)) == receipt


@pytest.mark.parametrize("text", ["", "x", "é", "A" * 5_000, "====", "../..", ReceiptSigner(b"another").encode(ONE)])
def test_nobody_makes_one_up(text: str) -> None:
    assert ReceiptSigner(b"k" * 32).decode(text) is None


def test_a_bit_that_flips_voids_it() -> None:
    sealing = ReceiptSigner(b"k" * 32)
    text = sealing.encode(ONE)
    for location in range(0, len(text) - 1):
        other = text[:location] + ("A" if text[location] != "A" else "B") + text[location + 1 :]
        assert sealing.decode(other) is None


def test_the_key_lies_in_the_folder_for_nobody_else_to_read(tmp_path: Path) -> None:
    text = receipt_signer(tmp_path / "new", "../a/b").encode(ONE)
    (key,) = (tmp_path / "new").iterdir()
    assert key.name == "..%2Fa%2Fb.key"
    assert key.stat().st_mode & 0o077 == 0
    assert receipt_signer(tmp_path / "new", "../a/b").decode(text) == ONE
    os.truncate(key, 3)
    with pytest.raises(Misconfigured, match="not a valid key"):
        receipt_signer(tmp_path / "new", "../a/b")


async def test_a_receipt_tells_the_place_in_the_channel_and_which_stages_have_read_it(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path), channels) as client:
        await client.post("/in", content=b"before")
        posted = await client.post("/in", content=b"this")
        assert posted.status_code == 202
        account = Account("query:a", "1", 0, {"into": Share({0: 0}, {0: 1}, 1)})
        channels.append("bookmarks", account.dumps(), account.key)
        other = Account("query:b", "1", 0, {"elsewhere": Share({0: 0}, {0: 9}, 9)})
        channels.append("bookmarks", other.dumps(), other.key)
        before = Account("source:door", "1", 0, {"into": Share({}, {}, 1, {Outcome.DUPLICATE: 1})})
        channels.append("bookmarks", before.dumps(), before.key)
        told = await state(client, posted)
        assert (told["state"], told["channel"], told["found"]) == ("safe", "into", 1)
        assert (told["sender"], told["seq"], told["records"]) == ("door.http", 2, 1)
        assert told["offsets"] == [{"seq": 2, "partition": 0, "offset": 1}]
        assert told["stages"] == [{"stage": "query:a", "read": False}]
        account = replace(account, shares={"into": Share({0: 0}, {0: 2}, 2)})
        channels.append("bookmarks", account.dumps(), account.key)
        channels.append("bookmarks", b"not json", b"query:broken")
        assert (await state(client, posted))["stages"] == [{"stage": "query:a", "read": True}]


async def test_a_receipt_of_many_tells_of_all(tmp_path: Path) -> None:
    channels = MemoryChannels(2)
    async with running(source_in(tmp_path), channels) as client:
        posted = await client.post("/in?lines", content=b"\n".join(b"%d" % number for number in range(150)))
        assert posted.json()["receipts"] == 150
        told = await state(client, posted)
        assert (told["state"], told["found"], len(told["offsets"])) == ("safe", 150, 100)


async def test_what_the_channel_refuses_is_found_among_its_dead_letters(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, max_size=2_000_000), channels) as client:
        posted = await client.post("/in", content=b"x" * 900_001)
        assert posted.status_code == 202
        told = await state(client, posted)
        assert (told["state"], told["found"], told["refused"]) == ("refused", 0, 1)
        (letter,) = told["dead"]
        assert letter["channel"] == "into.dead"
        assert "more than the 900000 that the channel takes" in letter["reason"]


async def test_what_does_not_fit_is_told_as_refused_although_it_lies_in_the_channel(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path), channels) as client:
        posted, late = [await client.post("/in", content=b"x") for _ in range(2)]
        for entry, reason in zip(channels.entries("into"), (b"it is not JSON", b"late: for a query"), strict=True):
            channels.append("into.dead", entry.value, headers=(*entry.headers, ("reason", reason)))
        told = await state(client, posted)
        assert (told["state"], told["found"], told["refused"]) == ("refused", 1, 1)
        assert told["dead"][0]["reason"] == "it is not JSON"
        told = await state(client, late)
        assert (told["state"], told["found"], told["refused"]) == ("safe", 1, 0)


async def test_what_was_too_large_and_is_redriven_is_safe(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, max_size=2_000_000), channels) as client:
        posted = await client.post("/in", content=b"x" * 900_001)
        (letter,) = channels.entries("into.dead")
        channels.append("into", b"smaller", headers=(*letter.headers, ("redriven", b"1")))
        assert (await state(client, posted))["state"] == "safe"


async def test_receipts_hold_beyond_the_life_of_a_collector(tmp_path: Path) -> None:
    channels, source = MemoryChannels(), source_in(tmp_path)
    async with running(source, channels) as client:
        posted = await client.post("/in", content=b"x")
        named = await client.post("/in?sender=k&epoch=1&seq=5", content=b"x")
    async with running(source, channels) as client:
        for one in (posted, named):
            told = await state(client, one)
            assert (told["state"], told["found"]) == ("safe", 1)
    # What is safe is known without channels, too, where the collector says so; otherwise nobody knows.
    keys = tmp_path / "receipts"
    alone, taken = replace(source, folder=keys), ResumeState({"door.http": (told_epoch(posted, keys), 1)})
    async with alone.open(taken), httpx.AsyncClient() as client:
        url = source.url.removeprefix("listen+").removesuffix("/in")
        assert (await client.get(url + posted.headers["location"])).json()["state"] == "safe"
        assert (await client.get(url + named.headers["location"])).json()["state"] == "unknown"


def told_epoch(posted: httpx.Response, folder: Path) -> int:
    receipt = receipt_signer(folder, "door").decode(posted.json()["receipt"])
    assert receipt is not None
    return receipt.epoch


async def test_a_sender_with_numbers_gives_again_and_is_answered_again_and_it_is_there_once(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, named=True), channels) as client:
        for _ in range(3):
            answer = await client.post("/in?sender=k&epoch=1&seq=1", content=b"x")
            assert answer.status_code == 202
            assert (await state(client, answer))["found"] == 1
    assert len(channels.entries("into")) == 1


@pytest.mark.parametrize("text", ["x", "A" * 5_000, "%00", "%0A", "..%2Fx"])
async def test_a_receipt_that_nobody_gave_is_not_found(tmp_path: Path, text: str) -> None:
    async with running(source_in(tmp_path), MemoryChannels()) as client:
        answer = await client.get(f"/receipts/{text}")
        assert answer.status_code == 404
        assert answer.json()["error"] in ("it is unknown", "unknown address")


async def test_while_the_channels_are_away_a_receipt_tells_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path), channels) as client:
        posted = await client.post("/in", content=b"x")

        def away(self: object, receipt: object) -> None:
            raise Unavailable("the channel", "it is away")

        monkeypatch.setattr(receipts.Locator, "_find", away)
        told = await state(client, posted)
        assert (told["state"], told["trouble"]) == ("safe", "the channel is unavailable: it is away")


async def test_a_search_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_ENTRIES", 1)
    channels = MemoryChannels()
    async with running(source_in(tmp_path), channels) as client:
        # Not found at the first look: it lies behind others.
        for number in range(6_000):
            channels.append("into", b"%d" % number)
        posted = await client.post("/in", content=b"x")
        told = await state(client, posted)
        assert (told["state"], told["found"], told["searched"]) == ("safe", 0, "in part")


# --- answers ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(
    channels: MemoryChannels, to: str = "results", wait: asyncio.Event | None = None
) -> AsyncIterator[None]:
    """A query without state: each record becomes a row that keeps its origin."""

    async def query() -> None:
        done = 0
        while True:
            if wait is None or wait.is_set():
                for entry in channels.entries("into")[done:]:
                    done += 1
                    if entry.value != b"filtered":
                        channels.append(to, b'{"of":%s}' % (entry.value or b""), headers=entry.headers)
            await asyncio.sleep(0.002)

    running = asyncio.create_task(query())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_who_waits_for_the_answer_gets_the_row_of_its_own_record(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, answers="results"), channels) as client, answering(channels):
        asking = [client.post(f"/in?answer=20s&sender=s{n}&epoch=1&seq=1", content=b"%d" % n) for n in range(20)]
        asking += [client.post("/in?answer=20s", content=b"%d" % n) for n in range(20, 40)]
        for number, answer in enumerate(await asyncio.gather(*asking)):
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
            assert answer.json() == {"of": number}


async def test_an_answer_that_does_not_come_in_time_can_be_had_later(tmp_path: Path) -> None:
    channels, wait = MemoryChannels(), asyncio.Event()
    async with running(source_in(tmp_path, answers="results"), channels) as client, answering(channels, wait=wait):
        posted = await client.post("/in?answer=10ms", content=b"7")
        assert posted.status_code == 202
        late = await client.get(posted.headers["location"], params={"answer": "10 ms"})
        assert (late.status_code, late.json()["state"]) == (202, "safe")
        asking = asyncio.create_task(client.get(posted.headers["location"], params={"answer": "20s"}))
        wait.set()
        assert (await asking).json() == {"of": 7}
        again = await client.get(posted.headers["location"], params={"answer": "0s"})
        assert (again.status_code, again.json()) == (200, {"of": 7})


async def test_who_waits_in_vain_gets_the_receipt(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, answers="results"), channels) as client, answering(channels):
        posted = await client.post("/in?answer=50ms", content=b"filtered")
        assert posted.status_code == 202
        assert posted.json()["receipts"] == 1


async def test_who_waits_for_a_record_that_does_not_fit_hears_why(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with running(source_in(tmp_path, answers="results", max_size=2_000_000), channels) as client:
        posted = await client.post("/in?answer=20s", content=b"x" * 900_001)
        assert (posted.status_code, posted.json()["place"]) == (422, "the record")
        assert "more than the 900000 that the channel takes" in posted.json()["error"]
        # Whoever sends it on by hand has an answer after all.
        (letter,) = channels.entries("into.dead")
        channels.append("results", b'{"ok":true}', headers=letter.headers)
        statuses = [422]
        while statuses[-1] == 422:
            again = await client.get(posted.headers["location"], params={"answer": "20s"})
            statuses.append(again.status_code)
        assert again.json() == {"ok": True}


async def test_who_comes_again_after_a_crash_is_answered_although_the_row_was_there_before(tmp_path: Path) -> None:
    channels, source = MemoryChannels(), source_in(tmp_path, answers="results")
    again = "/in?answer=20s&sender=till&epoch=1&seq=1"
    async with answering(channels):
        async with running(source, channels) as client:
            posted = await client.post("/in", content=b"7")
            await client.post(again, content=b"8")
        await until(lambda: len(channels.entries("results")) == 2)
        async with running(source, channels) as client:
            assert (await client.post(again, content=b"8")).json() == {"of": 8}
            assert (await client.get(posted.headers["location"], params={"answer": "20s"})).json() == {"of": 7}
    assert len(channels.entries("into")) == 2


async def test_another_behind_the_same_port_knows_receipts_and_answers(tmp_path: Path) -> None:
    channels, first = MemoryChannels(), source_in(tmp_path, answers="results", shared=True)
    async with running(first, channels) as client, answering(channels):
        posted = await client.post("/in?answer=20s", content=b"7")
        assert posted.json() == {"of": 7}
        at, elsewhere = posted.headers["location"], replace(first, name="door.1", url=source_in(tmp_path).url)
    async with running(elsewhere, channels) as client:
        assert (await client.get(at, params={"answer": "20s"})).json() == {"of": 7}
        assert (await state(client, posted))["state"] == "safe"


async def test_many_have_many_answers_and_only_one_can_be_waited_for(tmp_path: Path) -> None:
    async with running(source_in(tmp_path, answers="results"), MemoryChannels()) as client:
        assert (await client.post("/in?lines&answer=1s", content=b"1\n2")).status_code == 400
        posted = await client.post("/in?lines", content=b"1\n2")
        assert (await client.get(posted.headers["location"], params={"answer": "1s"})).status_code == 400


async def test_too_many_who_wait_are_turned_away_and_nothing_of_them_is_taken(tmp_path: Path) -> None:
    channels, wait = MemoryChannels(), asyncio.Event()
    source = source_in(tmp_path, answers="results", waiters=1)
    async with running(source, channels) as client, answering(channels, wait=wait):
        first = asyncio.create_task(client.post("/in?answer=20s", content=b"1"))
        await until(lambda: len(channels.entries("into")) == 1)
        second = await client.post("/in?answer=20s", content=b"2")
        assert second.status_code == 503
        wait.set()
        assert (await first).json() == {"of": 1}
        assert [entry.value for entry in channels.entries("into")] == [b"1"]
        third = await client.post("/in?answer=20s", content=b"3")
        assert third.json() == {"of": 3}
        told = [origin.seq for entry in channels.entries("into") if (origin := Origin.read(entry.headers)) is not None]
        assert told == [1, 2]


async def test_the_last_answers_are_remembered_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_ANSWERS", 2)
    channels = MemoryChannels()
    async with running(source_in(tmp_path, answers="results"), channels) as client, answering(channels):
        posted = [await client.post("/in?answer=20s", content=b"%d" % number) for number in range(3)]
        for number, status in ((0, 202), (1, 200), (2, 200)):
            found = await client.get(posted[number].headers["location"], params={"answer": "0s"})
            assert found.status_code == status


async def test_who_waits_is_let_go_when_the_source_is_closed(tmp_path: Path) -> None:
    channels = MemoryChannels()
    async with httpx.AsyncClient(timeout=30) as other:
        async with running(source_in(tmp_path, answers="results"), channels) as client:
            asking = asyncio.create_task(other.post(str(client.base_url).rstrip("/") + "/in?answer=50s", content=b"1"))
            await until(lambda: len(channels.entries("into")) == 1)
        assert (await asking).status_code in (202, 503)
