"""Connectors between Spark and the channels: Spark's Kafka source and sink, and one for any other binder.

With another binder, Spark's Python workers read and write its partitions.
"""

import asyncio
import base64
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.analysis.checkpoints.batches import parse_offsets
from penstock.analysis.frames import RAW
from penstock.audit.lag import from_what_is_kept
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.record import Record
from penstock.core.scan import scan_batches

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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


OffsetsJson = dict[str, dict[str, int]]
"""Offsets by channel and partition, in the form of checkpoints."""


def offsets_json(channel: str, offsets: Offsets) -> OffsetsJson:
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


FORMAT, _READER = "penstock", "reader"
_MOST = 2_000
"""How many entries are passed to Spark at once."""


@dataclass(frozen=True)
class BinderConnector:
    channels: Channels
    skip_lost: bool = False
    """Skip records that were removed unread, instead of failing."""
    most: int | None = None
    """How many records a batch reads; None: all."""
    _streams: dict[tuple[str, str, int | None], DataFrame] = field(default_factory=dict, compare=False)
    """Cached streaming frames: Spark starts a process for each; queries can share them."""

    @property
    def objection(self) -> str | None:
        return "it reads only Kafka in real time, and the channels are at " + self.channels.where

    def limited(self, most: int) -> "BinderConnector":
        return replace(self, most=most)

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        if (of := (channel, str(since), self.most)) not in self._streams:
            spark.dataSource.register(ChannelSource)
            stream = ChannelStream(self.channels, channel, self.skip_lost, since, self.most)
            self._streams[of] = spark.readStream.format(FORMAT).option(_READER, _dumped(stream)).load()
        return self._streams[of]

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        spark.dataSource.register(ChannelSource)
        reader = ChannelReader(self.channels, channel, self.skip_lost, since, until)
        return spark.read.format(FORMAT).option(_READER, _dumped(reader)).load()

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        channels = self.channels

        def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            asyncio.run(_sent(channels, channel, batches))
            return iter(())

        def write(batch: DataFrame, _: int) -> None:
            # A Python sink would start processes for each batch, and does not support update mode. A repeated batch is
            # written again: its rows have the same identity.
            batch.mapInArrow(send, "sent BIGINT").collect()

        return records.writeStream.foreachBatch(write)


def _dumped(reader: "_Reader") -> str:
    return base64.b64encode(pickle.dumps(reader)).decode()


class ChannelSource(DataSource):
    """The data source that Spark asks for its reader, which is an option."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return RAW

    def reader(self, schema: "StructType") -> Any:
        return pickle.loads(base64.b64decode(self.options[_READER]))

    streamReader = reader


@dataclass
class Stretch(InputPartition):
    """The offsets that one task reads."""

    partition: int
    since: int
    until: int


@dataclass
class _Reader:
    """What the two readers of a channel share."""

    channels: Channels
    channel: str
    skip_lost: bool
    since: Offsets | None = None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The entries of a range. Raises Unaccounted when they were removed, Unavailable when they do not arrive."""
        assert isinstance(partition, Stretch)
        bounds = {partition.partition: (partition.since, partition.until)}
        return map(raw_table, scan_batches(self.channels, self.channel, bounds=bounds, most=_MOST))

    def _kept(self, starts: Offsets) -> Offsets:
        """The start offsets, without removed records if these are skipped."""
        return from_what_is_kept(starts, self.channels.bounds(self.channel)) if self.skip_lost else starts


@dataclass
class ChannelReader(_Reader, DataSourceReader):
    """A channel as a table."""

    until: Offsets | None = None

    def partitions(self) -> Sequence[InputPartition]:
        bounds = self.channels.bounds(self.channel)
        ends = {partition: end for partition, (_, end) in bounds.items()} if self.until is None else self.until
        since = self.since or {}
        return _stretches(self._kept({at: since.get(at, bounds[at][0]) for at in ends}), ends)


@dataclass
class ChannelStream(_Reader, DataSourceStreamReader):
    """A channel as a stream. Its offsets have the same JSON form as Kafka's in a checkpoint."""

    most: int | None = None

    def initialOffset(self) -> OffsetsJson:
        bounds = self.channels.bounds(self.channel)
        lows = {partition: low for partition, (low, _) in bounds.items()}
        return offsets_json(self.channel, {**lows, **(self.since or {})})

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self.most is None else ReadMaxRows(self.most)

    def latestOffset(self, start: OffsetsJson, limit: ReadLimit) -> OffsetsJson:
        latest = self.reportLatestOffset()
        if not isinstance(limit, ReadMaxRows):
            return latest
        return offsets_json(self.channel, up_to(*self._span(start, latest), limit.max_rows))

    def reportLatestOffset(self) -> OffsetsJson:
        bounds = self.channels.bounds(self.channel)
        return offsets_json(self.channel, {partition: end for partition, (_, end) in bounds.items()})

    def partitions(self, start: OffsetsJson, end: OffsetsJson) -> Sequence[InputPartition]:
        return _stretches(*self._span(start, end))

    def _span(self, start: OffsetsJson, end: OffsetsJson) -> tuple[Offsets, Offsets]:
        """The first and last offsets to read, per partition."""
        starts, ends = parse_offsets(start)[self.channel], parse_offsets(end)[self.channel]
        # A new partition is read from its beginning.
        return self._kept({partition: starts.get(partition, 0) for partition in ends}), ends


def up_to(starts: Offsets, ends: Offsets, most: int) -> dict[int, int]:
    """The ends of a read of at most `most` entries: a share of each partition by its size, at least one."""
    left = {partition: end - starts[partition] for partition, end in ends.items() if end > starts[partition]}
    if (total := sum(left.values())) <= most:
        return dict(ends)
    return {**ends, **{one: starts[one] + max(1, there * most // total) for one, there in left.items()}}


def _stretches(starts: Offsets, ends: Offsets) -> list[Stretch]:
    return [Stretch(partition, starts[partition], end) for partition, end in ends.items() if starts[partition] < end]


_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", _HEADERS),
    ]
)


def raw_table(entries: Sequence[Entry]) -> pa.RecordBatch:
    """Convert entries of a channel to the columns of raw records."""
    rows = [
        {
            "key": entry.key,
            "value": entry.value,
            "topic": entry.channel,
            "partition": entry.partition,
            "offset": entry.offset,
            "timestamp": entry.appended,
            "timestampType": 0,
            "headers": [{"key": name, "value": value} for name, value in entry.headers] or None,
        }
        for entry in entries
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


async def _sent(channels: Channels, channel: str, batches: Iterator[pa.RecordBatch]) -> None:
    async with channels.sender() as sender:
        for batch in batches:
            await sender.send(channel, [_record(row) for row in batch.to_pylist()])


def _record(row: dict[str, Any]) -> Record:
    headers = row["headers"] or ()
    extra = tuple((header["key"], header["value"] or b"") for header in headers)
    return Record(row["value"], None, row["key"], extra)
