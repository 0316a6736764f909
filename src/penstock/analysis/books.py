"""The account of a query: what became of each record that it took, from what Spark tells of its finished batches.

Spark tells it once, after it has committed a batch. If the driver dies in between, the next one finds that its account
ends before the checkpoint does, and counts that stretch of the log anew. So the account is exact after any crash.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.checkpoint import batches
from penstock.analysis.engine import Engine
from penstock.analysis.frames import ONCE, counts, judged, taken, welcome
from penstock.analysis.query import Query
from penstock.audit.account import Account, Outcome, Share
from penstock.audit.runs import Runs
from penstock.clock import Clock
from penstock.contracts import Positions

log = logging.getLogger(__name__)

NAMED = 100
"""So many runs of late numbers are remembered."""

Bounds = Callable[[str], Mapping[int, tuple[int, int]]]
Tallies = dict[str, dict[Outcome, int]]


def standing(engine: Engine, query: Query, bounds: Bounds) -> dict[str, Positions]:
    """Where a query will go on that is not launched yet: where its checkpoint stands, or where its channels begin."""
    known = batches(engine.checkpoint(query.name))
    found: dict[str, Positions] = {}
    for channel in query.inputs:
        first = {partition: low for partition, (low, _) in bounds(channel).items()}
        found[channel] = known[-1].ends.get(channel, first) if known else first
    return found


class Books:
    """One query's books. `look` is called again and again; it costs little when no batch has ended."""

    def __init__(
        self,
        engine: Engine,
        query: Query,
        running: StreamingQuery,
        before: Account | None,
        stood: Mapping[str, Positions],
        bounds: Bounds,
        clock: Clock,
    ) -> None:
        """`before` is the last account that is known, `stood` is where the query stood when it was launched."""
        self._engine = engine
        self._query = query
        self.running = running
        self._bounds = bounds
        self._clock = clock
        self._gated = engine.gated(query)
        self._late: dict[tuple[str, int], Runs] = {}
        self._looked = ""
        self._conserved: bool | None = None
        life = str(running.id)
        if before is not None and before.life == life:
            self._account = before
            for sender, epochs in before.late.items():
                for epoch, runs in epochs.items():
                    self._late[sender, int(epoch)] = Runs(runs)
        else:
            # An account that begins later than its query, because there was none before, begins where that stood.
            fresh = {channel: Share(at, at, 0, dict.fromkeys(Outcome, 0)) for channel, at in stood.items()}
            self._account = Account(f"query:{query.name}", life, clock.now(), fresh)

    @property
    def account(self) -> Account:
        return self._account

    def look(self) -> Account | None:
        """The account with all batches that have ended by now; None when there is nothing new."""
        last = self.running.lastProgress
        if last is None or last.timestamp == self._looked:
            return None
        before = self._account
        for progress in self.running.recentProgress:
            if self._told(progress):
                self._take(progress)
        self._looked = last.timestamp
        return None if self._account is before else self._account

    def _told(self, progress: Any) -> bool:
        return any(counts(progress.observedMetrics, channel) for channel in self._query.inputs)

    def _take(self, progress: Any) -> None:
        starts, ends = _offsets(progress.sources, "startOffset"), _offsets(progress.sources, "endOffset")
        shares = dict(self._account.shares)
        for channel in self._query.inputs:
            told, share = counts(progress.observedMetrics, channel), shares[channel]
            start, end = starts.get(channel, share.since), ends.get(channel, {})
            if told is None or _ahead(share.until, end):
                continue
            if start != share.until and not _ahead(share.until, start):
                share = self._made_up(channel, share, start)
            shares[channel] = _added(share, self._outcomes(channel, told, progress, share.until, end), end)
        if shares != self._account.shares:
            self._publish(shares, progress.batchId)

    def _outcomes(
        self, channel: str, told: Mapping[str, int], progress: Any, since: Positions, until: Positions
    ) -> dict[Outcome, int]:
        """What became of a batch. What is late or doubled was dropped by one operator, which counts the doubled."""
        doubled = sum(
            int(operator.customMetrics.get("numDroppedDuplicateRows", 0)) for operator in progress.stateOperators
        )
        doubled = doubled if self._gated else 0
        dropped = told["taken"] - told["refused"] - told["filtered"] - told["passed"]
        late = dropped - doubled
        if late > 0:
            self._name_late(channel, since, until, late)
        return {
            Outcome.PASSED: told["passed"],
            Outcome.REFUSED: told["refused"],
            Outcome.FILTERED: told["filtered"],
            Outcome.DUPLICATE: doubled,
            Outcome.LATE: late,
        }

    def _made_up(self, channel: str, share: Share, until: Positions) -> Share:
        """Count the batches that ended, and that nobody was told of."""
        log.info("query %s: its account is made up from the log, from %s to %s", self._query.name, share.until, until)
        known = batches(self._engine.checkpoint(self._query.name))
        for before, batch in zip([None, *known], known, strict=False):
            end = batch.ends.get(channel, {})
            if _ahead(share.until, end) or not _ahead(until, end):
                continue
            share = self._counted(channel, share, end, before.watermark if before else 0)
        if share.until != until:
            share = self._counted(channel, share, until, 0)
        return share

    def _counted(self, channel: str, share: Share, until: Positions, watermark: int) -> Share:
        shape = self._engine.shapes[channel]
        frame = judged(self._engine.batch(channel, until, share.until), shape, self._query)
        told = frame.agg(*taken()).collect()[0].asDict()
        fitting = welcome(frame)
        late = passed = doubled = 0
        left = told["taken"] - told["refused"] - told["filtered"]
        if self._gated:
            moment = F.timestamp_millis(F.lit(watermark))
            late = fitting.where(F.col("event_time") <= moment).count() if watermark else 0
            keys = [ONCE, "event_time"]
            earlier = welcome(judged(self._engine.batch(channel, share.until), shape, self._query)).select(*keys)
            fresh = fitting.where(F.col("event_time") > moment).dropDuplicates(keys)
            passed = fresh.join(earlier, keys, "left_anti").count()
            doubled = left - late - passed
            if late:
                self._name_late(channel, share.until, until, late)
        else:
            passed = left
        outcomes = {
            Outcome.PASSED: passed,
            Outcome.REFUSED: told["refused"],
            Outcome.FILTERED: told["filtered"],
            Outcome.DUPLICATE: doubled,
            Outcome.LATE: late,
        }
        return _added(share, outcomes, until)

    def _name_late(self, channel: str, since: Positions, until: Positions, late: int) -> None:
        """Find the numbers of late records: of a batch, those with the earliest event times."""
        if sum(len(list(runs)) for runs in self._late.values()) >= NAMED:
            return
        batch = judged(self._engine.batch(channel, until, since), self._engine.shapes[channel], self._query)
        earliest = welcome(batch).orderBy("event_time").limit(min(late, 10 * NAMED))
        for row in earliest.select("origin.*").collect():
            if row["seq"] is not None:
                self._late.setdefault((row["sender"], row["epoch"]), Runs()).add(row["seq"])

    def _conserves(self) -> bool:
        if self._conserved is None:
            # Asked when it is first needed: Spark takes a while to plan, and has better to do when queries start.
            self._conserved = self._engine.uncounted(self._query) is None
        return self._conserved

    def _publish(self, shares: Mapping[str, Share], batch: int) -> None:
        into = self._query.into
        late: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for (sender, epoch), runs in self._late.items():
            late.setdefault(sender, {})[str(epoch)] = list(runs)
        self._account = replace(
            self._account,
            at=self._clock.now(),
            shares=shares,
            conserved=self._conserves(),
            step=batch + 1,
            wrote={into: {partition: end for partition, (_, end) in self._bounds(into).items()}},
            late=late,
        )


def _added(share: Share, outcomes: Mapping[Outcome, int], until: Positions) -> Share:
    total = {outcome: share.outcomes.get(outcome, 0) + outcomes.get(outcome, 0) for outcome in Outcome}
    return Share(share.since, {**share.until, **until}, sum(total.values()), total)


def _ahead(stands: Positions, other: Positions) -> bool:
    """Whether standing here, everything up to the other positions was read."""
    return all(stands.get(partition, 0) >= offset for partition, offset in other.items())


def _offsets(sources: Any, which: str) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for source in sources:
        text = getattr(source, which)
        for channel, offsets in ((json.loads(text) if text else None) or {}).items():
            found[channel] = {int(partition): int(offset) for partition, offset in offsets.items()}
    return found
