"""Kafka's consumer groups: members that share partitions, and what the groups have committed."""

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

from penstock.channels.kafka.client import retrying, told
from penstock.channels.kafka.reader import Polled, entry_of, lost, passing, place_of
from penstock.core.contracts import ChannelPartition, Entry, Group, Offsets, RebalanceListener
from penstock.core.errors import PenstockError, Unavailable

_ANSWER = 10
_TURN = 0.1
"""Seconds after which a read looks whether partitions were given to it."""


class KafkaMember:
    def __init__(
        self, consumer: Consumer, group: str, channels: Sequence[str], listener: RebalanceListener, beginning: bool
    ) -> None:
        self._consumer, self._group, self._listener, self._beginning = consumer, group, listener, beginning
        self._polled = Polled(consumer, self._entry)
        self._next: dict[ChannelPartition, int] = {}
        self._waiting: list[ChannelPartition] = []
        consumer.subscribe(list(channels), on_assign=self._given, on_revoke=self._taken, on_lost=self._lost)

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
            told(self._consumer.commit(offsets=done, asynchronous=False) or ())
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error

    def leave(self, tell: Callable[[Sequence[ChannelPartition]], object]) -> None:
        """Leave the group; what is still held is told to `tell`."""
        try:
            if self._next:
                tell(sorted(self._next))
        finally:
            self._next.clear()
            self._consumer.close()

    def _entry(self, message: Message) -> Entry | None:
        place = place_of(message)
        stands = self._next.get(place)
        if (error := message.error()) is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET and stands is not None:
                raise lost(*place, stands)
            if error.code() == KafkaError._PARTITION_EOF:
                if stands is not None:
                    self._next[place] = max(message.offset() or 0, stands)
            else:
                passing(error, place)
            return None
        if stands is None:
            return None  # It was on its way here when its partition went to somebody else.
        entry = entry_of(message)
        self._next[place] = entry.offset + 1
        return entry

    def _given(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Called from within the client, where nothing can be asked of it: `read` does the rest, until it succeeds.
        self._waiting += [(one.topic, one.partition) for one in partitions]
        consumer.incremental_assign([])

    def _begin(self) -> None:
        """Read what is ours from where it has to be read."""
        if not self._waiting:
            return
        try:
            start = self._starts([TopicPartition(*place) for place in self._waiting])
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error
        better = self._listener.assigned(sorted(start))
        start = {place: better.get(place, offset) for place, offset in start.items()}
        self._consumer.incremental_assign(
            [TopicPartition(channel, partition, offset) for (channel, partition), offset in start.items()]
        )
        self._next |= start
        self._waiting = []

    def _starts(self, partitions: list[TopicPartition]) -> dict[ChannelPartition, int]:
        """Where the group has committed; where it has not, the beginning or the end, as it is now."""
        start = {}
        for one in retrying(lambda: told(self._consumer.committed(partitions, timeout=_ANSWER))):
            offset = one.offset
            if offset < 0:
                offset = retrying(partial(self._bounds, one))[0 if self._beginning else 1]
            start[one.topic, one.partition] = offset
        return start

    def _bounds(self, partition: TopicPartition) -> tuple[int, int]:
        self._consumer.list_topics(partition.topic, timeout=_ANSWER)  # One that was just added is not known here yet.
        return self._consumer.get_watermark_offsets(partition, timeout=_ANSWER)

    def _taken(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gone(consumer, partitions, self._listener.revoked)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gone(consumer, partitions, self._listener.lost)

    def _gone(
        self, consumer: Consumer, partitions: list[TopicPartition], tell: Callable[[Sequence[ChannelPartition]], None]
    ) -> None:
        places = {(one.topic, one.partition) for one in partitions}
        ours = sorted(places & set(self._next))
        try:
            if ours:
                tell(ours)
        except PenstockError as error:
            self._polled.fails(error)  # Within the client it would be lost.
        finally:
            # Whatever happened: a position that stays behind would be committed over that of the next holder.
            for place in ours:
                self._next.pop(place, None)
            self._waiting = [place for place in self._waiting if place not in places]
            self._polled.drop(places)
            consumer.incremental_unassign([TopicPartition(*place) for place in ours])

    def _unavailable(self, error: KafkaError) -> Unavailable:
        return Unavailable(f"group {self._group}", error.str())


def names(admin: AdminClient) -> list[str]:
    said = admin.list_consumer_groups(request_timeout=_ANSWER).result(_ANSWER)
    return sorted(one.group_id for one in said.valid)


def group(admin: AdminClient, name: str) -> Group:
    ask = partial(admin.describe_consumer_groups, [name], request_timeout=_ANSWER)
    said = retrying(lambda: ask()[name].result(_ANSWER))
    if said.state is ConsumerGroupState.DEAD:
        raise Unavailable(f"group {name}", "there is none of that name")
    members = {
        member.member_id: [(one.topic, one.partition) for one in member.assignment.topic_partitions]
        for member in said.members
    }
    asked = [ConsumerGroupTopicPartitions(name)]
    committed = admin.list_consumer_group_offsets(asked, request_timeout=_ANSWER)[name].result(_ANSWER)
    return Group(
        name,
        said.state.name.lower().replace("_", " "),
        members,
        {(one.topic, one.partition): one.offset for one in committed.topic_partitions if one.offset >= 0},
    )


def move(admin: AdminClient, name: str, positions: Mapping[str, Offsets]) -> None:
    if name in names(admin) and (members := group(admin, name).members):
        raise Unavailable(f"group {name}", f"it has {len(members)} members: stop them first")
    wanted = [
        TopicPartition(channel, partition, offset)
        for channel, offsets in positions.items()
        for partition, offset in offsets.items()
    ]
    for result in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(name, wanted)]).values():
        told(result.result(_ANSWER).topic_partitions)
