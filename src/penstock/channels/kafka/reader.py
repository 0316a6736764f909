"""Out of Kafka: by positions that are our own, and never silently past what is lost."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.channels.checks import another
from penstock.core.contracts import ChannelPartition, Entry, Offsets
from penstock.core.errors import PenstockError, Unaccounted, Unavailable

CONF = {
    # The group protocol of Kafka 4: the broker deals, and only the partitions that move are ever taken.
    "group.protocol": "consumer",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    # Off by default in this client: a record whose bytes have changed on the broker's disk would be taken for right.
    "check.crcs": True,
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 16_384,
}
"""For whoever reads: nothing is committed, and nothing passed over, by the client itself."""

# Faults that the client gets over by itself.
_PASSING = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._PARTITION_EOF,
    KafkaError._MAX_POLL_EXCEEDED,  # A member joins again; what it has lost is told to its `Dealing`.
}

_DAMAGED = {KafkaError._BAD_MSG, KafkaError.INVALID_MSG}
"""What the client and the broker say of bytes that are not what was written."""

_LOOK_EVERY = 3.0
"""Seconds between two looks at what the topics are by now."""


class Client(Protocol):
    """The part of Kafka's consumer that gives messages."""

    def poll(self, timeout: float, /) -> Message | None: ...

    def consume(self, num_messages: int, timeout: float, /) -> list[Message]: ...

    def assignment(self) -> list[TopicPartition]: ...

    def pause(self, partitions: list[TopicPartition], /) -> None: ...

    def resume(self, partitions: list[TopicPartition], /) -> None: ...


class Polled:
    """What comes out of a client. A fault is raised once all that came before it is handed over."""

    def __init__(self, client: Client, entry_of: Callable[[Message], Entry | None]) -> None:
        self._client, self._entry_of = client, entry_of
        self._gathered: list[Message] = []
        self._paused = False
        self._fault: PenstockError | None = None

    def read(self, most: int, wait: float) -> list[Entry]:
        """As `Reader.read`. Of none, it hears what the client has to tell; what comes with it is for the next call."""
        until = time.monotonic() + wait
        if most and self._paused:
            self._client.resume(self._client.assignment())
            self._paused = False
        while True:
            self._raise()
            # `consume` waits until it has all that was asked for; so wait for the first alone, then take what is there.
            first = self._client.poll(0.0 if self._gathered else max(0.0, until - time.monotonic()))
            self._gathered += [first] if first is not None else []
            if not most and first is not None:
                # Nobody takes them, and to hear the client is to get one each time: no more of them, for now.
                self._client.pause(self._client.assignment())
                self._paused = True
            if not self._gathered or not most:
                self._raise()
                return []
            if len(self._gathered) < most:
                more = self._client.consume(most - len(self._gathered), 0)
                self._gathered += more
            if found := self._entries(most):
                return found

    def drop(self, places: Collection[ChannelPartition]) -> None:
        """Forget what was gathered of these partitions and is not handed over: somebody else will read it."""
        self._gathered = [one for one in self._gathered if (one.topic(), one.partition()) not in places]

    def fails(self, fault: PenstockError) -> None:
        self._fault = self._fault or fault

    def _entries(self, most: int) -> list[Entry]:
        found = []
        gathered, self._gathered = self._gathered[:most], self._gathered[most:]
        for message in gathered:
            try:
                entry = self._entry_of(message)
            except PenstockError as fault:
                self.fails(fault)
            else:
                found += [entry] if entry is not None else []
        return found

    def _raise(self) -> None:
        if (fault := self._fault) is not None:
            # The client asks on by itself after other faults, and never again for what is lost.
            self._fault = fault if isinstance(fault, Unaccounted) else None
            raise fault


class KafkaReader:
    """Reads from `start`; where that has nothing for a partition that is there, from its beginning."""

    def __init__(
        self,
        consumer: Consumer,
        start: Mapping[str, Offsets],
        bounds: Mapping[str, Mapping[int, tuple[int, int]]],
        grows: bool,
        generations: Callable[[Sequence[str], float], Mapping[str, tuple[str, int]]],
    ) -> None:
        """`lives` tells the ids of topics and how many partitions they have, within some seconds."""
        self._consumer, self._grows, self._lives = consumer, grows, generations
        self._ids = {name: generation for name, (generation, _) in generations(list(bounds), 10).items()}
        self._polled = Polled(consumer, self._entry)
        self._next: dict[str, dict[int, int]] = {name: {} for name in bounds}
        self._unread: set[ChannelPartition] = set()
        self._at_end: set[ChannelPartition] = set()
        self._ended: dict[ChannelPartition, float] = {}
        self._heard = -math.inf
        self._looked = time.monotonic()
        for name, partitions in bounds.items():
            self._assign(name, {partition: low for partition, (low, _) in partitions.items()}, start[name])

    def _assign(self, channel: str, low: Mapping[int, int], start: Offsets) -> None:
        begin = {partition: start.get(partition, first) for partition, first in low.items()}
        self._next[channel] |= begin
        self._unread |= {(channel, partition) for partition in low if partition not in start}
        # Not `OFFSET_BEGINNING`: to look that up takes the client half a second.
        self._consumer.incremental_assign([TopicPartition(channel, *place) for place in begin.items()])

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        while True:
            if time.monotonic() - self._looked > _LOOK_EVERY:
                self._look()
            left = max(0.0, until - time.monotonic())
            found = self._polled.read(most, min(left, _LOOK_EVERY))
            if most:
                self._heard = time.monotonic()
            if found or time.monotonic() >= until:
                return found

    def positions(self, channel: str) -> Offsets:
        return dict(self._next[channel])

    def age(self) -> float:
        places = [(name, partition) for name, positions in self._next.items() for partition in positions]
        # The end of a partition is told once, and holds for as long as nothing is heard of it.
        ended = [self._heard if place in self._at_end else self._ended.get(place, -math.inf) for place in places]
        return time.monotonic() - min(ended) if ended else 0.0

    def _look(self) -> None:
        """Take partitions that were added; and no other topic for ours, as the client does."""
        try:
            for channel, (generation, partitions) in self._lives(list(self._next), 1).items():
                if generation != self._ids[channel]:
                    self._polled.fails(another(channel))
                elif self._grows and (added := set(range(partitions)) - set(self._next[channel])):
                    self._assign(channel, dict.fromkeys(sorted(added), 0), {})
        except (KafkaException, TimeoutError) as error:
            # Who is away is told better by reading; but of what is gone, that never tells anything.
            if isinstance(error, KafkaException) and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise Unavailable("Kafka", error.args[0].str()) from error
        finally:
            self._looked = time.monotonic()

    def _entry(self, message: Message) -> Entry | None:
        channel, partition = place = place_of(message)
        if (error := message.error()) is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._begin_again(place)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._next[channel][partition] = max(message.offset() or 0, self._next[channel][partition])
                self._at_end.add(place)
                self._ended[place] = time.monotonic()
            else:
                passing(error, place)
            return None
        entry = entry_of(message)
        self._next[channel][partition] = entry.offset + 1
        self._at_end.discard(place)
        self._unread.discard(place)
        return entry

    def _begin_again(self, place: ChannelPartition) -> None:
        """Where retention moved the beginning before we read it, go there; Unaccounted for any other position."""
        channel, partition = place
        if place not in self._unread:
            raise lost(channel, partition, self._next[channel][partition])
        self._unread.discard(place)
        self._consumer.incremental_unassign([TopicPartition(channel, partition)])
        self._consumer.incremental_assign([TopicPartition(channel, partition, OFFSET_BEGINNING)])


def place_of(message: Message) -> ChannelPartition:
    return message.topic() or "", message.partition() or 0


def passing(error: KafkaError, place: ChannelPartition) -> None:
    """Return if the client gets over this by itself; Unavailable otherwise."""
    if error.code() in _DAMAGED:
        channel, partition = place
        why = (
            f"its log is damaged: {error.str()}; every reader stops there. Stop the pipeline and run penstock repair, "
            "or bring the partition back from another replica"
        )
        raise Unavailable(f"the channel {channel}, partition {partition}", why)
    if not error.retriable() and error.code() not in _PASSING:
        raise Unavailable("Kafka", error.str())


def entry_of(message: Message) -> Entry:
    _, milliseconds = message.timestamp()
    return Entry(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        milliseconds * 1000,
        _bytes(message.key()),
        _bytes(message.value()),
        tuple((name, value or b"") for name, value in _pairs(message.headers())),
    )


def lost(channel: str, partition: int, stands: int | None) -> Unaccounted:
    why = (
        f"partition {partition} is to be read from {stands}, and does not hold that: its retention was quicker "
        "than this reader, or it is another topic; to begin anew, remove the store or ledger that reads it"
    )
    return Unaccounted(channel, (), why)


def _pairs(headers: Any) -> list[tuple[str, bytes | None]]:
    return headers or []


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
