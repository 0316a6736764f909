"""Kafka's consumer groups: members, and committed offsets."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from penstock.channels.kafka.client import checked, retry
from penstock.channels.kafka.reader import Polled, entry_of, lost, passing, topic_partition_of
from penstock.core.contracts import ChannelPartition, Entry, Group, Offsets, RebalanceListener
from penstock.core.errors import PenstockError, Unavailable

_ANSWER = 10
_TURN = 0.1
"""Seconds after which a read checks for newly assigned partitions."""


class KafkaMember:
    def __init__(
        self, consumer: Consumer, group: str, channels: Sequence[str], listener: RebalanceListener, beginning: bool
    ) -> None:
        self._consumer, self._group, self._listener, self._beginning = consumer, group, listener, beginning
        self._polled = Polled(consumer, self._entry)
        self._next: dict[ChannelPartition, int] = {}
        self._waiting: list[ChannelPartition] = []
        consumer.subscribe(list(channels), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        while True:
            self._begin()
            left = max(0.0, until - time.monotonic())
            found = self._polled.read(most, min(left, _TURN))
            if found or time.monotonic() >= until:
                return found

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


def names(admin: AdminClient) -> list[str]:
    answer = admin.list_consumer_groups(request_timeout=_ANSWER).result(_ANSWER)
    return sorted(one.group_id for one in answer.valid)


def group(admin: AdminClient, name: str) -> Group:
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


def move(admin: AdminClient, name: str, positions: Mapping[str, Offsets]) -> None:
    if name in names(admin) and (members := group(admin, name).members):
        raise Unavailable(f"group {name}", f"it has {len(members)} members; stop them first")
    wanted = [
        TopicPartition(channel, partition, offset)
        for channel, offsets in positions.items()
        for partition, offset in offsets.items()
    ]
    for result in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(name, wanted)]).values():
        checked(result.result(_ANSWER).topic_partitions)
