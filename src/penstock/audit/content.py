"""What a ledger holds, as of one moment."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.audit.account import Account
from penstock.audit.findings import Numbering, Span, Stranger, Watched
from penstock.audit.judge import Report
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.metrics import Sketch
from penstock.core.record import OutageInterval


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers that were seen, and when the ledger noticed the first of them."""

    first: int
    last: int
    noticed: Micros


@dataclass(frozen=True, slots=True)
class ChannelCounts:
    records: int = 0
    without_identity: int = 0
    deletions: int = 0


@dataclass(frozen=True, slots=True)
class Numbered:
    """The entries of one numbering, and how they came."""

    records: int
    redriven: int = 0
    disorder: int = 0
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets that a channel held when they were counted, and that it removed before their time."""

    channel: str
    partition: int
    first: int
    last: int
    until: Micros | None
    """When the channel would have removed them anyway; None: never."""
    unread: tuple[str, ...] = ()
    """The stages that had not read all of them."""

    @property
    def size(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Content:
    channels: Mapping[str, Watched]
    counts: Mapping[str, ChannelCounts]
    numbered: Mapping[Numbering, Numbered]
    runs: Mapping[Numbering, Sequence[Run]]
    claims: Mapping[Numbering, Sequence[tuple[int, Micros]]]
    blinds: Sequence[tuple[str, OutageInterval]]
    latencies: Mapping[str, Sketch]
    as_of: Micros | None = None
    """When the last batch was merged; None when there was none yet."""
    since: Mapping[str, Offsets] = field(default_factory=dict)
    until: Mapping[str, Offsets] = field(default_factory=dict)
    """From where to where each channel was read."""
    steps: Mapping[str, Sketch] = field(default_factory=dict)
    disorder: Mapping[Numbering, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Some of the numbers that came out of order."""
    folded: Mapping[str, int | None] = field(default_factory=dict)
    """Per channel of results: the last life of its query, and how many records are folded into the rows of that life.

    Both in one number, as in a version. None when it is no longer known: rows that were forgotten have changed again.
    """
    minutes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Per channel: minute since 1970, and the records that arrived in it."""
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """The last account of each stage."""
    reborn: Collection[str] = ()
    """Stages that began anew: what they wrote in an earlier life is in their channels, too."""
    drained: Micros | None = None
    """When there was last nothing more to be read; None when nobody knows."""
    stages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The stages that have to give an account, and the channels that each of them reads."""
    forged: Mapping[str, int] = field(default_factory=dict)
    """Rows per channel of results that its query has not written. They are in none of the counts."""
    strangers: Sequence[Stranger] = ()
    """Some of them."""
    lost: Sequence[Lost] = ()
    report: Report | None = None
    """What the auditor reported last; None when it never did."""
    copies: Sequence[str] = ()
    """Files of earlier ledgers that could not be read, kept beside this one."""
