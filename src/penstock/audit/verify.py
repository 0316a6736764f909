"""The integrity verifier: per sender, the numbers that arrived must have no gap, whatever their order. No I/O.

1000, 1001, 1002 is whole; 1000, 1001, 1003 is a loss of 1002. Memory grows with senders and gaps, not with records.
"""

from collections.abc import Iterable, Iterator

from penstock.audit.hops import Gap
from penstock.audit.updates import Update
from penstock.audit.verdict import Lapse, Latency, Report, SenderCount, Verdict
from penstock.core.clock import Clock, Micros
from penstock.core.errors import Refused
from penstock.core.runs import Runs

NAMED = 20
"""So many new gaps are named in a report, and so many records that could not be read."""
LONGEST_NAME = 1_000
"""A sender's name that is longer is refused: names are kept."""

# What took longer was kept somewhere, or its clock counts in other units; what came a little before it was sent took
# no time between two clocks that differ.
_SLOWEST, _SKEW = 3_600_000_000, 60_000_000


class Verifier:
    """Takes updates in any order, and tells at any time what is missing.

    `first` is the number that each sender must begin with: what comes from before it is counted, and not verified.
    Without it, a sender begins with its lowest number.
    """

    def __init__(self, clock: Clock, first: int | None = None) -> None:
        self._clock = clock
        self._first = first
        self._senders: dict[tuple[str, int], _Sender] = {}
        self._aside: dict[tuple[str, int], Runs] = {}
        self._began = self._since = clock.elapsed()
        self._now, self._all = _Tally(), _Tally()
        self._opened: list[tuple[_Sender, int, int]] = []
        self._refused: list[tuple[str, str]] = []
        self._doubts: list[str] = []
        self._notes: list[str] = []

    def take(self, update: Update, arrived: Micros | None = None) -> None:
        """Count an update, and how long it took where its arrival is known; Refused when its sender's name is endless.

        Neighbours in arrival that are neighbours in number cost next to nothing: they wait as one run.
        """
        seq, name, epoch, time = update
        sender = self._senders.get((name, epoch)) or self._met(name, epoch)
        if seq == sender.due:
            sender.due = seq + 1
        else:
            self._settle(sender)
            sender.since, sender.due = seq, seq + 1
        if arrived is not None and time is not None and -_SKEW <= (took := arrived - time) <= _SLOWEST:
            self._now.time(took)

    def set_aside(self, update: Update) -> None:
        """Remember an update from after the end: it counts only if it fills a gap."""
        self._aside.setdefault((update.sender, update.epoch), Runs()).add(update.seq)

    def fill(self) -> int:
        """Fill the gaps with what was set aside, and forget the rest of it; how many numbers are missing then."""
        missing, aside, self._aside = self.missing, self._aside, {}
        for key, runs in aside.items() if missing else ():
            if (sender := self._senders.get(key)) is not None:
                for first, last in list(_common(sender.gaps(), runs)):
                    self._account(sender, first, last)
        return self.missing

    def refuse(self, place: str, reason: str) -> None:
        """Count a record that cannot be read; the first ones are remembered with their place."""
        self._now.unreadable += 1
        if len(self._refused) < NAMED:
            self._refused.append((place, reason))

    def doubt(self, why: str) -> None:
        """Something else was not read that should have been: what is not a loss is uncertain then."""
        self._doubts.append(why)

    def note(self, what: str) -> None:
        """Something that the reader of the end report has to know, and that changes no verdict."""
        self._notes.append(what)

    @property
    def missing(self) -> int:
        """How many numbers are missing now."""
        for sender in self._senders.values():
            self._settle(sender)
        return self._all.missing + self._now.missing - self._all.healed - self._now.healed

    def report(self) -> Report:
        """What came since the last report; then a new lapse begins."""
        missing, elapsed = self.missing, self._clock.elapsed()
        lapse = self._now.lapse(elapsed - self._since)
        gaps = tuple(
            Gap(sender.name, sender.epoch, *gap)
            for sender, first, last in self._opened
            for gap in _common(sender.gaps(), [(first, last)])
        )
        self._all.add(self._now)
        self._now, self._since, self._opened = _Tally(), elapsed, []
        return self._report(missing, lapse, gaps[:NAMED])

    def end(self) -> Report:
        """The report of the whole time, with every sender and every gap."""
        missing = self.missing
        self._all.add(self._now)
        self._now, self._opened = _Tally(), []
        lapse = self._all.lapse(self._clock.elapsed() - self._began)
        senders = [sender for _, sender in sorted(self._senders.items())]
        gaps = tuple(Gap(sender.name, sender.epoch, *gap) for sender in senders for gap in sender.gaps())
        return self._report(missing, lapse, gaps, tuple(sender.count() for sender in senders))

    def _report(
        self, missing: int, lapse: Lapse, gaps: tuple[Gap, ...], by_sender: tuple[SenderCount, ...] | None = None
    ) -> Report:
        return Report(
            final=by_sender is not None,
            at=self._clock.now(),
            verdict=self._verdict(missing),
            lapse=lapse,
            senders=len(self._senders),
            records=self._all.records,
            missing=missing,
            doubled=self._all.doubled,
            out_of_order=self._all.out_of_order,
            unreadable=self._all.unreadable,
            gaps=gaps,
            by_sender=by_sender or (),
            refused=tuple(self._refused),
            doubts=tuple(self._doubts),
            notes=tuple(self._notes),
        )

    def _verdict(self, missing: int) -> Verdict:
        if missing:
            return Verdict.LOSS
        if self._all.unreadable or self._doubts:
            return Verdict.UNCERTAIN
        return Verdict.WHOLE if self._senders else Verdict.NOTHING

    def _met(self, name: str, epoch: int) -> "_Sender":
        if len(name) > LONGEST_NAME:
            raise Refused("an update", f"the sender's name is longer than {LONGEST_NAME:,} characters")
        sender = self._senders[name, epoch] = _Sender(name, epoch, self._first)
        return sender

    def _settle(self, sender: "_Sender") -> None:
        """Account for the run that waits."""
        first, last = sender.since, sender.due - 1
        sender.since = sender.due
        if self._first is not None and first < self._first <= last:
            self._account(sender, first, self._first - 1)
            first = self._first
        if first <= last:
            self._account(sender, first, last)

    def _account(self, sender: "_Sender", first: int, last: int) -> None:
        begins = first if self._first is None else min(first, self._first)
        low, top = (begins, begins - 1) if sender.runs.last is None else (sender.runs.first or 0, sender.runs.last)
        floor = low if self._first is None else self._first
        records = last - first + 1
        new = sender.runs.add(first, last)
        late = new - max(0, last - max(top, first - 1))
        # What comes from before the floor was not missing: nobody knew of it.
        unknown = max(0, min(last, floor - 1) - first + 1)
        healed = max(0, late - unknown)
        skipped = [(max(top, floor - 1) + 1, first - 1)]
        if self._first is None:
            skipped.append((last + 1, low - 1))
        opened = 0
        for begin, end in skipped:
            if begin <= end:
                opened += end - begin + 1
                if len(self._opened) < NAMED:
                    self._opened.append((sender, begin, end))
        sender.records += records
        sender.doubled += records - new
        sender.out_of_order += late
        sender.missing += opened - healed
        self._now.records += records
        self._now.doubled += records - new
        self._now.out_of_order += late
        self._now.missing += opened
        self._now.healed += healed


class _Sender:
    """The numbers of a sender from `floor` on; those from `since` to before `due` wait to be counted as one run."""

    __slots__ = ("doubled", "due", "epoch", "floor", "missing", "name", "out_of_order", "records", "runs", "since")

    def __init__(self, name: str, epoch: int, floor: int | None) -> None:
        self.name, self.epoch, self.floor = name, epoch, floor
        self.runs = Runs()
        self.since = self.due = 0
        self.records = self.missing = self.doubled = self.out_of_order = 0

    def gaps(self) -> Iterator[tuple[int, int]]:
        floor, begins = self.floor, self.runs.first
        if begins is not None and floor is not None and floor < begins:
            yield floor, begins - 1
        for first, last in self.runs.missing():
            if floor is None or last >= floor:
                yield first if floor is None else max(first, floor), last

    def count(self) -> SenderCount:
        return SenderCount(
            self.name,
            self.epoch,
            self.records,
            self.runs.first or 0,
            self.runs.last or 0,
            self.missing,
            self.doubled,
            self.out_of_order,
        )


def _common(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What two rising sequences of runs have in common."""
    left, right = iter(some), iter(others)
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        first, last = max(one[0], other[0]), min(one[1], other[1])
        if first <= last:
            yield first, last
        if one[1] < other[1]:
            one = next(left, None)
        else:
            other = next(right, None)


class _Tally:
    """What is counted in a lapse of time."""

    __slots__ = (
        "_max",
        "_min",
        "_sum",
        "_timed",
        "doubled",
        "healed",
        "missing",
        "out_of_order",
        "records",
        "unreadable",
    )

    def __init__(self) -> None:
        self.records = self.missing = self.healed = self.doubled = self.out_of_order = self.unreadable = 0
        self._timed = self._sum = self._max = 0
        self._min = _SLOWEST

    def time(self, took: Micros) -> None:
        if took < 0:
            took = 0
        self._timed += 1
        self._sum += took
        if took < self._min:
            self._min = took
        if took > self._max:
            self._max = took

    def add(self, other: "_Tally") -> None:
        self.records += other.records
        self.missing += other.missing
        self.healed += other.healed
        self.doubled += other.doubled
        self.out_of_order += other.out_of_order
        self.unreadable += other.unreadable
        self._timed += other._timed
        self._sum += other._sum
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)

    def lapse(self, seconds: float) -> Lapse:
        latency = None
        if self._timed:
            mean = self._sum / self._timed
            latency = Latency(self._timed, self._min / 1000, round(mean / 1000, 3), self._max / 1000)
        return Lapse(round(seconds, 3), self.records, self.missing, self.healed, self.unreadable, latency)
