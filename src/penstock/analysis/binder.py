"""Any binder as a Spark source and sink: Spark's Python workers read and write its partitions."""

import asyncio
import base64
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.analysis.connectors import offsets_json
from penstock.analysis.frames import RAW
from penstock.audit.retention import from_what_is_kept
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.record import Record
from penstock.core.scan import scan_batches

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "penstock"
_MOST = 2_000
"""How many entries are passed to Spark at once."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
        begin = "" if since is None else json.dumps(offsets_json(channel, since))
        if (of := (channel, begin, self.most)) not in self._streams:
            _register(spark)
            reader = spark.readStream.format(FORMAT).options(**self._options(channel))
            if begin:
                reader = reader.option("since", begin)
            if self.most is not None:
                reader = reader.option("most", self.most)
            self._streams[of] = reader.load()
        return self._streams[of]

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        _register(spark)
        reader = spark.read.format(FORMAT).options(**self._options(channel))
        for name, offsets in (("since", since), ("until", until)):
            if offsets is not None:
                reader = reader.option(name, json.dumps(offsets_json(channel, offsets)))
        return reader.load()

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

    def _options(self, channel: str) -> dict[str, str]:
        return {
            "channel": channel,
            "channels": base64.b64encode(pickle.dumps(self.channels)).decode(),
            "skip_lost": "yes" if self.skip_lost else "",
        }


def _register(spark: SparkSession) -> None:
    spark.dataSource.register(ChannelSource)


class ChannelSource(DataSource):
    """The data source that Spark asks for readers."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return RAW

    def reader(self, schema: "StructType") -> "ChannelReader":
        since, until = self._offsets("since"), self._offsets("until")
        return ChannelReader(self._channels, self._channel, since, until, self._skip_lost)

    def streamReader(self, schema: "StructType") -> "ChannelStream":
        most = self.options.get("most")
        since = self._offsets("since")
        return ChannelStream(self._channels, self._channel, self._skip_lost, since, None if most is None else int(most))

    @property
    def _skip_lost(self) -> bool:
        return bool(self.options["skip_lost"])

    @property
    def _channel(self) -> str:
        return str(self.options["channel"])

    @property
    def _channels(self) -> Channels:
        found: Channels = pickle.loads(base64.b64decode(self.options["channels"]))
        return found

    def _offsets(self, name: str) -> dict[int, int] | None:
        if (text := self.options.get(name)) is None:
            return None
        return {int(partition): offset for partition, offset in json.loads(text)[self._channel].items()}


@dataclass
class Stretch(InputPartition):
    """The offsets that one task reads."""

    partition: int
    since: int
    until: int


class ChannelReader(DataSourceReader):
    """A channel as a table."""

    def __init__(
        self,
        channels: Channels,
        channel: str,
        since: dict[int, int] | None,
        until: dict[int, int] | None,
        skip_lost: bool,
    ) -> None:
        self._channels, self._channel, self._skip_lost = channels, channel, skip_lost
        self._since, self._until = since or {}, until

    def partitions(self) -> Sequence[InputPartition]:
        bounds = self._channels.bounds(self._channel)
        ends = {partition: end for partition, (_, end) in bounds.items()} if self._until is None else self._until
        starts = {partition: self._since.get(partition, bounds[partition][0]) for partition in ends}
        if self._skip_lost:
            starts = from_what_is_kept(starts, bounds)
        return _stretches(starts, ends)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Stretch)
        return _batches(self._channels, self._channel, partition)


class ChannelStream(DataSourceStreamReader):
    """A channel as a stream. Its offsets have the same JSON form as Kafka's in a checkpoint."""

    def __init__(
        self,
        channels: Channels,
        channel: str,
        skip_lost: bool,
        since: dict[int, int] | None = None,
        most: int | None = None,
    ) -> None:
        self._channels, self._channel, self._skip_lost = channels, channel, skip_lost
        self._since, self._most = since or {}, most

    def initialOffset(self) -> dict[str, dict[str, int]]:
        bounds = self._channels.bounds(self._channel)
        return offsets_json(self._channel, {partition: low for partition, (low, _) in bounds.items()} | self._since)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._most is None else ReadMaxRows(self._most)

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        latest = self.reportLatestOffset()
        if not isinstance(limit, ReadMaxRows):
            return latest
        starts, ends = self._span(start, latest)
        return offsets_json(self._channel, up_to(starts, ends, limit.max_rows))

    def reportLatestOffset(self) -> dict[str, dict[str, int]]:
        bounds = self._channels.bounds(self._channel)
        return offsets_json(self._channel, {partition: end for partition, (_, end) in bounds.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return _stretches(*self._span(start, end))

    def _span(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
        """The first and last offsets to read, per partition."""
        ends = {int(partition): offset for partition, offset in end[self._channel].items()}
        # A new partition is read from its beginning.
        starts = {partition: start[self._channel].get(str(partition), 0) for partition in ends}
        if self._skip_lost:
            starts = from_what_is_kept(starts, self._channels.bounds(self._channel))
        return starts, ends

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Stretch)
        return _batches(self._channels, self._channel, partition)


def up_to(starts: Offsets, ends: Offsets, most: int) -> dict[int, int]:
    """The ends of a read of at most `most` entries: a share of each partition by its size, at least one."""
    left = {partition: end - starts[partition] for partition, end in ends.items() if end > starts[partition]}
    if (total := sum(left.values())) <= most:
        return dict(ends)
    return {**ends, **{one: starts[one] + max(1, there * most // total) for one, there in left.items()}}


def _stretches(starts: dict[int, int], ends: dict[int, int]) -> list[Stretch]:
    return [Stretch(partition, starts[partition], end) for partition, end in ends.items() if starts[partition] < end]


def _batches(channels: Channels, channel: str, stretch: Stretch) -> Iterator[pa.RecordBatch]:
    """The entries of a range. Raises Unaccounted when they were removed, Unavailable when they do not arrive."""
    bounds = {stretch.partition: (stretch.since, stretch.until)}
    for entries in scan_batches(channels, channel, bounds=bounds, most=_MOST):
        yield raw_table(entries)


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
    columns = [
        pa.array([entry.key for entry in entries], pa.binary()),
        pa.array([entry.value for entry in entries], pa.binary()),
        pa.array([entry.channel for entry in entries], pa.string()),
        pa.array([entry.partition for entry in entries], pa.int32()),
        pa.array([entry.offset for entry in entries], pa.int64()),
        pa.array([_EPOCH + timedelta(microseconds=entry.appended) for entry in entries], pa.timestamp("us", tz="UTC")),
        pa.array([0] * len(entries), pa.int32()),
        pa.array(
            [[{"key": name, "value": value} for name, value in entry.headers] or None for entry in entries], _HEADERS
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


async def _sent(channels: Channels, channel: str, batches: Iterator[pa.RecordBatch]) -> None:
    async with channels.sender() as sender:
        for batch in batches:
            await sender.send(channel, [_record(row) for row in batch.to_pylist()])


def _record(row: dict[str, Any]) -> Record:
    headers = row["headers"] or ()
    extra = tuple((header["key"], header["value"] or b"") for header in headers)
    return Record(row["value"], None, row["key"], extra)
