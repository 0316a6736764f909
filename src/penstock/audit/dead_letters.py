"""Dead letters compared with the records that they are about, and with the refused counts of the stages.

A collector refuses a record that never reaches its channel: its dead letter has an origin, a reason and a size. Spark
refuses a record of the channel: its dead letter has the place of the record, and is a copy of it. Anything else was
written by something else. The refused count of each query, and of each lake, equals the dead letters that Spark wrote
about the same offsets.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.findings import IN_CHANNEL, key_text, location_of
from penstock.audit.judge import Discrepancy
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.record import Origin
from penstock.core.scan import scan

log = logging.getLogger(__name__)

READ, TURN = 5_000, 1.0
"""Dead letters that are read at once, and the seconds after which reading continues in the next turn."""
COMPARED = 1_000
"""At most this many dead letters wait to be compared with their records. Older ones are not compared."""
CLOSE = 500
"""Records that lie at most this many offsets apart are read together."""
CLOCK_SKEW: Micros = 60_000_000
MOST = 100_000
"""If more dead letters are remembered, those that were found in order are forgotten."""
NAMED = 10
SETTLES = 120.0
"""Seconds after which a refused record has its dead letter."""


class _Letter(NamedTuple):
    entry: Entry
    partition: int
    offset: int
    """Of the record that it is about."""


@dataclass
class _Counted:
    """A stage since this audit first saw its account: what it refused is compared with the letters since then."""

    generation: str
    since: Offsets
    refused: int
    at: Micros
    later: deque[tuple[float, Offsets, int]] = field(default_factory=deque)
    """Its accounts of the last minutes: when, up to where, and how many it had refused."""


_Found = dict[int, dict[int, Micros]]
"""By partition and offset of a record: when its first dead letter was appended."""


class DeadLetterCheck:
    """The dead letters of one channel. One thread calls it."""

    def __init__(
        self,
        channel: str,
        dead: str,
        channels: Channels,
        accounts: Callable[[], Mapping[str, Account]],
        clock: Clock,
    ) -> None:
        self.stage, self.complete = f"channel:{dead}", False
        self._channel, self._dead, self._channels = channel, dead, channels
        self._accounts, self._clock = accounts, clock
        self._opened = ExitStack()
        self._reader: Reader | None = None
        self._letters: _Found = {}
        """Of refused records."""
        self._excluded: _Found = {}
        self._waiting: deque[_Letter] = deque(maxlen=COMPARED)
        self._forged: dict[tuple[int, int], str] = {}
        self._counted: dict[str, _Counted] = {}

    def turn(self) -> None:
        reader, began = self._reader or self._open(), time.monotonic()
        while entries := reader.read(READ, 0.1):
            for entry in entries:
                self._take(entry)
            if time.monotonic() - began > TURN:
                return
        self._compare()
        self._count()
        self._forget()
        self.complete = True

    def discrepancies(self) -> tuple[Discrepancy, ...]:
        return tuple(self._discrepancies())

    def close(self) -> None:
        self._opened.close()

    def _open(self) -> Reader:
        self._reader = self._opened.enter_context(self._channels.reader({self._dead: {}}))
        return self._reader

    def _take(self, entry: Entry) -> None:
        headers = dict(entry.headers)
        if "place" not in headers:
            if "reason" not in headers or "size" not in headers or Origin.read(entry.headers) is None:
                self._forge(entry)
            return
        # The last of each: the record may have had such headers.
        location = location_of(headers["place"])
        if location is None or location[0] != self._channel or "reason" not in headers:
            self._forge(entry)
            return
        _, partition, offset = location
        excluded = headers["reason"].startswith(tuple(kind.encode() for kind in IN_CHANNEL))
        if excluded and "query" not in headers:
            self._forge(entry)
            return
        found = self._excluded if excluded else self._letters
        found.setdefault(partition, {}).setdefault(offset, entry.appended)
        self._waiting.append(_Letter(entry, partition, offset))

    def _forge(self, entry: Entry) -> None:
        self._forged[entry.partition, entry.offset] = _name(entry)
        log.warning("a dead letter in %s was not written by Penstock: %s", self._dead, _name(entry))

    def _compare(self) -> None:
        """Compare the letters that wait with the records at their places. Records that are gone are not compared."""
        waiting = sorted(self._waiting, key=lambda one: (one.partition, one.offset))
        bounds = self._channels.bounds(self._channel) if waiting else {}
        for some in _close(waiting):
            partition, first, last = some[0].partition, some[0].offset, some[-1].offset
            low, end = bounds.get(partition, (0, 0))
            records = {entry.offset: entry for entry in self._records(partition, first, min(last + 1, end), low)}
            for one in some:
                if one.offset >= end:
                    oldest = next(iter(self._records(partition, low, min(low + 1, end), low)), None)
                    forged = oldest is not None and not _newer(oldest, one.entry)
                else:
                    record = records.get(one.offset)
                    forged = record is not None and not _newer(record, one.entry) and not _same(record, one.entry)
                if forged:
                    self._forge(one.entry)
        self._waiting.clear()

    def _records(self, partition: int, first: int, end: int, low: int) -> Iterable[Entry]:
        if max(low, first) >= end:
            return ()
        return scan(self._channels, self._channel, {partition: first}, {partition: (low, end)})

    def _count(self) -> None:
        """Remember the accounts of the stages that refuse records of this channel."""
        now = self._clock.elapsed()
        for stage, account in self._accounts().items():
            share = account.shares.get(self._channel)
            if share is None or not stage.startswith(("query:", "store:delta")):
                continue
            counted = self._counted.get(stage)
            if counted is None or counted.generation != account.generation or account.guessed:
                counted = _Counted(account.generation, share.until, _refused(share), self._clock.now())
                self._counted[stage] = counted
            counted.later.append((now, share.until, _refused(share)))
            while len(counted.later) > 1 and counted.later[1][0] <= now - SETTLES:
                counted.later.popleft()

    def _forget(self) -> None:
        """Forget forged letters that the channel has removed, and letters that were found in order."""
        if sum(map(len, self._letters.values())) > MOST and not any(self._compared()):
            for counted in self._counted.values():
                _, counted.since, counted.refused = counted.later[0]
            for partition, offsets in self._letters.items():
                begin = min((counted.since.get(partition, 0) for counted in self._counted.values()), default=0)
                self._letters[partition] = {at: appended for at, appended in offsets.items() if at >= begin}
        first = {partition: low for partition, (low, _) in self._channels.bounds(self._dead).items()}
        for partition, offset in [at for at in self._forged if at[1] < first.get(at[0], 0)]:
            del self._forged[partition, offset]

    def _discrepancies(self) -> Iterator[Discrepancy]:
        if self._forged:
            count = len(self._forged)
            text = f"{self._dead} holds {count:,} dead letters that Penstock has not written"
            yield Discrepancy("forged", self.stage, count, text, tuple(list(self._forged.values())[:NAMED]))
        yield from self._compared()

    def _compared(self) -> Iterator[Discrepancy]:
        """The dead letters compared with the refused counts, as they were some time ago."""
        for stage, counted in self._counted.items():
            at, until, refused = counted.later[0]
            if self._clock.elapsed() - at < SETTLES:
                continue
            refused -= counted.refused
            if (more := _within(self._letters, counted.since, until, counted.at) - refused) > 0:
                text = f"{self._dead} holds {more:,} dead letters more than {stage} has refused records"
                yield Discrepancy("forged", self.stage, more, text)
            written = _within(self._letters, counted.since, until) + _within(self._excluded, counted.since, until)
            unwritten = refused - written
            if unwritten > 0 and not self._behind(until):
                text = f"{stage} has refused {unwritten:,} records that have no dead letter in {self._dead}"
                yield Discrepancy("missing", self.stage, unwritten, text)

    def _behind(self, until: Offsets) -> bool:
        """Whether the newest dead letters are about older records: Spark has not validated up to these offsets yet."""
        recent = self._clock.now() - int(SETTLES * 1_000_000)
        newest = {partition: max(some.items()) for partition, some in self._letters.items() if some}
        return any(
            appended >= recent and offset < until.get(partition, 0) for partition, (offset, appended) in newest.items()
        )


def _within(letters: _Found, since: Offsets, until: Offsets, after: Micros = 0) -> int:
    """How many records within these offsets have a dead letter; only letters that were appended after a time."""
    return sum(
        since.get(partition, 0) <= offset < until.get(partition, 0) and appended >= after
        for partition, offsets in letters.items()
        for offset, appended in offsets.items()
    )


def _newer(record: Entry, letter: Entry) -> bool:
    """Whether a record was appended after a dead letter: its channel was made anew, and counts its offsets anew."""
    return record.appended > letter.appended + CLOCK_SKEW


def _same(record: Entry, letter: Entry) -> bool:
    return (record.key, record.value) == (letter.key, letter.value)


def _refused(share: Share) -> int:
    return share.outcomes.get(Outcome.REFUSED, 0)


def _close(waiting: Sequence[_Letter]) -> Iterator[list[_Letter]]:
    """Group sorted letters: a group ends where the next record is far away."""
    group: list[_Letter] = []
    for one in waiting:
        if group and (one.partition != group[-1].partition or one.offset - group[-1].offset > CLOSE):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _name(entry: Entry) -> str:
    return f"partition {entry.partition}, offset {entry.offset}, key {key_text(entry.key)}"
