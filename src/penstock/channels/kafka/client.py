"""Settings, errors and retries of all Kafka clients."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.channels.kafka.settings import KafkaSettings
from penstock.core.errors import Misconfigured, Unavailable

Answer = TypeVar("Answer")

_quiet = logging.getLogger("librdkafka")
_quiet.disabled = True  # It reports each refused connection while a broker starts.

# Errors that end when a partition has a leader, or a group has a coordinator.
_UNSETTLED = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError._UNKNOWN_PARTITION,
}

# Errors of the request itself: a retry cannot help.
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
def translating(servers: str) -> Iterator[None]:
    """Turn errors of the clients into Misconfigured and Unavailable."""
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() in _WRONG:
            raise Misconfigured(f"Kafka at {servers}", error.args[0].str()) from error
        raise Unavailable(f"Kafka at {servers}", error.args[0].str()) from error
    except TimeoutError as error:
        raise Unavailable(f"Kafka at {servers}", "it did not answer in time") from error


def checked(partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
    """The partitions; KafkaException if one of them has an error."""
    for one in partitions:
        if one.error is not None:
            raise KafkaException(one.error)
    return partitions


@contextmanager
def configuring() -> Iterator[None]:
    """Turn errors of a client about its settings into Misconfigured."""
    try:
        yield
    except KafkaException as error:
        raise Misconfigured("[kafka] conf", error.args[0].str(), "see the settings of librdkafka") from error


def retry(ask: Callable[[], Answer], timeout: float = 10, also: Collection[int] = ()) -> Answer:
    """Retry while the brokers elect a leader, as for a new topic. `also`: more errors that end without help."""
    until = time.monotonic() + timeout
    while True:
        try:
            return ask()
        except KafkaException as error:
            passing = error.args[0].retriable() or error.args[0].code() in {*_UNSETTLED, *also}
            if not passing or time.monotonic() > until:
                raise
            time.sleep(0.05)
