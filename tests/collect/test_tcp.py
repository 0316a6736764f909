"""Senders that connect by TCP."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import orjson
import pytest
from tests.collect.outside import Keeper, taken, trying
from tests.ports import later_port

from penstock.collect.tcp import TcpSource
from penstock.core import tcp
from penstock.core.contracts import Arrival, Guarantee, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.testing.killing import CrashContract
from penstock.testing.sources import SourceContract, lines

HELLO = b'{"sender": "a", "epoch": 1}'
QUICK = timedelta(milliseconds=50)


def listening(**options: Any) -> TcpSource:
    return TcpSource(f"listen+tcp://127.0.0.1:{later_port()}", "door", **options)


def port_of(source: TcpSource) -> int:
    return int(source.url.rpartition(":")[2])


@dataclass
class Sender:
    """A connection, in the framing that the source has."""

    frames: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def framed(self, *payloads: bytes) -> bytes:
        if self.frames == "lines":
            return b"".join(payload + b"\n" for payload in payloads)
        return b"".join(struct.pack("!I", len(payload)) + payload for payload in payloads)

    def send(self, *payloads: bytes) -> None:
        self.writer.write(self.framed(*payloads))

    async def hear(self) -> Any:
        async with asyncio.timeout(20):
            if self.frames == "lines":
                return orjson.loads(await self.reader.readuntil(b"\n"))
            size = struct.unpack("!I", await self.reader.readexactly(4))[0]
            return orjson.loads(await self.reader.readexactly(size))

    async def told(self, safe: int) -> None:
        while (said := await self.hear()) != {"safe": safe}:
            assert said["safe"] < safe

    async def error(self) -> str:
        """What it is told at last, before the connection ends."""
        while "error" not in (said := await self.hear()):
            pass
        assert await self.reader.read() == b""
        return str(said["error"])

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


@asynccontextmanager
async def sending(source: TcpSource, hello: bytes | None = None) -> AsyncIterator[Sender]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(source))
    sender = Sender(source.frames, reader, writer)
    try:
        if hello is not None:
            sender.send(hello)
        yield sender
    finally:
        writer.transport.abort()


def values(found: Sequence[Arrival]) -> list[bytes]:
    return [one.value for one in found]


@dataclass
class Device(Keeper):
    """A sender as its author would write it: it goes on where it is told."""

    sender: Sender | None = None
    before: int = 0

    async def disconnect(self) -> None:
        if self.sender is not None:
            self.sender.reset()

    def acknowledged(self) -> int | None:
        return self.safe if self.source.acknowledge else None

    async def run(self) -> None:
        while True:
            with suppress(OSError, EOFError):
                async with sending(self.source, HELLO if self.source.named else None) as self.sender:
                    await self._talk(self.sender)
            await asyncio.sleep(0.005)

    async def _talk(self, sender: Sender) -> None:
        if self.source.named:
            self.safe = max(self.safe, (await sender.hear())["after"])
        sent = self.before = self.safe
        listening = asyncio.create_task(self._listen(sender))
        try:
            while True:
                self.more.clear()
                sender.send(*self.kept[sent:])
                sent = len(self.kept)
                if not self.source.acknowledge:
                    self.safe = sent
                if not await self.has_more(listening):
                    return
        finally:
            self.more.set()
            listening.cancel()

    async def _listen(self, sender: Sender) -> None:
        with suppress(OSError, EOFError):
            while True:
                if (said := (await sender.reader.readuntil(b"\n"))) and "safe" in (told := orjson.loads(said)):
                    self.safe = told["safe"] + (0 if self.source.named else self.before)


KINDS: dict[str, dict[str, Any]] = {
    "named": {},
    "without names": {"named": False},
    "without acknowledgement": {"acknowledge": False},
}


@pytest.fixture(params=KINDS)
async def upstream(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    async with trying(Device(listening(**KINDS[request.param]))) as device:
        yield device


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return lines(payload)


class TestKilled(CrashContract):
    pass


@pytest.fixture(params=["lines", "length"])
def frames(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_numbers_count_on_where_the_collector_says(frames: str) -> None:
    source = listening(frames=frames)
    async with (
        source.open(ResumeState({"a b": (5, 41)})) as intakes,
        sending(source, b'{"sender":"a b","epoch":5}') as sender,
    ):
        assert await sender.hear() == {"after": 41}
        sender.send(b"x", b"\xff\x00")
        found = await taken(intakes, 2)
        assert [(one.value, one.origin and (one.origin.sender, one.origin.epoch, one.origin.seq)) for one in found] == [
            (b"x", ("a b", 5, 42)),
            (b"\xff\x00", ("a b", 5, 43)),
        ]
        await sender.told(43)


async def test_who_has_forgotten_the_beginning_is_not_asked_for_it() -> None:
    source = listening()
    async with (
        source.open(ResumeState()) as intakes,
        sending(source, b'{"sender":"a","epoch":2,"seq":100}') as sender,
    ):
        assert await sender.hear() == {"after": 99}
        sender.send(b"x")
        (found,) = await taken(intakes, 1)
        assert found.origin is not None
        assert found.origin.seq == 100


async def test_a_jump_is_refused_and_keeps_nobody_out(frames: str) -> None:
    source = listening(frames=frames)
    async with source.open(ResumeState({"a": (5, 41)}, highest={"a": (5, 41)})), sending(source) as true:
        true.send(b'{"sender":"a","epoch":5}')
        assert await true.hear() == {"after": 41}
        async with sending(source, b'{"sender":"a","epoch":5,"seq":%d}' % 2**62) as forged:
            assert "error" in await forged.hear()
        # The connection of the true sender is still there.
        true.send(b"x")
        async with sending(source, b'{"sender":"a","epoch":5}') as again:
            assert await again.hear() == {"after": 41}


async def test_who_would_count_beyond_64_bits_is_told_so_and_no_such_number_is_given(frames: str) -> None:
    source, last = listening(frames=frames), 2**63 - 1
    hello = b'{"sender":"a","epoch":1,"seq":%d}' % last
    why = "their numbers are beyond 64 bits; start another epoch"
    async with source.open(ResumeState()) as intakes:
        async with sending(source) as sender:
            sender.send(hello, b"x", b"y")
            assert await sender.hear() == {"after": last - 1}
            assert await sender.hear() == {"error": why}
        async with sending(source, hello) as sender:
            assert await sender.hear() == {"after": last - 1}
            sender.send(b"x")
            (found,) = await taken(intakes, 1)
            assert found.origin is not None
            assert found.origin.seq == last
            await sender.told(last)
            sender.send(b"y")
            assert await sender.error() == why
        async with sending(source, b'{"sender":"a","epoch":2}') as sender:
            sender.send(b"z")
            assert values(await taken(intakes, 1)) == [b"z"]


async def test_a_new_life_of_a_sender_begins_at_one() -> None:
    source = listening()
    async with (
        source.open(ResumeState({"a": (1, 41)})) as intakes,
        sending(source, b'{"sender":"a","epoch":2}') as sender,
    ):
        assert await sender.hear() == {"after": 0}
        sender.send(b"x")
        (found,) = await taken(intakes, 1)
        assert found.origin is not None
        assert (found.origin.epoch, found.origin.seq) == (2, 1)


async def test_who_has_no_name_is_told_how_many_of_this_connection_are_safe(frames: str) -> None:
    source = listening(frames=frames, named=False)
    assert source.guarantee is Guarantee.AT_LEAST_ONCE
    async with source.open(ResumeState()) as intakes, sending(source) as sender:
        sender.send(b"x", b"x")
        assert [one.origin for one in await taken(intakes, 2)] == [None, None]
        await sender.told(2)


async def test_an_empty_line_is_no_record_and_an_empty_frame_is_one() -> None:
    for frames, expected in (("lines", [b"x"]), ("length", [b"", b"x"])):
        source = listening(frames=frames, named=False)
        async with source.open(ResumeState()) as intakes, sending(source) as sender:
            sender.send(b"", b"x")
            assert values(await taken(intakes, len(expected))) == expected


async def test_a_sender_that_says_no_more_still_hears_what_is_safe() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes, sending(source, HELLO) as sender:
        sender.send(b"x", b"y")
        sender.writer.write_eof()
        intake = await anext(intakes)
        assert await sender.hear() == {"after": 0}
        await intake.settle(None)
        await sender.told(2)
        assert await sender.reader.read() == b""


async def test_a_connection_that_comes_back_unnoticed_takes_the_place_of_the_old_one() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes, sending(source, HELLO) as old:
        assert await old.hear() == {"after": 0}
        async with sending(source, HELLO) as new:
            assert await new.hear() == {"after": 0}
            assert await old.error() == "there is another connection of this sender"
            new.send(b"x")
            assert len(await taken(intakes, 1)) == 1


async def test_many_senders_do_not_get_in_each_others_way() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes:
        found: list[Arrival] = []

        async def send(name: str) -> None:
            async with sending(source, orjson.dumps({"sender": name, "epoch": 1})) as sender:
                await sender.hear()
                for number in range(1, 4):
                    sender.send(b"%d" % number)
                    await asyncio.sleep(0)
                await sender.told(3)

        senders = [asyncio.create_task(send(f"s{n}")) for n in range(100)]
        found = await taken(intakes, 300)
        await asyncio.gather(*senders)
    by_sender: dict[str, list[tuple[int, bytes]]] = {}
    for one in found:
        assert one.origin is not None
        by_sender.setdefault(one.origin.sender, []).append((one.origin.seq, one.value))
    assert len(by_sender) == 100
    assert all(numbers == [(1, b"1"), (2, b"2"), (3, b"3")] for numbers in by_sender.values())


async def test_a_record_that_is_too_large_has_a_receipt_and_is_passed_over(frames: str) -> None:
    source = listening(frames=frames, max_size=100)
    async with source.open(ResumeState()) as intakes, sending(source, HELLO) as sender:
        sender.send(b"x" * 100, b"x" * 1000, b"next")
        found = await taken(intakes, 3)
        assert found[0].refused is found[2].refused is None
        assert found[1].refused is not None
        assert values(found)[2] == b"next"
        assert [one.origin and one.origin.seq for one in found] == [1, 2, 3]
        await sender.hear()
        await sender.told(3)


async def test_a_line_without_end_has_a_receipt_at_once() -> None:
    source = listening(max_size=1_000)
    async with source.open(ResumeState()) as intakes, sending(source, HELLO) as sender:
        sender.writer.write(b"x" * 300_000)
        (found,) = await taken(intakes, 1)
        assert (found.value, found.refused) == (
            b"x" * 1_000,
            "the line has more than 1000 bytes, the limit of a record",
        )
        sender.send(b"its end", b"next")
        assert values(await taken(intakes, 1)) == [b"next"]


async def test_a_length_that_is_absurd_has_a_receipt_and_ends_the_connection() -> None:
    source = listening(frames="length")
    async with source.open(ResumeState()) as intakes:
        async with sending(source, HELLO) as sender:
            sender.send(b"x")
            sender.writer.write(b"\xff\xff\xff\xff" + b"x" * 100_000)
            found = await taken(intakes, 2)
            assert await sender.error() == "the length of a record is 4294967295 bytes, the limit is 900000"
        assert [(one.value, one.refused) for one in found] == [
            (b"x", None),
            (b"", "the length of a record is 4294967295 bytes, the limit is 900000"),
        ]
        async with sending(source, HELLO) as sender:
            assert await sender.hear() == {"after": 2}


async def test_half_a_record_and_a_reset_are_nothing_to_one_that_sends_it_again(frames: str) -> None:
    source = listening(frames=frames)
    async with source.open(ResumeState()) as intakes:
        async with sending(source, HELLO) as sender:
            sender.writer.write(sender.framed(b"one", b"two")[:-2])
            assert values(await taken(intakes, 1)) == [b"one"]
            sender.reset()
        async with sending(source, HELLO) as sender:
            assert await sender.hear() == {"after": 1}
            sender.send(b"two")
            (found,) = await taken(intakes, 1)
            assert found.origin is not None
            assert (found.value, found.origin.seq) == (b"two", 2)


async def test_what_is_not_acknowledged_is_taken_as_it_comes_and_nothing_is_said() -> None:
    source = listening(acknowledge=False)
    assert source.guarantee is Guarantee.BEST_EFFORT
    async with source.open(ResumeState()) as intakes, sending(source) as sender:
        sender.writer.write(b"one\ntwo\r\nthree")
        sender.writer.write_eof()
        assert values(await taken(intakes, 3)) == [b"one", b"two", b"three"]
        assert await sender.reader.read() == b""


async def test_half_a_record_that_nobody_sends_again_has_a_receipt() -> None:
    source = listening(acknowledge=False, frames="length")
    async with source.open(ResumeState()) as intakes, sending(source) as sender:
        sender.writer.write(sender.framed(b"one", b"two")[:-2])
        sender.writer.write_eof()
        assert [(one.value, one.refused) for one in await taken(intakes, 2)] == [
            (b"one", None),
            (b"t", "the stream ends after 1 bytes of the record"),
        ]
    source = replace(source, frames="lines", stalled_after=QUICK)
    async with source.open(ResumeState()) as intakes:
        async with sending(source) as sender:
            sender.writer.write(b"hal")
            assert [(one.value, one.refused) for one in await taken(intakes, 1)] == [
                (b"hal", "timeout in the middle of a record")
            ]
        source_slow = replace(source, stalled_after=timedelta(seconds=30))
    async with source_slow.open(ResumeState()) as intakes, sending(source_slow) as sender:
        sender.send(b"one")
        sender.writer.write(b"hal")
        await taken(intakes, 1)
        await asyncio.sleep(0.05)
        sender.reset()
        assert [(one.value, one.refused) for one in await taken(intakes, 1)] == [
            (b"hal", "the connection broke in the middle of the record")
        ]


async def test_what_was_not_taken_ends_the_connection() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes:
        async with sending(source, HELLO) as sender:
            sender.send(b"x")
            await (await anext(intakes)).settle(Unavailable("the channel", "away"))
            assert await sender.error() == "the records were not stored"
        async with sending(source, HELLO) as again:
            assert await again.hear() == {"after": 0}


async def test_what_came_behind_something_that_was_not_taken_is_not_safe() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes:
        async with sending(source, HELLO) as sender:
            assert await sender.hear() == {"after": 0}
            sender.send(b"x")
            first = await anext(intakes)
            sender.send(b"y")
            second = await anext(intakes)
            await first.settle(Unavailable("the channel", "away"))
            await second.settle(None)
            assert await sender.hear() == {"error": "the records were not stored"}
        async with sending(source, HELLO) as again:
            assert await again.hear() == {"after": 0}


async def test_at_the_end_senders_hear_what_is_safe() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(source))
        sender = Sender("lines", reader, writer)
        sender.send(HELLO, b"x")
        intake = await anext(intakes)
        settling = asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(intake.settle(None)))
    assert [await sender.hear(), await sender.hear(), await sender.hear()] == [
        {"after": 0},
        {"safe": 1},
        {"error": "this source is being closed"},
    ]
    settling.cancel()
    writer.close()


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (b"not JSON", "begin with the sender"),
        (b"GET / HTTP/1.1", "begin with the sender"),
        (b"[]", "begin with the sender"),
        (b"[" * 3_000, "begin with the sender"),
        (b"x" * 10_000, "begin with the sender"),
        (b'{"sender":"a"}', "begin with the sender"),
        (b'{"sender":"a","epoch":1,"seq":0}', "begin with the sender"),
        (b'{"sender":"a","epoch":1,"seq":true}', "begin with the sender"),
        (b'{"sender":"a","epoch":-1}', "an epoch that grows"),
        (b'{"sender":"a","epoch":true}', "an epoch that grows"),
        (b'{"sender":"a","epoch":1.0}', "an epoch that grows"),
        (b'{"sender":"a","epoch":"1"}', "an epoch that grows"),
        (b'{"sender":"a","epoch":9223372036854775808}', "an epoch that grows"),
        (b'{"sender":"a","epoch":1,"n":1}', "begin with the sender"),
        (b'{"sender":"\\ud800","epoch":1}', "begin with the sender"),
        (b'{"sender":"","epoch":1}', "1 to 200 characters"),
        (b'{"sender":"' + b"a" * 201 + b'","epoch":1}', "1 to 200 characters"),
        (b'{"sender":"a\\nb","epoch":1}', "printable"),
        (b'{"sender":"\\u001b[2J","epoch":1}', "printable"),
        (b'{"sender":"door","epoch":1}', "the name of this source"),
    ],
)
async def test_who_does_not_say_enough_is_turned_away_with_the_reason(hello: bytes, said: str, frames: str) -> None:
    source = listening(frames=frames)
    async with source.open(ResumeState()), sending(source, hello) as sender:
        assert said in await sender.error()


async def test_a_hello_that_does_not_come_or_does_not_end_closes_the_connection(frames: str) -> None:
    source = listening(frames=frames, hello_within=QUICK)
    async with source.open(ResumeState()):
        for begun in (b"", b'{"se'):
            async with sending(source) as sender:
                sender.writer.write(sender.framed(begun)[: len(begun)] if begun else b"")
                assert "begin with the sender" in await sender.error()
        async with sending(source) as sender:
            sender.writer.write(b"\x00\x00\xff\xff" + b"{" * 10_000)
            assert "begin with the sender" in await sender.error()


async def test_a_record_that_does_not_go_on_closes_the_connection_and_an_idle_one_is_fine(frames: str) -> None:
    source = listening(frames=frames, stalled_after=QUICK, named=False)
    async with source.open(ResumeState()) as intakes, sending(source) as idle:
        async with sending(source) as sender:
            sender.writer.write(b"\x00\x00\x10\x00never sent")
            assert await sender.error() == "timeout in the middle of a record"
        idle.send(b"x")
        assert values(await taken(intakes, 1)) == [b"x"]


async def test_tls_on_the_plain_port_is_told_what_it_is(frames: str, caplog: pytest.LogCaptureFixture) -> None:
    source = listening(frames=frames)
    async with source.open(ResumeState()) as intakes:
        for _ in range(2):
            async with sending(source) as sender:
                sender.writer.write(b"\x16")
                await asyncio.sleep(0.02)
                sender.writer.write(b"\x03\x01\x02\x00\x01")
                assert await sender.error() == "this port does not use TLS"
        async with sending(source, HELLO) as sender:
            sender.send(b"x")
            assert values(await taken(intakes, 1)) == [b"x"]
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [
        "door: 127.0.0.1 uses TLS, and this port does not"
    ]


async def test_too_many_are_turned_away() -> None:
    source = listening(named=False, connections=1)
    async with source.open(ResumeState()) as intakes, sending(source) as first:
        first.send(b"x")
        await taken(intakes, 1)
        async with sending(source) as second:
            assert await second.error() == "the limit of 1 connections is reached; try again later"
        first.send(b"y")
        assert values(await taken(intakes, 1)) == [b"y"]


async def test_who_holds_most_has_to_go_when_too_much_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_UNFINISHED", 100_000)
    source = listening(named=False)
    async with source.open(ResumeState()) as intakes, sending(source) as small, sending(source) as large:
        small.writer.write(b"x" * 10)
        large.writer.write(b"x" * 200_000)
        assert await large.error() == "too many unfinished records; try again later"
        small.send(b"y")
        assert values(await taken(intakes, 1)) == [b"x" * 10 + b"y"]


async def test_a_slow_pump_holds_the_senders_up_and_memory_stays_bounded() -> None:
    """Nobody takes: so much is read as is bounded, and no more, however many send."""
    source = listening(named=False)
    async with source.open(ResumeState()) as intakes:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            async with sending(source) as sender:
                sender.writer.transport.set_write_buffer_limits(0)
                for _ in range(20):
                    sender.send(b"x" * 500_000)
                    await sender.writer.drain()
                    sent += 1
                await sender.told(20)

        floods = [asyncio.create_task(flood()) for _ in range(20)]
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert 32 <= sent < 350
        assert len(await taken(intakes, 400)) == 400
        await asyncio.gather(*floods)


async def test_a_sender_that_never_listens_does_not_hold_the_others_up() -> None:
    source = listening(named=False)
    async with source.open(ResumeState()) as intakes, sending(source) as deaf, sending(source) as other:
        deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(50):
            deaf.send(b"x")
            await taken(intakes, 1)
        other.send(b"y")
        await taken(intakes, 1)
        await other.told(1)


def test_options_that_mean_nothing_are_misconfigured() -> None:
    with pytest.raises(Misconfigured, match=r"source door, frames: .*one of lines, length"):
        listening(frames="words")
    with pytest.raises(Misconfigured, match="source door, max_size"):
        listening(max_size=0)


async def test_no_word_of_a_foreigner_hurts_the_others() -> None:
    source = listening()
    async with source.open(ResumeState()) as intakes:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5_000, b"\xff\xfe" * 50_000, b"\n" * 10_000, b"\r\n"):
            async with sending(source) as sender:
                sender.writer.write(said)
                sender.writer.write_eof()
                with suppress(OSError):
                    await sender.reader.read()
        async with sending(source, HELLO) as sender:
            sender.send(b"x")
            assert values(await taken(intakes, 1)) == [b"x"]


async def test_a_close_that_is_cut_off_closes_all_the_same() -> None:
    source, holds = TcpSource(f"listen+tcp://127.0.0.1:{later_port()}", "door", named=False), asyncio.Event()

    async def hold() -> None:
        async with source.open(ResumeState()) as intakes:
            async for _ in intakes:
                holds.set()

    before = asyncio.all_tasks()
    holding = asyncio.create_task(hold())
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(source.url.rpartition(":")[2]))
                break
            await asyncio.sleep(0.005)
        writer.write(b"x\n")
        await holds.wait()
        while not holding.done():
            # The first begins to close, the second strikes while that waits for what nobody settles.
            holding.cancel()
            await asyncio.sleep(0.01)
        while not asyncio.all_tasks() <= before:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
        await reader.read()
    writer.close()


def test_processes_that_share_a_port_do_not_know_of_each_other() -> None:
    source = TcpSource("listen+tcp://127.0.0.1:8700", "door", shared=True)
    assert source.guarantee is Guarantee.AT_LEAST_ONCE
    assert "another process" in source.description
