"""Channels on Kafka, with settings that lose no record; the defaults of the client would."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.channels.common import beyond
from penstock.channels.kafka import topics
from penstock.channels.kafka.client import checked, common, configuring, retry, translating
from penstock.channels.kafka.consumer import CONF, KafkaMember, KafkaReader, describe_group, group_names, move_offsets
from penstock.channels.kafka.sender import BATCH, KafkaSender
from penstock.channels.kafka.settings import KafkaSettings
from penstock.channels.leases import membership
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, EnsureResult, Group, Offsets, Promise, RebalanceListener, Topic
from penstock.core.errors import Misconfigured

Answer = TypeVar("Answer")

LARGEST = 60_000_000
"""Bytes: the topic limits the size of a record, but it also has to fit into the queue of the client."""
_SERVER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def at(address: str, settings: KafkaSettings) -> "Kafka":
    """`kafka://host:port,host:port`."""
    servers = address.removeprefix("kafka://").strip("/")
    if "@" in servers:
        fix = "write sasl.username and sasl.password in [kafka] conf"
        raise Misconfigured(
            "channels at kafka://…@…", "an address must not contain a password: it is shown in logs and on pages", fix
        )
    if not servers:
        raise Misconfigured("channels at kafka://", "it has no broker", "write kafka://host:port")
    for server in servers.split(","):
        if not _SERVER.fullmatch(server):
            raise Misconfigured(
                f"channels at {address}", f'"{server}" is not a broker', "write kafka://host:port,host:port"
            )
    return Kafka(servers, settings)


class Kafka:
    """Channels as topics of one cluster."""

    promise = Promise(
        durable=True,
        replay=True,
        description="a record is acknowledged once all in-sync replicas have it, at least in memory",
    )

    def __init__(self, servers: str, settings: KafkaSettings | None = None) -> None:
        self.servers, self.where = servers, f"kafka://{servers}"
        self._settings = settings or KafkaSettings()
        # One client for all queries, because a connection is expensive.
        self._lock = threading.Lock()
        self._querying: Consumer | None = None
        self._uncommitted: Consumer | None = None
        self._administrator: AdminClient | None = None
        self._common: dict[str, Any] = common(servers, self._settings)

    def __reduce__(self) -> tuple[type["Kafka"], tuple[str, KafkaSettings]]:
        return Kafka, (self.servers, self._settings)

    # --- topics

    def ensure(self, topics_: Sequence[Topic]) -> EnsureResult:
        return self._ask(lambda admin: topics.ensure(admin, topics_, self._settings.replicas))

    def names(self) -> list[str]:
        """The names of the channels, without Kafka's internal topics."""
        names = self._ask(lambda admin: admin.list_topics(timeout=10).topics)
        return sorted(name for name in names if not name.startswith("__"))

    def topic(self, channel: str) -> Topic:
        return self._ask(lambda admin: topics.describe(admin, channel))

    def topic_id(self, channel: str) -> str:
        return self._ask(lambda admin: topics.topic_id(admin, channel))

    def remove(self, channel: str) -> None:
        self._ask(lambda admin: topics.remove(admin, channel))

    def limit(self, channel: str) -> int | None:
        """The largest record in bytes, with headers and framing; None if we are not allowed to read it."""
        limit = self._ask(lambda admin: topics.limit(admin, channel))
        return None if limit is None else min(limit, LARGEST)

    def alter(self, channel: str, settings: Mapping[str, str]) -> None:
        """Change settings of a channel, by their names in Kafka."""
        self._ask(lambda admin: topics.alter(admin, channel, settings))

    def copies(self, channel: str) -> Mapping[int, topics.Copies]:
        """The brokers of each partition."""
        return self._ask(lambda admin: topics.copies(admin, channel))

    def brokers(self, timeout: float = 10) -> int:
        return self._ask(lambda admin: len(admin.list_topics(timeout=timeout).brokers))

    # --- in

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[KafkaSender]:
        sender = KafkaSender(self._producer, self.limit)
        try:
            yield sender
        finally:
            await asyncio.to_thread(sender.close)

    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        producer = self._producer()

        def post(channel: str, key: bytes, value: bytes) -> None:
            with suppress(BufferError, KafkaException):  # The next figures replace these.
                producer.produce(channel, value, key)
            producer.poll(0)

        try:
            yield post
        finally:
            producer.flush(2)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator[KafkaReader]:
        consumer = self._consumer(
            {
                "group.id": "penstock",  # The client requires one; the offsets are our own.
                # Reports the end of a partition, so that a reader passes transaction markers there.
                "enable.partition.eof": True,
            }
        )
        try:
            bounds = {name: self._wanted(name, positions, only) for name, positions in start.items()}
            with translating(self.servers):
                reader = KafkaReader(consumer, start, bounds, only is None, self._generations)
            yield reader
        finally:
            consumer.close()

    def _wanted(
        self, channel: str, positions: Offsets, only: Collection[ChannelPartition] | None
    ) -> Mapping[int, tuple[int, int]]:
        """The bounds of the partitions to read; Unaccounted if `positions` has a partition that does not exist."""
        bounds = self.bounds(channel)
        for partition, stands in positions.items():
            if stands and partition not in bounds and (only is None or (channel, partition) in only):
                raise beyond(channel, partition, stands, 0)
        return {partition: found for partition, found in bounds.items() if only is None or (channel, partition) in only}

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with self._lock, translating(self.servers):
            querying = self._query_consumer()
            return retry(lambda: self._bounds(querying, channel))

    def open_transactions(self, channels: Iterable[str]) -> Mapping[ChannelPartition, tuple[int, int]]:
        """The partitions with an open transaction: the first offset that it hides from readers, and the end."""
        with self._lock, translating(self.servers):
            if self._uncommitted is None:
                self._uncommitted = self._consumer({"group.id": "penstock", "isolation.level": "read_uncommitted"})
            whole, readable = self._uncommitted, self._query_consumer()
            found = {}
            for channel in channels:
                # First the ends: what is appended meanwhile must not look hidden.
                ends = retry(partial(self._bounds, whole, channel))
                for partition, (_, stable) in retry(partial(self._bounds, readable, channel)).items():
                    if partition in ends and stable < ends[partition][1]:
                        found[channel, partition] = stable, ends[partition][1]
        return found

    def _bounds(self, querying: Consumer, channel: str) -> Mapping[int, tuple[int, int]]:
        topic = querying.list_topics(channel, timeout=10).topics[channel]
        if topic.error is not None:
            raise KafkaException(topic.error)
        return {
            partition: querying.get_watermark_offsets(TopicPartition(channel, partition), timeout=10)
            for partition in sorted(topic.partitions)
        }

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        ends = self.bounds(channel)
        begin = -(-timestamp // 1_000)  # Kafka's times are milliseconds: round up.
        with self._lock, translating(self.servers):
            querying = self._query_consumer()
            requested = [TopicPartition(channel, partition, begin) for partition in ends]
            found = retry(lambda: checked(querying.offsets_for_times(requested, timeout=10)))
        # A partition without such an entry is read from its end.
        return {at.partition: at.offset if at.offset >= 0 else ends[at.partition][1] for at in found}

    # --- groups

    @contextmanager
    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[KafkaMember]:
        for channel in channels:
            self.bounds(channel)  # A subscription to a missing topic would wait without an error.
        consumer = self._consumer({"group.id": group, "enable.partition.eof": True})
        try:
            with translating(self.servers):
                member = KafkaMember(consumer, group, channels, listener, beginning)
        except BaseException:
            consumer.close()
            raise
        with membership(member.leave, listener):
            yield member

    def groups(self) -> list[str]:
        return self._ask(group_names)

    def group(self, name: str) -> Group:
        return self._ask(lambda admin: describe_group(admin, name))

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self._ask(lambda admin: move_offsets(admin, group, positions))

    # --- clients

    def _generations(self, channels: Sequence[str], within: float) -> Mapping[str, tuple[str, int]]:
        if within < topics.ANSWER:
            # A short timeout does not mean that the client is broken.
            return topics.generations(self._admin(), channels, within)
        with self._administering() as admin:
            return topics.generations(admin, channels, within)

    def _query_consumer(self) -> Consumer:
        if self._querying is None:
            self._querying = self._consumer({"group.id": "penstock"})
        return self._querying

    def _admin(self) -> AdminClient:
        with self._lock:
            if self._administrator is None:
                with configuring():
                    self._administrator = AdminClient(self._common)
            return self._administrator

    def _ask(self, call: Callable[[AdminClient], Answer]) -> Answer:
        with translating(self.servers), self._administering() as admin:
            return call(admin)

    @contextmanager
    def _administering(self) -> Iterator[AdminClient]:
        """The admin client. It is replaced after a timeout: after an outage it may never find the controller again."""
        admin = self._admin()
        try:
            yield admin
        except KafkaException as error:
            if error.args[0].code() == KafkaError._TIMED_OUT:
                with self._lock:
                    if self._administrator is admin:
                        self._administrator = None
            raise

    def _consumer(self, own: Mapping[str, str | int]) -> Consumer:
        with configuring():
            return Consumer({**self._common, **CONF, **own})

    def _producer(self, batch: int = BATCH) -> Producer:
        with configuring():
            return Producer(
                {
                    **self._common,
                    "acks": "all",
                    "enable.idempotence": True,
                    # A record that timed out would leave a gap in a sequence.
                    "message.timeout.ms": 0,
                    "linger.ms": 3,
                    "compression.type": self._settings.compression,
                    "queue.buffering.max.kbytes": 65_536,
                    "message.max.bytes": LARGEST,
                    "batch.size": batch,
                }
            )
