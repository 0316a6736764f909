"""The way between Spark and the channels: natively where Spark speaks to the middleware, otherwise by its binder."""

from collections.abc import Mapping
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.core.contracts import Positions


class Wire(Protocol):
    """Raw records have the columns of `frames.RAW`; what is written has key, value and headers."""

    @property
    def objection(self) -> str | None:
        """Why no query over it can run in real time; None when that is for Spark to say."""

    @property
    def skip_lost(self) -> bool:
        """Whether queries go on behind what was removed unread."""

    def limited(self, most: int) -> "Wire":
        """The same, but of each stream a batch takes so many records at most."""

    def stream(self, spark: SparkSession, channel: str, since: Positions | None = None) -> DataFrame:
        """The records of a channel, on and on. Where its query has a checkpoint, that tells the offsets; otherwise they
        begin at `since`, or at the beginning."""

    def batch(
        self, spark: SparkSession, channel: str, since: Positions | None = None, until: Positions | None = None
    ) -> DataFrame:
        """The records that a channel holds, from these offsets up to those."""

    def into(self, records: DataFrame, channel: str, at_once: bool = False) -> DataStreamWriter:
        """What brings a stream of records into a channel, at least once each; `at_once`: without waiting for more."""


def told(channel: str, offsets: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """Offsets in the words that checkpoints use, whatever the way."""
    return {channel: {str(partition): offset for partition, offset in offsets.items()}}
