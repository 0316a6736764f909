"""The ledger: what was counted and how far the channels are read, in one SQLite file and one transaction.

Each batch says where it started. Unless that is where the ledger stands, it is refused: so after any crash, and with
any number of auditors, every entry is counted once. The file grows with senders and gaps, not with records. Others may
read it while it is written.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from penstock.audit.findings import Findings, Kind, Numbering, Watched
from penstock.audit.latency import Sketch
from penstock.audit.runs import Runs
from penstock.clock import Micros
from penstock.contracts import Positions
from penstock.errors import Misconfigured, Refused, Unavailable
from penstock.record import Blind

FORMAT = 2
SETTLES_AFTER = 10_000_000
"""Microseconds after which what was announced and has not come is missing rather than in flight."""

_TABLES = """
CREATE TABLE channels (channel TEXT PRIMARY KEY, kind TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE positions (
    channel TEXT, partition INTEGER, next INTEGER NOT NULL, PRIMARY KEY (channel, partition)) WITHOUT ROWID;
CREATE TABLE tallies (
    channel TEXT PRIMARY KEY, records INTEGER NOT NULL, without_identity INTEGER NOT NULL, deletions INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE numbered (
    channel TEXT, sender TEXT, epoch INTEGER, records INTEGER NOT NULL, PRIMARY KEY (channel, sender, epoch)
) WITHOUT ROWID;
CREATE TABLE runs (
    channel TEXT, sender TEXT, epoch INTEGER, first INTEGER, last INTEGER NOT NULL, noticed INTEGER NOT NULL,
    PRIMARY KEY (channel, sender, epoch, first)) WITHOUT ROWID;
CREATE TABLE claims (
    channel TEXT, sender TEXT, epoch INTEGER, seq INTEGER, at INTEGER NOT NULL,
    PRIMARY KEY (channel, sender, epoch, seq)) WITHOUT ROWID;
CREATE TABLE blinds (
    channel TEXT, source TEXT, since INTEGER, until INTEGER NOT NULL, PRIMARY KEY (channel, source, since)
) WITHOUT ROWID;
CREATE TABLE latencies (channel TEXT PRIMARY KEY, sketch TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE merged (only INTEGER PRIMARY KEY CHECK (only = 0), at INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers that were seen, and when the ledger noticed the first of them."""

    first: int
    last: int
    noticed: Micros


@dataclass(frozen=True, slots=True)
class Tally:
    records: int = 0
    without_identity: int = 0
    deletions: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """All that the ledger holds, as of one moment."""

    channels: Mapping[str, Kind]
    tallies: Mapping[str, Tally]
    numbered: Mapping[Numbering, int]
    runs: Mapping[Numbering, Sequence[Run]]
    claims: Mapping[Numbering, Sequence[tuple[int, Micros]]]
    blinds: Sequence[tuple[str, Blind]]
    latencies: Mapping[str, Sketch]
    as_of: Micros | None = None
    """When the last batch was merged; None when there was none yet."""


class Ledger:
    """One ledger file. `read_only` refuses to make one, and never holds up the one who writes.

    Any thread may call any method at any time, `close` too: calls are served one after the other, each of them whole.
    After `close` they raise Unavailable. Who must not wait for the writer opens a ledger of its own, read-only.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        self._lock = RLock()
        with self._explained():
            if read_only:
                if not path.is_file():
                    raise Misconfigured(
                        str(path), "there is no ledger", "start the pipeline once; its auditor makes one"
                    )
                self._db = self._connect("ro")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = self._connect("rwc")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA busy_timeout=5000")
            self._check_format(read_only)

    def watch(self, watched: Sequence[Watched]) -> None:
        """These are the channels of the balance."""
        with self._transaction():
            self._db.execute("DELETE FROM channels")
            self._db.executemany(
                "INSERT INTO channels VALUES (?, ?)", [(one.channel, one.kind.value) for one in watched]
            )

    def positions(self) -> dict[str, dict[int, int]]:
        """How far each channel is read."""
        with self._explained():
            found: defaultdict[str, dict[int, int]] = defaultdict(dict)
            for channel, partition, offset in self._db.execute("SELECT channel, partition, next FROM positions"):
                found[channel][partition] = offset
            return dict(found)

    def channels(self) -> dict[str, Kind]:
        """The channels of the balance, and what is expected of them."""
        with self._explained():
            return {channel: Kind(kind) for channel, kind in self._db.execute("SELECT * FROM channels")}

    def unread(self, bounds: Mapping[str, Mapping[int, tuple[int, int]]]) -> dict[str, int]:
        """How many entries within these bounds of channels the ledger has not read."""
        stands = self.positions()
        return {
            channel: sum(
                max(0, end - max(first, stands.get(channel, {}).get(partition, first)))
                for partition, (first, end) in partitions.items()
            )
            for channel, partitions in bounds.items()
        }

    def merge(self, batch: Findings, now: Micros) -> None:
        """Take the batch and its end positions; Refused when it does not start where the ledger stands."""
        with self._transaction():
            self._advance(batch.start, batch.end)
            for numbering, runs in batch.runs.items():
                self._count(numbering, batch.numbered[numbering])
                for first, last in runs:
                    self._add_run(numbering, first, last, now)
            for channel, records in batch.records.items():
                tally = (channel, records, batch.without_identity[channel], batch.deletions[channel])
                self._db.execute(
                    "INSERT INTO tallies VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                    " records = records + excluded.records, deletions = deletions + excluded.deletions,"
                    " without_identity = without_identity + excluded.without_identity",
                    tally,
                )
            for channel, sketch in batch.latencies.items():
                self._add_latencies(channel, sketch)
            for channel, heartbeat, at in batch.claims:
                # An auditor that was away reads old claims before the records that they are about.
                self._add_claim((channel, heartbeat.sender, heartbeat.epoch), heartbeat.seq, max(at, now))
            self._db.executemany(
                "INSERT INTO blinds VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
                [(channel, blind.source, blind.since, blind.until) for channel, blind in batch.blinds],
            )
            self._db.execute("INSERT OR REPLACE INTO merged VALUES (0, ?)", (now,))

    def content(self) -> Content:
        """Everything, as of one moment."""
        with self._transaction("DEFERRED"):
            runs: defaultdict[Numbering, list[Run]] = defaultdict(list)
            for channel, sender, epoch, *run in self._db.execute(
                "SELECT channel, sender, epoch, first, last, noticed FROM runs ORDER BY channel, sender, epoch, first"
            ):
                runs[channel, sender, epoch].append(Run(*run))
            claims: defaultdict[Numbering, list[tuple[int, Micros]]] = defaultdict(list)
            for channel, sender, epoch, seq, at in self._db.execute("SELECT * FROM claims ORDER BY seq"):
                claims[channel, sender, epoch].append((seq, at))
            return Content(
                channels=self.channels(),
                tallies={channel: Tally(*counts) for channel, *counts in self._db.execute("SELECT * FROM tallies")},
                numbered={
                    (channel, sender, epoch): records
                    for channel, sender, epoch, records in self._db.execute("SELECT * FROM numbered")
                },
                runs=dict(runs),
                claims=dict(claims),
                blinds=[(channel, Blind(*blind)) for channel, *blind in self._db.execute("SELECT * FROM blinds")],
                latencies={
                    channel: Sketch.from_json(json.loads(sketch))
                    for channel, sketch in self._db.execute("SELECT * FROM latencies")
                },
                as_of=next((at for (at,) in self._db.execute("SELECT at FROM merged")), None),
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _connect(self, mode: str) -> sqlite3.Connection:
        # The lock lets one thread at a time through.
        address = f"{self._path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)

    def _advance(self, start: Mapping[str, Positions], end: Mapping[str, Positions]) -> None:
        for channel, positions in end.items():
            for partition, offset in positions.items():
                row = self._db.execute(
                    "SELECT next FROM positions WHERE channel = ? AND partition = ?", (channel, partition)
                ).fetchone()
                stands, starts = row and row[0], start.get(channel, {}).get(partition)
                if stands != starts:
                    raise Refused(
                        f"a batch of {channel}/{partition}", f"it starts at {starts}, the ledger stands at {stands}"
                    )
                self._db.execute("INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", (channel, partition, offset))

    def _count(self, numbering: Numbering, records: int) -> None:
        self._db.execute(
            "INSERT INTO numbered VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET records = records + excluded.records",
            (*numbering, records),
        )

    def _add_run(self, numbering: Numbering, first: int, last: int, now: Micros) -> None:
        touching: list[Run] = []
        # Downwards from the end of the new run: runs are disjoint, so the first that ends too early ends the search.
        with closing(
            self._db.execute(
                "SELECT first, last, noticed FROM runs WHERE channel = ? AND sender = ? AND epoch = ? AND first <= ?"
                " ORDER BY first DESC",
                (*numbering, min(last + 1, 2**63 - 1)),
            )
        ) as rows:
            for row in rows:
                run = Run(*row)
                if run.last < first - 1:
                    break
                touching.append(run)
        if len(touching) == 1 and touching[0].first <= first and last <= touching[0].last:
            return
        melted = Runs([(first, last), *((run.first, run.last) for run in touching)])
        self._db.executemany(
            "DELETE FROM runs WHERE channel = ? AND sender = ? AND epoch = ? AND first = ?",
            [(*numbering, run.first) for run in touching],
        )
        self._db.execute(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)",
            (*numbering, melted.first, melted.last, min([now, *(run.noticed for run in touching)])),
        )

    def _add_latencies(self, channel: str, sketch: Sketch) -> None:
        row = self._db.execute("SELECT sketch FROM latencies WHERE channel = ?", (channel,)).fetchone()
        total = Sketch.from_json(json.loads(row[0])) if row else Sketch()
        total.merge(sketch)
        self._db.execute("INSERT OR REPLACE INTO latencies VALUES (?, ?)", (channel, json.dumps(total.to_json())))

    def _add_claim(self, numbering: Numbering, seq: int, at: Micros) -> None:
        """Keep the first claim, the last that is settled, and those that are younger: a few per sender.

        Of claims that were read at once, as after an outage, the highest says it all.
        """
        self._db.execute("INSERT OR IGNORE INTO claims VALUES (?, ?, ?, ?, ?)", (*numbering, seq, at))
        own = "channel = ?1 AND sender = ?2 AND epoch = ?3"
        self._db.execute(
            f"DELETE FROM claims WHERE {own} AND seq > (SELECT min(seq) FROM claims WHERE {own})"
            f" AND (seq < (SELECT max(seq) FROM claims WHERE {own} AND at <= ?4) OR seq < ?5 AND at >= ?6)",
            (*numbering, at - SETTLES_AFTER, seq, at),
        )

    def _check_format(self, read_only: bool) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found == 0 and not read_only:
            with self._transaction():
                # Another process may have been quicker.
                if self._db.execute("PRAGMA user_version").fetchone() == (0,):
                    for statement in _TABLES.strip().split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
        elif found != FORMAT:
            raise Misconfigured(
                str(self._path),
                f"this ledger has format {found}, and this version of Penstock reads {FORMAT}",
                "move it away; the auditor makes a new one from what the channels still hold",
            )

    @contextmanager
    def _transaction(self, mode: str = "IMMEDIATE") -> Iterator[None]:
        with self._explained():
            self._db.execute(f"BEGIN {mode}")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back after some errors, such as a full disk.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            # The file is in order: it is locked, the disk is full, or another thread has closed it.
            raise Unavailable(f"the ledger {self._path}", str(error)) from error
        except sqlite3.DatabaseError as error:
            raise Misconfigured(
                str(self._path),
                f"it cannot be read as a ledger: {error}",
                "move it away; the auditor makes a new one from what the channels still hold",
            ) from error
        except OSError as error:
            raise Misconfigured(str(self._path), f"it cannot be made: {error.strerror}") from error
