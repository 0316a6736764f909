"""What every binder promises, with the real servers. A binder is a line in tests/channels/binders.py."""

import asyncio
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.channels.binders import (
    CASES,
    COMPACTING,
    DURABLE,
    KILLABLE,
    PICKLED,
    REFUSING,
    REPLAYED,
    Bound,
    Case,
    over,
)
from tests.channels.traffic import (
    Noted,
    carried,
    eventually,
    everything,
    gathered,
    lines,
    number,
    numbered,
    numbers,
    process,
    read,
    send,
)

from penstock.core.contracts import Channels, EnsureResult, Entry, Reader, Topic
from penstock.core.errors import Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record

Fresh = Callable[[str], str]


def made(channels: Channels, channel: str, partitions: int = 1) -> str:
    channels.ensure([Topic(channel, partitions)])
    return channel


# --- what is sent is read


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_binder_promises_what_its_line_says(case: Case, request: pytest.FixtureRequest) -> None:
    with case.opened(request) as bound:
        promise = bound.channels.promise
        assert (promise.durable, promise.replay) == (case.durable, case.replay)
        assert promise.description
        assert "://" in bound.channels.where


@over(PICKLED)
def test_a_description_can_be_pickled(bound: Bound, fresh: Fresh) -> None:
    channels = bound.channels
    other: Channels = pickle.loads(pickle.dumps(channels))
    assert (other.where, other.promise) == (channels.where, channels.promise)
    assert numbers(carried(other, made(channels, fresh("pickled")), numbered(3))) == [1, 2, 3]


@over(CASES)
def test_what_is_sent_is_there_in_the_order_of_its_key(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("ordered"), 3)
    entries = carried(bound.channels, channel, numbered(2_000), at_once=250)
    assert sorted(numbers(entries)) == list(range(1, 2_001))
    for key in {entry.key for entry in entries}:
        values = [number(entry) for entry in entries if entry.key == key]
        assert values == sorted(values)
        assert len({entry.partition for entry in entries if entry.key == key}) == 1
    for partition in {entry.partition for entry in entries}:
        offsets = [entry.offset for entry in entries if entry.partition == partition]
        assert offsets == sorted(set(offsets))


@over(REPLAYED)
def test_keys_are_spread_over_the_partitions(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("spread"), 3)
    send(bound.channels, channel, numbered(100, keys=50))
    assert {entry.partition for entry in read(bound.channels, channel, 100)} == {0, 1, 2}


@over(CASES)
def test_the_identity_travels_in_the_headers(bound: Bound, fresh: Fresh) -> None:
    channel, origin = made(bound.channels, fresh("headers")), Origin("sender-é", 3, 42, 1_700_000_000_000_000)
    (entry,) = carried(bound.channels, channel, [Record(b"x", origin, extra=(("reason", b"because"),))])
    assert Origin.of(entry.headers) == origin
    assert ("reason", b"because") in entry.headers
    assert (entry.channel, entry.partition) == (channel, 0)
    assert entry.appended > 1_700_000_000_000_000


@over(CASES)
def test_headers_of_any_kind_pass_as_they_are(bound: Bound, fresh: Fresh) -> None:
    extra = (
        ("twice", b"1"),
        ("twice", b"2"),
        ("empty", b""),
        ("null", b"null"),
        ("zero", b"\x00\xff\n"),
        ("größe", "größe".encode()),
        ("a b:c", b"x" * 5_000),
    )
    (entry,) = carried(bound.channels, made(bound.channels, fresh("headers")), [Record(b"x", None, None, extra)])
    assert tuple(entry.headers) == extra


@over(CASES)
def test_keys_and_values_of_any_kind_pass_as_they_are(bound: Bound, fresh: Fresh) -> None:
    kinds = [None, b"", b"\x00\x01\xff\n", b"k" * 3_000, "é".encode()]
    records = [Record(value, None, key) for key in kinds for value in kinds]
    entries = carried(bound.channels, made(bound.channels, fresh("kinds")), records)
    assert [(entry.key, entry.value, list(entry.headers)) for entry in entries] == [
        (record.key, record.value, []) for record in records
    ]


@over(CASES)
def test_large_records_pass_whole(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("large"), 2)
    records = [Record(bytes([n]) * 900_000, None, b"%d" % n) for n in range(16)]
    entries = carried(bound.channels, channel, records)
    assert {entry.key: entry.value for entry in entries} == {record.key: record.value for record in records}


@over(CASES)
def test_a_reader_that_is_slower_than_the_writer_gets_everything_in_order(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("slow"))

    def slowly(reader: Reader, count: int) -> list[Entry]:
        found: list[Entry] = []
        while len(found) < count:
            found += gathered(reader, min(100, count - len(found)), most=25)
            time.sleep(0.002)
        return found

    entries = carried(bound.channels, channel, numbered(10_000), at_once=1_000, take=slowly)
    assert numbers(entries) == list(range(1, 10_001))


@over(CASES)
def test_no_more_is_read_than_was_asked_for(bound: Bound, fresh: Fresh) -> None:
    def in_threes(reader: Reader, count: int) -> list[Entry]:
        found: list[Entry] = []
        while len(found) < count:
            some = reader.read(3, 1)
            assert len(some) <= 3
            found += some
        return found

    channel = made(bound.channels, fresh("most"))
    assert numbers(carried(bound.channels, channel, numbered(20), take=in_threes)) == list(range(1, 21))


@over(CASES)
def test_nothing_is_read_where_nothing_is(bound: Bound, fresh: Fresh) -> None:
    with bound.channels.reader({made(bound.channels, fresh("empty")): {}}) as reader:
        before = time.monotonic()
        assert not reader.read(10, 0.1)
        assert time.monotonic() - before >= 0.09
        assert not reader.read(10, 0)


@over(CASES)
def test_many_sends_at_once_keep_their_order(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("many"))

    async def go() -> None:
        async with bound.channels.sender() as sender, asyncio.TaskGroup() as tasks:
            for record in numbered(500, keys=1):
                tasks.create_task(sender.send(channel, [record]))

    with bound.channels.reader({channel: {}}) as reader, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(asyncio.run, go())
        assert numbers(gathered(reader, 500)) == list(range(1, 501))
        sent.result()


@over(CASES)
def test_several_senders_at_once_lose_nothing(bound: Bound, fresh: Fresh) -> None:
    channel, senders = made(bound.channels, fresh("senders"), 2), [f"s{n}" for n in range(4)]
    with bound.channels.reader({channel: {}}) as reader, ThreadPoolExecutor(len(senders)) as pool:
        sent = [pool.submit(send, bound.channels, channel, numbered(300, sender=name), 20) for name in senders]
        entries = gathered(reader, 300 * len(senders))
        for one in sent:
            one.result()
    for name in senders:
        ours = [entry for entry in entries if (origin := Origin.of(entry.headers)) and origin.sender == name]
        assert sorted(numbers(ours)) == list(range(1, 301))
        for key in {entry.key for entry in ours}:
            values = [number(entry) for entry in ours if entry.key == key]
            assert values == sorted(values)


@over(CASES)
def test_figures_are_posted_without_waiting(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("figures"))
    with bound.channels.reader({channel: {}}) as reader:
        with bound.channels.poster() as post:
            for n in range(5):
                post(channel, b"k", b"%d" % n)
        entries = gathered(reader, 5)
    assert [(entry.key, number(entry)) for entry in entries] == [(b"k", n) for n in range(5)]


@over(REPLAYED)
def test_reading_no_records_passes_over_none(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("none"))
    send(bound.channels, channel, numbered(3))
    with bound.channels.reader({channel: {}}) as reader:
        assert list(reader.read(0, 0)) == []
        assert numbers(gathered(reader, 3)) == [1, 2, 3]


@over(CASES)
def test_nothing_to_send_is_sent_at_once(bound: Bound, fresh: Fresh) -> None:
    send(bound.channels, made(bound.channels, fresh("nothing")), [])


@over(CASES)
def test_a_reader_that_has_read_all_is_not_old(bound: Bound, fresh: Fresh) -> None:
    def take(reader: Reader, count: int) -> list[Entry]:
        found = gathered(reader, count)

        def young() -> bool:
            reader.read(1, 0.05)
            return reader.age() < 0.5

        eventually(young)
        return found

    carried(bound.channels, made(bound.channels, fresh("age"), 2), numbered(10), take=take)


# --- it can be read again


@over(REPLAYED)
def test_the_age_of_a_reader_is_infinite_until_it_has_seen_the_end(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("age"))
    send(bound.channels, channel, numbered(100))
    with bound.channels.reader({channel: {}}) as reader:
        gathered(reader, 10, most=10)
        assert reader.age() == math.inf


@over(REPLAYED)
def test_a_channel_is_read_from_its_beginning_again_and_again(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("again"), 3)
    send(bound.channels, channel, numbered(100))
    first, second = (read(bound.channels, channel, 100) for _ in range(2))
    assert sorted(numbers(first)) == list(range(1, 101))
    assert sorted(first, key=number) == sorted(second, key=number)


@over(REPLAYED)
def test_reading_goes_on_from_positions(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("positions"))
    send(bound.channels, channel, numbered(10))
    with bound.channels.reader({channel: {}}) as reader:
        assert reader.positions(channel) == {0: 0}
        first = gathered(reader, 4)
        positions = reader.positions(channel)
    assert positions == {0: first[-1].offset + 1}
    rest = read(bound.channels, channel, 6, positions)
    assert numbers([*first, *rest]) == list(range(1, 11))


@over(REPLAYED)
def test_each_partition_is_read_from_its_own_offset(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("offsets"), 2)
    send(bound.channels, channel, numbered(100))
    entries = read(bound.channels, channel, 100)
    start = [entry for entry in entries if entry.partition == 1][20].offset
    wanted = {(entry.partition, entry.offset) for entry in entries if entry.partition == 0 or entry.offset >= start}
    found = read(bound.channels, channel, len(wanted), {1: start})
    assert {(entry.partition, entry.offset) for entry in found} == wanted


@over(REPLAYED)
def test_the_end_is_a_position_at_which_the_next_record_is_read(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("end"))
    send(bound.channels, channel, numbered(5))
    end = {partition: end for partition, (_, end) in bound.channels.bounds(channel).items()}
    with bound.channels.reader({channel: end}) as reader:
        assert not reader.read(10, 0.1)
        send(bound.channels, channel, numbered(1, first=6))
        assert numbers(gathered(reader, 1)) == [6]


@over(REPLAYED)
def test_a_moment_has_exact_positions(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("since"), 2)
    assert bound.channels.since(channel, 0) == {0: 0, 1: 0}
    send(bound.channels, channel, numbered(60), at_once=4)
    entries = read(bound.channels, channel, 60)
    bounds = bound.channels.bounds(channel)
    moments = sorted({entry.appended for entry in entries})
    assert len(moments) > 1
    for timestamp in [
        0,
        *moments[:5],
        *moments[-5:],
        *(timestamp + 1 for timestamp in moments[-3:]),
        moments[-1] + 3_600_000_000,
    ]:
        assert bound.channels.since(channel, timestamp) == {
            partition: min(
                (entry.offset for entry in entries if entry.partition == partition and entry.appended >= timestamp),
                default=end,
            )
            for partition, (_, end) in bounds.items()
        }


@over(REPLAYED)
def test_only_some_partitions_are_read(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("only"), 3)
    send(bound.channels, channel, numbered(100, keys=20))
    ours = [entry for entry in read(bound.channels, channel, 100) if entry.partition == 1]
    with bound.channels.reader({channel: {0: 3}}, only={(channel, 1)}) as reader:
        assert numbers(gathered(reader, len(ours))) == numbers(ours)
        assert not reader.read(10, 0.1)
        assert set(reader.positions(channel)) == {1}


@over(REPLAYED)
def test_several_channels_are_read_at_once(bound: Bound, fresh: Fresh) -> None:
    one, other = made(bound.channels, fresh("one")), made(bound.channels, fresh("other"), 2)
    send(bound.channels, one, numbered(20))
    send(bound.channels, other, numbered(20))
    with bound.channels.reader({one: {0: 15}, other: {}}) as reader:
        entries = gathered(reader, 25)
        assert reader.positions(one) == {0: 20}
    assert [number(entry) for entry in entries if entry.channel == one] == [16, 17, 18, 19, 20]
    assert sorted(number(entry) for entry in entries if entry.channel == other) == list(range(1, 21))


@over(REPLAYED)
def test_a_reader_notices_partitions_that_are_added(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("grows"))
    send(bound.channels, channel, numbered(10, keys=20))
    with bound.channels.reader({channel: {}}) as reader:
        gathered(reader, 10)
        assert bound.channels.ensure([Topic(channel, 3)]).extended == (channel,)
        send(bound.channels, channel, numbered(40, keys=20, first=11))
        entries = gathered(reader, 40)
        assert set(reader.positions(channel)) == {0, 1, 2}
    assert sorted(numbers(entries)) == list(range(11, 51))
    assert {entry.partition for entry in entries} == {0, 1, 2}


@over(REPLAYED)
def test_bounds_tell_what_is_kept_and_what_comes_next(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("bounds"))
    assert bound.channels.bounds(channel) == {0: (0, 0)}
    send(bound.channels, channel, numbered(3))
    assert bound.channels.bounds(channel) == {0: (0, 3)}


# --- what is not there


@over(REPLAYED)
@pytest.mark.parametrize("start", [{0: 1_000}, {0: 4}, {7: 1}], ids=["far", "by-one", "no-such-partition"])
def test_positions_beyond_the_log_are_an_error_and_no_silent_skip(
    bound: Bound, fresh: Fresh, start: dict[int, int]
) -> None:
    channel = made(bound.channels, fresh("beyond"))
    send(bound.channels, channel, numbered(3))
    with pytest.raises(Unaccounted, match=channel):
        read(bound.channels, channel, 4, start)


ASKED: dict[str, Callable[[Channels, str], object]] = {
    "bounds": lambda channels, name: channels.bounds(name),
    "since": lambda channels, name: channels.since(name, 0),
    "topic": lambda channels, name: channels.topic(name),
    "topic_id": lambda channels, name: channels.topic_id(name),
    "remove": lambda channels, name: channels.remove(name),
    "send": lambda channels, name: send(channels, name, numbered(1)),
    "read": lambda channels, name: read(channels, name, 1),
    "join": lambda channels, name: channels.join("nobody", [name], Noted()).__enter__(),
}


@over(REPLAYED)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_channel_that_is_not_there_is_unavailable(bound: Bound, asked: Callable[[Channels, str], object]) -> None:
    with pytest.raises(Unavailable):
        asked(bound.channels, "nobody-made-this")
    assert "nobody-made-this" not in bound.channels.names()


@over(REPLAYED)
def test_a_reader_takes_no_other_channel_for_its_own(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("another"))
    send(bound.channels, channel, numbered(5))
    with bound.channels.reader({channel: {}}) as reader:
        gathered(reader, 5)
        bound.channels.remove(channel)
        bound.channels.ensure([Topic(channel)])
        send(bound.channels, channel, numbered(10, first=101))

        def until_it_is_told() -> None:
            while True:
                reader.read(100, 0.1)

        with pytest.raises((Unaccounted, Unavailable)):
            until_it_is_told()


# --- what is never taken


@over(REFUSING)
def test_a_record_that_is_never_taken_is_refused_and_the_rest_goes_on(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("refused"))

    async def go() -> None:
        async with bound.channels.sender() as sender:
            await sender.send(channel, numbered(1))
            for records in ([bound.never], [bound.never, bound.never]):
                with pytest.raises(Refused):
                    await sender.send(channel, records)
            await sender.send(channel, numbered(1, first=2))

    with bound.channels.reader({channel: {}}) as reader, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(asyncio.run, go())
        assert numbers(gathered(reader, 2)) == [1, 2]
        sent.result(30)


@over(REPLAYED)
def test_no_partition_waits_until_the_others_have_nothing_more(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("fair"), 2)
    send(bound.channels, channel, [Record(b"", None, b"%d" % n) for n in range(10)])
    keys = {entry.partition: entry.key for entry in read(bound.channels, channel, 10)}
    flood = [Record(os.urandom(1_000), None, keys[0]) for _ in range(4_000)]
    send(bound.channels, channel, [*flood, Record(b"last", None, keys[1])])
    with bound.channels.reader({channel: {}}) as reader:
        found = gathered(reader, 4_011, most=50)
    assert [entry.value for entry in found].index(b"last") < 3_500


# --- topics


def several(fresh: Fresh) -> list[Topic]:
    return [
        Topic(fresh("plain"), 2),
        Topic(fresh("kept"), retention=timedelta(days=2)),
        Topic(fresh("compacted"), compacted=True),
        Topic(fresh("both"), 3, compacted=True, retention=timedelta(hours=5)),
    ]


@over(REPLAYED)
def test_channels_are_made_once(bound: Bound, fresh: Fresh) -> None:
    topics = [
        Topic(fresh("made"), 2),
        Topic(fresh("made"), retention=timedelta(days=2)),
        Topic(fresh("made"), compacted=True),
    ]
    assert bound.channels.ensure(topics) == EnsureResult(made=tuple(topic.name for topic in topics))
    send(bound.channels, topics[0].name, numbered(5))
    ids = [bound.channels.topic_id(topic.name) for topic in topics]
    assert bound.channels.ensure(topics) == EnsureResult()
    assert ids == [bound.channels.topic_id(topic.name) for topic in topics]
    assert len(read(bound.channels, topics[0].name, 5)) == 5


@over(REPLAYED)
def test_a_channel_is_told_as_it_was_declared(bound: Bound, fresh: Fresh) -> None:
    topics = [
        Topic(fresh("told"), 2),
        Topic(fresh("told"), retention=timedelta(days=2)),
        Topic(fresh("told"), compacted=True),
    ]
    topics.append(Topic(fresh("told"), 3, compacted=True, retention=timedelta(hours=5)))
    bound.channels.ensure(topics)
    for topic in topics:
        told = bound.channels.topic(topic.name)
        assert replace(told, config={}, replicas=None) == topic


@over(REPLAYED)
def test_channels_are_told_by_their_names(bound: Bound, fresh: Fresh) -> None:
    second, first = fresh("b.named"), fresh("a_Named")
    bound.channels.ensure([Topic(second), Topic(first)])
    names = bound.channels.names()
    assert {first, second} <= set(names)
    assert names == sorted(names)


@over(REPLAYED)
def test_a_channel_that_is_removed_and_made_again_is_another_one(bound: Bound, fresh: Fresh) -> None:
    channel, beside = made(bound.channels, fresh("removed"), 2), made(bound.channels, fresh("beside"))
    send(bound.channels, channel, numbered(10))
    before = bound.channels.topic_id(channel)
    assert before == bound.channels.topic_id(channel) != bound.channels.topic_id(beside)
    bound.channels.remove(channel)
    assert channel not in bound.channels.names()
    with pytest.raises(Unavailable):
        bound.channels.bounds(channel)
    assert bound.channels.ensure([Topic(channel)]).made == (channel,)
    assert bound.channels.topic_id(channel) != before
    assert bound.channels.bounds(channel) == {0: (0, 0)}
    send(bound.channels, channel, numbered(1))
    assert numbers(read(bound.channels, channel, 1)) == [1]


@over(REPLAYED)
def test_a_channel_gets_more_partitions_and_keeps_what_it_has(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("extended"))
    send(bound.channels, channel, numbered(20, keys=20))
    before = bound.channels.topic_id(channel)
    assert bound.channels.ensure([Topic(channel, 3)]) == EnsureResult(extended=(channel,))
    send(bound.channels, channel, numbered(40, keys=20, first=21))
    entries = read(bound.channels, channel, 60)
    assert sorted(numbers(entries)) == list(range(1, 61))
    assert numbers([entry for entry in entries if entry.partition == 0])[:20] == list(range(1, 21))
    assert {entry.partition for entry in entries} == {0, 1, 2}
    assert bound.channels.topic_id(channel) == before
    assert bound.channels.topic(channel).partitions == 3


@over(REPLAYED)
def test_what_is_declared_otherwise_is_told_and_destroys_nothing(bound: Bound, fresh: Fresh) -> None:
    topic = Topic(fresh("differs"), 3, retention=timedelta(days=2))
    bound.channels.ensure([topic])
    send(bound.channels, topic.name, numbered(20))
    for other in (
        replace(topic, partitions=2),
        replace(topic, retention=timedelta(days=1)),
        replace(topic, compacted=True),
    ):
        brought = bound.channels.ensure([other])
        assert (brought.made, brought.extended) == ((), ())
        assert brought.differences
        assert all(topic.name in sentence and " declared" in sentence for sentence in brought.differences)
    fewer = bound.channels.ensure([replace(topic, partitions=2)]).differences
    assert fewer == (f"channel {topic.name} has 3 partitions, and 2 are declared",)
    assert sorted(numbers(read(bound.channels, topic.name, 20))) == list(range(1, 21))
    assert bound.channels.ensure([topic]) == EnsureResult()


@over(REPLAYED)
def test_what_is_kept_no_longer_is_gone_and_bounds_say_so(bound: Bound, fresh: Fresh) -> None:
    channel = fresh("kept")
    bound.channels.ensure([Topic(channel, retention=bound.keep)])
    send(bound.channels, channel, numbered(10))
    bound.retire(channel)
    sent = 10

    def gone() -> bool:
        nonlocal sent
        send(bound.channels, channel, numbered(1, first=sent + 1))
        sent += 1
        return bound.channels.bounds(channel)[0][0] >= 10

    eventually(gone)
    low, end = bound.channels.bounds(channel)[0]
    assert (10 <= low < end, end) == (True, sent)
    with bound.channels.reader({channel: {}}) as reader:
        assert gathered(reader, 1)[0].offset >= 10
    for position in (0, 5):
        with pytest.raises(Unaccounted, match=channel):
            read(bound.channels, channel, 1, {0: position})


@over(COMPACTING)
def test_compaction_keeps_the_last_record_of_each_key(bound: Bound, fresh: Fresh) -> None:
    channel = fresh("compacted")
    bound.channels.ensure([Topic(channel, compacted=True, config=bound.compaction)])
    send(bound.channels, channel, numbered(50, keys=5))
    bound.mature(channel)
    sent = 50

    def compacted() -> bool:
        nonlocal sent
        sent += 1
        send(bound.channels, channel, [Record(b"%d" % sent, None, b"other")])
        return len([entry for entry in everything(bound.channels, channel) if entry.key != b"other"]) == 5

    eventually(compacted)
    low, end = bound.channels.bounds(channel)[0]
    assert end == sent
    entries = everything(bound.channels, channel)
    last = {entry.key: number(entry) for entry in entries}
    assert last == {b"k1": 46, b"k2": 47, b"k3": 48, b"k4": 49, b"k0": 50, b"other": sent}
    assert [entry.offset for entry in entries if entry.key != b"other"] == [45, 46, 47, 48, 49]
    # A position in a hole is kept: nothing that should be there is missing from it.
    assert number(read(bound.channels, channel, 1, {0: max(low, 20)})[0]) == 46


# --- it survives


@over(DURABLE)
def test_what_is_acknowledged_survives_a_kill_of_the_writer(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("killed"), 2)
    with process("writer.py", bound.channels, channel, "w", "0") as writer:
        told = lines(writer)
        acknowledged = [next(told) for _ in range(200)]
        writer.kill()
        acknowledged += told
    found = sorted(numbers(everything(bound.channels, channel)))
    assert set(acknowledged) <= set(found)
    assert found == list(range(1, len(found) + 1))
    # It goes on: nothing that was left half-way is in the way of the next one.
    send(bound.channels, channel, numbered(5, first=100_000))
    assert sorted(numbers(everything(bound.channels, channel)))[-5:] == list(range(100_000, 100_005))


@over(DURABLE)
def test_several_processes_write_at_once_and_lose_nothing(bound: Bound, fresh: Fresh) -> None:
    channel = made(bound.channels, fresh("processes"))
    with (
        process("writer.py", bound.channels, channel, "a", "150") as one,
        process("writer.py", bound.channels, channel, "b", "150") as other,
    ):
        assert [len(list(lines(writer))) for writer in (one, other)] == [150, 150]
    entries = everything(bound.channels, channel)
    for name in ("a", "b"):
        ours = [entry for entry in entries if (origin := Origin.of(entry.headers)) and origin.sender == name]
        assert numbers(ours) == list(range(1, 151))
    assert [entry.offset for entry in entries] == list(range(300))


@over(KILLABLE)
def test_what_is_acknowledged_survives_a_kill_of_the_server_and_a_reader_goes_on(bound: Bound, fresh: Fresh) -> None:
    channel, acknowledged, enough = made(bound.channels, fresh("server")), list[int](), threading.Event()

    async def write() -> None:
        """Send one by one, and again what was not acknowledged."""
        left = 1
        while not enough.is_set():
            try:
                async with bound.channels.sender() as sender:
                    while not enough.is_set():
                        await sender.send(channel, numbered(1, first=left))
                        acknowledged.append(left)
                        left += 1
            except Unavailable:
                await asyncio.sleep(0.05)

    with ThreadPoolExecutor(1) as pool, bound.channels.reader({channel: {}}) as reader:
        writing = pool.submit(asyncio.run, write())
        try:
            found = gathered(reader, 50)
            eventually(lambda: len(acknowledged) > 100)
            assert bound.restart is not None
            bound.restart()
            before = len(acknowledged)
            eventually(lambda: len(acknowledged) > before + 100)
        finally:
            enough.set()
        writing.result(30)
        end = bound.channels.bounds(channel)[0][1]

        def all_read() -> bool:
            with suppress(Unavailable):
                found.extend(reader.read(100, 1))
            return reader.positions(channel)[0] >= end

        eventually(all_read)
    entries = everything(bound.channels, channel)
    assert sorted(set(numbers(entries))) == acknowledged
    assert numbers(entries) == sorted(numbers(entries))
    assert found == entries
    assert entries[-1].offset + 1 == end
