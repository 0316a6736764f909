"""Count a range of the log again: the outcomes of its records in a query, and the late ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Protocol

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.frames import ONCE, accepted, fits_and_wanted, names_of, outcome_counts, validated
from penstock.analysis.modes import empty_stream
from penstock.analysis.plans import by_time, gap_of, judges, of_sessions
from penstock.analysis.query import Query
from penstock.audit.account import Outcome
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets

NAMED = 100
"""How many late records are named."""
_TURN = "_turn"
Number = tuple[str, int, int]
"""Sender, epoch, and number."""


class Log(Protocol):
    """The part of a binder that is used here."""

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]: ...

    def since(self, channel: str, timestamp: Micros) -> Offsets: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    channel: str
    start: Offsets
    end: Offsets
    watermark: int
    """The watermark that Spark used for it, in milliseconds; 0 for none."""


@dataclass(frozen=True, slots=True)
class Late:
    """The number of late records (None: unknown), the first of them by number and offset, and a frame of all."""

    count: int | None
    numbers: list[Number] = field(default_factory=list)
    records: DataFrame | None = None
    offsets: list[tuple[int, int]] = field(default_factory=list)
    """Partition and offset."""

    @classmethod
    def of(cls, count: int, records: DataFrame) -> "Late":
        rows = records.orderBy("event_time").limit(NAMED).select("origin.*").collect()
        numbers = ((row["sender"], row["epoch"], row["seq"]) for row in rows)
        offsets = [(row["partition"], row["offset"]) for row in rows]
        return cls(count, [number for number in numbers if None not in number], records, offsets)


@dataclass(frozen=True)
class Recount:
    engine: Engine
    query: Query
    log: Log

    def outcomes(
        self, stretches: Sequence[Stretch], begin: Offsets
    ) -> tuple[dict[Outcome, int], list[tuple[Stretch, Late]]]:
        """The outcomes of consecutive ranges, in a log that starts at `begin`; and the late records of each range."""
        first, last = stretches[0], stretches[-1]
        frame = self._frame(Stretch(first.channel, first.start, last.end, 0)).withColumn(_TURN, _turn(stretches))
        old = F.lit(False)
        for turn, stretch in enumerate(stretches):
            if stretch.watermark and (self._gated or self._judges):
                old = F.when(F.col(_TURN) == turn, F.col("event_time") <= _timestamp(stretch.watermark)).otherwise(old)
        # One job for all ranges: a job takes a second, and queries use the same cores.
        rows = frame.groupBy(_TURN).agg(*outcome_counts(), F.count_if(fits_and_wanted() & old).alias("old")).collect()
        totals = {name: sum(row[name] for row in rows) for name in ("taken", "refused", "filtered")}
        late = [(stretches[row[_TURN]], self.late(stretches[row[_TURN]])) for row in rows if row["old"]]
        late.sort(key=lambda one: stretches.index(one[0]))
        left = totals["taken"] - totals["refused"] - totals["filtered"]
        passed = left - (dropped := sum(found.count or 0 for _, found in late))
        if self._gated:
            keys = [ONCE, "event_time"]
            fresh = accepted(frame).where(~F.coalesce(old, F.lit(False))).dropDuplicates(keys)
            remembered = self._frame(Stretch(first.channel, self._remembered(first, begin), first.start, 0))
            passed = fresh.join(accepted(remembered).select(*keys), keys, "left_anti").count()
        return {
            Outcome.PASSED: passed,
            Outcome.REFUSED: totals["refused"],
            Outcome.FILTERED: totals["filtered"],
            Outcome.LATE: dropped,
            Outcome.DUPLICATE: left - dropped - passed,
        }, late

    def late(self, stretch: Stretch) -> Late:
        """The records of a range that Spark has dropped as late, by Spark's own rules.

        Deduplication, a join of streams, and state in Python with event time drop each record that is not after the
        watermark. A query with windows drops rows of closed windows: the query is run over the old records to find
        these rows. With overlapping windows, a record is late when all its windows were closed.
        """
        if not stretch.watermark or not (self._gated or self._judges):
            return Late(0)
        timestamp = _timestamp(stretch.watermark)
        old = accepted(self._frame(stretch)).where(F.col("event_time") <= timestamp)
        if not (count := old.count()):
            return Late(0)
        if self._gated or self._judges == [True]:
            return Late.of(count, old)
        if len(self.query.inputs) > 1:
            return Late(None)
        result = self.engine.built(self.query, [old.select(*names_of(self.engine.shapes[stretch.channel]))])
        if of_sessions(result):
            return self._late_for_sessions(old, stretch, result)
        if not {"window", "seen"} <= set(result.columns):
            # Only Spark knows which records were dropped.
            return Late(None)
        if not by_time(result):
            return Late(0)
        bounds = [F.unix_micros(f"window.{side}").alias(side) for side in ("start", "end")]
        rows = result.select(*bounds, "seen.count").collect()
        closed = [row for row in rows if row["end"] <= stretch.watermark * 1_000]
        still_open = [row for row in rows if row["end"] > stretch.watermark * 1_000]
        dropped = old.where(within(closed) & ~within(still_open))
        # Records that the query's function skips were not dropped.
        most = sum(row["count"] for row in closed)
        return Late.of(min(dropped.count(), most), dropped)

    def _late_for_sessions(self, old: DataFrame, stretch: Stretch, result: DataFrame) -> Late:
        """Spark drops a record whose own session (from its time to a gap later) is over, and merges the others."""
        if (gap := gap_of(result)) is None or "seen" not in result.columns:
            return Late(None)
        dropped = old.where(F.expr(f"event_time + INTERVAL '{gap}'") <= _timestamp(stretch.watermark))
        counted = self.engine.built(self.query, [dropped.select(*names_of(self.engine.shapes[stretch.channel]))])
        # Records that the query's function skips were not dropped.
        most = counted.agg(F.coalesce(F.sum("seen.count"), F.lit(0))).head()
        return Late.of(min(dropped.count(), most[0] if most else 0), dropped)

    def raw(self, stretch: Stretch, late: Late) -> Iterator[Row]:
        """The late records of a range, raw."""
        if late.records is None:
            return iter(())
        records = self.engine.batch(stretch.channel, stretch.end, stretch.start)
        locations = late.records.select("origin.partition", "origin.offset")
        found = records.join(locations, ["partition", "offset"], "left_semi").orderBy("partition", "offset")
        return found.toLocalIterator()

    @property
    def _gated(self) -> bool:
        return self.engine.gated(self.query)

    @cached_property
    def _judges(self) -> list[bool]:
        # Over streams: in a batch there is no watermark.
        return judges(self.engine.frame(self.query, lambda _: empty_stream(self.engine.spark)))

    def _frame(self, stretch: Stretch) -> DataFrame:
        start = {at: stretch.start.get(at, 0) for at in stretch.end}
        if any(at not in stretch.start for at in stretch.end):
            # A new partition is read from its beginning.
            start = {at: max(begin, self.log.bounds(stretch.channel)[at][0]) for at, begin in start.items()}
        raw = self.engine.admitted(
            self.query.name, stretch.channel, self.engine.batch(stretch.channel, stretch.end, start)
        )
        return validated(raw, self.engine.shapes[stretch.channel], self.query)

    def _remembered(self, stretch: Stretch, begin: Offsets) -> Offsets:
        """The first offsets of the records that Spark still keeps for deduplication."""
        if not stretch.watermark:
            return begin
        ahead = self.engine.shapes[stretch.channel].ahead // timedelta(microseconds=1)
        found = self.log.since(stretch.channel, stretch.watermark * 1_000 - ahead)
        return {at: min(found.get(at, to), to) for at, to in stretch.start.items()}


def _turn(stretches: Sequence[Stretch]) -> Column:
    """The index of a record's range: the first range that ends after it."""
    turn = F.lit(len(stretches) - 1)
    for number in reversed(range(len(stretches) - 1)):
        within = F.lit(False)
        for partition, end in stretches[number].end.items():
            within = within | ((F.col("origin.partition") == partition) & (F.col("origin.offset") < end))
        turn = F.when(within, number).otherwise(turn)
    return turn


def _timestamp(milliseconds: int) -> Column:
    return F.timestamp_millis(F.lit(milliseconds))


def within(windows: Iterable[Row]) -> Column:
    """Whether the event time is in one of these windows. Adjacent windows are merged."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted({(row["start"], row["end"]) for row in windows}):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    if not spans:
        return F.lit(False)
    # One array instead of nested conditions, whose depth Spark limits.
    ranges = ", ".join(f"struct({start}L AS begin, {end}L AS until)" for start, end in spans)
    at = "unix_micros(event_time)"
    return F.expr(f"exists(array({ranges}), span -> {at} >= span.begin AND {at} < span.until)")
