"""What the connections of a WebSocket server hold, bounded for all of them together."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import orjson
import pytest
from tests.collect.outside import taken
from tests.collect.waiting import until
from tests.ports import later_port
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from penstock.collect import listen, read_budget, websocket_server
from penstock.collect.read_budget import BudgetedConnection
from penstock.collect.websocket_server import WebSocketServer
from penstock.core.contracts import Intake, ResumeState

QUICK = timedelta(milliseconds=200)
CHUNK = 256 << 10
"""So much a transport reads at once."""


class Weighed(BudgetedConnection):
    """Knows how much all of its kind hold, and the most that it ever was."""

    all: list["Weighed"]
    most: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.all.append(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Weighed.most = max(Weighed.most, Weighed.held())

    @classmethod
    def held(cls) -> int:
        return sum(one.waiting + one.incomplete for one in cls.all)


@pytest.fixture(autouse=True)
def weighed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Weighed, "all", [], raising=False)
    monkeypatch.setattr(Weighed, "most", 0, raising=False)
    monkeypatch.setattr(websocket_server, "BudgetedConnection", Weighed)
    yield
    assert Weighed.held() == 0


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen.IngestQueue.__init__, "__defaults__", (100_000,))
    """What holds one up holds all of them up."""
    monkeypatch.setattr(read_budget, "SHARED_BYTES", 400_000)
    monkeypatch.setattr(read_budget, "MAX_BYTES", 400_000)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[str, AsyncIterator[Intake]]]:
    source = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", **options)
    async with source.open(ResumeState()) as intakes:
        yield f"{source.url.removeprefix('listen+')}?epoch=1&sender=", intakes


async def met(url: str, **options: Any) -> ClientConnection:
    sender = await connect(url, compression=None, close_timeout=0.1, **options)
    assert orjson.loads(await sender.recv()) == {"after": 0}
    return sender


async def told(sender: ClientConnection, safe: int) -> None:
    async with asyncio.timeout(20):
        while orjson.loads(await sender.recv())["safe"] < safe:
            pass


async def filled(sender: ClientConnection) -> int:
    """It sends until so much waits that nobody is read; how many that were."""
    for count in range(1, 100):
        await sender.send(b"x" * 100_000)
        if all(one.read_paused for one in Weighed.all):
            return count
        await asyncio.sleep(0.001)
    raise AssertionError("it was never held up")


@pytest.mark.usefixtures("little_room")
async def test_very_many_that_bring_a_little_each_are_bounded_and_all_of_it_arrives() -> None:
    async with opened() as (url, intakes), AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(await met(f"{url}s{n}")) for n in range(100)]
        for sender in senders:
            # One read takes all of it: nobody is held up by what it brings itself.
            await sender.send(b"x" * 20_000)
        await until(lambda: all(one.read_paused for one in Weighed.all))
        late = asyncio.create_task(met(f"{url}late"))
        found = await taken(intakes, 100)
        assert len({one.origin.sender for one in found if one.origin is not None}) == 100
        for sender in senders:
            await told(sender, 1)
        await stack.enter_async_context(await late)
        # All of them together would have brought five times as much.
        assert Weighed.most <= read_budget.MAX_BYTES + CHUNK


@pytest.mark.usefixtures("little_room")
async def test_whoever_brings_more_is_held_up_before_all_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_budget, "MAX_BYTES", read_budget.MAX_BYTES * 10)
    async with opened() as (url, intakes), await met(f"{url}idle") as idle, await met(f"{url}busy") as busy:
        for _ in range(10):
            await busy.send(b"x" * 100_000)
        await until(lambda: [one.read_paused for one in Weighed.all] == [False, True])
        await (await idle.ping())
        assert len(await taken(intakes, 10)) == 10
        await told(busy, 10)


@pytest.mark.usefixtures("little_room")
async def test_a_message_that_does_not_end_holds_nobody_up() -> None:
    async with opened() as (url, intakes), await met(f"{url}slow") as slow, await met(f"{url}fast") as fast:
        goes_on = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b"a" * 300_000
            await goes_on.wait()
            yield b"z"

        sending = asyncio.create_task(slow.send(parts()))
        await until(lambda: any(one.incomplete for one in Weighed.all))
        count = await filled(fast)
        assert len(await taken(intakes, count)) == count
        await told(fast, count)
        goes_on.set()
        await sending
        assert [len(one.value) for one in await taken(intakes, 1)] == [300_001]
        await told(slow, 1)


@pytest.mark.parametrize("whole", [True, False], ids=["fragments", "half a frame"])
async def test_whoever_holds_most_has_to_go_when_too_much_does_not_end(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_budget, "INCOMPLETE_BYTES", 200_000)
    async with opened() as (url, intakes), await met(f"{url}small") as small, await met(f"{url}large") as large:
        begun = Frame(Opcode.TEXT, b"x" * 50_000, fin=False).serialize(mask=True)
        small.transport.write(begun[: len(begun) if whole else -10])
        await until(lambda: any(one.incomplete for one in Weighed.all))
        begun = Frame(Opcode.TEXT, b"x" * 190_000, fin=False).serialize(mask=True)
        large.transport.write(begun[: len(begun) if whole else -10])
        with pytest.raises(ConnectionClosed, match=r"1013 .* incomplete messages"):
            await large.recv()
        small.transport.write(b"" if whole else begun[-10:])
        small.transport.write(Frame(Opcode.CONT, b"y").serialize(mask=True))
        assert [len(one.value) for one in await taken(intakes, 1)] == [50_001]
        await told(small, 1)


async def test_a_handshake_that_does_not_end_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_budget, "INCOMPLETE_BYTES", 200_000)
    async with opened() as (url, intakes), await met(f"{url}a") as sender:
        port = int(url.partition("?")[0].rpartition(":")[2].strip("/"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 4_000) for n in range(60)))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await sender.send("x")
        assert len(await taken(intakes, 1)) == 1
        await told(sender, 1)


class Pinged(ClientConnection):
    pings = 0

    def process_event(self, event: Any) -> None:
        self.pings += isinstance(event, Frame) and event.opcode is Opcode.PING
        super().process_event(event)


@pytest.mark.usefixtures("little_room")
async def test_who_is_held_up_is_not_taken_for_dead() -> None:
    async with (
        opened(ping_every=QUICK, pong_within=QUICK) as (url, intakes),
        await met(f"{url}busy", create_connection=Pinged, ping_interval=None) as busy,
        await met(f"{url}idle", create_connection=Pinged, ping_interval=None) as idle,
    ):
        count = await filled(busy)
        assert isinstance(busy, Pinged)
        assert isinstance(idle, Pinged)
        until_then = max(busy.pings, idle.pings) + 3
        await until(lambda: min(busy.pings, idle.pings) >= until_then)
        await idle.send("y")
        assert len(await taken(intakes, count + 1)) == count + 1
        await told(busy, count)
        await told(idle, 1)
