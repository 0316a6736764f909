"""The account of a query: the outcome of each record that it read.

It is derived from stored data. The checkpoint holds the committed batches and their offsets, the log holds their
records. If Spark reports the counts of a batch, these are used. If a report is missing, for example because the driver
died, that range of the log is counted. So the account is exact after any crash, without another batch.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.checkpoints.batches import Batch, abandoned_batches, batches, last_commit, on_disk, parse_offsets
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.frames import (
    ACCEPTED,
    ONCE,
    SPARK_ERRORS,
    as_read,
    counts,
    description,
    outcome_counts,
    validated,
)
from penstock.analysis.plans import by_time, gap_of, judges, of_sessions
from penstock.analysis.query import Query
from penstock.analysis.supervision import timestamp
from penstock.audit.account import Account, Outcome, Share
from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Offsets
from penstock.core.runs import Runs

log = logging.getLogger(__name__)

LONGEST = 200
"""At most so many characters of a sender's name are stored."""
FIRST_BATCH = 3.0
"""Seconds after which a query without a committed batch counts as a real-time query, whose batches last long."""
REPORTED_WITHIN = 3.0
"""Seconds after which a committed batch that was not reported is counted from the log."""

Bounds = Callable[[str], Mapping[int, tuple[int, int]]]


def beginning(folder: str, channels: Iterable[str], bounds: Bounds) -> dict[str, Offsets]:
    """The offsets where a query began to read, from the note of its checkpoint; without a note, the first offsets."""
    note = note_of(folder)
    found: dict[str, Offsets] = {}
    for channel in channels:
        stored = {**(note.began or {}).get(channel, {}), **(note.since or {}).get(channel, {})}
        found[channel] = stored or {partition: low for partition, (low, _) in bounds(channel).items()}
    return found


NAMED = 100
"""How many late records are named."""
_TURN = "_turn"
Number = tuple[str, int, int]
"""Sender, epoch, and number."""


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
    """Counts ranges of the log again: the outcomes of their records in a query, and the late ones."""

    engine: Engine
    query: Query
    channels: Channels

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
        rows = frame.groupBy(_TURN).agg(*outcome_counts(), F.count_if(F.expr(ACCEPTED) & old).alias("old")).collect()
        totals = {name: sum(row[name] for row in rows) for name in ("taken", "refused", "filtered")}
        late = [(stretches[row[_TURN]], self.late(stretches[row[_TURN]])) for row in rows if row["old"]]
        late.sort(key=lambda one: stretches.index(one[0]))
        left = totals["taken"] - totals["refused"] - totals["filtered"]
        passed = left - (dropped := sum(found.count or 0 for _, found in late))
        if self._gated:
            keys = [ONCE, "event_time"]
            fresh = frame.where(ACCEPTED).where(~F.coalesce(old, F.lit(False))).dropDuplicates(keys)
            remembered = self._frame(Stretch(first.channel, self._remembered(first, begin), first.start, 0))
            passed = fresh.join(remembered.where(ACCEPTED).select(*keys), keys, "left_anti").count()
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
        old = self._frame(stretch).where(ACCEPTED).where(F.col("event_time") <= timestamp)
        if not (count := old.count()):
            return Late(0)
        if self._gated or self._judges == [True]:
            return Late.of(count, old)
        if len(self.query.inputs) > 1:
            return Late(None)
        result = self.engine.built(self.query, [as_read(old)])
        if of_sessions(result):
            return self._late_for_sessions(old, stretch.watermark, result)
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

    def _late_for_sessions(self, old: DataFrame, watermark: int, result: DataFrame) -> Late:
        """Spark drops a record whose own session (from its time to a gap later) is over, and merges the others."""
        if (gap := gap_of(result)) is None or "seen" not in result.columns:
            return Late(None)
        dropped = old.where(F.expr(f"event_time + INTERVAL '{gap}'") <= _timestamp(watermark))
        counted = self.engine.built(self.query, [as_read(dropped)])
        # Records that the query's function skips were not dropped.
        most = counted.agg(F.coalesce(F.sum("seen.count"), F.lit(0))).head()
        return Late.of(min(dropped.count(), most[0] if most else 0), dropped)

    def raw(self, stretch: Stretch, late: Late) -> Iterator[Row]:
        """The late records of a range, raw."""
        assert late.records is not None
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
        return judges(self.engine.over_empty(self.query))

    def _frame(self, stretch: Stretch) -> DataFrame:
        start = {at: stretch.start.get(at, 0) for at in stretch.end}
        if any(at not in stretch.start for at in stretch.end):
            # A new partition is read from its beginning.
            start = {at: max(begin, self.channels.bounds(stretch.channel)[at][0]) for at, begin in start.items()}
        raw = self.engine.admitted(
            self.query.name, stretch.channel, self.engine.batch(stretch.channel, stretch.end, start)
        )
        return validated(raw, self.engine.shapes[stretch.channel], self.query)

    def _remembered(self, stretch: Stretch, begin: Offsets) -> Offsets:
        """The first offsets of the records that Spark still keeps for deduplication."""
        if not stretch.watermark:
            return begin
        ahead = self.engine.shapes[stretch.channel].ahead // timedelta(microseconds=1)
        found = self.channels.since(stretch.channel, stretch.watermark * 1_000 - ahead)
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
    spans = Runs((row["start"], row["end"] - 1) for row in windows)
    ranges = ", ".join(f"struct({first}L AS first, {last}L AS last)" for first, last in spans)
    if not ranges:
        return F.lit(False)
    # One array instead of nested conditions, whose depth Spark limits.
    return F.expr(f"exists(array({ranges}), span -> unix_micros(event_time) BETWEEN span.first AND span.last)")


class QueryAccounting:
    """The account of one query. `look` is called repeatedly; it is cheap when no batch has ended."""

    def __init__(
        self,
        engine: Engine,
        query: Query,
        running: StreamingQuery,
        before: Account | None,
        channels: Channels,
        clock: Clock,
        late_records: LateRecords | None = None,
    ) -> None:
        """`before` is the last known account. `late_records` writes late records to the dead letters."""
        self._query = query
        self._runs = deque([(engine, running)])
        self._channels = channels
        self._recount = Recount(engine, query, channels)
        self._late_records = late_records
        self._batches: dict[int, Batch] = {}
        self._remembering = threading.Lock()
        self._clock = clock
        self._gated = engine.gated(query)
        self._looked = ""
        self._conserved: bool | None = None
        self._guessed = False
        self._behind: float | None = None
        self._began = time.monotonic()
        self._complete, self._failure = False, ""
        generation = str(running.id)
        if before is not None and before.generation == generation:
            self._account, self._guessed = before, before.guessed
        else:
            begin = beginning(engine.checkpoint(query.name), query.inputs, channels.bounds)
            fresh = {channel: Share(at, at, 0, dict.fromkeys(Outcome, 0)) for channel, at in begin.items()}
            note, name = note_of(engine.checkpoint(query.name)), f"query:{query.name}"
            declared = note.since is not None
            self._account = Account(
                name, generation, clock.now(), fresh, number=note.generation, start_declared=declared
            )

    @property
    def account(self) -> Account:
        return self._account

    @property
    def complete(self) -> bool:
        """Whether the account covers all batches that were committed before the start. Do not use it before."""
        return self._complete

    @property
    def accounting(self) -> str:
        """The state of the account: "current", "rebuilding", or "failed: …" with the reason."""
        if self._failure:
            return f"failed: {self._failure}"
        behind = self._behind
        overdue = behind is not None and time.monotonic() - behind > REPORTED_WITHIN
        return "current" if self._complete and not overdue else "rebuilding"

    @property
    def running(self) -> StreamingQuery:
        return self._runs[0][1]

    def follow(self, engine: Engine, running: StreamingQuery) -> None:
        """Continue with a new run of the query, after all reports of the old run. Another thread may call `look`."""
        self._runs.append((engine, running))

    def remember(self) -> None:
        """Remember the batches of the checkpoint, because Spark removes old ones. Thread-safe."""
        with self._remembering:
            last = last_commit(self._checkpoint)
            if last is not None and last not in self._batches:
                self._batches.update({batch.number: batch for batch in batches(self._checkpoint)})

    def look(self) -> Account | None:
        """The account of all committed batches; None when nothing is new.

        If it raises, `accounting` has the reason.
        """
        before = self._account if self._complete else None
        self.remember()
        try:
            self._reports()
        except Exception as error:  # noqa: BLE001 - the log holds the same facts
            log.warning("query %s: a report cannot be taken: %s", self._query.name, _reason(error))
        try:
            self._catch_up()
        except Exception as error:
            self._failure = _reason(error)
            raise
        self._failure = ""
        self._forget()
        return None if self._account is before else self._account

    def _reports(self) -> None:
        # When a later run follows, this run reports nothing more.
        while len(self._runs) > 1:
            try:
                self._take_reports()
            finally:
                self._runs.popleft()
                self._recount = replace(self._recount, engine=self._runs[0][0])
                self._looked = ""
        self._take_reports()

    def _take_reports(self) -> None:
        last = self.running.lastProgress
        if last is None or last.timestamp == self._looked:
            return
        # All recent progress is requested only if a batch is missing: each progress is a long text.
        stands = {channel: share.until for channel, share in self._account.shares.items()}
        follows = _offsets(last.sources, "startOffset") == stands
        for progress in [last] if follows else self.running.recentProgress:
            if not self._committed(progress.batchId):
                # A real-time batch is reported before it is committed. After a crash in between, the batch differs.
                return
            if any(counts(progress.observedMetrics, channel) for channel in self._query.inputs):
                self._take(progress)
        self._looked = last.timestamp

    def _committed(self, number: int) -> bool:
        if on_disk(self._checkpoint) is None:
            return True
        self.remember()
        listed = self._listed_batches()
        return bool(listed) and listed[-1].number >= number

    def _listed_batches(self) -> list[Batch]:
        with self._remembering:
            return sorted(self._batches.values(), key=lambda batch: batch.number)

    def _catch_up(self) -> None:
        """Count committed batches without a report: the first time at once, later when the report is overdue."""
        listed = self._listed_batches()
        last = listed[-1] if listed else None
        shares = dict(self._account.shares)
        behind = [
            channel
            for channel in self._query.inputs
            if last is not None and not _ahead(shares[channel].until, last.ends.get(channel, {}))
        ]
        if last is not None and behind:
            now = time.monotonic()
            self._behind = self._behind or now
            if self._complete and now - self._behind < REPORTED_WITHIN:
                return
            for channel in behind:
                shares[channel] = self._made_up(channel, shares[channel], last.ends[channel])
            self._publish(shares, last.number)
        self._behind, self._complete = None, True
        if last is None and self._conserved is None and time.monotonic() - self._began > FIRST_BATCH:
            # Before the first batch ends, the audit can only count rows.
            self._account = replace(self._account, conserved=self._conserves())

    def _forget(self) -> None:
        """Keep the batches that a later look needs: those not in the account, and the last two before them."""
        covered = [
            batch.number
            for batch in self._listed_batches()
            if all(_ahead(share.until, batch.ends.get(name, {})) for name, share in self._account.shares.items())
        ]
        with self._remembering:
            for number in covered[:-2]:
                del self._batches[number]

    def _take(self, progress: Any) -> None:
        starts, ends = _offsets(progress.sources, "startOffset"), _offsets(progress.sources, "endOffset")
        shares = dict(self._account.shares)
        for channel in self._query.inputs:
            reported, share = counts(progress.observedMetrics, channel), shares[channel]
            start, end = starts.get(channel, share.since), ends.get(channel, {})
            if reported is None or _ahead(share.until, end):
                continue
            if start != share.until and not _ahead(share.until, start):
                share = self._made_up(channel, share, start)
            outcomes, late = self._outcomes(channel, reported, progress, share.until, end)
            shares[channel] = _named(_added(share, outcomes, end), late)
        if shares != self._account.shares:
            self._publish(shares, progress.batchId)

    def _outcomes(
        self, channel: str, reported: Mapping[str, int], progress: Any, since: Offsets, until: Offsets
    ) -> tuple[dict[Outcome, int], Late]:
        """The outcomes of a batch, and its late records.

        What the deduplication dropped was a duplicate, which its operator counts, or late. Without deduplication,
        Spark drops rows, not records: then the batch is counted again from the log.
        """
        # Spark uses the watermark of the previous batch to decide which records are late.
        earlier = self._batches.get(progress.batchId - 1)
        reported_watermark = progress.eventTime.get("watermark")
        if earlier is not None:
            watermark = earlier.watermark
        else:
            watermark = timestamp(reported_watermark) // 1_000 if reported_watermark else 0
        stretch = Stretch(channel, since, until, watermark)
        dropped = reported["taken"] - reported["refused"] - reported["filtered"] - reported["passed"]
        doubled = late = 0
        if self._gated:
            # A query may drop duplicates of its own, behind ours.
            metrics = [operator.customMetrics for operator in progress.stateOperators]
            doubled = min(dropped, sum(int(one.get("numDroppedDuplicateRows", 0)) for one in metrics))
            late = dropped - doubled
        found = Late(0)
        if late or any(one.numRowsDroppedByWatermark for one in progress.stateOperators):
            found = self._late_in(stretch)
        if not self._gated:
            late = found.count or 0
            self._guessed = self._guessed or found.count is None
        return {
            Outcome.PASSED: reported["passed"] - (0 if self._gated else late),
            Outcome.REFUSED: reported["refused"],
            Outcome.FILTERED: reported["filtered"],
            Outcome.DUPLICATE: doubled,
            Outcome.LATE: late,
        }, found

    def _late_in(self, stretch: Stretch) -> Late:
        """The late records of a batch, from the log."""
        try:
            found = self._recount.late(stretch)
        except SPARK_ERRORS as error:
            if self._late_records is not None:
                # Late records are accounted for only after their dead letters are written.
                raise
            log.warning("the late records of %s cannot be named: %s", self._query.name, description(error))
            return Late(None)
        self._write_late(stretch, found)
        return found

    def _made_up(self, channel: str, share: Share, until: Offsets) -> Share:
        """Count the committed batches up to these offsets that were not reported."""
        log.info("query %s: its account is counted from the log, from %s to %s", self._query.name, share.until, until)
        listed, lost = self._listed_batches(), abandoned_batches(self._checkpoint)
        stretches: list[Stretch] = []
        stands = share.until
        for before, batch in zip([None, *listed], listed, strict=False):
            end = {**stands, **batch.ends.get(channel, {})}
            if _ahead(stands, end) or not _ahead(until, batch.ends.get(channel, {})):
                continue
            if batch.number in lost:
                # An abandoned batch skips its records. The audit reports them as missing.
                share = _added(self._counted(stretches, share), {}, end)
                stretches = []
            else:
                follows = before is not None and before.number == batch.number - 1
                if not follows and batch.number and batch.watermark:
                    # The watermark of the previous batch is unknown, and it was not 0: watermarks never decrease.
                    self._guess(end)
                watermark = before.watermark if before is not None and follows else 0
                stretches.append(Stretch(channel, stands, end, watermark))
            stands = end
        if not _ahead(stands, until):
            self._guess(until)
            stretches.append(Stretch(channel, stands, {**stands, **until}, 0))
        return self._counted(stretches, share)

    def _guess(self, until: Offsets) -> None:
        """Without a batch for these offsets, late records count as passed, and the account is not exact."""
        self._guessed = True
        if self._late_records is not None:
            log.warning("query %s: what was late up to %s is not in the dead letters", self._query.name, until)

    def _counted(self, stretches: list[Stretch], share: Share) -> Share:
        if not stretches:
            return share
        outcomes, late = self._recount.outcomes(stretches, share.since)
        for stretch, found in late:
            self._guessed = self._guessed or found.count is None
            self._write_late(stretch, found)
            share = _named(share, found)
        return _added(share, outcomes, stretches[-1].end)

    def _write_late(self, stretch: Stretch, late: Late) -> None:
        if self._late_records is not None and late.count:
            self._late_records.write(stretch.channel, self._recount.raw(stretch, late))

    def _conserves(self) -> bool:
        if self._conserved is None:
            # Computed when first needed: planning takes time, which queries need at the start.
            self._conserved = self._recount.engine.uncounted(self._query) is None
        return self._conserved and not self._guessed

    def _publish(self, shares: Mapping[str, Share], batch: int) -> None:
        into = self._query.into
        self._account = replace(
            self._account,
            at=self._clock.now(),
            shares=shares,
            conserved=self._conserves(),
            step=batch + 1,
            guessed=self._guessed,
            wrote={into: {partition: end for partition, (_, end) in self._channels.bounds(into).items()}},
        )
        if self._late_records is not None:
            (share,) = shares.values()
            self._late_records.accounted(share.until)

    @property
    def _checkpoint(self) -> str:
        return self._recount.engine.checkpoint(self._query.name)


def _reason(error: Exception) -> str:
    return description(error) or type(error).__name__


def _added(share: Share, outcomes: Mapping[Outcome, int], until: Offsets) -> Share:
    total = {outcome: share.outcomes.get(outcome, 0) + outcomes.get(outcome, 0) for outcome in Outcome}
    return replace(share, until={**share.until, **until}, taken=sum(total.values()), outcomes=total)


def _ahead(stands: Offsets, other: Offsets) -> bool:
    """Whether these offsets cover the others."""
    return all(stands.get(partition, 0) >= offset for partition, offset in other.items())


def _offsets(sources: Any, which: str) -> dict[str, Offsets]:
    found: dict[str, Offsets] = {}
    for source in sources:
        found |= parse_offsets(json.loads(getattr(source, which) or "null") or {})
    return found


def _named(share: Share, late: Late) -> Share:
    """The share with the numbers and offsets of late records, up to a limit."""
    numbers = {(sender, epoch): Runs(runs) for sender, epochs in share.late.items() for epoch, runs in epochs.items()}
    for sender, number, seq in late.numbers:
        if _count(numbers) < NAMED:
            numbers.setdefault((sender[:LONGEST], str(number)), Runs()).add(seq)
    offsets = {partition: Runs(runs) for partition, runs in share.late_at.items()}
    for partition, offset in late.offsets:
        if _count(offsets) < NAMED:
            offsets.setdefault(str(partition), Runs()).add(offset)
    by_sender: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for (sender, epoch), runs in numbers.items():
        by_sender.setdefault(sender, {})[epoch] = list(runs)
    return replace(share, late=by_sender, late_at={partition: list(runs) for partition, runs in offsets.items()})


def _count(named: Mapping[Any, Runs]) -> int:
    return sum(len(list(runs)) for runs in named.values())
