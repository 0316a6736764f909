"""Several connections to a feed that gives nothing again."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import repeat
from typing import Any

import orjson
import pytest
from tests.collect.waiting import until
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from penstock.channels.memory import MemoryChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.overlapping import Connected, Connections, Disconnected, Overlapping, RecentPayloads
from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import OutageInterval
from penstock.testing.sources import SourceContract, plain


@dataclass
class Forgetful:
    """A feed that says each record once, to whoever listens."""

    clients: list[ServerConnection] = field(default_factory=list)
    refusing: bool = False
    waiting: list[bytes] = field(default_factory=list)
    source: Overlapping = field(init=False)

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        """For the contract, those that nobody hears wait until somebody does: both listeners hear them."""
        self.waiting += payloads

    async def say(self, *payloads: bytes, to: Sequence[ServerConnection] | None = None) -> None:
        for client in list(self.clients if to is None else to):
            for payload in payloads:
                await client.send(payload)

    async def disconnect(self) -> None:
        disconnect = list(self.clients)
        for client in disconnect:
            client.transport.abort()
        # Whoever speaks must not speak to those who are gone: it would be lost, and nobody could notice.
        await until(lambda: not any(client in self.clients for client in disconnect))

    def acknowledged(self) -> None:
        return None

    async def attend(self, client: ServerConnection) -> None:
        if self.refusing:
            return
        self.clients.append(client)
        try:
            await client.wait_closed()
        finally:
            self.clients.remove(client)

    async def speak(self) -> None:
        while True:
            if len(self.clients) == 2 and self.waiting:
                some, self.waiting = self.waiting, []
                await self.say(*some)
            await asyncio.sleep(0.005)


@pytest.fixture
async def feed() -> AsyncIterator[Forgetful]:
    forgetful = Forgetful()
    async with serve(forgetful.attend, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        source = WebSocketSource(url, "trades", numbered=None)
        forgetful.source = Overlapping(source, delays=lambda: repeat(0.01))
        yield forgetful


class TestContract(SourceContract):
    @pytest.fixture
    async def upstream(self, feed: Forgetful) -> AsyncIterator[Forgetful]:
        speaking = asyncio.create_task(feed.speak())
        yield feed
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


class Listening:
    """A pump from the feed, and what it has brought."""

    def __init__(self, source: Overlapping) -> None:
        self.channels = MemoryChannels()
        self.pump = IngestLoop(
            source,
            "into",
            self.channels,
            heartbeats="beats",
            bookmarks="marks",
            bookmark_every=timedelta(milliseconds=20),
            delays=lambda: repeat(0.01),
        )

    async def __aenter__(self) -> "Listening":
        self._task = asyncio.create_task(self.pump.run(asyncio.Event()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def values(self) -> list[bytes | None]:
        return [entry.value for entry in self.channels.entries("into")]

    def blind(self) -> list[dict[str, Any]]:
        notices = [orjson.loads(entry.value or b"") for entry in self.channels.entries("beats")]
        return [one for one in notices if one["kind"] == "blind"]


async def test_each_record_is_taken_once_though_two_connections_hear_it(feed: Forgetful) -> None:
    async with Listening(feed.source) as listening:
        await until(lambda: len(feed.clients) == 2)
        for payload in plain(20):
            await feed.say(payload)
        await until(lambda: len(listening.values()) == 20)
        assert listening.values() == plain(20)


async def test_a_connection_that_breaks_leaves_no_hole_and_no_blind_time(feed: Forgetful) -> None:
    async with Listening(feed.source) as listening:
        for turn, payload in enumerate(plain(6)):
            await until(lambda: len(feed.clients) == 2)
            for client in feed.clients:
                await (await client.ping())
            await feed.say(payload)
            await until(lambda turn=turn: len(listening.values()) == turn + 1)  # type: ignore[misc]
            one, other = feed.clients
            broken = one if turn % 2 else other
            broken.transport.abort()
            await until(lambda broken=broken: broken not in feed.clients)  # type: ignore[misc]
        assert listening.values() == plain(6)
        assert listening.blind() == []


async def test_when_all_are_lost_the_time_is_blind(feed: Forgetful) -> None:
    async with Listening(feed.source) as listening:
        await until(lambda: len(feed.clients) == 2)
        await feed.say(b"1")
        await until(lambda: listening.values() == [b"1"])
        feed.refusing = True
        await feed.disconnect()
        await until(lambda: listening.pump.figures()["trouble"])
        feed.refusing = False
        await until(lambda: len(feed.clients) == 2)
        await feed.say(b"2")
        await until(lambda: len(listening.values()) == 2)
        await until(listening.blind)
        assert [one["source"] for one in listening.blind()] == ["trades"]


async def test_nobody_at_the_address_is_unavailable(feed: Forgetful) -> None:
    nowhere = WebSocketSource("ws://127.0.0.1:1/", "trades", numbered=None)
    with pytest.raises(Unavailable):
        async with Overlapping(nowhere).open(ResumeState()):
            pass


async def test_one_connection_is_enough_to_begin() -> None:
    clients: list[ServerConnection] = []

    async def handle(client: ServerConnection) -> None:
        clients.append(client)
        await client.send(b"x")
        await client.wait_closed()

    def only_one(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(503, "one is enough") if clients else None

    async with serve(handle, "127.0.0.1", 0, process_request=only_one) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with Overlapping(WebSocketSource(url, "x", numbered=None)).open(ResumeState()) as intakes:
            assert (await anext(aiter(intakes))).arrivals == [Arrival(b"x")]


async def test_a_copy_is_settled_in_its_turn_behind_the_record_itself(feed: Forgetful) -> None:
    async with feed.source.open(ResumeState()) as intakes:
        await until(lambda: len(feed.clients) == 2)
        await feed.say(b"x")
        found = [await anext(aiter(intakes)) for _ in range(2)]
        assert [intake.arrivals for intake in found] == [[Arrival(b"x")], []]


async def test_a_setting_that_is_wrong_ends_it() -> None:
    wrong = WebSocketSource("http://127.0.0.1:1/", "trades", numbered=None)
    with pytest.raises(Misconfigured):
        async with Overlapping(wrong).open(ResumeState()):
            pass


async def test_a_feed_that_is_done_is_done() -> None:
    async def handle(client: ServerConnection) -> None:
        await client.send(b'{"n":1,"feed":{"sender":"a","epoch":1,"seq":1,"time":1}}')
        await client.send('{"end":true}')
        await client.wait_closed()

    async with serve(handle, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with Overlapping(WebSocketSource(url, "x", resume=False)).open(ResumeState()) as intakes:
            found = [arrival for intake in [one async for one in intakes] for arrival in intake.arrivals]
    assert len(found) == 1


async def test_a_slow_taker_holds_the_feed_up(feed: Forgetful) -> None:
    """Nobody takes: so much is read as is bounded, and no more."""
    async with feed.source.open(ResumeState()):
        await until(lambda: len(feed.clients) == 2)
        sent = 0

        async def flood(client: ServerConnection) -> None:
            nonlocal sent
            for number in range(200):
                await client.send(b"%d" % number + b"x" * (1 << 20))
                sent += 1

        flooding = [asyncio.create_task(flood(client)) for client in feed.clients]
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 200
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)


# --- in the middle


def test_no_gap_where_another_listened_already_when_one_was_last_heard() -> None:
    lines = Connections("trades")
    lines.add(Connected(0, 10))
    lines.add(Connected(1, 20))
    assert lines.remove(Disconnected(0, 30, Unavailable("x", "gone"))) is None
    assert list(lines.up) == [1]


def test_a_connection_that_was_half_open_leaves_a_blind_time() -> None:
    """It was lost at 40, but nobody knows whether it still lived when the other one began at 35."""
    lines = Connections("trades")
    lines.add(Connected(0, 10))
    lines.add(Connected(1, 35))
    assert lines.remove(Disconnected(0, 30, Unavailable("x", "no pong"))) == OutageInterval("trades", 30, 35)


def test_attempts_that_fail_change_nothing() -> None:
    lines = Connections("trades")
    lines.add(Connected(0, 10))
    assert lines.remove(Disconnected(1, 50, Unavailable("x", "refused"))) is None
    assert list(lines.up) == [0]


@pytest.mark.parametrize(
    ("by", "new"),
    [
        (None, [True, True, False, True, False]),
        ("id", [True, False, False, True, False]),
        (["id", "of"], [True, True, False, True, False]),
    ],
)
def test_records_are_told_apart_by_what_is_said(by: str | Sequence[str] | None, new: list[bool]) -> None:
    known = RecentPayloads(by, 100)
    payloads = [b'{"id":1,"of":"a"}', b'{"id":1,"of":"b"}', b'{"id":1,"of":"a"}', b"not JSON", b"not JSON"]
    assert [known.add(Arrival(payload)) for payload in payloads] == new


def test_what_is_remembered_is_bounded() -> None:
    known = RecentPayloads(None, 3)
    for number in range(10):
        known.add(Arrival(b"%d" % number))
    assert not known.add(Arrival(b"7"))
    assert known.add(Arrival(b"6"))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"connections": 1}, "2 to 10"), ({"connections": 11}, "2 to 10"), ({"remember": 0}, "remember")],
)
def test_options_that_cannot_be_are_misconfigured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        Overlapping(WebSocketSource("ws://x", "x", numbered=None), **options)


def test_a_source_that_can_resume_needs_none() -> None:
    with pytest.raises(Misconfigured, match="can resume"):
        Overlapping(WebSocketSource("ws://x", "x"))


def test_it_says_which_records_count_as_one() -> None:
    source = WebSocketSource("ws://x", "x", numbered=None)
    assert "equal payloads are stored once" in Overlapping(source).description
    assert "records with the same key are stored once" in Overlapping(source, "id").description
    assert Overlapping(source).guarantee is Guarantee.BEST_EFFORT


async def test_what_waits_when_it_is_closed_was_not_taken() -> None:
    told: list[Exception | None] = []

    async def settle(error: Exception | None) -> None:
        told.append(error)

    source = Saying([Intake([Arrival(b"x")], settle)])
    async with Overlapping(source).open(ResumeState()):
        await until(lambda: source.said == 2)
    assert [type(one) for one in told] == [Unavailable, Unavailable]


class Saying:
    """A source that says this at each connection, and then nothing."""

    name, description, guarantee = "x", "of a test", Guarantee.BEST_EFFORT

    def __init__(self, intakes: Sequence[Intake]) -> None:
        self._intakes = intakes
        self.said = 0

    def open(self, taken: ResumeState) -> Any:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[AsyncIterator[Intake]]:
        yield self._all()

    async def _all(self) -> AsyncIterator[Intake]:
        for intake in self._intakes:
            self.said += 1
            yield intake
        await asyncio.Event().wait()


@dataclass
class Endless:
    """A source that always has another intake, and counts those of which nobody has told what became."""

    name: str = "endless"
    description: str = "of a test"
    guarantee: Guarantee = Guarantee.BEST_EFFORT
    open_ones: int = 0
    given: int = 0

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with aclosing(self._intakes()) as intakes:
            yield intakes

    async def _intakes(self) -> AsyncGenerator[Intake, None]:
        while True:
            self.open_ones, self.given = self.open_ones + 1, self.given + 1
            yield Intake([Arrival(b"%d" % self.given)], self._settle)

    async def _settle(self, error: Exception | None) -> None:
        self.open_ones -= 1


async def test_at_the_end_all_that_waits_is_told_so() -> None:
    source = Endless()
    async with Overlapping(source).open(ResumeState()):
        await until(lambda: source.given >= 4)
    assert source.open_ones == 0
