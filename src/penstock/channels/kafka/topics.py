"""Kafka's topics: create, describe, compare, alter, remove."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import (  # The public module does not name them.
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
)
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.channels.kafka.client import retry
from penstock.core.contracts import EnsureResult, Topic
from penstock.core.errors import Misconfigured

ANSWER = 10
_SPREADING = {KafkaError.UNKNOWN_TOPIC_OR_PART}
"""A broker does not know yet that a topic was created or removed."""
_OURS = {ConfigSource.DYNAMIC_TOPIC_CONFIG.value}


# Small segments let the cleaner remove replaced records soon.
_SHORT = {"segment.ms": "600000", "segment.bytes": str(32 * 1024 * 1024), "min.cleanable.dirty.ratio": "0.3"}


def settings_of(topic: Topic) -> dict[str, str]:
    """The settings of a topic in Kafka."""
    policy = {"cleanup.policy": "delete"}
    if topic.compacted:
        policy = {"cleanup.policy": "compact,delete" if topic.retention else "compact", **_SHORT}
    forever = "-1"
    kept = {"retention.ms": str(int(topic.retention.total_seconds() * 1000)) if topic.retention else forever}
    return {**policy, **kept, "message.timestamp.type": "CreateTime", **topic.config}


def ensure(admin: AdminClient, topics: Sequence[Topic], usual: int | None) -> EnsureResult:
    """Create and extend topics; `usual` is the default number of replicas."""
    cluster, configs = _existing(admin, topics)
    brokers = len(cluster.brokers)
    new: list[NewTopic] = []
    more: list[NewPartitions] = []
    differences: list[str] = []
    existing = [topic for topic in topics if topic.name in cluster.topics]
    for topic in topics:
        if topic not in existing:
            # Only for new topics: existing ones are fine while a broker is down.
            replicas = _replicas(topic, usual, brokers)
            in_sync = {"min.insync.replicas": str(min(2, replicas))}
            new.append(NewTopic(topic.name, topic.partitions, replicas, config={**in_sync, **settings_of(topic)}))
        elif len(cluster.topics[topic.name].partitions) < topic.partitions:
            more.append(NewPartitions(topic.name, topic.partitions))
    for topic in existing:
        differences += _differences(topic, cluster.topics[topic.name], configs[topic.name])
    if new:
        for result in admin.create_topics(new, operation_timeout=30).values():
            # Another process has created it from the same declaration.
            _unless(result, KafkaError.TOPIC_ALREADY_EXISTS)
    if more:
        for result in admin.create_partitions(more, operation_timeout=30).values():
            _unless(result, KafkaError.INVALID_PARTITIONS)
    if new or more:
        _wait_until_visible(
            admin, {one.topic: one.num_partitions for one in new} | {one.topic: one.new_total_count for one in more}
        )
    return EnsureResult(tuple(one.topic for one in new), tuple(one.topic for one in more), tuple(differences))


def _existing(admin: AdminClient, topics: Sequence[Topic]) -> tuple[ClusterMetadata, Mapping[str, Mapping[str, Any]]]:
    """The cluster, and the settings of the topics that exist.

    A topic that was just removed can be listed without settings: then both are requested again.
    """

    def check() -> tuple[ClusterMetadata, Mapping[str, Mapping[str, Any]]]:
        cluster = admin.list_topics(timeout=ANSWER)
        names = [topic.name for topic in topics if topic.name in cluster.topics]
        return cluster, _configs(admin, names) if names else {}

    return retry(check, also=_SPREADING)


def _wait_until_visible(admin: AdminClient, partitions: Mapping[str, int]) -> None:
    """Wait until the brokers know the new partitions: another broker may have created them."""

    def check() -> None:
        found = admin.list_topics(timeout=ANSWER).topics
        for name, count in partitions.items():
            if name not in found or len(found[name].partitions) < count:
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))

    retry(check)
    _configs(admin, list(partitions), _SPREADING)


def describe(admin: AdminClient, name: str) -> Topic:
    found = admin.list_topics(name, timeout=ANSWER).topics[name]
    if found.error is not None:
        raise KafkaException(found.error)
    config = {
        entry.name: entry.value
        for entry in _configs(admin, [name], _SPREADING)[name].values()
        if entry.value is not None
        and (entry.source in _OURS or entry.name in _TELLING or (entry.name, entry.value != "-1") == (_BYTES, True))
    }
    kept = int(config.pop("retention.ms", "-1"))
    policy = config.pop("cleanup.policy", "delete")
    return Topic(
        name,
        len(found.partitions),
        min((len(one.replicas) for one in found.partitions.values()), default=0),
        "compact" in policy,
        timedelta(milliseconds=kept) if kept >= 0 and "delete" in policy else None,
        config,
    )


def limit(admin: AdminClient, name: str) -> int | None:
    """The largest batch in bytes; None if we are not allowed to read it."""
    try:
        return int(_configs(admin, [name], _SPREADING)[name]["max.message.bytes"].value)
    except KafkaException as error:
        if error.args[0].code() in _FORBIDDEN:
            return None
        raise


_FORBIDDEN = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}


def topic_id(admin: AdminClient, name: str) -> str:
    return generations(admin, [name])[name][0]


def generations(admin: AdminClient, names: Sequence[str], within: float = ANSWER) -> dict[str, tuple[str, int]]:
    """The id and the number of partitions of each topic."""
    if not names:
        return {}
    requested = admin.describe_topics(TopicCollection(list(names)), request_timeout=within)
    found = {name: result.result(within + 1) for name, result in requested.items()}
    return {name: (str(one.topic_id), len(one.partitions)) for name, one in found.items()}


def remove(admin: AdminClient, name: str) -> None:
    admin.delete_topics([name], operation_timeout=30)[name].result(40)

    def check() -> None:
        if name in admin.list_topics(timeout=ANSWER).topics:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"topic {name} is still there", retriable=True))

    # Other brokers may still list it.
    retry(check)


def _replicas(topic: Topic, usual: int | None, brokers: int) -> int:
    replicas = topic.replicas or usual or min(3, brokers)
    if replicas > brokers:
        are = f"are {brokers} brokers" if brokers != 1 else "is 1 broker"
        raise Misconfigured(
            f"channel {topic.name}",
            f"{replicas} replicas are configured, and there {are}",
            f"configure at most {brokers}, or start more brokers",
        )
    return replicas


def _differences(topic: Topic, existing: Any, config: Mapping[str, Any]) -> list[str]:
    """The differences between a topic and its declaration. They are only reported: a change could delete records."""
    found = []
    if len(existing.partitions) > topic.partitions:
        have = len(existing.partitions)
        found.append(f"channel {topic.name} has {have} partitions, and {topic.partitions} are declared")
    copies = min((len(one.replicas) for one in existing.partitions.values()), default=0)
    if topic.replicas and copies != topic.replicas:
        found.append(f"channel {topic.name} has {copies} replicas, and {topic.replicas} are declared")
    for name, wanted in settings_of(topic).items():
        if (there_is := config.get(name)) is not None and there_is.value != wanted:
            found.append(f"channel {topic.name} has {name}={there_is.value}, and {wanted} is declared")
    return found


def _configs(admin: AdminClient, names: Sequence[str], passing: Collection[int] = ()) -> dict[str, dict[str, Any]]:
    """All settings of each topic. (Their `source` is a number, although its type says otherwise.)

    `passing`: more errors that end without help.
    """
    requested = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]

    def ask() -> dict[str, dict[str, Any]]:
        return {of.name: result.result(ANSWER) for of, result in admin.describe_configs(requested).items()}

    return retry(ask, also=passing)


_BYTES = "retention.bytes"
_TELLING = {"cleanup.policy", "retention.ms", "message.timestamp.type", "min.insync.replicas", "max.message.bytes"}


def _unless(result: Any, harmless: int) -> None:
    try:
        result.result()
    except KafkaException as error:
        if error.args[0].code() != harmless:
            raise


def alter(admin: AdminClient, name: str, settings: Mapping[str, str]) -> None:
    """Change these settings of a topic, and no others."""
    changes = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()]
    requested = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=changes)
    admin.incremental_alter_configs([requested])[requested].result(ANSWER)


@dataclass(frozen=True, slots=True)
class Copies:
    """The brokers that have a partition."""

    leader: int | None
    """None while there is none."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


def copies(admin: AdminClient, name: str) -> dict[int, Copies]:
    found = admin.list_topics(name, timeout=ANSWER).topics[name]
    if found.error is not None:
        raise KafkaException(found.error)
    return {
        number: Copies(one.leader if one.leader >= 0 else None, tuple(one.replicas), tuple(one.isrs))
        for number, one in sorted(found.partitions.items())
    }
