"""Channels on Kafka. The settings are those that lose nothing; the defaults of the client would."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pydantic import Field

from penstock.clock import Micros
from penstock.contracts import Entry, Positions
from penstock.errors import Misconfigured, Unaccounted, Unavailable
from penstock.record import Record
from penstock.settings import Section

Answer = TypeVar("Answer")


class KafkaSettings(Section):
    """`[kafka]` of penstock.toml."""

    servers: str = Field(
        "local", description="host:port, more of them with commas; local: a broker that is started here"
    )
    replicas: int | None = Field(
        None, ge=1, description="copies of each record; empty: three, or as many as there are brokers"
    )
    compression: Literal["none", "lz4", "snappy", "zstd", "gzip"] = "lz4"
    conf: dict[str, str] = Field(default_factory=dict, description="settings of the client itself, by their own names")


@dataclass(frozen=True)
class Topic:
    """What a channel has to be on Kafka."""

    name: str
    partitions: int = 1
    replicas: int | None = None
    compacted: bool = False
    keep: timedelta | None = None
    config: Mapping[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, str]:
        """Kafka's own words for it."""
        policy = {"cleanup.policy": "delete"}
        if self.compacted:
            policy = {"cleanup.policy": "compact,delete" if self.keep else "compact", "segment.ms": "3600000"}
        forever = "-1"
        kept = {"retention.ms": str(int(self.keep.total_seconds() * 1000)) if self.keep else forever}
        return {**policy, **kept, "message.timestamp.type": "CreateTime", **self.config}


class Kafka:
    """The binder: names of channels become topics of one cluster."""

    def __init__(self, servers: str, settings: KafkaSettings | None = None) -> None:
        self.servers = servers
        self._settings = settings or KafkaSettings()
        # One client each for all questions of a kind: they are asked often, and a connection costs more.
        self._asking = threading.Lock()
        self._asker: Consumer | None = None
        self._administrator: AdminClient | None = None
        self._common: dict[str, Any] = {
            "bootstrap.servers": servers,
            "client.id": "penstock",
            "logger": _quiet,
            # A broker that restarts is tried again soon, not after the default of up to ten seconds.
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.interval.ms": 10_000,
            **self._settings.conf,
        }

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["KafkaSender"]:
        sender = KafkaSender(self._producer())
        try:
            yield sender
        finally:
            await asyncio.to_thread(sender.close)

    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        """For what need not be durable one by one, such as figures: `post(channel, key, value)` and go on."""
        producer = self._producer()

        def post(channel: str, key: bytes, value: bytes) -> None:
            with suppress(BufferError):  # The next figures replace these.
                producer.produce(channel, value, key)
            producer.poll(0)

        try:
            yield post
        finally:
            producer.flush(2)

    @contextmanager
    def reader(self, start: Mapping[str, Positions], linger: float = 0.0) -> Iterator["KafkaReader"]:
        consumer = Consumer(
            {
                **self._common,
                "group.id": "penstock",  # The client wants one; positions are ours, and nothing is committed.
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                # The end of a partition is told, so that a reader gets over marks of transactions that lie there.
                "enable.partition.eof": True,
                # The broker answers at the first byte, or gathers up to half a megabyte while entries may linger.
                "fetch.wait.max.ms": int(linger * 1000) or 500,
                "fetch.min.bytes": 1 << 19 if linger else 1,
                "fetch.queue.backoff.ms": 5,
                "queued.max.messages.kbytes": 16_384,
            }
        )
        try:
            yield KafkaReader(consumer, {name: self._from(name, positions) for name, positions in start.items()})
        finally:
            consumer.close()

    def _from(self, channel: str, positions: Positions) -> dict[int, int]:
        """A start for each partition. One that has no position, or lies at zero, begins where the log now begins."""
        return {partition: positions.get(partition) or low for partition, (low, _) in self.bounds(channel).items()}

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with self._asking, _answering(self.servers):
            asker = self._ask()
            return _patiently(lambda: self._bounds(asker, channel))

    def _ask(self) -> Consumer:
        if self._asker is None:
            self._asker = Consumer({**self._common, "group.id": "penstock"})
        return self._asker

    def _bounds(self, asker: Consumer, channel: str) -> Mapping[int, tuple[int, int]]:
        return {
            partition: asker.get_watermark_offsets(TopicPartition(channel, partition), timeout=10)
            for partition in _partitions(asker.list_topics(channel, timeout=10), channel)
        }

    def since(self, channel: str, moment: Micros) -> Positions:
        """Where the entries begin that were appended at this moment or later."""
        ends = self.bounds(channel)
        with self._asking, _answering(self.servers):
            asker, asked = self._ask(), [TopicPartition(channel, partition, moment // 1_000) for partition in ends]
            found = _patiently(lambda: asker.offsets_for_times(asked, timeout=10))
        # What has no entry that late is read from its end.
        return {at.partition: at.offset if at.offset >= 0 else ends[at.partition][1] for at in found}

    def mirror(self, group: str, positions: Mapping[str, Positions]) -> None:
        """Write positions down as those of a consumer group, for Kafka's own tools to show; nobody reads by them."""
        told = [
            TopicPartition(channel, partition, offset)
            for channel, offsets in positions.items()
            for partition, offset in offsets.items()
        ]
        with _answering(self.servers):
            asked = [ConsumerGroupTopicPartitions(group, told)]
            for result in self._admin().alter_consumer_group_offsets(asked).values():
                for at in result.result(10).topic_partitions:
                    if at.error is not None:
                        raise KafkaException(at.error)

    def topic_id(self, channel: str) -> str:
        """What tells this topic from another one that had its name before."""
        with _answering(self.servers):
            return str(self._admin().describe_topics(TopicCollection([channel]))[channel].result(10).topic_id)

    def names(self) -> list[str]:
        """The channels that are there, by name; not the topics that Kafka keeps for itself."""
        with _answering(self.servers):
            return sorted(name for name in self._admin().list_topics(timeout=10).topics if not name.startswith("__"))

    def brokers(self, timeout: float = 10) -> int:
        with _answering(self.servers):
            return len(self._admin().list_topics(timeout=timeout).brokers)

    def ensure(self, topics: Sequence[Topic]) -> list[str]:
        """Bring the topics about; the names of those that are new. What is there already is never made smaller."""
        admin = self._admin()
        with _answering(self.servers):
            cluster = admin.list_topics(timeout=10)
        brokers = len(cluster.brokers)
        wanted = []
        for topic in topics:
            replicas = topic.replicas or self._settings.replicas or min(3, brokers)
            if replicas > brokers:
                raise Misconfigured(
                    f"channel {topic.name}",
                    f"{replicas} replicas are asked for, and there {_are(brokers)}",
                    f"ask for at most {brokers}, or start more brokers",
                )
            if (there := cluster.topics.get(topic.name)) is None:
                in_sync = {"min.insync.replicas": str(min(2, replicas))}
                wanted.append(NewTopic(topic.name, topic.partitions, replicas, config={**in_sync, **topic.settings()}))
            elif len(there.partitions) != topic.partitions:
                raise Misconfigured(
                    f"channel {topic.name}",
                    f"{topic.partitions} partitions are asked for, and the topic has {len(there.partitions)}",
                    f"ask for {len(there.partitions)}: keys would move to other partitions otherwise",
                )
        if wanted:
            for name, result in admin.create_topics(wanted, operation_timeout=30).items():
                with _answering(self.servers):
                    _created(name, result)
        return [topic.topic for topic in wanted]

    def _admin(self) -> AdminClient:
        with self._asking:
            if self._administrator is None:
                self._administrator = AdminClient(self._common)
            return self._administrator

    def _producer(self) -> Producer:
        return Producer(
            {
                **self._common,
                "acks": "all",
                "enable.idempotence": True,
                # A record that timed out would leave a hole in the middle of a sequence.
                "message.timeout.ms": 0,
                "linger.ms": 3,
                "compression.type": self._settings.compression,
                "queue.buffering.max.kbytes": 65_536,
            }
        )


class KafkaSender:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._order = asyncio.Lock()
        self._closing = threading.Event()
        self._poll = threading.Thread(target=self._deliver, name="kafka-sender", daemon=True)
        self._poll.start()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        left = len(records)

        def delivered(error: KafkaError | None, _: Message) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                loop.call_soon_threadsafe(_fail, done, Unavailable("Kafka", error.str()))
            elif left == 0:
                loop.call_soon_threadsafe(_succeed, done)

        # Two calls that waited for room in the queue would otherwise overtake each other.
        async with self._order:
            for record in records:
                await self._produce(channel, record, delivered)
        await done

    async def _produce(
        self, channel: str, record: Record, delivered: Callable[[KafkaError | None, Message], None]
    ) -> None:
        while True:
            try:
                self._producer.produce(
                    channel, record.value, record.key, on_delivery=delivered, headers=list(record.headers())
                )
            except BufferError:
                await asyncio.sleep(0.01)
            except KafkaException as error:
                raise Unavailable("Kafka", str(error)) from error
            else:
                return

    def _deliver(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(0.1)

    def close(self) -> None:
        self._producer.flush(5)
        self._closing.set()
        self._poll.join()


class KafkaReader:
    def __init__(self, consumer: Consumer, start: Mapping[str, dict[int, int]]) -> None:
        self._consumer = consumer
        self._next = {name: dict(positions) for name, positions in start.items()}
        self._at_end: set[tuple[str, int]] = set()
        self._ended: dict[tuple[str, int], float] = {}
        consumer.assign(
            [
                TopicPartition(name, partition, offset if offset > 0 else OFFSET_BEGINNING)
                for name, positions in self._next.items()
                for partition, offset in positions.items()
            ]
        )

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        # `consume` waits until it has all that was asked for; so wait for the first alone, then take what is there.
        until = time.monotonic() + wait
        while (first := self._consumer.poll(max(0.0, until - time.monotonic()))) is not None:
            if (entry := self._entry(first)) is not None:
                rest = self._consumer.consume(most - 1, 0) if most > 1 else ()
                return [entry, *(more for message in rest if (more := self._entry(message)) is not None)]
        return []

    def _entry(self, message: Message) -> Entry | None:
        if (error := message.error()) is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise self._passed_over(message)
            if error.code() == KafkaError._PARTITION_EOF:
                self._reached_end(message)
                return None
            if error.retriable() or error.code() in _PASSING:
                return None
            raise Unavailable("Kafka", error.str())
        channel, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
        self._next[channel][partition] = offset + 1
        self._at_end.discard((channel, partition))
        _, milliseconds = message.timestamp()
        return Entry(
            channel,
            partition,
            offset,
            milliseconds * 1000,
            _bytes(message.key()),
            _bytes(message.value()),
            tuple((name, value or b"") for name, value in _pairs(message.headers())),
        )

    def positions(self, channel: str) -> Positions:
        return dict(self._next[channel])

    def age(self) -> float:
        ages = [
            0.0 if place in self._at_end else time.monotonic() - self._ended.get(place, -math.inf)
            for place in ((name, partition) for name, positions in self._next.items() for partition in positions)
        ]
        return max(ages, default=0.0)

    def _reached_end(self, message: Message) -> None:
        channel, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
        self._next[channel][partition] = max(offset, self._next[channel][partition])
        self._at_end.add((channel, partition))
        self._ended[channel, partition] = time.monotonic()

    def _passed_over(self, message: Message) -> Unaccounted:
        channel, partition = message.topic() or "", message.partition() or 0
        stands = self._next.get(channel, {}).get(partition)
        why = (
            f"partition {partition} is to be read from {stands}, and does not hold that: its retention was quicker "
            "than this reader, or it is another topic; to begin anew, remove the store or ledger that reads it"
        )
        return Unaccounted(channel, (), why)


# What brokers answer until a new topic, or a partition that has lost its leader, has one.
_UNSETTLED = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}

# Faults that the client gets over by itself.
_PASSING = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._PARTITION_EOF}


@contextmanager
def _answering(servers: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise Unavailable(f"Kafka at {servers}", error.args[0].str()) from error
    except TimeoutError as error:
        raise Unavailable(f"Kafka at {servers}", "it did not answer in time") from error


def _patiently(ask: Callable[[], Answer], patience: float = 10) -> Answer:
    """Ask again while brokers sort out among themselves who leads, as after the birth of a topic."""
    until = time.monotonic() + patience
    while True:
        try:
            return ask()
        except KafkaException as error:
            passing = error.args[0].retriable() or error.args[0].code() in _UNSETTLED
            if not passing or time.monotonic() > until:
                raise
            time.sleep(0.05)


def _partitions(cluster: Any, channel: str) -> list[int]:
    topic = cluster.topics[channel]
    if topic.error is not None:
        raise KafkaException(topic.error)
    return sorted(topic.partitions)


def _created(name: str, result: Any) -> None:
    try:
        result.result()
    except KafkaException as error:
        # Somebody else was quicker; it has the same description.
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def _are(brokers: int) -> str:
    return f"are {brokers} brokers" if brokers != 1 else "is 1 broker"


def _pairs(headers: Any) -> list[tuple[str, bytes | None]]:
    return headers or []


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _succeed(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: "asyncio.Future[None]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class _Quiet:
    """What librdkafka would write to standard error: it reports each refused connection while a broker starts."""

    def log(self, *_: object) -> None: ...


_quiet = _Quiet()
