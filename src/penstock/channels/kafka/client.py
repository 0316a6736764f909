"""What all of Kafka's clients here have in common."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.channels.kafka.settings import KafkaSettings
from penstock.core.errors import Misconfigured, Unavailable

Answer = TypeVar("Answer")

# What brokers answer until a new topic, or a partition that has lost its leader, has one; and while the one that looks
# after a group comes up.
_UNSETTLED = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError._UNKNOWN_PARTITION,
}

# What brokers answer to a question that is wrong, and stays so.
_WRONG = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_REQUEST,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.POLICY_VIOLATION,
}


def common(servers: str, settings: KafkaSettings) -> dict[str, Any]:
    return {
        "bootstrap.servers": servers,
        "client.id": "penstock",
        "logger": _quiet,
        # A broker that restarts is tried again soon, not after the default of up to ten seconds.
        "reconnect.backoff.max.ms": 1000,
        "topic.metadata.refresh.interval.ms": 10_000,
        **settings.conf,
    }


@contextmanager
def answering(servers: str) -> Iterator[None]:
    """What Kafka's clients raise, in our words."""
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() in _WRONG:
            raise Misconfigured(f"Kafka at {servers}", error.args[0].str()) from error
        raise Unavailable(f"Kafka at {servers}", error.args[0].str()) from error
    except TimeoutError as error:
        raise Unavailable(f"Kafka at {servers}", "it did not answer in time") from error


def told(partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
    """What was answered for each partition; KafkaException when the answer for one of them is an error."""
    for one in partitions:
        if one.error is not None:
            raise KafkaException(one.error)
    return partitions


@contextmanager
def building() -> Iterator[None]:
    """A client is being made: what it says to its settings, in our words."""
    try:
        yield
    except KafkaException as error:
        raise Misconfigured("[kafka] conf", error.args[0].str(), "see the settings of librdkafka") from error


def retrying(ask: Callable[[], Answer], patience: float = 10, also: Collection[int] = ()) -> Answer:
    """Ask again while brokers sort out among themselves who leads, as after the birth of a topic.

    `also`: further errors that pass by themselves here.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return ask()
        except KafkaException as error:
            passing = error.args[0].retriable() or error.args[0].code() in {*_UNSETTLED, *also}
            if not passing or time.monotonic() > until:
                raise
            time.sleep(0.05)


class _Quiet:
    """What librdkafka would write to standard error: it reports each refused connection while a broker starts."""

    def log(self, *_: object) -> None: ...


_quiet = _Quiet()
