"""The account of a query: what became of each record that it took.

It is derived from what is stored: the checkpoint says which batches are committed and how far each has read, the log
holds their records. What Spark reports of a batch saves counting it; where a report does not come, because the driver
died before it or for any other reason, that stretch of the log is counted. So the account is exact after any crash, and
needs no further batch to get there.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.checkpoints.batches import Batch, batches, given_up, on_disk
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.frames import counts, description
from penstock.analysis.query import Query
from penstock.analysis.recount import NAMED, Late, Log, Recount, Stretch
from penstock.analysis.supervision import last_commit
from penstock.audit.account import Account, Outcome, Share
from penstock.core.clock import Clock
from penstock.core.contracts import Offsets
from penstock.core.runs import Runs

log = logging.getLogger(__name__)

LONGEST = 200
"""Of a sender's name, so much is told with them."""
FIRST_BATCH = 3.0
"""Seconds after which a query without a committed batch is taken for one whose batches last long: in real time."""
REPORTED_WITHIN = 3.0
"""Seconds after which a committed batch that was not reported is counted from the log."""

Bounds = Callable[[str], Mapping[int, tuple[int, int]]]


def beginning(folder: str, channels: Iterable[str], bounds: Bounds) -> dict[str, Offsets]:
    """Where a query began to read, as the note of its checkpoint says; without a note, where its channels begin."""
    note = note_of(folder)
    found: dict[str, Offsets] = {}
    for channel in channels:
        stored = {**(note.began or {}).get(channel, {}), **(note.since or {}).get(channel, {})}
        found[channel] = stored or {partition: low for partition, (low, _) in bounds(channel).items()}
    return found


class QueryAccounting:
    """The account of one query. `look` is called again and again; it costs little when no batch has ended."""

    def __init__(
        self,
        engine: Engine,
        query: Query,
        running: StreamingQuery,
        before: Account | None,
        channels: Log,
        clock: Clock,
        late_records: LateRecords | None = None,
    ) -> None:
        """`before` is the last account that is known. `late_records` brings its late records to the dead letters."""
        self._query = query
        self._runs = deque([(engine, running)])
        self._log = channels
        self._recount = Recount(engine, query, channels)
        self._late_records = late_records
        self._batches: dict[int, Batch] = {}
        self._remembering = threading.Lock()
        self._clock = clock
        self._gated = engine.gated(query)
        self._late: dict[str, dict[tuple[str, int], Runs]] = {channel: {} for channel in query.inputs}
        self._late_at: dict[str, dict[int, Runs]] = {channel: {} for channel in query.inputs}
        self._looked = ""
        self._conserved: bool | None = None
        self._guessed = False
        self._behind: float | None = None
        self._began = time.monotonic()
        self._complete, self._failure = False, ""
        generation = str(running.id)
        if before is not None and before.generation == generation:
            self._account, self._guessed = before, before.guessed
            for channel, late in self._late.items():
                for sender, epochs in before.shares[channel].late.items():
                    late.update({(sender, int(epoch)): Runs(runs) for epoch, runs in epochs.items()})
                at = before.shares[channel].late_at
                self._late_at[channel] = {int(partition): Runs(runs) for partition, runs in at.items()}
        else:
            begin = beginning(engine.checkpoint(query.name), query.inputs, channels.bounds)
            fresh = {channel: Share(at, at, 0, dict.fromkeys(Outcome, 0)) for channel, at in begin.items()}
            note = note_of(engine.checkpoint(query.name))
            declared = note.since is not None
            name = f"query:{query.name}"
            self._account = Account(
                name, generation, clock.now(), fresh, number=note.generation, start_declared=declared
            )

    @property
    def account(self) -> Account:
        return self._account

    @property
    def complete(self) -> bool:
        """Whether the account covers what was committed when the query was launched; it must not be used before."""
        return self._complete

    @property
    def accounting(self) -> str:
        """How the account stands: "current", "rebuilding", or "failed: …" with the reason."""
        if self._failure:
            return f"failed: {self._failure}"
        behind = self._behind
        overdue = behind is not None and time.monotonic() - behind > REPORTED_WITHIN
        return "current" if self._complete and not overdue else "rebuilding"

    @property
    def running(self) -> StreamingQuery:
        """The query as it is looked at now."""
        return self._runs[0][1]

    def follow(self, engine: Engine, running: StreamingQuery) -> None:
        """The query was stopped, and goes on as this one: so does its account, when all is taken that was reported.

        Another thread may look meanwhile.
        """
        self._runs.append((engine, running))

    def remember(self) -> None:
        """Remember the batches that the checkpoint holds: Spark removes old ones, even while others are counted.

        Any thread may call it.
        """
        with self._remembering:
            last = last_commit(self._checkpoint)
            if last is not None and last not in self._batches:
                self._batches.update({batch.number: batch for batch in batches(self._checkpoint)})

    def look(self) -> Account | None:
        """The account with all batches that are committed by now; None when there is nothing new.

        It raises when the account cannot be kept; then `accounting` has the reason.
        """
        before = self._account if self._complete else None
        self.remember()
        try:
            self._reports()
        except Exception as error:  # noqa: BLE001 - whatever it is, the log says the same
            log.warning("query %s: a report cannot be taken: %s", self._query.name, _words(error))
        try:
            self._catch_up()
        except Exception as error:
            self._failure = _words(error)
            raise
        self._failure = ""
        self._forget()
        return None if self._account is before else self._account

    def _reports(self) -> None:
        # Asked before each look: when one follows, the query has reported all that it ever will.
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
        # What lies between two looks is asked for only if there is something: each progress is a long text.
        stands = {channel: share.until for channel, share in self._account.shares.items()}
        follows = _offsets(last.sources, "startOffset") == stands
        for progress in [last] if follows else self.running.recentProgress:
            if not self._committed(progress.batchId):
                # In real time a batch is reported before it is committed; after a crash in between it is another one.
                return
            if self._told(progress):
                self._take(progress)
        self._looked = last.timestamp

    def _committed(self, number: int) -> bool:
        known = self._known()
        if (not known or known[-1].number < number) and on_disk(self._checkpoint) is not None:
            self.remember()
            known = self._known()
            return bool(known) and known[-1].number >= number
        return True

    def _known(self) -> list[Batch]:
        """The batches that are remembered, in order."""
        with self._remembering:
            return sorted(self._batches.values(), key=lambda batch: batch.number)

    def _catch_up(self) -> None:
        """Count what is committed and was not reported: at first at once, later when its report is overdue."""
        known = self._known()
        last = known[-1] if known else None
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
            # Until its first batch ends, the audit can only count its rows.
            self._account = replace(self._account, conserved=self._conserves())

    def _forget(self) -> None:
        """Keep what a later look needs: the batches behind the account, and the last before them."""
        covered = [
            batch.number
            for batch in self._known()
            if all(_ahead(share.until, batch.ends.get(name, {})) for name, share in self._account.shares.items())
        ]
        with self._remembering:
            for number in covered[:-2]:
                del self._batches[number]

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
        self, channel: str, told: Mapping[str, int], progress: Any, since: Offsets, until: Offsets
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
            if self._late_records is not None:
                # They are in no account before they are in the dead letters.
                raise
            log.warning("the late records of %s cannot be named: %s", self._query.name, description(error))
            found = Late(None)
        self._remember(stretch, found)
        if self._gated:
            return told
        self._guessed = self._guessed or found.count is None
        return found.count or 0

    def _watermark_before(self, progress: Any) -> int:
        """That of the batch before, by which Spark judges what is late; in milliseconds."""
        known = self._batches.get(progress.batchId - 1)
        return known.watermark if known is not None else _timestamp(progress.eventTime.get("watermark"))

    def _made_up(self, channel: str, share: Share, until: Offsets) -> Share:
        """Count the batches up to there that are committed and were not reported."""
        log.info("query %s: its account is counted from the log, from %s to %s", self._query.name, share.until, until)
        known, lost = self._known(), given_up(self._checkpoint)
        stretches: list[Stretch] = []
        stands = share.until
        for before, batch in zip([None, *known], known, strict=False):
            end = {**stands, **batch.ends.get(channel, {})}
            if _ahead(stands, end) or not _ahead(until, batch.ends.get(channel, {})):
                continue
            if batch.number in lost:
                # It has read on without taking anything: what lies there is missing, and the audit says so.
                share = _added(self._counted(stretches, share), {}, end)
                stretches = []
            else:
                follows = before is not None and before.number == batch.number - 1
                if not follows and batch.number and batch.watermark:
                    # Of those before it, it tells no watermark, and there was one: none ever falls.
                    self._guess(end)
                watermark = before.watermark if before is not None and follows else 0
                stretches.append(Stretch(channel, stands, end, watermark))
            stands = end
        if not _ahead(stands, until):
            self._guess(until)
            stretches.append(Stretch(channel, stands, {**stands, **until}, 0))
        return self._counted(stretches, share)

    def _guess(self, until: Offsets) -> None:
        """Beyond what the checkpoint remembers: what was late then passes for taken, and nothing is proved by it."""
        self._guessed = True
        if self._late_records is not None:
            log.warning("query %s: what was late up to %s is not in the dead letters", self._query.name, until)

    def _counted(self, stretches: list[Stretch], share: Share) -> Share:
        if not stretches:
            return share
        outcomes, late = self._recount.outcomes(stretches, share.since)
        for stretch, found in late:
            self._guessed = self._guessed or found.count is None
            self._remember(stretch, found)
        return _added(share, outcomes, stretches[-1].end)

    def _remember(self, stretch: Stretch, late: Late) -> None:
        if self._late_records is not None and late.count:
            self._late_records.write(stretch.channel, self._recount.raw(stretch, late))
        for sender, epoch, seq in late.numbers:
            if sum(len(list(runs)) for some in self._late.values() for runs in some.values()) < NAMED:
                self._late[stretch.channel].setdefault((sender[:LONGEST], epoch), Runs()).add(seq)

        for partition, offset in late.offsets:
            if sum(len(list(runs)) for some in self._late_at.values() for runs in some.values()) < NAMED:
                self._late_at[stretch.channel].setdefault(partition, Runs()).add(offset)

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
            shares={channel: self._with_late(channel, share) for channel, share in shares.items()},
            conserved=self._conserves(),
            step=batch + 1,
            guessed=self._guessed,
            wrote={into: {partition: end for partition, (_, end) in self._log.bounds(into).items()}},
        )
        if self._late_records is not None:
            (share,) = shares.values()
            self._late_records.accounted(share.until)

    def _with_late(self, channel: str, share: Share) -> Share:
        at = {str(partition): list(runs) for partition, runs in self._late_at[channel].items()}
        return replace(share, late=self._named(channel), late_at=at)

    def _named(self, channel: str) -> dict[str, dict[str, list[tuple[int, int]]]]:
        """The first late records of a channel, as shares tell them."""
        named: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for (sender, epoch), runs in self._late[channel].items():
            named.setdefault(sender, {})[str(epoch)] = list(runs)
        return named

    @property
    def _checkpoint(self) -> str:
        return self._recount.engine.checkpoint(self._query.name)


def _words(error: Exception) -> str:
    return description(error) or type(error).__name__


def _added(share: Share, outcomes: Mapping[Outcome, int], until: Offsets) -> Share:
    total = {outcome: share.outcomes.get(outcome, 0) + outcomes.get(outcome, 0) for outcome in Outcome}
    return replace(share, until={**share.until, **until}, taken=sum(total.values()), outcomes=total)


def _ahead(stands: Offsets, other: Offsets) -> bool:
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


def _timestamp(text: str | None) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else 0
