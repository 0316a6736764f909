"""A stretch of the log, counted again: what became of it in a query, and which of its records came late."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.frames import ONCE, built, judged, names_of, taken, welcome
from penstock.analysis.query import Query
from penstock.audit.account import Outcome
from penstock.clock import Micros
from penstock.contracts import Positions

NAMED = 100
"""So many late records are named."""
Number = tuple[str, int, int]
"""Sender, epoch, number."""


class Log(Protocol):
    """What is asked of a binder."""

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]: ...

    def since(self, channel: str, moment: Micros) -> Positions: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    channel: str
    start: Positions
    end: Positions
    watermark: int
    """That by which Spark judged it, in milliseconds; 0 when there was none."""


@dataclass(frozen=True, slots=True)
class Late:
    """How many records came too late; None when that cannot be told. And the numbers of the first."""

    count: int | None
    numbers: list[Number] = field(default_factory=list)


@dataclass(frozen=True)
class Recount:
    engine: Engine
    query: Query
    log: Log

    def outcomes(self, stretch: Stretch, begin: Positions) -> tuple[dict[Outcome, int], Late]:
        """What became of the records of a stretch, in a log that begins there."""
        frame = self._frame(stretch)
        told = frame.agg(*taken()).collect()[0].asDict()
        left = told["taken"] - told["refused"] - told["filtered"]
        late = self.late(stretch)
        passed = left - (late.count or 0)
        if self.engine.gated(self.query):
            keys = [ONCE, "event_time"]
            fresh = welcome(frame).where(F.col("event_time") > _moment(stretch.watermark)).dropDuplicates(keys)
            known = self._frame(Stretch(stretch.channel, self._remembered(stretch, begin), stretch.start, 0))
            passed = fresh.join(welcome(known).select(*keys), keys, "left_anti").count()
        return {
            Outcome.PASSED: passed,
            Outcome.REFUSED: told["refused"],
            Outcome.FILTERED: told["filtered"],
            Outcome.LATE: late.count or 0,
            Outcome.DUPLICATE: left - (late.count or 0) - passed,
        }, late

    def late(self, stretch: Stretch) -> Late:
        """What Spark has dropped of a stretch as late, by the rule that it goes by.

        A gate drops each record that is not after the watermark. A query without one drops rows of windows that were
        closed: the query itself, over the records in question, says which rows those are.
        """
        if not stretch.watermark:
            return Late(0)
        moment = _moment(stretch.watermark)
        old = welcome(self._frame(stretch)).where(F.col("event_time") <= moment)
        if self.engine.gated(self.query):
            return Late(old.count(), _named(old, F.lit(True)))
        if not (count := old.count()):
            return Late(0)
        result = built(self.query, [old.select(*names_of(self.engine.shapes[stretch.channel]))])
        if len(self.query.inputs) != 1 or not {"window", "seen"} <= set(result.columns):
            # Which of these were dropped, only Spark knows.
            return Late(None)
        closed = result.where(F.col("window.end") <= moment).select("window", "seen.count").collect()
        dropped = F.lit(False)
        for start, end in {(row["window"]["start"], row["window"]["end"]) for row in closed}:
            dropped = dropped | ((F.col("event_time") >= F.lit(start)) & (F.col("event_time") < F.lit(end)))
        return Late(min(count, sum(row["count"] for row in closed)), _named(old, dropped))

    def _frame(self, stretch: Stretch) -> DataFrame:
        raw = self.engine.batch(stretch.channel, stretch.end, stretch.start)
        return judged(raw, self.engine.shapes[stretch.channel], self.query)

    def _remembered(self, stretch: Stretch, begin: Positions) -> Positions:
        """From where on the records lie whose copies Spark would know: those that the watermark had not passed."""
        if not stretch.watermark:
            return begin
        ahead = self.engine.shapes[stretch.channel].ahead // timedelta(microseconds=1)
        found = self.log.since(stretch.channel, stretch.watermark * 1_000 - ahead)
        return {at: min(found.get(at, to), to) for at, to in stretch.start.items()}


def _moment(milliseconds: int) -> Column:
    return F.timestamp_millis(F.lit(milliseconds))


def _named(frame: DataFrame, which: Column) -> list[Number]:
    rows = frame.where(which).orderBy("event_time").limit(NAMED).select("origin.*").collect()
    known = ((row["sender"], row["epoch"], row["seq"]) for row in rows)
    return [number for number in known if None not in number]
