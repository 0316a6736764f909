"""How far a group is behind."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.audit.auditor import Auditor
from penstock.audit.balance import balance
from penstock.audit.findings import Kind, Watched
from penstock.audit.lag import (
    EVERY,
    Endangered,
    GroupLag,
    OpenTransactions,
    Readers,
    Retention,
    committed,
    from_what_is_kept,
    gone,
)
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import ChannelPartition, Group, Topic
from penstock.core.errors import Unaccounted
from penstock.core.record import Origin, Record
from penstock.testing import ManualClock, MemoryChannels


def standing(group: Group, only: list[str] | None = None) -> GroupLag:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one"), Topic("two", partitions=2)])
    for number in range(10):
        channels.append("one", b"%d" % number)
    return GroupLag.of(channels, group, only)


def test_lag_counts_what_is_not_committed() -> None:
    found = standing(Group("g", "stable", {"m": [("one", 0)]}, {("one", 0): 7}))
    (row,) = found.rows
    assert (row.location, row.committed, row.first, row.end, row.member, row.lag) == (("one", 0), 7, 0, 10, "m", 3)
    assert found.lag == 3


def test_where_nothing_is_committed_nobody_knows_where_reading_begins() -> None:
    found = standing(Group("g", "stable", {"m": [("one", 0)]}, {}))
    assert ([row.lag for row in found.rows], found.lag) == ([None], 0)


def test_partitions_that_nobody_holds_are_told_as_well() -> None:
    found = standing(Group("g", "stable", {"m": [("two", 1)]}, {("two", 1): 0}))
    assert [(row.location, row.member, row.lag) for row in found.rows] == [
        (("two", 0), None, None),
        (("two", 1), "m", 0),
    ]


def test_a_channel_that_is_gone_has_no_end_and_no_lag() -> None:
    found = standing(Group("g", "empty", {}, {("gone", 0): 5, ("one", 0): 9}))
    assert [(row.location[0], row.end, row.lag) for row in found.rows] == [("gone", None, None), ("one", 10, 1)]
    assert found.lag == 1


def test_an_end_that_lies_before_what_is_committed_is_no_lag() -> None:
    assert standing(Group("g", "empty", {}, {("one", 0): 12})).lag == 0


def test_some_channels_alone_are_told() -> None:
    found = standing(Group("g", "empty", {}, {("one", 0): 1, ("two", 0): 0}), ["two"])
    assert {row.location[0] for row in found.rows} == {"two"}


HOUR = 3_600


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def channels(clock: ManualClock) -> MemoryChannels:
    made = MemoryChannels(None, clock)
    made.ensure([Topic("rsvps", retention=timedelta(hours=10)), Topic("forever")])
    return made


def fill(channels: MemoryChannels, clock: ManualClock, hours: int, channel: str = "rsvps", first: int = 1) -> None:
    """A numbered record an hour."""
    for seq in range(first, first + hours):
        channels.append(channel, b"{}", None, Origin("a", 1, seq, clock.now()).headers())
        clock.move(HOUR)


def test_a_reader_that_keeps_up_is_not_endangered(channels: MemoryChannels, clock: ManualClock) -> None:
    fill(channels, clock, 9)
    assert Retention(channels, clock, 0.8).look(lambda: {"store": {"rsvps": {0: 5}}}) == []


def test_a_reader_is_told_before_its_records_go(channels: MemoryChannels, clock: ManualClock) -> None:
    fill(channels, clock, 9)
    # The first record is nine hours old and the second eight: both have lived four fifths of their ten hours.
    found = Retention(channels, clock, 0.79).look(lambda: {"store": {"rsvps": {0: 0}}, "query": {"rsvps": {0: 1}}})
    assert found == [
        Endangered("store", "rsvps", unread=2, left=HOUR, lost=0),
        Endangered("query", "rsvps", unread=1, left=2 * HOUR, lost=0),
    ]


def test_what_a_reader_has_lost_is_counted(channels: MemoryChannels, clock: ManualClock) -> None:
    fill(channels, clock, 30)
    (low, end) = channels.bounds("rsvps")[0]
    assert low > 10
    (found,) = Retention(channels, clock, 0.99).look(lambda: {"store": {"rsvps": {0: 4}}})
    assert (found.lost, found.reader) == (low - 4, "store")
    assert end == 30


def test_what_is_kept_for_ever_endangers_nobody(channels: MemoryChannels, clock: ManualClock) -> None:
    fill(channels, clock, 30, "forever")
    assert Retention(channels, clock, 0.5).look(lambda: {"store": {"forever": {0: 0}}}) == []


def test_channels_are_looked_at_every_few_seconds(channels: MemoryChannels, clock: ManualClock) -> None:
    watch = Retention(channels, clock, 0.79)
    readers = {"store": {"rsvps": {0: 0}}}
    assert watch.look(lambda: readers) == []
    fill(channels, clock, 1)
    clock.move(8.5 * HOUR)
    assert len(watch.look(lambda: readers)) == 1
    clock.move(EVERY / 2)
    assert len(watch.look(lambda: {"store": {"rsvps": {0: 1}}})) == 1
    clock.move(EVERY / 2)
    assert watch.look(lambda: {"store": {"rsvps": {0: 1}}}) == []


def test_channels_that_do_not_answer_are_asked_once_and_it_stays_as_it_was(
    channels: MemoryChannels, clock: ManualClock
) -> None:
    watch, asked = Retention(channels, clock, 0.79), []
    fill(channels, clock, 9)
    before = watch.look(lambda: {"store": {"rsvps": {0: 0}}})
    assert len(before) == 1

    def readers() -> Readers:
        asked.append(clock.now())
        return {"store": {"nowhere": {0: 0}, "nowhere else": {0: 0}}}

    channels.remove("rsvps")
    clock.move(EVERY)
    assert watch.look(readers) == before
    assert watch.look(readers) == before
    assert len(asked) == 1


class Moving(MemoryChannels):
    """Channels whose retention is quick: what `bounds` told is gone when it is read."""

    @contextmanager
    def reader(self, start: Any, only: Any = None) -> Iterator[Any]:
        raise Unaccounted("rsvps", (), "it is gone")
        yield


def test_what_goes_while_one_looks_has_no_time_left(clock: ManualClock) -> None:
    moving = Moving(None, clock)
    moving.ensure([Topic("rsvps", retention=timedelta(hours=10))])
    fill(moving, clock, 9)
    (found,) = Retention(moving, clock, 0.79).look(lambda: {"store": {"rsvps": {0: 0}}})
    assert (found.unread, found.left) == (2, 0.0)


def test_old_notes_that_are_gone_do_not_stop_the_auditor(clock: ManualClock, tmp_path: Path) -> None:
    channels = MemoryChannels(None, clock)
    channels.ensure([Topic("rsvps"), Topic("notes", retention=timedelta(hours=1))])
    ledger = Ledger(tmp_path / "ledger.db")
    auditor = Auditor(channels, ledger, [Watched("rsvps", Kind.SOURCE)], "notes", clock)
    fill(channels, clock, 1, "notes")
    auditor.step(0)
    auditor.close()
    fill(channels, clock, 30, "notes", first=2)
    assert channels.bounds("notes")[0][0] > 1
    fill(channels, clock, 3)
    assert auditor.step(0) > 0
    ledger.close()


def test_positions_move_to_what_is_kept() -> None:
    bounds = {0: (10, 20), 1: (0, 5)}
    assert gone({0: 4, 1: 3}, bounds) == {0: 6}
    assert from_what_is_kept({0: 4, 1: 3}, bounds) == {0: 10, 1: 3}


def test_a_group_reads_what_it_has_committed() -> None:
    group = Group("g", "empty", {}, {("rsvps", 0): 3, ("rsvps", 1): 4, ("other", 0): 9})
    assert committed(group, {"rsvps"}) == {"rsvps": {0: 3, 1: 4}}


def test_an_auditor_stops_at_what_is_lost_or_names_it_as_missing(
    channels: MemoryChannels, clock: ManualClock, tmp_path: Path
) -> None:
    watched = [Watched("rsvps", Kind.SOURCE)]
    ledger = Ledger(tmp_path / "ledger.db")

    def auditor(skip_lost: bool) -> Auditor:
        return Auditor(channels, ledger, watched, "", clock, skip_lost=skip_lost)

    fill(channels, clock, 3)
    assert auditor(False).step(0) == 3
    fill(channels, clock, 30, first=4)
    low = channels.bounds("rsvps")[0][0]
    with pytest.raises(Unaccounted, match="rsvps"):
        auditor(False).step(0)
    skipping = auditor(True)
    while skipping.step(0):
        pass
    (row,) = balance(ledger.content(), clock.now(), grace=0).to_json()["channels"]
    assert (row["records"], row["missing"]) == (3 + 33 - low, low - 3)
    ledger.close()


def test_a_real_broker_tells_before_and_after(
    kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None]
) -> None:
    channel = fresh("expiring")
    kafka.ensure([Topic(channel, retention=timedelta(seconds=4))])

    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, [Record(b"%d" % n) for n in range(10)])

    asyncio.run(send())
    readers = {"store": {channel: {0: 2}}, "done": {channel: {0: 10}}}

    def look() -> list[Endangered]:
        return Retention(kafka, SystemClock(), 0.5).look(lambda: readers)

    assert look() == []
    eventually(look)
    (found,) = look()
    assert (found.reader, found.unread, found.lost) == ("store", 8, 0)
    assert found.left is not None
    assert found.left <= 2
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    admin.delete_records([TopicPartition(channel, 0, 7)])[TopicPartition(channel, 0)].result(10)
    (found,) = look()
    assert (found.reader, found.unread, found.lost) == ("store", 3, 5)


def test_a_transaction_is_a_doubt_only_if_it_stays_open() -> None:
    found: dict[ChannelPartition, tuple[int, int]] = {("a", 0): (10, 12), ("b", 3): (7, 9)}
    transactions = OpenTransactions(lambda: found, 5.0)
    assert transactions.look(100.0) == []
    found["b", 3] = (9, 11)  # The next one of a producer that has one all the time.
    assert [doubt.subject for doubt in transactions.look(105.0)] == ["a"]
    del found["a", 0]
    assert transactions.look(109.0) == []
    assert [doubt.subject for doubt in transactions.look(110.0)] == ["b"]
