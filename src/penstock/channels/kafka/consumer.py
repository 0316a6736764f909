"""Reads from Kafka: by offsets of our own, or as a consumer of a group. Raises when records are lost."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from penstock.channels.common import another
from penstock.channels.kafka.client import checked, retry
from penstock.core.contracts import ChannelPartition, Entry, Group, Offsets, RebalanceListener
from penstock.core.errors import PenstockError, Unaccounted, Unavailable

CONF = {
    # The group protocol of Kafka 4: the broker assigns, and revokes only partitions that move.
    "group.protocol": "consumer",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    # Off by default in this client: it would accept damaged records.
    "check.crcs": True,
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 16_384,
}
"""Settings of all consumers: the client commits nothing, and skips nothing."""

# Errors from which the client recovers itself.
_PASSING = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._PARTITION_EOF,
    KafkaError._MAX_POLL_EXCEEDED,  # A member joins again; its listener hears what it lost.
}

_DAMAGED = {KafkaError._BAD_MSG, KafkaError.INVALID_MSG}
"""Errors for damaged records."""

_CHECK_EVERY = 3.0
"""Seconds between two checks of the topics."""

_ANSWER = 10
_TURN = 0.1
"""Seconds after which a read checks for newly assigned partitions."""


class Polled:
    """The messages of a client. An error is raised after all entries before it were returned.

    `check` is called before each read, and every `check_every` seconds while it waits.
    """

    def __init__(
        self,
        client: Consumer,
        entry_of: Callable[[Message], Entry | None],
        check: Callable[[], None] = lambda: None,
        check_every: float = math.inf,
    ) -> None:
        self._client, self._entry_of = client, entry_of
        self._check, self._check_every = check, check_every
        self._gathered: list[Message] = []
        self._paused = False
        self._fault: PenstockError | None = None

    def read(self, most: int, wait: float) -> list[Entry]:
        """As `Reader.read`. With `most=0` it only serves the client; messages wait for the next call."""
        until = time.monotonic() + wait
        while True:
            self._check()
            found = self._read(most, min(max(0.0, until - time.monotonic()), self._check_every))
            if found or time.monotonic() >= until:
                return found

    def _read(self, most: int, wait: float) -> list[Entry]:
        until = time.monotonic() + wait
        if most and self._paused:
            self._client.resume(self._client.assignment())
            self._paused = False
        while True:
            self._raise()
            # `consume` waits for the full number: so wait for one message, then take those that are there.
            first = self._client.poll(0.0 if self._gathered else max(0.0, until - time.monotonic()))
            self._gathered += [first] if first is not None else []
            if not most and first is not None:
                # Each poll fetches a message that nothing reads: pause.
                self._client.pause(self._client.assignment())
                self._paused = True
            if not self._gathered or not most:
                self._raise()
                return []
            if len(self._gathered) < most:
                # It can call `drop`.
                more = self._client.consume(most - len(self._gathered), 0)
                self._gathered += more
            if found := self._entries(most):
                return found

    def drop(self, topic_partitions: Collection[ChannelPartition]) -> None:
        """Drop fetched messages of these partitions: another member reads them."""
        self._gathered = [one for one in self._gathered if (one.topic(), one.partition()) not in topic_partitions]

    def fail(self, fault: PenstockError) -> None:
        self._fault = self._fault or fault

    def _entries(self, most: int) -> list[Entry]:
        found = []
        gathered, self._gathered = self._gathered[:most], self._gathered[most:]
        for message in gathered:
            try:
                entry = self._entry_of(message)
            except PenstockError as fault:
                self.fail(fault)
            else:
                found += [entry] if entry is not None else []
        return found

    def _raise(self) -> None:
        if (fault := self._fault) is not None:
            # The client recovers from other errors, but never fetches what is lost.
            self._fault = fault if isinstance(fault, Unaccounted) else None
            raise fault


class KafkaReader:
    """Reads from `start`; a partition without an offset there is read from its beginning."""

    def __init__(
        self,
        consumer: Consumer,
        start: Mapping[str, Offsets],
        bounds: Mapping[str, Mapping[int, tuple[int, int]]],
        grows: bool,
        generations: Callable[[Sequence[str], float], Mapping[str, tuple[str, int]]],
    ) -> None:
        """`generations(names, seconds)`: the id and the number of partitions of each topic."""
        self._consumer, self._grows, self._generations = consumer, grows, generations
        self._ids = {name: generation for name, (generation, _) in generations(list(bounds), 10).items()}
        self._polled = Polled(consumer, self._entry, self._check_topics, _CHECK_EVERY)
        self._next: dict[str, dict[int, int]] = {name: {} for name in bounds}
        self._unread: set[ChannelPartition] = set()
        self._at_end: set[ChannelPartition] = set()
        self._ended: dict[ChannelPartition, float] = {}
        self._heard = -math.inf
        self._checked = time.monotonic()
        for name, partitions in bounds.items():
            self._assign(name, {partition: low for partition, (low, _) in partitions.items()}, start[name])

    def _assign(self, channel: str, low: Mapping[int, int], start: Offsets) -> None:
        begin = {partition: start.get(partition, first) for partition, first in low.items()}
        self._next[channel] |= begin
        self._unread |= {(channel, partition) for partition in low if partition not in start}
        # Not `OFFSET_BEGINNING`: the client needs half a second for it.
        self._consumer.incremental_assign(
            [TopicPartition(channel, *topic_partition) for topic_partition in begin.items()]
        )

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        found = self._polled.read(most, wait)
        if most:
            self._heard = time.monotonic()
        return found

    def positions(self, channel: str) -> Offsets:
        return dict(self._next[channel])

    def age(self) -> float:
        topic_partitions = [(name, partition) for name, positions in self._next.items() for partition in positions]
        # The client reports the end of a partition once.
        ended = [
            self._heard if topic_partition in self._at_end else self._ended.get(topic_partition, -math.inf)
            for topic_partition in topic_partitions
        ]
        return time.monotonic() - min(ended) if ended else 0.0

    def _check_topics(self) -> None:
        """Read added partitions, and notice a topic that was created again; the client does not."""
        if time.monotonic() - self._checked <= _CHECK_EVERY:
            return
        try:
            for channel, (generation, partitions) in self._generations(list(self._next), 1).items():
                if generation != self._ids[channel]:
                    self._polled.fail(another(channel))
                elif self._grows and (added := set(range(partitions)) - set(self._next[channel])):
                    self._assign(channel, dict.fromkeys(sorted(added), 0), {})
        except (KafkaException, TimeoutError) as error:
            # Reading reports an outage better, but it never reports a removed topic.
            if isinstance(error, KafkaException) and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise Unavailable("Kafka", error.args[0].str()) from error
        finally:
            self._checked = time.monotonic()

    def _entry(self, message: Message) -> Entry | None:
        channel, partition = topic_partition = topic_partition_of(message)
        if (error := message.error()) is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._begin_again(topic_partition)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._next[channel][partition] = max(message.offset() or 0, self._next[channel][partition])
                self._at_end.add(topic_partition)
                self._ended[topic_partition] = time.monotonic()
            else:
                passing(error, topic_partition)
            return None
        entry = entry_of(message)
        self._next[channel][partition] = entry.offset + 1
        self._at_end.discard(topic_partition)
        self._unread.discard(topic_partition)
        return entry

    def _begin_again(self, topic_partition: ChannelPartition) -> None:
        """Go to the beginning if retention has moved it before the first read; otherwise raise Unaccounted."""
        channel, partition = topic_partition
        if topic_partition not in self._unread:
            raise lost(channel, partition, self._next[channel][partition])
        self._unread.discard(topic_partition)
        self._consumer.incremental_unassign([TopicPartition(channel, partition)])
        self._consumer.incremental_assign([TopicPartition(channel, partition, OFFSET_BEGINNING)])


def topic_partition_of(message: Message) -> ChannelPartition:
    return message.topic() or "", message.partition() or 0


def passing(error: KafkaError, topic_partition: ChannelPartition) -> None:
    """Return if the client recovers from this error; raise Unavailable otherwise."""
    if error.code() in _DAMAGED:
        channel, partition = topic_partition
        why = (
            f"its log is damaged: {error.str()}; every reader stops there. Stop the pipeline and run penstock repair, "
            "or bring the partition back from another replica"
        )
        raise Unavailable(f"the channel {channel}, partition {partition}", why)
    if not error.retriable() and error.code() not in _PASSING:
        raise Unavailable("Kafka", error.str())


def entry_of(message: Message) -> Entry:
    _, milliseconds = message.timestamp()
    headers: Any = message.headers() or ()  # Its type says otherwise.
    return Entry(
        *topic_partition_of(message),
        message.offset() or 0,
        milliseconds * 1000,
        _bytes(message.key()),
        _bytes(message.value()),
        tuple((name, value or b"") for name, value in headers),
    )


def lost(channel: str, partition: int, stands: int | None) -> Unaccounted:
    why = (
        f"partition {partition} has no offset {stands}: retention has deleted it before it was read, or it is another "
        "topic; to read it from its beginning, remove the store or ledger that reads it"
    )
    return Unaccounted(channel, (), why)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


# --- groups


class KafkaMember:
    def __init__(
        self, consumer: Consumer, group: str, channels: Sequence[str], listener: RebalanceListener, beginning: bool
    ) -> None:
        self._consumer, self._group, self._listener, self._beginning = consumer, group, listener, beginning
        self._polled = Polled(consumer, self._entry, self._begin, _TURN)
        self._next: dict[ChannelPartition, int] = {}
        self._waiting: list[ChannelPartition] = []
        consumer.subscribe(list(channels), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        return self._polled.read(most, wait)

    def held(self) -> Mapping[ChannelPartition, int]:
        return dict(self._next)

    def commit(self) -> None:
        if not self._next:
            return
        done = [TopicPartition(channel, partition, offset) for (channel, partition), offset in self._next.items()]
        try:
            checked(self._consumer.commit(offsets=done, asynchronous=False) or ())
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error

    def leave(self, tell: Callable[[Sequence[ChannelPartition]], object]) -> None:
        """Leave the group; `tell` gets the partitions that are still owned."""
        try:
            if self._next:
                tell(sorted(self._next))
        finally:
            self._next.clear()
            self._consumer.close()

    def _entry(self, message: Message) -> Entry | None:
        topic_partition = topic_partition_of(message)
        stands = self._next.get(topic_partition)
        if (error := message.error()) is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET and stands is not None:
                raise lost(*topic_partition, stands)
            if error.code() == KafkaError._PARTITION_EOF:
                if stands is not None:
                    self._next[topic_partition] = max(message.offset() or 0, stands)
            else:
                passing(error, topic_partition)
            return None
        if stands is None:
            return None  # Its partition was revoked after it was fetched.
        entry = entry_of(message)
        self._next[topic_partition] = entry.offset + 1
        return entry

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # The client calls this, and cannot be used here: `read` does the rest.
        self._waiting += [(one.topic, one.partition) for one in partitions]
        consumer.incremental_assign([])

    def _begin(self) -> None:
        """Begin to read newly assigned partitions."""
        if not self._waiting:
            return
        try:
            start = self._starts([TopicPartition(*topic_partition) for topic_partition in self._waiting])
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error
        better = self._listener.assigned(sorted(start))
        start = {topic_partition: better.get(topic_partition, offset) for topic_partition, offset in start.items()}
        self._consumer.incremental_assign(
            [TopicPartition(channel, partition, offset) for (channel, partition), offset in start.items()]
        )
        self._next |= start
        self._waiting = []

    def _starts(self, partitions: list[TopicPartition]) -> dict[ChannelPartition, int]:
        """The committed offset of each partition; without one, its beginning or its end."""
        start = {}
        for one in retry(lambda: checked(self._consumer.committed(partitions, timeout=_ANSWER))):
            offset = one.offset
            if offset < 0:
                offset = retry(partial(self._bounds, one))[0 if self._beginning else 1]
            start[one.topic, one.partition] = offset
        return start

    def _bounds(self, partition: TopicPartition) -> tuple[int, int]:
        self._consumer.list_topics(partition.topic, timeout=_ANSWER)  # The client does not know a new partition yet.
        return self._consumer.get_watermark_offsets(partition, timeout=_ANSWER)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._release(consumer, partitions, self._listener.revoked)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._release(consumer, partitions, self._listener.lost)

    def _release(
        self, consumer: Consumer, partitions: list[TopicPartition], tell: Callable[[Sequence[ChannelPartition]], None]
    ) -> None:
        topic_partitions = {(one.topic, one.partition) for one in partitions}
        ours = sorted(topic_partitions & set(self._next))
        try:
            if ours:
                tell(ours)
        except PenstockError as error:
            self._polled.fail(error)  # The client would drop it.
        finally:
            # An offset that stays here would be committed over that of the next owner.
            for topic_partition in ours:
                self._next.pop(topic_partition, None)
            self._waiting = [
                topic_partition for topic_partition in self._waiting if topic_partition not in topic_partitions
            ]
            self._polled.drop(topic_partitions)
            consumer.incremental_unassign([TopicPartition(*topic_partition) for topic_partition in ours])

    def _unavailable(self, error: KafkaError) -> Unavailable:
        return Unavailable(f"group {self._group}", error.str())


def group_names(admin: AdminClient) -> list[str]:
    answer = admin.list_consumer_groups(request_timeout=_ANSWER).result(_ANSWER)
    return sorted(one.group_id for one in answer.valid)


def describe_group(admin: AdminClient, name: str) -> Group:
    ask = partial(admin.describe_consumer_groups, [name], request_timeout=_ANSWER)
    answer = retry(lambda: ask()[name].result(_ANSWER))
    if answer.state is ConsumerGroupState.DEAD:
        raise Unavailable(f"group {name}", "there is no such group")
    members = {
        member.member_id: [(one.topic, one.partition) for one in member.assignment.topic_partitions]
        for member in answer.members
    }
    requested = [ConsumerGroupTopicPartitions(name)]
    committed = admin.list_consumer_group_offsets(requested, request_timeout=_ANSWER)[name].result(_ANSWER)
    return Group(
        name,
        answer.state.name.lower().replace("_", " "),
        members,
        {(one.topic, one.partition): one.offset for one in committed.topic_partitions if one.offset >= 0},
    )


def move_offsets(admin: AdminClient, name: str, positions: Mapping[str, Offsets]) -> None:
    if name in group_names(admin) and (members := describe_group(admin, name).members):
        raise Unavailable(f"group {name}", f"it has {len(members)} members; stop them first")
    wanted = [
        TopicPartition(channel, partition, offset)
        for channel, offsets in positions.items()
        for partition, offset in offsets.items()
    ]
    for result in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(name, wanted)]).values():
        checked(result.result(_ANSWER).topic_partitions)
