"""What an integrity verifier reports: from time to time for the last lapse of time, and at the end of all."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from penstock.audit.hops import Gap
from penstock.core.clock import Micros


class Verdict(StrEnum):
    """What can be said of all that was read."""

    WHOLE = "whole"
    LOSS = "loss"
    UNCERTAIN = "uncertain"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from sender to arrival, of the `count` records that tell a plausible time."""

    count: int
    min: float
    avg: float
    max: float


@dataclass(frozen=True, slots=True)
class Lapse:
    """What came in a lapse of time: `missing` numbers were skipped in it, `healed` ones had been missing and came."""

    seconds: float
    records: int
    missing: int
    healed: int
    unreadable: int
    latency: Latency | None

    @property
    def rate(self) -> float:
        return round(self.records / self.seconds, 1) if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate}


@dataclass(frozen=True, slots=True)
class SenderCount:
    """A sender in one of its lives. Out of order is a number that came, for the first time, after a higher one."""

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
class Report:
    """What came in the last lapse of time, and where all stands since the beginning.

    The end report is `final`: its lapse is the whole time, and it has all senders and all gaps; another one has the
    first gaps that opened in its lapse and are still open.
    """

    final: bool
    at: Micros
    verdict: Verdict
    lapse: Lapse
    senders: int
    records: int
    missing: int
    doubled: int
    out_of_order: int
    unreadable: int
    gaps: tuple[Gap, ...]
    by_sender: tuple[SenderCount, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "final": self.final,
            "at": self.at,
            "verdict": self.verdict.value,
            "lapse": self.lapse.to_json(),
            "senders": self.senders,
            "records": self.records,
            "missing": self.missing,
            "doubled": self.doubled,
            "out_of_order": self.out_of_order,
            "unreadable": self.unreadable,
            "gaps": [asdict(gap) for gap in self.gaps],
        }
        if self.final:
            found["by_sender"] = [asdict(one) for one in self.by_sender]
            found["refused"] = [{"place": place, "reason": reason} for place, reason in self.refused]
            found["doubts"], found["notes"] = list(self.doubts), list(self.notes)
        return found
