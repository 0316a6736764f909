import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import repeat
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.collect.waiting import until

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.dedup import MAX_RECENT
from penstock.collect.ingest import MAX_INTAKES, IngestLoop
from penstock.collect.spool import Spool
from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Arrival, Channels, Entry, Guarantee, Intake, ResumeState, Sender, Source
from penstock.core.errors import Unavailable
from penstock.core.record import Heartbeat, Origin, OutageInterval, Record
from penstock.simulate.feed import Feed, serve
from penstock.simulate.rsvps import Rsvps
from penstock.testing import ManualClock, MemoryChannels


@dataclass
class Outside:
    """A source that holds numbered records and resumes, or plain ones and does not."""

    records: Sequence[Arrival | Heartbeat | OutageInterval]
    chunk: Callable[[], int] = lambda: 3
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    name: str = "source"
    description: str = "of a test"
    stays: bool = False
    settled: list[Exception | None] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        yield self._intakes(taken)

    async def _intakes(self, taken: ResumeState) -> AsyncIterator[Intake]:
        left = [record for record in self.records if not self._held(record, taken)]
        while left:
            size = self.chunk()
            some, left = left[:size], left[size:]
            await asyncio.sleep(0)
            yield Intake(some, self._settle)
        if self.stays:
            await asyncio.Event().wait()

    @staticmethod
    def _held(record: Arrival | Heartbeat | OutageInterval, taken: ResumeState) -> bool:
        if not isinstance(record, Arrival) or record.origin is None:
            return False
        epoch, seq = taken.numbers.get(record.origin.sender, (0, 0))
        return record.origin.epoch == epoch and record.origin.seq <= seq

    async def _settle(self, error: Exception | None) -> None:
        self.settled.append(error)


def numbered(count: int, senders: int = 3) -> list[Arrival]:
    return [Arrival(b'{"n":%d}' % n, Origin(f"s{n % senders}", 1, n // senders + 1, 1_000 + n)) for n in range(count)]


class Crash(Exception):
    """What a double raises in place of the death of a process."""


class Fragile(MemoryChannels):
    """Channels whose sends fail as told: by (channel, records) before, after, or in the middle of the appending."""

    def __init__(self, partitions: int = 2) -> None:
        super().__init__(partitions)
        self.fate: Callable[[str], str | None] = lambda channel: None

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as inner:
            yield _Fragile(inner, self)


class _Fragile:
    def __init__(self, inner: Sender, channels: Fragile) -> None:
        self._inner, self._channels = inner, channels

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        match self._channels.fate(channel):
            case None:
                await self._inner.send(channel, records)
                await asyncio.sleep(0)
            case "away":
                raise Unavailable("the channel", "it is away")
            case "before":
                raise Crash
            case "after":
                await self._inner.send(channel, records)
                raise Crash
            case "middle":
                # Partitions are independent: the later records may survive and the earlier ones not.
                await self._inner.send(channel, records[len(records) // 2 :])
                raise Crash


def pump(source: Source, channels: Channels, **options: Any) -> IngestLoop:
    return IngestLoop(
        source,
        "rsvps",
        channels,
        heartbeats="heartbeats",
        bookmarks="bookmarks",
        **{"key": "n", "bookmark_every": timedelta(milliseconds=1), "delays": lambda: repeat(0.0), **options},
    )


async def pumped(source: Source, channels: Channels, **options: Any) -> IngestLoop:
    one = pump(source, channels, **options)
    await one.run(asyncio.Event())
    return one


def origins(channels: MemoryChannels, *names: str) -> Counter[Origin | None]:
    return Counter(Origin.of(entry.headers) for name in names or ("rsvps",) for entry in channels.entries(name))


def notices(channels: MemoryChannels) -> list[dict[str, Any]]:
    return [orjson.loads(entry.value or b"") for entry in channels.entries("heartbeats")]


async def test_everything_arrives_once_with_key_value_and_number() -> None:
    channels, records = MemoryChannels(2), numbered(100)
    one = await pumped(Outside(records), channels)
    assert origins(channels) == Counter(record.origin for record in records)
    assert {(entry.key, entry.value) for entry in channels.entries("rsvps")} == {
        (b"%d" % n, b'{"n":%d}' % n) for n in range(100)
    }
    figures = one.figures()
    assert (figures["count"], figures["duplicates"], figures["refused"], figures["in_flight"]) == (100, 0, 0, 0)


async def test_order_within_a_partition_is_the_order_of_arrival() -> None:
    channels = MemoryChannels()
    await pumped(Outside(numbered(200), chunk=lambda: 7), channels)
    assert [entry.value for entry in channels.entries("rsvps")] == [b'{"n":%d}' % n for n in range(200)]


async def test_every_intake_is_settled() -> None:
    source = Outside(numbered(10), chunk=lambda: 2)
    await pumped(source, MemoryChannels())
    assert source.settled == [None] * 5


async def test_duplicates_are_dropped_and_counted() -> None:
    channels, records = MemoryChannels(), numbered(10)
    one = await pumped(Outside([*records, *records]), channels)
    assert len(channels.entries("rsvps")) == 10
    assert one.figures()["duplicates"] == 10


async def test_what_has_no_number_gets_one_and_a_heartbeat_confirms_it() -> None:
    channels = MemoryChannels()
    await pumped(Outside([Arrival(b"a"), Arrival(b"b")]), channels)
    first, second = [Origin.of(entry.headers) for entry in channels.entries("rsvps")]
    assert first is not None
    assert second is not None
    assert (first.sender, first.seq, second.seq) == ("source", 1, 2)
    assert first.epoch == second.epoch > 1_600_000_000
    last = notices(channels)[-1]
    assert (last["kind"], last["sender"], last["epoch"], last["seq"]) == ("heartbeat", "source", first.epoch, 2)


async def test_two_lives_never_give_the_same_number() -> None:
    channels = MemoryChannels()
    for _ in range(3):
        await pumped(Outside([Arrival(b"a")]), channels)
    assert len(origins(channels)) == 3


async def test_a_payload_beyond_the_limit_goes_to_the_dead_letters_once() -> None:
    channels = MemoryChannels()
    large = Arrival(b"x" * 5_001, Origin("s0", 1, 2, 5))
    source = Outside([Arrival(b"x" * 5_000, Origin("s0", 1, 1, 5)), large])
    for _ in range(2):
        one = await pumped(source, channels, max_record_bytes=5_000)
    assert one.figures()["refused"] == 0
    assert len(channels.entries("rsvps")) == 1
    (dead,) = channels.entries("rsvps.dead")
    assert dict(dead.headers)["size"] == b"5001"
    assert Origin.of(dead.headers) == large.origin


async def test_a_heartbeat_follows_its_records() -> None:
    channels = MemoryChannels()
    await pumped(Outside([*numbered(3), Heartbeat("s0", 1, 1, 9)]), channels)
    assert notices(channels) == [
        {"kind": "heartbeat", "channel": "rsvps", "sender": "s0", "epoch": 1, "seq": 1, "time": 9}
    ]


async def test_a_second_life_takes_only_the_rest() -> None:
    channels, records = MemoryChannels(), numbered(100)
    await pumped(Outside(records[:40]), channels)
    one = await pumped(Outside(records), channels)
    assert origins(channels) == Counter(record.origin for record in records)
    assert one.figures()["count"] == 60
    assert one.figures()["duplicates"] == 0


async def test_a_source_that_has_given_all_is_done_and_not_lost() -> None:
    one = await pumped(Outside(numbered(3)), MemoryChannels())
    figures = one.figures()
    assert (figures["done"], figures["connected"], figures["trouble"]) == (True, None, None)


async def test_a_clean_stop_finishes_what_is_on_its_way() -> None:
    channels, source, stop = MemoryChannels(), Outside(numbered(50), stays=True), asyncio.Event()
    one = pump(source, channels)
    running = asyncio.create_task(one.run(stop))
    await until(lambda: one.figures()["count"] == 50)
    assert one.figures()["connected"] is True
    stop.set()
    await running
    assert len(source.settled) == 17
    assert one.figures()["connected"] is False
    last = orjson.loads(channels.entries("bookmarks")[-1].value or b"")
    assert last["positions"]["rsvps"] == {"0": 50}
    assert last["runs"] == {"s0": {"1": [[1, 17]]}, "s1": {"1": [[1, 17]]}, "s2": {"1": [[1, 16]]}}


async def test_a_failing_send_fails_the_pump_and_is_told_to_the_source() -> None:
    channels, source = Fragile(), Outside(numbered(30))
    channels.fate = lambda channel: "before" if channel == "rsvps" else None
    with pytest.raises(Crash):
        await pumped(source, channels)
    assert source.settled
    assert all(isinstance(error, Crash) for error in source.settled)


@pytest.mark.parametrize("channel", ["rsvps", "rsvps.dead", "heartbeats", "bookmarks"])
@pytest.mark.parametrize("timestamp", ["before", "middle", "after"])
@pytest.mark.parametrize("nth", [1, 2, 5])
async def test_a_crash_at_any_step_loses_nothing_and_doubles_nothing(channel: str, timestamp: str, nth: int) -> None:
    channels, records = Fragile(), numbered(60)
    large = [Arrival(b"x" * 2_000, Origin("large", 1, seq, 5)) for seq in range(1, 9)]
    beats = [Heartbeat("s0", 1, seq, 9) for seq in range(1, 9)]
    mixed: list[Arrival | Heartbeat | OutageInterval] = []
    for n in range(8):
        mixed += [*records[n * 7 : n * 7 + 7], large[n], beats[n]]
    mixed += records[56:]
    sends = 0

    def fate(to: str) -> str | None:
        nonlocal sends
        sends += to == channel
        return timestamp if to == channel and sends == nth else None

    channels.fate = fate
    generations = 0
    while True:
        generations += 1
        try:
            await pumped(Outside(mixed), channels, max_record_bytes=1_000)
            break
        except Crash:
            continue
    assert generations <= 2
    assert origins(channels) == Counter(record.origin for record in records)
    assert origins(channels, "rsvps.dead") == Counter(record.origin for record in large)


@pytest.mark.parametrize("seed", range(40))
async def test_crashes_and_kills_at_random_lose_nothing_and_double_nothing(seed: int) -> None:
    draw = random.Random(seed)
    channels, records = Fragile(draw.randint(1, 4)), numbered(draw.randint(1, 300), draw.randint(1, 5))
    channels.fate = lambda _: draw.choice(("before", "middle", "after")) if draw.random() < 0.05 else None
    source = Outside(records, chunk=lambda: draw.randint(1, 20))
    for generation in range(200):
        if generation > 30:
            channels.fate = lambda _: None
        running = asyncio.create_task(
            pumped(source, channels, bookmark_every=timedelta(milliseconds=draw.randint(0, 5)))
        )
        if draw.random() < 0.5 and generation < 30:
            await asyncio.wait((running,), timeout=draw.random() / 200)
            running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(result, IngestLoop):
            break
        assert isinstance(result, Crash | asyncio.CancelledError)
    assert origins(channels) == Counter(record.origin for record in records)


class Slow(MemoryChannels):
    """Channels that hold back whatever is sent into one of them until it is let go."""

    def __init__(self, held: str = "rsvps") -> None:
        super().__init__()
        self.held = held
        self.go = asyncio.Event()
        self.waiting = 0
        self.sent: list[Origin] = []

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as self._inner:
            yield self

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if channel == self.held:
            self.waiting += 1
            self.sent += [record.origin for record in records if record.origin is not None]
            await self.go.wait()
        await self._inner.send(channel, records)


async def test_no_more_is_on_its_way_than_is_allowed() -> None:
    channels, source = Slow(), Outside(numbered(1_000), chunk=lambda: 1)
    running = asyncio.create_task(pumped(source, channels))
    await until(lambda: channels.waiting == MAX_INTAKES)
    for _ in range(100):
        await asyncio.sleep(0)
    assert channels.waiting == MAX_INTAKES
    assert source.settled == []
    channels.go.set()
    await running
    assert len(channels.entries("rsvps")) == 1_000


async def test_nothing_is_taken_or_settled_while_the_disk_is_full() -> None:
    channels, source, room = MemoryChannels(), Outside(numbered(10)), list[str | None](["the disk is full"])
    one = pump(source, channels, pause_reason=lambda: room[0])
    running = asyncio.create_task(one.run(asyncio.Event()))
    await until(lambda: one.figures()["paused"])
    assert (channels.entries("rsvps"), source.settled) == ([], [])
    room[0] = None
    await running
    assert len(channels.entries("rsvps")) == 10
    assert one.figures()["paused"] is None


async def test_a_bookmark_never_claims_what_is_still_on_its_way() -> None:
    channels, source = Slow(), Outside(numbered(30), chunk=lambda: 1)
    running = asyncio.create_task(pumped(source, channels))
    await until(lambda: channels.waiting == 30)
    for entry in channels.entries("bookmarks"):
        assert orjson.loads(entry.value or b"")["runs"] == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    channels.go.set()
    await pumped(source, channels)
    assert origins(channels) == Counter(record.origin for record in source.records if isinstance(record, Arrival))


async def test_a_bookmark_that_is_too_large_is_not_written_and_not_needed() -> None:
    channels, records = MemoryChannels(), numbered(2_000, senders=200)
    for some in (records[:1_000], records):
        await pumped(Outside(some), channels, max_bookmark_bytes=1_000)
    assert all(len(entry.value or b"") <= 1_000 for entry in channels.entries("bookmarks"))
    assert origins(channels) == Counter(record.origin for record in records)


async def test_how_large_a_bookmark_may_be_is_not_for_the_channel_of_the_records_to_say() -> None:
    channels, records = MemoryChannels(), numbered(2_000, senders=200)
    await pumped(Outside(records), channels, max_record_bytes=1_000)
    assert any(len(entry.value or b"") > 1_000 for entry in channels.entries("bookmarks"))


async def test_time_away_from_a_source_that_cannot_resume_is_said_to_be_blind() -> None:
    channels = MemoryChannels()
    plain = Outside([Arrival(b"a")], guarantee=Guarantee.BEST_EFFORT)
    await pumped(plain, channels)
    assert not [said for said in notices(channels) if said["kind"] == "blind"]
    await pumped(plain, channels)
    (blind,) = [said for said in notices(channels) if said["kind"] == "blind"]
    first, second = (Origin.of(entry.headers) for entry in channels.entries("rsvps"))
    assert first is not None
    assert second is not None
    assert first.time <= blind["since"] <= blind["until"] <= second.time
    assert blind["source"] == "source"


class Cutting:
    """A TCP proxy that cuts each connection after a number of bytes."""

    def __init__(self, url: str, after: Callable[[], int]) -> None:
        self._port = int(url.split(":")[2].split("/")[0])
        self._after = after
        self.cuts = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        async with server:
            yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/rsvps"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._port)

        async def onwards() -> None:
            while some := await reader.read(65_536):
                there.write(some)

        sending = asyncio.create_task(onwards())
        left = self._after()
        try:
            while left > 0 and (some := await there_reader.read(min(left, 65_536))):
                left -= len(some)
                writer.write(some)
                await writer.drain()
            self.cuts += left <= 0
        except ConnectionError:
            pass
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()
            there.transport.abort()
            await asyncio.gather(writer.wait_closed(), there.wait_closed(), return_exceptions=True)


async def test_a_feed_that_is_cut_again_and_again_arrives_whole() -> None:
    feed = Feed(Rsvps(7), 1e6, 4, 1_700_000_000, count=3_000)
    channels, draw = MemoryChannels(3), random.Random(7)
    async with serve(feed, "127.0.0.1", 0) as serving:
        proxy = Cutting(serving.url, lambda: draw.randint(100_000, 600_000))
        async with proxy.listening() as url:
            one = await pumped(WebSocketSource(url, "rsvps", resume=True), channels, key="group.group_id")
    assert proxy.cuts >= 4
    assert origins(channels) == Counter(
        Origin(feed.name(n % 4), feed.epoch, n // 4 + 1, feed.time_of(n)) for n in range(3_000)
    )
    assert one.figures()["reconnects"] == proxy.cuts
    assert [entry.key for entry in channels.entries("rsvps") if entry.key is None] == []
    beats = {said["sender"]: said["seq"] for said in notices(channels)}
    assert beats == {feed.name(sender): 750 for sender in range(4)}


async def test_a_collector_that_is_killed_while_a_feed_runs_misses_nothing() -> None:
    feed = Feed(Rsvps(7), 1e6, 4, 1_700_000_000, count=5_000)
    channels = MemoryChannels(3)
    async with serve(feed, "127.0.0.1", 0) as serving:
        source = WebSocketSource(serving.url, "rsvps", resume=True)
        for target in (1, 1_000, 2_500):
            running = asyncio.create_task(pumped(source, channels))
            await until(lambda target=target: len(channels.entries("rsvps")) >= target)  # type: ignore[misc]  # lambda
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await pumped(source, channels)
    assert set(origins(channels).values()) == {1}
    assert len(channels.entries("rsvps")) == 5_000


async def test_a_feed_without_numbers_is_numbered_at_intake_and_blind_when_cut() -> None:
    feed = Feed(Rsvps(7), 2_000, 4, 1_700_000_000, numbered=False)
    channels, stop = MemoryChannels(), asyncio.Event()
    async with serve(feed, "127.0.0.1", 0) as serving:
        proxy = Cutting(serving.url, lambda: 100_000)
        async with proxy.listening() as url:
            one = pump(WebSocketSource(url, "rsvps", numbered=None), channels, key="group.group_id")
            running = asyncio.create_task(one.run(stop))
            await until(lambda: sum(said["kind"] == "blind" for said in notices(channels)) >= 2)
            stop.set()
            await running
    blinds = [said for said in notices(channels) if said["kind"] == "blind"]
    assert len(blinds) >= 2
    assert all(blind["since"] < blind["until"] for blind in blinds)
    seqs = [origin.seq for origin in origins(channels) if origin is not None]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_a_source_that_is_away_is_shown_with_its_reason() -> None:
    class Away(Outside):
        @asynccontextmanager
        async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
            raise Unavailable("the feed", "nobody there")
            yield

    stop = asyncio.Event()
    one = pump(Away([]), MemoryChannels())
    running = asyncio.create_task(one.run(stop))
    await until(lambda: "nobody there" in str(one.figures()["trouble"]))
    assert one.figures()["connected"] is False
    stop.set()
    await running


async def test_a_channel_that_cannot_be_asked_fails_the_pump_at_once() -> None:
    class Down(MemoryChannels):
        def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
            raise Unavailable("Kafka", "nobody there")

    with pytest.raises(Unavailable, match="Kafka"):
        await pumped(Outside([]), Down())


# --- with a spool -----------------------------------------------------------------------------------------------------


def spool(folder: Path) -> Spool:
    return Spool(SqliteChannels(folder, sync=False), "source", timeout=0.05)


async def test_a_channel_that_is_away_is_none_of_the_sources_business(tmp_path: Path) -> None:
    channels, outside = Fragile(), Outside(numbered(300), stays=True)
    await pumped(Outside(numbered(3)), channels)
    channels.fate = lambda channel: "away"
    one, stop = pump(outside, channels, spool=spool(tmp_path)), asyncio.Event()
    running = asyncio.create_task(one.run(stop))
    await until(lambda: len(outside.settled) == 99)
    assert outside.settled == [None] * 99
    figures = one.figures()
    assert figures["away"] is True
    # A bookmark may wait there, too.
    assert figures["spooled"] in (297, 298)
    assert sum(origins(channels).values()) == 3
    channels.fate = lambda channel: None
    await until(lambda: one.figures()["away"] is False)
    stop.set()
    await running
    assert origins(channels) == Counter(arrival.origin for arrival in numbered(300))


async def crashed_while_away(folder: Path) -> Fragile:
    """Channels that hold 3 of 90 records; the others were on disk when their collector crashed. They are back."""
    channels = Fragile()
    await pumped(Outside(numbered(3)), channels)
    channels.fate = lambda channel: "away"
    outside = Outside(numbered(90), stays=True)
    crashing = asyncio.create_task(pump(outside, channels, spool=spool(folder)).run(asyncio.Event()))
    await until(lambda: len(outside.settled) == 29)
    crashing.cancel()
    await asyncio.gather(crashing, return_exceptions=True)
    channels.fate = lambda channel: None
    return channels


async def test_what_waits_on_disk_is_not_asked_for_again_and_comes_first(tmp_path: Path) -> None:
    channels = await crashed_while_away(tmp_path)
    again = await pumped(Outside(numbered(120)), channels, spool=spool(tmp_path))
    assert again.total_duplicates == 0
    assert origins(channels) == Counter(arrival.origin for arrival in numbered(120))
    for sender in ("s0", "s1", "s2"):
        found = [origin.seq for origin in map(origin_of, channels.entries("rsvps")) if origin.sender == sender]
        assert sorted(found) == list(range(1, 41))


async def test_what_waits_on_disk_and_is_in_the_channel_all_the_same_is_not_sent_again(tmp_path: Path) -> None:
    """As after a life whose last records were on their way, and on disk, when it ended."""
    channels = await crashed_while_away(tmp_path)
    waiting = [record for name, record in spool(tmp_path).records() if name == "rsvps"]
    for record in waiting[:40]:
        channels.append("rsvps", record.value, record.key, record.headers())
    await pumped(Outside(numbered(120)), channels, spool=spool(tmp_path))
    assert origins(channels) == Counter(arrival.origin for arrival in numbered(120))


def origin_of(entry: Entry) -> Origin:
    origin = Origin.of(entry.headers)
    assert origin is not None
    return origin


@dataclass
class Placed:
    """A source of so many records with cursors. Each opening gives some intakes of a size; then it is lost or stays.

    It resumes `repeats` records before the cursor.
    """

    count: int
    openings: list[tuple[int, int]]
    repeats: int = 0
    name: str = "source"
    description: str = "of a test"
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    asked: list[str | None] = field(default_factory=list)
    given: int = 0

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        self.asked.append(taken.cursor)
        yield self._intakes(max(0, int(taken.cursor or 0) - self.repeats))

    async def _intakes(self, after: int) -> AsyncIterator[Intake]:
        intakes, size = self.openings.pop(0) if self.openings else (self.count, self.count)
        for _ in range(intakes):
            some = range(after + 1, min(after + size, self.count) + 1)
            if not some:
                return
            after, self.given = some[-1], self.given + len(some)
            yield Intake([Arrival(b'{"n":%d}' % n, cursor=str(n)) for n in some], self._settle)
        if self.openings:
            raise Unavailable("the outside", "it was lost")
        await asyncio.Event().wait()

    async def _settle(self, error: Exception | None) -> None:
        pass


async def test_a_lost_source_is_opened_again_after_all_that_is_on_its_way_is_settled() -> None:
    channels, stop = Slow(), asyncio.Event()
    source = Placed(1_200, [(10, 100), (2, 100)])
    running = asyncio.create_task(pump(source, channels).run(stop))
    await until(lambda: source.given == 1_000)
    await asyncio.sleep(0.05)
    assert source.asked == [None]
    channels.go.set()
    await until(lambda: source.given == 1_200)
    stop.set()
    await running
    assert source.asked == [None, "1000"]
    assert len(channels.entries("rsvps")) == 1_200


async def test_what_a_source_gives_again_does_not_put_it_back() -> None:
    """It was lost after 1,000, gave the first of them again, and then the collector was stopped."""
    channels, stop = Slow(), asyncio.Event()
    source = Placed(1_000, [(1, 1_000), (5, 10)], repeats=1_000)
    running = asyncio.create_task(pump(source, channels).run(stop))
    channels.go.set()
    await until(lambda: source.given == 1_050)
    stop.set()
    await running
    last = orjson.loads(channels.entries("bookmarks")[-1].value or b"")
    assert last["cursor"] == "1000"
    await pumped(Placed(1_200, []), channels)
    assert Counter(entry.value for entry in channels.entries("rsvps")).most_common(1)[0][1] == 1
    assert len(channels.entries("rsvps")) == 1_200


async def test_all_that_a_process_remembers_is_known_when_it_is_given_again() -> None:
    channels, count = Slow(), 150_000
    source = Placed(count, [(MAX_INTAKES, 2_000), (count, 2_000)], repeats=MAX_RECENT)
    running = asyncio.create_task(pump(source, channels, key=None).run(asyncio.Event()))
    for _ in range(500):
        await asyncio.sleep(0)
    channels.go.set()
    await running
    assert len(channels.entries("rsvps")) == count


async def test_each_run_of_a_pump_says_its_last_number() -> None:
    channels = MemoryChannels()
    one = pump(Outside([Arrival(b"1"), Arrival(b"2")], guarantee=Guarantee.BEST_EFFORT), channels)
    for _ in range(2):
        await one.run(asyncio.Event())
    told = [notice["seq"] for notice in notices(channels) if notice["kind"] == "heartbeat"]
    assert told == [2, 2]


async def test_two_runs_of_a_pump_give_no_number_twice_though_nothing_is_there_of_the_first() -> None:
    """What is on its way when a run ends may arrive later."""
    channels, source = Slow(), Outside([Arrival(b"1")], guarantee=Guarantee.BEST_EFFORT)
    one, given = pump(source, channels, clock=ManualClock()), list[Origin]()
    for _ in range(2):
        running = asyncio.create_task(one.run(asyncio.Event()))
        await until(lambda: channels.sent)
        given.append(channels.sent.pop())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert given[0].epoch < given[1].epoch
