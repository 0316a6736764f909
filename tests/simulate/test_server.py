import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from penstock.core.clock import SystemClock
from penstock.core.errors import Misconfigured
from penstock.simulate.feed import Feed, serve
from penstock.simulate.rsvps import Rsvps

PAST = 1_700_000_000


def feed(count: int | None = 60, rate: float = 1_000, epoch: int = PAST, numbered: bool = True) -> Feed:
    return Feed(Rsvps(7), rate, 3, epoch, count, numbered)


async def messages(client: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    """Until the end is told."""
    async for message in client:
        document = orjson.loads(message)
        yield document
        if document == {"end": True}:
            return


async def resumed(url: str, after: dict[str, list[int]]) -> list[dict[str, Any]]:
    async with connect(f"{url}?resume", proxy=None) as client:
        await client.send(orjson.dumps({"after": after}))
        return [message async for message in messages(client)]


async def test_a_late_client_gets_everything_then_heartbeats_then_the_end() -> None:
    async with serve(feed(), "127.0.0.1", 0) as serving:
        found = await resumed(serving.url, {})
    assert [message["feed"]["seq"] for message in found[:60]] == [n // 3 + 1 for n in range(60)]
    assert [beat["seq"] for beat in found[-2]["heartbeats"]] == [20, 20, 20]
    assert found[-1] == {"end": True}


async def test_two_feeds_with_one_seed_and_epoch_send_the_same() -> None:
    async def heard() -> list[dict[str, Any]]:
        async with serve(feed(), "127.0.0.1", 0) as serving:
            return [message for message in await resumed(serving.url, {}) if "feed" in message]

    assert await heard() == await heard()


async def test_a_client_resumes_after_its_numbers() -> None:
    after = {"meetup-00": [PAST, 20], "meetup-01": [PAST, 19], "meetup-02": [PAST, 20]}
    async with serve(feed(), "127.0.0.1", 0) as serving:
        found = await resumed(serving.url, after)
    assert [(message["feed"]["sender"], message["feed"]["seq"]) for message in found if "feed" in message] == [
        ("meetup-01", 20)
    ]


async def test_records_come_when_they_are_due() -> None:
    now = SystemClock().now() // 1_000_000
    async with (
        serve(feed(count=None, rate=100, epoch=now), "127.0.0.1", 0) as serving,
        connect(serving.url, proxy=None) as client,
    ):
        for _ in range(20):
            message = orjson.loads(await client.recv())
            if "feed" in message:
                assert message["feed"]["time"] <= SystemClock().now()
                assert message["mtime"] == message["feed"]["time"] // 1_000


async def test_a_running_feed_says_heartbeats() -> None:
    now = SystemClock().now() // 1_000_000
    async with (
        serve(feed(count=None, rate=0.1, epoch=now - 100), "127.0.0.1", 0) as serving,
        connect(serving.url, proxy=None) as client,
    ):
        async for text in client:
            if "heartbeats" in (message := orjson.loads(text)):
                assert len(message["heartbeats"]) == 3
                return


async def test_a_feed_without_numbers_sends_plain_documents_only() -> None:
    now = SystemClock().now() // 1_000_000
    async with (
        serve(feed(count=None, rate=1_000, epoch=now, numbered=False), "127.0.0.1", 0) as serving,
        connect(f"{serving.url}?resume", proxy=None, max_queue=None) as client,
    ):
        for _ in range(50):
            assert "rsvp_id" in (message := orjson.loads(await client.recv()))
            assert "feed" not in message


async def test_a_client_that_does_not_read_hurts_nobody() -> None:
    async with (
        serve(feed(count=30_000, rate=1e6), "127.0.0.1", 0) as serving,
        connect(f"{serving.url}?resume", proxy=None, max_queue=1) as lazy,
    ):
        await lazy.send(b'{"after":{}}')
        await lazy.recv()
        assert len(await resumed(serving.url, {})) >= 30_000
        # What the lazy one did not take was never made: it is not held for it in memory.
        assert serving.sent < 60_000
        lazy.transport.abort()


async def test_a_bad_resume_closes_with_a_reason() -> None:
    async with serve(feed(), "127.0.0.1", 0) as serving, connect(f"{serving.url}?resume", proxy=None) as client:
        await client.send("nonsense")
        with pytest.raises(ConnectionClosedError) as closed:
            await client.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "a resume is refused: it is not JSON")


async def test_another_path_is_not_found() -> None:
    async with serve(feed(), "127.0.0.1", 0) as serving:
        with pytest.raises(InvalidStatus, match="404"):
            await connect(serving.url.replace("rsvps", "others"), proxy=None)


async def test_a_feed_has_the_path_that_it_is_given() -> None:
    async with serve(feed(), "127.0.0.1", 0, path="/turbines") as serving:
        assert serving.url.endswith("/turbines")
        assert len(await resumed(serving.url, {})) >= 60
        with pytest.raises(InvalidStatus, match="404"):
            await connect(serving.url.replace("turbines", "rsvps"), proxy=None)


async def test_a_probe_is_answered() -> None:
    async with serve(feed(), "127.0.0.1", 0) as serving:
        port = int(serving.url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def test_a_port_that_is_taken_is_said() -> None:
    async with serve(feed(), "127.0.0.1", 0) as serving:
        port = int(serving.url.split(":")[2].split("/")[0])
        with pytest.raises(Misconfigured, match="cannot listen"):
            async with serve(feed(), "127.0.0.1", port):
                pass


async def test_a_feed_stops_at_once_though_clients_listen() -> None:
    async with asyncio.timeout(5):
        async with serve(feed(), "127.0.0.1", 0) as serving:
            client = await connect(serving.url, proxy=None)
        await client.wait_closed()
    assert client.close_code == 1001
