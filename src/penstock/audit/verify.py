"""The integrity verifier: per sender, the numbers that arrived must have no gap, whatever their order. No I/O.

1000, 1001, 1002 is whole; 1000, 1001, 1003 is a loss of 1002. Memory grows with senders and gaps, not with records.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice
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
        seq, sender, epoch, time = (_at(document, path) for path in self._paths)
        number = _number(self.seq, seq)
        if type(sender) is int:
            sender = str(sender)
        elif not self.sender:
            sender = ""
        if type(sender) is not str:
            raise _refused(self.sender, sender, "a name")
        epoch = 0 if epoch is None else _number(self.epoch, epoch)
        return Origin(sender, epoch, number, time if type(time) is int else 0)


def _at(document: object, path: tuple[str, ...]) -> object:
    for name in path:
        document = document.get(name) if type(document) is dict else None
    return document if path else None


def _number(name: str, value: object) -> int:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise _refused(name, value, "a whole number of 64 bits")


def _refused(name: str, value: object, wanted: str) -> Refused:
    return Refused("an update", f'there is no "{name}"' if value is None else f'"{name}" is not {wanted}')


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
class Lapse:
    """The records of a period, and the latency in ms of those with a plausible time: count, min, mean, max."""

    seconds: float
    records: int
    latency: Mapping[str, float] | None

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
    first gaps.
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
        self._began = self._since = clock.elapsed()
        self._reported = 0
        self._latency, self._latencies = Sketch(), Sketch()
        self._unreadable = 0
        self._refused: list[tuple[str, str]] = []
        self._doubts: list[str] = []
        self._notes: list[str] = []

    def take(self, origin: Origin, arrived: Micros | None = None) -> None:
        """Count a record, and its latency if its arrival is known; raise Refused if the sender's name is too long."""
        sender = self._senders.get((origin.sender, origin.epoch))
        if sender is None:
            if len(origin.sender) > LONGEST_NAME:
                raise Refused("an update", f"the sender's name is longer than {LONGEST_NAME:,} characters")
            sender = self._senders[origin.sender, origin.epoch] = _Sender(origin.sender, origin.epoch, self._first)
        sender.add(origin.seq)
        if arrived is not None and -_SKEW <= (took := arrived - origin.time) <= _SLOWEST:
            self._latency.add(took / 1000)

    def fill(self, origin: Origin) -> None:
        """Count a record only if its number is missing."""
        sender = self._senders.get((origin.sender, origin.epoch))
        if sender is not None and sender.lacks(origin.seq):
            sender.add(origin.seq)

    @property
    def missing(self) -> int:
        return sum(sender.count().missing for sender in self._senders.values())

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

    def end(self) -> IntegrityReport:
        """Return the final report, with every sender and every gap."""
        return self.report(final=True)

    def report(self, final: bool = False) -> IntegrityReport:
        """Report the records since the last report, and start a new period."""
        senders, elapsed = [sender for _, sender in sorted(self._senders.items())], self._clock.elapsed()
        counts = tuple(sender.count() for sender in senders)
        records, missing = sum(one.records for one in counts), sum(one.missing for one in counts)
        self._latencies.merge(self._latency)
        since, before, latency = self._since, self._reported, self._latency
        if final:
            since, before, latency = self._began, 0, self._latencies
        gaps = (Gap(one.name, one.epoch, *gap) for one in senders for gap in one.gaps())
        self._since, self._reported, self._latency = elapsed, records, Sketch()
        return IntegrityReport(
            final=final,
            at=self._clock.now(),
            verdict=self._verdict(missing),
            lapse=Lapse(round(elapsed - since, 3), records - before, _latency(latency)),
            senders=len(senders),
            records=records,
            missing=missing,
            doubled=sum(one.doubled for one in counts),
            out_of_order=sum(one.out_of_order for one in counts),
            unreadable=self._unreadable,
            gaps=tuple(gaps if final else islice(gaps, NAMED)),
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


@dataclass(slots=True)
class _Sender:
    """The numbers of a sender; below the `floor` they are not verified."""

    name: str
    epoch: int
    floor: int | None
    numbers: Runs = field(default_factory=Runs)
    records: int = 0
    out_of_order: int = 0

    def add(self, seq: int) -> None:
        highest = self.numbers.last
        new = self.numbers.add(seq)
        self.records += 1
        if new and highest is not None and seq < highest:
            self.out_of_order += 1

    def lacks(self, seq: int) -> bool:
        first, last = self.numbers.first or 0, self.numbers.last or 0
        return (first if self.floor is None else self.floor) <= seq <= last and seq not in self.numbers

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges that did not arrive."""
        if self.floor is None:
            return self.numbers.missing()
        verified = self.numbers.between(self.floor, max(self.floor, self.numbers.last or 0))
        return Runs([(self.floor - 1, self.floor - 1), *verified]).missing()

    def count(self) -> SenderCount:
        first, last = self.numbers.first or 0, self.numbers.last or 0
        missing = sum(end - begin + 1 for begin, end in self.gaps())
        doubled = self.records - self.numbers.size
        return SenderCount(self.name, self.epoch, self.records, first, last, missing, doubled, self.out_of_order)


def _latency(sketch: Sketch) -> dict[str, float] | None:
    found = sketch.summary()
    return found and {name: round(found[name], 3) for name in ("count", "min", "mean", "max")}
