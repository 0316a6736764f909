"""Senders that connect by WebSocket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
import pytest
from tests.collect.outside import Keeper, taken, trying
from tests.collect.waiting import until
from tests.ports import later_port
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode

from penstock.collect import listen
from penstock.collect.websocket_server import WebSocketServer
from penstock.core import tcp
from penstock.core.contracts import Guarantee, Intake, ResumeState
from penstock.core.errors import Unavailable
from penstock.core.record import Origin
from penstock.core.tcp import Connection, TcpServer
from penstock.testing.killing import CrashContract
from penstock.testing.sources import SourceContract, text


@dataclass
class Device(Keeper):
    """A sender as its author would write it: it goes on where it is told."""

    name: str = "device"
    connection: ClientConnection | None = None

    @property
    def url(self) -> str:
        return f"{self.source.url.removeprefix('listen+')}?sender={self.name}&epoch=7&seq={self.safe + 1}"

    async def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()

    async def run(self) -> None:
        while True:
            with suppress(ConnectionClosed, OSError, InvalidHandshake):
                async with connect(self.url, compression=None) as self.connection:
                    await self._talk(self.connection)
            await asyncio.sleep(0.005)

    async def _talk(self, connection: ClientConnection) -> None:
        self.safe = max(self.safe, orjson.loads(await connection.recv())["after"])
        listening = asyncio.create_task(self._listen(connection))
        try:
            sent = self.safe
            while True:
                self.more.clear()
                for payload in self.kept[sent:]:
                    await connection.send(payload, text=True)
                    sent += 1
                if not await self.has_more(listening):
                    return
        finally:
            self.more.set()
            listening.cancel()

    async def _listen(self, connection: ClientConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                self.safe = orjson.loads(await connection.recv())["safe"]


@pytest.fixture
async def upstream() -> AsyncIterator[Device]:
    async with trying(Device(WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/in", "door"))) as device:
        yield device


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return text(payload)


@asynccontextmanager
async def opened(
    source: WebSocketServer | None = None, taken: ResumeState | None = None
) -> AsyncIterator[tuple[str, AsyncIterator[Intake]]]:
    source = source or WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", named=False)
    async with source.open(taken or ResumeState()) as intakes:
        yield source.url.removeprefix("listen+"), intakes


async def told(connection: ClientConnection, safe: int) -> None:
    async with asyncio.timeout(20):
        while orjson.loads(await connection.recv()).get("safe") != safe:
            pass


async def test_numbers_count_on_where_the_collector_says() -> None:
    async with (
        opened(taken=ResumeState({"a b": (5, 41)})) as (url, intakes),
        connect(f"{url}?sender=a%20b&epoch=5") as sender,
    ):
        assert orjson.loads(await sender.recv()) == {"after": 41}
        await sender.send("x")
        await sender.send(b"\xff\x00")
        found = await taken(intakes, 2)
        assert [(one.value, one.origin and (one.origin.sender, one.origin.epoch, one.origin.seq)) for one in found] == [
            (b"x", ("a b", 5, 42)),
            (b"\xff\x00", ("a b", 5, 43)),
        ]
        await told(sender, 43)


async def test_a_new_life_of_a_sender_begins_at_one() -> None:
    async with (
        opened(taken=ResumeState({"a": (5, 41)})) as (url, intakes),
        connect(f"{url}?sender=a&epoch=6") as sender,
    ):
        assert orjson.loads(await sender.recv()) == {"after": 0}
        await sender.send("x")
        (found,) = await taken(intakes, 1)
        assert found.origin is not None
        assert (found.origin.epoch, found.origin.seq) == (6, 1)


@pytest.mark.parametrize(("has", "after"), [(1, 41), (30, 41), (42, 41), (43, 42), (100, 99)])
async def test_who_has_forgotten_the_beginning_is_not_asked_for_it(has: int, after: int) -> None:
    """Numbers are right even where the collector knows nothing of a sender, or less than it was told."""
    async with (
        opened(taken=ResumeState({"a": (5, 41)})) as (url, intakes),
        connect(f"{url}?sender=a&epoch=5&seq={has}") as sender,
    ):
        assert orjson.loads(await sender.recv()) == {"after": after}
        await sender.send("x")
        (found,) = await taken(intakes, 1)
        assert found.origin is not None
        assert found.origin.seq == after + 1


async def test_who_would_count_beyond_64_bits_is_told_so_and_no_such_number_is_given() -> None:
    last = 2**63 - 1
    async with opened() as (url, intakes):
        async with connect(f"{url}?sender=a&epoch=1&seq={last}") as sender:
            assert orjson.loads(await sender.recv()) == {"after": last - 1}
            both = Frame(Opcode.TEXT, b"x").serialize(mask=True) + Frame(Opcode.TEXT, b"y").serialize(mask=True)
            sender.transport.write(both)
            with pytest.raises(ConnectionClosed, match=r"1008 .* beyond 64 bits"):
                await sender.recv()
        async with connect(f"{url}?sender=a&epoch=1&seq={last}") as sender:
            assert orjson.loads(await sender.recv()) == {"after": last - 1}
            await sender.send("x")
            (found,) = await taken(intakes, 1)
            assert found.origin is not None
            assert found.origin.seq == last
            await told(sender, last)
            await sender.send("y")
            with pytest.raises(ConnectionClosed, match="1008"):
                await sender.recv()
        async with connect(f"{url}?sender=a&epoch=2") as sender:
            await sender.send("z")
            assert [one.value for one in await taken(intakes, 1)] == [b"z"]


async def test_who_has_no_name_is_told_how_many_of_this_connection_are_safe() -> None:
    async with opened() as (url, intakes), connect(url) as sender:
        await sender.send("x")
        await sender.send("x")
        assert [one.origin for one in await taken(intakes, 2)] == [None, None]
        await told(sender, 2)


async def test_a_connection_that_comes_back_unnoticed_takes_the_place_of_the_old_one() -> None:
    async with opened() as (url, intakes), connect(f"{url}?sender=a&epoch=1") as old:
        await old.recv()
        async with connect(f"{url}?sender=a&epoch=1") as new:
            await new.recv()
            with pytest.raises(ConnectionClosed, match=r"1008 .*another connection of this sender"):
                await old.recv()
            await new.send("x")
            assert len(await taken(intakes, 1)) == 1


async def test_many_senders_do_not_get_in_each_others_way() -> None:
    async with opened() as (url, intakes):
        senders = [await connect(f"{url}?sender=s{n}&epoch=1") for n in range(50)]
        for number in range(1, 4):
            for sender in senders:
                await sender.send(b"%d" % number)
        found = await taken(intakes, 150)
        for sender in senders:
            await told(sender, 3)
            await sender.close()
    by_sender: dict[str, list[tuple[int, bytes]]] = {}
    for one in found:
        assert one.origin is not None
        by_sender.setdefault(one.origin.sender, []).append((one.origin.seq, one.value))
    assert len(by_sender) == 50
    assert all(numbers == [(1, b"1"), (2, b"2"), (3, b"3")] for numbers in by_sender.values())


async def test_a_message_that_is_too_large_has_a_receipt_and_is_passed_over() -> None:
    source = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", max_size=100)
    async with opened(source) as (url, intakes):
        async with connect(f"{url}?sender=a&epoch=1") as sender:
            await sender.recv()
            await sender.send("x" * 100)
            await sender.send("x" * 101)
            found = await taken(intakes, 2)
            with pytest.raises(ConnectionClosed, match="1009"):
                await told(sender, -1)
        assert [(len(one.value), one.refused) for one in found] == [
            (100, None),
            (0, "it is larger than the 100 bytes that a message may have"),
        ]
        assert found[1].origin is not None
        assert found[1].origin.seq == 2
        async with connect(f"{url}?sender=a&epoch=1") as sender:
            assert orjson.loads(await sender.recv()) == {"after": 2}


async def test_what_was_not_taken_ends_the_connection() -> None:
    async with opened() as (url, intakes), connect(f"{url}?sender=a&epoch=1") as sender:
        await sender.recv()
        await sender.send("x")
        await (await anext(intakes)).settle(Unavailable("the channel", "away"))
        with pytest.raises(ConnectionClosed, match=r"1013 .*not stored"):
            await sender.recv()
        async with connect(f"{url}?sender=a&epoch=1") as again:
            assert orjson.loads(await again.recv()) == {"after": 0}


async def test_what_follows_something_that_was_not_taken_is_not_safe_either() -> None:
    async with opened() as (url, intakes), connect(f"{url}?sender=a&epoch=1") as sender:
        await sender.recv()
        await sender.send("x")
        first = await anext(intakes)
        await sender.send("y")
        second = await anext(intakes)
        await first.settle(Unavailable("the channel", "away"))
        await second.settle(None)
        with pytest.raises(ConnectionClosed, match="1013"):
            await told(sender, 2)
        async with connect(f"{url}?sender=a&epoch=1") as again:
            assert orjson.loads(await again.recv()) == {"after": 0}


async def test_at_the_end_senders_hear_what_is_safe() -> None:
    async with opened() as (url, intakes):
        sender = await connect(f"{url}?sender=a&epoch=1")
        await sender.recv()
        await sender.send("x")
        intake = await anext(intakes)
        settling = asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(intake.settle(None)))
    assert orjson.loads(await sender.recv()) == {"safe": 1}
    settling.cancel()
    await sender.close()


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nowhere", 404, "Unknown path; use /"),
        ("/?sender=a", 400, "epoch is missing"),
        ("/?sender=a&epoch=-1", 400, "epoch is missing"),
        ("/?sender=a&epoch=9223372036854775808", 400, "epoch is missing"),
        ("/?sender=a&epoch=%D9%A1", 400, "epoch is missing"),
        ("/?sender=a&epoch=1&seq=0", 400, "numbered from 1"),
        ("/?sender=a&epoch=1&seq=x", 400, "numbered from 1"),
        ("/?sender=&epoch=1", 400, "1 to 200 characters"),
        ("/?sender=" + "a" * 201 + "&epoch=1", 400, "1 to 200 characters"),
        ("/?sender=a%0Ab&epoch=1", 400, "printable"),
        ("/?sender=a%1B%5B2J&epoch=1", 400, "printable"),
        ("/?sender=door&epoch=1", 400, "the name of this source"),
        ("/?sender=a&sender=b&epoch=1", 400, "each once"),
        ("/?token=1", 400, "can have sender, epoch and seq"),
    ],
)
async def test_who_does_not_say_enough_is_turned_away_with_the_reason(path: str, status: int, said: str) -> None:
    async with opened() as (url, _):
        with pytest.raises(InvalidStatus) as error:
            await connect(url.rstrip("/") + path)
        assert error.value.response.status_code == status
        assert said in error.value.response.body.decode()


async def test_a_name_is_asked_for_unless_it_is_not_needed() -> None:
    source = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/in", "door")
    async with opened(source) as (url, _):
        with pytest.raises(InvalidStatus) as error:
            await connect(url)
        assert b"Name the sender: /in?sender=NAME&epoch=N" in error.value.response.body


async def test_pages_of_other_sites_are_turned_away() -> None:
    async with opened() as (url, _):
        with pytest.raises(InvalidStatus) as error:
            await connect(url, origin="https://elsewhere.example")  # type: ignore[arg-type]
        assert error.value.response.status_code == 403


async def test_a_jump_is_refused() -> None:
    before = ResumeState({"a": (5, 41)}, highest={"a": (5, 41)})
    async with opened(taken=before) as (url, _):
        with pytest.raises(InvalidStatus) as error:
            await connect(f"{url}?sender=a&epoch=5&seq={2**62}")
        assert error.value.response.status_code == 400
        async with connect(f"{url}?sender=a&epoch=5") as sender:
            assert orjson.loads(await sender.recv()) == {"after": 41}
        async with connect(f"{url}?sender=a&epoch=6&seq={2**62}") as sender:
            assert orjson.loads(await sender.recv()) == {"after": 2**62 - 1}


async def test_a_name_that_was_pointed_at_this_machine_is_none_of_ours() -> None:
    """DNS rebinding: to a browser, the source is then the page's own site."""
    async with opened() as (url, _):
        port = int(url.partition("//127.0.0.1:")[2].partition("/")[0])
        evil = f"evil.example:{port}"
        for origin in (f"http://{evil}", None):
            with pytest.raises(InvalidStatus) as error:
                await connect(url.replace(f"127.0.0.1:{port}", evil), origin=origin, host="127.0.0.1", port=port)  # type: ignore[arg-type]
            assert error.value.response.status_code == 403


async def test_pages_of_a_site_that_may_send_are_let_in() -> None:
    address = f"listen+ws://127.0.0.1:{later_port()}/"
    source = WebSocketServer(address, "door", named=False, origins="https://mine.example")
    async with opened(source) as (url, _), connect(url, origin="https://mine.example") as page:  # type: ignore[arg-type]
        await page.recv()


async def test_too_many_are_turned_away() -> None:
    source = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", named=False, connections=1)
    async with opened(source) as (url, _), connect(url) as first:
        await first.recv()
        with pytest.raises(InvalidStatus) as error:
            await connect(url)
        assert error.value.response.status_code == 503


async def test_a_slow_pump_holds_the_senders_up_and_memory_stays_bounded() -> None:
    """Nobody takes: so much is read as is bounded, and no more."""
    source = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door")
    async with opened(source) as (url, intakes), connect(f"{url}?sender=a&epoch=1", compression=None) as sender:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while sent < 200:
                await sender.send(b"x" * (1 << 20))
                sent += 1

        flooding = asyncio.create_task(flood())
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert 16 <= sent < 100
        reading = asyncio.create_task(taken(intakes, 200))
        await until(lambda: sent == 200)
        await flooding
        assert len(await reading) == 200


async def test_many_senders_are_held_up_together_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes: what is read does not grow with their number. Then all of it arrives."""
    came, read = 0, Connection.read

    def counted(connection: Connection) -> bytes | None:
        nonlocal came
        data = read(connection)
        came += len(data or b"")
        return data

    monkeypatch.setattr(Connection, "read", counted)
    async with opened() as (url, intakes):

        async def flood(name: str) -> None:
            async with connect(f"{url}?sender={name}&epoch=1", compression=None) as sender:
                for _ in range(10):
                    await sender.send(b"x" * 500_000)
                await told(sender, 10)

        floods = [asyncio.create_task(flood(f"s{n}")) for n in range(60)]
        await until(lambda: came > 16 << 20)
        before = -1
        while came != before:
            before = came
            await asyncio.sleep(0.3)
        let_in = came
        found = await taken(intakes, 600)
        await asyncio.gather(*floods)
    # Sixty times five million bytes are offered.
    assert let_in < 80 << 20
    numbers = [(one.origin.sender, one.origin.seq) for one in found if one.origin is not None]
    assert sorted(numbers) == sorted((f"s{n}", seq) for n in range(60) for seq in range(1, 11))


async def test_what_a_foreigner_says_on_the_port_hurts_nobody() -> None:
    async with opened() as (url, intakes):
        port = int(url.rpartition(":")[2].strip("/"))
        for said in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 5_000,
            b"GET /" + b"a" * 100_000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            writer.write_eof()
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        async with connect(f"{url}?sender=a&epoch=1") as sender:
            await sender.send("x")
            assert Origin.headers((await taken(intakes, 1))[0].origin or Origin("", 0, 0, 0))[2] == ("seq", b"1")


class TestKilled(CrashContract):
    pass


async def test_a_close_that_is_cut_off_closes_all_the_same() -> None:
    source, holds = WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", named=False), asyncio.Event()

    async def hold() -> None:
        async with opened(source) as (_, intakes):
            async for _ in intakes:
                holds.set()

    holding = asyncio.create_task(hold())
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError):
                sender = await connect(source.url.removeprefix("listen+"))
                break
            await asyncio.sleep(0.005)
        await sender.recv()
        await sender.send("x")
        await holds.wait()
        while not holding.done():
            # The first begins to close, the second strikes while that waits for what nobody settles.
            holding.cancel()
            await asyncio.sleep(0.01)
        with suppress(ConnectionClosed):
            await sender.recv()
        await sender.wait_closed()


def test_processes_that_share_a_port_do_not_know_of_each_other() -> None:
    source = WebSocketServer("listen+ws://127.0.0.1:8700/", "door", shared=True)
    assert source.guarantee is Guarantee.AT_LEAST_ONCE
    assert "another process" in source.description


# --- what the connections hold, bounded for all of them together


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen.IngestQueue.__init__, "__defaults__", (100_000,))


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[tuple[str, AsyncIterator[Intake]]]:
    async with opened(WebSocketServer(f"listen+ws://127.0.0.1:{later_port()}/", "door", **options)) as (url, intakes):
        yield f"{url}?epoch=1&sender=", intakes


async def met(url: str, **options: Any) -> ClientConnection:
    sender = await connect(url, compression=None, close_timeout=0.1, **options)
    assert orjson.loads(await sender.recv()) == {"after": 0}
    return sender


@pytest.mark.usefixtures("little_room")
async def test_very_many_that_bring_a_little_each_are_bounded_and_all_of_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came, read = 0, Connection.read

    def counted(connection: Connection) -> bytes | None:
        nonlocal came
        data = read(connection)
        came += len(data or b"")
        return data

    async with listening() as (url, intakes), AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(await met(f"{url}s{n}")) for n in range(100)]
        monkeypatch.setattr(Connection, "read", counted)
        for sender in senders:
            await sender.send(b"x" * 20_000)
        before = -1
        while came != before:
            before = came
            await asyncio.sleep(0.3)
        # All of them together bring two million bytes.
        assert 100_000 <= came <= 100_000 + (listen.READING + 1) * 20_100
        found = await taken(intakes, 100)
        assert len({one.origin.sender for one in found if one.origin is not None}) == 100
        for sender in senders:
            await told(sender, 1)


async def test_a_message_that_does_not_end_holds_nobody_up() -> None:
    async with listening() as (url, intakes), await met(f"{url}slow") as slow, await met(f"{url}fast") as fast:
        goes_on = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b"a" * 300_000
            await goes_on.wait()
            yield b"z"

        sending = asyncio.create_task(slow.send(parts()))
        for _ in range(10):
            await fast.send(b"x" * 100_000)
        assert len(await taken(intakes, 10)) == 10
        await told(fast, 10)
        goes_on.set()
        await sending
        assert [len(one.value) for one in await taken(intakes, 1)] == [300_001]
        await told(slow, 1)


@pytest.mark.parametrize("whole", [True, False], ids=["fragments", "half a frame"])
async def test_whoever_holds_most_has_to_go_when_too_much_does_not_end(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_UNFINISHED", 200_000)
    held = 0
    limit = TcpServer._limit_unfinished

    def watched(server: TcpServer, session: tcp.Session) -> None:
        nonlocal held
        limit(server, session)
        held = server._held

    monkeypatch.setattr(TcpServer, "_limit_unfinished", watched)
    async with listening() as (url, intakes), await met(f"{url}small") as small, await met(f"{url}large") as large:
        begun = Frame(Opcode.TEXT, b"x" * 50_000, fin=False).serialize(mask=True)
        small.transport.write(begun[: len(begun) if whole else -10])
        await until(lambda: held >= 49_000)
        more = Frame(Opcode.TEXT, b"x" * 190_000, fin=False).serialize(mask=True)
        large.transport.write(more[: len(more) if whole else -10])
        with pytest.raises(ConnectionClosed, match=r"1013 .*too many unfinished records"):
            await large.recv()
        small.transport.write(b"" if whole else begun[-10:])
        small.transport.write(Frame(Opcode.CONT, b"y").serialize(mask=True))
        assert [len(one.value) for one in await taken(intakes, 1)] == [50_001]
        await told(small, 1)
        await until(lambda: held == 0)


async def test_a_handshake_that_does_not_end_is_cut_off() -> None:
    async with listening() as (url, intakes), await met(f"{url}a") as sender:
        port = int(url.partition("?")[0].rpartition(":")[2].strip("/"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 4_000) for n in range(60)))
        with suppress(ConnectionError):
            assert b"the handshake is too long" in await reader.read()
        writer.close()
        await sender.send("x")
        assert len(await taken(intakes, 1)) == 1
        await told(sender, 1)


QUICK = timedelta(milliseconds=200)


@pytest.mark.usefixtures("little_room")
async def test_who_is_held_up_is_not_taken_for_dead() -> None:
    async with (
        listening(ping_every=QUICK, pong_within=QUICK) as (url, intakes),
        await met(f"{url}busy", ping_interval=None) as busy,
        await met(f"{url}idle", ping_interval=None) as idle,
    ):
        for _ in range(5):
            await busy.send(b"x" * 100_000)
        await asyncio.sleep(5 * QUICK.total_seconds())
        await idle.send("y")
        assert len(await taken(intakes, 6)) == 6
        await told(busy, 5)
        await told(idle, 1)


async def test_who_does_not_answer_a_ping_is_let_go() -> None:
    async with listening(ping_every=QUICK, pong_within=QUICK) as (url, _), await met(f"{url}a") as sender:
        sender.transport.pause_reading()
        await asyncio.sleep(5 * QUICK.total_seconds())
        sender.transport.resume_reading()
        with pytest.raises(ConnectionClosed, match=r"1008 .*no response to a ping"):
            await sender.recv()


async def test_pings_without_end_that_nobody_reads_the_answers_to_end_the_connection() -> None:
    async with listening() as (url, _), await met(f"{url}a") as sender:
        sender.transport.pause_reading()
        ping = Frame(Opcode.PING, b"x" * 125).serialize(mask=True)
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not sender.transport.is_closing():
                    sender.transport.write(ping * 1_000)
                    await asyncio.sleep(0.001)
        sender.transport.abort()
