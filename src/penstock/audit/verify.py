"""The integrity verifier: per sender, the numbers that arrived must have no gap, whatever their order. No I/O.

1000, 1001, 1002 is whole; 1000, 1001, 1003 is a loss of 1002. Memory grows with senders and gaps, not with records.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import orjson

from penstock.audit.hops import Gap
from penstock.core.clock import Clock, Micros
from penstock.core.errors import Refused
from penstock.core.metrics import Sketch
from penstock.core.record import Origin
from penstock.core.runs import Runs


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object that hold its identity: dotted paths into nested objects.

    An empty `sender` means a single sender, an empty `epoch` or `time` means none. Epoch and time may be absent; an
    absent or invalid time is 0, because it is not needed to detect a loss.
    """

    seq: str = "seq"
    sender: str = "sender"
    epoch: str = "epoch"
    time: str = "time"

    @cached_property
    def _paths(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(path.split(".")) if path else () for path in (self.seq, self.sender, self.epoch, self.time))

    def read(self, payload: bytes) -> Origin:
        """Return the identity in the payload; raise Refused if there is none."""
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise Refused("an update", f"it is not JSON: {error.msg}") from error
        if type(document) is not dict:
            raise Refused("an update", "it is JSON, but not an object")
        seq_at, sender_at, epoch_at, time_at = self._paths
        seq = _number(self.seq, _at(document, seq_at))
        sender = _at(document, sender_at) if sender_at else ""
        epoch = _at(document, epoch_at) if epoch_at else None
        time = _at(document, time_at) if time_at else None
        if type(sender) is int:
            sender = str(sender)
        elif type(sender) is not str:
            raise Refused("an update", _instead(self.sender, sender, "a name"))
        return Origin(
            sender,
            0 if epoch is None else _number(self.epoch, epoch),
            seq,
            time if type(time) is int else 0,
        )


_BEYOND = 2**63


def _at(document: object, path: tuple[str, ...]) -> object:
    for name in path:
        if type(document) is not dict:
            return None
        document = document.get(name)
    return document


def _number(field_name: str, value: object) -> int:
    if type(value) is int and -_BEYOND <= value < _BEYOND:
        return value
    # Whole numbers beyond 64 bits come out of the parser as floats.
    if isinstance(value, int | float) and abs(value) >= _BEYOND:
        raise Refused("an update", f'"{field_name}" lies beyond 64 bits')
    raise Refused("an update", _instead(field_name, value, "a whole number"))


_KINDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a fraction",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _instead(field_name: str, value: object, wanted: str) -> str:
    if value is None:
        return f'there is no "{field_name}"'
    return f'"{field_name}" is {_KINDS[type(value)]}, not {wanted}'


NAMED = 20
"""Maximum new gaps, and unreadable records, that a report names."""
LONGEST_NAME = 1_000
"""A longer name of a sender is refused, because names are kept in memory."""

# What took longer was kept somewhere, or its clock counts in other units; what came a little before it was sent took
# no time between two clocks that differ.
_SLOWEST, _SKEW = 3_600_000_000, 60_000_000


class Integrity(StrEnum):
    """The verdict on all records that were read."""

    WHOLE = "whole"
    LOSS = "loss"
    UNCERTAIN = "uncertain"
    NOTHING = "nothing"


EXIT_CODES = {Integrity.WHOLE: 0, Integrity.LOSS: 1, Integrity.UNCERTAIN: 2, Integrity.NOTHING: 2}


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from sender to arrival, of the `count` records with a plausible time."""

    count: int
    min: float
    avg: float
    max: float


@dataclass(frozen=True, slots=True)
class Lapse:
    """The records of a period: `missing` numbers were skipped in it, `healed` ones arrived after they were missing."""

    seconds: float
    records: int
    missing: int
    healed: int
    unreadable: int
    latency: Latency | None

    @property
    def rate(self) -> float:
        return round(self.records / self.seconds, 1) if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SenderCount:
    """A sender in one of its epochs. A number is out of order if it first arrived after a higher one."""

    sender: str
    epoch: int
    records: int
    first: int
    last: int
    missing: int
    doubled: int
    out_of_order: int

    @property
    def clean(self) -> bool:
        return not (self.missing or self.doubled or self.out_of_order)


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """The records of the last period, and the totals since the start.

    The last report is `final`: its period is the whole time, and it has all senders and all gaps. The others have the
    first gaps that opened in their period and are still open.
    """

    final: bool
    at: Micros
    verdict: Integrity
    lapse: Lapse
    senders: int
    records: int
    missing: int
    doubled: int
    out_of_order: int
    unreadable: int
    gaps: tuple[Gap, ...]
    by_sender: tuple[SenderCount, ...]
    refused: tuple[tuple[str, str], ...]
    doubts: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the report; by_sender, refused, doubts and notes only in the final one."""
        document = asdict(self)
        document["lapse"]["rate"] = self.lapse.rate
        document["refused"] = [{"place": position, "reason": reason} for position, reason in self.refused]
        for name in ("gaps", "by_sender", "doubts", "notes"):
            document[name] = list(document[name])
        if not self.final:
            for name in ("by_sender", "refused", "doubts", "notes"):
                del document[name]
        return document


class Verifier:
    """Takes the numbers of senders in any order, and reports at any time what is missing.

    `first` is the number with which each sender must start: lower numbers are counted, but not verified. Without it, a
    sender starts with its lowest number.
    """

    def __init__(self, clock: Clock, first: int | None = None) -> None:
        self._clock = clock
        self._first = first
        self._senders: dict[tuple[str, int], _Sender] = {}
        self._aside: dict[tuple[str, int], Runs] = {}
        self._began = self._since = clock.elapsed()
        self._reported = (0, 0, 0, 0)
        self._latency, self._latencies = Sketch(), Sketch()
        self._opened: list[tuple[_Sender, int, int]] = []
        self._unreadable = 0
        self._refused: list[tuple[str, str]] = []
        self._doubts: list[str] = []
        self._notes: list[str] = []

    def take(self, origin: Origin, arrived: Micros | None = None) -> None:
        """Count a record, and its latency if its arrival is known; raise Refused if the sender's name is too long.

        Consecutive numbers are cheap: they are collected as one run.
        """
        seq = origin.seq
        sender = self._senders.get((origin.sender, origin.epoch)) or self._met(origin)
        if seq != sender.due:
            self._settle(sender)
            sender.since = seq
        sender.due = seq + 1
        if arrived is not None and -_SKEW <= (took := arrived - origin.time) <= _SLOWEST:
            self._latency.add(took / 1000)

    def set_aside(self, origin: Origin) -> None:
        """Keep a record from after the end: it counts only if it fills a gap."""
        self._aside.setdefault((origin.sender, origin.epoch), Runs()).add(origin.seq)

    def fill(self) -> int:
        """Fill gaps with the records set aside, and drop the others; return how many numbers are missing then."""
        senders = self._settled()
        aside, self._aside = self._aside, {}
        for key, runs in aside.items():
            if (sender := self._senders.get(key)) is not None:
                for first, last in runs.between(*sender.verified):
                    for gap in sender.gaps(first, last):
                        sender.add(*gap)
        return sum(sender.missing for sender in senders)

    def refuse(self, position: str, reason: str) -> None:
        """Count a record that cannot be read; the first ones are kept with their position."""
        self._unreadable += 1
        if len(self._refused) < NAMED:
            self._refused.append((position, reason))

    def doubt(self, why: str) -> None:
        """Note that something could not be read: without a loss, the verdict is then uncertain."""
        self._doubts.append(why)

    def note(self, what: str) -> None:
        """Add a remark to the final report; it does not change the verdict."""
        self._notes.append(what)

    def report(self) -> IntegrityReport:
        """Report the records since the last report, and start a new period."""
        return self._report(final=False)

    def end(self) -> IntegrityReport:
        """Return the final report, with every sender and every gap."""
        return self._report(final=True)

    def _report(self, final: bool) -> IntegrityReport:
        senders, elapsed = self._settled(), self._clock.elapsed()
        counts = tuple(sender.count() for sender in senders)
        missing = sum(one.missing for one in counts)
        skipped = sum(sender.skipped for sender in senders)
        now = (sum(one.records for one in counts), skipped, skipped - missing, self._unreadable)
        self._latencies.merge(self._latency)
        if final:
            since, before, latency = self._began, (0, 0, 0, 0), self._latencies
            gaps = [Gap(one.name, one.epoch, *gap) for one in senders for gap in one.gaps(*one.verified)]
        else:
            since, before, latency = self._since, self._reported, self._latency
            gaps = [Gap(one.name, one.epoch, *gap) for one, *run in self._opened for gap in one.gaps(*run)][:NAMED]
        self._since, self._reported, self._latency, self._opened = elapsed, now, Sketch(), []
        records, skipped, healed, unreadable = (new - old for new, old in zip(now, before, strict=True))
        return IntegrityReport(
            final=final,
            at=self._clock.now(),
            verdict=self._verdict(missing),
            lapse=Lapse(round(elapsed - since, 3), records, skipped, healed, unreadable, _latency(latency)),
            senders=len(senders),
            records=now[0],
            missing=missing,
            doubled=sum(one.doubled for one in counts),
            out_of_order=sum(one.out_of_order for one in counts),
            unreadable=self._unreadable,
            gaps=tuple(gaps),
            by_sender=counts if final else (),
            refused=tuple(self._refused),
            doubts=tuple(self._doubts),
            notes=tuple(self._notes),
        )

    def _verdict(self, missing: int) -> Integrity:
        if missing:
            return Integrity.LOSS
        if self._unreadable or self._doubts:
            return Integrity.UNCERTAIN
        return Integrity.WHOLE if self._senders else Integrity.NOTHING

    def _met(self, origin: Origin) -> "_Sender":
        if len(origin.sender) > LONGEST_NAME:
            raise Refused("an update", f"the sender's name is longer than {LONGEST_NAME:,} characters")
        sender = self._senders[origin.sender, origin.epoch] = _Sender(origin.sender, origin.epoch, self._first)
        return sender

    def _settled(self) -> list["_Sender"]:
        """Return all senders in order, after their collected runs are counted."""
        for sender in self._senders.values():
            self._settle(sender)
        return [sender for _, sender in sorted(self._senders.items())]

    def _settle(self, sender: "_Sender") -> None:
        """Count the collected run, and keep the first gaps that it opens."""
        if sender.since < sender.due:
            for first, last in sender.add(sender.since, sender.due - 1):
                if len(self._opened) < NAMED:
                    self._opened.append((sender, first, last))
            sender.since = sender.due


class _Sender:
    """The numbers of a sender; those from `since` to before `due` are collected as one run."""

    __slots__ = ("due", "epoch", "floor", "name", "out_of_order", "records", "runs", "since", "skipped")

    def __init__(self, name: str, epoch: int, floor: int | None) -> None:
        self.name, self.epoch, self.floor = name, epoch, floor
        self.runs = Runs()
        self.since = self.due = 0
        self.records = self.skipped = self.out_of_order = 0

    def add(self, first: int, last: int) -> list[tuple[int, int]]:
        """Count first–last; return the ranges that it skipped."""
        low, top = self.runs.first, self.runs.last
        new = self.runs.add(first, last)
        self.records += last - first + 1
        if top is not None:
            self.out_of_order += new - max(0, last - max(top, first - 1))
        if self.floor is not None:
            # Numbers below the floor skip nothing.
            low, top = None, self.floor - 1 if top is None else max(top, self.floor - 1)
        skipped = []
        if top is not None and top + 1 < first:
            skipped.append((top + 1, first - 1))
        if low is not None and last + 1 < low:
            skipped.append((last + 1, low - 1))
        self.skipped += sum(end - begin + 1 for begin, end in skipped)
        return skipped

    @property
    def verified(self) -> tuple[int, int]:
        """The range in which no number may be missing; empty if all numbers are below the floor."""
        return (self.runs.first or 0) if self.floor is None else self.floor, self.runs.last or 0

    @property
    def missing(self) -> int:
        first, last = self.verified
        return max(0, last - first + 1) - sum(end - begin + 1 for begin, end in self.runs.between(first, last))

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges within first–last that did not arrive."""
        if last < first:
            return []
        return Runs([(first - 1, first - 1), *self.runs.between(first, last), (last + 1, last + 1)]).missing()

    def count(self) -> SenderCount:
        first, last = self.runs.first or 0, self.runs.last or 0
        doubled = self.records - self.runs.size
        return SenderCount(self.name, self.epoch, self.records, first, last, self.missing, doubled, self.out_of_order)


def _latency(sketch: Sketch) -> Latency | None:
    if (found := sketch.summary()) is None:
        return None
    return Latency(sketch.count, found["min"], round(found["mean"], 3), found["max"])
