"""Connectors between Spark and the channels: Spark's own for Kafka, otherwise by the binder (`analysis.binder`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.core.contracts import Offsets


class SparkConnector(Protocol):
    """Raw records have the columns of `frames.RAW`; what is written has key, value and headers."""

    @property
    def objection(self) -> str | None:
        """Why no query over it can run in real time; None when that is for Spark to say."""

    @property
    def skip_lost(self) -> bool:
        """Whether queries go on behind what was removed unread."""

    def limited(self, most: int) -> "SparkConnector":
        """The same, but of each stream a batch takes so many records at most."""

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        """The records of a channel, on and on. Where its query has a checkpoint, that tells the offsets; otherwise they
        begin at `since`, or at the beginning."""

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        """The records that a channel holds, from these offsets up to those."""

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        """What brings a stream of records into a channel, at least once each; `at_once`: without waiting for more."""


def told(channel: str, offsets: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """Offsets in the words that checkpoints use, whatever the way."""
    return {channel: {str(partition): offset for partition, offset in offsets.items()}}


# The client's own are for few records: while a query catches up, it would ask for every 500 of them anew. But Spark
# keeps what a consumer has read ahead for as long as it keeps the consumer: with many queries that fills the heap.
_LARGE_READS = {"kafka.max.poll.records": "5000", "kafka.max.partition.fetch.bytes": str(4 * 2**20)}
# Rows of a batch come fast: fewer and larger requests cost the broker half as much. How large one of them may be is for
# its topic to say; the client's own limit is below what a collector takes.
_LARGE_WRITES = {
    "kafka.batch.size": str(2**17),
    "kafka.max.request.size": "60000000",
    "kafka.buffer.memory": str(2**26),
}


@dataclass(frozen=True)
class KafkaConnector:
    servers: str
    client: Mapping[str, str] = field(default_factory=dict)
    """Settings of Spark's Kafka client, such as those for security."""

    skip_lost: bool = False
    """Go on behind what Kafka has removed unread, instead of ending there."""

    most: int | None = None
    """How many records a micro-batch takes; None: all that there are."""

    ahead: bool = False
    """Streams are read far ahead: faster, for a heap that has room for it."""

    @property
    def objection(self) -> str | None:
        return None

    def limited(self, most: int) -> "KafkaConnector":
        return replace(self, most=most)

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        reader = spark.readStream.format("kafka").options(**self._source(channel))
        if since is not None:
            reader = reader.option("startingOffsets", json.dumps(told(channel, since)))
        if self.ahead:
            reader = reader.options(**_LARGE_READS)
        if self.most is not None:
            reader = reader.option("maxOffsetsPerTrigger", self.most)
        # A broker that restarts must not end the query.
        return reader.options(**{"fetchOffset.numRetries": "60", "fetchOffset.retryIntervalMs": "1000"}).load()

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        reader = spark.read.format("kafka").options(**self._source(channel))
        for name, offsets in (("startingOffsets", since), ("endingOffsets", until)):
            if offsets is not None:
                reader = reader.option(name, json.dumps(told(channel, offsets)))
        return reader.load()

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        return (
            records.writeStream.format("kafka")
            .options(**{"kafka.acks": "all", "kafka.enable.idempotence": "true"})
            .options(**{"kafka.linger.ms": "1" if at_once else "20", **_LARGE_WRITES})
            .options(**self._common())
            .option("topic", channel)
            .option("includeHeaders", "true")
        )

    def _source(self, channel: str) -> dict[str, str]:
        return {
            "subscribe": channel,
            "startingOffsets": "earliest",
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": str(not self.skip_lost).lower(),
            **self._common(),
        }

    def _common(self) -> dict[str, str]:
        named = {f"kafka.{name}": value for name, value in self.client.items()}
        return {"kafka.bootstrap.servers": self.servers, **named}
