"""Channels in which nothing comes, for tests of what Spark is asked before the first record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.analysis.frames import RAW
from penstock.analysis.plans import empty_stream
from penstock.core.contracts import Offsets

_ARRIVED = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class StillConnector:
    """What is written goes nowhere; what channels hold already can be read as batches, from their only partition."""

    objection: str | None = None
    holds: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    most: int | None = None
    asked: list[tuple[str, int | None]] = field(default_factory=list)
    """The streams that were asked for, and how much of each a batch may take."""
    skip_lost: bool = False

    def limited(self, most: int) -> "StillConnector":
        return replace(self, most=most)

    def stream(self, spark: SparkSession, channel: str, since: Offsets | None = None) -> DataFrame:
        self.asked.append((channel, self.most))
        return empty_stream(spark)

    def batch(
        self, spark: SparkSession, channel: str, since: Offsets | None = None, until: Offsets | None = None
    ) -> DataFrame:
        held = self.holds[channel]
        first, end = (since or {}).get(0, 0), (until or {}).get(0, len(held))
        rows = [(None, held[at], channel, 0, at, _ARRIVED, 0, None) for at in range(first, end)]
        return spark.createDataFrame(rows, RAW)

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        return records.writeStream.format("noop")
