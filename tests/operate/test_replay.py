"""The history of a channel, sent into another one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from penstock.channels.tcp import Tcp
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin, Record
from penstock.operate.replay import Replay, Replayed, stretch
from penstock.testing import ManualClock, MemoryChannels

SECOND = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def channels(clock: ManualClock) -> MemoryChannels:
    """A channel that got a record a second, for a minute, over three partitions."""
    made = MemoryChannels(None, clock)
    made.ensure([Topic("cars", partitions=3), Topic("again", partitions=2)])
    for seq in range(1, 61):
        headers = [*Origin("gps", 4, seq, clock.now()).headers(), ("zone", b"a")]
        made.append("cars", b"%d" % seq, b"car%d" % (seq % 7), headers)
        clock.move(1)
    return made


def replayed(
    channels: MemoryChannels, clock: ManualClock, since: int | None = None, until: int | None = None
) -> Replayed:
    chosen = stretch(channels, "cars", since, until)
    run = Replay(channels, "cars", channels, "again", None, clock).run(chosen, threading.Event(), lambda _: None)
    return asyncio.run(run)


def test_what_is_replayed_is_what_came(channels: MemoryChannels, clock: ManualClock) -> None:
    done = replayed(channels, clock)
    assert (done.sent, done.due) == (60, 60)
    before = {(entry.key, entry.value) for entry in channels.entries("cars")}
    assert {(entry.key, entry.value) for entry in channels.entries("again")} == before


def test_identity_and_time_stay_and_the_replay_is_marked(channels: MemoryChannels, clock: ManualClock) -> None:
    replayed(channels, clock)
    origins = {entry.value: Origin.of(entry.headers) for entry in channels.entries("cars")}
    marks = set()
    for entry in channels.entries("again"):
        assert Origin.of(entry.headers) == origins[entry.value]
        told = dict(entry.headers)
        assert told["zone"] == b"a"
        channel, partition, offset = told["from"].decode().split(":")
        marks.add(told["replay"])
        found = channels.entries("cars")
        assert [one.value for one in found if (one.partition, one.offset) == (int(partition), int(offset))] == [
            entry.value
        ]
        assert channel == "cars"
    assert len(marks) == 1


def test_the_order_is_that_of_coming(channels: MemoryChannels, clock: ManualClock) -> None:
    channels.ensure([Topic("single")])
    chosen = stretch(channels, "cars", None, None)
    asyncio.run(
        Replay(channels, "cars", channels, "single", None, clock).run(chosen, threading.Event(), lambda _: None)
    )
    assert [int(entry.value or b"") for entry in channels.entries("single")] == list(range(1, 61))


def test_a_stretch_of_time_is_replayed_alone(channels: MemoryChannels, clock: ManualClock) -> None:
    start = clock.now() - 60 * SECOND
    replayed(channels, clock, start + 10 * SECOND, start + 20 * SECOND)
    assert sorted(int(entry.value or b"") for entry in channels.entries("again")) == list(range(11, 21))


def test_a_replay_of_a_replay_tells_of_the_last_one(channels: MemoryChannels, clock: ManualClock) -> None:
    replayed(channels, clock)
    clock.move(1)
    channels.ensure([Topic("once more")])
    chosen = stretch(channels, "again", None, None)
    run = Replay(channels, "again", channels, "once more", None, clock)
    asyncio.run(run.run(chosen, threading.Event(), lambda _: None))
    for entry in channels.entries("once more"):
        names = [name for name, _ in entry.headers]
        assert names.count("replay") == names.count("from") == 1
        assert dict(entry.headers)["from"].startswith(b"again:")


class Quick(ManualClock):
    """A clock on which a tenth of a second passes whenever somebody looks."""

    def elapsed(self) -> float:
        self.move(0.1)
        return super().elapsed()


def test_the_pace_is_that_of_coming_times_the_speed(channels: MemoryChannels, clock: ManualClock) -> None:
    """A minute at a thousand times its speed takes sixty milliseconds; what is not due yet waits."""
    quick = Quick()
    told: list[tuple[int, float]] = []
    chosen = stretch(channels, "cars", None, None)
    run = Replay(channels, "cars", channels, "again", 100.0, quick)
    done = asyncio.run(
        run.run(chosen, threading.Event(), lambda so_far: told.append((so_far.sent, quick._elapsed / 1e6)))
    )
    assert done.sent == 60
    for sent, at in told:
        # The last of them came `sent - 1` seconds after the first; 0.02 s of haste is allowed, and a look is 0.1 s.
        assert (sent - 1) / 100 <= at + 0.02
    assert len(told) > 3


def test_a_replay_that_is_stopped_tells_how_far_it_is(channels: MemoryChannels, clock: ManualClock) -> None:
    stop = threading.Event()
    chosen = stretch(channels, "cars", None, None)
    run = Replay(channels, "cars", channels, "again", 1.0, Quick())
    done = asyncio.run(run.run(chosen, stop, lambda _: stop.set()))
    assert 0 < done.sent < done.due == 60
    assert len(channels.entries("again")) == done.sent


class Away(MemoryChannels):
    """Channels that take a number of batches, and no more."""

    def __init__(self, clock: ManualClock, batches: int) -> None:
        super().__init__(1, clock)
        self.batches = batches

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["Away"]:  # type: ignore[override]  # Its own sender is a class of its own.
        yield self

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not self.batches:
            raise Unavailable("it", "too bad")
        self.batches -= 1
        for record in records:
            self.append(channel, record.value, record.key, record.headers())


def test_a_replay_that_breaks_off_tells_how_far_it_is_and_why(channels: MemoryChannels, clock: ManualClock) -> None:
    target, start = Away(clock, 2), clock.now() - 60 * SECOND
    run = Replay(channels, "cars", target, "again", 100.0, Quick())
    done = asyncio.run(run.run(stretch(channels, "cars", None, None), threading.Event(), lambda _: None))
    assert str(done.failure) == "it is unavailable: too bad"
    assert 0 < done.sent == len(target.entries("again")) < 60
    assert done.last == start + (done.sent - 1) * SECOND
    rest = stretch(channels, "cars", done.last, None)
    assert sum(end - begin for begin, end in rest.values()) == 60 - done.sent + 1


def test_what_keeps_nothing_has_no_stretch() -> None:
    with pytest.raises(Misconfigured, match="keeps no records"):
        stretch(Tcp("127.0.0.1", 1), "cars", None, None)
