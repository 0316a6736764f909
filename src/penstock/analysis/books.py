"""The account of a query: what became of each record that it took, from what Spark tells of its finished batches.

Spark tells it once, after it has committed a batch. If the driver dies in between, the next one finds that its account
ends before the checkpoint does, and counts that stretch of the log anew. So the account is exact after any crash.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.belated import Belated
from penstock.analysis.checkpoints.abandoning import given_up
from penstock.analysis.checkpoints.batches import batches
from penstock.analysis.checkpoints.doctor import readable
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.engine import Engine
from penstock.analysis.frames import counts, words
from penstock.analysis.query import Query
from penstock.analysis.recount import NAMED, Late, Log, Recount, Stretch
from penstock.audit.account import Account, Outcome, Share
from penstock.audit.runs import Runs
from penstock.clock import Clock
from penstock.contracts import Positions

log = logging.getLogger(__name__)

LONGEST = 200
"""Of a sender's name, so much is told with them."""

Bounds = Callable[[str], Mapping[int, tuple[int, int]]]


def standing(engine: Engine, query: Query, bounds: Bounds) -> dict[str, Positions]:
    """Where a query will go on that is not launched yet: where its checkpoint stands, or where it is to begin."""
    folder = engine.checkpoint(query.name)
    # What is to be given up is read no more.
    known = batches(folder, begun=engine.gives_up(query))
    since = readable(query.name, folder).since or {}
    found: dict[str, Positions] = {}
    for channel in query.inputs:
        first = {partition: low for partition, (low, _) in bounds(channel).items()} | dict(since.get(channel, {}))
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
        belated: Belated | None = None,
    ) -> None:
        """`before` is the last account that is known, `stood` is where the query stood when it was launched.

        `belated` brings its late records to the dead letters.
        """
        self._query = query
        self._runs = deque([(engine, running)])
        self._stood = stood
        self._log = channels
        self._recount = Recount(engine, query, channels)
        self._belated = belated
        self._watermarks: dict[int, int] = {}
        self._clock = clock
        self._gated = engine.gated(query)
        self._late: dict[str, dict[tuple[str, int], Runs]] = {channel: {} for channel in query.inputs}
        self._looked = ""
        self._conserved: bool | None = None
        self._guessed = False
        life = str(running.id)
        if before is not None and before.life == life:
            self._account, self._guessed = before, before.guessed
            for channel, late in self._late.items():
                for sender, epochs in before.shares[channel].late.items():
                    late.update({(sender, int(epoch)): Runs(runs) for epoch, runs in epochs.items()})
        else:
            # An account that begins later than its query, because there was none before, begins where that stood.
            fresh = {channel: Share(at, at, 0, dict.fromkeys(Outcome, 0)) for channel, at in stood.items()}
            number = note_of(engine.checkpoint(query.name)).life
            self._account = Account(f"query:{query.name}", life, clock.now(), fresh, number=number)

    @property
    def account(self) -> Account:
        return self._account

    @property
    def running(self) -> StreamingQuery:
        """The query as it is looked at now."""
        return self._runs[0][1]

    def follow(self, engine: Engine, running: StreamingQuery) -> None:
        """The query was stopped, and goes on as this one: so does its account, when all is taken that was told.

        Another thread may look meanwhile.
        """
        self._runs.append((engine, running))

    def look(self) -> Account | None:
        """The account with all batches that have ended by now; None when there is nothing new."""
        before = self._account
        # Asked before each look: when one follows, the query has told all that it ever will.
        while len(self._runs) > 1:
            self._look()
            self._runs.popleft()
            self._recount = replace(self._recount, engine=self._runs[0][0])
            self._looked = ""
        self._look()
        return None if self._account is before else self._account

    def _look(self) -> None:
        if self._stood:
            self._catch_up()
        last = self.running.lastProgress
        if last is None or last.timestamp == self._looked:
            return
        # What lies between two looks is asked for only if there is something: each progress is a long text.
        stands = {channel: share.until for channel, share in self._account.shares.items()}
        follows = _offsets(last.sources, "startOffset") == stands
        for progress in [last] if follows else self.running.recentProgress:
            if self._told(progress):
                self._take(progress)
        self._looked = last.timestamp

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
        """What became of a batch.

        What a gate dropped was doubled, which its operator counts, or late. Without one, Spark drops rows, not records;
        where it did, the batch is looked at again.
        """
        before = self._watermark_before(progress)
        stretch = Stretch(channel, since, until, before)
        dropped = told["taken"] - told["refused"] - told["filtered"] - told["passed"]
        doubled = late = 0
        if self._gated:
            # A query may drop duplicates of its own, behind ours.
            doubled = min(dropped, sum(_metric(one, "numDroppedDuplicateRows") for one in progress.stateOperators))
            late = dropped - doubled
        if late or any(one.numRowsDroppedByWatermark for one in progress.stateOperators):
            late = self._late_in(stretch, late)
        return {
            Outcome.PASSED: told["passed"] - (0 if self._gated else late),
            Outcome.REFUSED: told["refused"],
            Outcome.FILTERED: told["filtered"],
            Outcome.DUPLICATE: doubled,
            Outcome.LATE: late,
        }

    def _late_in(self, stretch: Stretch, told: int) -> int:
        """How many records of a batch were late: as Spark told if it counts records, otherwise by a look at the log."""
        try:
            found = self._recount.late(stretch)
        except (PySparkException, Py4JJavaError) as error:
            if self._belated is not None:
                # They are in no account before they are in the dead letters.
                raise
            log.warning("the late records of %s cannot be named: %s", self._query.name, words(error))
            found = Late(None)
        self._remember(stretch, found)
        if self._gated:
            return told
        self._guessed = self._guessed or found.count is None
        return found.count or 0

    def _watermark_before(self, progress: Any) -> int:
        """That of the batch before, by which Spark judges what is late; in milliseconds."""
        number, told = progress.batchId, _moment(progress.eventTime.get("watermark"))
        if number - 1 not in self._watermarks:
            known = {batch.number: batch.watermark for batch in batches(self._checkpoint)}
            self._watermarks[number - 1] = known.get(number - 1, told)
        self._watermarks = {number - 1: self._watermarks[number - 1], number: told}
        return self._watermarks[number - 1]

    def _made_up(self, channel: str, share: Share, until: Positions) -> Share:
        """Count the batches that ended, and that nobody was told of."""
        log.info("query %s: its account is made up from the log, from %s to %s", self._query.name, share.until, until)
        known, lost = batches(self._checkpoint), given_up(self._checkpoint)
        for before, batch in zip([None, *known], known, strict=False):
            end = batch.ends.get(channel, {})
            if not _ahead(share.until, end) and _ahead(until, end):
                if batch.number in lost:
                    # It has read on without taking anything: what lies there is missing, and the audit says so.
                    share = _added(share, {}, end)
                    continue
                if before is None and batch.number and batch.watermark:
                    # Of those before it, it tells no watermark, and there was one: none ever falls.
                    self._guess(end)
                share = self._counted(Stretch(channel, share.until, end, before.watermark if before else 0), share)
        if share.until != until:
            self._guess(until)
            share = self._counted(Stretch(channel, share.until, until, 0), share)
        return share

    def _guess(self, until: Positions) -> None:
        """Beyond what the checkpoint remembers: what was late then passes for taken, and nothing is proved by it."""
        self._guessed = True
        if self._belated is not None:
            log.warning("query %s: what was late up to %s is not in the dead letters", self._query.name, until)

    def _counted(self, stretch: Stretch, share: Share) -> Share:
        outcomes, late = self._recount.outcomes(stretch, share.since)
        self._guessed = self._guessed or late.count is None
        self._remember(stretch, late)
        return _added(share, outcomes, stretch.end)

    def _remember(self, stretch: Stretch, late: Late) -> None:
        if self._belated is not None and late.count:
            self._belated.bury(stretch.channel, self._recount.raw(stretch, late))
        for sender, epoch, seq in late.numbers:
            if sum(len(list(runs)) for some in self._late.values() for runs in some.values()) < NAMED:
                self._late[stretch.channel].setdefault((sender[:LONGEST], epoch), Runs()).add(seq)

    def _conserves(self) -> bool:
        if self._conserved is None:
            # Asked when it is first needed: Spark takes a while to plan, and has better to do when queries start.
            self._conserved = self._recount.engine.uncounted(self._query) is None
        return self._conserved and not self._guessed

    def _publish(self, shares: Mapping[str, Share], batch: int) -> None:
        into = self._query.into
        self._account = replace(
            self._account,
            at=self._clock.now(),
            shares={channel: replace(share, late=self._named(channel)) for channel, share in shares.items()},
            conserved=self._conserves(),
            step=batch + 1,
            guessed=self._guessed,
            wrote={into: {partition: end for partition, (_, end) in self._log.bounds(into).items()}},
        )
        if self._belated is not None:
            (share,) = shares.values()
            self._belated.accounted(share.until)

    def _named(self, channel: str) -> dict[str, dict[str, list[tuple[int, int]]]]:
        """The first late records of a channel, as shares tell them."""
        named: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for (sender, epoch), runs in self._late[channel].items():
            named.setdefault(sender, {})[str(epoch)] = list(runs)
        return named

    @property
    def _checkpoint(self) -> str:
        return self._recount.engine.checkpoint(self._query.name)


def _added(share: Share, outcomes: Mapping[Outcome, int], until: Positions) -> Share:
    total = {outcome: share.outcomes.get(outcome, 0) + outcomes.get(outcome, 0) for outcome in Outcome}
    return replace(share, until={**share.until, **until}, taken=sum(total.values()), outcomes=total)


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


def _metric(operator: Any, name: str) -> int:
    return int(operator.customMetrics.get(name, 0))


def _moment(text: str | None) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else 0
