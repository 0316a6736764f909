"""The ledger: the counts and the offsets up to which the channels are read, in one SQLite file and one transaction.

Each batch has start offsets. The ledger refuses a batch that does not start at its own offsets: so each entry is
counted once, after any crash and with any number of auditors. The file grows with senders, gaps and result rows, not
with records. Other processes can read it while it is written.

SQLite checks the structure of a file, not its values: triggers keep a checksum of each table, and `verify` compares it.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import RLock
from zlib import crc32

from penstock.audit.account import Account
from penstock.audit.content import TABLES, Content, Lost, Run, read_content
from penstock.audit.findings import FORGED_NAMED, MINUTE, Findings, ForgedRow, Kind, Numbering, Span, Watched
from penstock.audit.judge import Report
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.metrics import Sketch
from penstock.core.record import GENERATIONS, LARGEST_JUMP, generation_and_count
from penstock.core.runs import Runs

FORMAT = 7
SETTLES_AFTER = 10_000_000
"""Microseconds after which a claimed number that has not arrived is missing instead of in flight."""
DAY = 24 * 60
"""Minutes that are kept one by one."""
ROWS = 200_000
"""Maximum window rows that are kept for each result: those that changed last."""

_CHECKSUMS = "checksums"
_REBUILT = "start the pipeline: the auditor keeps the file as a copy and builds a new one from the channels"
_SHORT_READ = 522
"""SQLite's code for a file that ends within a page."""
_BROKEN = ("no such ", "Could not decode ", "user-defined function ")
"""Prefixes of SQLite's errors about missing tables and invalid text."""


class Unreadable(Misconfigured):
    """Raised when the file is damaged, has another format, or was removed."""


def set_aside(path: Path) -> Path | None:
    """Rename a ledger that cannot be read, so that a new one can be made; return the copy, None without a file."""
    if not path.exists():
        # SQLite's log of a deleted file does not belong to the next one.
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return None
    copy = next(copy for number in count(1) if not (copy := path.with_name(f"{path.name}.old-{number}")).exists())
    path.rename(copy)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(copy.with_name(copy.name + suffix))
    return copy


def _checksum(*values: object) -> int:
    return crc32(repr(values).encode())


class Ledger:
    """One ledger file. With `read_only` it is not created, and reading never blocks the writer.

    Any thread may call any method at any time, also `close`: calls run one after the other. After `close` they raise
    Unavailable. To read without waiting for the writer, open a second ledger with `read_only`.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        self.rows_kept = ROWS
        self._lock = RLock()
        with self._explained():
            if read_only:
                if not path.is_file():
                    raise self._away()
                self._db = self._connect("ro")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file() and not path.stat().st_size:
                    raise Unreadable(str(path), "the ledger is empty", _REBUILT)
                self._db = self._connect("rwc")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                # Without it, a replaced row stays in the checksum.
                self._db.execute("PRAGMA recursive_triggers=ON")
            self._db.execute("PRAGMA busy_timeout=5000")
            self._check_format(read_only)

    def watch(self, watched: Sequence[Watched], stages: Mapping[str, Sequence[str]] | None = None) -> None:
        """Set the channels of the balance, and the stages with the channels that each reads.

        None: all stages that send an account. A stage that the pipeline no longer has is not shown; its account is
        kept, because the stage may return.
        """
        with self._transaction():
            self._db.execute("DELETE FROM stages")
            self._db.executemany(
                "INSERT INTO stages VALUES (?, ?)",
                [(stage, " ".join(reads)) for stage, reads in (stages or {}).items()],
            )
            self._db.execute("DELETE FROM channels")
            self._db.executemany(
                "INSERT INTO channels VALUES (?, ?, ?, ?, ?)",
                [(one.channel, one.kind.value, " ".join(one.fed_by), one.windowed, one.compacted) for one in watched],
            )

    def tie(self, topics: Mapping[str, str]) -> None:
        """Store the ids of the topics; raise Misconfigured if one has changed."""
        with self._transaction():
            for channel, counted in self._db.execute("SELECT channel, id FROM topics").fetchall():
                if topics.get(channel, counted) != counted:
                    raise Misconfigured(
                        f"the ledger {self._path}",
                        f"it has counted another topic named {channel}",
                        "move it away; the auditor builds a new one from the channels",
                    )
            self._db.executemany("INSERT OR IGNORE INTO topics VALUES (?, ?)", topics.items())

    def positions(self) -> dict[str, dict[int, int]]:
        """Return the offsets up to which each channel is read."""
        return self._by_partition("SELECT channel, partition, next FROM positions")

    def channels(self) -> dict[str, Kind]:
        """Return the channels of the balance and their kinds."""
        with self._explained():
            return {channel: Kind(kind) for channel, kind in self._db.execute("SELECT channel, kind FROM channels")}

    def unread(self, bounds: Mapping[str, Mapping[int, tuple[int, int]]]) -> dict[str, int]:
        """Return how many entries within these bounds the ledger has not read."""
        stands = self.positions()
        return {
            channel: sum(
                max(0, end - max(first, stands.get(channel, {}).get(partition, first)))
                for partition, (first, end) in partitions.items()
            )
            for channel, partitions in bounds.items()
        }

    def merge(self, batch: Findings, now: Micros, drained: Micros | None = None) -> None:
        """Add a batch and its end offsets; raise Refused if it does not start at the offsets of the ledger.

        `drained` is when the auditor had last read everything: None means now, 0 means unknown. As long as entries are
        unread, a missing number may be in the next batch.
        """
        with self._transaction():
            self._advance(batch.start, batch.end)
            self._count(batch)
            for numbering, runs in batch.runs.items():
                for first, last in runs:
                    self._add_run(numbering, first, last, now)
            for channel, sketch in batch.latencies.items():
                self._add_sketch(channel, "whole", sketch)
            for channel, sketch in batch.steps.items():
                self._add_sketch(channel, "step", sketch)
            for channel, rows in batch.rows.items():
                self._add_rows(channel, rows, now)
            for channel, heartbeat, at in batch.claims:
                # An auditor that was stopped reads old claims before the records that they are about.
                self._add_claim((channel, heartbeat.sender, heartbeat.epoch), heartbeat.seq, max(at, now))
            self._db.executemany(
                "INSERT INTO blinds VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
                [(channel, outage.source, outage.since, outage.until) for channel, outage in batch.blinds],
            )
            for account in batch.accounts:
                self._take(account)
            self._add_forged(batch)
            self._db.execute(
                "INSERT INTO merged VALUES (0, ?1, ?2) ON CONFLICT DO UPDATE SET at = ?1, drained = max(drained, ?2)",
                (now, now if drained is None else drained),
            )

    def content(self) -> Content:
        """Read all of it in one transaction."""
        copies = sorted(
            str(copy)
            for copy in self._path.parent.glob(f"{self._path.name}.old-*")
            if not copy.name.endswith(("-wal", "-shm"))
        )
        with self._transaction("DEFERRED"):
            return read_content(self._db, copies)

    def report(self, report: Report) -> None:
        """Store the report of the auditor, in place of its last one."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO report VALUES (0, ?)", (json.dumps(report.to_json()),))

    def verify(self) -> None:
        """Raise Unreadable if a stored value has changed."""
        with self._transaction("DEFERRED"):
            for table, written in self._db.execute(f"SELECT name, sum FROM {_CHECKSUMS}").fetchall():
                sums = f"SELECT coalesce(sum(checksum({self._columns(table)})), 0) FROM {table}"
                (found,) = self._db.execute(sums).fetchone()
                if found != written:
                    raise Unreadable(
                        str(self._path), f"the ledger is damaged: the checksum of {table} is wrong", _REBUILT
                    )

    def begins(self) -> dict[str, dict[int, int]]:
        """Return the first offset of each partition at the last check."""
        return self._by_partition("SELECT * FROM begins")

    def mark_bounds(
        self, bounds: Mapping[str, Mapping[int, tuple[int, int]]], lost: Sequence[Lost], now: Micros
    ) -> None:
        """Store the current bounds of the channels, and what they have lost since the last call.

        End offsets are kept by the minute for two hours, then by the hour. Losses are kept until retention would have
        removed the records.
        """
        rows = [(channel, at, *both) for channel, some in bounds.items() for at, both in some.items()]
        minute = now - now % MINUTE
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO begins VALUES (?, ?, ?)",
                [(channel, at, first) for channel, at, first, _ in rows],
            )
            self._db.executemany(
                "INSERT OR IGNORE INTO ends VALUES (?, ?, ?, ?)",
                [(channel, at, minute, end) for channel, at, _, end in rows],
            )
            self._db.execute("DELETE FROM ends WHERE at < ? AND at % ?", (now - 120 * MINUTE, 60 * MINUTE))
            self._db.execute("DELETE FROM lost WHERE until < ?", (now,))
            self._db.executemany(
                "INSERT OR REPLACE INTO lost VALUES (?, ?, ?, ?, ?, ?)",
                [(one.channel, one.partition, one.first, one.last, one.until, " ".join(one.unread)) for one in lost],
            )

    def appended_after(self, channel: str, partition: int, offset: int) -> Micros | None:
        """Return a time before the record was appended, to the minute; None if it is not known."""
        with self._explained():
            row = self._db.execute(
                "SELECT max(at) FROM ends WHERE channel = ? AND partition = ? AND upto <= ?",
                (channel, partition, offset),
            ).fetchone()
            return None if row is None else row[0]

    def forged_rows(self) -> list[ForgedRow]:
        """Return the forged rows that are named."""
        with self._explained():
            return [ForgedRow(*row) for row in self._db.execute("SELECT * FROM strangers")]

    def forget_forged_row(self, one: ForgedRow) -> None:
        """Remove a forged row that its channel no longer holds. With the last named row, all are removed."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM strangers WHERE channel = ? AND partition = ? AND offset = ?",
                (one.channel, one.partition, one.offset),
            )
            self._db.execute("UPDATE forged SET rows = rows - 1 WHERE channel = ?", (one.channel,))
            self._db.execute(
                "DELETE FROM forged WHERE channel = ?1 AND NOT EXISTS (SELECT 1 FROM strangers WHERE channel = ?1)",
                (one.channel,),
            )

    def mark_drained(self, now: Micros) -> None:
        """Store that everything was read at this time."""
        with self._transaction():
            self._db.execute("UPDATE merged SET drained = max(drained, ?)", (now,))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _by_partition(self, select: str) -> dict[str, dict[int, int]]:
        with self._explained():
            found: defaultdict[str, dict[int, int]] = defaultdict(dict)
            for channel, partition, offset in self._db.execute(select):
                found[channel][partition] = offset
            return dict(found)

    def _connect(self, mode: str) -> sqlite3.Connection:
        # The lock lets one thread at a time through.
        address = f"{self._path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
        db.create_function("checksum", -1, _checksum, deterministic=True)
        return db

    def _away(self) -> Misconfigured:
        # Only an auditor creates this folder, and the log next to it.
        if self._path.parent.is_dir() or (self._path.parent.parent / "logs" / "audit.log").exists():
            problem = "the ledger is missing: a pipeline has run here, and its counts are not known"
            return Unreadable(str(self._path), problem, f"restore it, or {_REBUILT}")
        return Misconfigured(str(self._path), "the ledger does not exist", "start the pipeline; its auditor creates it")

    def _columns(self, table: str, of: str = "") -> str:
        names = [row[1] for row in self._db.execute(f"PRAGMA table_info({table})")]
        return ", ".join(f'{of}"{name}"' for name in names)

    def _keep_checksums(self) -> None:
        tables = [name for (name,) in self._db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        self._db.execute(f"CREATE TABLE {_CHECKSUMS} (name TEXT PRIMARY KEY, sum INTEGER NOT NULL) WITHOUT ROWID")
        for table in tables:
            self._db.execute(f"INSERT INTO {_CHECKSUMS} VALUES (?, 0)", (table,))
            new, old = (f"checksum({self._columns(table, of)})" for of in ("NEW.", "OLD."))
            for event, change in (("INSERT", f"+ {new}"), ("DELETE", f"- {old}"), ("UPDATE", f"+ {new} - {old}")):
                self._db.execute(
                    f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN"
                    f" UPDATE {_CHECKSUMS} SET sum = sum {change} WHERE name = '{table}'; END"
                )

    def _advance(self, start: Mapping[str, Offsets], end: Mapping[str, Offsets]) -> None:
        for channel, positions in end.items():
            for partition, offset in positions.items():
                row = self._db.execute(
                    "SELECT next FROM positions WHERE channel = ? AND partition = ?", (channel, partition)
                ).fetchone()
                starts = start.get(channel, {}).get(partition)
                if row and row[0] != starts:
                    raise Refused(
                        f"a batch of {channel}/{partition}", f"it starts at {starts}, the ledger stands at {row[0]}"
                    )
                self._db.execute(
                    "INSERT INTO positions VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET next = excluded.next",
                    (channel, partition, starts or 0, offset),
                )

    def _count(self, batch: Findings) -> None:
        self._db.executemany(
            "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET records = records + excluded.records,"
            " without_identity = without_identity + excluded.without_identity",
            [
                (channel, batch.records[channel], batch.without_identity[channel])
                for channel in {*batch.records, *batch.without_identity}
            ],
        )
        self._db.executemany(
            "INSERT INTO minutes VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET records = records + excluded.records",
            [(channel, minute, records) for (channel, minute), records in batch.minutes.items()],
        )
        for channel in batch.records:
            self._db.execute(
                "DELETE FROM minutes WHERE channel = ?1"
                " AND minute < (SELECT max(minute) FROM minutes WHERE channel = ?1) - ?2",
                (channel, DAY),
            )
        disorder = self._disorder(batch)
        for numbering, records in batch.numbered.items():
            span = batch.spans.get(numbering) or Span(0, 2**62, 0, -(2**62), 0)
            self._db.execute(
                "INSERT INTO numbered VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " records = records + excluded.records, redriven = redriven + excluded.redriven,"
                " disorder = disorder + excluded.disorder, timed = timed + excluded.timed,"
                " least = min(least, excluded.least), total = total + excluded.total,"
                " most = max(most, excluded.most), newest = max(newest, excluded.newest)",
                (
                    *numbering,
                    records,
                    batch.redriven[numbering],
                    disorder.get(numbering, Runs()).size,
                    span.count,
                    span.least,
                    float(span.total),
                    span.most,
                    span.newest,
                ),
            )

    def _disorder(self, batch: Findings) -> dict[Numbering, Runs]:
        """Find numbers out of order within the batch, or across its start."""
        found = {numbering: Runs(runs) for numbering, runs in batch.disorder.items()}
        for (channel, partition, sender, epoch), (first, highest) in batch.tails.items():
            position = (channel, partition, sender, epoch)
            own = "channel = ? AND partition = ? AND sender = ? AND epoch = ?"
            row = self._db.execute(f"SELECT highest FROM tails WHERE {own}", position).fetchone()
            if row and first < row[0]:
                found.setdefault((channel, sender, epoch), Runs()).add(first)
            if not row or highest > row[0]:
                self._db.execute("INSERT OR REPLACE INTO tails VALUES (?, ?, ?, ?, ?)", (*position, highest))
        return found

    def _add_rows(self, channel: str, rows: Mapping[int, int], now: Micros) -> None:
        """Count the highest version of each row: its growth is the number of records that it has aggregated.

        In a new generation of the query its rows count from 0 again; rows of earlier generations no longer count.
        """
        before = self._db.execute("SELECT records, trimmed FROM folded WHERE channel = ?", (channel,)).fetchone()
        total, trimmed = before or (0, 0)
        generation, _ = generation_and_count(total)
        last = max((generation_and_count(one)[0] for one in rows.values()), default=0)
        if last > generation:
            generation, trimmed = last, 0
            begun = "UPDATE folded SET records = ?, trimmed = 0, doubtful = 0 WHERE channel = ?"
            self._db.execute(begun, (generation * GENERATIONS, channel))
        records = new = doubtful = 0
        for key, version in rows.items():
            row = self._db.execute("SELECT version FROM rows WHERE channel = ? AND key = ?", (channel, key)).fetchone()
            if row and row[0] >= version:
                continue
            new += row is None
            if version >= generation * GENERATIONS:
                records += version - max(row[0] if row else 0, generation * GENERATIONS)
                # A row that was forgotten and changes again looks like a new one.
                doubtful |= trimmed and row is None and version > generation * GENERATIONS + 1
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (channel, key, version, now))
        self._db.execute(
            "INSERT INTO folded VALUES (?, ?, ?, 0, ?) ON CONFLICT DO UPDATE SET"
            " records = records + excluded.records, rows = rows + excluded.rows,"
            " doubtful = max(doubtful, excluded.doubtful)",
            (channel, records if before else records + generation * GENERATIONS, new, doubtful),
        )
        count, windowed = self._db.execute(
            "SELECT rows, (SELECT windowed FROM channels WHERE channel = ?1) FROM folded WHERE channel = ?1", (channel,)
        ).fetchone()
        if count > 1.1 * self.rows_kept and windowed:
            self._db.execute(
                "DELETE FROM rows WHERE channel = ?1 AND changed < (SELECT changed FROM rows WHERE channel = ?1"
                " ORDER BY changed DESC LIMIT 1 OFFSET ?2)",
                (channel, self.rows_kept),
            )
            self._db.execute(
                "UPDATE folded SET trimmed = 1, rows = (SELECT count(*) FROM rows WHERE channel = ?1)"
                " WHERE channel = ?1",
                (channel,),
            )

    def _add_forged(self, batch: Findings) -> None:
        self._db.executemany(
            "INSERT INTO forged VALUES (?, ?) ON CONFLICT DO UPDATE SET rows = rows + excluded.rows",
            batch.forged.items(),
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO strangers SELECT ?1, ?2, ?3, ?4, ?5"
            " WHERE (SELECT count(*) FROM strangers WHERE channel = ?1) < ?6",
            [(one.channel, one.partition, one.offset, one.key, one.version, FORGED_NAMED) for one in batch.forged_rows],
        )

    def _take(self, account: Account) -> None:
        """Keep the later account of a stage. Of two generations that is the one that was sent later."""
        row = self._db.execute("SELECT document, lives FROM accounts WHERE stage = ?", (account.stage,)).fetchone()
        generations = 1
        if row:
            last = Account.of(account.key, row[0].encode())
            if account.generation == last.generation and account.step <= last.step:
                return
            generations = row[1] + (account.generation != last.generation)
        self._db.execute(
            "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", (account.stage, account.dumps().decode(), generations)
        )

    def _add_run(self, numbering: Numbering, first: int, last: int, now: Micros) -> None:
        touching: list[Run] = []
        # Backwards from the end of the new run: runs are disjoint, so the first that ends too early ends the search.
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

    def _add_sketch(self, channel: str, of: str, sketch: Sketch) -> None:
        row = self._db.execute("SELECT sketch FROM latencies WHERE channel = ? AND of = ?", (channel, of)).fetchone()
        total = Sketch.from_json(json.loads(row[0])) if row else Sketch()
        total.merge(sketch)
        self._db.execute(
            "INSERT OR REPLACE INTO latencies VALUES (?, ?, ?)", (channel, of, json.dumps(total.to_json()))
        )

    def _add_claim(self, numbering: Numbering, seq: int, at: Micros) -> None:
        """Keep the first claim, the last settled one, and younger ones: a few per sender.

        Of claims that were read together, as after an outage, the highest is enough. A claim that jumps does not
        replace those before it: it may be forged.
        """
        self._db.execute("INSERT OR IGNORE INTO claims VALUES (?, ?, ?, ?, ?)", (*numbering, seq, at))
        own = "channel = ?1 AND sender = ?2 AND epoch = ?3"
        later = f"SELECT 1 FROM claims AS later WHERE {own} AND later.seq > old.seq AND later.seq - old.seq <= ?7"
        self._db.execute(
            f"DELETE FROM claims AS old WHERE {own} AND seq > (SELECT min(seq) FROM claims WHERE {own})"
            f" AND (EXISTS ({later} AND later.at <= ?4) OR seq < ?5 AND ?5 - seq <= ?7 AND at >= ?6)",
            (*numbering, at - SETTLES_AFTER, seq, at, LARGEST_JUMP),
        )

    def _check_format(self, read_only: bool) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found == 0 and not read_only:
            with self._transaction():
                # Another process may have been faster.
                if self._db.execute("PRAGMA user_version").fetchone() == (0,):
                    for statement in TABLES.strip().split(";"):
                        self._db.execute(statement)
                    self._keep_checksums()
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
        elif found == 0:
            # Or its auditor is about to create it.
            raise Unreadable(str(self._path), "the ledger is empty", _REBUILT)
        elif found != FORMAT:
            problem = f"this ledger has format {found}, and this version of Penstock reads {FORMAT}"
            raise Unreadable(str(self._path), problem, _REBUILT)

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
            if getattr(error, "sqlite_errorcode", 0) == _SHORT_READ or str(error).startswith(_BROKEN):
                raise self._damaged(error) from error
            # The file is intact: it is locked, the disk is full, or another thread has closed it.
            raise Unavailable(f"the ledger {self._path}", str(error)) from error
        except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise Misconfigured(str(self._path), f"it cannot be made: {error.strerror}") from error

    def _damaged(self, error: Exception) -> Unreadable:
        return Unreadable(str(self._path), f"the ledger is damaged: {error}", _REBUILT)
