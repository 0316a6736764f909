"""The verdict of the audit, its discrepancies and its doubts. No I/O.

One discrepancy makes the verdict `missing`, one doubt makes it `not known`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal

from penstock.core.clock import Micros


class Verdict(StrEnum):
    WHOLE = "whole"
    """Every record is accounted for. Some may be in flight."""
    MISSING = "missing"
    """Records are missing, or something is wrong."""
    NOT_KNOWN = "not known"
    """Nothing is known to be missing, but part of the pipeline could not be checked."""


EXIT_CODES = {Verdict.WHOLE: 0, Verdict.MISSING: 1, Verdict.NOT_KNOWN: 3}
"""Exit codes of the commands that report the verdict. 2 means a wrong argument or setting."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Something that is wrong. The verdict is `missing`."""

    kind: Literal["missing", "doubled", "changed", "forged", "lost", "unexplained"]
    stage: str
    """As in the graph: `store:redis/by_country`; or `channel:rsvps`."""
    count: int
    """Number of records or rows."""
    text: str
    examples: tuple[str, ...] = ()
    """Some of them, by name."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason why the verdict cannot be known."""

    kind: Literal["account", "process", "query", "audit", "channel", "spool", "store", "ledger", "disk"]
    subject: str
    """The stage, process, channel or file that the doubt is about."""
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The last report of the auditor: findings and doubts that do not follow from the counts of the ledger."""

    at: Micros
    closed: bool = False
    """The auditor stopped normally: this was its last report."""
    discrepancies: tuple[Discrepancy, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Report":
        return cls(
            int(document["at"]),
            bool(document["closed"]),
            tuple(Discrepancy(**{**one, "examples": tuple(one["examples"])}) for one in document["discrepancies"]),
            tuple(Doubt(**one) for one in document["doubts"]),
        )

    def silent(self, now: Micros, limit: timedelta) -> bool:
        """Whether the auditor, which reports every two seconds, has sent no report for longer than the limit."""
        return not self.closed and now - self.at > limit // timedelta(microseconds=1)


def verdict_of(missing: int, discrepancies: Sequence[Discrepancy], doubts: Sequence[Doubt]) -> Verdict:
    if missing or discrepancies:
        return Verdict.MISSING
    return Verdict.NOT_KNOWN if doubts else Verdict.WHOLE


def unique(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """One doubt for each kind and subject: the first."""
    found: dict[tuple[str, str], Doubt] = {}
    for doubt in doubts:
        found.setdefault((doubt.kind, doubt.subject), doubt)
    return tuple(found.values())
