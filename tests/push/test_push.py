"""A device that sleeps misses nothing, and is woken when something waits for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.collect.scripted import Events, head, listening
from tests.collect.waiting import until

from penstock.collect.sse import Event, EventStream, SseSource
from penstock.core.errors import Misconfigured
from penstock.core.signatures import verify
from penstock.push import PushProxy

NOW = timedelta(0)
NEVER = timedelta(hours=1)


@dataclass
class Hook:
    """Where a device is woken. It answers with these, and then takes all."""

    answers: list[bytes] = field(default_factory=list)
    posts: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = await head(reader)
        self.posts.append((told, await reader.readexactly(int(told["content-length"]))))
        writer.write(self.answers.pop(0) if self.answers else b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()


@dataclass
class World:
    folder: Path
    upstream: Events
    hook: Hook
    port: int = 0
    url: str = ""

    @asynccontextmanager
    async def proxy(self, **options: Any) -> AsyncIterator[str]:
        """A life of the proxy."""
        options = {"wake": self.hook.url, "asleep_after": NOW, "again": NEVER, **options}
        source = SseSource(f"sse+http://127.0.0.1:{self.port}/", "upstream")
        described, stop, up = PushProxy(source, self.folder, **options), asyncio.Event(), asyncio.Event()

        def ready(address: str) -> None:
            self.url = address
            up.set()

        serving = asyncio.create_task(described.serve("127.0.0.1", 0, stop, ready))
        try:
            await asyncio.wait((serving, asyncio.ensure_future(up.wait())), return_when="FIRST_COMPLETED")
            yield self.url
        finally:
            stop.set()
            async with asyncio.timeout(20):
                await serving

    @asynccontextmanager
    async def device(self, after: str | None = None, **headers: str) -> AsyncIterator["Device"]:
        told = {"last-event-id": after} if after is not None else {}
        async with (
            httpx.AsyncClient(timeout=20, trust_env=False) as client,
            client.stream("GET", f"{self.url}/events", headers=told | headers) as response,
        ):
            yield Device(response)


class Device:
    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.bytes = b""
        self.found: list[Event] = []
        self._chunks, self._stream = response.aiter_raw(), EventStream(1 << 20)

    async def get(self, count: int) -> list[Event]:
        """The first events, or all until the end."""
        async with asyncio.timeout(20):
            while len(self.found) < count and (chunk := await anext(self._chunks, b"")):
                self.bytes += chunk
                self.found += self._stream.feed(chunk)
        return self.found

    def last(self) -> str:
        return (self.found[-1].id or b"").decode()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    upstream, hook = Events(), Hook()
    async with listening(upstream.attend) as port, listening(hook.attend) as hooked:
        hook.url = f"http://127.0.0.1:{hooked}/wake?token=hush"
        yield World(tmp_path / "proxy", upstream, hook, port)
        await upstream.disconnect()
        await until(lambda: not upstream.writers)


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


async def test_a_device_gets_what_it_missed_and_goes_on_behind_what_it_has(world: World) -> None:
    await world.upstream.add_records(numbers(1, 5))
    async with world.proxy():
        async with world.device() as device:
            assert [event.data for event in await device.get(5)] == numbers(1, 5)
            await world.upstream.add_records([b"6"])
            await device.get(6)
        await world.upstream.add_records(numbers(7, 9))
        async with world.device(device.last()) as again:
            assert [event.data for event in await again.get(3)] == numbers(7, 9)


async def test_what_waits_survives_a_new_life_of_the_proxy_and_of_the_upstream(world: World) -> None:
    await world.upstream.add_records(numbers(1, 5))
    async with world.proxy():
        await until(lambda: world.hook.posts)
        async with world.device() as device:
            await device.get(5)
    await world.upstream.add_records(numbers(6, 8))
    await world.upstream.disconnect()
    async with world.proxy(), world.device(device.last()) as device:
        assert [event.data for event in await device.get(3)] == numbers(6, 8)


async def test_without_an_id_it_begins_with_what_was_not_acknowledged(world: World) -> None:
    await world.upstream.add_records(numbers(1, 5))
    async with world.proxy():
        async with world.device() as device:
            await device.get(5)
        third = (device.found[2].id or b"").decode()
        async with world.device(third) as device:
            assert [event.data for event in await device.get(2)] == numbers(4, 5)
        for foreign in (None, "", "x", "0-1", third + "0000", third.replace("-", "-9"), "-1"):
            async with world.device(foreign) as device:
                assert [event.data for event in await device.get(2)] == numbers(4, 5)


async def test_a_sleeping_device_is_woken_once_and_the_post_is_signed(world: World) -> None:
    async with world.proxy(secret="hush", public="http://device.example/x/"):
        await world.upstream.add_records(numbers(1, 3))
        await until(lambda: world.hook.posts)
        await world.upstream.add_records(numbers(4, 6))
        async with httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(world.url)).json()["waiting"] < 6:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        ((told, body),) = world.hook.posts
        document = orjson.loads(body)
        assert document["type"] == "device.wake"
        assert 1 <= document["data"]["waiting"] <= 3
        assert document["data"]["next"] == "http://device.example/x/events"
        seen = (told["webhook-signature"], told["webhook-id"], told["webhook-timestamp"], body)
        assert verify([b"hush"], *seen)


async def test_each_sleep_has_its_own_wake(world: World) -> None:
    async with world.proxy():
        for night in range(1, 4):
            await world.upstream.add_records([b"%d" % night])
            await until(lambda: len(world.hook.posts) == night)  # noqa: B023 - it is over then
            async with world.device() as device:
                await device.get(1)
                last = device.last()
            async with world.device(last):
                pass


async def test_a_device_that_does_not_come_is_woken_again(world: World) -> None:
    async with world.proxy(again=timedelta(milliseconds=50)):
        await world.upstream.add_records([b"1"])
        await until(lambda: len(world.hook.posts) >= 3)
    assert len({told["webhook-id"] for told, _ in world.hook.posts}) >= 3


async def test_a_webhook_that_is_away_is_asked_again_with_the_same_id(world: World) -> None:
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nConnection: close\r\n\r\n"
    world.hook.answers = [busy, b"", b"HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\n"]
    async with world.proxy():
        await world.upstream.add_records([b"1"])
        await until(lambda: len(world.hook.posts) == 4)
    assert len({told["webhook-id"] for told, _ in world.hook.posts}) == 1


async def test_a_device_that_is_there_is_not_woken(world: World) -> None:
    async with world.proxy(asleep_after=timedelta(seconds=5)), world.device() as device:
        await world.upstream.add_records(numbers(1, 3))
        await device.get(3)
    assert not world.hook.posts


async def test_a_silent_connection_is_kept_by_comments(world: World) -> None:
    async with world.proxy(heartbeat=timedelta(milliseconds=20)), world.device() as device:
        reading = asyncio.create_task(device.get(1))
        await until(lambda: device.bytes.count(b":\n\n") >= 3)
        await world.upstream.add_records([b"1"])
        assert len(await reading) == 1


async def test_a_device_that_comes_back_unnoticed_takes_the_place_of_its_old_connection(world: World) -> None:
    async with world.proxy(), world.device() as old:
        reading = asyncio.create_task(old.get(1))
        await until(lambda: old.bytes)
        async with world.device() as new:
            assert await reading == []
            await world.upstream.add_records([b"1"])
            assert len(await new.get(1)) == 1


async def test_when_all_room_is_taken_the_upstream_waits_and_an_acknowledgement_makes_room(world: World) -> None:
    given = [b"%d" % number + b"x" * 100_000 for number in range(300)]
    await world.upstream.add_records(given)
    found: list[bytes] = []
    async with world.proxy(most=8 << 20), httpx.AsyncClient(trust_env=False) as client:
        before = -1
        while world.upstream.sent != before:
            before = world.upstream.sent
            await asyncio.sleep(0.3)
        assert before < 250
        assert (await client.get(world.url)).json()["bytes"] < 10 << 20
        last = None
        while len(found) < len(given):
            async with world.device(last) as device:
                # The connection ends by itself, so that the device says what it has.
                found += [
                    event.data for event in await device.get(1_000 if len(found) < 250 else len(given) - len(found))
                ]
                last = device.last()
        assert (await client.get(world.url)).json()["bytes"] < 10 << 20
    assert found == given


async def test_who_does_not_know_the_token_is_turned_away(world: World) -> None:
    await world.upstream.add_records([b"1"])
    async with world.proxy(token="hush"):
        for said in ({}, {"authorization": "hush"}, {"authorization": "Bearer hus"}):
            async with world.device(**said) as device:
                assert device.response.status_code == 401
        async with world.device(authorization="Bearer hush") as device:
            assert len(await device.get(1)) == 1


async def test_other_addresses_and_methods_are_no_fault_of_ours(world: World) -> None:
    async with world.proxy() as url, httpx.AsyncClient(trust_env=False, base_url=url) as client:
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.post("/events", content=b"x")).status_code == 405
        assert (await client.get("/", headers={"origin": "https://elsewhere.example"})).status_code == 403


async def test_it_ends_without_leaving_a_task_behind(world: World) -> None:
    await world.upstream.add_records([b"1"])
    before = asyncio.all_tasks()
    async with world.proxy(), world.device() as device:
        await device.get(1)
    await world.upstream.disconnect()
    await until(lambda: asyncio.all_tasks() <= before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wake": "ftp://host"}, "wake"),
        ({"public": "host/x"}, "public"),
        ({"most": 5}, "8388608"),
        ({"secret": "whsec_?"}, "secret"),
        ({"heartbeat": NOW}, "heartbeat"),
    ],
)
def test_what_cannot_be_is_misconfigured(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        PushProxy(SseSource("sse+http://host/", "x"), tmp_path, **options)
