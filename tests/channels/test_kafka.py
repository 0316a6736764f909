"""What is Kafka's own, on a real broker. What all binders promise is in test_contract.py."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.channels.servers import KafkaServer
from tests.channels.traffic import Noted, carried, eventually, gathered, numbered, numbers, send

from penstock.audit.lag import OpenTransactions
from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.channels.kafka.client import checked
from penstock.channels.kafka.consumer import CONF, KafkaReader, Polled, entry_of
from penstock.channels.kafka.settings import KafkaSettings
from penstock.channels.kafka.topics import settings_of
from penstock.core.contracts import EnsureResult, Entry, Topic
from penstock.core.errors import Misconfigured, Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record
from penstock.core.scan import scan

Fresh = Callable[[str], str]


# --- addresses


def test_an_address_tells_the_brokers() -> None:
    settings = KafkaSettings(replicas=2)
    kafka = bind("kafka://one:9092,two:9092/", settings)
    assert isinstance(kafka, Kafka)
    assert (kafka.servers, kafka.where) == ("one:9092,two:9092", "kafka://one:9092,two:9092")


def test_an_address_without_a_broker_is_refused() -> None:
    with pytest.raises(Misconfigured, match="kafka://host:port"):
        bind("kafka://")


def test_an_administrator_that_timed_out_is_replaced() -> None:
    """Seen in a loader, an hour after a broker was paused: its client never found the controller again."""
    away = Kafka("127.0.0.1:1")
    administrator = away._admin()
    with pytest.raises(Unavailable, match="waiting for controller"):
        away.topic_id("things")
    assert away._admin() is not administrator


def test_a_broker_that_is_away_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"Kafka at 127\.0\.0\.1:1 is unavailable"):
        Kafka("127.0.0.1:1").brokers(timeout=0.5)


def test_settings_of_the_client_reach_all_clients(kafka: Kafka, fresh: Fresh) -> None:
    own = Kafka(kafka.servers, KafkaSettings(conf={"max.poll.interval.ms": "3000", "client.id": "mine"}))
    channel = fresh("conf")
    own.ensure([Topic(channel)])
    assert numbers(carried(own, channel, numbered(3))) == [1, 2, 3]
    with own.join(fresh("group"), [channel], Noted()) as member:
        found: list[Entry] = []
        while len(found) < 3:
            found += member.read(10, 1)


CALLS: dict[str, Callable[[Kafka], object]] = {
    "bounds": lambda kafka: kafka.bounds("a"),
    "names": lambda kafka: kafka.names(),
    "sender": lambda kafka: send(kafka, "a", numbered(1)),
    "poster": lambda kafka: kafka.poster().__enter__(),
    "reader": lambda kafka: kafka.reader({"a": {}}).__enter__(),
    "join": lambda kafka: kafka.join("g", ["a"], Noted()).__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("conf", [{"no.such": "x"}, {"socket.timeout.ms": "soon"}], ids=["name", "value"])
def test_a_wrong_setting_of_the_client_is_told_with_its_place(
    call: Callable[[Kafka], object], conf: dict[str, str]
) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[kafka\] conf: .*{next(iter(conf))}"):
        call(Kafka("127.0.0.1:1", KafkaSettings(conf=conf)))


def test_an_answer_with_an_error_is_one() -> None:
    fine = TopicPartition("a", 0, 5)
    assert checked([fine]) == [fine]

    class Failed:
        error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)

    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        checked([fine, cast("TopicPartition", Failed())])


# --- how large a record may be


def test_how_large_a_record_may_be_is_for_its_topic_to_say(kafka: Kafka, fresh: Fresh) -> None:
    large, usual = fresh("large"), fresh("usual")
    kafka.ensure([Topic(large, config={"max.message.bytes": "5000000"}), Topic(usual)])
    records = [Record(os.urandom(3_000_000)) for _ in range(4)]
    assert [entry.value for entry in carried(kafka, large, records)] == [record.value for record in records]
    with kafka.join(fresh("group"), [large], Noted()) as member:
        assert [entry.value for entry in gathered(member, 4)] == [record.value for record in records]
    for channel, size in ((usual, 3_000_000), (large, 6_000_000), (large, 70_000_000)):
        with pytest.raises(Refused, match=channel):
            send(kafka, channel, [Record(os.urandom(size))])


def test_a_topic_that_takes_little_takes_many_small_records(kafka: Kafka, fresh: Fresh) -> None:
    """They would be more than it takes, in one batch; which is refused as a whole."""
    narrow, beside = fresh("narrow"), fresh("beside")
    kafka.ensure([Topic(narrow, config={"max.message.bytes": "2000"}), Topic(beside)])
    records = [Record(os.urandom(300), Origin("s", 1, n, n)) for n in range(500)]

    async def go() -> None:
        async with kafka.sender() as sender:
            await asyncio.gather(sender.send(beside, records), *(sender.send(narrow, [record]) for record in records))
            with pytest.raises(Refused, match=narrow):
                await sender.send(narrow, [Record(os.urandom(3_000))])
            await sender.send(narrow, records)

    asyncio.run(go())
    for channel, sent in ((narrow, 2 * records), (beside, records)):
        with kafka.reader({channel: {}}) as reader:
            assert [entry.value for entry in gathered(reader, len(sent))] == [record.value for record in sent]


def test_a_header_whose_name_is_no_text_is_refused(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("headers")
    kafka.ensure([Topic(channel)])
    with pytest.raises(Refused, match="header"):
        send(kafka, channel, [Record(b"", extra=(("\ud800", b""),))])


def test_a_figure_that_is_too_large_is_let_go(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("figures")
    kafka.ensure([Topic(channel)])
    with kafka.poster() as post:
        post(channel, b"k", bytes(70_000_000))
        post(channel, b"k", b"1")
    with kafka.reader({channel: {}}) as reader:
        assert numbers(gathered(reader, 1)) == [1]


# --- topics


def test_more_replicas_than_brokers_is_said_with_their_number(kafka: Kafka, fresh: Fresh) -> None:
    with pytest.raises(Misconfigured, match=r"3 replicas .* 1 broker"):
        kafka.ensure([Topic(fresh("replicas"), replicas=3)])


def test_one_topic_that_cannot_be_leaves_all_unmade(kafka: Kafka, fresh: Fresh) -> None:
    fine = fresh("fine")
    with pytest.raises(Misconfigured):
        kafka.ensure([Topic(fine), Topic(fresh("replicas"), replicas=3)])
    assert fine not in kafka.names()


def test_what_kafka_keeps_for_itself_is_no_channel(kafka: Kafka, fresh: Fresh) -> None:
    channel, group = fresh("named"), fresh("group")
    kafka.ensure([Topic(channel)])
    kafka.move(group, {channel: {0: 0}})  # From then on, Kafka has a topic for what groups commit.
    assert channel in kafka.names()
    assert not [name for name in kafka.names() if name.startswith("__")]


def test_a_channel_that_is_not_there_is_told_in_words(kafka: Kafka) -> None:
    with pytest.raises(Unavailable, match="Unknown topic"):
        kafka.bounds("nobody-made-this")


def test_a_name_that_kafka_does_not_take_is_told(kafka: Kafka) -> None:
    with pytest.raises(Misconfigured, match="Topic name is invalid"):
        kafka.ensure([Topic("no spaces please")])


def test_differences_are_told_in_the_words_of_kafka(kafka: Kafka, fresh: Fresh) -> None:
    topic = Topic(fresh("differs"), 2, replicas=1, retention=timedelta(days=2), config={"max.message.bytes": "2000000"})
    assert kafka.ensure([topic]) == EnsureResult(made=(topic.name,))
    assert kafka.ensure([topic]) == EnsureResult()
    other = replace(topic, partitions=1, retention=timedelta(days=1), config={"max.message.bytes": "1000000"})
    assert kafka.ensure([other]).differences == (
        f"channel {topic.name} has 2 partitions, and 1 are declared",
        f"channel {topic.name} has retention.ms=172800000, and 86400000 is declared",
        f"channel {topic.name} has max.message.bytes=2000000, and 1000000 is declared",
    )
    assert kafka.topic(topic.name).config["max.message.bytes"] == "2000000"
    # A setting that was never declared has its default, and is told when another one is.
    (default,) = kafka.ensure([replace(topic, config={"segment.bytes": "1048576"})]).differences
    assert default.startswith(f"channel {topic.name} has segment.bytes=")


def test_a_topic_says_how_it_is_kept() -> None:
    kept = settings_of(Topic("t", retention=timedelta(hours=1)))
    assert (kept["cleanup.policy"], kept["retention.ms"]) == ("delete", "3600000")
    assert settings_of(Topic("t"))["retention.ms"] == "-1"
    assert settings_of(Topic("t", compacted=True))["cleanup.policy"] == "compact"
    both = settings_of(Topic("t", compacted=True, retention=timedelta(hours=1), config={"segment.ms": "1"}))
    assert (both["cleanup.policy"], both["segment.ms"]) == ("compact,delete", "1")


# --- reading


def test_positions_that_are_gone_stay_an_error(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("gone")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(3))
    with kafka.reader({channel: {0: 10}}) as reader:
        for _ in range(2):
            with pytest.raises(Unaccounted, match="partition 0 has no offset 10"):
                gathered(reader, 1)


def test_a_beginning_that_moves_while_a_reader_opens_is_followed(kafka_server: KafkaServer, fresh: Fresh) -> None:
    kafka, channel = Kafka(kafka_server.servers), fresh("moves")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(3))
    seen = kafka.bounds(channel)
    kafka_server.retire(channel)
    send(kafka, channel, numbered(2, first=4))
    consumer = Consumer({"bootstrap.servers": kafka.servers, "group.id": "test", **CONF})
    try:
        reader = KafkaReader(consumer, {channel: {}}, {channel: seen}, True, lambda *_: {channel: ("", 1)})
        assert numbers(gathered(reader, 2)) == [4, 5]
    finally:
        consumer.close()


def test_the_age_of_a_reader_at_the_end_counts_from_when_it_was_last_heard(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("age")
    kafka.ensure([Topic(channel)])
    send(kafka, channel, numbered(3))
    with kafka.reader({channel: {}}) as reader:
        gathered(reader, 3)

        def at_end() -> bool:
            reader.read(10, 0.1)
            return reader.age() < 0.05

        eventually(at_end)
        eventually(lambda: reader.age() > 0.2)
        reader.read(10, 0)
        assert reader.age() < 0.2


def test_who_reads_none_keeps_its_partitions_and_gathers_little(kafka: Kafka, fresh: Fresh) -> None:
    """For longer than the patience of Kafka; and what was not read then comes afterwards, whole and in order."""
    own = Kafka(kafka.servers, KafkaSettings(conf={"max.poll.interval.ms": "1000"}))
    channel, listener = fresh("none"), Noted()
    own.ensure([Topic(channel, 2)])
    send(own, channel, numbered(500))
    with own.join(fresh("group"), [channel], listener) as member:
        found = gathered(member, 10, most=10)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert not member.read(0, 0.002)
        assert len(member._polled._gathered) <= 20
        send(own, channel, numbered(100, first=501))
        found += gathered(member, 590)
        member.commit()
    assert [word for word, _ in listener.told] == ["given", "taken"]
    for partition in (0, 1):
        ours = [entry for entry in found if entry.partition == partition]
        assert [entry.offset for entry in ours] == list(range(len(ours)))
    assert sorted(numbers(found)) == list(range(1, 601))


class Scripted:
    """A client that gives what is written down, and does something between the first message and the rest."""

    def __init__(self, *messages: Message, between: Callable[[], None] = lambda: None) -> None:
        self._messages, self._between = list(messages), between
        self._paused = False

    def poll(self, _wait: float) -> Message | None:
        return self._messages.pop(0) if self._messages and not self._paused else None

    def consume(self, most: int, _wait: float) -> list[Message]:
        self._between()
        rest, self._messages = self._messages[:most], self._messages[most:]
        return rest

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("t", 0)]

    def pause(self, _: list[TopicPartition]) -> None:
        self._paused = True

    def resume(self, _: list[TopicPartition]) -> None:
        self._paused = False


def message(partition: int, value: int) -> Message:
    return Message(topic="t", partition=partition, offset=value, value=b"%d" % value, timestamp=(1, 1))


def test_what_was_gathered_of_a_partition_that_goes_away_is_not_handed_over() -> None:
    script = Scripted(message(0, 1), message(1, 2), between=lambda: polled.drop({("t", 0)}))
    polled = Polled(cast(Consumer, script), entry_of)
    assert numbers(polled.read(10, 0)) == [2]


def test_to_hear_the_client_again_and_again_gathers_one_message() -> None:
    script = Scripted(*(message(0, n) for n in range(100)))
    polled = Polled(cast(Consumer, script), entry_of)
    for _ in range(50):
        assert polled.read(0, 0) == []
    assert script.poll(0) is None
    assert numbers([*polled.read(60, 0), *polled.read(60, 0)]) == list(range(100))


def test_a_fault_comes_after_what_came_before_it() -> None:
    def entry(message: Message) -> Entry:
        if message.value() == b"2":
            raise Unavailable("Kafka", "on purpose")
        return entry_of(message)

    polled = Polled(cast(Consumer, Scripted(*(message(0, n) for n in range(1, 4)))), entry)
    assert numbers(polled.read(10, 0)) == [1, 3]
    with pytest.raises(Unavailable, match="on purpose"):
        polled.read(10, 0)
    assert polled.read(10, 0) == []


def test_what_is_lost_is_told_at_every_read() -> None:
    def entry(_: Message) -> Entry:
        raise Unaccounted("t", (), "gone")

    polled = Polled(cast(Consumer, Scripted(message(0, 1))), entry)
    for _ in range(3):
        with pytest.raises(Unaccounted, match="gone"):
            polled.read(10, 0)


def test_an_open_transaction_hides_what_comes_after_it_until_it_ends(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("hidden")
    kafka.ensure([Topic(channel, partitions=2)])
    assert kafka.open_transactions([channel]) == {}
    other = Producer({"bootstrap.servers": kafka.servers, "transactional.id": channel})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(channel, b"open", partition=0)
    other.flush(30)
    own = Producer({"bootstrap.servers": kafka.servers, "acks": "all"})
    own.produce(channel, b"hidden", partition=0)
    assert own.flush(30) == 0  # It is acknowledged.
    assert kafka.bounds(channel) == {0: (0, 0), 1: (0, 0)}
    assert kafka.open_transactions([channel]) == {(channel, 0): (0, 2)}
    transactions = OpenTransactions(partial(kafka.open_transactions, [channel]), 0.5)
    (doubt,) = transactions.wait(1.0)
    assert (doubt.kind, doubt.subject) == ("channel", channel)
    assert doubt.text.startswith(f"{channel}, partition 0: a transaction is open since offset 0, so 2 entries")
    other.abort_transaction(30)
    assert transactions.wait(30) == []
    assert [entry.value for entry in scan(kafka, channel)] == [b"hidden"]
