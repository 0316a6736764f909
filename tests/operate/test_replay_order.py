"""All partitions of a channel in the order of their coming, by one reader at a time."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from penstock.core.contracts import ChannelPartition, Entry, Offsets, Reader, Topic
from penstock.core.errors import Unavailable
from penstock.operate.replay import Ranges, merged
from penstock.testing import ManualClock, MemoryChannels


class Watched(MemoryChannels):
    """Channels that count their readers, and what they gave."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(None, clock)
        self.open = self.most_open = self.given = 0

    @contextmanager
    def reader(  # type: ignore[override]  # What it yields has the shape of a reader, and is not the class of the other.
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator[Reader]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        with super().reader(start, only) as reader:
            yield WatchedReader(self, reader)
        self.open -= 1


class WatchedReader:
    def __init__(self, channels: Watched, reader: Reader) -> None:
        self._channels = channels
        self._reader = reader
        self.positions, self.age = reader.positions, reader.age

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        entries = self._reader.read(most, 0)
        self._channels.given += len(entries)
        return entries


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def channels(clock: ManualClock) -> Watched:
    return Watched(clock)


def values(channels: MemoryChannels, chosen: Ranges) -> list[int]:
    return [int(entry.value or b"") for entry in merged(channels, "c", chosen)]


def keys(channels: MemoryChannels, partitions: int) -> list[bytes]:
    """For each partition, a key whose records lie there."""
    channels.ensure([Topic("c", partitions), Topic("probe", partitions)])
    found = {channels.append("probe", b"", b"%d" % number).partition: b"%d" % number for number in range(100)}
    return [found[partition] for partition in range(partitions)]


def test_many_partitions_are_read_in_the_order_of_coming_by_one_reader_at_a_time(
    channels: Watched, clock: ManualClock
) -> None:
    channels.ensure([Topic("c", 300)])
    for number in range(5_000):
        channels.append("c", b"%d" % number, b"%d" % number)
        clock.move(0.001)
    assert values(channels, channels.bounds("c")) == list(range(5_000))
    assert (channels.most_open, channels.open) == (1, 0)


def test_little_is_held_where_a_partition_is_hours_behind_another(channels: Watched, clock: ManualClock) -> None:
    """What came later waits in the channel, not here."""
    early, late = keys(channels, 2)
    for number in range(20_000):
        channels.append("c", b"%d" % number, early if number < 10_000 else late)
        clock.move(1)
    told, most = list[int](), 0
    for entry in merged(channels, "c", channels.bounds("c"), 1_000):
        told.append(int(entry.value or b""))
        most = max(most, channels.given - len(told))
    assert told == list(range(20_000))
    assert most <= 1_000
    assert channels.most_open == 1


def test_only_the_stretch_is_told(channels: Watched) -> None:
    channels.ensure([Topic("c")])
    for number in range(100):
        channels.append("c", b"%d" % number)
    assert values(channels, {0: (10, 20)}) == list(range(10, 20))
    assert values(channels, {}) == []


def test_a_partition_keeps_its_order_whatever_its_times_are(channels: Watched, clock: ManualClock) -> None:
    one, other = keys(channels, 2)
    for key, moments in ((one, (10, 5, 7, 20)), (other, (6, 8, 30))):
        for timestamp in moments:
            clock.move(timestamp)
            channels.append("c", b"%d" % timestamp, key)
            clock.move(-timestamp)
    assert values(channels, channels.bounds("c")) == [6, 8, 10, 5, 7, 20, 30]


def test_a_channel_that_gives_less_than_it_holds_is_told(channels: Watched) -> None:
    channels.ensure([Topic("c")])
    with pytest.raises(Unavailable, match="it does not return all"):
        values(channels, {0: (0, 1)})
