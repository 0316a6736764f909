"""Connectors between Spark and the channels: Spark's Kafka source and sink; for other binders see `analysis.binder`."""

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
        """Why queries cannot run in real time with this connector; None when Spark decides."""

    @property
    def skip_lost(self) -> bool:
        """Whether queries skip records that were removed unread."""

    def limited(self, most: int) -> "SparkConnector":
        """The same connector, with at most `most` records of each stream in a batch."""

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        """The records of a channel as a stream. It starts at the offsets of the query's checkpoint; without one, at
        `since` or at the beginning."""

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        """The records of a channel, from the offsets `since` up to `until`."""

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        """A writer of a stream into a channel, at least once; `at_once`: without waiting for larger requests."""


def offsets_json(channel: str, offsets: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """Offsets in the JSON form of checkpoints."""
    return {channel: {str(partition): offset for partition, offset in offsets.items()}}


# The client's defaults are small: a query that catches up would fetch 500 records at a time. But Spark keeps what a
# consumer has fetched for as long as it keeps the consumer: with many queries that fills the heap.
_LARGE_READS = {"kafka.max.poll.records": "5000", "kafka.max.partition.fetch.bytes": str(4 * 2**20)}
# Fewer and larger requests cost the broker half as much. The topic limits the size of a record; the client's default
# limit is below what a collector accepts.
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
    """Skip records that Kafka has removed unread, instead of failing."""

    most: int | None = None
    """How many records a micro-batch reads; None: all."""

    ahead: bool = False
    """Fetch far ahead: faster, with a larger heap."""

    @property
    def objection(self) -> str | None:
        return None

    def limited(self, most: int) -> "KafkaConnector":
        return replace(self, most=most)

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        reader = spark.readStream.format("kafka").options(**self._source(channel))
        if since is not None:
            reader = reader.option("startingOffsets", json.dumps(offsets_json(channel, since)))
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
                reader = reader.option(name, json.dumps(offsets_json(channel, offsets)))
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
