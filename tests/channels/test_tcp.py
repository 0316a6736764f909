"""Channels over TCP: each record once and in order while both ends live, and strangers hurt nobody."""

import asyncio
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing
from datetime import timedelta
from typing import Any

import orjson
import pytest
from tests.ports import later_port

from penstock.channels.binders import bind
from penstock.channels.tcp import ROOM, Decoded, Inbox, Tcp, listening
from penstock.channels.tcp.sender import LIMIT, Part, TcpSender, Window, encode
from penstock.core.clock import SystemClock
from penstock.core.contracts import Entry, Reader, Topic
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.framing import framed, framed_message
from penstock.core.record import Origin, Record

Eventually = Callable[..., None]


@pytest.fixture
def tcp() -> Tcp:
    return Tcp("127.0.0.1", later_port(), timeout=5)


def numbers(first: int, last: int, size: int = 0) -> list[Record]:
    return [Record(b"%d" % number + b" " * size) for number in range(first, last + 1)]


def overhead(entries: Sequence[Entry]) -> list[int]:
    return [int(entry.value or b"-1") for entry in entries]


def read(reader: Reader, count: int, most: int = 1000) -> list[Entry]:
    found: list[Entry] = []
    while len(found) < count:
        some = reader.read(most, 10)
        assert some, f"only {len(found)} of {count} came"
        found += some
    return found


async def aread(reader: Reader, count: int) -> list[Entry]:
    return await asyncio.to_thread(read, reader, count)


def sent(tcp: Tcp, channel: str, records: Sequence[Record]) -> None:
    async def send() -> None:
        async with tcp.sender() as sender:
            await sender.send(channel, records)

    asyncio.run(send())


class Wire:
    """A relay between senders and a reader, which can be cut and can be deaf for answers."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.open: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.answers = True
        self.dropped = 0

    async def carry(self, stream: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self.open += [out, back]
        try:
            await asyncio.gather(self._copy(stream, back), self._copy(there, out, answers=True))
        except OSError:
            pass
        finally:
            out.transport.abort()
            back.transport.abort()

    async def _copy(self, stream: asyncio.StreamReader, out: asyncio.StreamWriter, answers: bool = False) -> None:
        while data := await stream.read(1 << 16):
            if answers and not self.answers:
                self.dropped += len(data)
                continue
            out.write(data)
            await out.drain()
        out.transport.abort()

    def cut(self) -> None:
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()


@asynccontextmanager
async def wired(tcp: Tcp) -> AsyncIterator[tuple[Wire, Tcp]]:
    wire, port = Wire(tcp.port), later_port()
    server = await asyncio.start_server(wire.carry, "127.0.0.1", port)
    try:
        yield wire, Tcp("127.0.0.1", port, timeout=5)
    finally:
        server.close()
        wire.cut()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is waited for happens elsewhere, in threads too)
            await asyncio.sleep(0.01)


# --- what is carried


def test_keys_values_and_headers_arrive_as_they_were(tcp: Tcp) -> None:
    origin = Origin("søren/1", 7, 1, 1_700_000_000_000_000)
    records = [
        Record(b"one", origin, b"k"),
        Record(None, key=b""),
        Record(b"", key=None, extra=(("h", b""), ("h", b"\x00\xff"), ("名", b"2"))),
    ]
    with tcp.reader({"a": {}}) as reader:
        sent(tcp, "a", records)
        entries = read(reader, 3)
    assert [(one.key, one.value) for one in entries] == [(b"k", b"one"), (b"", None), (None, b"")]
    assert [list(one.headers) for one in entries] == [record.headers() for record in records]
    assert Origin.of(entries[0].headers) == origin
    assert [(one.channel, one.partition, one.offset) for one in entries] == [("a", 0, 0), ("a", 0, 1), ("a", 0, 2)]


def test_a_reader_reads_several_channels_and_counts_each(tcp: Tcp) -> None:
    with tcp.reader({"a": {}, "b": {0: 0}}) as reader:
        sent(tcp, "a", numbers(1, 2))
        sent(tcp, "b", numbers(3, 3))
        assert [(one.channel, one.offset) for one in read(reader, 3)] == [("a", 0), ("a", 1), ("b", 0)]
        assert (reader.positions("a"), reader.positions("b")) == ({0: 2}, {0: 1})


def test_only_reads_those_places_alone(tcp: Tcp) -> None:
    with tcp.reader({"a": {}, "b": {}}, only={("a", 0)}) as reader:
        assert (reader.positions("a"), reader.positions("b")) == ({0: 0}, {})
        with pytest.raises(Unavailable, match='channel "b"'):
            sent(tcp, "b", numbers(1, 1))
        sent(tcp, "a", numbers(1, 1))
        assert overhead(read(reader, 1)) == [1]


def test_reading_gives_no_more_than_it_is_asked_for_and_knows_how_far_it_is(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        assert reader.read(10, 0) == []
        assert reader.age() == 0
        sent(tcp, "a", numbers(1, 5))
        assert overhead(reader.read(3, 5)) == [1, 2, 3]
        assert reader.positions("a") == {0: 3}
        assert reader.age() > 0
        assert overhead(reader.read(3, 5)) == [4, 5]
        assert reader.age() == 0


async def test_calls_at_once_keep_the_order_of_each(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        async with tcp.sender() as sender:
            calls = [sender.send("a", numbers(first, first + 99)) for first in range(0, 5000, 100)]
            _, entries = await asyncio.gather(asyncio.gather(*calls), aread(reader, 5000))
    assert overhead(entries) == list(range(5000))
    assert [one.offset for one in entries] == list(range(5000))


async def test_many_senders_at_once_lose_nothing(tcp: Tcp) -> None:
    async def one(name: int) -> None:
        async with tcp.sender() as sender:
            for seq in range(20):
                await sender.send("a", [Record(b"%d" % seq, key=b"%d" % name)])

    with tcp.reader({"a": {}}) as reader:
        _, entries = await asyncio.gather(asyncio.gather(*(one(name) for name in range(50))), aread(reader, 1000))
    for name in range(50):
        assert overhead([entry for entry in entries if entry.key == b"%d" % name]) == list(range(20))


def test_a_record_of_nearly_the_limit_arrives_and_a_larger_one_is_refused(tcp: Tcp) -> None:
    overhead = len(encode("a", Record(b""))) - 4
    with tcp.reader({"a": {}}) as reader:
        sent(tcp, "a", [Record(b"x" * (LIMIT - overhead)), *numbers(1, 2)])
        assert [len(one.value or b"") for one in read(reader, 3)] == [LIMIT - overhead, 1, 1]
        with pytest.raises(Refused, match="4,194,304"):
            sent(tcp, "a", [*numbers(1, 2), Record(b"x" * (LIMIT - overhead + 1))])
        assert reader.read(1, 0) == []


def test_figures_are_posted(tcp: Tcp) -> None:
    with tcp.reader({"figures": {}}) as reader:
        with tcp.poster() as post:
            for number in range(100):
                post("figures", b"key", b"%d" % number)
        assert overhead(read(reader, 100)) == list(range(100))


def test_figures_that_nobody_takes_are_forgotten(tcp: Tcp) -> None:
    with Tcp(tcp.host, tcp.port, timeout=0).poster() as post:
        for number in range(20_000):
            post("figures", b"key", b"%d" % number)


# --- slow and absent readers


async def test_a_slow_reader_slows_the_sender_and_gets_everything(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        async with tcp.sender() as sender:
            acknowledged = 0

            async def send() -> None:
                nonlocal acknowledged
                for first in range(0, 400, 10):
                    await sender.send("a", numbers(first, first + 9, size=100_000))
                    acknowledged = first + 10

            sending_all = asyncio.create_task(send())
            await until(lambda: acknowledged >= 160)  # As much as there is room for.
            entries: list[Entry] = []
            while len(entries) < 400:
                assert (acknowledged - len(entries)) * 100_000 <= ROOM
                entries += await asyncio.to_thread(reader.read, 10, 10)
            await sending_all
    assert overhead(entries) == list(range(400))


def test_the_inbox_is_bounded_and_takes_one_record_that_is_larger_than_it() -> None:
    box = Inbox(["a"], SystemClock(), room=2_000)
    first, large = (
        deque[Decoded | None](("a", None, b"x" * size, ()) for size in sizes) for sizes in ((500, 500, 300), (9_000,))
    )
    assert (box.put(first), len(first)) == (2, 1)
    assert box.put(large) == 0
    assert len(box.read(2, 0)) == 2
    assert [box.put(one) for one in (large, first)] == [1, 0]
    assert [(entry.offset, len(entry.value or b"")) for entry in box.read(9, 0)] == [(2, 9_000)]
    assert [box.put(one) for one in (first, large)] == [1, 0]


async def test_a_sender_waits_for_a_reader_that_comes_late(tcp: Tcp) -> None:
    async with tcp.sender() as sender:
        waiting = asyncio.create_task(sender.send("a", numbers(1, 3)))
        await asyncio.sleep(0)
        with tcp.reader({"a": {}}) as reader:
            assert overhead(await aread(reader, 3)) == [1, 2, 3]
            await waiting


async def test_a_sender_that_reaches_nobody_gives_up_and_may_try_again(tcp: Tcp) -> None:
    hasty = Tcp(tcp.host, tcp.port, timeout=0.2)
    async with hasty.sender() as sender:
        with pytest.raises(Unavailable, match=r"0\.2 s: connection refused"):
            await sender.send("a", numbers(1, 3))
        with tcp.reader({"a": {}}) as reader:
            await sender.send("a", numbers(4, 5))
            assert overhead(await aread(reader, 2)) == [4, 5]


async def test_a_new_reader_gets_what_the_last_one_never_acknowledged(tcp: Tcp) -> None:
    async with tcp.sender() as sender:
        with tcp.reader({"a": {}}) as reader:
            await sender.send("a", numbers(1, 1))
            assert overhead(await aread(reader, 1)) == [1]
        waiting = asyncio.create_task(sender.send("a", numbers(2, 3)))
        with tcp.reader({"a": {}}) as reader:
            entries = await aread(reader, 2)
            await waiting
        assert [(one.offset, overhead([one])) for one in entries] == [(0, [2]), (1, [3])]


async def test_a_reader_that_ends_says_how_much_of_what_it_acknowledged_was_never_read(
    tcp: Tcp, caplog: pytest.LogCaptureFixture
) -> None:
    box = Inbox(["a"], SystemClock(), room=10_000)
    async with tcp.sender() as sender:
        with listening(tcp.host, tcp.port, tcp.where, box):
            await sender.send("a", numbers(1, 3))
            assert overhead(box.read(1, 5)) == [1]
            waiting = asyncio.create_task(sender.send("a", numbers(4, 4, size=10_000)))  # Connected, and no room.
            await until(lambda: not sender.window.empty)
        waiting.cancel()
    (one,) = caplog.records
    assert tcp.where in one.message
    assert " 2 acknowledged records" in one.message


async def test_a_reader_that_has_read_all_ends_quietly_while_senders_are_connected(
    tcp: Tcp, caplog: pytest.LogCaptureFixture
) -> None:
    async with tcp.sender() as idle:
        with tcp.reader({"a": {}}) as reader:
            await idle.send("a", numbers(1, 1))
            assert overhead(await aread(reader, 1)) == [1]
    assert not caplog.records


async def test_a_closed_sender_leaves_no_call_waiting(tcp: Tcp) -> None:
    async with tcp.sender() as sender:
        waiting = asyncio.create_task(sender.send("a", numbers(1, 3)))
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="its sender was closed"):
        await waiting


class Broken(SystemClock):
    """A clock that has a fault."""

    def elapsed(self) -> float:
        raise ZeroDivisionError


async def test_a_sender_with_a_fault_of_its_own_leaves_no_call_waiting(tcp: Tcp) -> None:
    async def send() -> None:
        async with TcpSender(tcp.host, tcp.port, tcp.where, 5, Broken()) as sender:
            for _ in range(2):
                with pytest.raises(Unavailable, match="ZeroDivisionError"):
                    await sender.send("a", numbers(1, 3))

    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError):
            await send()


# --- broken connections


async def test_cuts_lose_nothing_and_double_nothing(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        async with wired(tcp) as (wire, behind), behind.sender() as sender:
            entries: list[Entry] = []
            for first in range(0, 20_000, 1_000):
                # A cut in the middle of what is under way, after each thousand.
                calls = [sender.send("a", numbers(start, start + 99)) for start in range(first, first + 1_000, 100)]
                going = asyncio.gather(*calls)
                await until(lambda: wire.open)
                entries += await asyncio.to_thread(reader.read, 10_000, 10)
                wire.cut()
                await going
            entries += await aread(reader, 20_000 - len(entries))
            assert wire.connections >= 10
        assert overhead(entries) == list(range(20_000))
        assert reader.read(1, 0) == []


async def test_a_batch_whose_acknowledgement_was_lost_is_not_taken_twice(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        async with wired(tcp) as (wire, behind), behind.sender() as sender:
            await sender.send("a", numbers(1, 1))
            wire.answers = False
            waiting = asyncio.create_task(sender.send("a", numbers(2, 3)))
            assert overhead(await aread(reader, 3)) == [1, 2, 3]
            await until(lambda: wire.dropped)
            wire.answers = True
            wire.cut()
            await waiting
            await sender.send("a", numbers(4, 4))
        assert overhead(await aread(reader, 1)) == [4]


async def test_a_receiver_that_is_silent_is_taken_for_dead(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        async with (
            wired(tcp) as (wire, behind),
            TcpSender(behind.host, behind.port, behind.where, 5, SystemClock(), silence=0.2) as sender,
        ):
            wire.answers = False
            waiting = asyncio.create_task(sender.send("a", numbers(1, 2)))
            await until(lambda: wire.connections >= 2)
            wire.answers = True
            await waiting
        assert overhead(await aread(reader, 2)) == [1, 2]


async def test_a_receiver_that_is_full_is_not_taken_for_dead(tcp: Tcp) -> None:
    box = Inbox(["a"], SystemClock(), room=1_000)
    with listening(tcp.host, tcp.port, tcp.where, box, beat=0.05):
        async with (
            wired(tcp) as (wire, behind),
            TcpSender(behind.host, behind.port, behind.where, 5, SystemClock(), silence=0.4) as sender,
        ):
            await sender.send("a", numbers(1, 1, size=900))
            waiting = asyncio.create_task(sender.send("a", numbers(2, 2, size=900)))
            await until(lambda: box.age() > 1.5)
            assert not waiting.done()
            assert overhead(box.read(10, 0)) == [1]
            await waiting
            assert wire.connections == 1
    assert overhead(box.read(10, 0)) == [2]


def test_records_that_come_again_over_another_connection_are_dropped(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        for last in (1, 3, 4):
            with Peer(tcp) as peer:
                peer.say(HELLO)
                after = peer.hear()["after"]
                peer.say(*(one(number) for number in range(after + 1, last + 1)))
                peer.hear_safe(last)
        assert overhead(read(reader, 4)) == [1, 2, 3, 4]
        assert reader.read(1, 0) == []


def test_a_sender_that_connects_again_takes_over_and_its_old_connection_adds_nothing_more(tcp: Tcp) -> None:
    """The old connection waits for room with records that come again over the new one."""
    box = Inbox(["a"], SystemClock(), room=1_000)
    with listening(tcp.host, tcp.port, tcp.where, box), Peer(tcp) as old, Peer(tcp) as new:
        old.say(HELLO, *(one(number, size=900) for number in (1, 2, 3)))
        assert old.hear() == {"after": 0, "channels": ["a"]}
        old.hear_safe(1)
        new.say(HELLO)
        assert new.hear() == {"after": 1, "channels": ["a"]}
        new.say(one(2, size=900), one(3, size=900), one(4))
        found: list[Entry] = []
        while len(found) < 4:
            found += box.read(10, 10)
        new.hear_safe(4)
        assert overhead(found) == [1, 2, 3, 4]
        assert "there is another connection" in old.last()["error"]
        assert box.read(1, 0) == []


def test_a_sender_that_is_connected_is_remembered_however_many_come_and_go(tcp: Tcp) -> None:
    box = Inbox(["a"], SystemClock())
    with listening(tcp.host, tcp.port, tcp.where, box, remembered=3), Peer(tcp) as first:
        first.say(HELLO, one(1))
        first.hear()
        first.hear_safe(1)
        for number in range(10):
            with Peer(tcp) as other:
                other.say(hello(f"other-{number}"))
                assert other.hear()["after"] == 0
        with Peer(tcp) as again:
            again.say(HELLO)
            assert again.hear()["after"] == 1, "or what it sends again would be taken twice"
    assert overhead(box.read(10, 0)) == [1]


def test_a_sender_goes_on_where_it_says_when_the_reader_does_not_know_it(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader, Peer(tcp) as peer:
        peer.say(hello("i", seq=42))
        assert peer.hear() == {"after": 41, "channels": ["a"]}
        peer.say(one(42), one(43))
        peer.hear_safe(43)
        assert overhead(read(reader, 2)) == [42, 43]


async def test_a_reader_of_other_channels_fails_their_records_and_gets_the_rest_with_their_numbers() -> None:
    window, loop = Window(), asyncio.get_running_loop()
    parts = {name: Part(name, [b"1" + name.encode(), b"2"], 2, loop.create_future(), last=True) for name in "abc"}
    window.add(parts["a"])
    window.add(parts["b"])
    window.resume(0)
    assert [window.next("abc", "here"), window.next("abc", "here"), window.next("abc", "here")] == [
        b"1a2",
        b"1b2",
        None,
    ]
    window.add(parts["c"])
    window.resume(1)
    assert [window.next("b", "here"), window.next("b", "here"), window.next("b", "here")] == [bytes(4), b"1b2", None]
    assert isinstance(parts["a"].done.exception(), Unavailable)
    assert isinstance(parts["c"].done.exception(), Unavailable)
    window.acknowledge(4)
    assert parts["b"].done.result() is None
    assert window.empty
    with pytest.raises(Refused, match="record 5, which was not sent"):
        window.acknowledge(5)
    with pytest.raises(Refused, match="record 3, which was acknowledged"):
        window.resume(2)


async def test_the_numbers_of_records_that_were_given_up_are_not_used_again() -> None:
    window, done = Window(), asyncio.get_running_loop().create_future()
    window.add(Part("a", [b"1", b"2"], 2, done, last=True))
    assert window.next("a", "here") == b"12"
    window.give_up(Unavailable("here", "nobody"))
    assert isinstance(done.exception(), Unavailable)
    assert (window.acknowledged, window.empty) == (2, True)


async def test_a_record_that_was_given_up_has_a_number_and_is_not_read(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader, Peer(tcp) as peer:
        peer.say(HELLO, one(1), framed("length", b""), one(3))
        peer.hear()
        peer.hear_safe(3)
        assert [(entry.offset, overhead([entry])) for entry in read(reader, 2)] == [(0, [1]), (1, [3])]


# --- strangers


class Peer(AbstractContextManager["Peer"]):
    """A connection to a reader, byte by byte."""

    def __init__(self, tcp: Tcp) -> None:
        self.connection = socket.create_connection((tcp.host, tcp.port), timeout=10)

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def say(self, *said: bytes) -> None:
        self.connection.sendall(b"".join(said))

    def hear(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", self.connection.recv(4, socket.MSG_WAITALL))
        found: dict[str, Any] = orjson.loads(self.connection.recv(length, socket.MSG_WAITALL))
        return found

    def hear_safe(self, number: int) -> None:
        while (heard := self.hear()) != {"safe": number}:
            assert heard["safe"] < number

    def last(self) -> dict[str, Any]:
        """The last answer before the other side has closed."""
        found: dict[str, Any] = {}
        try:
            while True:
                found = self.hear()
        except (struct.error, ConnectionError):
            return found


def hello(sender: str, **more: int) -> bytes:
    return framed_message("length", {"sender": sender, "epoch": 1, **more})


def one(number: int, size: int = 0) -> bytes:
    return encode("a", numbers(number, number, size)[0])


def altered(record: bytes, at: int, by: bytes) -> bytes:
    return framed("length", record[4 : at + 4] + by + record[at + 4 + len(by) :])


HELLO = hello("i")
ONE = one(1)
"""After the length of the frame: 1, "a", the lengths of key (-1) and value (1), the number of headers, the value."""
BEGIN = "begin with the sender"


@pytest.mark.parametrize(
    ("said", "description"),
    [
        ([b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"], BEGIN),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500], "this port does not use TLS"),
        ([b"PNST\x01\x01\x00\x00\x00\x10" + b"i" * 16], BEGIN),
        ([b"\xff\xff\xff\xff"], BEGIN),
        ([b"\x00\x3f\xff\xff" + b"{" * 10_000], BEGIN),
        ([framed("length", b"not JSON")], BEGIN),
        ([framed("length", b"")], BEGIN),
        ([hello("")], "1 to 200 characters"),
        ([hello("i" * 201)], "1 to 200 characters"),
        ([hello("i", seq=0)], BEGIN),
        ([hello("i", seq=2**63)], BEGIN),
        ([hello("i", other=1)], BEGIN),
        ([ONE], BEGIN),
        ([HELLO, HELLO], "shorter than its contents"),
        ([HELLO, encode("other", numbers(1, 1)[0])], 'channel "other"'),
        ([HELLO, framed("length", ONE[4:-1])], "shorter than its contents"),
        ([HELLO, framed("length", ONE[4:-5])], "shorter than its contents"),
        ([HELLO, framed("length", ONE[4:6])], "shorter than its contents"),
        ([HELLO, framed("length", ONE[4:] + b"!")], "1 bytes follow its contents"),
        ([HELLO, altered(ONE, 4, b"\xff")], "not UTF-8"),
        ([HELLO, altered(ONE, 0, struct.pack("!I", 2**32 - 1))], "its channel is not UTF-8"),
        ([HELLO, altered(ONE, 5, struct.pack("!i", -2))], "a field of -2 bytes"),
        ([HELLO, altered(ONE, 9, struct.pack("!i", 2**31 - 1))], "shorter than its contents"),
        ([HELLO, altered(ONE, 13, struct.pack("!I", 2**32 - 1))], "shorter than its contents"),
        ([HELLO, altered(encode("a", Record(b"", extra=(("h", b""),))), 25, b"\xff")], "not UTF-8"),
        ([HELLO, struct.pack("!I", LIMIT + 1) + b"x" * (LIMIT + 1)], "4194305 bytes, the limit of a record is 4194304"),
        ([HELLO, b"\xff\xff\xff\xff"], "4294967295 bytes"),
    ],
)
def test_what_cannot_be_read_is_told_and_the_reader_lives(tcp: Tcp, said: list[bytes], description: str) -> None:
    with tcp.reader({"a": {}}) as reader:
        with Peer(tcp) as peer:
            peer.say(*said)
            assert description in peer.last()["error"]
        sent(tcp, "a", numbers(1, 2))
        assert overhead(read(reader, 2)) == [1, 2]


def test_the_records_before_a_malformed_one_are_taken(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        with Peer(tcp) as peer:
            peer.say(HELLO, one(1), one(2), framed("length", b"!"), one(4))
            assert "shorter than its contents" in peer.last()["error"]
        with Peer(tcp) as peer:
            peer.say(HELLO)
            assert peer.hear()["after"] == 2
        assert overhead(read(reader, 2)) == [1, 2]
        assert reader.read(1, 0) == []


def test_half_a_record_and_a_reset_hurt_nobody(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader:
        with Peer(tcp) as peer:
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.say(HELLO, ONE[:-3])
        sent(tcp, "a", numbers(1, 2))
        assert overhead(read(reader, 2)) == [1, 2]


def test_a_length_that_is_announced_and_never_sent_holds_nobody_up(tcp: Tcp) -> None:
    with tcp.reader({"a": {}}) as reader, Peer(tcp) as peer:
        peer.say(HELLO, b"\x00\x3f\xff\xff")
        sent(tcp, "a", numbers(1, 2))
        assert overhead(read(reader, 2)) == [1, 2]


def test_too_many_connections_are_told_so(tcp: Tcp) -> None:
    box = Inbox(["a"], SystemClock())
    with listening(tcp.host, tcp.port, tcp.where, box, connections=1), Peer(tcp) as first:
        first.say(HELLO)
        assert first.hear()
        with pytest.raises(Unavailable, match="limit of 1 "):
            sent(tcp, "a", numbers(1, 2))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another protocol"),
        (framed("length", b"[]"), "another protocol"),
        (framed_message("length", {"after": 0}), "not that of a reader"),
        (framed_message("length", {"after": 1, "channels": ["a"]}), "record 1, which was not sent"),
        (framed_message("length", {"after": -1, "channels": ["a"]}), "record 0, which was acknowledged"),
        (framed_message("length", {"error": "no room"}), "no room"),
    ],
)
def test_a_sender_says_what_it_has_met_when_it_is_no_reader(tcp: Tcp, answer: bytes, why: str) -> None:
    with closing(socket.create_server((tcp.host, tcp.port))) as server:

        def reply() -> Iterator[None]:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)
                yield

        threading.Thread(target=lambda: next(reply()), daemon=True).start()
        with pytest.raises(Unavailable, match=why):
            sent(Tcp(tcp.host, tcp.port, timeout=0), "a", numbers(1, 1))


# --- the description


def test_an_address_is_a_host_and_a_port() -> None:
    assert bind("tcp://localhost:7700") == Tcp("localhost", 7700)
    assert bind("tcp://[::1]:7700").where == "tcp://[::1]:7700"
    assert pickle.loads(pickle.dumps(Tcp("h", 1))) == Tcp("h", 1)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://",
        "tcp://host",
        "tcp://:7700",
        "tcp://host:0",
        "tcp://host:66000",
        "tcp://host:x",
        "tcp://u:p@h:1",
        "tcp://a..b:7700",
        f"tcp://{'a' * 64}:7700",
    ],
)
def test_another_address_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(Misconfigured, match="write tcp://host:port") as caught:
        bind(address)
    assert "u:p" not in str(caught.value)


def test_a_second_reader_at_an_address_is_refused(tcp: Tcp) -> None:
    with (
        tcp.reader({"a": {}}),
        pytest.raises(Misconfigured, match="cannot listen"),
        tcp.reader({"a": {}}),
    ):
        pass


def test_a_host_that_cannot_be_one_is_told(tcp: Tcp) -> None:
    with pytest.raises(Misconfigured, match="cannot listen"), Tcp("a..b", tcp.port).reader({"a": {}}):
        pass


def test_the_same_address_is_read_again_at_once(tcp: Tcp) -> None:
    for number in range(3):
        with tcp.reader({"a": {}}) as reader:
            sent(tcp, "a", numbers(number, number))
            assert overhead(read(reader, 1)) == [number]


def test_ensure_makes_nothing_and_tells_what_cannot_be(tcp: Tcp) -> None:
    assert tcp.ensure([Topic("a")]) == tcp.ensure([])
    wanted = Topic("a", 4, 3, compacted=True, retention=timedelta(days=7), config={"retention.bytes": "1"})
    assert tcp.ensure([wanted]).differences == (
        "channel a has one partition over tcp://, and 4 are declared",
        "channel a has no replicas over tcp://, and 3 are declared",
        "channel a keeps nothing over tcp://, and 7 days, 0:00:00 is declared",
        "channel a keeps nothing over tcp://, and the last record of each key is declared to stay",
        "channel a has no settings over tcp://, and retention.bytes is declared",
    )


class Unasked:
    """A dealing that is never reached."""

    def given(self, partitions: object) -> dict[tuple[str, int], int]:
        raise AssertionError

    def acknowledged(self, partitions: object) -> None: ...

    def lost(self, partitions: object) -> None: ...


@pytest.mark.parametrize(
    "ask",
    [
        lambda tcp: tcp.since("a", 0),
        lambda tcp: tcp.reader({"a": {0: 7}}).__enter__(),
        lambda tcp: tcp.topic_id("a"),
        lambda tcp: tcp.remove("a"),
        lambda tcp: tcp.join("g", ["a"], Unasked()),
        lambda tcp: tcp.groups(),
        lambda tcp: tcp.group("g"),
        lambda tcp: tcp.move("g", {}),
    ],
)
def test_what_only_a_log_can_do_is_refused_with_the_fix(tcp: Tcp, ask: Callable[[Tcp], object]) -> None:
    with pytest.raises(Misconfigured, match=r"tcp:// keeps nothing: .*; use kafka://, redis:// or file://"):
        ask(tcp)


def test_nothing_is_kept(tcp: Tcp) -> None:
    assert (tcp.names(), tcp.bounds("a")) == ([], {0: (0, 0)})
    assert not tcp.promise.durable
    assert not tcp.promise.replay
