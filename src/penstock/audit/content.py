"""The content of a ledger at one point in time, and the tables from which it is read."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.audit.account import Account
from penstock.audit.findings import ForgedRow, Kind, Numbering, Span, Watched
from penstock.audit.judge import Report
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.metrics import Sketch
from penstock.core.record import OutageInterval


@dataclass(frozen=True, slots=True)
class Run:
    """A run of numbers that were seen, and when the ledger noticed the first of them."""

    first: int
    last: int
    noticed: Micros


def size(runs: Iterable[Run]) -> int:
    """Return how many numbers these runs have."""
    return sum(run.last - run.first + 1 for run in runs)


@dataclass(frozen=True, slots=True)
class ChannelCounts:
    records: int = 0
    without_identity: int = 0


@dataclass(frozen=True, slots=True)
class Numbered:
    """The entries of one numbering, and their order and latency."""

    records: int
    redriven: int = 0
    disorder: int = 0
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets of a channel that were counted, and that it removed before their retention ended."""

    channel: str
    partition: int
    first: int
    last: int
    until: Micros | None
    """When retention would have removed them; None: never."""
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
    folded: Mapping[str, int | None] = field(default_factory=dict)
    """Per result channel: the last generation of its query, and how many records are in the rows of that generation.

    Both are in one number, as in a version. None if it is not known: rows that were forgotten have changed again.
    """
    minutes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Per channel: minute since 1970, and the records that arrived in it."""
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """The last account of each stage."""
    reborn: Collection[str] = ()
    """Stages with more than one generation: the rows of earlier generations are in their channels, too."""
    drained: Micros | None = None
    """When the auditor had last read everything; None if it is not known."""
    stages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The stages that must send an account, and the channels that each of them reads."""
    forged: Mapping[str, int] = field(default_factory=dict)
    """Rows per result channel that its query has not written. No other count includes them."""
    forged_rows: Sequence[ForgedRow] = ()
    """Some of them."""
    lost: Sequence[Lost] = ()
    report: Report | None = None
    """The last report of the auditor; None if there is none."""
    copies: Sequence[str] = ()
    """Files of earlier ledgers that could not be read and were kept."""


TABLES = """
CREATE TABLE channels (
    channel TEXT PRIMARY KEY, kind TEXT NOT NULL, fed_by TEXT NOT NULL, windowed INTEGER NOT NULL,
    compacted INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE stages (stage TEXT PRIMARY KEY, reads TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE topics (channel TEXT PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE positions (
    channel TEXT, partition INTEGER, since INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (channel, partition)
) WITHOUT ROWID;
CREATE TABLE tallies (
    channel TEXT PRIMARY KEY, records INTEGER NOT NULL, without_identity INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE minutes (channel TEXT, minute INTEGER, records INTEGER NOT NULL, PRIMARY KEY (channel, minute)
) WITHOUT ROWID;
CREATE TABLE numbered (
    channel TEXT, sender TEXT, epoch INTEGER, records INTEGER NOT NULL, redriven INTEGER NOT NULL,
    disorder INTEGER NOT NULL, timed INTEGER NOT NULL, least INTEGER NOT NULL, total REAL NOT NULL,
    most INTEGER NOT NULL, newest INTEGER NOT NULL, PRIMARY KEY (channel, sender, epoch)) WITHOUT ROWID;
CREATE TABLE runs (
    channel TEXT, sender TEXT, epoch INTEGER, first INTEGER, last INTEGER NOT NULL, noticed INTEGER NOT NULL,
    PRIMARY KEY (channel, sender, epoch, first)) WITHOUT ROWID;
CREATE TABLE tails (
    channel TEXT, partition INTEGER, sender TEXT, epoch INTEGER, highest INTEGER NOT NULL,
    PRIMARY KEY (channel, partition, sender, epoch)) WITHOUT ROWID;
CREATE TABLE claims (
    channel TEXT, sender TEXT, epoch INTEGER, seq INTEGER, at INTEGER NOT NULL,
    PRIMARY KEY (channel, sender, epoch, seq)) WITHOUT ROWID;
CREATE TABLE blinds (
    channel TEXT, source TEXT, since INTEGER, until INTEGER NOT NULL, PRIMARY KEY (channel, source, since)
) WITHOUT ROWID;
CREATE TABLE latencies (channel TEXT, of TEXT, sketch TEXT NOT NULL, PRIMARY KEY (channel, of)) WITHOUT ROWID;
CREATE TABLE rows (
    channel TEXT, key INTEGER, version INTEGER NOT NULL, changed INTEGER NOT NULL, PRIMARY KEY (channel, key)
) WITHOUT ROWID;
CREATE TABLE folded (
    channel TEXT PRIMARY KEY, records INTEGER NOT NULL, rows INTEGER NOT NULL, trimmed INTEGER NOT NULL,
    doubtful INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE accounts (stage TEXT PRIMARY KEY, document TEXT NOT NULL, lives INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE forged (channel TEXT PRIMARY KEY, rows INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE strangers (
    channel TEXT, partition INTEGER, offset INTEGER, key TEXT NOT NULL, version INTEGER,
    PRIMARY KEY (channel, partition, offset)) WITHOUT ROWID;
CREATE TABLE begins (
    channel TEXT, partition INTEGER, first INTEGER NOT NULL, PRIMARY KEY (channel, partition)) WITHOUT ROWID;
CREATE TABLE ends (
    channel TEXT, partition INTEGER, at INTEGER, upto INTEGER NOT NULL, PRIMARY KEY (channel, partition, at)
) WITHOUT ROWID;
CREATE TABLE lost (
    channel TEXT, partition INTEGER, first INTEGER, last INTEGER NOT NULL, until INTEGER, unread TEXT NOT NULL,
    PRIMARY KEY (channel, partition, first)) WITHOUT ROWID;
CREATE TABLE report (only INTEGER PRIMARY KEY CHECK (only = 0), document TEXT NOT NULL);
CREATE TABLE merged (only INTEGER PRIMARY KEY CHECK (only = 0), at INTEGER NOT NULL, drained INTEGER NOT NULL);
"""


def read_content(db: sqlite3.Connection, copies: Sequence[str]) -> Content:
    """Read the tables of a ledger; `copies` are the files of earlier ledgers."""
    runs: defaultdict[Numbering, list[Run]] = defaultdict(list)
    for channel, sender, epoch, *run in db.execute(
        "SELECT channel, sender, epoch, first, last, noticed FROM runs ORDER BY channel, sender, epoch, first"
    ):
        runs[channel, sender, epoch].append(Run(*run))
    claims: defaultdict[Numbering, list[tuple[int, Micros]]] = defaultdict(list)
    for channel, sender, epoch, seq, at in db.execute("SELECT * FROM claims ORDER BY seq"):
        claims[channel, sender, epoch].append((seq, at))
    since: defaultdict[str, dict[int, int]] = defaultdict(dict)
    until: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for channel, partition, first, last in db.execute("SELECT * FROM positions"):
        since[channel][partition], until[channel][partition] = first, last
    minutes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for channel, minute, records in db.execute("SELECT * FROM minutes ORDER BY minute"):
        minutes[channel].append((minute, records))
    return Content(
        channels={
            channel: Watched(channel, Kind(kind), tuple(fed_by.split()), bool(windowed), bool(compacted))
            for channel, kind, fed_by, windowed, compacted in db.execute("SELECT * FROM channels")
        },
        counts={channel: ChannelCounts(*counts) for channel, *counts in db.execute("SELECT * FROM tallies")},
        numbered={
            (channel, sender, epoch): Numbered(records, redriven, disorder, _span(*span))
            for channel, sender, epoch, records, redriven, disorder, *span in db.execute("SELECT * FROM numbered")
        },
        runs=dict(runs),
        claims=dict(claims),
        blinds=[(channel, OutageInterval(*outage)) for channel, *outage in db.execute("SELECT * FROM blinds")],
        latencies=_sketches(db, "whole"),
        as_of=next((at for (at,) in db.execute("SELECT at FROM merged")), None),
        drained=next((at for (at,) in db.execute("SELECT drained FROM merged")), None),
        since=dict(since),
        until=dict(until),
        steps=_sketches(db, "step"),
        folded={
            channel: None if doubtful else records
            for channel, records, doubtful in db.execute("SELECT channel, records, doubtful FROM folded")
        },
        minutes=dict(minutes),
        accounts={
            stage: Account.of(stage.encode(), document.encode())
            for stage, document in db.execute(
                "SELECT stage, document FROM accounts"
                " WHERE stage IN (SELECT stage FROM stages) OR NOT EXISTS (SELECT 1 FROM stages)"
            )
        },
        stages={stage: reads.split() for stage, reads in db.execute("SELECT stage, reads FROM stages")},
        report=next((Report.of(json.loads(text)) for (text,) in db.execute("SELECT document FROM report")), None),
        copies=copies,
        forged=dict(db.execute("SELECT channel, rows FROM forged").fetchall()),
        forged_rows=[ForgedRow(*row) for row in db.execute("SELECT * FROM strangers")],
        lost=[
            Lost(channel, partition, first, last, until, tuple(unread.split()))
            for channel, partition, first, last, until, unread in db.execute("SELECT * FROM lost")
        ],
        reborn={stage for (stage,) in db.execute("SELECT stage FROM accounts WHERE lives > 1")},
    )


def _sketches(db: sqlite3.Connection, of: str) -> dict[str, Sketch]:
    found = db.execute("SELECT channel, sketch FROM latencies WHERE of = ?", (of,))
    return {channel: Sketch.from_json(json.loads(sketch)) for channel, sketch in found}


def _span(count: int, least: Micros, total: float, most: Micros, newest: Micros) -> Span | None:
    return Span(count, least, int(total), most, newest) if count else None
