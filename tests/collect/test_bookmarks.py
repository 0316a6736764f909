import random

import pytest
from tests.audit.odd import Mute

from penstock.collect.bookmarks import Bookmark, recover
from penstock.collect.dedup import shed_records
from penstock.collect.numbers import Numbers
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import Origin, Record
from penstock.testing import MemoryChannels

WATCHED = ("rsvps", "rsvps.dead")


def put(channels: MemoryChannels, origin: Origin, channel: str = "rsvps", key: bytes | None = None) -> None:
    channels.append(channel, b"{}", key, origin.headers())


def mark(channels: MemoryChannels, bookmark: Bookmark, source: str = "source") -> None:
    record = bookmark.record(source)
    channels.append("bookmarks", record.value, record.key)


def recovered(channels: MemoryChannels) -> Bookmark:
    return recover(channels, "bookmarks", "source", WATCHED, "heartbeats")


def numbers(*origins: tuple[str, int, int, int]) -> Numbers:
    found = Numbers()
    for sender, epoch, first, last in origins:
        found.add(sender, epoch, first, last)
    return found


def told(found: Numbers) -> set[tuple[str, int, tuple[tuple[int, int], ...]]]:
    return {(sender, epoch, tuple(runs)) for sender, epoch, runs in found}


def test_a_collector_without_a_past_knows_nothing() -> None:
    found = recovered(MemoryChannels())
    assert (told(found.numbers), found.generation, found.last_received) == (set(), 0, None)


def test_a_bookmark_comes_back_as_it_was_written() -> None:
    written = Bookmark(numbers(("a", 1, 1, 5), ("a", 1, 9, 9), ("ü", 2, 1, 3)), {"rsvps": {0: 4, 1: 5}}, 7, 99)
    found = Bookmark.of(written.record("source").value or b"")
    assert told(found.numbers) == told(written.numbers)
    assert (found.offsets, found.generation, found.last_received) == ({"rsvps": {0: 4, 1: 5}}, 7, 99)


def test_the_last_bookmark_of_the_source_counts() -> None:
    channels = MemoryChannels()
    mark(channels, Bookmark(numbers(("a", 1, 1, 5))))
    mark(channels, Bookmark(numbers(("a", 1, 1, 8)), generation=3))
    mark(channels, Bookmark(numbers(("a", 1, 1, 99))), source="another")
    found = recovered(channels)
    assert found.numbers.contiguous() == {"a": (1, 8)}
    assert found.generation == 3


def test_what_the_channel_holds_after_the_bookmark_counts_too() -> None:
    channels = MemoryChannels()
    for seq in (1, 2, 3):
        put(channels, Origin("a", 1, seq, 0))
    mark(channels, Bookmark(numbers(("a", 1, 1, 2)), {"rsvps": {0: 2}}))
    put(channels, Origin("a", 1, 4, 0), channel="rsvps.dead")
    found = recovered(channels)
    assert told(found.numbers) == {("a", 1, ((1, 4),))}
    assert found.offsets == {"rsvps": {0: 3}, "rsvps.dead": {0: 1}, "heartbeats": {0: 0}}


def test_without_a_bookmark_the_whole_channel_is_read() -> None:
    channels = MemoryChannels(partitions=3)
    for seq in range(1, 101):
        put(channels, Origin("a", 1, seq, 0), key=b"%d" % seq)
    assert told(recovered(channels).numbers) == {("a", 1, ((1, 100),))}


@pytest.mark.parametrize("value", [b"", b"nonsense", b"[]", b"{}", b'{"runs":5}', b'{"runs":{"a":{"x":[[1,2]]}}}'])
def test_a_bookmark_that_cannot_be_read_is_not_believed(value: bytes) -> None:
    with pytest.raises(Refused):
        Bookmark.of(value)
    channels = MemoryChannels()
    put(channels, Origin("a", 1, 1, 0))
    channels.append("bookmarks", value, b"source")
    assert told(recovered(channels).numbers) == {("a", 1, ((1, 1),))}


def test_a_bookmark_that_claims_more_than_the_channel_holds_is_not_believed() -> None:
    """The channel was made anew, or lost its end: what it lacks has to come again."""
    channels = MemoryChannels()
    put(channels, Origin("a", 1, 1, 0))
    mark(channels, Bookmark(numbers(("a", 1, 1, 500)), {"rsvps": {0: 500}}, generation=3, last_received=9))
    found = recovered(channels)
    assert found.numbers.contiguous() == {"a": (1, 1)}
    assert (found.generation, found.last_received) == (3, 9)


def test_a_life_that_numbered_records_and_died_before_its_bookmark_is_known() -> None:
    channels = MemoryChannels()
    put(channels, Origin("source", 41, 1, 77))
    found = recovered(channels)
    assert (found.generation, found.last_received) == (41, 77)
    assert told(found.numbers) == set()


def test_a_life_after_which_there_can_be_none_was_made_up() -> None:
    channels = MemoryChannels(1)
    put(channels, Origin("source", 41, 1, 7))
    put(channels, Origin("source", 2**63 - 1, 1, 7))
    assert recovered(channels).generation == 41


def test_what_others_wrote_into_the_channel_is_no_obstacle() -> None:
    channels = MemoryChannels()
    channels.append("rsvps", None)
    channels.append("rsvps", b"by hand", None, [("seq", b"x")])
    channels.append("rsvps", b"by hand", None, [("seq", b"1"), ("seq", b"2")])
    put(channels, Origin("a", 1, 1, 0))
    assert told(recovered(channels).numbers) == {("a", 1, ((1, 1),))}


def test_a_channel_that_does_not_give_what_it_holds_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="bookmarks is unavailable"):
        recover(Mute(), "bookmarks", "source", WATCHED, "heartbeats")


@pytest.mark.parametrize("seed", range(100))
def test_recovery_is_exact_whatever_was_written_and_marked(seed: int) -> None:
    """Senders, epochs, gaps, partitions and bookmarks at random; the channel's own content is the judge."""
    draw = random.Random(seed)
    channels = MemoryChannels(partitions=draw.randint(1, 4))
    held = Numbers()
    for _ in range(draw.randint(1, 20)):
        ends = {channel: {at: finish for at, (_, finish) in channels.bounds(channel).items()} for channel in WATCHED}
        for _ in range(draw.randint(0, 30)):
            origin = Origin(draw.choice("abc"), draw.choice((1, 2)), draw.randint(1, 60), 0)
            if origin not in held:
                put(channels, origin, draw.choice(WATCHED), draw.randbytes(2))
                held.add(origin.sender, origin.epoch, origin.seq)
        if draw.random() < 0.5:
            # The positions are older than the numbers, as when a pump looks them up first.
            mark(channels, Bookmark(held.copy(), ends))
    assert told(recovered(channels).numbers) == told(held)


def test_what_was_dropped_on_purpose_and_told_on_disk_is_no_gap() -> None:
    """A long outage: all of it waits there, and the last bookmark is from before."""

    def record(seq: int) -> tuple[str, Record]:
        return "rsvps", Record(b"%d" % seq, Origin("source", 5, seq, 0), extra=[("cursor", b"%d" % seq)])

    (heartbeat_record,) = shed_records("rsvps", [Origin("source", 5, 2, 0), Origin("source", 5, 3, 0)])
    waiting = [record(1), record(4), ("heartbeats", heartbeat_record), record(6)]
    found = recover(MemoryChannels(), "bookmarks", "source", WATCHED, "heartbeats", waiting)
    assert (found.cursors.cursor, list(found.cursors.after_gap)) == ("4", ["6"])


def test_of_what_was_dropped_before_another_channel_nothing_is_believed() -> None:
    channels = MemoryChannels()
    (heartbeat_record,) = shed_records("others", [Origin("source", 5, 1, 0)])
    channels.append("heartbeats", heartbeat_record.value, heartbeat_record.key)
    channels.append("rsvps", b"2", None, [*Origin("source", 5, 2, 0).headers(), ("cursor", b"2")])
    found = recover(channels, "bookmarks", "source", WATCHED, "heartbeats")
    assert (found.cursors.cursor, list(found.cursors.after_gap)) == (None, ["2"])
