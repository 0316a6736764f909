"""The account of a query: what became of each record that it took, from what Spark tells of its finished batches.

Spark tells it once, after it has committed a batch. If the driver dies in between, the next one finds that its account
ends before the checkpoint does, and counts that stretch of the log anew. So the account is exact after any crash.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.checkpoint import batches
from penstock.analysis.engine import Engine
from penstock.analysis.frames import ONCE, counts, judged, taken, welcome, words
from penstock.analysis.query import Query
from penstock.audit.account import Account, Outcome, Share
from penstock.audit.runs import Runs
from penstock.clock import Clock, Micros
from penstock.contracts import Positions

log = logging.getLogger(__name__)

NAMED = 100
"""So many runs of late numbers are remembered: the first."""
LONGEST = 200
"""Of a sender's name, so much is told with them."""

Bounds = Callable[[str], Mapping[int, tuple[int, int]]]


class Log(Protocol):
    """What books ask of a binder."""

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]: ...

    def since(self, channel: str, moment: Micros) -> Positions: ...


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
        channels: Log,
        clock: Clock,
    ) -> None:
        """`before` is the last account that is known, `stood` is where the query stood when it was launched."""
        self._engine = engine
        self._query = query
        self.running = running
        self._stood = stood
        self._log = channels
        self._clock = clock
        self._gated = engine.gated(query)
        self._late: dict[tuple[str, int], Runs] = {}
        self._looked = ""
        self._conserved: bool | None = None
        self._guessed = before is not None and before.guessed
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
        before = self._account
        if self._stood:
            self._catch_up()
        last = self.running.lastProgress
        if last is None or last.timestamp == self._looked:
            return None if self._account is before else self._account
        for progress in self.running.recentProgress:
            if self._told(progress):
                self._take(progress)
        self._looked = last.timestamp
        return None if self._account is before else self._account

    def _catch_up(self) -> None:
        """Take what an earlier life had finished and not told: there may be no further batch that would show it."""
        shares = dict(self._account.shares)
        for channel, stood in self._stood.items():
            if not _ahead(shares[channel].until, stood):
                shares[channel] = self._made_up(channel, shares[channel], stood)
        self._stood = {}
        if shares != self._account.shares:
            self._publish(shares, self._account.step)

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
        dropped = told["taken"] - told["refused"] - told["filtered"] - told["passed"]
        # A query may drop duplicates of its own, behind ours.
        doubled = min(doubled, dropped) if self._gated else 0
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
            # Beyond what the checkpoint remembers: what was late then passes for taken, and nothing is proved by it.
            self._guessed = self._guessed or self._gated
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
            copies = self._engine.batch(channel, share.until, self._remembered(channel, share, watermark))
            earlier = welcome(judged(copies, shape, self._query)).select(*keys)
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

    def _remembered(self, channel: str, share: Share, watermark: int) -> Positions:
        """From where on the records lie whose copies Spark would know: those that the watermark had not passed."""
        if not watermark:
            return share.since
        ahead = self._engine.shapes[channel].ahead // timedelta(microseconds=1)
        found = self._log.since(channel, watermark * 1_000 - ahead)
        return {at: min(found.get(at, to), to) for at, to in share.until.items()}

    def _name_late(self, channel: str, since: Positions, until: Positions, late: int) -> None:
        """Find the numbers of late records: of a batch, those with the earliest event times."""
        if self._named() >= NAMED:
            return
        try:
            batch = judged(self._engine.batch(channel, until, since), self._engine.shapes[channel], self._query)
            rows = welcome(batch).orderBy("event_time").limit(min(late, NAMED)).select("origin.*").collect()
        except (PySparkException, Py4JJavaError) as error:
            log.warning("the late records of %s are counted, and not named: %s", self._query.name, words(error))
            return
        for row in rows:
            if None not in (row["sender"], row["epoch"], row["seq"]) and self._named() < NAMED:
                self._late.setdefault((row["sender"][:LONGEST], row["epoch"]), Runs()).add(row["seq"])

    def _named(self) -> int:
        return sum(len(list(runs)) for runs in self._late.values())

    def _conserves(self) -> bool:
        if self._conserved is None:
            # Asked when it is first needed: Spark takes a while to plan, and has better to do when queries start.
            self._conserved = self._engine.uncounted(self._query) is None
        return self._conserved and not self._guessed

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
            guessed=self._guessed,
            wrote={into: {partition: end for partition, (_, end) in self._log.bounds(into).items()}},
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
