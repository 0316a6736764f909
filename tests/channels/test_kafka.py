"""Channels on a real broker."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from penstock.channels.kafka import Kafka, Topic
from penstock.contracts import Entry
from penstock.errors import Misconfigured, Unaccounted, Unavailable
from penstock.record import Origin, Record

Fresh = Callable[[str], str]


def send(kafka: Kafka, channel: str, records: Sequence[Record]) -> None:
    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, records)

    asyncio.run(go())


def read(kafka: Kafka, channel: str, count: int, start: dict[int, int] | None = None) -> list[Entry]:
    found: list[Entry] = []
    with kafka.reader({channel: start or {}}) as reader:
        while len(found) < count:
            found += reader.read(1_000, 10)
    return found


def numbered(count: int, keys: int = 7) -> list[Record]:
    return [Record(b"%d" % n, Origin("s", 1, n, 1_000 + n), b"k%d" % (n % keys)) for n in range(1, count + 1)]


def test_what_is_sent_is_there_in_the_order_of_its_key(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("ordered")
    kafka.ensure([Topic(channel, partitions=3)])
    send(kafka, channel, numbered(2_000))
    entries = read(kafka, channel, 2_000)
    assert len(entries) == 2_000
    for key in {entry.key for entry in entries}:
        values = [int(entry.value or b"") for entry in entries if entry.key == key]
        assert values == sorted(values)
    assert len({entry.partition for entry in entries}) > 1


def test_the_identity_travels_in_the_headers(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("headers")
    kafka.ensure([Topic(channel)])
    origin = Origin("sender-é", 3, 42, 1_700_000_000_000_000)
    send(kafka, channel, [Record(b"x", origin, extra=(("reason", b"because"),))])
    (entry,) = read(kafka, channel, 1)
    assert Origin.of(entry.headers) == origin
    assert ("reason", b"because") in entry.headers
    assert entry.appended > 1_700_000_000_000_000


def test_null_values_and_empty_keys_pass(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("null")
    kafka.ensure([Topic(channel, compacted=True)])
    send(kafka, channel, [Record(None, Origin("s", 1, 1, 1), b"gone"), Record(b"", None, b"empty")])
    gone, empty = read(kafka, channel, 2)
    assert (gone.key, gone.value) == (b"gone", None)
    assert (empty.key, empty.value, list(empty.headers)) == (b"empty", b"", [])


def test_reading_goes_on_from_positions(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("positions")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(10))
    with kafka.reader({channel: {}}) as reader:
        first = reader.read(4, 10)
        while len(first) < 4:
            first = [*first, *reader.read(4 - len(first), 10)]
        positions = reader.positions(channel)
    rest = read(kafka, channel, 6, dict(positions))
    assert [int(entry.value or b"") for entry in [*first, *rest]] == list(range(1, 11))


def test_a_reader_that_lets_entries_linger_gets_them_all(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("linger")
    kafka.ensure([Topic(channel, partitions=2)])
    send(kafka, channel, numbered(50))
    with kafka.reader({channel: {}}, linger=0.2) as reader:
        found: list[Entry] = []
        while len(found) < 50:
            found += reader.read(1_000, 5)
    assert sorted(int(entry.value or b"") for entry in found) == list(range(1, 51))


def test_bounds_tell_what_is_kept_and_what_comes_next(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("bounds")
    kafka.ensure([Topic(channel)])
    assert kafka.bounds(channel) == {0: (0, 0)}
    send(kafka, channel, numbered(3))
    assert kafka.bounds(channel) == {0: (0, 3)}


def test_a_moment_has_positions(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("since")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(3))
    newest = read(kafka, channel, 3)[-1].appended
    assert kafka.since(channel, 0) == {0: 0}
    assert kafka.since(channel, newest + 3_600_000_000) == {0: 3}


def test_positions_beyond_the_log_are_an_error_and_no_silent_skip(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("beyond")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(3))
    with pytest.raises(Unaccounted, match=channel):
        read(kafka, channel, 1, {0: 1_000})


def test_more_replicas_than_brokers_is_said_with_their_number(kafka: Kafka, fresh: Fresh) -> None:
    with pytest.raises(Misconfigured, match=r"3 replicas are asked for, and there is 1 broker; ask for at most 1"):
        kafka.ensure([Topic(fresh("replicas"), replicas=3)])


def test_a_topic_keeps_its_partitions(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("partitions")
    assert kafka.ensure([Topic(channel, partitions=2)]) == [channel]
    assert kafka.ensure([Topic(channel, partitions=2)]) == []
    with pytest.raises(Misconfigured, match=r"3 partitions are asked for, and the topic has 2"):
        kafka.ensure([Topic(channel, partitions=3)])


def test_a_topic_has_an_id_of_its_own(kafka: Kafka, fresh: Fresh) -> None:
    one, other = fresh("id"), fresh("id")
    kafka.ensure([Topic(one), Topic(other)])
    assert kafka.topic_id(one) == kafka.topic_id(one) != kafka.topic_id(other)


def test_channels_are_told_by_their_names(kafka: Kafka, fresh: Fresh) -> None:
    first, second = fresh("named"), fresh("named")
    kafka.ensure([Topic(second), Topic(first)])
    names = kafka.names()
    assert {first, second} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if name.startswith("__")]


def test_a_channel_that_is_not_there_is_named(kafka: Kafka) -> None:
    with pytest.raises(Unavailable, match="Unknown topic"):
        kafka.bounds("nobody-made-this")


def test_a_broker_that_is_away_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"Kafka at 127\.0\.0\.1:1 is unavailable"):
        Kafka("127.0.0.1:1").brokers(timeout=0.5)


def test_many_senders_at_once_keep_their_order(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("many")
    kafka.ensure([Topic(channel)])

    async def go() -> None:
        async with kafka.sender() as sender, asyncio.TaskGroup() as tasks:
            for record in numbered(500, keys=1):
                tasks.create_task(sender.send(channel, [record]))

    asyncio.run(go())
    assert [int(entry.value or b"") for entry in read(kafka, channel, 500)] == list(range(1, 501))
